#define WBLAKE
#include "tables.cuh"

#define NAME blake2s
#define ROUNDS 10
#include "blake.cuh"
