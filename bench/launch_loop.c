/* Calls a function of a CUDA driver library as fast as it can: launch_loop LIBRARY
 *
 *   FUNCTION TIMES [HANDLES]   answers nanoseconds of CPU a call; handles so many, in turns
 *
 * Results are not looked at: a driver without a GPU refuses, after the entry that is timed.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

typedef long (*call_t)(void *, void *, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                       uintptr_t, void *, void *, void *);

static char handles[1 << 20];

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

int main(int count, char **words)
{
	/* CUlaunchConfig of cuda.h: grid, block, shared memory, then the stream. */
	uint32_t config[16] = {64, 2, 1, 128, 4, 1};
	char name[64];
	long times, kernels;
	char line[256];
	void *library = count == 2 ? dlopen(words[1], RTLD_NOW) : NULL;
	if (!library)
		return fprintf(stderr, "launch_loop: %s\n", count == 2 ? dlerror() : "LIBRARY"), 2;
	call_t initialize = (call_t)dlsym(library, "cuInit");
	if (initialize)
		initialize(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	while (fgets(line, sizeof line, stdin)) {
		kernels = 1;
		if (sscanf(line, "%63s %ld %ld", name, &times, &kernels) < 2 || kernels < 1 ||
		    kernels > (long)sizeof handles)
			return 2;
		call_t call = (call_t)dlsym(library, name);
		if (!call)
			return fprintf(stderr, "launch_loop: no %s\n", name), 2;
		int by_config = strstr(name, "KernelEx") != NULL;
		double begun = now();
		for (long i = 0, which = 0; i < times; i++) {
			void *handle = handles + which;
			which = which + 1 < kernels ? which + 1 : 0;
			call(by_config ? (void *)config : handle, by_config ? handle : (void *)64, 2, 1, 128, 4, 1,
			     0, NULL, NULL, NULL);
		}
		printf("%.3f\n", (now() - begun) / (double)times);
		fflush(stdout);
	}
	return 0;
}
