#define WAES
#include "tables.cuh"
extern "C" __global__ void aes_bits(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 s[16];
    for (int t = 0; t < 16; t++) s[t] = in[i * 16 + t];
    for (int r = 0; r < 10; r++) {
#pragma unroll
        for (int t = 0; t < 16; t++) s[t] = SB[s[t] & 255];
#pragma unroll
        for (int t = 0; t < 16; t += 4) {
            u32 a = s[t], b = s[t + 1], c = s[t + 2], d = s[t + 3], e = a ^ b ^ c ^ d;
#define X(v) (((v) << 1) ^ ((((v) >> 7) & 1) * 0x1b))
            s[t] = a ^ e ^ X(a ^ b);
            s[t + 1] = b ^ e ^ X(b ^ c);
            s[t + 2] = c ^ e ^ X(c ^ d);
            s[t + 3] = d ^ e ^ X(d ^ a);
        }
#pragma unroll
        for (int t = 0; t < 16; t++) s[t] ^= in[r * 16 + t];
    }
    for (int t = 0; t < 16; t++) out[i * 16 + t] = s[t];
}
