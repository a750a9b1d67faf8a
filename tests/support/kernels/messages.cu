// assert() keeps its file's name in the module, printf its format.
#include <cassert>
#include <cstdio>

extern "C" __global__ void checked(int *values, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    assert(i < count);
    if (values[i] < 0)
        printf("value %d is %d\n", i, values[i]);
    values[i] += 1;
}
