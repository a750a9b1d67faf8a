/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps of the probes of calls, who is calling, and how much of it is told. */
#ifndef GPUWARDEN_CUDA_MAPS_H
#define GPUWARDEN_CUDA_MAPS_H

#include "cuda_records.h"

enum counter { COUNT_LOADS, COUNT_CONTEXTS, COUNT_NAMES, COUNT_DROPPED, COUNT_LIMITED, COUNTERS };

struct call_settings {
	__u64 limit_bytes; /* of one image */
	__u64 wait_ns; /* for room in the ring, in all of one load */
	__u64 window_ns;
	__u32 names_limit; /* of one process in a window; of contexts and loads as well */
	__u32 contexts_limit;
	__u32 loads_limit;
	__u32 may_stop;
	__u32 returns; /* are seen */
	__u32 reserved;
};

struct call_process {
	__u64 start_ns;
	__u32 tgid;
	__u32 reserved;
};

struct call_share {
	__u64 window_ns;
	__u32 told[COUNT_DROPPED];
	__u32 reserved;
};

static const struct call_share no_share;
static const __u32 told_once = 1;

struct named_handle {
	struct call_process process;
	__u64 handle;
	__u64 of;
	__u64 name; /* its digest */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 26);
} records SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct call_settings);
} settings_map SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 12);
	__type(key, struct call_process);
	__type(value, struct call_share);
} shares SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 16);
	__type(key, struct named_handle);
	__type(value, __u32);
} named_handles SEC(".maps");

/* A program that sleeps shares its CPU's counters with others that run meanwhile. */
static __always_inline void increment(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	if (value)
		__sync_fetch_and_add(value, 1);
}

static __always_inline struct call_settings *settings(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&settings_map, &first);
}

static __always_inline void fill_call(struct cuda_call *call, __u32 function, __u64 begun_ns)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 ids = bpf_get_current_pid_tgid();

	call->time_ns = bpf_ktime_get_boot_ns();
	call->begun_ns = begun_ns;
	call->start_ns = BPF_CORE_READ(task, group_leader, start_boottime);
	call->tgid = ids >> 32;
	call->pid = ids;
	call->record = 0;
	call->function = function;
}

enum share { NOT_WITHIN, WITHIN, LAST_WITHIN };

/* Counts a call; whether it is within what may be told of one process in a window. */
static __noinline int is_within_share(struct cuda_call *call, __u32 counter, __u32 limit)
{
	struct call_settings *set = settings();
	struct call_process key = {};
	struct call_share *share;

	if (!call || !set || counter >= COUNT_DROPPED)
		return NOT_WITHIN;
	increment(counter);
	key.start_ns = call->start_ns;
	key.tgid = call->tgid;
	share = bpf_map_lookup_elem(&shares, &key);
	if (!share) {
		bpf_map_update_elem(&shares, &key, &no_share, BPF_NOEXIST);
		share = bpf_map_lookup_elem(&shares, &key);
		if (!share)
			return WITHIN;
	}
	if (call->time_ns - share->window_ns >= set->window_ns) {
		share->window_ns = call->time_ns;
		__builtin_memset(share->told, 0, sizeof(share->told));
	}
	__sync_fetch_and_add(&share->told[counter], 1);
	if (share->told[counter] < limit)
		return WITHIN;
	if (share->told[counter] == limit)
		return LAST_WITHIN;
	increment(COUNT_LIMITED);
	return NOT_WITHIN;
}

#endif
