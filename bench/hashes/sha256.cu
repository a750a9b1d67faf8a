#define W256
#include "tables.cuh"
extern "C" __global__ void sha256(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 w[64];
    for (int t = 0; t < 16; t++) w[t] = __byte_perm(in[i * 16 + t], 0, 0x0123);
    for (int t = 16; t < 64; t++) {
        u32 a = w[t - 15], b = w[t - 2];
        w[t] = w[t - 16] + w[t - 7] + (ROR(a, 7) ^ ROR(a, 18) ^ (a >> 3)) +
               (ROR(b, 17) ^ ROR(b, 19) ^ (b >> 10));
    }
    u32 s[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    u32 a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
    for (int t = 0; t < 64; t++) {
        u32 x = h + (ROR(e, 6) ^ ROR(e, 11) ^ ROR(e, 25)) + ((e & f) ^ (~e & g)) + K256[t] + w[t];
        u32 y = (ROR(a, 2) ^ ROR(a, 13) ^ ROR(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + x;
        d = c;
        c = b;
        b = a;
        a = x + y;
    }
    u32 v[8] = {a, b, c, d, e, f, g, h};
    for (int t = 0; t < 8; t++) out[i * 8 + t] = s[t] + v[t];
}
