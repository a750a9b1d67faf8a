#include "tables.cuh"
#define Q(a, b, c, d)                                                                              \
    x[a] += x[b];                                                                                  \
    x[d] = ROL(x[d] ^ x[a], 16);                                                                   \
    x[c] += x[d];                                                                                  \
    x[b] = ROL(x[b] ^ x[c], 12);                                                                   \
    x[a] += x[b];                                                                                  \
    x[d] = ROL(x[d] ^ x[a], 8);                                                                    \
    x[c] += x[d];                                                                                  \
    x[b] = ROL(x[b] ^ x[c], 7);
extern "C" __global__ void chacha(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 x[16], s[16];
    s[0] = 0x61707865;
    s[1] = 0x3320646e;
    s[2] = 0x79622d32;
    s[3] = 0x6b206574;
    for (int t = 4; t < 16; t++) s[t] = in[i * 16 + t];
    for (int t = 0; t < 16; t++) x[t] = s[t];
    for (int r = 0; r < 10; r++) {
        Q(0, 4, 8, 12)
        Q(1, 5, 9, 13) Q(2, 6, 10, 14) Q(3, 7, 11, 15) Q(0, 5, 10, 15) Q(1, 6, 11, 12)
            Q(2, 7, 8, 13) Q(3, 4, 9, 14)
    }
    for (int t = 0; t < 16; t++) out[i * 16 + t] = x[t] + s[t];
}
