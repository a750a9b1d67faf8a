/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What becomes of processes that touched a watched device; tools; control groups. */
#ifndef GPUWARDEN_LIFE_H
#define GPUWARDEN_LIFE_H

#include "maps.h"
#include "process.h"
#include "tools.h"

static __always_inline struct touched_process *touched_process(__u32 tgid, __u64 start_ns)
{
	struct touched_process *found = bpf_map_lookup_elem(&touched_processes, &tgid);

	return found && found->start_ns == start_ns ? found : 0;
}

/* A child has its parent's descriptors: it is followed as well. */
SEC("?raw_tracepoint/sched_process_fork")
int process_fork(struct bpf_raw_tracepoint_args *context)
{
	struct task_struct *parent = (void *)context->args[0];
	struct task_struct *child = (void *)context->args[1];
	__u32 tgid = BPF_CORE_READ(child, tgid);
	struct touched_process touched = {}, *forebear;

	if (BPF_CORE_READ(child, pid) != (int)tgid)
		return 0;
	forebear = touched_process(BPF_CORE_READ(parent, tgid),
				   BPF_CORE_READ(parent, group_leader, start_boottime));
	if (!forebear)
		return 0;
	touched.start_ns = BPF_CORE_READ(child, start_boottime);
	touched.opener = forebear->opener;
	touched.opener_start_ns = forebear->opener_start_ns;
	bpf_map_update_elem(&touched_processes, &tgid, &touched, BPF_ANY);
	return 0;
}

static __noinline int fill_exec(struct exec_record *record)
{
	if (!record)
		return 0;
	record->time_ns = bpf_ktime_get_boot_ns();
	record->kind = KIND_EXEC;
	record->reserved = 0;
	return fill_process(&record->process);
}

SEC("?raw_tracepoint/sched_process_exec")
int process_exec(struct bpf_raw_tracepoint_args *context)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	bool touched = touched_process(BPF_CORE_READ(task, tgid),
				       BPF_CORE_READ(task, group_leader, start_boottime));
	struct settings *set = settings();
	struct exec_record *record;
	struct tool_name name = {};
	int tool = tool_of(task, (void *)context->args[2], &name);

	if (!set || !(touched || set->every_exec || tool))
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED_EXECS);
		return 0;
	}
	record->touched = touched;
	record->tool = tool;
	record->tool_name = name;
	fill_exec(record);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

static __noinline int fill_group(struct group_record *record, struct cgroup *group,
				 const char *path)
{
	if (!record)
		return 0;
	record->time_ns = bpf_ktime_get_boot_ns();
	record->kind = KIND_GROUP;
	record->reserved = 0;
	record->cgroup_id = BPF_CORE_READ(group, kn, id);
	record->hierarchy = BPF_CORE_READ(group, root, hierarchy_id);
	record->path_length = bpf_probe_read_kernel_str(record->path, sizeof(record->path), path);
	return 0;
}

/* A group is made, and told of before its first process can be in it. */
SEC("?raw_tracepoint/cgroup_mkdir")
int group_made(struct bpf_raw_tracepoint_args *context)
{
	struct group_record *record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);

	if (!record) {
		increment(COUNT_DROPPED_GROUPS);
		return 0;
	}
	fill_group(record, (void *)context->args[0], (void *)context->args[1]);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

static __noinline int fill_exit(struct exit_record *record)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	if (!record)
		return 0;
	record->time_ns = bpf_ktime_get_boot_ns();
	record->kind = KIND_EXIT;
	record->exit_code = BPF_CORE_READ(task, exit_code);
	record->reserved = 0;
	bpf_core_read_str(record->comm, sizeof(record->comm), &task->comm);
	return 0;
}

SEC("?raw_tracepoint/sched_process_exit")
int process_exit(struct bpf_raw_tracepoint_args *context)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u32 tgid = BPF_CORE_READ(task, tgid);
	__u64 start_ns = BPF_CORE_READ(task, group_leader, start_boottime);
	struct settings *set = settings();
	struct exit_record *record;
	bool touched = touched_process(tgid, start_ns);

	/* The first thread may end before the others: the process ends with its last one. */
	if (BPF_CORE_READ(task, signal, live.counter) != 0)
		return 0;
	if (touched)
		bpf_map_delete_elem(&touched_processes, &tgid);
	if (!set || !(touched || set->every_exec))
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED_EXITS);
		return 0;
	}
	record->start_ns = start_ns;
	record->tgid = tgid;
	fill_exit(record);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

#endif
