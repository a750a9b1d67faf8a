/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Who a process is: its binary, arguments, control groups, namespaces. */
#ifndef GPUWARDEN_PROCESS_H
#define GPUWARDEN_PROCESS_H

#include "identity.h"
#include "unforeseen.h"

static __always_inline struct kernfs_node *parent_of(struct kernfs_node *node)
{
	struct kernfs_node___before_6_15 *before = (void *)node;

	if (bpf_core_field_exists(before->parent))
		return (void *)BPF_CORE_READ(before, parent);
	return BPF_CORE_READ(node, __parent);
}

/*
 * The length of what is written so far lives in the record, of which the verifier knows nothing: a
 * length that it followed would make each turn of these loops a new one to check.
 */

/* Appends a NUL-ended name to a buffer with room for one more behind its bound; 0 if it is full. */
static __always_inline int append(char *out, __u32 bound, __u32 *length, const void *name)
{
	__u32 at = *length;
	long wrote;

	if (at >= bound)
		return 0;
	wrote = bpf_probe_read_kernel_str(out + at, NAME_BYTES, name);
	if (wrote <= 0)
		return 0;
	*length = at + wrote;
	return wrote < NAME_BYTES;
}

/* The parts of a file's path, innermost first; 0 if it is cut. */
static __noinline int write_path(struct dentry *dentry, struct vfsmount *vfsmount,
				 struct path_buffer *out)
{
	struct mount *mount;

	if (!out)
		return 0;
	out->length = 0;
	if (!dentry || !vfsmount)
		return 1;
	mount = (void *)vfsmount - bpf_core_field_offset(struct mount, mnt);
	for (int step = 0; step < PATH_PARTS; step++) {
		struct dentry *parent = BPF_CORE_READ(dentry, d_parent);
		struct dentry *root = BPF_CORE_READ(mount, mnt.mnt_root);

		if (dentry == root || dentry == parent) {
			struct mount *above = BPF_CORE_READ(mount, mnt_parent);

			if (above == mount)
				return 1;
			dentry = BPF_CORE_READ(mount, mnt_mountpoint);
			mount = above;
			continue;
		}
		if (!append(out->text, EXE_BYTES, &out->length, BPF_CORE_READ(dentry, d_name.name)))
			return 0;
		dentry = parent;
	}
	return 0;
}

/* The names of a group and its parents, innermost first; 0 if they are cut. */
static __noinline int write_cgroup(struct kernfs_node *node, struct cgroup_buffer *out)
{
	if (!out)
		return 0;
	out->length = 0;
	for (int step = 0; step < CGROUP_PARTS; step++) {
		struct kernfs_node *parent = node ? parent_of(node) : 0;

		if (!parent)
			return 1;
		if (!append(out->text, CGROUP_BYTES, &out->length, BPF_CORE_READ(node, name)))
			return 0;
		node = parent;
	}
	return 0;
}

/* A task's group in the hierarchy of one controller; 0 if that is the version 2 hierarchy. */
#define VERSION_1_GROUP(set, subsystem)                                                            \
	({                                                                                         \
		struct cgroup_subsys_state *state = 0;                                             \
		struct cgroup *group = 0;                                                          \
		if (bpf_core_enum_value_exists(enum cgroup_subsys_id, subsystem)) {                \
			bpf_core_read(&state, sizeof(state),                                       \
				      &(set)->subsys[bpf_core_enum_value(enum cgroup_subsys_id,    \
									 subsystem)]);             \
			group = BPF_CORE_READ(state, cgroup);                                      \
			if (!BPF_CORE_READ(group, root, hierarchy_id))                             \
				group = 0;                                                         \
		}                                                                                  \
		group;                                                                             \
	})

/* The deepest group of a task in the version 1 hierarchies that container runtimes use. */
static __always_inline struct cgroup *version_1_group(struct css_set *set)
{
	struct cgroup *found = VERSION_1_GROUP(set, devices_cgrp_id), *other;

	other = VERSION_1_GROUP(set, pids_cgrp_id);
	if (BPF_CORE_READ(other, level) > BPF_CORE_READ(found, level))
		found = other;
	other = VERSION_1_GROUP(set, freezer_cgrp_id);
	if (BPF_CORE_READ(other, level) > BPF_CORE_READ(found, level))
		found = other;
	return found;
}

/*
 * Functions that uprobes use too have little on their stack: of more, some kernels keep one on each
 * CPU, where whoever comes to the same program meanwhile would find it (cuda_thread.h).
 */

static __noinline int fill_namespaces(struct identity *process)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct upid inner = {};
	struct pid *numbers;
	__u32 level;

	if (!process)
		return 0;
	process->mount_namespace = BPF_CORE_READ(task, nsproxy, mnt_ns, ns.inum);
	process->user_namespace = BPF_CORE_READ(task, cred, user_ns, ns.inum);
	numbers = BPF_CORE_READ(task, group_leader, thread_pid);
	level = BPF_CORE_READ(numbers, level);
	if (level < 32)
		bpf_core_read(&inner, sizeof(inner), &numbers->numbers[level]);
	process->pid_namespace = BPF_CORE_READ(inner.ns, ns.inum);
	process->inner_tgid = inner.nr;
	return 0;
}

static __noinline int fill_cgroups(struct identity *process)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct css_set *set = BPF_CORE_READ(task, cgroups);
	struct cgroup *unified = BPF_CORE_READ(set, dfl_cgrp), *telling = unified;
	struct cgroup *version_1 = version_1_group(set);

	if (!process)
		return 0;
	process->cgroup_id = BPF_CORE_READ(unified, kn, id);
	process->cgroup_v1_id = 0;
	process->cgroup_v1_hierarchy = 0;
	if (version_1) {
		process->cgroup_v1_id = BPF_CORE_READ(version_1, kn, id);
		process->cgroup_v1_hierarchy = BPF_CORE_READ(version_1, root, hierarchy_id);
		if (BPF_CORE_READ(version_1, level) > BPF_CORE_READ(unified, level))
			telling = version_1;
	}
	process->cgroup_names_hierarchy = BPF_CORE_READ(telling, root, hierarchy_id);
	if (!unforeseen(write_cgroup(BPF_CORE_READ(telling, kn), &process->cgroup)))
		process->traits |= CGROUP_CUT;
	return 0;
}

static __noinline int fill_program(struct identity *process)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct mm_struct *memory = BPF_CORE_READ(task, mm);
	struct file *exe;
	__u64 start, size;

	if (!process)
		return 0;
	process->argv_bytes = process->argv_read = 0;
	process->exe_device = process->exe.length = 0;
	process->exe_inode = 0;
	if (!memory)
		return 0;
	start = BPF_CORE_READ(memory, arg_start);
	size = BPF_CORE_READ(memory, arg_end) - start;
	process->argv_bytes = size;
	if (size > ARGV_BYTES)
		size = ARGV_BYTES;
	if (size && bpf_probe_read_user(process->argv, size & (2 * ARGV_BYTES - 1),
					(void *)start) == 0)
		process->argv_read = size;
	exe = BPF_CORE_READ(memory, exe_file);
	if (!exe)
		return 0;
	process->exe_inode = BPF_CORE_READ(exe, f_inode, i_ino);
	process->exe_device = BPF_CORE_READ(exe, f_inode, i_sb, s_dev);
	if (!unforeseen(write_path(BPF_CORE_READ(exe, f_path.dentry),
				   BPF_CORE_READ(exe, f_path.mnt), &process->exe)))
		process->traits |= EXE_CUT;
	return 0;
}

static __noinline int fill_process(struct identity *process)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct task_struct *parent = BPF_CORE_READ(task, real_parent);
	struct tty_struct *tty;

	if (!process)
		return 0;
	process->start_ns = BPF_CORE_READ(task, group_leader, start_boottime);
	process->pid = BPF_CORE_READ(task, pid);
	process->tgid = BPF_CORE_READ(task, tgid);
	process->ppid = BPF_CORE_READ(parent, tgid);
	process->uid = BPF_CORE_READ(task, cred, uid.val);
	process->gid = BPF_CORE_READ(task, cred, gid.val);
	process->loginuid = -1;
	if (bpf_core_field_exists(task->loginuid))
		process->loginuid = BPF_CORE_READ(task, loginuid.val);
	process->traits = 0;
	if (BPF_CORE_READ(task, fs, root.mnt, mnt_sb, s_magic) == OVERLAYFS)
		process->traits |= OVERLAY_ROOT;
	bpf_core_read_str(process->comm, sizeof(process->comm), &task->comm);
	bpf_core_read_str(process->parent_comm, sizeof(process->parent_comm), &parent->comm);
	process->tty[0] = 0;
	tty = BPF_CORE_READ(task, signal, tty);
	if (tty)
		bpf_core_read_str(process->tty, sizeof(process->tty), &tty->name);
	fill_namespaces(process);
	fill_cgroups(process);
	fill_program(process);
	return 0;
}

#endif
