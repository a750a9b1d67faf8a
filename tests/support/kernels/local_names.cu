// Symbols that are only of this file: their names are made from its path.
static __device__ int seen;
namespace {
__constant__ int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ __noinline__ int looked_up(int at) { return table[at & 7]; }
__global__ void counted(int *out)
{
    out[threadIdx.x] = looked_up(out[threadIdx.x]);
    atomicAdd(&seen, 1);
}
} // namespace

// Keeps the kernel above in the module.
extern "C" void start(int *out) { counted<<<1, 32>>>(out); }
