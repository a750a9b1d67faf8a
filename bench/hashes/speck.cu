#include "tables.cuh"
extern "C" __global__ void speck(const u64 *in, u64 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u64 x = in[i * 2], y = in[i * 2 + 1], k = in[0], l = in[1];
    for (int r = 0; r < 32; r++) {
        x = (ROR64(x, 8) + y) ^ k;
        y = ROL64(y, 3) ^ x;
        l = (ROR64(l, 8) + k) ^ r;
        k = ROL64(k, 3) ^ l;
    }
    out[i * 2] = x;
    out[i * 2 + 1] = y;
}
