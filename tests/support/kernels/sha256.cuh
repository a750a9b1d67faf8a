// The tables and rounds of FIPS 180-4, as the standard writes them.
#pragma once

__constant__ unsigned round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

__device__ __forceinline__ unsigned rotated(unsigned word, int by)
{
    return (word >> by) | (word << (32 - by));
}

__device__ __forceinline__ void sha256_compress(unsigned *state, const unsigned *block)
{
    unsigned schedule[64], now[8];
#pragma unroll
    for (int t = 0; t < 16; t++)
        schedule[t] = block[t];
#pragma unroll
    for (int t = 16; t < 64; t++) {
        unsigned far = schedule[t - 15], near = schedule[t - 2];
        schedule[t] = schedule[t - 16] + schedule[t - 7] +
                      (rotated(far, 7) ^ rotated(far, 18) ^ (far >> 3)) +
                      (rotated(near, 17) ^ rotated(near, 19) ^ (near >> 10));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        now[i] = state[i];
#pragma unroll
    for (int t = 0; t < 64; t++) {
        unsigned a = now[0], e = now[4];
        unsigned first = now[7] + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +
                         ((e & now[5]) ^ (~e & now[6])) + round_constants[t] + schedule[t];
        unsigned second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) +
                          ((a & now[1]) ^ (a & now[2]) ^ (now[1] & now[2]));
        for (int i = 7; i > 0; i--)
            now[i] = now[i - 1];
        now[4] += first;
        now[0] = first + second;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        state[i] += now[i];
}
