/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Every descriptor on a watched device, whoever opened it. */
#ifndef GPUWARDEN_HOLDERS_H
#define GPUWARDEN_HOLDERS_H

#include "maps.h"

static __noinline int write_holder(struct holder_record *record, struct seq_file *seq)
{
	return record && seq ? bpf_seq_write(seq, record, sizeof(*record)) : 0;
}

SEC("?iter/task_file")
int holders(struct bpf_iter__task_file *context)
{
	struct task_struct *task = context->task;
	struct file *file = context->file;
	struct inode *inode;
	__u32 device;

	if (!task || !file)
		return 0;
	/* Every file of the machine comes by here each second: pointers are followed, not copied. */
	inode = file->f_inode;
	if (!inode || (inode->i_mode & CHARACTER_MASK) != CHARACTER)
		return 0;
	device = inode->i_rdev;
	if (!is_watched(device >> 20, device & 0xfffff))
		return 0;
	/* O_PATH only names the node. */
	if (file->f_mode & MODE_PATH)
		return 0;
	struct holder_record record = {};

	record.start_ns = BPF_CORE_READ(task, group_leader, start_boottime);
	record.inode = BPF_CORE_READ(inode, i_ino);
	record.tgid = task->tgid;
	record.pid = task->pid;
	record.descriptor = context->fd;
	record.major = device >> 20;
	record.minor = device & 0xfffff;
	record.open_flags = file->f_flags;
	record.uid = BPF_CORE_READ(task, cred, uid.val);
	bpf_core_read_str(record.comm, sizeof(record.comm), &task->comm);
	write_holder(&record, context->meta->seq);
	return 0;
}

#endif
