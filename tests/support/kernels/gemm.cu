// A matrix product through shared-memory tiles, and one through the tensor cores.
constexpr int TILE = 16;

extern "C" __global__ void gemm_tile(float *out, const float *left, const float *right, int size)
{
    __shared__ float left_tile[TILE][TILE], right_tile[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int start = 0; start < size; start += TILE) {
        left_tile[threadIdx.y][threadIdx.x] = left[row * size + start + threadIdx.x];
        right_tile[threadIdx.y][threadIdx.x] = right[(start + threadIdx.y) * size + column];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; k++)
            sum += left_tile[threadIdx.y][k] * right_tile[k][threadIdx.x];
        __syncthreads();
    }
    out[row * size + column] = sum;
}

// PTX ISA, mma.m16n8k8 on half precision: 2, 1 and 2 registers of packed halves.
extern "C" __global__ void tensor_tile(unsigned *out, const unsigned *left, const unsigned *right,
                                       int steps)
{
    int lane = threadIdx.x % 32;
    unsigned low = 0, high = 0;
    for (int step = 0; step < steps; step++) {
        const unsigned *a = left + 64 * step + 2 * lane;
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3},{%4},{%0,%1};"
                     : "+r"(low), "+r"(high)
                     : "r"(a[0]), "r"(a[1]), "r"(right[32 * step + lane]));
    }
    out[2 * lane] = low;
    out[2 * lane + 1] = high;
}
