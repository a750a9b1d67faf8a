// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How often each process has executed a program, as the kernel itself counts it: task_struct's
 * self_exec_id, which a child begins with as its parent had it, and which nobody can set.
 *
 * Numbers are those of the pid namespace of whoever reads: the iterator walks that one.
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define LEVELS 33 /* the kernel nests 32 pid namespaces */

struct exec_record {
	__u64 start_ns;
	__u64 count;
	__u64 exe_inode;
	__u32 pid;
	__u32 exe_device;
};

/* The process that is asked for; 0: all of them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} wanted SEC(".maps");

static __always_inline __u32 number_here(struct task_struct *task)
{
	struct task_struct *reader = (void *)bpf_get_current_task();
	__u32 level = BPF_CORE_READ(reader, thread_pid, level);
	struct pid *numbers = BPF_CORE_READ(task, thread_pid);
	struct upid number = {};

	if (level < LEVELS && numbers)
		bpf_core_read(&number, sizeof(number), &numbers->numbers[level]);
	return number.nr;
}

/* A function of its own, so that the object describes the record. */
static __noinline int write_record(struct exec_record *record, struct seq_file *seq)
{
	return record && seq ? bpf_seq_write(seq, record, sizeof(*record)) : 0;
}

SEC("?iter/task")
int exec_counts(struct bpf_iter__task *context)
{
	struct task_struct *task = context->task;
	struct exec_record record = {};
	__u32 first = 0, *pid;

	/* The first thread has the process's number; one exec ends all the others. */
	if (!task || task->pid != task->tgid)
		return 0;
	record.pid = number_here(task);
	pid = bpf_map_lookup_elem(&wanted, &first);
	if (!pid || (*pid && *pid != record.pid))
		return 0;
	record.start_ns = task->start_boottime;
	record.count = task->self_exec_id;
	record.exe_inode = BPF_CORE_READ(task, mm, exe_file, f_inode, i_ino);
	record.exe_device = BPF_CORE_READ(task, mm, exe_file, f_inode, i_sb, s_dev);
	write_record(&record, context->meta->seq);
	return 0;
}
