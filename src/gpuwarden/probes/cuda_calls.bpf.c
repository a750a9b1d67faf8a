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
#include "cuda_load.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Of the two arguments of a table's function the one that leads to an image; the handle's is out. */
static __noinline int choose_image(struct pt_regs *context, struct thread *thread, bool sleeps)
{
	if (!context || !thread)
		return 0;
	thread->call.subject = ENTRY_2(context);
	thread->call.out = ENTRY_1(context);
	if (!is_table_image(ENTRY_2(context), sleeps) && is_table_image(ENTRY_1(context), sleeps)) {
		thread->call.subject = ENTRY_1(context);
		thread->call.out = ENTRY_2(context);
	}
	return 0;
}

static __always_inline void begin_load(struct thread *thread, __u64 address, __u64 bytes)
{
	thread->told.begun_ns = thread->call.begun_ns = thread->told.time_ns;
	__builtin_memset(&thread->load, 0, sizeof(thread->load));
	thread->load.address = thread->load.image.at = address;
	thread->load.image.bytes = bytes;
	thread->load.parts = 1;
	thread->load.input_kind = thread->call.input_kind;
}

/* Tells of the load at hand, with its bytes if this program may sleep. */
static __always_inline int tell_whole_load(struct thread *thread, bool sleeps)
{
	struct call_settings *set = settings();
	int share;

	if (!thread || !set)
		return 0;
	share = is_within_share(&thread->told, COUNT_LOADS, set->loads_limit);
	if (share == NOT_WITHIN || !tell_load(thread))
		return 0;
	/* A process that goes on loading is known by this one. */
	if (share == LAST_WITHIN)
		thread->load.image.missing = MISSING_LIMIT;
	else if (thread->call.task == TASK_PATH)
		sleeps ? copy_path(thread) : tell_path(thread);
	else if (!sleeps)
		thread->load.image.missing = MISSING_COPY;
	else
		copy_image(thread);
	return tell_copied(thread);
}

static __always_inline int load_begins(struct pt_regs *context, bool sleeps)
{
	struct thread *thread = this_thread();
	__u32 task;

	if (!thread)
		return 0;
	task = note(context, thread, bpf_get_attach_cookie(context));
	if (task == TASK_TABLE_IMAGE)
		choose_image(context, thread, sleeps);
	begin_load(thread, thread->call.subject,
		   task == TASK_SIZED_IMAGE ? thread->call.extra : 0);
	if (sleeps && (task == TASK_IMAGE || task == TASK_TABLE_IMAGE))
		measure(thread);
	if (task != TASK_PATH && task != TASK_LINKED)
		thread->call.image = thread->load.image.at;
	leave_until(thread);
	thread->load.within_ns = outer_load(thread);
	enter(thread);
	if (task != TASK_LINKED)
		tell_whole_load(thread, sleeps);
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
static __noinline int read_name(struct thread *thread)
{
	if (!thread)
		return 0;
	__builtin_memset(thread->name, 0, sizeof(thread->name));
	thread->name_of = thread->call.stack;
	thread->name_length = 0;
	if (thread->call.extra)
		thread->name_length = bpf_probe_read_user_str(thread->name, sizeof(thread->name),
							      (void *)thread->call.extra);
	return 0;
}

static __noinline int fill_context(struct cuda_context *record, struct thread *thread)
{
	if (!record || !thread)
		return 0;
	record->call = thread->told;
	record->call.record = RECORD_CONTEXT;
	record->device = thread->call.device;
	return fill_process(&record->process);
}

static __noinline int tell_context(struct thread *thread, __u64 handle, __s32 result)
{
	struct call_settings *set = settings();
	struct cuda_context *record;

	if (!thread || !set ||
	    !is_within_share(&thread->told, COUNT_CONTEXTS, set->contexts_limit))
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	record->handle = handle ? handle : thread->call.subject;
	record->result = result;
	fill_context(record, thread);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

SEC("?uprobe")
int calling(struct pt_regs *context)
{
	struct call_settings *set = settings();
	struct thread *thread = this_thread();

	if (!set || !thread || !note(context, thread, bpf_get_attach_cookie(context)))
		return 0;
	if (!set->returns) {
		if (thread->call.task == TASK_CONTEXT)
			tell_context(thread, 0, 0);
		return 0;
	}
	leave_until(thread);
	if (thread->call.task == TASK_NAME)
		read_name(thread);
	enter(thread);
	return 0;
}

/* FNV-1a over eight bytes at a time; what is behind the end of the name is zero. */
static __noinline __u64 digest(struct thread *thread)
{
	__u64 sum = 0xcbf29ce484222325;
	const __u64 *words;

	if (!thread)
		return 0;
	words = (const void *)thread->name;
	for (int index = 0; index < NAME_TOLD_BYTES / 8; index++)
		sum = (sum ^ words[index]) * 0x100000001b3;
	return sum;
}

static __noinline int fill_name(struct cuda_name *record, struct thread *thread)
{
	if (!record || !thread)
		return 0;
	record->call = thread->told;
	record->call.record = RECORD_NAME;
	record->of = thread->call.subject;
	record->name_length = thread->name_length;
	record->reserved = 0;
	__builtin_memcpy(record->name, thread->name, sizeof(record->name));
	return 0;
}

/* A name that a handle was given, once of a process; a handle can be given again to another. */
static __noinline int tell_name(struct thread *thread, __u64 handle)
{
	struct call_settings *set = settings();
	struct cuda_name *record;
	struct named_handle *key;

	if (!thread || !set)
		return 0;
	if (thread->name_of != thread->call.stack || thread->name_length < 0)
		read_name(thread);
	key = &thread->handle;
	key->process.start_ns = thread->told.start_ns;
	key->process.tgid = thread->told.tgid;
	key->handle = handle;
	key->of = thread->call.subject;
	key->name = digest(thread);
	if (bpf_map_lookup_elem(&named_handles, key) ||
	    !is_within_share(&thread->told, COUNT_NAMES, set->names_limit))
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	record->handle = handle;
	fill_name(record, thread);
	bpf_ringbuf_submit(record, 0);
	bpf_map_update_elem(&named_handles, key, &told_once, BPF_ANY);
	return 0;
}

static __noinline int fill_return(struct cuda_return *record, struct thread *thread)
{
	if (!record || !thread)
		return 0;
	record->call = thread->told;
	record->call.record = RECORD_RETURN;
	record->reserved = 0;
	return 0;
}

static __noinline int tell_return(struct thread *thread, __u64 handle, __s32 result)
{
	struct cuda_return *record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);

	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	fill_return(record, thread);
	record->handle = handle;
	record->result = result;
	bpf_ringbuf_submit(record, 0);
	return 0;
}

/* The call that returns here, if it was seen to begin. */
static __always_inline struct thread *returning(struct pt_regs *context)
{
	struct thread *thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	__u32 function = FUNCTION(bpf_get_attach_cookie(context));

	if (!thread || !leave(thread, STACK_OF_RETURNED(context), function))
		return 0;
	fill_call(&thread->told, function, thread->call.begun_ns);
	return thread;
}

SEC("?uretprobe")
int returned(struct pt_regs *context)
{
	struct thread *thread = returning(context);
	__s32 result = RETURNED(context);
	__u64 handle = 0;

	if (!thread)
		return 0;
	if (!result && thread->call.out)
		bpf_probe_read_user(&handle, sizeof(handle), (void *)thread->call.out);
	if (thread->call.task == TASK_CONTEXT)
		tell_context(thread, handle, result);
	else if (thread->call.task != TASK_NAME)
		tell_return(thread, handle, result);
	else if (!result)
		tell_name(thread, handle);
	return 0;
}

/* What the linker made is a load like another; that it will be loaded once more is another. */
static __always_inline int link_ends(struct pt_regs *context, bool sleeps)
{
	struct thread *thread = returning(context);
	__u64 address = 0, bytes = 0;

	if (!thread || (__s32)RETURNED(context) ||
	    bpf_probe_read_user(&address, sizeof(address), (void *)thread->call.out) ||
	    bpf_probe_read_user(&bytes, sizeof(bytes), (void *)thread->call.extra))
		return 0;
	begin_load(thread, address, bytes);
	tell_whole_load(thread, sleeps);
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
