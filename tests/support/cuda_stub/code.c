/* The stand-in driver's modules, libraries, linker and launches. It runs nothing: any name but the
 * empty one is a kernel of any image, and a launch of a handle that it gave succeeds.
 *
 *   NESTED   loads of every form go on to the exported cuModuleLoadData, as some drivers' may
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "objects.h"

static int is_code(const void *image)
{
	uint32_t first;
	if (!image)
		return 0;
	memcpy(&first, image, sizeof first);
	const unsigned char *text = image;
	/* A wrapper, a fatbin, an ELF file, Tile IR, or text. */
	return first == 0x466243b1 || first == 0xba55ed50 || first == 0x464c457f ||
	       first == 0x6c69547f || *text == '\n' || *text == '\t' || (*text >= ' ' && *text < 0x7f);
}

static struct code *new_code(void)
{
	struct code *made = calloc(1, sizeof *made);
	made->mark = CODE;
	pthread_mutex_init(&made->lock, NULL);
	return made;
}

static int load_here(void **out, const void *image)
{
	if (device_count < 0)
		return NOT_INITIALIZED;
	if (!out)
		return INVALID_VALUE;
	if (!is_code(image))
		return INVALID_IMAGE;
	*out = new_code();
	return SUCCESS;
}

#ifdef NESTED
int cuModuleLoadData(void **out, const void *image);
int load_image(void **out, const void *image)
{
	return cuModuleLoadData(out, image);
}
#else
int load_image(void **out, const void *image)
{
	return load_here(out, image);
}
#endif

char *whole_file(const char *path, size_t *bytes)
{
	struct stat status;
	int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (descriptor < 0)
		return NULL;
	char *data = NULL;
	if (!fstat(descriptor, &status) && (data = malloc((size_t)status.st_size + 1))) {
		*bytes = 0;
		ssize_t count;
		while ((count = read(descriptor, data + *bytes, (size_t)status.st_size - *bytes)) > 0)
			*bytes += (size_t)count;
		data[*bytes] = 0;
	}
	close(descriptor);
	return data;
}

int load_file(void **out, const char *path)
{
	size_t bytes;
	char *data = whole_file(path, &bytes);
	if (!data)
		return FILE_NOT_FOUND;
	int result = bytes < 4 ? INVALID_IMAGE : load_image(out, data);
	free(data);
	return result;
}

DRIVER int impl_cuModuleLoad(void **out, const char *path)
{
	return load_file(out, path);
}

DRIVER int impl_cuModuleLoadData(void **out, const void *image)
{
	return load_here(out, image);
}

DRIVER int impl_cuModuleLoadDataEx(void **out, const void *image, unsigned count, int *options,
                                   void **values)
{
	(void)count, (void)options, (void)values;
	return load_image(out, image);
}

DRIVER int impl_cuModuleLoadFatBinary(void **out, const void *image)
{
	return load_image(out, image);
}

DRIVER int impl_cuLibraryLoadData(void **out, const void *image)
{
	return load_image(out, image);
}

DRIVER int impl_cuLibraryLoadFromFile(void **out, const char *path)
{
	return load_file(out, path);
}

static int unload(struct code *code)
{
	if (!code || code->mark != CODE)
		return INVALID_HANDLE;
	while (code->kernels) {
		struct kernel *first = code->kernels;
		code->kernels = first->next;
		free(first->function);
		free(first);
	}
	if (code->module)
		unload(code->module);
	code->mark = 0;
	free(code);
	return SUCCESS;
}

DRIVER int impl_cuModuleUnload(void *module)
{
	return unload(module);
}

DRIVER int impl_cuLibraryUnload(void *library)
{
	return unload(library);
}

/* ---------------------------------------------------------------- kernels */

static struct kernel *new_kernel(struct code *of, const char *name)
{
	struct kernel *made = calloc(1, sizeof *made + strlen(name) + 1);
	made->mark = KERNEL;
	made->of = of;
	strcpy(made->name, name);
	return made;
}

static int kernel_named(void **out, struct code *code, const char *name)
{
	if (!code || code->mark != CODE)
		return INVALID_HANDLE;
	if (!name || !*name)
		return NOT_FOUND;
	pthread_mutex_lock(&code->lock);
	struct kernel *found = code->kernels;
	while (found && strcmp(found->name, name))
		found = found->next;
	if (!found) {
		found = new_kernel(code, name);
		found->next = code->kernels;
		code->kernels = found;
	}
	*out = found;
	pthread_mutex_unlock(&code->lock);
	return SUCCESS;
}

DRIVER int impl_cuModuleGetFunction(void **out, void *module, const char *name)
{
	return kernel_named(out, module, name);
}

DRIVER int impl_cuLibraryGetKernel(void **out, void *library, const char *name)
{
	return kernel_named(out, library, name);
}

DRIVER int impl_cuLibraryGetModule(void **out, struct code *library)
{
	if (!library || library->mark != CODE)
		return INVALID_HANDLE;
	pthread_mutex_lock(&library->lock);
	if (!library->module)
		library->module = new_code();
	*out = library->module;
	pthread_mutex_unlock(&library->lock);
	return SUCCESS;
}

DRIVER int impl_cuKernelGetFunction(void **out, struct kernel *kernel)
{
	if (!kernel || kernel->mark != KERNEL)
		return INVALID_HANDLE;
	pthread_mutex_lock(&kernel->of->lock);
	if (!kernel->function)
		kernel->function = new_kernel(kernel->of, kernel->name);
	*out = kernel->function;
	pthread_mutex_unlock(&kernel->of->lock);
	return SUCCESS;
}

/* ---------------------------------------------------------------- the linker */

/* It links nothing: what is complete is what was added first. */
struct link {
	char *first;
	size_t bytes;
};

DRIVER int impl_cuLinkCreate_v2(unsigned count, int *options, void **values, void **out)
{
	(void)count, (void)options, (void)values;
	*out = calloc(1, sizeof(struct link));
	return SUCCESS;
}

DRIVER int impl_cuLinkAddData_v2(struct link *link, int type, const void *data, size_t bytes,
                                 const char *name)
{
	(void)type, (void)name;
	if (!link || !data || !bytes)
		return INVALID_VALUE;
	if (!link->first && (link->first = malloc(bytes))) {
		memcpy(link->first, data, bytes);
		link->bytes = bytes;
	}
	return SUCCESS;
}

DRIVER int impl_cuLinkAddFile_v2(struct link *link, int type, const char *path)
{
	(void)type;
	size_t bytes;
	char *data = whole_file(path, &bytes);
	if (!data)
		return FILE_NOT_FOUND;
	int result = impl_cuLinkAddData_v2(link, type, data, bytes, path);
	free(data);
	return result;
}

DRIVER int impl_cuLinkAddData(struct link *link, int type, const void *data, size_t bytes,
                              const char *name)
{
	return impl_cuLinkAddData_v2(link, type, data, bytes, name);
}

DRIVER int impl_cuLinkAddFile(struct link *link, int type, const char *path)
{
	return impl_cuLinkAddFile_v2(link, type, path);
}

DRIVER int impl_cuLinkComplete(struct link *link, void **out, size_t *bytes)
{
	if (!link || !link->first)
		return INVALID_VALUE;
	*out = link->first;
	*bytes = link->bytes;
	return SUCCESS;
}

DRIVER int impl_cuLinkDestroy(struct link *link)
{
	free(link->first);
	free(link);
	return SUCCESS;
}

/* ---------------------------------------------------------------- memory and streams */

DRIVER int impl_cuMemAlloc_v2(uint64_t *out, size_t bytes)
{
	*out = (uint64_t)malloc(bytes);
	return *out ? SUCCESS : INVALID_VALUE;
}

DRIVER int impl_cuMemFree_v2(uint64_t memory)
{
	free((void *)memory);
	return SUCCESS;
}

DRIVER int impl_cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
	memcpy((void *)to, from, bytes);
	return SUCCESS;
}

DRIVER int impl_cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
	memcpy(to, (void *)from, bytes);
	return SUCCESS;
}

DRIVER int impl_cuStreamCreate(void **out, unsigned flags)
{
	(void)flags;
	*out = calloc(1, 64);
	return SUCCESS;
}

DRIVER int impl_cuStreamSynchronize(void *stream)
{
	(void)stream;
	return SUCCESS;
}

/* ---------------------------------------------------------------- launches */

static int launch(const struct kernel *kernel)
{
	return kernel && kernel->mark == KERNEL ? SUCCESS : INVALID_HANDLE;
}

#define LAUNCH(name)                                                                              \
	DRIVER int impl_##name(const struct kernel *kernel)                                       \
	{                                                                                         \
		return launch(kernel);                                                            \
	}
LAUNCH(cuLaunchKernel)
LAUNCH(cuLaunchKernel_ptsz)
LAUNCH(cuLaunchCooperativeKernel)
LAUNCH(cuLaunchCooperativeKernel_ptsz)
LAUNCH(cuLaunch)
LAUNCH(cuLaunchGrid)
LAUNCH(cuLaunchGridAsync)

DRIVER int impl_cuLaunchKernelEx(const void *config, const struct kernel *kernel)
{
	return config ? launch(kernel) : INVALID_VALUE;
}

DRIVER int impl_cuLaunchKernelEx_ptsz(const void *config, const struct kernel *kernel)
{
	return config ? launch(kernel) : INVALID_VALUE;
}

DRIVER int impl_cuGraphCreate(void **out, unsigned flags)
{
	(void)flags;
	*out = calloc(1, 64);
	return SUCCESS;
}

/* CUDA_KERNEL_NODE_PARAMS_v2 begins with the function. */
DRIVER int impl_cuGraphAddKernelNode_v2(void **out, void *graph, void *before, size_t count,
                                        const struct kernel *const *parameters)
{
	(void)before, (void)count;
	*out = graph;
	return launch(*parameters);
}

DRIVER int impl_cuGraphInstantiateWithFlags(void **out, void *graph, uint64_t flags)
{
	(void)flags;
	*out = calloc(1, 64);
	return graph ? SUCCESS : INVALID_VALUE;
}

DRIVER int impl_cuGraphLaunch(void *graph, void *stream)
{
	(void)stream;
	return graph ? SUCCESS : INVALID_VALUE;
}

DRIVER int impl_cuGraphLaunch_ptsz(void *graph, void *stream)
{
	(void)stream;
	return graph ? SUCCESS : INVALID_VALUE;
}
