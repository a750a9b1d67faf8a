/* A CUDA program that does what a script says: cuda_program LIBRARY [COMMAND ...]
 *
 * LIBRARY is opened with dlopen; "linked": the program was linked with it; "-": none yet. A COMMAND
 * is words parted by blanks, several of them parted by " ; ". The last may be "-": then each line of
 * the input is run and answered with "ok VALUE" or "error WHAT RESULT". Without it the program ends
 * after the last command, with status 1 at the first that fails.
 *
 *   library PATH             opens another library, whose functions are called from now on
 *   close-library            closes it
 *   device PATH              opens a file and keeps it open
 *   sleep MICROSECONDS       say WORD ...        wait (for ever)
 *   exit STATUS              _exit, at once
 *   fork COMMANDS            a child runs them and ends; answers its pid
 *   thread COMMANDS          a thread runs them; answers its id
 *   join                     waits for all threads
 *
 * Images, modules and linkers: program_images.c. Contexts: program_contexts.c. Launches:
 * program_launches.c.
 */
#define _GNU_SOURCE
#include "program.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAMES 4096
#define THREADS 64

static struct named names[NAMES];
static int named_count;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static void *library;
static pthread_t threads[THREADS];
static int thread_count;

struct named *find(const char *name)
{
	struct named *found = NULL;
	pthread_mutex_lock(&names_lock);
	for (int i = 0; i < named_count && !found; i++)
		if (!strcmp(names[i].name, name))
			found = &names[i];
	pthread_mutex_unlock(&names_lock);
	return found;
}

struct named *set(const char *name, void *value)
{
	struct named *entry = find(name);
	pthread_mutex_lock(&names_lock);
	if (!entry) {
		if (named_count == NAMES)
			abort();
		entry = &names[named_count++];
		snprintf(entry->name, sizeof entry->name, "%s", name);
	}
	entry->value = value;
	pthread_mutex_unlock(&names_lock);
	return entry;
}

void *value_of(const char *name)
{
	struct named *entry = find(name);
	return entry ? entry->value : NULL;
}

int fail(struct answer *answer, const char *what, long result)
{
	snprintf(answer->text, sizeof answer->text, "%s %ld", what, result);
	return -1;
}

int told(struct answer *answer, const void *value)
{
	snprintf(answer->text, sizeof answer->text, "%ju", (uintmax_t)(uintptr_t)value);
	return 0;
}

static long missing(void *a, void *b, void *c, void *d, void *e, void *f, void *g, void *h, void *i,
                    void *j, void *k)
{
	(void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h, (void)i, (void)j, (void)k;
	return -1;
}

static const unsigned char runtime_table[] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                              0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
static const unsigned char create_table[] = {0x0c, 0xa5, 0x0b, 0x8c, 0x10, 0x04, 0x92, 0x9a,
                                             0x89, 0xa7, 0xd0, 0xdf, 0x10, 0xe7, 0x72, 0x86};

static call_t slot(const unsigned char *table, int number)
{
	void **slots = NULL;
	call_t get = function("cuGetExportTable");
	if (get(&slots, (void *)table, 0, 0, 0, 0, 0, 0, 0, 0, 0) || !slots)
		return missing;
	return (call_t)slots[number];
}

call_t function(const char *name)
{
	int number;
	void *address = NULL;
	if (sscanf(name, "CUDART_INTERFACE[%d]", &number) == 1)
		return slot(runtime_table, number);
	if (sscanf(name, "CTX_CREATE_BYPASS[%d]", &number) == 1)
		return slot(create_table, number);
	if (!strncmp(name, "proc:", 5)) {
		int status;
		function("cuGetProcAddress_v2")((void *)(name + 5), &address, (void *)12020, 0, &status,
		                                0, 0, 0, 0, 0, 0);
	} else if (library) {
		address = dlsym(library, name);
	}
	return address ? (call_t)address : missing;
}

static int open_library(const char *path, struct answer *answer)
{
	void *opened = strcmp(path, "linked") ? dlopen(path, RTLD_NOW | RTLD_LOCAL)
	                                      : dlopen(NULL, RTLD_NOW);
	if (!opened) {
		fprintf(stderr, "%s\n", dlerror());
		return fail(answer, "dlopen", 0);
	}
	library = opened;
	return told(answer, (void *)function("cuInit")(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
}

static int run_line(const char *line, struct answer *answer);

static void *run_thread(void *commands)
{
	struct answer answer;
	if (run_line(commands, &answer))
		fprintf(stderr, "thread: %s\n", answer.text);
	free(commands);
	return NULL;
}

static int control(int count, char **words, struct answer *answer)
{
	const char *what = words[0], *first = count > 1 ? words[1] : "0";
	if (!strcmp(what, "library"))
		return open_library(first, answer);
	if (!strcmp(what, "close-library")) {
		long result = dlclose(library);
		library = NULL;
		return told(answer, (void *)result);
	}
	if (!strcmp(what, "device")) {
		long descriptor = open(first, O_RDWR);
		return descriptor < 0 ? fail(answer, "open", errno) : told(answer, (void *)descriptor);
	}
	if (!strcmp(what, "sleep"))
		return usleep((useconds_t)atol(first)), told(answer, 0);
	if (!strcmp(what, "say")) {
		for (int i = 1; i < count; i++)
			printf("%s%c", words[i], i + 1 < count ? ' ' : '\n');
		return fflush(stdout), told(answer, 0);
	}
	if (!strcmp(what, "wait"))
		for (;;)
			pause();
	if (!strcmp(what, "exit"))
		_exit(atoi(first));
	if (!strcmp(what, "join")) {
		while (thread_count)
			pthread_join(threads[--thread_count], NULL);
		return told(answer, 0);
	}
	return 1;
}

static int run_command(char *command, struct answer *answer)
{
	char *words[WORDS], *rest;
	int count = 0;
	for (char *word = strtok_r(command, " \t\n", &rest); word && count < WORDS;
	     word = strtok_r(NULL, " \t\n", &rest))
		words[count++] = word;
	if (!count)
		return told(answer, 0);
	int (*const kinds[])(int, char **, struct answer *) = {control, image_command, context_command,
	                                                       launch_command};
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		int done = kinds[i](count, words, answer);
		if (done <= 0)
			return done;
	}
	return fail(answer, words[0], -2);
}

/* Commands that begin with fork or thread take the rest of the line. */
static int run_line(const char *line, struct answer *answer)
{
	if (!strncmp(line, "fork ", 5)) {
		fflush(stdout);
		pid_t child = fork();
		if (child)
			return told(answer, (void *)(long)child);
		int result = run_line(line + 5, answer);
		if (result)
			fprintf(stderr, "fork: %s\n", answer->text);
		_exit(result != 0);
	}
	if (!strncmp(line, "thread ", 7)) {
		if (thread_count == THREADS)
			return fail(answer, "thread", thread_count);
		pthread_create(&threads[thread_count], NULL, run_thread, strdup(line + 7));
		return told(answer, (void *)(long)thread_count++);
	}
	const char *end = strstr(line, " ; ");
	char *command = end ? strndup(line, (size_t)(end - line)) : strdup(line);
	int result = run_command(command, answer);
	free(command);
	return result || !end ? result : run_line(end + 3, answer);
}

static int answered(const char *line)
{
	struct answer answer = {{0}};
	int result = run_line(line, &answer);
	printf("%s %s\n", result ? "error" : "ok", answer.text);
	fflush(stdout);
	return result;
}

int main(int count, char **words)
{
	struct answer answer = {{0}};
	if (count < 2)
		return fprintf(stderr, "cuda_program LIBRARY [COMMAND ...]\n"), 2;
	if (strcmp(words[1], "-") && open_library(words[1], &answer))
		return 2;
	for (int i = 2; i < count; i++) {
		if (!strcmp(words[i], "-")) {
			char *line = NULL;
			size_t room = 0;
			puts("ready");
			fflush(stdout);
			while (getline(&line, &room, stdin) > 0) {
				line[strcspn(line, "\n")] = 0;
				answered(line);
			}
			_exit(0);
		}
		if (answered(words[i]))
			return 1;
	}
	return 0;
}
