/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the probes tell, byte by byte. layouts.py declares the same; see its check(). */
#ifndef GPUWARDEN_RECORDS_H
#define GPUWARDEN_RECORDS_H

#include "identity.h"

#define CHARACTER_MASK 0170000
#define CHARACTER 0020000
#define ANY_MINOR 0xfffff
#define MODE_PATH 0x4000 /* FMODE_PATH */
#define IO_WORKER 0x10 /* PF_IO_WORKER */

#define PATH_BYTES 256
#define NAME_MAX 255
#define CGROUP_DEPTH 64
#define CALLED_BYTES 4096 /* PATH_MAX */
#define GROUP_PATH_BYTES 1024 /* as much as the kernel's tracepoint writes */

enum kind { KIND_OPEN = 1, KIND_RETURN, KIND_EXEC, KIND_EXIT, KIND_GROUP };
enum tool { NO_TOOL, TOOL_BY_CALL, TOOL_BY_FILE };
enum how { HOW_OTHER, HOW_OPEN, HOW_MKNOD, HOW_ACCESS, HOW_IO_URING };
enum denial { NOT_DENIED, DENIED, WOULD_DENY };
enum counter {
	COUNT_HITS, COUNT_LIMITED, COUNT_DENIED, COUNT_LIMITER_FULL,
	COUNT_DROPPED_OPENS, COUNT_DROPPED_RETURNS, COUNT_DROPPED_EXECS, COUNT_DROPPED_EXITS,
	COUNT_DROPPED_GROUPS,
	COUNTERS
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
	__u32 opened; /* it has a descriptor; else it is an attempt */
	__u32 reserved;
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

/* A process that used a watched device, or whose forebear did: who that was. */
struct touched_process {
	__u64 start_ns;
	__u64 opener_start_ns;
	__u32 opener;
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

#endif
