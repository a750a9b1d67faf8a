// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who opens, makes or tries an accelerator's device node, as it happens.
 *
 *   device_access   cgroup/dev at the cgroup2 root: each open, mknod and access(2) of a watched
 *                   number, by whatever name, io_uring's too. Denies where told to.
 *   returned_*      sys_exit_open*: how an attempt ended. Optional, since it costs every open.
 *   process_fork, process_exec, process_exit
 *                   what becomes of the processes that touched a watched device.
 *   group_made      a control group was made. Optional.
 *   holders         iter/task_file: every descriptor on a watched device, whoever opened it.
 *
 * A denial is decided before the limiter and before any room is reserved, so that no flood of
 * events lets an open pass. (1,3) is /dev/null: never watched, never denied, whatever a map says.
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define CHARACTER_MASK 0170000
#define CHARACTER 0020000
#define ANY_MINOR 0xfffff
#define OVERLAYFS 0x794c7630
#define IO_WORKER 0x10 /* PF_IO_WORKER */

#define ARGV_BYTES 512
#define EXE_BYTES 256
#define CGROUP_BYTES 384
#define PATH_BYTES 256
#define NAME_MAX 255
#define NAME_BYTES 128 /* one part of a path; each buffer has room for one more behind its bound */
#define PATH_PARTS 16
#define CGROUP_PARTS 8
#define CGROUP_DEPTH 64
#define CALLED_BYTES 4096 /* PATH_MAX */
#define GROUP_PATH_BYTES 1024 /* as much as the kernel's tracepoint writes */

enum kind { KIND_OPEN = 1, KIND_RETURN, KIND_EXEC, KIND_EXIT, KIND_GROUP };
enum tool { NO_TOOL, TOOL_BY_CALL, TOOL_BY_FILE };
enum how { HOW_OTHER, HOW_OPEN, HOW_MKNOD, HOW_ACCESS, HOW_IO_URING };
enum denial { NOT_DENIED, DENIED, WOULD_DENY };
enum trait { OVERLAY_ROOT = 1, EXE_CUT = 2, CGROUP_CUT = 4 };
enum counter {
	COUNT_HITS, COUNT_LIMITED, COUNT_DENIED, COUNT_LIMITER_FULL,
	COUNT_DROPPED_OPENS, COUNT_DROPPED_RETURNS, COUNT_DROPPED_EXECS, COUNT_DROPPED_EXITS,
	COUNT_DROPPED_GROUPS,
	COUNTERS
};

struct path_buffer {
	__u32 length;
	char text[EXE_BYTES + NAME_BYTES];
};

struct cgroup_buffer {
	__u32 length;
	char text[CGROUP_BYTES + NAME_BYTES];
};

/* events.py declares the same layouts; they are compared with this object's BTF at each load. */
struct identity {
	__u64 start_ns;
	__u64 exe_inode;
	__u64 cgroup_id;
	__u64 cgroup_v1_id;
	__u32 pid;
	__u32 tgid;
	__u32 ppid;
	__u32 uid;
	__u32 gid;
	__u32 loginuid;
	__u32 mount_namespace;
	__u32 pid_namespace;
	__u32 user_namespace;
	__u32 inner_tgid;
	__u32 exe_device;
	__u32 cgroup_v1_hierarchy;
	__u32 cgroup_names_hierarchy;
	__u32 traits;
	__u32 argv_bytes;
	__u32 argv_read;
	char comm[16];
	char parent_comm[16];
	char tty[16];
	char argv[ARGV_BYTES];
	struct path_buffer exe;
	struct cgroup_buffer cgroup;
};

struct open_record {
	__u64 time_ns;
	__u64 hits;
	__u32 kind;
	__u32 major;
	__u32 minor;
	__u32 access;
	__u32 how;
	__u32 denial;
	__u32 syscall;
	__s32 path_length;
	__u64 open_flags;
	struct identity process;
	char path[PATH_BYTES];
};

struct return_record {
	__u64 time_ns;
	__u64 attempt_ns;
	__u64 start_ns;
	__u32 kind;
	__u32 pid;
	__u32 tgid;
	__u32 major;
	__u32 minor;
	__s32 result;
	__u32 open_flags;
	struct path_buffer path;
};

struct tool_name {
	char text[NAME_BYTES];
};

struct exec_record {
	__u64 time_ns;
	__u32 kind;
	__u32 touched;
	__u32 tool;
	__u32 reserved;
	struct identity process;
	struct tool_name tool_name;
};

struct group_record {
	__u64 time_ns;
	__u64 cgroup_id;
	__u32 kind;
	__u32 hierarchy;
	__s32 path_length;
	__u32 reserved;
	char path[GROUP_PATH_BYTES];
};

struct exit_record {
	__u64 time_ns;
	__u64 start_ns;
	__u32 kind;
	__u32 tgid;
	__s32 exit_code;
	__u32 reserved;
	char comm[16];
};

struct holder_record {
	__u64 start_ns;
	__u64 inode;
	__u32 tgid;
	__u32 pid;
	__u32 descriptor;
	__u32 major;
	__u32 minor;
	__u32 open_flags;
	__u32 uid;
	__u32 reserved;
	char comm[16];
};

struct device_key {
	__u32 major;
	__u32 minor;
};

struct count_key {
	__u64 start_ns;
	__u32 tgid;
	__u32 major;
	__u32 minor;
	__u32 how; /* apart, so that a flood of access(2) does not hide an open */
};

struct count {
	__u64 hits;
	__u64 window_ns;
	__u64 in_window;
};

struct cgroup_key {
	__u64 id;
	__u32 hierarchy;
	__u32 reserved;
};

struct attempt {
	__u64 time_ns;
	__u64 start_ns;
	__u32 major;
	__u32 minor;
};

struct settings {
	__u64 limit_window_ns;
	__u32 limit_events; /* of one process and device in a window; 0: no limit */
	__u32 return_values;
	__u32 every_exec;
	__u32 denying;
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 23);
} records SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 512);
	__type(key, struct device_key);
	__type(value, __u32);
} watched_devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct count_key);
	__type(value, struct count);
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cgroup_key);
	__type(value, __u32);
} denied_cgroups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 14);
	__type(key, __u64);
	__type(value, struct attempt);
} attempts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 15);
	__type(key, __u32);
	__type(value, __u64);
} touched_processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings_map SEC(".maps");

struct called_path {
	char text[CALLED_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct called_path);
} called_paths SEC(".maps");

static __always_inline void increment(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	if (value)
		*value += 1;
}

static __always_inline struct settings *settings(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&settings_map, &first);
}

static __always_inline bool is_watched(__u32 major, __u32 minor)
{
	struct device_key key = { .major = major, .minor = minor };

	if (major == 1 && minor == 3)
		return false;
	if (bpf_map_lookup_elem(&watched_devices, &key))
		return true;
	key.minor = ANY_MINOR;
	return bpf_map_lookup_elem(&watched_devices, &key) != 0;
}

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

static __noinline int fill_process(struct identity *process)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct task_struct *parent = BPF_CORE_READ(task, real_parent);
	struct upid inner = {};

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
	process->mount_namespace = BPF_CORE_READ(task, nsproxy, mnt_ns, ns.inum);
	process->user_namespace = BPF_CORE_READ(task, cred, user_ns, ns.inum);
	struct pid *numbers = BPF_CORE_READ(task, group_leader, thread_pid);
	__u32 level = BPF_CORE_READ(numbers, level);

	if (level < 32)
		bpf_core_read(&inner, sizeof(inner), &numbers->numbers[level]);
	process->pid_namespace = BPF_CORE_READ(inner.ns, ns.inum);
	process->inner_tgid = inner.nr;
	process->traits = 0;
	if (BPF_CORE_READ(task, fs, root.mnt, mnt_sb, s_magic) == OVERLAYFS)
		process->traits |= OVERLAY_ROOT;
	bpf_core_read_str(process->comm, sizeof(process->comm), &task->comm);
	bpf_core_read_str(process->parent_comm, sizeof(process->parent_comm), &parent->comm);
	process->tty[0] = 0;
	struct tty_struct *tty = BPF_CORE_READ(task, signal, tty);

	if (tty)
		bpf_core_read_str(process->tty, sizeof(process->tty), &tty->name);

	struct css_set *set = BPF_CORE_READ(task, cgroups);
	struct cgroup *unified = BPF_CORE_READ(set, dfl_cgrp), *telling = unified;
	struct cgroup *version_1 = version_1_group(set);

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
	if (!write_cgroup(BPF_CORE_READ(telling, kn), &process->cgroup))
		process->traits |= CGROUP_CUT;

	process->argv_bytes = process->argv_read = 0;
	process->exe_device = process->exe.length = 0;
	process->exe_inode = 0;
	struct mm_struct *memory = BPF_CORE_READ(task, mm);

	if (!memory)
		return 0;
	__u64 start = BPF_CORE_READ(memory, arg_start);
	__u64 size = BPF_CORE_READ(memory, arg_end) - start;

	process->argv_bytes = size;
	if (size > ARGV_BYTES)
		size = ARGV_BYTES;
	if (size && bpf_probe_read_user(process->argv, size & (2 * ARGV_BYTES - 1),
					(void *)start) == 0)
		process->argv_read = size;
	struct file *exe = BPF_CORE_READ(memory, exe_file);

	if (!exe)
		return 0;
	process->exe_inode = BPF_CORE_READ(exe, f_inode, i_ino);
	process->exe_device = BPF_CORE_READ(exe, f_inode, i_sb, s_dev);
	if (!write_path(BPF_CORE_READ(exe, f_path.dentry), BPF_CORE_READ(exe, f_path.mnt),
			&process->exe))
		process->traits |= EXE_CUT;
	return 0;
}

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
	int found = denial_of_group(BPF_CORE_READ(set, dfl_cgrp));

	if (found == NOT_DENIED)
		found = denial_of_group(VERSION_1_GROUP(set, devices_cgrp_id));
	if (found == NOT_DENIED)
		found = denial_of_group(VERSION_1_GROUP(set, pids_cgrp_id));
	if (found == NOT_DENIED)
		found = denial_of_group(VERSION_1_GROUP(set, freezer_cgrp_id));
	return found;
}

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

struct call {
	const char *path;
	__u64 open_flags;
	__u32 number;
	__u32 how;
	bool returns; /* through sys_exit_open* */
};

#if defined(__TARGET_ARCH_x86)
#define NR(regs) ((__u32)BPF_CORE_READ(regs, orig_ax))
#define ARGUMENT_1(regs) BPF_CORE_READ(regs, di)
#define ARGUMENT_2(regs) BPF_CORE_READ(regs, si)
#define ARGUMENT_3(regs) BPF_CORE_READ(regs, dx)
#define NR_OPEN 2
#define NR_CREAT 85
#define NR_ACCESS 21
#define NR_MKNOD 133
#define NR_OPENAT 257
#define NR_MKNODAT 259
#define NR_FACCESSAT 269
#define NR_OPEN_BY_HANDLE_AT 304
#else
#define NR(regs) ((__u32)BPF_CORE_READ(regs, syscallno))
#define ARGUMENT_2(regs) BPF_CORE_READ(regs, regs[1])
#define ARGUMENT_3(regs) BPF_CORE_READ(regs, regs[2])
#define NR_OPENAT 56
#define NR_MKNODAT 33
#define NR_FACCESSAT 48
#define NR_OPEN_BY_HANDLE_AT 265
#endif
#define NR_IO_URING_ENTER 426
#define NR_OPENAT2 437
#define NR_FACCESSAT2 439

/* What the system call that led here says; what it says is the process's own word. */
static __always_inline void read_call(struct call *call)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 how_flags = 0;

	if (BPF_CORE_READ(task, flags) & IO_WORKER) {
		call->how = HOW_IO_URING;
		return;
	}
	if (!bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_task_pt_regs))
		return;
	struct pt_regs *regs = (void *)bpf_task_pt_regs((void *)bpf_get_current_task_btf());

	call->number = NR(regs);
	switch (call->number) {
#if defined(__TARGET_ARCH_x86)
	case NR_OPEN:
		call->open_flags = ARGUMENT_2(regs);
		/* fall through */
	case NR_CREAT:
		call->path = (void *)ARGUMENT_1(regs);
		call->how = HOW_OPEN;
		call->returns = call->number == NR_OPEN;
		break;
	case NR_ACCESS:
		call->path = (void *)ARGUMENT_1(regs);
		call->how = HOW_ACCESS;
		break;
	case NR_MKNOD:
		call->path = (void *)ARGUMENT_1(regs);
		call->how = HOW_MKNOD;
		break;
#endif
	case NR_OPENAT:
		call->open_flags = ARGUMENT_3(regs);
		call->path = (void *)ARGUMENT_2(regs);
		call->how = HOW_OPEN;
		call->returns = true;
		break;
	case NR_OPENAT2:
		bpf_probe_read_user(&how_flags, sizeof(how_flags), (void *)ARGUMENT_3(regs));
		call->open_flags = how_flags;
		call->path = (void *)ARGUMENT_2(regs);
		call->how = HOW_OPEN;
		call->returns = true;
		break;
	case NR_OPEN_BY_HANDLE_AT:
		call->open_flags = ARGUMENT_3(regs);
		call->how = HOW_OPEN;
		break;
	case NR_FACCESSAT:
	case NR_FACCESSAT2:
		call->path = (void *)ARGUMENT_2(regs);
		call->how = HOW_ACCESS;
		break;
	case NR_MKNODAT:
		call->path = (void *)ARGUMENT_2(regs);
		call->how = HOW_MKNOD;
		break;
	case NR_IO_URING_ENTER:
		call->how = HOW_IO_URING;
		break;
	}
}

/* Each layout is a parameter somewhere: only then is it in this object's BTF. */
static __noinline int fill_open(struct open_record *record, struct call *call)
{
	if (!record || !call)
		return 0;
	record->kind = KIND_OPEN;
	record->how = call->how;
	record->syscall = call->number;
	record->open_flags = call->open_flags;
	record->path_length = 0;
	if (call->path)
		record->path_length =
			bpf_probe_read_user_str(record->path, sizeof(record->path), call->path);
	return fill_process(&record->process);
}

SEC("?cgroup/dev")
int device_access(struct bpf_cgroup_dev_ctx *context)
{
	__u32 major = context->major, minor = context->minor;
	__u32 access = context->access_type >> 16;
	struct open_record *record;
	struct call call = {};
	struct settings *set;
	__u64 hits, now;
	int denied = NOT_DENIED, answer;

	if ((context->access_type & 0xffff) != BPF_DEVCG_DEV_CHAR || !is_watched(major, minor))
		return 1;
	set = settings();
	if (!set)
		return 1;
	increment(COUNT_HITS);
	if (set->denying)
		denied = denial();
	answer = denied != DENIED;
	if (!answer)
		increment(COUNT_DENIED);

	now = bpf_ktime_get_boot_ns();
	read_call(&call);
	if (access & BPF_DEVCG_ACC_MKNOD)
		call.how = HOW_MKNOD;
	if (!is_within_limit(set, now, major, minor, call.how, &hits))
		return answer;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED_OPENS);
		return answer;
	}
	record->time_ns = now;
	record->hits = hits;
	record->major = major;
	record->minor = minor;
	record->access = access;
	record->denial = denied;
	fill_open(record, &call);

	__u32 tgid = record->process.tgid;
	__u64 start_ns = record->process.start_ns;
	__u64 thread = (__u64)tgid << 32 | record->process.pid;

	bpf_ringbuf_submit(record, 0);
	bpf_map_update_elem(&touched_processes, &tgid, &start_ns, BPF_ANY);
	if (set->return_values && call.returns) {
		struct attempt attempt = {
			.time_ns = now, .start_ns = start_ns, .major = major, .minor = minor,
		};

		/* On overlayfs one call comes here twice: the first is the one told of. */
		bpf_map_update_elem(&attempts, &thread, &attempt, BPF_NOEXIST);
	}
	return answer;
}

struct system_call_exit {
	__u64 common;
	__u64 number;
	__s64 result;
};

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
		struct file **slots = BPF_CORE_READ(task, files, fdt, fd), *file = 0;

		bpf_probe_read_kernel(&file, sizeof(file), slots + record->result);
		if (file) {
			record->open_flags = BPF_CORE_READ(file, f_flags);
			if (!write_path(BPF_CORE_READ(file, f_path.dentry),
					BPF_CORE_READ(file, f_path.mnt), &record->path))
				record->path.length = 0;
		}
	}
	return 0;
}

static __always_inline int returned(__s64 result)
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
	record->result = result;
	fill_return(record, attempt);
	bpf_ringbuf_submit(record, 0);
	bpf_map_delete_elem(&attempts, &thread);
	return 0;
}

SEC("?tracepoint/syscalls/sys_exit_openat")
int returned_openat(struct system_call_exit *context)
{
	return returned(context->result);
}

SEC("?tracepoint/syscalls/sys_exit_openat2")
int returned_openat2(struct system_call_exit *context)
{
	return returned(context->result);
}

#if defined(__TARGET_ARCH_x86)
SEC("?tracepoint/syscalls/sys_exit_open")
int returned_open(struct system_call_exit *context)
{
	return returned(context->result);
}
#endif

static __always_inline bool is_touched(__u32 tgid, __u64 start_ns)
{
	__u64 *start = bpf_map_lookup_elem(&touched_processes, &tgid);

	return start && *start == start_ns;
}

/* A child has its parent's descriptors: it is followed as well. */
SEC("?raw_tracepoint/sched_process_fork")
int process_fork(struct bpf_raw_tracepoint_args *context)
{
	struct task_struct *parent = (void *)context->args[0];
	struct task_struct *child = (void *)context->args[1];
	__u32 tgid = BPF_CORE_READ(child, tgid);
	__u64 start_ns;

	if (BPF_CORE_READ(child, pid) != (int)tgid)
		return 0;
	if (!is_touched(BPF_CORE_READ(parent, tgid),
			BPF_CORE_READ(parent, group_leader, start_boottime)))
		return 0;
	start_ns = BPF_CORE_READ(child, start_boottime);
	bpf_map_update_elem(&touched_processes, &tgid, &start_ns, BPF_ANY);
	return 0;
}

#define BEGINS(name, with) begins(name, with, sizeof(with) - 1)

static __always_inline bool begins(const char *name, const char *with, __u32 length)
{
	char differs = 0;

#pragma unroll
	for (__u32 at = 0; at < length; at++)
		differs |= name[at] ^ with[at];
	return !differs;
}

/* Names of GPU management tools; events.py has the same ones, and a test runs each. */
static __noinline int is_tool(const struct tool_name *tool)
{
	const char *name;

	if (!tool)
		return 0;
	name = tool->text;
	return BEGINS(name, "nvidia-smi") || BEGINS(name, "nvidia-debugdump") ||
	       BEGINS(name, "nvidia-persistenced") || BEGINS(name, "nvidia-cuda-mps") ||
	       BEGINS(name, "nvtop") || BEGINS(name, "nvitop") || BEGINS(name, "rocm-smi") ||
	       BEGINS(name, "rocminfo") || BEGINS(name, "amd-smi") || BEGINS(name, "gpustat") ||
	       BEGINS(name, "dcgmi") || BEGINS(name, "xpu-smi") || BEGINS(name, "hl-smi");
}

/* The last part of the path that execve(2) was given: a script's own, not its interpreter's. */
static __noinline int read_called_name(struct linux_binprm *program, struct tool_name *out)
{
	__u32 first = 0;
	struct called_path *path = bpf_map_lookup_elem(&called_paths, &first);
	long length;
	__u32 at;

	if (!path || !out)
		return 0;
	out->text[0] = 0;
	length = bpf_probe_read_kernel_str(path->text, sizeof(path->text),
					   BPF_CORE_READ(program, filename));
	if (length <= 1)
		return 0;
	at = length - 1;
	for (int step = 0; step < NAME_MAX; step++) {
		if (!at || path->text[(at - 1) & (CALLED_BYTES - 1)] == '/')
			break;
		at--;
	}
	bpf_probe_read_kernel_str(out->text, sizeof(out->text),
				  path->text + (at & (CALLED_BYTES - 1)));
	return 0;
}

static __always_inline int tool_of(struct task_struct *task, struct linux_binprm *program,
				   struct tool_name *name)
{
	read_called_name(program, name);
	if (is_tool(name))
		return TOOL_BY_CALL;
	bpf_probe_read_kernel_str(name->text, sizeof(name->text),
				  BPF_CORE_READ(task, mm, exe_file, f_path.dentry, d_name.name));
	return is_tool(name) ? TOOL_BY_FILE : NO_TOOL;
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
	bool touched = is_touched(BPF_CORE_READ(task, tgid),
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
	bool touched = is_touched(tgid, start_ns);

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

static __noinline int write_holder(struct holder_record *record, struct seq_file *seq)
{
	return record && seq ? bpf_seq_write(seq, record, sizeof(*record)) : 0;
}

SEC("?iter/task_file")
int holders(struct bpf_iter__task_file *context)
{
	struct task_struct *task = context->task;
	struct file *file = context->file;
	struct holder_record record = {};
	struct inode *inode;
	__u32 device;

	if (!task || !file)
		return 0;
	inode = file->f_inode;
	if ((BPF_CORE_READ(inode, i_mode) & CHARACTER_MASK) != CHARACTER)
		return 0;
	device = BPF_CORE_READ(inode, i_rdev);
	if (!is_watched(device >> 20, device & 0xfffff))
		return 0;
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
