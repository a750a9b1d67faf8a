// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How often each process launches each kernel, counted where the driver library's functions begin;
 * in a stretch that the reader opens, the first launches of each process are told one by one.
 *
 *   launch_kernel      cuLaunchKernel and its kin: (function, grid, block, shared memory, stream)
 *   launch_by_config   cuLaunchKernelEx: (configuration, function)
 *   launch_graph       cuGraphLaunch: (graph, stream)
 *
 * A workload pays for this at every launch: one look-up in a hash table, one addition. What does
 * not fit a table is counted in another place, down to one number for the whole machine; no launch
 * of a probed library is lost.
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"
#include "entry.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* A process may take up handles while it has less than this part of the room that is free. */
#define SHARE_OF_FREE 8

/* Of how many samples of a process one looks whether the ring is getting full; a power of two. */
#define LOOK_EVERY 256

/* Reasons a launch is in no process's count; counters of the whole machine. */
#define COUNT_HANDLES 0    /* handles taken up so far */
#define COUNT_UNCOUNTED 1  /* launches of processes that found no room */
#define COUNT_UNSAMPLED 2  /* launches of a stretch that found no room for their process */
#define COUNTERS 3

struct launch_process {
	__u64 start_ns;
	__u32 tgid;
	__u32 stretch; /* of shares; 0 elsewhere */
};

struct launch_key {
	struct launch_process process;
	__u64 handle;
};

struct launch_totals {
	__u64 graphs;
	__u64 others; /* launches by handles that found no room */
	__u64 handles;
};

struct sample_share {
	__u64 taken;
	__u64 dropped;
};

struct launch_settings {
	__u64 until_ns; /* boot clock */
	__u64 handles_limit;
	__u64 handles_freed;
	__u64 ring_half_bytes;
	__u32 stretch; /* 0: none is open */
	__u32 most_of_one_process;
};

struct launch_sample {
	__u64 time_ns; /* boot clock */
	__u64 start_ns;
	__u64 handle;
	__u64 stream;
	__u32 tgid;
	__u32 pid;
	__u32 grid[3];
	__u32 block[3];
};

/* CUlaunchConfig of cuda.h, as far as it is read. */
struct launch_configuration {
	__u32 grid[3];
	__u32 block[3];
	__u32 shared_memory;
	__u32 reserved;
	__u64 stream;
};

enum kind {
	BY_ARGUMENTS,
	BY_CONFIGURATION,
	GRAPH,
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__type(key, struct launch_key);
	__type(value, __u64);
} launches SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 13);
	__type(key, struct launch_process);
	__type(value, struct launch_totals);
} totals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, struct launch_process);
	__type(value, struct sample_share);
} shares SEC(".maps");

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

static __always_inline struct launch_settings *settings(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&settings_map, &first);
}

static __always_inline void increment(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	if (value)
		__sync_fetch_and_add(value, 1);
}

static __always_inline struct launch_totals *totals_of(struct launch_process *process)
{
	struct launch_totals *found = bpf_map_lookup_elem(&totals, process);

	if (!found) {
		struct launch_totals none = {};

		bpf_map_update_elem(&totals, process, &none, BPF_NOEXIST);
		found = bpf_map_lookup_elem(&totals, process);
		if (!found)
			increment(COUNT_UNCOUNTED);
	}
	return found;
}

/*
 * Whether a process may take up one more handle. The more of them are in use, the fewer may one
 * process have: a process that makes them up cannot take the room of the others.
 */
static __always_inline bool has_room(struct launch_totals *process, struct launch_settings *set)
{
	__u32 which = COUNT_HANDLES;
	__u64 *taken = bpf_map_lookup_elem(&counters, &which);
	__u64 used;

	if (!taken)
		return false;
	used = *taken - set->handles_freed;
	return used < set->handles_limit &&
	       process->handles * SHARE_OF_FREE < set->handles_limit - used;
}

/* The first launch of a handle, or one of a handle that finds no room. */
static __noinline int count_first(struct launch_key *key, struct launch_settings *set)
{
	struct launch_totals *process = totals_of(&key->process);
	__u64 one = 1, *count;

	if (!process)
		return 0;
	if (key->handle && has_room(process, set)) {
		if (!bpf_map_update_elem(&launches, key, &one, BPF_NOEXIST)) {
			__sync_fetch_and_add(&process->handles, 1);
			increment(COUNT_HANDLES);
			return 0;
		}
		/* Another thread was first, or there is no room after all. */
		count = bpf_map_lookup_elem(&launches, key);
		if (count) {
			__sync_fetch_and_add(count, 1);
			return 0;
		}
	}
	__sync_fetch_and_add(&process->others, 1);
	return 0;
}

static __always_inline void read_by_arguments(struct launch_sample *sample, struct pt_regs *context)
{
	__u64 stack[3] = {};

	sample->grid[0] = ENTRY_2(context);
	sample->grid[1] = ENTRY_3(context);
	sample->grid[2] = ENTRY_4(context);
	sample->block[0] = ENTRY_5(context);
	sample->block[1] = ENTRY_6(context);
#if ENTRY_REGISTERS == 6
	/* block z, shared memory, stream */
	bpf_probe_read_user(stack, sizeof(stack), ENTRY_STACK(context));
	sample->block[2] = stack[0];
	sample->stream = stack[2];
#else
	sample->block[2] = ENTRY_7(context);
	bpf_probe_read_user(stack, sizeof(stack[0]), ENTRY_STACK(context));
	sample->stream = stack[0];
#endif
}

static __always_inline void read_configuration(struct launch_sample *sample, void *address)
{
	struct launch_configuration configuration = {};

	bpf_probe_read_user(&configuration, sizeof(configuration), address);
	__builtin_memcpy(sample->grid, configuration.grid, sizeof(sample->grid));
	__builtin_memcpy(sample->block, configuration.block, sizeof(sample->block));
	sample->stream = configuration.stream;
}

/* The first launch of a process in a stretch. */
static __noinline int open_share(struct launch_sample *sample, struct launch_settings *set)
{
	struct launch_process process = {};
	struct sample_share none = {};

	if (!sample || !set)
		return 0;
	process.start_ns = sample->start_ns;
	process.tgid = sample->tgid;
	process.stretch = set->stretch;
	bpf_map_update_elem(&shares, &process, &none, BPF_NOEXIST);
	return 0;
}

/* The reader comes at the stretch's end; before it only where a ring is half full already. */
static __always_inline __u64 wake_up(struct sample_share *share, struct launch_settings *set)
{
	if (share->taken & (LOOK_EVERY - 1) ||
	    bpf_ringbuf_query(&samples, BPF_RB_AVAIL_DATA) < set->ring_half_bytes)
		return BPF_RB_NO_WAKEUP;
	return BPF_RB_FORCE_WAKEUP;
}

/* A launch while a stretch is open. */
static __always_inline void sample_launch(struct launch_process *process, __u32 thread,
					  struct launch_settings *set, __u64 handle,
					  struct pt_regs *context, enum kind kind)
{
	struct launch_sample sample = {
		.time_ns = bpf_ktime_get_boot_ns(),
		.start_ns = process->start_ns,
		.handle = handle,
		.tgid = process->tgid,
		.pid = thread,
	};
	struct sample_share *share;

	if (sample.time_ns >= set->until_ns)
		return;
	process->stretch = set->stretch;
	share = bpf_map_lookup_elem(&shares, process);
	if (!share) {
		open_share(&sample, set);
		share = bpf_map_lookup_elem(&shares, process);
		if (!share) {
			increment(COUNT_UNSAMPLED);
			return;
		}
	}
	/* A call with no function fails, and 0 stands for a graph. */
	if (share->taken >= set->most_of_one_process || (!handle && kind != GRAPH))
		goto dropped;
	if (kind == BY_ARGUMENTS)
		read_by_arguments(&sample, context);
	else if (kind == BY_CONFIGURATION)
		read_configuration(&sample, (void *)ENTRY_1(context));
	else
		sample.stream = ENTRY_2(context);
	if (bpf_ringbuf_output(&samples, &sample, sizeof(sample), wake_up(share, set)))
		goto dropped;
	__sync_fetch_and_add(&share->taken, 1);
	return;
dropped:
	__sync_fetch_and_add(&share->dropped, 1);
}

static __always_inline int launched(__u64 handle, struct pt_regs *context, enum kind kind)
{
	/* Followed as a pointer of a known type: no helper is called for what is behind it. */
	struct task_struct *task = bpf_get_current_task_btf();
	struct launch_settings *set = settings();
	struct launch_key key = {
		.handle = handle,
		.process.start_ns = task->group_leader->start_boottime,
		.process.tgid = task->tgid,
	};
	struct launch_totals *process;
	__u64 *count;

	if (!set)
		return 0;
	if (kind == GRAPH) {
		process = totals_of(&key.process);
		if (process)
			__sync_fetch_and_add(&process->graphs, 1);
	} else {
		count = bpf_map_lookup_elem(&launches, &key);
		if (count)
			__sync_fetch_and_add(count, 1);
		else
			count_first(&key, set);
	}
	if (set->stretch)
		sample_launch(&key.process, task->pid, set, handle, context, kind);
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
int launch_graph(struct pt_regs *context)
{
	return launched(0, context, GRAPH);
}
