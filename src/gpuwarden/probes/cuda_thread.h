/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The calls that a thread is in, and what is kept of each until it returns. */
#ifndef GPUWARDEN_CUDA_THREAD_H
#define GPUWARDEN_CUDA_THREAD_H

#include "entry.h"
#include "cuda_records.h"

#define DEPTH 4

/*
 * What a function is watched for and which argument (1 to 6; 0: none) has what; call_points.py
 * writes it into the cookie of each point.
 */
#define COOKIE(cookie, bit, width) ((__u32)((cookie) >> (bit)) & ((1 << (width)) - 1))
#define FUNCTION(cookie) COOKIE(cookie, 0, 8)
#define TASK(cookie) COOKIE(cookie, 8, 8)
#define OUT(cookie) COOKIE(cookie, 16, 3)
#define SUBJECT(cookie) COOKIE(cookie, 20, 3) /* image, path, or what a name is asked of */
#define EXTRA(cookie) COOKIE(cookie, 24, 3) /* the image's size, or the name */
#define DEVICE(cookie) COOKIE(cookie, 28, 3)
#define INPUT_KIND(cookie) COOKIE(cookie, 32, 3) /* of what the linker is given */

enum task {
	TASK_IMAGE = 1, /* a pointer to an image */
	TASK_TABLE_IMAGE, /* a pointer to an image in its first or its second argument */
	TASK_SIZED_IMAGE, /* a pointer and a size */
	TASK_PATH,
	TASK_LINKED, /* pointers to a pointer and to a size, both of an image once it returns */
	TASK_CONTEXT,
	TASK_NAME,
};

struct pending {
	__u64 stack; /* where the stack was when it was called */
	__u64 begun_ns;
	__u64 out;
	__u64 subject;
	__u64 extra; /* a size, or a name */
	__u64 image;
	__s32 device;
	__u32 function;
	__u32 task;
	__u32 input_kind;
};

struct thread {
	__u64 exec_id;
	__u64 name_of; /* the stack of the call that the name is of */
	__u32 depth;
	__s32 name_length;
	struct pending pending[DEPTH];
	char name[NAME_TOLD_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");

/* What is kept of a call that begins; what it is watched for, 0 if nothing. */
static __noinline int note(struct pt_regs *context, struct pending *call, __u64 cookie)
{
	__u64 arguments[8] = {};

	if (!context || !call)
		return 0;
	arguments[1] = ENTRY_1(context);
	arguments[2] = ENTRY_2(context);
	arguments[3] = ENTRY_3(context);
	arguments[4] = ENTRY_4(context);
	arguments[5] = ENTRY_5(context);
	arguments[6] = ENTRY_6(context);
	call->stack = STACK_AT_ENTRY(context);
	call->out = arguments[OUT(cookie)];
	call->subject = arguments[SUBJECT(cookie)];
	call->extra = arguments[EXTRA(cookie)];
	call->device = DEVICE(cookie) ? (__s32)arguments[DEVICE(cookie)] : -1;
	call->input_kind = arguments[INPUT_KIND(cookie)];
	call->function = FUNCTION(cookie);
	call->task = TASK(cookie);
	return call->task;
}

static __always_inline struct thread *this_thread(void)
{
	return bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0,
				    BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/*
 * Forgets calls that were left without a return: by a jump, or by another program in this thread.
 * A function that is jumped to by another one has its stack.
 */
static __always_inline void leave_until(struct thread *thread, __u64 stack, __u32 function)
{
	struct task_struct *task = bpf_get_current_task_btf();
	__u64 exec_id = BPF_CORE_READ(task, self_exec_id);

	if (thread->exec_id != exec_id) {
		thread->exec_id = exec_id;
		thread->depth = 0;
	}
	for (int step = 0; step < DEPTH; step++) {
		__u32 top = thread->depth - 1;

		if (top >= DEPTH || thread->pending[top].stack > stack ||
		    (thread->pending[top].stack == stack &&
		     thread->pending[top].function != function))
			break;
		thread->depth = top;
	}
}

/* The load that the thread is in the middle of: of the same image, or by name. */
static __always_inline __u64 outer_load(struct thread *thread, __u64 image)
{
	__u32 depth = thread->depth;

	for (int index = DEPTH - 1; index >= 0; index--) {
		struct pending *one = &thread->pending[index];

		if (index >= depth || one->task == TASK_CONTEXT || one->task == TASK_NAME)
			continue;
		if (one->task == TASK_PATH || (image && one->image == image))
			return one->begun_ns;
	}
	return 0;
}

/* Notes a call. Where there are too many, the outermost is not waited for any longer. */
static __noinline int enter(struct thread *thread, struct pending *call)
{
	if (!thread || !call)
		return 0;
	if (thread->depth >= DEPTH) {
		for (int index = 1; index < DEPTH; index++)
			thread->pending[index - 1] = thread->pending[index];
		thread->depth = DEPTH - 1;
	}
	thread->pending[thread->depth & (DEPTH - 1)] = *call;
	thread->depth++;
	return 0;
}

/* The call that returns now, taken from the thread's; 0 if it is not among them. */
static __noinline int left(struct thread *thread, __u64 stack, __u32 function,
			   struct pending *call)
{
	if (!thread || !call)
		return 0;
	for (int index = DEPTH - 1; index >= 0; index--) {
		struct pending *one = &thread->pending[index];

		if (index < thread->depth && one->stack == stack && one->function == function) {
			*call = *one;
			thread->depth = index;
			return 1;
		}
	}
	return 0;
}

#endif
