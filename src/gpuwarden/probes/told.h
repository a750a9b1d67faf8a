/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* One use of a watched device: judged, counted, limited and told, whichever hook saw it. */
#ifndef GPUWARDEN_TOLD_H
#define GPUWARDEN_TOLD_H

#include "process.h"
#include "denial.h"
#include "limit.h"
#include "call.h"

struct use {
	__u32 major;
	__u32 minor;
	__u32 access; /* BPF_DEVCG_ACC_* */
	__u32 how;    /* HOW_OTHER: as the system call says */
	__u32 opened;
	__u32 can_deny;
	__u32 denial; /* the answer: an enum denial */
};

/* Each layout is a parameter somewhere: only then is it in this object's BTF. */
static __noinline int fill_open(struct open_record *record, struct call *call)
{
	if (!record || !call)
		return 0;
	record->kind = KIND_OPEN;
	record->how = call->how;
	record->syscall = call->number;
	record->open_flags = call->open_flags;
	record->reserved = 0;
	record->path_length = 0;
	if (call->path)
		record->path_length =
			bpf_probe_read_user_str(record->path, sizeof(record->path), call->path);
	return fill_process(&record->process);
}

/*
 * The denial is decided first: no limit and no lack of room changes it. A hook that cannot deny
 * says what it would have done.
 */
static __noinline int tell(struct use *use)
{
	struct open_record *record;
	struct settings *set = settings();
	struct call call = {};
	__u64 hits, now;

	if (!use || !set)
		return 0;
	increment(COUNT_HITS);
	use->denial = set->denying ? denial() : NOT_DENIED;
	if (use->denial == DENIED && !use->can_deny)
		use->denial = WOULD_DENY;
	if (use->denial == DENIED)
		increment(COUNT_DENIED);

	now = bpf_ktime_get_boot_ns();
	read_call(&call);
	if (use->how == HOW_MKNOD || (use->how == HOW_OPEN && call.how != HOW_IO_URING))
		call.how = use->how;
	if (!is_within_limit(set, now, use->major, use->minor, call.how, &hits))
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED_OPENS);
		return 0;
	}
	record->time_ns = now;
	record->hits = hits;
	record->major = use->major;
	record->minor = use->minor;
	record->access = use->access;
	record->denial = use->denial;
	record->opened = use->opened;
	fill_open(record, &call);

	__u32 tgid = record->process.tgid;
	__u64 start_ns = record->process.start_ns;
	__u64 thread = (__u64)tgid << 32 | record->process.pid;

	bpf_ringbuf_submit(record, 0);
	struct touched_process touched = {
		.start_ns = start_ns,
		.opener_start_ns = start_ns,
		.opener = tgid,
	};

	bpf_map_update_elem(&touched_processes, &tgid, &touched, BPF_ANY);
	if (set->return_values && call.returns && !use->opened) {
		struct attempt attempt = {
			.time_ns = now,
			.start_ns = start_ns,
			.major = use->major,
			.minor = use->minor,
		};

		/* On overlayfs one call comes here twice: the first is the one told of. */
		bpf_map_update_elem(&attempts, &thread, &attempt, BPF_NOEXIST);
	}
	return 0;
}

#endif
