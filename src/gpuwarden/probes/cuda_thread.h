/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What is kept of a thread: the call that it is in, those that it has not returned from, and what
 * its probe has in hand.
 *
 * From Linux 6.13 on, functions with 64 bytes or more on their stack get a stack of their own on
 * each CPU, those of uprobes too, which can sleep and be preempted: the next thread that comes to
 * the same probe there overwrites what it finds. So no function here has more than 48 bytes, and
 * all else lies in memory of the thread (tests/unit/test_cuda_call_object.py).
 */
#ifndef GPUWARDEN_CUDA_THREAD_H
#define GPUWARDEN_CUDA_THREAD_H

#include "entry.h"
#include "cuda_maps.h"
#include "cuda_formats.h"

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

/* A load that is told of. */
struct load {
	struct image image;
	__u64 address;
	__u64 within_ns;
	__u64 sent;
	__u64 waited_until; /* 0: it did not wait so far */
	__u32 parts;
	__u32 input_kind;
};

/* A run of bytes that is being sent. */
struct copying {
	__u64 from;
	__u64 bytes; /* from there; of text: at most */
	__u64 done;
	__u64 offset; /* where these bytes begin in what is told */
	__u32 of;
	__u32 missing;
	__u32 tries;
	__u32 ended; /* text: its NUL was found */
};

/* Tables of an image that are gone through. */
struct tables {
	__u64 at;
	__u64 end;
	__u64 number;
	__u64 shift;
	__u32 missing;
	__u32 step;
};

struct pages {
	__u64 at;
	__u64 end;
	__u64 absent;
};

struct thread {
	__u64 exec_id;
	__u64 name_of; /* the stack of the call that the name is of */
	__u32 depth;
	__s32 name_length;
	struct pending call; /* that begins or returns now */
	struct pending pending[DEPTH];
	struct cuda_call told; /* what every record of it begins with */
	struct load load;
	struct copying copying;
	struct tables tables;
	struct pages pages;
	struct named_handle handle;
	union head head;
	char name[NAME_TOLD_BYTES];
};

/* What loops are given: it has to be on the stack. */
struct turn {
	struct thread *thread;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");

static __always_inline struct thread *this_thread(void)
{
	struct thread *thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0,
						     BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (!thread)
		increment(COUNT_DROPPED);
	return thread;
}

/* Takes what is kept of a call that begins; what it is watched for, 0 if nothing. */
static __noinline int note(struct pt_regs *context, struct thread *thread, __u64 cookie)
{
	struct pending *call;
	__u64 *arguments;

	if (!context || !thread)
		return 0;
	call = &thread->call;
	arguments = thread->head.arguments;
	arguments[0] = arguments[7] = 0;
	arguments[1] = ENTRY_1(context);
	arguments[2] = ENTRY_2(context);
	arguments[3] = ENTRY_3(context);
	arguments[4] = ENTRY_4(context);
	arguments[5] = ENTRY_5(context);
	arguments[6] = ENTRY_6(context);
	call->stack = STACK_AT_ENTRY(context);
	call->begun_ns = 0;
	call->out = arguments[OUT(cookie)];
	call->subject = arguments[SUBJECT(cookie)];
	call->extra = arguments[EXTRA(cookie)];
	call->image = 0;
	call->device = DEVICE(cookie) ? (__s32)arguments[DEVICE(cookie)] : -1;
	call->input_kind = arguments[INPUT_KIND(cookie)];
	call->function = FUNCTION(cookie);
	call->task = TASK(cookie);
	fill_call(&thread->told, call->function, 0);
	return call->task;
}

/*
 * Forgets calls that were left without a return: by a jump, or by another program in this thread.
 * A function that is jumped to by another one has its stack.
 */
static __noinline int leave_until(struct thread *thread)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 exec_id = BPF_CORE_READ(task, self_exec_id);

	if (!thread)
		return 0;
	if (thread->exec_id != exec_id) {
		thread->exec_id = exec_id;
		thread->depth = 0;
	}
	for (int step = 0; step < DEPTH; step++) {
		__u32 top = thread->depth - 1;

		if (top >= DEPTH || thread->pending[top].stack > thread->call.stack ||
		    (thread->pending[top].stack == thread->call.stack &&
		     thread->pending[top].function != thread->call.function))
			break;
		thread->depth = top;
	}
	return 0;
}

/* The load that the thread is in the middle of: the outermost of the same image, or one by name. */
static __noinline __u64 outer_load(struct thread *thread)
{
	__u64 by_name = 0;

	if (!thread)
		return 0;
	for (int index = 0; index < DEPTH; index++) {
		struct pending *one = &thread->pending[index];

		if (index >= thread->depth)
			break;
		if (one->task == TASK_PATH)
			by_name = one->begun_ns;
		else if (one->task <= TASK_SIZED_IMAGE && thread->call.image &&
			 one->image == thread->call.image)
			return one->begun_ns;
	}
	return by_name;
}

/* Keeps the call that begins. Where there are too many, the outermost is not waited for. */
static __noinline int enter(struct thread *thread)
{
	if (!thread)
		return 0;
	if (thread->depth >= DEPTH) {
		for (int index = 1; index < DEPTH; index++)
			__builtin_memmove(&thread->pending[index - 1], &thread->pending[index],
					  sizeof(struct pending));
		thread->depth = DEPTH - 1;
	}
	__builtin_memmove(&thread->pending[thread->depth & (DEPTH - 1)], &thread->call,
			  sizeof(struct pending));
	thread->depth++;
	return 0;
}

/* Takes the call that returns now from those that are kept; whether it is among them. */
static __noinline int leave(struct thread *thread, __u64 stack, __u32 function)
{
	if (!thread)
		return 0;
	for (int index = DEPTH - 1; index >= 0; index--) {
		struct pending *one = &thread->pending[index];

		if (index < thread->depth && one->stack == stack && one->function == function) {
			__builtin_memmove(&thread->call, one, sizeof(*one));
			thread->depth = index;
			return 1;
		}
	}
	return 0;
}

#endif
