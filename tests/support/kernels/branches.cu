// A dense switch, which becomes a jump table, and a stack frame with a computed index.
extern "C" __global__ void dispatched(unsigned *values, const unsigned char *program, int length)
{
    unsigned held = values[threadIdx.x];
    for (int at = 0; at < length; at++)
        switch (program[at]) {
        case 0: held += 0x10325476u; break;
        case 1: held *= 33u; break;
        case 2: held = ~held; break;
        case 3: held ^= held >> 15; break;
        case 4: held = __popc(held); break;
        case 5: held = __brev(held); break;
        case 6: held = __clz(held) + at; break;
        case 7: held = held / (1u + at); break;
        case 8: held = held % 1021u; break;
        case 9: held -= values[(threadIdx.x + at) % blockDim.x]; break;
        case 10: held = held << (at % 32); break;
        case 11: held = min(held, 77777u); break;
        default: __syncwarp();
        }
    values[threadIdx.x] = held;
}

extern "C" __global__ void on_the_stack(int *out, const int *in, int count)
{
    int sorted[48];
    for (int i = 0; i < 48; i++)
        sorted[i] = in[i % count];
    for (int i = 0; i < count; i++) {
        int from = in[i] % 48, to = in[i + 1] % 48, kept = sorted[from];
        sorted[from] = sorted[to];
        sorted[to] = kept;
    }
    for (int i = 0; i < count; i++)
        out[i] = sorted[in[i] % 48];
}
