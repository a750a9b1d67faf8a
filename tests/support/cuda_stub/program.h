/* What the program's commands share: names for handles and images, and the driver's functions. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define WORDS 16

/* A handle or an image, by the name that the script gave it. */
struct named {
	char name[48];
	void *value;
	size_t bytes;  /* of an image */
	size_t mapped; /* an image's whole mapping, from ``base``; 0 if it is in the heap */
	void *base;
	int is_graph;
};

/* A command's own state: a script can run in several threads. */
struct answer {
	char text[128];
};

typedef long (*call_t)(void *, void *, void *, void *, void *, void *, void *, void *, void *,
                       void *, void *);

struct named *find(const char *name);
struct named *set(const char *name, void *value);
void *value_of(const char *name);

/* ``cuX``, ``proc:cuX`` through cuGetProcAddress, ``CUDART_INTERFACE[1]``. */
call_t function(const char *name);
int fail(struct answer *answer, const char *what, long result);
int told(struct answer *answer, const void *value);

/* 0, or -1 with ``answer`` saying why; 1: no command of theirs. */
int image_command(int count, char **words, struct answer *answer);
int context_command(int count, char **words, struct answer *answer);
int launch_command(int count, char **words, struct answer *answer);
