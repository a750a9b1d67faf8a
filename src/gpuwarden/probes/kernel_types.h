/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The few fields of kernel structures that the probes read. libbpf finds each by its name in the
 * running kernel's BTF (CO-RE), so order, gaps and sizes here mean nothing.
 */
#ifndef GPUWARDEN_KERNEL_TYPES_H
#define GPUWARDEN_KERNEL_TYPES_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	__u32 val;
} kuid_t;

typedef struct {
	__u32 val;
} kgid_t;

struct ns_common {
	unsigned int inum;
};

struct user_namespace {
	struct ns_common ns;
};

struct mnt_namespace {
	struct ns_common ns;
};

struct pid_namespace {
	struct ns_common ns;
};

struct cred {
	kuid_t uid;
	kgid_t gid;
	struct user_namespace *user_ns;
};

struct nsproxy {
	struct mnt_namespace *mnt_ns;
};

struct upid {
	int nr;
	struct pid_namespace *ns;
};

struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct qstr {
	const unsigned char *name;
};

struct super_block {
	__u32 s_dev;
	unsigned long s_magic;
};

struct inode {
	unsigned short i_mode;
	__u32 i_rdev;
	unsigned long i_ino;
	struct super_block *i_sb;
};

struct dentry {
	struct dentry *d_parent;
	struct qstr d_name;
};

struct vfsmount {
	struct dentry *mnt_root;
	struct super_block *mnt_sb;
};

struct mount {
	struct mount *mnt_parent;
	struct dentry *mnt_mountpoint;
	struct vfsmount mnt;
};

struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
};

struct file {
	struct path f_path;
	struct inode *f_inode;
	unsigned int f_flags;
	unsigned int f_mode;
};

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

struct fs_struct {
	struct path root;
};

struct mm_struct {
	unsigned long arg_start;
	unsigned long arg_end;
	struct file *exe_file;
};

struct tty_struct {
	char name[64];
};

typedef struct {
	int counter;
} atomic_t;

typedef struct {
	unsigned long sig[1];
} sigset_t;

struct sigpending {
	sigset_t signal;
};

struct signal_struct {
	atomic_t live;
	int group_stop_count;
	unsigned int flags;
	struct sigpending shared_pending;
	struct tty_struct *tty;
};

struct kernfs_node {
	struct kernfs_node *__parent;
	const char *name;
	__u64 id;
};

/* As it was called before Linux 6.15. */
struct kernfs_node___before_6_15 {
	struct kernfs_node___before_6_15 *parent;
};

struct linux_binprm {
	const char *filename;
};

struct cgroup_root {
	int hierarchy_id;
};

struct cgroup {
	int level;
	struct kernfs_node *kn;
	struct cgroup_root *root;
};

struct cgroup_subsys_state {
	struct cgroup *cgroup;
};

struct css_set {
	struct cgroup_subsys_state *subsys[16];
	struct cgroup *dfl_cgrp;
};

struct task_struct {
	unsigned int flags;
	unsigned int ptrace;
	unsigned long jobctl;
	int pid;
	int tgid;
	struct mm_struct *mm;
	struct task_struct *real_parent;
	struct task_struct *group_leader;
	struct pid *thread_pid;
	__u64 start_boottime;
	const struct cred *cred;
	char comm[16];
	struct fs_struct *fs;
	struct files_struct *files;
	struct nsproxy *nsproxy;
	struct signal_struct *signal;
	struct sigpending pending;
	kuid_t loginuid;
	unsigned int sessionid;
	__u64 self_exec_id;
	struct css_set *cgroups;
	int exit_code;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r9, r8, ax, cx, dx, si, di, orig_ax, sp;
};
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
	__u64 regs[31];
	__u64 sp;
	__s32 syscallno;
};
#else
#error "built for x86-64 and arm64: define __TARGET_ARCH_x86 or __TARGET_ARCH_arm64"
#endif

#pragma clang attribute pop

/* Only their numbers in the running kernel are used. */
enum cgroup_subsys_id {
	devices_cgrp_id,
	freezer_cgrp_id,
	pids_cgrp_id,
};

#endif
