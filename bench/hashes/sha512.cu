#define W512
#include "tables.cuh"
extern "C" __global__ void sha512(const u64 *in, u64 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u64 w[80];
    for (int t = 0; t < 16; t++) w[t] = in[i * 16 + t];
    for (int t = 16; t < 80; t++) {
        u64 a = w[t - 15], b = w[t - 2];
        w[t] = w[t - 16] + w[t - 7] + (ROR64(a, 1) ^ ROR64(a, 8) ^ (a >> 7)) +
               (ROR64(b, 19) ^ ROR64(b, 61) ^ (b >> 6));
    }
    u64 s[8] = {0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull,
                0xa54ff53a5f1d36f1ull, 0x510e527fade682d1ull, 0x9b05688c2b3e6c1full,
                0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull};
    u64 a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
    for (int t = 0; t < 80; t++) {
        u64 x = h + (ROR64(e, 14) ^ ROR64(e, 18) ^ ROR64(e, 41)) + ((e & f) ^ (~e & g)) + K512[t] +
                w[t];
        u64 y = (ROR64(a, 28) ^ ROR64(a, 34) ^ ROR64(a, 39)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + x;
        d = c;
        c = b;
        b = a;
        a = x + y;
    }
    u64 v[8] = {a, b, c, d, e, f, g, h};
    for (int t = 0; t < 8; t++) out[i * 8 + t] = s[t] + v[t];
}
