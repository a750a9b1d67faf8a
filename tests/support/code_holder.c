/* Holds files in its memory in many ways, then counts: code_holder WAY:FILE …
 *
 * Ways: heap (malloc), mmap (anonymous, read only afterwards), hidden (anonymous, without any
 * right), seam (anonymous, its halves two regions), holes (mmap; pages of zeros stay untouched),
 * memfd (shared, and the descriptor closed), shm (a POSIX shared memory object, unlinked), written
 * (a private mapping of the file whose first byte was written as it was), freed (malloc, and freed
 * at once), file (the file itself, mapped), sparse:BYTES (a reservation, one page of it used),
 * ring:BYTES (what is no file's: the ring of a packet socket, as a device's memory would be).
 * With leave:FIRST the first thread ends once all is held, and another one counts.
 *
 * Prints a line "WAY ADDRESS BYTES" each, then "ready", and for each line it reads how far it has
 * counted.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t page;

static size_t whole(size_t bytes)
{
	return (bytes + page - 1) / page * page;
}

static void *map(size_t bytes, int flags, int descriptor)
{
	void *at = mmap(NULL, whole(bytes), PROT_READ | PROT_WRITE, flags, descriptor, 0);
	if (at == MAP_FAILED)
		err(1, "mmap");
	return at;
}

static void copy_but_zeros(char *to, const char *from, size_t bytes)
{
	static char zeros[1 << 16];
	for (size_t i = 0; i < bytes; i += page) {
		size_t n = bytes - i < page ? bytes - i : page;
		if (memcmp(from + i, zeros, n))
			memcpy(to + i, from + i, n);
	}
}

static void *shared(int descriptor, const char *data, size_t bytes)
{
	if (descriptor < 0 || ftruncate(descriptor, (off_t)bytes))
		err(1, "shared memory");
	void *at = map(bytes, MAP_SHARED, descriptor);
	memcpy(at, data, bytes);
	close(descriptor);
	return at;
}

static void *hold(const char *way, const char *path, size_t *bytes)
{
	if (!strcmp(way, "sparse")) {
		*bytes = strtoull(path, NULL, 0);
		char *at = map(*bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
		at[*bytes / 2] = 1;
		return at;
	}
	if (!strcmp(way, "ring")) {
		*bytes = whole(strtoull(path, NULL, 0));
		int ring = socket(AF_PACKET, SOCK_RAW, 0);
		struct tpacket_req wanted = {
			.tp_block_size = (unsigned)page,
			.tp_block_nr = (unsigned)(*bytes / page),
			.tp_frame_size = (unsigned)page,
			.tp_frame_nr = (unsigned)(*bytes / page),
		};
		if (setsockopt(ring, SOL_PACKET, PACKET_RX_RING, &wanted, sizeof wanted))
			err(1, "a packet socket's ring");
		return map(*bytes, MAP_SHARED, ring);
	}
	int descriptor = open(path, O_RDONLY);
	if (descriptor < 0)
		err(1, "%s", path);
	struct stat status;
	if (fstat(descriptor, &status))
		err(1, "%s", path);
	*bytes = (size_t)status.st_size;
	char *data = mmap(NULL, whole(*bytes), PROT_READ, MAP_PRIVATE, descriptor, 0);
	if (data == MAP_FAILED)
		err(1, "%s", path);
	if (!strcmp(way, "file"))
		return data;
	char *at;
	if (!strcmp(way, "written")) {
		at = map(*bytes, MAP_PRIVATE, descriptor);
		*(volatile char *)at = *at;
	} else if (!strcmp(way, "memfd")) {
		at = shared(memfd_create("held", 0), data, *bytes);
	} else if (!strcmp(way, "shm")) {
		char name[64];
		snprintf(name, sizeof name, "/code_holder-%d", getpid());
		int object = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
		shm_unlink(name);
		at = shared(object, data, *bytes);
	} else if (!strcmp(way, "heap") || !strcmp(way, "freed")) {
		at = malloc(*bytes);
		memcpy(at, data, *bytes);
	} else if (!strcmp(way, "holes")) {
		at = map(*bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
		copy_but_zeros(at, data, *bytes);
	} else if (!strcmp(way, "mmap") || !strcmp(way, "hidden") || !strcmp(way, "seam")) {
		at = map(*bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
		memcpy(at, data, *bytes);
		if (!strcmp(way, "mmap"))
			mprotect(at, whole(*bytes), PROT_READ);
		else if (!strcmp(way, "hidden"))
			mprotect(at, whole(*bytes), PROT_NONE);
		else
			mprotect(at, whole(*bytes / 2), PROT_READ);
	} else {
		errx(1, "no such way: %s", way);
	}
	munmap(data, whole(*bytes));
	close(descriptor);
	if (!strcmp(way, "freed"))
		free(at);
	return at;
}

static void *count_up(void *unused)
{
	struct pollfd asked = {.fd = 0, .events = POLLIN};
	for (unsigned long counted = 0;; counted++) {
		if (poll(&asked, 1, 1) <= 0)
			continue;
		char line[16];
		if (read(0, line, sizeof line) <= 0)
			exit(0);
		printf("%lu\n", counted);
		fflush(stdout);
	}
	return unused;
}

int main(int count, char **words)
{
	page = (size_t)sysconf(_SC_PAGESIZE);
	int leaves = 0;
	for (int i = 1; i < count; i++) {
		char *path = strchr(words[i], ':');
		if (!path)
			errx(1, "expected WAY:FILE, not %s", words[i]);
		*path++ = 0;
		if (!strcmp(words[i], "leave")) {
			leaves = 1;
			continue;
		}
		size_t bytes;
		uintptr_t at = (uintptr_t)hold(words[i], path, &bytes);
		printf("%s %ju %zu\n", words[i], (uintmax_t)at, bytes);
	}
	puts("ready");
	fflush(stdout);
	pthread_t other;
	if (leaves && !pthread_create(&other, NULL, count_up, NULL))
		pthread_exit(NULL);
	count_up(NULL);
}
