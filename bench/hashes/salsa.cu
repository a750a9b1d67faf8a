#include "tables.cuh"
#define QS(a, b, c, d)                                                                             \
    x[b] ^= ROL(x[a] + x[d], 7);                                                                   \
    x[c] ^= ROL(x[b] + x[a], 9);                                                                   \
    x[d] ^= ROL(x[c] + x[b], 13);                                                                  \
    x[a] ^= ROL(x[d] + x[c], 18);
extern "C" __global__ void salsa(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 x[16];
    for (int t = 0; t < 16; t++) x[t] = in[i * 16 + t];
    for (int r = 0; r < 4; r++) {
        QS(0, 4, 8, 12)
        QS(5, 9, 13, 1) QS(10, 14, 2, 6) QS(15, 3, 7, 11) QS(0, 1, 2, 3) QS(5, 6, 7, 4)
            QS(10, 11, 8, 9) QS(15, 12, 13, 14)
    }
    for (int t = 0; t < 16; t++) out[i * 16 + t] = x[t] + in[i * 16 + t];
}
