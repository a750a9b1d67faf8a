#define WBLAKE
#include "tables.cuh"
extern "C" __global__ void blake2s(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 v[16], m[16];
    u32 s[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    for (int t = 0; t < 16; t++) m[t] = in[i * 16 + t];
    for (int t = 0; t < 8; t++) {
        v[t] = s[t] ^ (t ? 0 : 0x01010020);
        v[t + 8] = s[t];
    }
    v[12] ^= 64;
    v[14] = ~v[14];
#define G(a, b, c, d, x, y)                                                                        \
    do {                                                                                           \
        v[a] += v[b] + m[x];                                                                       \
        v[d] = ROR(v[d] ^ v[a], 16);                                                               \
        v[c] += v[d];                                                                              \
        v[b] = ROR(v[b] ^ v[c], 12);                                                               \
        v[a] += v[b] + m[y];                                                                       \
        v[d] = ROR(v[d] ^ v[a], 8);                                                                \
        v[c] += v[d];                                                                              \
        v[b] = ROR(v[b] ^ v[c], 7);                                                                \
    } while (0)

#pragma unroll
    for (int r = 0; r < 10; r++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            G(MIX[j][0], MIX[j][1], MIX[j][2], MIX[j][3], SIGMA[r % 10][2 * j],
              SIGMA[r % 10][2 * j + 1]);
    }

    for (int t = 0; t < 8; t++) out[i * 8 + t] = s[t] ^ v[t] ^ v[t + 8];
}
