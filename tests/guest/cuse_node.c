/*
 * A character device with a number and a name of choice that really opens, made through CUSE.
 *
 *   cuse_node MAJOR MINOR NAME
 *
 * Each open, read, ioctl and close of it works and does nothing. Prints "ready" once it is there.
 * The kernel then lists "MAJOR NAME" in /proc/devices. Wire format: linux/fuse.h.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char request[1 << 17] __attribute__((aligned(8)));

static int answer(int device, unsigned long unique, int error, const void *body, size_t size)
{
	struct fuse_out_header head = { sizeof(head) + size, error, unique };
	struct iovec parts[2] = { { &head, sizeof(head) }, { (void *)body, size } };

	return writev(device, parts, size ? 2 : 1) < 0;
}

static int begin(int device, unsigned long unique, char **words)
{
	struct {
		struct cuse_init_out init;
		char name[64];
	} out = { .init = {
		.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION,
		.flags = CUSE_UNRESTRICTED_IOCTL, .max_read = 4096, .max_write = 4096,
		.dev_major = atoi(words[1]), .dev_minor = atoi(words[2]),
	} };
	int length = snprintf(out.name, sizeof(out.name), "DEVNAME=%s", words[3]) + 1;

	if (length > (int)sizeof(out.name) ||
	    answer(device, unique, 0, &out, sizeof(out.init) + length))
		return 1;
	puts("ready");
	fflush(stdout);
	return 0;
}

int main(int count, char **words)
{
	const struct fuse_in_header *head = (void *)request;
	int device = count == 4 ? open("/dev/cuse", O_RDWR | O_CLOEXEC) : -1;

	if (device < 0) {
		perror("cuse_node");
		return 1;
	}
	for (;;) {
		struct fuse_open_out opened = { 0 };
		struct fuse_ioctl_out done = { 0 };
		int failed = 0;

		if (read(device, request, sizeof(request)) < (ssize_t)sizeof(*head)) {
			if (errno == EINTR)
				continue;
			perror("cuse_node");
			return 1;
		}
		switch (head->opcode) {
		case CUSE_INIT:
			failed = begin(device, head->unique, words);
			break;
		case FUSE_OPEN:
			failed = answer(device, head->unique, 0, &opened, sizeof(opened));
			break;
		case FUSE_IOCTL:
			failed = answer(device, head->unique, 0, &done, sizeof(done));
			break;
		case FUSE_READ: case FUSE_RELEASE: case FUSE_FLUSH:
			failed = answer(device, head->unique, 0, 0, 0);
			break;
		case FUSE_INTERRUPT:
			break;
		default:
			failed = answer(device, head->unique, -ENOSYS, 0, 0);
		}
		if (failed && errno != ENOENT) { /* ENOENT: who asked is gone */
			perror("cuse_node");
			return 1;
		}
	}
}
