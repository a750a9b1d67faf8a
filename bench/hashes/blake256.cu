#define WBLAKE
#define WPI
#include "tables.cuh"

#define NAME blake256
#define ROUNDS 14
#define FIRST
#include "blake.cuh"
