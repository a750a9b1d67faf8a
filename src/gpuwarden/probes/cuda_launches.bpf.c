// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How often each process launches each kernel, counted where the driver library's functions begin;
 * in a stretch that the reader opens, the first launches of each process are told one by one.
 *
 *   launch_kernel      cuLaunchKernel and its kin: (function, grid, block, shared memory, stream)
 *   launch_by_config   cuLaunchKernelEx: (configuration, function)
 *   launch_by_handle   cuLaunch and its kin of CUDA 3: (function, …), shaped by earlier calls
 *   launch_graph       cuGraphLaunch: (graph, stream)
 *
 * A workload pays for this at every launch, so that what is done for one is a look at a table and
 * an addition. What finds no room in a table is counted in another place, down to one number for
 * the whole machine: no launch of a probed library is lost.
 *
 * FRAMES: from Linux 6.13 on, functions with 64 bytes or more on their stack get a stack of their own
 * on each CPU, which another thread that comes to the same probe there overwrites.
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"
#include "entry.h"
#include "slots.h"
#include "unforeseen.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* A process may take up handles while it has less than this part of the room that is free. */
#define SHARE_OF_FREE 8

/* Of how many samples of a process one looks whether the ring is getting full; a power of two. */
#define LOOK_EVERY 256

#define COUNT_HANDLES 0   /* handles taken up so far */
#define COUNT_PROCESSES 1 /* the same of processes */
#define COUNT_UNCOUNTED 2 /* launches of processes that found no room */
#define COUNTERS 3

struct launch_slot {
	__u64 start_ns;
	__u64 handle;
	__u64 launches;
	__u64 owner; /* thread group; above it the number of its slot among the processes */
};

struct launching_process {
	__u64 start_ns;
	__u64 owner; /* thread group; above it a part of its start time */
	__u64 graphs;
	__u64 others; /* launches by handles that found no room */
	__u64 handles;
	__u64 told;
	__u64 untold;
	__u64 told_before; /* this stretch; the reader's own */
};

struct launch_settings {
	__u64 seed;
	__u64 until_ns; /* boot clock */
	__u64 most_of_one_process;
	__u64 ring_half_bytes;
	__u64 handles_freed;
	__u64 processes_freed;
	__u32 handles_limit;
	__u32 handles_mask;
	__u32 processes_limit;
	__u32 processes_mask;
	__u32 stretch; /* 0: none is open */
	__u32 reserved;
};

struct launch_sample {
	__u64 time_ns; /* boot clock */
	__u64 start_ns;
	__u64 handle;
	__u64 stream;
	__u32 tgid;
	__u32 pid;
	__u32 shape[6]; /* grid x, y, z, block x, y, z */
};

/* CUlaunchConfig of cuda.h, as far as it is read. */
struct launch_configuration {
	__u32 shape[6];
	__u32 shared_memory;
	__u32 reserved;
	__u64 stream;
};

enum kind {
	BY_ARGUMENTS,
	BY_CONFIGURATION,
	BY_HANDLE,
	GRAPH,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 17);
	__type(key, __u32);
	__type(value, struct launch_slot);
} launches SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 14);
	__type(key, __u32);
	__type(value, struct launching_process);
} processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct launch_settings);
} settings_map SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} samples SEC(".maps");

static __always_inline void increment(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	if (value)
		__sync_fetch_and_add(value, 1);
}

static __always_inline __u64 used(__u32 counter, __u64 freed)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	return value ? *value - freed : -1;
}

/* The number of a process's slot, from 1; 0 if it has none and finds none. */
static __noinline __u32 number_of(__u64 start_ns, __u32 tgid, struct launch_settings *set)
{
	__u64 owner = (start_ns >> 8 | 1) << 32 | tgid;
	__u64 hash;

	if (!set)
		return 0;
	hash = spread(start_ns, tgid, set->seed);
	for (__u32 turn = 0; turn < PROBES; turn++) {
		__u32 index = slot_index(hash, turn, set->processes_mask);
		struct launching_process *process = bpf_map_lookup_elem(&processes, &index);

		if (process && process->owner == owner && process->start_ns == start_ns)
			return index + 1;
	}
	if (used(COUNT_PROCESSES, set->processes_freed) >= set->processes_limit)
		return 0;
	for (__u32 turn = 0; turn < PROBES; turn++) {
		__u32 index = slot_index(hash, turn, set->processes_mask);
		struct launching_process *process = bpf_map_lookup_elem(&processes, &index);

		if (!process)
			continue;
		if (!process->owner && take(&process->owner, owner)) {
			WRITTEN_FIRST();
			process->start_ns = start_ns;
			increment(COUNT_PROCESSES);
			return index + 1;
		}
		/* Another thread of it was first. */
		if (process->owner == owner)
			return index + 1;
	}
	return 0;
}

static __always_inline struct launching_process *process_of(__u32 number)
{
	__u32 index = number - 1;

	return bpf_map_lookup_elem(&processes, &index);
}

/*
 * Whether a process may take up one more handle. The more of them are in use, the fewer may one
 * process have: a process that makes them up cannot take the room of the others.
 */
static __noinline bool has_room(struct launching_process *process, struct launch_settings *set)
{
	__u64 taken = used(COUNT_HANDLES, set->handles_freed);

	return taken < set->handles_limit &&
	       process->handles * SHARE_OF_FREE < set->handles_limit - taken;
}

/* Asked again where it would be kept over calls: the frame is to be small, see FRAMES. */
static __always_inline __u32 this_process(void)
{
	return bpf_get_current_pid_tgid() >> 32;
}

static __always_inline __u64 this_start_ns(void)
{
	struct task_struct *task = bpf_get_current_task_btf();

	return task->group_leader->start_boottime;
}

/* The first launch of a handle, or one of a handle that finds no room; the process's number. */
static __noinline __u32 count_first(__u64 handle, __u64 start_ns, __u32 tgid,
				    struct launch_settings *set)
{
	struct launching_process *process;
	__u32 number;
	__u64 hash;

	if (!set)
		return 0;
	number = unforeseen(number_of(start_ns, tgid, set));
	process = process_of(number);
	if (!process) {
		increment(COUNT_UNCOUNTED);
		return 0;
	}
	hash = spread(handle, start_ns, set->seed);
	for (__u32 turn = 0; turn < PROBES; turn++) {
		__u32 index = slot_index(hash, turn, set->handles_mask);
		struct launch_slot *slot = bpf_map_lookup_elem(&launches, &index);

		/* A call with no function fails, and 0 stands for a graph. */
		if (!slot || !handle || !has_room(process, set))
			break;
		if (slot->owner || !take(&slot->owner, (__u64)number << 32 | this_process()))
			continue;
		slot->handle = handle;
		slot->launches = 1;
		WRITTEN_FIRST();
		slot->start_ns = this_start_ns();
		__sync_fetch_and_add(&process->handles, 1);
		increment(COUNT_HANDLES);
		return number;
	}
	__sync_fetch_and_add(&process->others, 1);
	return number;
}

/* Counts a launch; the number of its process. */
static __always_inline __u32 count(__u64 handle, __u64 start_ns, __u32 tgid,
				   struct launch_settings *set)
{
	__u64 hash = spread(handle, start_ns, set->seed);

	for (__u32 turn = 0; turn < PROBES; turn++) {
		__u32 index = slot_index(hash, turn, set->handles_mask);
		struct launch_slot *slot = bpf_map_lookup_elem(&launches, &index);

		if (slot && slot->start_ns == start_ns && slot->handle == handle &&
		    (__u32)slot->owner == tgid) {
			__sync_fetch_and_add(&slot->launches, 1);
			return slot->owner >> 32;
		}
	}
	return unforeseen(count_first(handle, start_ns, tgid, set));
}

static __always_inline __u32 count_graph(__u64 start_ns, __u32 tgid, struct launch_settings *set)
{
	__u32 number = unforeseen(number_of(start_ns, tgid, set));
	struct launching_process *process = process_of(number);

	if (process)
		__sync_fetch_and_add(&process->graphs, 1);
	else
		increment(COUNT_UNCOUNTED);
	return number;
}

static __always_inline void read_by_arguments(struct launch_sample *sample, struct pt_regs *context)
{
#if ENTRY_REGISTERS == 6
	/* Block z, shared memory, stream: read to where the shape is written afterwards. */
	__u64 *stack = (__u64 *)sample->shape;

	bpf_probe_read_user(stack, 3 * sizeof(*stack), ENTRY_STACK(context));
	__u32 block_z = stack[0];

	sample->stream = stack[2];
#else
	__u32 block_z = ENTRY_7(context);

	bpf_probe_read_user(&sample->stream, sizeof(sample->stream), ENTRY_STACK(context));
#endif
	sample->shape[0] = ENTRY_2(context);
	sample->shape[1] = ENTRY_3(context);
	sample->shape[2] = ENTRY_4(context);
	sample->shape[3] = ENTRY_5(context);
	sample->shape[4] = ENTRY_6(context);
	sample->shape[5] = block_z;
}

static __always_inline void read_configuration(struct launch_sample *sample, void *address)
{
	struct launch_configuration *configuration = address;

	bpf_probe_read_user(sample->shape, sizeof(sample->shape), configuration->shape);
	bpf_probe_read_user(&sample->stream, sizeof(sample->stream), &configuration->stream);
}

static __always_inline void read_stream(struct launch_sample *sample, __u64 stream)
{
	__builtin_memset(sample->shape, 0, sizeof(sample->shape));
	sample->stream = stream;
}

/*
 * The reader comes at the stretch's end; before it only where a ring is half full already. It has
 * the sample for an argument so that the object describes what one looks like.
 */
static __noinline int is_filling(struct launch_sample *sample, struct launch_settings *set)
{
	return sample && set &&
	       bpf_ringbuf_query(&samples, BPF_RB_AVAIL_DATA) >= set->ring_half_bytes;
}

/* A launch while a stretch is open. */
static __always_inline void sample_launch(struct task_struct *task, __u64 start_ns, __u64 handle,
					  __u32 number, struct launch_settings *set,
					  struct pt_regs *context, enum kind kind)
{
	struct launching_process *process = process_of(number);
	__u64 now = bpf_ktime_get_boot_ns(), wake_up = BPF_RB_NO_WAKEUP;
	struct launch_sample *sample;

	if (!process || now >= set->until_ns)
		return;
	/* A call with no function fails, and 0 stands for a graph. */
	if (process->told - process->told_before >= set->most_of_one_process ||
	    (!handle && kind != GRAPH))
		goto untold;
	sample = bpf_ringbuf_reserve(&samples, sizeof(*sample), 0);
	if (!sample)
		goto untold;
	sample->time_ns = now;
	sample->start_ns = start_ns;
	sample->handle = handle;
	sample->tgid = task->tgid;
	sample->pid = task->pid;
	if (kind == BY_ARGUMENTS)
		read_by_arguments(sample, context);
	else if (kind == BY_CONFIGURATION)
		read_configuration(sample, (void *)ENTRY_1(context));
	else
		read_stream(sample, kind == GRAPH ? ENTRY_2(context) : 0);
	if (!(process->told & (LOOK_EVERY - 1)) && unforeseen(is_filling(sample, set)))
		wake_up = BPF_RB_FORCE_WAKEUP;
	bpf_ringbuf_submit(sample, wake_up);
	__sync_fetch_and_add(&process->told, 1);
	return;
untold:
	__sync_fetch_and_add(&process->untold, 1);
}

static __always_inline int launched(__u64 handle, struct pt_regs *context, enum kind kind)
{
	/* Followed as a pointer of a known type: no helper is called for what is behind it. */
	struct task_struct *task = bpf_get_current_task_btf();
	__u64 start_ns = task->group_leader->start_boottime;
	__u32 tgid = task->tgid, first = 0, number;
	struct launch_settings *set = bpf_map_lookup_elem(&settings_map, &first);

	if (!set)
		return 0;
	number = kind == GRAPH ? count_graph(start_ns, tgid, set) :
				 count(handle, start_ns, tgid, set);
	if (set->stretch)
		sample_launch(task, start_ns, handle, number, set, context, kind);
	return 0;
}

SEC("?uprobe")
int launch_kernel(struct pt_regs *context)
{
	return launched(ENTRY_1(context), context, BY_ARGUMENTS);
}

SEC("?uprobe")
int launch_by_config(struct pt_regs *context)
{
	return launched(ENTRY_2(context), context, BY_CONFIGURATION);
}

SEC("?uprobe")
int launch_by_handle(struct pt_regs *context)
{
	return launched(ENTRY_1(context), context, BY_HANDLE);
}

SEC("?uprobe")
int launch_graph(struct pt_regs *context)
{
	return launched(0, context, GRAPH);
}
