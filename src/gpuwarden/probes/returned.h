/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How an attempt ended. */
#ifndef GPUWARDEN_RETURNED_H
#define GPUWARDEN_RETURNED_H

#include "maps.h"
#include "process.h"

struct system_call_exit {
	__u64 common;
	__u64 number;
	__s64 result;
};

/* The file behind a descriptor that a task was just given. */
static __always_inline struct file *file_of(struct task_struct *task, __u32 descriptor)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **slots = BPF_CORE_READ(table, fd), *file = 0;

	if (descriptor < BPF_CORE_READ(table, max_fds))
		bpf_probe_read_kernel(&file, sizeof(file), slots + descriptor);
	return file;
}

static __noinline int fill_return(struct return_record *record, struct attempt *attempt)
{
	if (!record || !attempt)
		return 0;
	record->time_ns = bpf_ktime_get_boot_ns();
	record->attempt_ns = attempt->time_ns;
	record->start_ns = attempt->start_ns;
	record->kind = KIND_RETURN;
	record->major = attempt->major;
	record->minor = attempt->minor;
	record->open_flags = 0;
	record->path.length = 0;
	if (record->result >= 0) {
		struct task_struct *task = (void *)bpf_get_current_task();
		struct file *file = file_of(task, record->result);

		if (file) {
			record->open_flags = BPF_CORE_READ(file, f_flags);
			if (!unforeseen(write_path(BPF_CORE_READ(file, f_path.dentry),
						   BPF_CORE_READ(file, f_path.mnt),
						   &record->path)))
				record->path.length = 0;
		}
	}
	return 0;
}

/* At the end of open(2) and its kin: loading.py lists the system calls. */
SEC("?tracepoint")
int returned(struct system_call_exit *context)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct attempt *attempt = bpf_map_lookup_elem(&attempts, &thread);
	struct return_record *record;

	if (!attempt)
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED_RETURNS);
		bpf_map_delete_elem(&attempts, &thread);
		return 0;
	}
	record->pid = (__u32)thread;
	record->tgid = thread >> 32;
	record->result = context->result;
	fill_return(record, attempt);
	bpf_ringbuf_submit(record, 0);
	bpf_map_delete_elem(&attempts, &thread);
	return 0;
}

#endif
