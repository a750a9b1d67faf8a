#define WMD5
#include "tables.cuh"
extern "C" __global__ void md5(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const int S[16] = {7, 12, 17, 22, 5, 9, 14, 20, 4, 11, 16, 23, 6, 10, 15, 21};
    u32 w[16];
    for (int t = 0; t < 16; t++) w[t] = in[i * 16 + t];
    u32 a = 0x67452301, b = 0xefcdab89, c = 0x98badcfe, d = 0x10325476;
#pragma unroll
    for (int t = 0; t < 64; t++) {
        u32 f;
        int g;
        if (t < 16) {
            f = (b & c) | (~b & d);
            g = t;
        } else if (t < 32) {
            f = (d & b) | (~d & c);
            g = (5 * t + 1) % 16;
        } else if (t < 48) {
            f = b ^ c ^ d;
            g = (3 * t + 5) % 16;
        } else {
            f = c ^ (b | ~d);
            g = 7 * t % 16;
        }
        f += a + KMD5[t] + w[g];
        a = d;
        d = c;
        c = b;
        int s = S[t / 16 * 4 + t % 4];
        b += ROL(f, s);
    }
    out[i * 4] = a;
    out[i * 4 + 1] = b;
    out[i * 4 + 2] = c;
    out[i * 4 + 3] = d;
}
