#include "tables.cuh"
extern "C" __global__ void sm3(const u32 *in, u32 *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    u32 w[68];
    for (int t = 0; t < 16; t++) w[t] = in[i * 16 + t];
    for (int t = 16; t < 68; t++) {
        u32 q = w[t - 16] ^ w[t - 9] ^ ROL(w[t - 3], 15);
        w[t] = q ^ ROL(q, 15) ^ ROL(q, 23) ^ ROL(w[t - 13], 7) ^ w[t - 6];
    }
    u32 a = 0x7380166f, b = 0x4914b2b9, c = 0x172442d7, d = 0xda8a0600, e = 0xa96f30bc,
        f = 0x163138aa, g = 0xe38dee4d, h = 0xb0fb0e4e;
    for (int t = 0; t < 64; t++) {
        u32 k = t < 16 ? 0x79cc4519 : 0x7a879d8a;
        int r = t % 32;
        u32 kk = r ? ROL(k, r) : k;
        u32 q = ROL(a, 12) + e + kk;
        q = ROL(q, 7);
        u32 s = q ^ ROL(a, 12);
        u32 ff = t < 16 ? a ^ b ^ c : (a & b) | (a & c) | (b & c);
        u32 gg = t < 16 ? e ^ f ^ g : (e & f) | (~e & g);
        u32 x = ff + d + s + (w[t] ^ w[t + 4]);
        u32 y = gg + h + q + w[t];
        d = c;
        c = ROL(b, 9);
        b = a;
        a = x;
        h = g;
        g = ROL(f, 19);
        f = e;
        e = y ^ ROL(y, 9) ^ ROL(y, 17);
    }
    out[i * 8] = a;
    out[i * 8 + 1] = b;
    out[i * 8 + 2] = c;
    out[i * 8 + 3] = d;
    out[i * 8 + 4] = e;
    out[i * 8 + 5] = f;
    out[i * 8 + 6] = g;
    out[i * 8 + 7] = h;
}
