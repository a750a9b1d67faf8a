// What calls.cu calls, through a table of function pointers.
__constant__ float weights[16] = {1.0f, 0.5f, 0.25f, 0.125f, 3.0f, 1.5f, 0.75f, 0.375f,
                                  5.0f, 2.5f, 1.25f, 0.625f, 7.0f, 3.5f, 1.75f, 0.875f};

__device__ __noinline__ float plain(float value, int at) { return value * weights[at % 16]; }
__device__ __noinline__ float squared(float value, int at) { return value * value * weights[at % 16]; }
__device__ float (*const ways[2])(float, int) = {plain, squared};

__device__ float weighed(const float *row, int length)
{
    float sum = 0;
    for (int i = 0; i < length; i++)
        sum += ways[i % 2](row[i], i);
    return sum;
}
