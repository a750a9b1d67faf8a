#define WBLAKE
#include "tables.cuh"

#define NAME blake2b
#define ROUNDS 12
#define WIDE
#include "blake.cuh"
