// FIPS 180-4 section 6.2.2: the compression function over many independent blocks.
#include "sha256.cuh"

extern "C" __global__ void sha256_blocks(unsigned *states, const unsigned *blocks, int count)
{
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count)
        sha256_compress(states + 8 * index, blocks + 16 * index);
}
