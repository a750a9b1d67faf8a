#define WKEC
#include "tables.cuh"
extern "C" __global__ void keccakf(const u64 *in, u64 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const int R[24] = {1,  3,  6,  10, 15, 21, 28, 36, 45, 55, 2,  14,
                       27, 41, 56, 8,  25, 43, 62, 18, 39, 61, 20, 44};
    const int P[24] = {10, 7,  11, 17, 18, 3, 5,  16, 8,  21, 24, 4,
                       15, 23, 19, 13, 12, 2, 20, 14, 22, 9,  6,  1};
    u64 s[25], b[5];
    for (int t = 0; t < 25; t++) s[t] = in[i * 25 + t];
    for (int r = 0; r < 24; r++) {
#pragma unroll
        for (int x = 0; x < 5; x++) b[x] = s[x] ^ s[x + 5] ^ s[x + 10] ^ s[x + 15] ^ s[x + 20];
#pragma unroll
        for (int x = 0; x < 5; x++) {
            u64 t = b[(x + 4) % 5] ^ ROL64(b[(x + 1) % 5], 1);
#pragma unroll
            for (int y = 0; y < 25; y += 5) s[y + x] ^= t;
        }
        u64 t = s[1];
#pragma unroll
        for (int x = 0; x < 24; x++) {
            int j = P[x];
            u64 q = s[j];
            s[j] = ROL64(t, R[x]);
            t = q;
        }
#pragma unroll
        for (int y = 0; y < 25; y += 5) {
#pragma unroll
            for (int x = 0; x < 5; x++) b[x] = s[y + x];
#pragma unroll
            for (int x = 0; x < 5; x++) s[y + x] = b[x] ^ (~b[(x + 1) % 5] & b[(x + 2) % 5]);
        }
        s[0] ^= RC[r];
    }
    for (int t = 0; t < 25; t++) out[i * 25 + t] = s[t];
}
