#define WBLAKE
#include "tables.cuh"

#define NAME blake3
#define ROUNDS 7
#include "blake.cuh"
