/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A process as every probe tells of it. layouts.py declares the same; see its check(). */
#ifndef GPUWARDEN_IDENTITY_H
#define GPUWARDEN_IDENTITY_H

#define OVERLAYFS 0x794c7630

#define ARGV_BYTES 512
#define EXE_BYTES 256
#define CGROUP_BYTES 384
#define NAME_BYTES 128 /* one part of a path; each buffer has room for one more behind its bound */
#define PATH_PARTS 16
#define CGROUP_PARTS 8

enum trait { OVERLAY_ROOT = 1, EXE_CUT = 2, CGROUP_CUT = 4 };

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

#endif
