/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tells of a load: that it began, its bytes or its path, and what of them is missing. */
#ifndef GPUWARDEN_CUDA_LOAD_H
#define GPUWARDEN_CUDA_LOAD_H

#include "process.h"
#include "cuda_copy.h"
#include "cuda_image.h"
#include "stop.h"

static __noinline int fill_load(struct cuda_load *record, struct thread *thread)
{
	if (!record || !thread)
		return 0;
	record->call = thread->told;
	record->call.record = RECORD_LOAD;
	record->address = thread->load.address;
	record->image = thread->load.image.at;
	record->image_bytes = thread->load.image.bytes;
	record->within_ns = thread->load.within_ns;
	record->parts = thread->load.parts;
	record->input_kind = thread->load.input_kind;
	return fill_process(&record->process);
}

/* That a load began; whether that found room. */
__noinline int tell_load(struct thread *thread)
{
	struct cuda_load *record;

	if (!thread)
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	fill_load(record, thread);
	bpf_ringbuf_submit(record, 0);
	return 1;
}

static __noinline int fill_copied(struct cuda_copied *record, struct load *load)
{
	if (!record || !load)
		return 0;
	record->image = load->image.at;
	record->image_bytes = load->image.bytes;
	record->sent_bytes = load->sent;
	record->parts = load->parts;
	record->missing = load->image.missing;
	record->stop_asked = record->stop_outcome = 0;
	return 0;
}

/*
 * That no more bytes come. For what found no room the process is stopped, if it may be: there is
 * room for this record before it is.
 */
__noinline int tell_copied(struct thread *thread)
{
	struct call_settings *set = settings();
	struct cuda_copied *record;

	if (!thread || !set)
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	record->call = thread->told;
	record->call.record = RECORD_COPIED;
	fill_copied(record, &thread->load);
	if (set->may_stop && record->missing == MISSING_ROOM &&
	    thread->load.image.form != FORM_PARTS) {
		record->stop_asked = 1;
		record->stop_outcome = stop_process();
	}
	bpf_ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
	return 1;
}

/* Copies the next of several fatbins; each begins at a multiple of eight in what is told. */
static long copy_part(__u32 index, struct turn *turn)
{
	struct call_settings *set = settings();
	struct thread *thread = turn->thread;
	struct load *load = &thread->load;
	__u64 at = load->image.at, offset = (load->sent + 7) & ~7ULL, bytes;

	if (!set)
		return 1;
	if (index) {
		if (bpf_copy_from_user(&at, sizeof(at), (void *)load->image.others)) {
			load->image.missing = MISSING_UNREADABLE;
			return 1;
		}
		load->image.others += sizeof(at);
		if (!at)
			return 1;
		if (index >= PARTS_LIMIT) {
			load->image.missing = MISSING_PARTS;
			return 1;
		}
	}
	if (!read_head(thread, sizeof(struct fatbin_head), at)) {
		load->image.missing = MISSING_UNREADABLE;
		return 1;
	}
	bytes = fatbin_bytes(thread);
	if (!bytes)
		load->image.missing = MISSING_UNKNOWN_SIZE;
	else if (offset > set->limit_bytes || bytes > set->limit_bytes - offset)
		load->image.missing = MISSING_TOO_LARGE;
	if (load->image.missing)
		return 1;
	begin(&thread->copying, at, bytes);
	thread->copying.offset = offset;
	copy(thread);
	load->parts++;
	load->sent = offset + thread->copying.done;
	load->image.missing = thread->copying.missing;
	return load->image.missing != 0;
}

__noinline int copy_image(struct thread *thread)
{
	struct call_settings *set = settings();
	struct turn turn = { .thread = thread };
	struct load *load;

	if (!thread || !set || thread->load.image.missing)
		return 0;
	load = &thread->load;
	if (load->image.form == FORM_PARTS) {
		load->parts = 0;
		bpf_loop(PARTS_LIMIT + 1, copy_part, &turn, 0);
		load->image.bytes = load->image.missing ? 0 : load->sent;
		return 0;
	}
	if (load->image.form == FORM_TEXT) {
		begin(&thread->copying, load->image.at, set->limit_bytes);
		copy_text(thread);
		if (thread->copying.ended)
			load->image.bytes = thread->copying.done;
	} else {
		begin(&thread->copying, load->image.at, load->image.bytes);
		if (load->image.bytes > set->limit_bytes)
			thread->copying.missing = MISSING_TOO_LARGE;
		else
			copy(thread);
	}
	load->sent = thread->copying.done;
	load->image.missing = thread->copying.missing;
	return 0;
}

/* The path as far as it can be read without waiting for it. */
__noinline int tell_path(struct thread *thread)
{
	if (!thread)
		return 0;
	begin(&thread->copying, thread->load.address, PATH_LIMIT_BYTES);
	thread->copying.of = PIECE_OF_PATH;
	if (!send_text_now(thread))
		thread->load.image.missing = MISSING_UNREADABLE;
	return 0;
}

__noinline int copy_path(struct thread *thread)
{
	if (!thread)
		return 0;
	begin(&thread->copying, thread->load.address, PATH_LIMIT_BYTES);
	thread->copying.of = PIECE_OF_PATH;
	copy_text(thread);
	thread->load.image.missing = thread->copying.missing;
	return 0;
}

#endif
