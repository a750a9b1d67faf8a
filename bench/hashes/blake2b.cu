#define WBLAKE
#include "tables.cuh"
extern "C" __global__ void blake2b(const u64 *in, u64 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u64 v[16], m[16];
    u64 s[8] = {0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull,
                0xa54ff53a5f1d36f1ull, 0x510e527fade682d1ull, 0x9b05688c2b3e6c1full,
                0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull};
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
        v[d] = ROR64(v[d] ^ v[a], 32);                                                             \
        v[c] += v[d];                                                                              \
        v[b] = ROR64(v[b] ^ v[c], 24);                                                             \
        v[a] += v[b] + m[y];                                                                       \
        v[d] = ROR64(v[d] ^ v[a], 16);                                                             \
        v[c] += v[d];                                                                              \
        v[b] = ROR64(v[b] ^ v[c], 63);                                                             \
    } while (0)

#pragma unroll
    for (int r = 0; r < 12; r++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            G(MIX[j][0], MIX[j][1], MIX[j][2], MIX[j][3], SIGMA[r % 10][2 * j],
              SIGMA[r % 10][2 * j + 1]);
    }

    for (int t = 0; t < 8; t++) out[i * 8 + t] = s[t] ^ v[t] ^ v[t + 8];
}
