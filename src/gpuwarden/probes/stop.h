/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Stops the calling process until user space has read what did not fit into a buffer.
 *
 * Each stop is written down before it is made, so that whoever has the map knows whom to continue;
 * a process that is written down already is not stopped again, so that what is removed from the map
 * is what was looked at. Nobody is stopped but while a guardian keeps renewing its word: when it is
 * gone, or hangs, its last one runs out.
 */
#ifndef GPUWARDEN_STOP_H
#define GPUWARDEN_STOP_H

#include "kernel_types.h"

/* signal(7): a set of signals has signal n at bit n - 1. */
#define STOP_SIGNAL 19
#define STOPS_AND_CONTINUE (1ULL << 17 | 1ULL << 18 | 1ULL << 19 | 1ULL << 20 | 1ULL << 21)
/* linux/sched/signal.h: SIGNAL_STOP_STOPPED, SIGNAL_GROUP_EXIT; linux/sched/jobctl.h. */
#define STOPPED_OR_EXITING (0x1 | 0x4)
#define STOP_UNDER_WAY (1UL << 17)

/* What became of it; stopped.py has the same. */
enum stop_outcome {
	STOPPED,
	STOP_NOT_ALLOWED, /* no guardian, or it has said no */
	STOP_OF_OTHERS, /* somebody else is stopping, continuing, tracing or ending the process */
	STOP_BEFORE, /* an earlier stop of it is not dealt with */
	STOP_NO_ROOM,
	STOP_FAILED, /* the signal was refused */
};

struct stopped_process {
	__u64 start_ns; /* of the process, since boot */
	__u64 stopped_at_ns; /* since boot */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct stopped_process);
} stopped SEC(".maps");

/* Until when processes may be stopped, since boot; 0: not at all. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} stops_until SEC(".maps");

static __always_inline bool is_others_matter(struct task_struct *task)
{
	__u64 pending = BPF_CORE_READ(task, pending.signal.sig[0]) |
			BPF_CORE_READ(task, signal, shared_pending.signal.sig[0]);

	return pending & STOPS_AND_CONTINUE || BPF_CORE_READ(task, ptrace) ||
	       BPF_CORE_READ(task, jobctl) & STOP_UNDER_WAY ||
	       BPF_CORE_READ(task, signal, group_stop_count) ||
	       BPF_CORE_READ(task, signal, flags) & STOPPED_OR_EXITING;
}

/*
 * Whether the calling process will stop before it runs on. Nothing that can sleep may come between
 * the question whether stops are allowed and the signal.
 */
static __noinline int stop_process(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct stopped_process stop = {};
	__u32 first = 0, tgid = bpf_get_current_pid_tgid() >> 32;
	__u64 *until = bpf_map_lookup_elem(&stops_until, &first);
	long done;

	stop.stopped_at_ns = bpf_ktime_get_boot_ns();
	if (!until || stop.stopped_at_ns >= *(volatile __u64 *)until)
		return STOP_NOT_ALLOWED;
	if (is_others_matter(task))
		return STOP_OF_OTHERS;
	stop.start_ns = BPF_CORE_READ(task, group_leader, start_boottime);
	done = bpf_map_update_elem(&stopped, &tgid, &stop, BPF_NOEXIST);
	if (done)
		return done == -17 /* EEXIST */ ? STOP_BEFORE : STOP_NO_ROOM;
	if (bpf_send_signal(STOP_SIGNAL)) {
		bpf_map_delete_elem(&stopped, &tgid);
		return STOP_FAILED;
	}
	return STOPPED;
}

#endif
