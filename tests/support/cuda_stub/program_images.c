/* Images, modules, libraries and linkers of the script.
 *
 *   image I heap FILE        a copy in the heap, a NUL after it
 *   image I map FILE         the file itself, mapped
 *   image I anonymous FILE   a copy in a mapping of its own
 *   image I edge FILE        a copy that ends where its mapping ends, before a page without rights
 *   image I text WORD        the word itself, for what is no image
 *   image I at NUMBER        an address
 *   wrap W I                 a fatbin wrapper (magic, version 1, pointer) around an image
 *   overwrite I              its bytes are made other ones
 *   unmap I                  its mapping is taken away
 *   load FUNCTION M I        I: an image, or the path for a load by name
 *   unload M                 unload-library M
 *   function F M NAME        cuModuleGetFunction
 *   kernel K L NAME          cuLibraryGetKernel
 *   module M L               cuLibraryGetModule
 *   function-of F K          cuKernelGetFunction
 *   link L                   cuLinkCreate_v2
 *   add L TYPE I             cuLinkAddData_v2; TYPE: CUjitInputType, a number
 *   add-file L TYPE FILE     cuLinkAddFile_v2
 *   complete L I             cuLinkComplete; its cubin is an image from now on
 *
 * FUNCTION: an exported name, proc:NAME, CUDART_INTERFACE[1], [6] or [8].
 */
#define _GNU_SOURCE
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static size_t whole_pages(size_t bytes)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	return (bytes + page - 1) / page * page;
}

static int map_image(struct named *image, const char *path, struct answer *answer)
{
	struct stat status;
	int descriptor = open(path, O_RDONLY | O_CLOEXEC);
	if (descriptor < 0 || fstat(descriptor, &status))
		return fail(answer, path, errno);
	image->bytes = (size_t)status.st_size;
	image->mapped = whole_pages(image->bytes);
	image->base = mmap(NULL, image->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
	close(descriptor);
	if (image->base == MAP_FAILED)
		return fail(answer, "mmap", errno);
	image->value = image->base;
	return 0;
}

static int place_image(struct named *image, const char *where, const char *what,
                       struct answer *answer)
{
	memset((char *)image + sizeof image->name, 0, sizeof *image - sizeof image->name);
	if (!strcmp(where, "text")) {
		image->value = strdup(what);
		image->bytes = strlen(what);
		return 0;
	}
	if (!strcmp(where, "at")) {
		image->value = (void *)strtoull(what, NULL, 0);
		return 0;
	}
	if (map_image(image, what, answer))
		return -1;
	if (!strcmp(where, "map"))
		return 0;
	struct named file = *image;
	if (!strcmp(where, "heap")) {
		image->value = calloc(1, image->bytes + 1);
		image->mapped = 0;
	} else if (!strcmp(where, "anonymous") || !strcmp(where, "edge")) {
		size_t page = whole_pages(1);
		image->mapped += page;
		image->base = mmap(NULL, image->mapped, PROT_READ | PROT_WRITE,
		                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		mprotect((char *)image->base + image->mapped - page, page, PROT_NONE);
		image->value = image->base;
		if (!strcmp(where, "edge"))
			image->value = (char *)image->base + image->mapped - page - image->bytes;
	} else {
		return fail(answer, where, -2);
	}
	memcpy(image->value, file.base, image->bytes);
	munmap(file.base, file.mapped);
	return 0;
}

static int wrap(const char *name, const char *image, struct answer *answer)
{
	struct wrapper {
		uint32_t magic, version;
		const void *data;
		void *unused;
	} *made = calloc(1, sizeof *made);
	*made = (struct wrapper){0x466243b1, 1, value_of(image), NULL};
	struct named *entry = set(name, made);
	entry->bytes = sizeof *made;
	entry->mapped = 0;
	return told(answer, made);
}

static int load(const char *by, const char *name, const char *what, struct answer *answer)
{
	void *out = NULL;
	const char *plain = strncmp(by, "proc:", 5) ? by : by + 5;
	int is_named = !strcmp(plain, "cuModuleLoad") || !strcmp(plain, "cuLibraryLoadFromFile");
	void *image = is_named ? (void *)what : value_of(what);
	int swapped = !strcmp(by, "CUDART_INTERFACE[8]");
	long result = function(by)(swapped ? image : (void *)&out, swapped ? (void *)&out : image, 0, 0,
	                           0, 0, 0, 0, 0, 0, 0);
	if ((int)result)
		return fail(answer, by, (int)result);
	set(name, out);
	return told(answer, out);
}

/* A call whose first argument takes what comes of it. */
static int made(const char *by, const char *name, void *of, void *more, struct answer *answer)
{
	void *out = NULL;
	int result = (int)function(by)(&out, of, more, 0, 0, 0, 0, 0, 0, 0, 0);
	if (result)
		return fail(answer, by, result);
	set(name, out);
	return told(answer, out);
}

static int done(const char *by, void *first, void *second, struct answer *answer)
{
	int result = (int)function(by)(first, second, 0, 0, 0, 0, 0, 0, 0, 0, 0);
	return result ? fail(answer, by, result) : told(answer, 0);
}

static int link_command(char **words, struct answer *answer)
{
	struct named *link = find(words[1]);
	long result;
	if (!strcmp(words[0], "link")) {
		void *out = NULL;
		result = function("cuLinkCreate_v2")(0, 0, 0, &out, 0, 0, 0, 0, 0, 0, 0);
		set(words[1], out);
		return (int)result ? fail(answer, words[0], (int)result) : told(answer, out);
	}
	if (!link)
		return fail(answer, words[1], -2);
	if (!strcmp(words[0], "complete")) {
		struct named *image = set(words[2], NULL);
		image->mapped = 0;
		result = function("cuLinkComplete")(link->value, &image->value, &image->bytes, 0, 0, 0, 0,
		                                    0, 0, 0, 0);
		return (int)result ? fail(answer, words[0], (int)result) : told(answer, image->value);
	}
	void *type = (void *)atol(words[2]);
	if (!strcmp(words[0], "add-file")) {
		result = function("cuLinkAddFile_v2")(link->value, type, words[3], 0, 0, 0, 0, 0, 0, 0, 0);
	} else {
		struct named *image = find(words[3]);
		if (!image)
			return fail(answer, words[3], -2);
		result = function("cuLinkAddData_v2")(link->value, type, image->value,
		                                      (void *)image->bytes, (void *)"linked", 0, 0, 0, 0, 0,
		                                      0);
	}
	return (int)result ? fail(answer, words[0], (int)result) : told(answer, 0);
}

int image_command(int count, char **words, struct answer *answer)
{
	const char *what = words[0];
	if (!strcmp(what, "image") && count == 4) {
		struct named *image = set(words[1], NULL);
		if (place_image(image, words[2], words[3], answer))
			return -1;
		return told(answer, image->value);
	}
	if (!strcmp(what, "wrap") && count == 3)
		return wrap(words[1], words[2], answer);
	if (!strcmp(what, "load") && count == 4)
		return load(words[1], words[2], words[3], answer);
	if (!strcmp(what, "function") && count == 4)
		return made("cuModuleGetFunction", words[1], value_of(words[2]), words[3], answer);
	if (!strcmp(what, "kernel") && count == 4)
		return made("cuLibraryGetKernel", words[1], value_of(words[2]), words[3], answer);
	if (!strcmp(what, "module") && count == 3)
		return made("cuLibraryGetModule", words[1], value_of(words[2]), 0, answer);
	if (!strcmp(what, "function-of") && count == 3)
		return made("cuKernelGetFunction", words[1], value_of(words[2]), 0, answer);
	if (!strcmp(what, "unload") && count == 2)
		return done("cuModuleUnload", value_of(words[1]), 0, answer);
	if (!strcmp(what, "unload-library") && count == 2)
		return done("cuLibraryUnload", value_of(words[1]), 0, answer);
	if ((!strcmp(what, "link") && count == 2) || (!strcmp(what, "complete") && count == 3) ||
	    ((!strcmp(what, "add") || !strcmp(what, "add-file")) && count == 4))
		return link_command(words, answer);
	if ((strcmp(what, "overwrite") && strcmp(what, "unmap")) || count != 2)
		return 1;
	struct named *image = find(words[1]);
	if (!image)
		return fail(answer, words[1], -2);
	if (!strcmp(what, "unmap")) {
		if (image->mapped)
			munmap(image->base, image->mapped);
		else
			free(image->value);
	} else {
		memset(image->value, 0x2e, image->bytes);
	}
	return told(answer, image->value);
}
