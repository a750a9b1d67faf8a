#include "tables.cuh"
extern "C" __global__ void ripemd(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 w[16];
    for (int t = 0; t < 16; t++) w[t] = in[i * 16 + t];
    u32 a = 0x67452301, b = 0xefcdab89, c = 0x98badcfe, d = 0x10325476, e = 0xc3d2e1f0;
    const int S[16] = {11, 14, 15, 12, 5, 8, 7, 9, 11, 13, 14, 15, 6, 7, 9, 8};
#pragma unroll
    for (int t = 0; t < 80; t++) {
        u32 f, k;
        int q = t / 16;
        if (q == 0) {
            f = b ^ c ^ d;
            k = 0;
        } else if (q == 1) {
            f = (b & c) | (~b & d);
            k = 0x5a827999;
        } else if (q == 2) {
            f = (b | ~c) ^ d;
            k = 0x6ed9eba1;
        } else if (q == 3) {
            f = (b & d) | (c & ~d);
            k = 0x8f1bbcdc;
        } else {
            f = b ^ (c | ~d);
            k = 0xa953fd4e;
        }
        u32 x = a + f + w[(t * 7 + q) % 16] + k;
        x = ROL(x, S[t % 16]) + e;
        a = e;
        e = d;
        d = ROL(c, 10);
        c = b;
        b = x;
    }
    out[i * 5] = a;
    out[i * 5 + 1] = b;
    out[i * 5 + 2] = c;
    out[i * 5 + 3] = d;
    out[i * 5 + 4] = e;
}
