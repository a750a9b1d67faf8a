// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Calls of the CUDA driver library as they happen, in whatever process: loads of GPU code with its
 * bytes, contexts, the names that kernels are asked for by.
 *
 *   loading        where a function that loads begins: tells of it and copies the image while the
 *                  caller waits, so that nothing it does later changes what was seen
 *   linked         where the linker's end returns: the same of what it made
 *   loading_told, linked_told
 *                  the same without bytes, where programs cannot sleep (before Linux 6.0)
 *   calling        where functions about contexts and names begin: keeps their arguments
 *   returned       where all of them return: results, handles, names
 *
 * One load can go through several of the functions: what it is within is told, and the reader
 * compares. A process may do all this wrongly on purpose: jump out of a call, call from another
 * stack, change what it points to. It then says of itself less or other things, never of others.
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"
#include "cuda_thread.h"
#include "cuda_load.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Of the two arguments of a table's function the one that leads to an image; the handle's is out. */
static __always_inline void choose_image(struct pt_regs *context, struct pending *call, bool sleeps)
{
	__u64 first = ENTRY_1(context), second = ENTRY_2(context);
	bool is_first = !is_table_image(second, sleeps) && is_table_image(first, sleeps);

	call->subject = is_first ? first : second;
	call->out = is_first ? second : first;
}

/* Tells of a load that begins here, with bytes if this program may sleep. */
static __always_inline int load_begins(struct pt_regs *context, bool sleeps)
{
	struct call_settings *set = settings();
	struct thread *thread;
	struct pending pending = {};
	struct load load = {};

	if (!set || !note(context, &pending, bpf_get_attach_cookie(context)))
		return 0;
	fill_call(&load.call, pending.function, 0);
	load.call.begun_ns = pending.begun_ns = load.call.time_ns;
	if (pending.task == TASK_TABLE_IMAGE)
		choose_image(context, &pending, sleeps);
	load.address = load.image.at = unforeseen(pending.subject);
	load.parts = 1;
	load.input_kind = pending.input_kind;
	load.image.bytes = unforeseen(pending.task == TASK_SIZED_IMAGE ? pending.extra : 0);
	if (sleeps && (pending.task == TASK_IMAGE || pending.task == TASK_TABLE_IMAGE))
		measure(&load.image);
	if (pending.task != TASK_PATH && pending.task != TASK_LINKED)
		pending.image = load.image.at;
	thread = this_thread();
	if (thread) {
		leave_until(thread, pending.stack, pending.function);
		load.within_ns = outer_load(thread, pending.image);
		enter(thread, &pending);
	}
	if (pending.task == TASK_LINKED ||
	    !is_within_share(&load.call, COUNT_LOADS, set->loads_limit) || !tell_load(&load))
		return 0;
	if (!sleeps)
		load.image.missing = MISSING_COPY;
	else if (pending.task == TASK_PATH)
		copy_path(&load);
	else
		copy_image(&load);
	tell_copied(&load);
	return 0;
}

SEC("?uprobe.s")
int loading(struct pt_regs *context)
{
	return load_begins(context, true);
}

SEC("?uprobe")
int loading_told(struct pt_regs *context)
{
	return load_begins(context, false);
}

/* As it is now; a page that is not there yet will be when the call returns. */
static __always_inline void read_name(struct thread *thread, struct pending *call)
{
	__builtin_memset(thread->name, 0, sizeof(thread->name));
	thread->name_of = call->stack;
	thread->name_length = 0;
	if (call->extra)
		thread->name_length = bpf_probe_read_user_str(thread->name, sizeof(thread->name),
							      (void *)call->extra);
}

SEC("?uprobe")
int calling(struct pt_regs *context)
{
	__u64 cookie = bpf_get_attach_cookie(context);
	struct thread *thread = this_thread();
	struct pending pending = {};

	if (!note(context, &pending, cookie))
		return 0;
	if (!thread) {
		increment(COUNT_DROPPED);
		return 0;
	}
	leave_until(thread, pending.stack, pending.function);
	if (pending.task == TASK_NAME)
		read_name(thread, &pending);
	enter(thread, &pending);
	return 0;
}

static __noinline int fill_context(struct cuda_context *record, struct cuda_call *call)
{
	if (!record || !call)
		return 0;
	record->call = *call;
	record->call.record = RECORD_CONTEXT;
	return fill_process(&record->process);
}

static __noinline int tell_context(struct cuda_call *call, struct pending *pending, __u64 handle,
				   __s32 result)
{
	struct call_settings *set = settings();
	struct cuda_context *record;

	if (!call || !pending || !set || !is_within_share(call, COUNT_CONTEXTS, set->contexts_limit))
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	record->handle = handle ? handle : pending->subject;
	record->device = pending->device;
	record->result = result;
	fill_context(record, call);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

/* FNV-1a over eight bytes at a time; what is behind the end of the name is zero. */
static __always_inline __u64 digest(const char *name)
{
	const __u64 *words = (const void *)name;
	__u64 sum = 0xcbf29ce484222325;

	for (int index = 0; index < NAME_TOLD_BYTES / 8; index++)
		sum = (sum ^ words[index]) * 0x100000001b3;
	return sum;
}

static __noinline int fill_name(struct cuda_name *record, struct cuda_call *call)
{
	if (!record || !call)
		return 0;
	record->call = *call;
	record->call.record = RECORD_NAME;
	record->reserved = 0;
	return 0;
}

/* A name that a handle was given, once of a process; a handle can be given again to another. */
static __noinline int tell_name(struct cuda_call *call, struct pending *pending, __u64 handle,
				struct thread *thread)
{
	struct call_settings *set = settings();
	struct named_handle key = {};
	struct cuda_name *record;
	__u32 known = 1;

	if (!call || !pending || !thread || !set)
		return 0;
	if (thread->name_of != pending->stack || thread->name_length < 0)
		read_name(thread, pending);
	key.process.start_ns = call->start_ns;
	key.process.tgid = call->tgid;
	key.handle = handle;
	key.of = pending->subject;
	key.name = digest(thread->name);
	if (bpf_map_lookup_elem(&named_handles, &key))
		return 0;
	if (!is_within_share(call, COUNT_NAMES, set->names_limit))
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	fill_name(record, call);
	record->handle = handle;
	record->of = pending->subject;
	record->name_length = thread->name_length;
	__builtin_memcpy(record->name, thread->name, sizeof(record->name));
	bpf_ringbuf_submit(record, 0);
	bpf_map_update_elem(&named_handles, &key, &known, BPF_ANY);
	return 0;
}

static __noinline int fill_return(struct cuda_return *record, struct cuda_call *call)
{
	if (!record || !call)
		return 0;
	record->call = *call;
	record->call.record = RECORD_RETURN;
	record->reserved = 0;
	return 0;
}

static __noinline int tell_return(struct cuda_call *call, __u64 handle, __s32 result)
{
	struct cuda_return *record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);

	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	fill_return(record, call);
	record->handle = handle;
	record->result = result;
	bpf_ringbuf_submit(record, 0);
	return 0;
}

SEC("?uretprobe")
int returned(struct pt_regs *context)
{
	struct thread *thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	__u32 function = FUNCTION(bpf_get_attach_cookie(context));
	__s32 result = RETURNED(context);
	struct pending pending = {};
	struct cuda_call call;
	__u64 handle = 0;

	if (!thread || !left(thread, STACK_OF_RETURNED(context), function, &pending))
		return 0;
	if (!result && pending.out)
		bpf_probe_read_user(&handle, sizeof(handle), (void *)pending.out);
	fill_call(&call, function, pending.begun_ns);
	if (pending.task == TASK_CONTEXT)
		tell_context(&call, &pending, handle, result);
	else if (pending.task != TASK_NAME)
		tell_return(&call, handle, result);
	else if (!result)
		tell_name(&call, &pending, handle, thread);
	return 0;
}

/* What the linker made is a load like another; that it will be loaded once more is another. */
static __always_inline int link_ends(struct pt_regs *context, bool sleeps)
{
	struct thread *thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	__u32 function = FUNCTION(bpf_get_attach_cookie(context));
	struct call_settings *set = settings();
	__s32 result = RETURNED(context);
	struct pending pending = {};
	struct load load = {};

	if (!set || !thread || !left(thread, STACK_OF_RETURNED(context), function, &pending))
		return 0;
	if (result || bpf_probe_read_user(&load.address, 8, (void *)pending.out) ||
	    bpf_probe_read_user(&load.image.bytes, 8, (void *)pending.extra))
		return 0;
	fill_call(&load.call, function, 0);
	load.call.begun_ns = load.call.time_ns;
	load.image.at = load.address;
	load.parts = 1;
	if (!is_within_share(&load.call, COUNT_LOADS, set->loads_limit) || !tell_load(&load))
		return 0;
	if (sleeps)
		copy_image(&load);
	else
		load.image.missing = MISSING_COPY;
	tell_copied(&load);
	return 0;
}

SEC("?uretprobe.s")
int linked(struct pt_regs *context)
{
	return link_ends(context, true);
}

SEC("?uretprobe")
int linked_told(struct pt_regs *context)
{
	return link_ends(context, false);
}
