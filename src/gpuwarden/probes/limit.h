/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How much is told of one process and device. */
#ifndef GPUWARDEN_LIMIT_H
#define GPUWARDEN_LIMIT_H

#include "maps.h"

/* Counts a hit; whether it is within what may be told of one process and device in a window. */
static __always_inline bool is_within_limit(struct settings *set, __u64 now, __u32 major,
					    __u32 minor, __u32 how, __u64 *hits)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct count_key key = { .major = major, .minor = minor, .how = how };
	struct count *count;

	*hits = 0;
	if (!set->limit_events)
		return true;
	key.tgid = BPF_CORE_READ(task, tgid);
	key.start_ns = BPF_CORE_READ(task, group_leader, start_boottime);
	count = bpf_map_lookup_elem(&counts, &key);
	if (!count) {
		struct count first = { .window_ns = now };

		bpf_map_update_elem(&counts, &key, &first, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&counts, &key);
		if (!count) {
			increment(COUNT_LIMITER_FULL);
			return true;
		}
	}
	__sync_fetch_and_add(&count->hits, 1);
	*hits = count->hits;
	if (now - count->window_ns >= set->limit_window_ns) {
		count->window_ns = now;
		count->in_window = 0;
	}
	if (count->in_window >= set->limit_events) {
		increment(COUNT_LIMITED);
		return false;
	}
	__sync_fetch_and_add(&count->in_window, 1);
	return true;
}

#endif
