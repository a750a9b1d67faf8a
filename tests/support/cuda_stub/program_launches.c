/* Launches of the script.
 *
 *   launch HOW F TIMES [STREAM]    HOW: cuLaunchKernel, …_ptsz, cuLaunchKernelEx, …; cuGraphLaunch
 *   graph G F ...                  a graph of kernel nodes, instantiated
 *   sequence TIMES SLEEP PATTERN [TIMES SLEEP PATTERN]
 *                                  PATTERN, as in a,b,c*3, is launched TIMES times on a stream of its
 *                                  own, SLEEP microseconds between; the second one in a second thread,
 *                                  and neither goes on before both were there once.
 *                                  Names of graphs in it are launched as such.
 *   time TIMES HOW F               answers picoseconds a call
 *
 * Grid 64×2×1, block 128×4×1, unless "shape GX GY GZ BX BY BZ" says otherwise.
 */
#define _GNU_SOURCE
#include "program.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ITEMS 64

/* CUlaunchConfig of cuda.h */
struct config {
	uint32_t grid[3], block[3], shared;
	void *stream, *attributes;
	uint32_t attribute_count;
};

static uint32_t shape[6] = {64, 2, 1, 128, 4, 1};

static inline int launched(call_t by, int how, void *kernel, void *stream)
{
#define N(i) (void *)(uintptr_t)shape[i]
	if (how == 'g')
		return (int)by(kernel, stream, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	if (how == 'x') {
		struct config config = {{shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, 0,
		                        stream, NULL, 0};
		return (int)by(&config, kernel, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	}
	return (int)by(kernel, N(0), N(1), N(2), N(3), N(4), N(5), 0, stream, 0, 0);
}

static int kind_of(const char *name)
{
	return strstr(name, "Graph") ? 'g' : strstr(name, "KernelEx") ? 'x' : 'k';
}

struct item {
	void *value;
	int is_graph;
	long times;
};

struct sequence {
	long times, sleep;
	struct item items[ITEMS];
	int count, result;
	void *stream;
	call_t kernel, graph;
	pthread_barrier_t *both;
};

static int read_sequence(struct sequence *sequence, char **words, struct answer *answer)
{
	char *rest;
	sequence->times = atol(words[0]);
	sequence->sleep = atol(words[1]);
	for (char *word = strtok_r(words[2], ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
		char *star = strchr(word, '*');
		if (star)
			*star++ = 0;
		struct named *named = find(word);
		if (!named || sequence->count == ITEMS)
			return fail(answer, word, -2);
		sequence->items[sequence->count++] =
			(struct item){named->value, named->is_graph, star ? atol(star) : 1};
	}
	sequence->kernel = function("cuLaunchKernel");
	sequence->graph = function("cuGraphLaunch");
	function("cuStreamCreate")(&sequence->stream, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	return 0;
}

static void *run_sequence(void *argument)
{
	struct sequence *sequence = argument;
	for (long i = 0; i < sequence->times && !sequence->result; i++) {
		for (int k = 0; k < sequence->count; k++) {
			struct item *item = &sequence->items[k];
			for (long n = 0; n < item->times; n++)
				sequence->result |=
					launched(item->is_graph ? sequence->graph : sequence->kernel,
				                 item->is_graph ? 'g' : 'k', item->value, sequence->stream);
		}
		if (!i && sequence->both)
			pthread_barrier_wait(sequence->both);
		if (sequence->sleep)
			usleep((useconds_t)sequence->sleep);
	}
	return NULL;
}

static int run_sequences(int count, char **words, struct answer *answer)
{
	struct sequence sequences[2] = {{0}};
	pthread_t beside;
	pthread_barrier_t both;
	if (read_sequence(&sequences[0], words, answer) ||
	    (count == 6 && read_sequence(&sequences[1], words + 3, answer)))
		return -1;
	if (count == 6 && sequences[0].times > 0 && sequences[1].times > 0) {
		pthread_barrier_init(&both, NULL, 2);
		sequences[0].both = sequences[1].both = &both;
	}
	if (count == 6)
		pthread_create(&beside, NULL, run_sequence, &sequences[1]);
	run_sequence(&sequences[0]);
	if (count == 6)
		pthread_join(beside, NULL);
	int result = sequences[0].result | sequences[1].result;
	return result ? fail(answer, "sequence", result) : told(answer, 0);
}

static int make_graph(int count, char **words, struct answer *answer)
{
	void *graph = NULL, *node = NULL, *instance = NULL;
	int result = (int)function("cuGraphCreate")(&graph, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	for (int i = 2; i < count; i++) {
		/* CUDA_KERNEL_NODE_PARAMS_v2: function, grid, block, shared bytes, arguments, … */
		struct {
			void *function;
			uint32_t grid[3], block[3], shared;
			void *rest[4];
		} node_parameters = {value_of(words[i]), {1, 1, 1}, {32, 1, 1}, 0, {0}};
		result |= (int)function("cuGraphAddKernelNode_v2")(&node, graph, 0, 0, &node_parameters, 0, 0,
		                                                   0, 0, 0, 0);
	}
	result |= (int)function("cuGraphInstantiateWithFlags")(&instance, graph, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	if (result)
		return fail(answer, words[0], result);
	set(words[1], instance)->is_graph = 1;
	return told(answer, instance);
}

static int64_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000L + time.tv_nsec;
}

static int repeated(long times, const char *how, const char *name, void *stream,
                    struct answer *answer, int timed)
{
	call_t by = function(how);
	int kind = kind_of(how), result = 0;
	void *kernel = value_of(name);
	int64_t begun = now();
	for (long i = 0; i < times; i++)
		result |= launched(by, kind, kernel, stream);
	int64_t spent = now() - begun;
	if (result)
		return fail(answer, how, result);
	return told(answer, timed && times ? (void *)(spent * 1000 / times) : 0);
}

int launch_command(int count, char **words, struct answer *answer)
{
	const char *what = words[0];
	if (!strcmp(what, "launch") && (count == 4 || count == 5))
		return repeated(atol(words[3]), words[1], words[2],
		                count == 5 ? (void *)strtoull(words[4], NULL, 0) : NULL, answer, 0);
	if (!strcmp(what, "time") && count == 4)
		return repeated(atol(words[1]), words[2], words[3], NULL, answer, 1);
	if (!strcmp(what, "graph") && count > 2)
		return make_graph(count, words, answer);
	if (!strcmp(what, "sequence") && (count == 4 || count == 7))
		return run_sequences(count - 1, words + 1, answer);
	if (strcmp(what, "shape") || count != 7)
		return 1;
	for (int i = 0; i < 6; i++)
		shape[i] = (uint32_t)atol(words[i + 1]);
	return told(answer, 0);
}
