#include "tables.cuh"
extern "C" __global__ void siphash(const u64 *in, u64 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u64 a = 0x736f6d6570736575ull ^ in[0], b = 0x646f72616e646f6dull ^ in[1],
        c = 0x6c7967656e657261ull ^ in[0], d = 0x7465646279746573ull ^ in[1];
#define R                                                                                          \
    a += b;                                                                                        \
    b = ROL64(b, 13) ^ a;                                                                          \
    a = ROL64(a, 32);                                                                              \
    c += d;                                                                                        \
    d = ROL64(d, 16) ^ c;                                                                          \
    a += d;                                                                                        \
    d = ROL64(d, 21) ^ a;                                                                          \
    c += b;                                                                                        \
    b = ROL64(b, 17) ^ c;                                                                          \
    c = ROL64(c, 32);
    for (int t = 0; t < 8; t++) {
        u64 m = in[i * 8 + t];
        d ^= m;
        R R a ^= m;
    }
    c ^= 255;
    R R R R out[i] = a ^ b ^ c ^ d;
}
