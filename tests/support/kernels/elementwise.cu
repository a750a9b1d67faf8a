// What most kernels of a framework look like: one line of arithmetic for each element.
extern "C" __global__ void scale_and_add(float *out, const float *in, float factor, int count)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        out[i] = factor * in[i] + out[i];
}

extern "C" __global__ void soft_gate(float *out, const float *in, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        out[i] = in[i] / (1.0f + expf(-in[i]));
}

template <typename Element>
__global__ void clipped(Element *values, Element low, Element high, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        values[i] = values[i] < low ? low : values[i] > high ? high : values[i];
}

template __global__ void clipped<float>(float *, float, float, int);
template __global__ void clipped<double>(double *, double, double, int);
template __global__ void clipped<int>(int *, int, int, int);
