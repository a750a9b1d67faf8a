/* A stand-in for libcuda.so.1 without a GPU: its start, devices, contexts and export tables.
 *
 * STUB_CUDA_DEVICES says how many devices there are (1), STUB_CUDA_VERSION which driver (12020).
 */
#include <stdlib.h>
#include <string.h>

#include "objects.h"

int device_count = -1;

struct listed {
	const char *name;
	void *address;
};
extern const struct listed exported_begin[] DRIVER, exported_end[] DRIVER;

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct context *primaries[MAX_DEVICES];
static int retained[MAX_DEVICES];
static __thread struct context *current;

static int setting(const char *name, int otherwise)
{
	const char *told = getenv(name);
	return told ? atoi(told) : otherwise;
}

DRIVER int impl_cuInit(unsigned flags)
{
	int count = setting("STUB_CUDA_DEVICES", 1);
	if (flags)
		return INVALID_VALUE;
	if (count <= 0)
		return NO_DEVICE;
	device_count = count < MAX_DEVICES ? count : MAX_DEVICES;
	return SUCCESS;
}

DRIVER int impl_cuDriverGetVersion(int *out)
{
	*out = setting("STUB_CUDA_VERSION", 12020);
	return SUCCESS;
}

DRIVER int impl_cuDeviceGetCount(int *out)
{
	if (device_count < 0)
		return NOT_INITIALIZED;
	*out = device_count;
	return SUCCESS;
}

static int known(int device)
{
	if (device_count < 0)
		return NOT_INITIALIZED;
	return device >= 0 && device < device_count ? SUCCESS : INVALID_DEVICE;
}

DRIVER int impl_cuDeviceGet(int *out, int ordinal)
{
	*out = ordinal;
	return known(ordinal);
}

DRIVER int impl_cuDeviceGetName(char *out, int size, int device)
{
	if (size > 0) {
		strncpy(out, "Stand-in GPU", (size_t)size);
		out[size - 1] = 0;
	}
	return known(device);
}

DRIVER int impl_cuDeviceGetAttribute(int *out, int attribute, int device)
{
	/* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR */
	*out = attribute == 75 ? 8 : attribute == 76 ? 0 : 1;
	return known(device);
}

DRIVER int impl_cuGetErrorName(int result, const char **out)
{
	*out = result ? "CUDA_ERROR" : "CUDA_SUCCESS";
	return SUCCESS;
}

/* ---------------------------------------------------------------- contexts */

static int make_context(void **out, int device)
{
	int result = known(device);
	if (result)
		return result;
	struct context *made = calloc(1, sizeof *made);
	made->mark = CONTEXT;
	made->device = device;
	*out = current = made;
	return SUCCESS;
}

static int end_context(void *handle)
{
	struct context *context = handle;
	if (!context || context->mark != CONTEXT)
		return INVALID_CONTEXT;
	if (current == context)
		current = NULL;
	context->mark = 0;
	free(context);
	return SUCCESS;
}

DRIVER int impl_cuCtxCreate(void **out, unsigned flags, int device)
{
	(void)flags;
	return make_context(out, device);
}

DRIVER int impl_cuCtxCreate_v2(void **out, unsigned flags, int device)
{
	(void)flags;
	return make_context(out, device);
}

DRIVER int impl_cuCtxCreate_v3(void **out, void *parameters, int count, unsigned flags, int device)
{
	(void)parameters, (void)count, (void)flags;
	return make_context(out, device);
}

DRIVER int impl_cuCtxCreate_v4(void **out, void *parameters, unsigned flags, int device)
{
	(void)parameters, (void)flags;
	return make_context(out, device);
}

#define DRAWING(name)                                                                             \
	DRIVER int impl_##name(void **out, unsigned flags, int device)                            \
	{                                                                                         \
		(void)flags;                                                                      \
		return make_context(out, device);                                                 \
	}
DRAWING(cuGLCtxCreate)
DRAWING(cuGLCtxCreate_v2)
DRAWING(cuVDPAUCtxCreate)
DRAWING(cuVDPAUCtxCreate_v2)

DRIVER int impl_cuCtxDestroy_v2(void *context)
{
	return end_context(context);
}

DRIVER int impl_cuCtxDestroy(void *context)
{
	return end_context(context);
}

DRIVER int impl_cuCtxGetCurrent(void **out)
{
	*out = current;
	return device_count < 0 ? NOT_INITIALIZED : SUCCESS;
}

DRIVER int impl_cuCtxSetCurrent(void *context)
{
	current = context;
	return device_count < 0 ? NOT_INITIALIZED : SUCCESS;
}

DRIVER int impl_cuCtxSynchronize(void)
{
	return device_count < 0 ? NOT_INITIALIZED : SUCCESS;
}

/* One handle a device for as long as the process lives, as drivers have it. */
static int primary_of(void **out, int device, int retains)
{
	int result = known(device);
	if (result)
		return result;
	pthread_mutex_lock(&contexts_lock);
	if (!primaries[device]) {
		primaries[device] = calloc(1, sizeof *primaries[device]);
		primaries[device]->mark = CONTEXT;
		primaries[device]->device = device;
	}
	retained[device] += retains;
	*out = primaries[device];
	pthread_mutex_unlock(&contexts_lock);
	return SUCCESS;
}

DRIVER int impl_cuDevicePrimaryCtxRetain(void **out, int device)
{
	return primary_of(out, device, 1);
}

DRIVER int impl_cuDevicePrimaryCtxRelease_v2(int device)
{
	int result = known(device);
	if (result)
		return result;
	pthread_mutex_lock(&contexts_lock);
	if (retained[device])
		retained[device]--;
	else
		result = INVALID_CONTEXT;
	pthread_mutex_unlock(&contexts_lock);
	return result;
}

DRIVER int impl_cuDevicePrimaryCtxReset_v2(int device)
{
	return known(device);
}

DRIVER int impl_cuDevicePrimaryCtxRelease(int device)
{
	return impl_cuDevicePrimaryCtxRelease_v2(device);
}

DRIVER int impl_cuDevicePrimaryCtxReset(int device)
{
	return known(device);
}

DRIVER int impl_cuDeviceGetDevResource(int device, void *resource, int type)
{
	(void)type;
	memset(resource, 0, 144); /* CUdevResource of cuda.h 12.4 */
	return known(device);
}

DRIVER int impl_cuDevResourceGenerateDesc(void **out, void *resources, unsigned count)
{
	*out = resources;
	return count ? SUCCESS : INVALID_VALUE;
}

DRIVER int impl_cuGreenCtxCreate(void **out, void *description, int device, unsigned flags)
{
	(void)description, (void)flags;
	return make_context(out, device);
}

DRIVER int impl_cuGreenCtxDestroy(void *green)
{
	return end_context(green);
}

DRIVER int impl_cuCtxFromGreenCtx(void **out, void *green)
{
	struct context *context = green;
	if (!context || context->mark != CONTEXT)
		return INVALID_CONTEXT;
	return make_context(out, context->device);
}

/* ---------------------------------------------------------------- export tables */

DRIVER int impl_table_load(void **out, const void *wrapper)
{
	return load_image(out, wrapper);
}

DRIVER int impl_table_load_more(void **out, const void *wrapper, void *a, void *b, unsigned c)
{
	(void)a, (void)b, (void)c;
	return load_image(out, wrapper);
}

DRIVER int impl_table_load_header(const void *header, void **out, void *a, void *b, unsigned c)
{
	(void)a, (void)b, (void)c;
	return load_image(out, header);
}

DRIVER int impl_table_primary(void **out, int device)
{
	return primary_of(out, device, 0);
}

DRIVER int impl_table_create(void **out, unsigned flags, int device)
{
	(void)flags;
	return make_context(out, device);
}

DRIVER int impl_table_other(void)
{
	return SUCCESS;
}

extern int table_load(), table_primary(), table_load_more(), table_load_header(), table_other(),
	table_create();

static const struct {
	unsigned char id[16];
	void *slots[11];
} tables[] = {
	{
		{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9},
		{(void *)(11 * sizeof(void *)), (void *)table_load, (void *)table_primary, (void *)table_other,
	         (void *)table_other, (void *)table_other, (void *)table_load_more, (void *)table_other,
	         (void *)table_load_header, (void *)table_other, NULL},
	},
	{
		{0x0c, 0xa5, 0x0b, 0x8c, 0x10, 0x04, 0x92, 0x9a, 0x89, 0xa7, 0xd0, 0xdf, 0x10, 0xe7, 0x72, 0x86},
		{(void *)(2 * sizeof(void *)), (void *)table_create},
	},
};

DRIVER int impl_cuGetExportTable(const void **out, const void *id)
{
	for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
		if (!memcmp(tables[i].id, id, sizeof tables[i].id)) {
			*out = tables[i].slots;
			return SUCCESS;
		}
	}
	*out = NULL;
	return INVALID_VALUE;
}

/* ---------------------------------------------------------------- addresses by name */

/* The newest form of a name, which its older ones stand behind; its per-thread-stream form if that is asked for and there is one. */
static void *address_of(const char *name, int per_thread)
{
	size_t length = strlen(name);
	void *found = NULL;
	for (const struct listed *each = exported_begin; each < exported_end; each++) {
		if (strncmp(each->name, name, length))
			continue;
		const char *rest = each->name + length;
		if (!strcmp(rest, "_ptsz") ? per_thread : !*rest ? !found : !strncmp(rest, "_v", 2))
			found = each->address;
	}
	return found;
}

DRIVER int impl_cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                                    int *status)
{
	(void)version;
	*out = address_of(name, flags == 2);
	if (status)
		*status = *out ? 0 : 1;
	return *out ? SUCCESS : NOT_FOUND;
}

DRIVER int impl_cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
	return impl_cuGetProcAddress_v2(name, out, version, flags, NULL);
}
