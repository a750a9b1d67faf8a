/*
 * A stand-in for libnvidia-ml.so.1 that answers from a text file, named by FAKE_NVML_STATE.
 *
 * Each line of the file is a record: a word, then key=value fields, all separated by tabs.
 *   system     driver cuda wide(1: process entries of 32 bytes, as early 535 drivers wrote)
 *              live(1: the file is read again when the GPUs are counted)
 *   gpu        uuid name bus minor total used reserved util memutil temp power mig accounting lost
 *   mig        a MIG device of the last gpu: uuid name gi ci total used
 *   process    on the last gpu or mig: pid memory(or na) kinds(letters C, G, M)
 *   sample     on the last gpu: pid sm mem age_us
 *   stream     on the last gpu: pid sm; a sample at each multiple of period_us, kept for keep_us;
 *              every other one shows late_us after its time; shift_us (signed) is added to its time
 *   accounted  on the last gpu: pid sm memory ms start_us running
 *   answer     function gpu(optional) return(a code, "hang", "spin", "crash" or "print") unless_root
 * An answer record overrides what the named function returns; code 13 makes it absent.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NONE 0xFFFFFFFFu
#define NOT_AVAILABLE 0xFFFFFFFFFFFFFFFFull

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    OK = 0, UNINITIALIZED = 1, BAD_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    TOO_SMALL = 7, LOST = 15
};
enum { MAX_GPUS = 64, MAX_DEVICES = 512, MAX_PROCESSES = 16384, MAX_ANSWERS = 64 };
enum { HANG = -1, CRASH = -2, PRINT = -3, SPIN = -4 };

struct device {
    int is_mig, index, owner, mig, lost, accounting;
    u32 minor, util, memutil, temp, power, gi, ci;
    u64 total, used, reserved;
    char name[96], uuid[96], bus[32];
};
struct process { int device; u32 pid; u64 memory; int compute, graphics, mps; };
struct sample { int device; u32 pid, sm, mem; u64 age_us; };
struct stream { int device; u32 pid, sm; u64 period_us, keep_us, late_us; long long shift_us; };
struct accounted { int device; u32 pid, sm, running; u64 memory, ms, start_us; };
struct answer { char function[64]; int gpu, code, unless_root; };

static struct device devices[MAX_DEVICES];
static struct process processes[MAX_PROCESSES];
static struct sample samples[MAX_PROCESSES];
static struct stream streams[MAX_PROCESSES];
static struct accounted accounted[MAX_PROCESSES];
static struct answer answers[MAX_ANSWERS];
static int n_devices, n_gpus, n_processes, n_samples, n_accounted, n_answers, initialised, wide, live;
static int n_streams;
static int gpus[MAX_GPUS];
static char driver[80];
static u32 cuda;

/* ---------------------------------------------------------------- the state file */

static const char *field(const char *line, const char *key, char *out, size_t size)
{
    size_t length = strlen(key);
    for (const char *at = strchr(line, '\t'); at; at = strchr(at + 1, '\t')) {
        if (strncmp(at + 1, key, length) == 0 && at[1 + length] == '=') {
            const char *value = at + 2 + length;
            size_t n = strcspn(value, "\t\n");
            if (n >= size)
                n = size - 1;
            memcpy(out, value, n);
            out[n] = 0;
            return out;
        }
    }
    return NULL;
}

static u64 number(const char *line, const char *key, u64 otherwise)
{
    char text[64];
    if (!field(line, key, text, sizeof text))
        return otherwise;
    return strcmp(text, "na") == 0 ? NOT_AVAILABLE : strtoull(text, NULL, 0);
}

static void text(const char *line, const char *key, char *out, size_t size, const char *otherwise)
{
    if (!field(line, key, out, size))
        snprintf(out, size, "%s", otherwise);
}

static void read_device(const char *line, int is_mig)
{
    char otherwise[96];
    if (n_devices >= MAX_DEVICES || (!is_mig && n_gpus >= MAX_GPUS))
        return;
    struct device *d = &devices[n_devices];
    memset(d, 0, sizeof *d);
    d->is_mig = is_mig;
    d->owner = is_mig ? gpus[n_gpus - 1] : n_devices;
    d->index = is_mig ? n_devices - d->owner - 1 : n_gpus;
    d->gi = number(line, "gi", is_mig ? (u32)d->index + 1 : NONE);
    d->ci = number(line, "ci", is_mig ? 0 : NONE);
    snprintf(otherwise, sizeof otherwise, "%s-00000000-0000-4000-8000-%012d",
             is_mig ? "MIG" : "GPU", n_devices);
    text(line, "uuid", d->uuid, sizeof d->uuid, otherwise);
    text(line, "name", d->name, sizeof d->name, "NVIDIA H100 80GB HBM3");
    snprintf(otherwise, sizeof otherwise, "00000000:%02X:00.0", d->index + 1);
    text(line, "bus", d->bus, sizeof d->bus, is_mig ? devices[d->owner].bus : otherwise);
    d->minor = number(line, "minor", d->index);
    d->total = number(line, "total", 85899345920ull);
    d->used = number(line, "used", 0);
    d->reserved = number(line, "reserved", 0);
    d->util = number(line, "util", 0);
    d->memutil = number(line, "memutil", 0);
    d->temp = number(line, "temp", 35);
    d->power = number(line, "power", 70000);
    d->mig = number(line, "mig", 0);
    d->accounting = number(line, "accounting", 0);
    d->lost = number(line, "lost", 0);
    if (!is_mig)
        gpus[n_gpus++] = n_devices;
    n_devices++;
}

static void read_record(const char *line)
{
    char word[64] = "";
    int device = n_devices - 1;
    int gpu = n_gpus ? gpus[n_gpus - 1] : -1;
    if (!strncmp(line, "system\t", 7)) {
        text(line, "driver", driver, sizeof driver, "550.54.15");
        cuda = number(line, "cuda", 12040);
        wide = number(line, "wide", 0);
        live = number(line, "live", 0);
    } else if (!strncmp(line, "gpu", 3)) {
        read_device(line, 0);
    } else if (!strncmp(line, "mig\t", 4) && n_gpus) {
        read_device(line, 1);
    } else if (!strncmp(line, "process\t", 8) && device >= 0 && n_processes < MAX_PROCESSES) {
        text(line, "kinds", word, sizeof word, "C");
        processes[n_processes++] = (struct process){
            device, number(line, "pid", 0), number(line, "memory", 0),
            !!strchr(word, 'C'), !!strchr(word, 'G'), !!strchr(word, 'M')};
    } else if (!strncmp(line, "sample\t", 7) && gpu >= 0 && n_samples < MAX_PROCESSES) {
        samples[n_samples++] = (struct sample){
            gpu, number(line, "pid", 0), number(line, "sm", 0), number(line, "mem", 0),
            number(line, "age_us", 0)};
    } else if (!strncmp(line, "stream\t", 7) && gpu >= 0 && n_streams < MAX_PROCESSES) {
        char shift[32];
        text(line, "shift_us", shift, sizeof shift, "0");
        streams[n_streams++] = (struct stream){
            gpu, number(line, "pid", 0), number(line, "sm", 0), number(line, "period_us", 166000),
            number(line, "keep_us", 12000000), number(line, "late_us", 0), atoll(shift)};
    } else if (!strncmp(line, "accounted\t", 10) && gpu >= 0 && n_accounted < MAX_PROCESSES) {
        accounted[n_accounted++] = (struct accounted){
            gpu, number(line, "pid", 0), number(line, "sm", 0), number(line, "running", 0),
            number(line, "memory", 0), number(line, "ms", 0), number(line, "start_us", 0)};
    } else if (!strncmp(line, "answer\t", 7) && n_answers < MAX_ANSWERS) {
        struct answer *a = &answers[n_answers++];
        text(line, "function", a->function, sizeof a->function, "");
        a->gpu = (int)number(line, "gpu", NONE);
        a->unless_root = number(line, "unless_root", 0);
        text(line, "return", word, sizeof word, "999");
        a->code = !strcmp(word, "hang") ? HANG : !strcmp(word, "crash") ? CRASH
                  : !strcmp(word, "spin") ? SPIN
                  : !strcmp(word, "print") ? PRINT : atoi(word);
    }
}

static void read_state(void)
{
    static char line[4096];
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    n_devices = n_gpus = n_processes = n_samples = n_accounted = n_answers = wide = live = 0;
    n_streams = 0;
    snprintf(driver, sizeof driver, "550.54.15");
    cuda = 12040;
    if (!file)
        return;
    while (fgets(line, sizeof line, file))
        read_record(line);
    fclose(file);
}

/* ---------------------------------------------------------------- answers that are overridden */

static int overridden(const char *function, int gpu)
{
    for (int i = 0; i < n_answers; i++) {
        struct answer *a = &answers[i];
        if (strcmp(a->function, function) || (a->gpu != -1 && a->gpu != gpu))
            continue;
        if (a->unless_root && geteuid() == 0)
            continue;
        if (a->code == HANG)
            for (;;)
                pause();
        if (a->code == SPIN)
            for (;;)
                getppid();
        if (a->code == CRASH)
            raise(SIGSEGV);
        if (a->code == PRINT) {
            printf("{\"fake\": \"noise on stdout\"}\n");
            fflush(stdout);
            fprintf(stderr, "noise on stderr\n");
            continue;
        }
        return a->code;
    }
    return OK;
}

static struct device *known(void *handle)
{
    struct device *d = handle;
    return d >= devices && d < devices + n_devices ? d : NULL;
}

#define ENTER()                                   \
    int code_ = overridden(__func__, -1);         \
    if (code_)                                    \
        return code_;                             \
    if (!initialised)                             \
    return UNINITIALIZED

#define ENTER_DEVICE(handle)                                            \
    struct device *d = known(handle);                                   \
    if (!initialised)                                                   \
        return UNINITIALIZED;                                           \
    if (!d)                                                             \
        return BAD_ARGUMENT;                                            \
    int code_ = overridden(__func__, devices[d->owner].index);          \
    if (code_)                                                          \
        return code_;                                                   \
    if (devices[d->owner].lost)                                         \
    return LOST

static int put(char *out, u32 size, const char *value)
{
    if (strlen(value) + 1 > size)
        return TOO_SMALL;
    strcpy(out, value);
    return OK;
}

static u64 now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (u64)t.tv_sec * 1000000ull + t.tv_nsec / 1000;
}

/* ---------------------------------------------------------------- the system */

EXPORT int nvmlInit_v2(void)
{
    read_state();
    int code = overridden("nvmlInit_v2", -1);
    if (code == OK)
        initialised++;
    return code;
}

EXPORT int nvmlInit(void) { return nvmlInit_v2(); }
EXPORT int nvmlInitWithFlags(u32 flags) { (void)flags; return nvmlInit_v2(); }

EXPORT int nvmlShutdown(void)
{
    if (!initialised)
        return UNINITIALIZED;
    initialised--;
    return OK;
}

EXPORT const char *nvmlErrorString(int code)
{
    static char words[32];
    snprintf(words, sizeof words, "fake error %d", code);
    return words;
}

EXPORT int nvmlSystemGetDriverVersion(char *out, u32 size) { ENTER(); return put(out, size, driver); }
EXPORT int nvmlSystemGetNVMLVersion(char *out, u32 size) { ENTER(); return put(out, size, driver); }
EXPORT int nvmlSystemGetCudaDriverVersion(int *out) { ENTER(); *out = cuda; return OK; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER(); *out = cuda; return OK; }

EXPORT int nvmlSystemGetProcessName(u32 pid, char *out, u32 size)
{
    char path[64], name[64] = "";
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return NOT_FOUND;
    if (fgets(name, sizeof name, file))
        name[strcspn(name, "\n")] = 0;
    fclose(file);
    return put(out, size, name);
}

EXPORT int nvmlDeviceGetCount_v2(u32 *out)
{
    if (initialised && live)
        read_state();
    ENTER();
    *out = n_gpus;
    return OK;
}

EXPORT int nvmlDeviceGetCount(u32 *out) { return nvmlDeviceGetCount_v2(out); }

EXPORT int nvmlDeviceGetHandleByIndex_v2(u32 index, void **out)
{
    int code = overridden(__func__, (int)index);
    if (code)
        return code;
    if (!initialised)
        return UNINITIALIZED;
    if (index >= (u32)n_gpus)
        return BAD_ARGUMENT;
    if (devices[gpus[index]].lost)
        return LOST;
    *out = &devices[gpus[index]];
    return OK;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **out)
{
    ENTER();
    for (int i = 0; i < n_devices; i++)
        if (!strcmp(devices[i].uuid, uuid)) {
            *out = &devices[i];
            return OK;
        }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out)
{
    ENTER();
    for (int i = 0; i < n_gpus; i++)
        if (!strcasecmp(devices[gpus[i]].bus, bus)) {
            *out = &devices[gpus[i]];
            return OK;
        }
    return NOT_FOUND;
}

/* ---------------------------------------------------------------- a device */

#define NUMBER(function, expression) \
    EXPORT int function(void *handle, u32 *out) { ENTER_DEVICE(handle); *out = (expression); return OK; }
#define TEXT(function, expression) \
    EXPORT int function(void *handle, char *out, u32 size) { ENTER_DEVICE(handle); return put(out, size, expression); }

NUMBER(nvmlDeviceGetIndex, d->index)
NUMBER(nvmlDeviceGetMinorNumber, d->minor)
NUMBER(nvmlDeviceGetPowerUsage, d->power)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 700000)
NUMBER(nvmlDeviceGetPowerManagementLimit, 700000)
NUMBER(nvmlDeviceGetFanSpeed, 30)
NUMBER(nvmlDeviceGetPerformanceState, 0)
NUMBER(nvmlDeviceGetPersistenceMode, 1)
NUMBER(nvmlDeviceGetDisplayActive, 0)
NUMBER(nvmlDeviceGetDisplayMode, 0)
NUMBER(nvmlDeviceGetComputeMode, 0)
NUMBER(nvmlDeviceGetAccountingMode, d->accounting)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, d->mig ? 7 : 0)
NUMBER(nvmlDeviceIsMigDeviceHandle, d->is_mig)
NUMBER(nvmlDeviceGetAccountingBufferSize, 4000)
TEXT(nvmlDeviceGetName, d->name)
TEXT(nvmlDeviceGetUUID, d->uuid)

EXPORT int nvmlDeviceGetGpuInstanceId(void *handle, u32 *out)
{
    ENTER_DEVICE(handle);
    *out = d->gi;
    return d->is_mig ? OK : NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetComputeInstanceId(void *handle, u32 *out)
{
    ENTER_DEVICE(handle);
    *out = d->ci;
    return d->is_mig ? OK : NOT_SUPPORTED;
}

struct pci { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; };

EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out)
{
    ENTER_DEVICE(handle);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%.31s", d->bus);
    snprintf(out->legacy, sizeof out->legacy, "%.15s", strlen(d->bus) > 4 ? d->bus + 4 : d->bus);
    sscanf(d->bus, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    out->id = 0x233010de;
    return OK;
}

EXPORT int nvmlDeviceGetPciInfo_v2(void *handle, struct pci *out)
{
    ENTER_DEVICE(handle);
    memset(out->legacy, 0, sizeof out->legacy);
    snprintf(out->legacy, sizeof out->legacy, "%.15s", strlen(d->bus) > 4 ? d->bus + 4 : d->bus);
    return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *handle, u64 *out)
{
    ENTER_DEVICE(handle);
    out[0] = d->total;
    out[2] = d->used + d->reserved;
    out[1] = out[0] - out[2];
    return OK;
}

struct memory { u32 version; u64 total, reserved, free, used; };

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory *out)
{
    ENTER_DEVICE(handle);
    if (out->version != (sizeof *out | 2u << 24))
        return 25;
    out->total = d->total;
    out->reserved = d->reserved;
    out->used = d->used;
    out->free = d->total - d->used - d->reserved;
    return OK;
}

EXPORT int nvmlDeviceGetBAR1MemoryInfo(void *handle, u64 *out)
{
    ENTER_DEVICE(handle);
    out[0] = out[1] = d->total;
    out[2] = 0;
    return OK;
}

EXPORT int nvmlDeviceGetUtilizationRates(void *handle, u32 *out)
{
    ENTER_DEVICE(handle);
    if (d->mig || d->is_mig)
        return NOT_SUPPORTED;
    out[0] = d->util;
    out[1] = d->memutil;
    return OK;
}

EXPORT int nvmlDeviceGetTemperature(void *handle, int sensor, u32 *out)
{
    (void)sensor;
    ENTER_DEVICE(handle);
    *out = d->temp;
    return OK;
}

struct temperature { u32 version; int sensor, degrees; };

EXPORT int nvmlDeviceGetTemperatureV(void *handle, struct temperature *out)
{
    ENTER_DEVICE(handle);
    out->degrees = d->temp;
    return OK;
}

EXPORT int nvmlDeviceGetClockInfo(void *handle, int kind, u32 *out)
{
    (void)kind;
    ENTER_DEVICE(handle);
    *out = 1980;
    return OK;
}

EXPORT int nvmlDeviceGetMaxClockInfo(void *handle, int kind, u32 *out)
{
    (void)kind;
    ENTER_DEVICE(handle);
    *out = 1980;
    return OK;
}

EXPORT int nvmlDeviceGetEncoderUtilization(void *handle, u32 *out, u32 *period)
{
    ENTER_DEVICE(handle);
    *out = 0;
    *period = 167000;
    return OK;
}

EXPORT int nvmlDeviceGetDecoderUtilization(void *handle, u32 *out, u32 *period)
{
    ENTER_DEVICE(handle);
    *out = 0;
    *period = 167000;
    return OK;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    ENTER_DEVICE(handle);
    *major = 9;
    *minor = 0;
    return OK;
}

EXPORT int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, u64 *out)
{
    (void)kind;
    (void)counter;
    ENTER_DEVICE(handle);
    *out = 0;
    return OK;
}

EXPORT int nvmlDeviceGetPcieThroughput(void *handle, int kind, u32 *out)
{
    (void)kind;
    ENTER_DEVICE(handle);
    *out = 0;
    return OK;
}

EXPORT int nvmlDeviceGetDriverModel(void *handle, u32 *current, u32 *pending)
{
    ENTER_DEVICE(handle);
    *current = *pending = 0;
    return NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetDriverModel_v2(void *handle, u32 *current, u32 *pending)
{
    return nvmlDeviceGetDriverModel(handle, current, pending);
}

struct addressing { u32 version, value; };

EXPORT int nvmlDeviceGetAddressingMode(void *handle, struct addressing *out)
{
    ENTER_DEVICE(handle);
    if (out->version != (sizeof *out | 1u << 24))
        return 25;
    out->value = strstr(d->name, "GH200") ? 2 : 0;
    return OK;
}

/* ---------------------------------------------------------------- MIG */

EXPORT int nvmlDeviceGetMigMode(void *handle, u32 *current, u32 *pending)
{
    ENTER_DEVICE(handle);
    *current = *pending = d->mig;
    return OK;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, u32 index, void **out)
{
    ENTER_DEVICE(handle);
    int at = d->owner + 1 + (int)index;
    if (at >= n_devices || !devices[at].is_mig || devices[at].owner != d->owner)
        return NOT_FOUND;
    *out = &devices[at];
    return OK;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out)
{
    ENTER_DEVICE(handle);
    *out = &devices[d->owner];
    return OK;
}

/* ---------------------------------------------------------------- processes */

struct entry_v1 { u32 pid; u64 memory; };
struct entry_v2 { u32 pid; u64 memory; u32 gi, ci; };
struct entry_wide { u32 pid; u64 memory; u32 gi, ci; u64 protected_memory; };

/* A whole GPU lists the processes of its MIG devices as well, as a privileged caller sees them. */
static int belongs(const struct process *p, const struct device *d, char kind)
{
    const struct device *own = &devices[p->device];
    int wanted = kind == 'C' ? p->compute : kind == 'G' ? p->graphics : p->mps;
    if (own->is_mig && geteuid() != 0)
        return 0;
    return wanted && (own == d || (!d->is_mig && devices[own->owner].uuid == d->uuid));
}

static int list(struct device *d, u32 *count, void *out, char kind, size_t bytes)
{
    u32 room = *count, n = 0;
    for (int i = 0; i < n_processes; i++)
        n += belongs(&processes[i], d, kind);
    *count = n;
    if (n > room || (n && !out))
        return TOO_SMALL;
    char *at = out;
    for (int i = 0; i < n_processes; i++) {
        struct process *p = &processes[i];
        if (!belongs(p, d, kind))
            continue;
        struct device *own = &devices[p->device];
        struct entry_wide e = {p->pid, p->memory, own->gi, own->ci, 0};
        if (bytes == sizeof(struct entry_v1)) {
            struct entry_v1 narrow = {p->pid, p->memory};
            memcpy(at, &narrow, bytes);
        } else if (bytes == sizeof(struct entry_v2)) {
            struct entry_v2 usual = {p->pid, p->memory, own->gi, own->ci};
            memcpy(at, &usual, bytes);
        } else {
            memcpy(at, &e, bytes);
        }
        at += bytes;
    }
    return OK;
}

#define V3_BYTES (wide ? sizeof(struct entry_wide) : sizeof(struct entry_v2))
#define LIST(function, kind, bytes)                                \
    EXPORT int function(void *handle, u32 *count, void *out)       \
    {                                                              \
        ENTER_DEVICE(handle);                                      \
        return list(d, count, out, kind, bytes);                   \
    }

LIST(nvmlDeviceGetComputeRunningProcesses_v3, 'C', V3_BYTES)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 'G', V3_BYTES)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'M', V3_BYTES)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, 'C', sizeof(struct entry_v2))
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 'G', sizeof(struct entry_v2))
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, 'M', sizeof(struct entry_v2))
LIST(nvmlDeviceGetComputeRunningProcesses, 'C', sizeof(struct entry_v1))
LIST(nvmlDeviceGetGraphicsRunningProcesses, 'G', sizeof(struct entry_v1))
LIST(nvmlDeviceGetMPSComputeRunningProcesses, 'M', sizeof(struct entry_v1))

struct utilisation { u32 pid; u64 at_us; u32 sm, mem, enc, dec; };

/* Writes up to room samples that are newer than since, and returns how many there are. */
static u32 newer(struct device *d, u64 now, u64 since, struct utilisation *out, u32 room)
{
    u32 n = 0;
    for (int i = 0; i < n_samples; i++) {
        struct sample *s = &samples[i];
        if (&devices[s->device] != d || now - s->age_us <= since)
            continue;
        if (n++ < room)
            *out++ = (struct utilisation){s->pid, now - s->age_us, s->sm, s->mem, 0, 0};
    }
    for (int i = 0; i < n_streams; i++) {
        struct stream *s = &streams[i];
        if (&devices[s->device] != d)
            continue;
        for (u64 k = (now - s->keep_us) / s->period_us + 1; k * s->period_us <= now; k++) {
            u64 at = k * s->period_us + s->shift_us;
            if (at <= since || k * s->period_us + (k & 1 ? s->late_us : 0) > now)
                continue;
            if (n++ < room)
                *out++ = (struct utilisation){s->pid, at, s->sm, 0, 0, 0};
        }
    }
    return n;
}

EXPORT int nvmlDeviceGetProcessUtilization(void *handle, struct utilisation *out, u32 *count, u64 since)
{
    ENTER_DEVICE(handle);
    if (d->mig || d->is_mig)
        return NOT_SUPPORTED;
    u32 room = out ? *count : 0;
    *count = newer(d, now_us(), since, out, room);
    return !*count ? NOT_FOUND : *count > room ? TOO_SMALL : OK;
}

EXPORT int nvmlDeviceGetAccountingPids(void *handle, u32 *count, u32 *out)
{
    ENTER_DEVICE(handle);
    u32 room = *count, n = 0;
    for (int i = 0; i < n_accounted; i++)
        n += &devices[accounted[i].device] == d;
    *count = n;
    if (n > room)
        return TOO_SMALL;
    for (int i = 0; i < n_accounted; i++)
        if (&devices[accounted[i].device] == d)
            *out++ = accounted[i].pid;
    return OK;
}

struct accounting { u32 gpu, mem; u64 memory, ms, start_us; u32 running, reserved[5]; };

EXPORT int nvmlDeviceGetAccountingStats(void *handle, u32 pid, struct accounting *out)
{
    ENTER_DEVICE(handle);
    for (int i = 0; i < n_accounted; i++) {
        struct accounted *a = &accounted[i];
        if (&devices[a->device] == d && a->pid == pid) {
            *out = (struct accounting){a->sm, 0, a->memory, a->ms, a->start_us, a->running, {0}};
            return OK;
        }
    }
    return NOT_FOUND;
}
