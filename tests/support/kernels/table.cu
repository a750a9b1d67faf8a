// A module that is as large as the table that it looks up in.
#ifndef TABLE_BYTES
#define TABLE_BYTES 4096
#endif

__device__ unsigned char table[TABLE_BYTES] = {1};

extern "C" __global__ void looked_up(unsigned char *out, const unsigned *indices, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        out[i] = table[indices[i] % TABLE_BYTES];
}
