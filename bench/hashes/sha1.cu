#include "tables.cuh"
extern "C" __global__ void sha1(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 w[80];
    for (int t = 0; t < 16; t++) w[t] = in[i * 16 + t];
    for (int t = 16; t < 80; t++) w[t] = ROL(w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16], 1);
    u32 a = 0x67452301, b = 0xefcdab89, c = 0x98badcfe, d = 0x10325476, e = 0xc3d2e1f0;
    for (int t = 0; t < 80; t++) {
        u32 f, k;
        if (t < 20) {
            f = (b & c) | (~b & d);
            k = 0x5a827999;
        } else if (t < 40) {
            f = b ^ c ^ d;
            k = 0x6ed9eba1;
        } else if (t < 60) {
            f = (b & c) | (b & d) | (c & d);
            k = 0x8f1bbcdc;
        } else {
            f = b ^ c ^ d;
            k = 0xca62c1d6;
        }
        u32 x = ROL(a, 5) + f + e + k + w[t];
        e = d;
        d = c;
        c = ROL(b, 30);
        b = a;
        a = x;
    }
    out[i * 5] = a;
    out[i * 5 + 1] = b;
    out[i * 5 + 2] = c;
    out[i * 5 + 3] = d;
    out[i * 5 + 4] = e;
}
