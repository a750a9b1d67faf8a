// One compression of the BLAKE family. Who includes it says which: NAME, ROUNDS, WIDE for words of 64
// bits, FIRST for BLAKE itself and not what came after it. LOWER and UPPER make the state's halves,
// MIXED is the word that G adds, ENDED what is done to the state besides.
#ifdef FIRST
#define LOWER(t) s[t]
#define UPPER(t) PIC[t]
#define MIXED(x, y) (m[x] ^ PIC[y])
#define ENDED
#else
#define LOWER(t) (s[t] ^ (t ? 0 : 0x01010020))
#define UPPER(t) s[t]
#define MIXED(x, y) m[x]
#define ENDED v[12] ^= 64, v[14] = ~v[14]
#endif
#ifdef WIDE
#define WORD u64
#define ROTATE ROR64
#define INITIAL                                                                                    \
    {0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull, 0xa54ff53a5f1d36f1ull,   \
     0x510e527fade682d1ull, 0x9b05688c2b3e6c1full, 0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull}
#define R1 32
#define R2 24
#define R3 16
#define R4 63
#else
#define WORD u32
#define ROTATE ROR
#define INITIAL                                                                                    \
    {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,                                           \
     0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u}
#define R1 16
#define R2 12
#define R3 8
#define R4 7
#endif

#define G(a, b, c, d, x, y)                                                                        \
    do {                                                                                           \
        v[a] += v[b] + MIXED(x, y);                                                                \
        v[d] = ROTATE(v[d] ^ v[a], R1);                                                            \
        v[c] += v[d];                                                                              \
        v[b] = ROTATE(v[b] ^ v[c], R2);                                                            \
        v[a] += v[b] + MIXED(y, x);                                                                \
        v[d] = ROTATE(v[d] ^ v[a], R3);                                                            \
        v[c] += v[d];                                                                              \
        v[b] = ROTATE(v[b] ^ v[c], R4);                                                            \
    } while (0)

extern "C" __global__ void NAME(const WORD *in, WORD *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    WORD v[16], m[16];
    WORD s[8] = INITIAL;
    for (int t = 0; t < 16; t++) m[t] = in[i * 16 + t];
    for (int t = 0; t < 8; t++) {
        v[t] = LOWER(t);
        v[t + 8] = UPPER(t);
    }
    ENDED;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            G(MIX[j][0], MIX[j][1], MIX[j][2], MIX[j][3], SIGMA[r % 10][2 * j],
              SIGMA[r % 10][2 * j + 1]);
    }
    for (int t = 0; t < 8; t++) out[i * 8 + t] = s[t] ^ v[t] ^ v[t + 8];
}
