/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which control groups are denied the watched devices. */
#ifndef GPUWARDEN_DENIAL_H
#define GPUWARDEN_DENIAL_H

#include "maps.h"
#include "process.h"

/* Whether a group or one above it is in the map: a tenant can make groups below its own. */
static __noinline int denial_of_group(struct cgroup *group)
{
	struct cgroup_key key = {};
	struct kernfs_node *node;

	if (!group)
		return NOT_DENIED;
	key.hierarchy = BPF_CORE_READ(group, root, hierarchy_id);
	node = BPF_CORE_READ(group, kn);
	for (int step = 0; step < CGROUP_DEPTH && node; step++) {
		__u32 *found;

		key.id = BPF_CORE_READ(node, id);
		found = bpf_map_lookup_elem(&denied_cgroups, &key);
		if (found)
			return *found == WOULD_DENY ? WOULD_DENY : DENIED;
		node = parent_of(node);
	}
	return NOT_DENIED;
}

static __always_inline int denial(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct css_set *set = BPF_CORE_READ(task, cgroups);
	int found = unforeseen(denial_of_group(BPF_CORE_READ(set, dfl_cgrp)));

	if (found == NOT_DENIED)
		found = unforeseen(denial_of_group(VERSION_1_GROUP(set, devices_cgrp_id)));
	if (found == NOT_DENIED)
		found = unforeseen(denial_of_group(VERSION_1_GROUP(set, pids_cgrp_id)));
	if (found == NOT_DENIED)
		found = unforeseen(denial_of_group(VERSION_1_GROUP(set, freezer_cgrp_id)));
	return found;
}

#endif
