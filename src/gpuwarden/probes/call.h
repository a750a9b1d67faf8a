/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The system call that a thread is in: how a device was asked for, and by which path. */
#ifndef GPUWARDEN_CALL_H
#define GPUWARDEN_CALL_H

#include "records.h"

struct call {
	const char *path;
	__u64 open_flags;
	__u32 number;
	__u32 how;
	bool returns; /* through sys_exit_open* */
};

#if defined(__TARGET_ARCH_x86)
#define NR(frame) ((__u32)BPF_CORE_READ(frame, orig_ax))
#define ARGUMENT_1(frame) BPF_CORE_READ(frame, di)
#define ARGUMENT_2(frame) BPF_CORE_READ(frame, si)
#define ARGUMENT_3(frame) BPF_CORE_READ(frame, dx)
#define ARGUMENT_4(frame) BPF_CORE_READ(frame, cx) /* of a function, not of a system call */
#define NR_OPEN 2
#define NR_CREAT 85
#define NR_ACCESS 21
#define NR_MKNOD 133
#define NR_OPENAT 257
#define NR_MKNODAT 259
#define NR_FACCESSAT 269
#define NR_OPEN_BY_HANDLE_AT 304
#else
#define NR(frame) ((__u32)BPF_CORE_READ(frame, syscallno))
#define ARGUMENT_1(frame) BPF_CORE_READ(frame, regs[0])
#define ARGUMENT_2(frame) BPF_CORE_READ(frame, regs[1])
#define ARGUMENT_3(frame) BPF_CORE_READ(frame, regs[2])
#define ARGUMENT_4(frame) BPF_CORE_READ(frame, regs[3])
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

#endif
