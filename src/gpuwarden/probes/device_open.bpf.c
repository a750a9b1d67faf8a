// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who opens, makes or tries an accelerator's device node, as it happens: the best way to see it.
 *
 *   device_access   cgroup/dev at the cgroup2 root: each open, mknod and access(2) of a watched
 *                   number, by whatever name, io_uring's too. Denies where told to.
 *   returned        sys_exit_open*: how an attempt ended. Optional, since it costs every open.
 *   process_fork, process_exec, process_exit
 *                   what becomes of the processes that touched a watched device; GPU tools.
 *   group_made      a control group was made. Optional.
 *   holders         iter/task_file: every descriptor on a watched device, whoever opened it.
 *
 * A denial is decided before the limiter and before any room is reserved, so that no flood of
 * events lets an open pass. (1,3) is /dev/null: never watched, never denied, whatever a map says.
 *
 * file_open.bpf.c has the other ways; all the rest is the same in both.
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"
#include "told.h"
#include "returned.h"
#include "life.h"
#include "holders.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("?cgroup/dev")
int device_access(struct bpf_cgroup_dev_ctx *context)
{
	struct use use = {
		.major = context->major,
		.minor = context->minor,
		.access = context->access_type >> 16,
		.can_deny = true,
	};

	if ((context->access_type & 0xffff) != BPF_DEVCG_DEV_CHAR ||
	    !is_watched(use.major, use.minor))
		return 1;
	if (use.access & BPF_DEVCG_ACC_MKNOD)
		use.how = HOW_MKNOD;
	tell(&use);
	return unforeseen(use.denial) != DENIED;
}
