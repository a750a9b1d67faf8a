// FIPS 202 section 3.3: Keccak-f[1600] over many independent states.
__constant__ unsigned long long round_words[24] = {
    0x0000000000000001, 0x0000000000008082, 0x800000000000808a, 0x8000000080008000,
    0x000000000000808b, 0x0000000080000001, 0x8000000080008081, 0x8000000000008009,
    0x000000000000008a, 0x0000000000000088, 0x0000000080008009, 0x000000008000000a,
    0x000000008000808b, 0x800000000000008b, 0x8000000000008089, 0x8000000000008003,
    0x8000000000008002, 0x8000000000000080, 0x000000000000800a, 0x800000008000000a,
    0x8000000080008081, 0x8000000000008080, 0x0000000080000001, 0x8000000080008008,
};

__device__ __forceinline__ unsigned long long turned(unsigned long long lane, int by)
{
    return by ? (lane << by) | (lane >> (64 - by)) : lane;
}

extern "C" __global__ void keccak_states(unsigned long long *states, int count)
{
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count)
        return;
    const int turns[25] = {0,  1,  62, 28, 27, 36, 44, 6,  55, 20, 3,  10, 43,
                           25, 39, 41, 45, 15, 21, 8,  18, 2,  61, 56, 14};
    unsigned long long lanes[25], moved[25], parity[5];
#pragma unroll
    for (int i = 0; i < 25; i++)
        lanes[i] = states[25 * index + i];
    for (int round = 0; round < 24; round++) {
#pragma unroll
        for (int x = 0; x < 5; x++)
            parity[x] = lanes[x] ^ lanes[x + 5] ^ lanes[x + 10] ^ lanes[x + 15] ^ lanes[x + 20];
#pragma unroll
        for (int x = 0; x < 5; x++)
#pragma unroll
            for (int y = 0; y < 5; y++)
                moved[y + 5 * ((2 * x + 3 * y) % 5)] =
                    turned(lanes[x + 5 * y] ^ parity[(x + 4) % 5] ^ turned(parity[(x + 1) % 5], 1),
                           turns[x + 5 * y]);
#pragma unroll
        for (int y = 0; y < 25; y += 5)
#pragma unroll
            for (int x = 0; x < 5; x++)
                lanes[y + x] = moved[y + x] ^ (~moved[y + (x + 1) % 5] & moved[y + (x + 2) % 5]);
        lanes[0] ^= round_words[round];
    }
#pragma unroll
    for (int i = 0; i < 25; i++)
        states[25 * index + i] = lanes[i];
}
