#define WAES
#include "tables.cuh"
extern "C" __global__ void aes_t(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 s0 = in[i * 4], s1 = in[i * 4 + 1], s2 = in[i * 4 + 2], s3 = in[i * 4 + 3];
    for (int r = 0; r < 10; r++) {
        u32 a = T0[s0 & 255] ^ ROL(T0[s1 >> 8 & 255], 8) ^ ROL(T0[s2 >> 16 & 255], 16) ^
                ROL(T0[s3 >> 24], 24) ^ in[r];
        u32 b = T0[s1 & 255] ^ ROL(T0[s2 >> 8 & 255], 8) ^ ROL(T0[s3 >> 16 & 255], 16) ^
                ROL(T0[s0 >> 24], 24) ^ in[r + 1];
        u32 c = T0[s2 & 255] ^ ROL(T0[s3 >> 8 & 255], 8) ^ ROL(T0[s0 >> 16 & 255], 16) ^
                ROL(T0[s1 >> 24], 24) ^ in[r + 2];
        u32 d = T0[s3 & 255] ^ ROL(T0[s0 >> 8 & 255], 8) ^ ROL(T0[s1 >> 16 & 255], 16) ^
                ROL(T0[s2 >> 24], 24) ^ in[r + 3];
        s0 = a;
        s1 = b;
        s2 = c;
        s3 = d;
    }
    out[i * 4] = s0;
    out[i * 4 + 1] = s1;
    out[i * 4 + 2] = s2;
    out[i * 4 + 3] = s3;
}
