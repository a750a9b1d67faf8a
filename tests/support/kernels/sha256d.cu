// SHA-256 of the SHA-256 of blocks of 80 bytes, each padded as FIPS 180-4 section 5.1.1 has it.
#include "sha256.cuh"

constexpr int WORDS = 20;

__device__ void sha256_begin(unsigned *state)
{
    const unsigned initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    for (int i = 0; i < 8; i++)
        state[i] = initial[i];
}

extern "C" __global__ void sha256d_blocks(unsigned *digests, const unsigned *blocks, int count)
{
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count)
        return;
    const unsigned *block = blocks + WORDS * index;
    unsigned state[8], again[8], padded[16] = {};
    sha256_begin(state);
    sha256_compress(state, block);
    for (int i = 16; i < WORDS; i++)
        padded[i - 16] = block[i];
    padded[WORDS - 16] = 0x80000000;
    padded[15] = 32 * WORDS;
    sha256_compress(state, padded);

    for (int i = 0; i < 16; i++)
        padded[i] = i < 8 ? state[i] : 0;
    padded[8] = 0x80000000;
    padded[15] = 32 * 8;
    sha256_begin(again);
    sha256_compress(again, padded);
    for (int i = 0; i < 8; i++)
        digests[8 * index + i] = again[i];
}
