/* What the stand-in driver's handles point to. */
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define DRIVER __attribute__((visibility("hidden")))
#define MAX_DEVICES 64

/* CUresult of cuda.h */
enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_IMAGE = 200,
	INVALID_CONTEXT = 201,
	FILE_NOT_FOUND = 301,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
};

/* A module or a library, with the kernels that were asked of it so far. */
struct code {
	uint32_t mark;
	pthread_mutex_t lock;
	struct code *module; /* of a library, once it was asked for */
	struct kernel *kernels;
};

struct kernel {
	uint32_t mark;
	struct kernel *next;
	struct code *of;
	struct kernel *function; /* of a library's kernel, once it was asked for */
	char name[];
};

struct context {
	uint32_t mark;
	int device;
};

enum { CODE = 0x45444f43, KERNEL = 0x4e52454b, CONTEXT = 0x54585443 };

extern int device_count DRIVER;

DRIVER int load_image(void **out, const void *image);
DRIVER int load_file(void **out, const char *path);
DRIVER char *whole_file(const char *path, size_t *bytes);
