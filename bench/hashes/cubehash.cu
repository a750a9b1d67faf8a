#include "tables.cuh"
extern "C" __global__ void cubehash(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 x[32];
    for (int t = 0; t < 32; t++) x[t] = in[i * 32 + t];
    for (int r = 0; r < 16; r++) {
#pragma unroll
        for (int t = 0; t < 16; t++) {
            x[t + 16] += x[t];
            x[t] = ROL(x[t], 7);
        }
#pragma unroll
        for (int t = 0; t < 8; t++) {
            u32 q = x[t];
            x[t] = x[t + 8];
            x[t + 8] = q;
        }
#pragma unroll
        for (int t = 0; t < 16; t++) x[t] ^= x[t + 16];
#pragma unroll
        for (int t = 0; t < 16; t += 4) {
            u32 q = x[t + 16];
            x[t + 16] = x[t + 18];
            x[t + 18] = q;
            q = x[t + 17];
            x[t + 17] = x[t + 19];
            x[t + 19] = q;
        }
#pragma unroll
        for (int t = 0; t < 16; t++) {
            x[t + 16] += x[t];
            x[t] = ROL(x[t], 11);
        }
#pragma unroll
        for (int t = 0; t < 16; t++) x[t] ^= x[t + 16];
    }
    for (int t = 0; t < 32; t++) out[i * 32 + t] = x[t];
}
