#include "tables.cuh"
extern "C" __global__ void threefish(const u64 *in, u64 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u64 x[8];
    for (int t = 0; t < 8; t++) x[t] = in[i * 8 + t];
    const int R[8][4] = {{46, 36, 19, 37}, {33, 27, 14, 42}, {17, 49, 36, 39}, {44, 9, 54, 56},
                         {39, 30, 34, 24}, {13, 50, 10, 17}, {25, 29, 39, 43}, {8, 35, 56, 22}};
#pragma unroll 8
    for (int r = 0; r < 72; r++) {
        if (r % 4 == 0)
#pragma unroll
            for (int t = 0; t < 8; t++) x[t] += in[t] + 0x1BD11BDAA9FC1A22ull * t;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            x[2 * t] += x[2 * t + 1];
            x[2 * t + 1] = ROL64(x[2 * t + 1], R[r % 8][t]) ^ x[2 * t];
        }
        u64 a = x[0], b = x[1], c = x[3], d = x[5], e = x[7];
        x[0] = x[2];
        x[2] = x[4];
        x[4] = x[6];
        x[6] = a;
        x[3] = e;
        x[7] = c;
        x[1] = b;
        x[5] = d;
    }
    for (int t = 0; t < 8; t++) out[i * 8 + t] = x[t];
}
