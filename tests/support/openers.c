/*
 * Processes that open device nodes in every way there is; for tests and benchmarks.
 *
 *   open PATH [COUNT]        opens and closes, tells the number of opens that worked
 *   stamp PATH               tells the wall clock in ns, then opens
 *   access PATH              access(2)
 *   uring PATH               an openat through io_uring
 *   inherit PATH             a child holds what its parent opened; the parent ends
 *   pass PATH                a child holds what it was sent over a socket; the parent ends
 *   storm COUNT EACH PATH... COUNT processes open the PATHs in turn, EACH times in all
 *   pace COUNT A_SECOND SECONDS PATH...
 *                            COUNT processes open the PATHs in turn, A_SECOND in all; tells opens
 *   rate SECONDS PATH        opens as fast as it can; tells opens a second of CPU
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int open_and_close(const char *path)
{
	int descriptor = open(path, O_RDONLY | O_CLOEXEC);

	if (descriptor < 0)
		return 0;
	close(descriptor);
	return 1;
}

static double cpu_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static _Noreturn int hold(const char *how)
{
	printf("%s %d\n", how, (int)getpid());
	fflush(stdout);
	for (;;)
		pause();
}

static int inherit(const char *path)
{
	if (open(path, O_RDONLY) < 0)
		return 2;
	if (fork())
		return 0;
	return hold("inherited");
}

static int pass(const char *path)
{
	int pair[2];
	char byte = 0, space[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { &byte, 1 };
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof(space),
	};

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		return 2;
	if (fork()) {
		int descriptor = open(path, O_RDONLY);
		struct cmsghdr *control = CMSG_FIRSTHDR(&message);

		if (descriptor < 0)
			return 2;
		control->cmsg_level = SOL_SOCKET;
		control->cmsg_type = SCM_RIGHTS;
		control->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(control), &descriptor, sizeof(int));
		return sendmsg(pair[0], &message, 0) < 0;
	}
	close(pair[0]);
	if (recvmsg(pair[1], &message, 0) < 1)
		return 2;
	return hold("passed");
}

static int uring(const char *path)
{
	struct io_uring_params params = { 0 };
	int ring = syscall(__NR_io_uring_setup, 2, &params);
	char *submissions, *completions;
	struct io_uring_sqe *entries;
	struct io_uring_cqe *done;

	if (ring < 0)
		return 77;
	submissions = mmap(0, params.sq_off.array + 2 * sizeof(unsigned), PROT_READ | PROT_WRITE,
			   MAP_SHARED, ring, IORING_OFF_SQ_RING);
	completions = mmap(0, params.cq_off.cqes + 4 * sizeof(*done), PROT_READ | PROT_WRITE,
			   MAP_SHARED, ring, IORING_OFF_CQ_RING);
	entries = mmap(0, 2 * sizeof(*entries), PROT_READ | PROT_WRITE, MAP_SHARED, ring,
		       IORING_OFF_SQES);
	if (submissions == MAP_FAILED || completions == MAP_FAILED || entries == MAP_FAILED)
		return 77;
	memset(entries, 0, sizeof(*entries));
	entries->opcode = IORING_OP_OPENAT;
	entries->fd = AT_FDCWD;
	entries->addr = (unsigned long)path;
	entries->open_flags = O_RDONLY;
	*(unsigned *)(submissions + params.sq_off.array) = 0;
	__atomic_store_n((unsigned *)(submissions + params.sq_off.tail), 1, __ATOMIC_RELEASE);
	if (syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0) != 1)
		return 77;
	done = (struct io_uring_cqe *)(completions + params.cq_off.cqes);
	printf("%d\n", done->res);
	return 0;
}

static int storm(int count, int each, char **paths, int path_count)
{
	for (int i = 0; i < count; i++)
		if (!fork()) {
			for (int n = 0; n < each; n++)
				open_and_close(paths[(i + n) % path_count]);
			_exit(0);
		}
	while (wait(0) > 0)
		;
	return 0;
}

static int rate(double seconds, const char *path)
{
	double begun = cpu_seconds(), end = begun + seconds;
	long opened = 0;

	while (cpu_seconds() < end)
		for (int i = 0; i < 64; i++)
			opened += open_and_close(path);
	printf("%.0f\n", opened / (cpu_seconds() - begun));
	return 0;
}

static double wall_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* Each process keeps to its own share of the rate, however late it is woken. */
static int pace(int count, double a_second, double seconds, char **paths, int number)
{
	double begun = wall_seconds() + 0.5, each = a_second / count;
	long total = (long)(each * seconds);

	for (int process = 0; process < count; process++) {
		if (fork())
			continue;
		for (long done = 0; done < total;) {
			double now = wall_seconds() - begun;
			long due = now < 0 ? 0 : (long)(now * each) + 1;

			for (; done < due && done < total; done++)
				open_and_close(paths[(process + done) % number]);
			now = (done + (double)process / count) / each - (wall_seconds() - begun);
			if (now > 0)
				usleep(now * 1e6);
		}
		_exit(0);
	}
	while (wait(0) > 0)
		;
	printf("%ld\n", total * count);
	return 0;
}

int main(int count, char **words)
{
	const char *how = count > 2 ? words[1] : "";

	if (!strcmp(how, "open")) {
		long times = count > 3 ? atol(words[3]) : 1, worked = 0;

		for (long i = 0; i < times; i++)
			worked += open_and_close(words[2]);
		printf("%ld\n", worked);
		return 0;
	}
	if (!strcmp(how, "stamp")) {
		struct timespec now;

		usleep(20000); /* whoever started it has other things to do meanwhile */
		clock_gettime(CLOCK_REALTIME, &now);
		open_and_close(words[2]);
		printf("%lld\n", now.tv_sec * 1000000000LL + now.tv_nsec);
		return 0;
	}
	if (!strcmp(how, "access"))
		return access(words[2], R_OK) != 0;
	if (!strcmp(how, "uring"))
		return uring(words[2]);
	if (!strcmp(how, "inherit"))
		return inherit(words[2]);
	if (!strcmp(how, "pass"))
		return pass(words[2]);
	if (!strcmp(how, "storm") && count > 4)
		return storm(atoi(words[2]), atoi(words[3]), words + 4, count - 4);
	if (!strcmp(how, "pace") && count > 5)
		return pace(atoi(words[2]), atof(words[3]), atof(words[4]), words + 5, count - 5);
	if (!strcmp(how, "rate") && count > 3)
		return rate(atof(words[2]), words[3]);
	return 64;
}
