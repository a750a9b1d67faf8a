/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tells of a load: that it began, its bytes or its path, and what of them is missing. */
#ifndef GPUWARDEN_CUDA_LOAD_H
#define GPUWARDEN_CUDA_LOAD_H

#include "process.h"
#include "cuda_copy.h"
#include "cuda_image.h"
#include "stop.h"

struct load {
	struct cuda_call call;
	struct image image;
	__u64 address;
	__u64 within_ns;
	__u64 sent;
	__u32 parts;
	__u32 input_kind;
};

static __noinline int fill_load(struct cuda_load *record, struct load *load)
{
	if (!record || !load)
		return 0;
	record->call = load->call;
	record->call.record = RECORD_LOAD;
	record->address = load->address;
	record->image = load->image.at;
	record->image_bytes = load->image.bytes;
	record->within_ns = load->within_ns;
	record->parts = load->parts;
	record->input_kind = load->input_kind;
	return fill_process(&record->process);
}

/* That a load began; whether that found room. */
__noinline int tell_load(struct load *load)
{
	struct cuda_load *record;

	if (!load)
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	fill_load(record, load);
	bpf_ringbuf_submit(record, 0);
	return 1;
}

static __noinline int fill_copied(struct cuda_copied *record, struct load *load)
{
	if (!record || !load)
		return 0;
	record->call = load->call;
	record->call.record = RECORD_COPIED;
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
__noinline int tell_copied(struct load *load)
{
	struct call_settings *set = settings();
	struct cuda_copied *record;

	if (!load || !set)
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		increment(COUNT_DROPPED);
		return 0;
	}
	fill_copied(record, load);
	if (set->may_stop && record->missing == MISSING_ROOM && load->image.form != FORM_PARTS) {
		record->stop_asked = 1;
		record->stop_outcome = stop_process();
	}
	bpf_ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
	return 1;
}

static __always_inline void start_copying(struct copying *copying, struct load *load)
{
	__builtin_memset(copying, 0, sizeof(*copying));
	copying->call = load->call;
}

struct parts {
	struct load *load;
};

/* Copies the next of several fatbins; each begins at a multiple of eight in what is told. */
static long copy_part(__u32 index, struct parts *parts)
{
	struct call_settings *set = settings();
	struct load *load = parts->load;
	struct copying copying;
	struct fatbin_head head;
	__u64 at;

	if (!set || !load)
		return 1;
	at = load->image.at;
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
	if (bpf_copy_from_user(&head, sizeof(head), (void *)at)) {
		load->image.missing = MISSING_UNREADABLE;
		return 1;
	}
	start_copying(&copying, load);
	copying.from = at;
	copying.offset = (load->sent + 7) & ~7ULL;
	copying.bytes = fatbin_bytes(&head);
	if (copying.bytes > set->limit_bytes - copying.offset || copying.offset > set->limit_bytes)
		load->image.missing = MISSING_TOO_LARGE;
	if (!copying.bytes)
		load->image.missing = MISSING_UNKNOWN_SIZE;
	if (load->image.missing)
		return 1;
	copy(&copying);
	load->parts++;
	load->sent = copying.offset + copying.done;
	load->image.missing = copying.missing;
	return load->image.missing != 0;
}

/* Checked by itself, once for whoever calls it. */
__noinline int copy_image(struct load *load)
{
	struct call_settings *set = settings();
	struct copying copying;

	if (!load || !set || load->image.missing)
		return 0;
	if (load->image.form == FORM_PARTS) {
		struct parts parts = { .load = load };

		load->parts = 0;
		bpf_loop(PARTS_LIMIT + 1, copy_part, &parts, 0);
		load->image.bytes = load->image.missing ? 0 : load->sent;
		return 0;
	}
	start_copying(&copying, load);
	copying.from = load->image.at;
	copying.bytes = load->image.bytes;
	if (load->image.form == FORM_TEXT) {
		copying.bytes = set->limit_bytes;
		copy_text(&copying);
		if (copying.ended)
			load->image.bytes = copying.done;
	} else if (copying.bytes > set->limit_bytes) {
		copying.missing = MISSING_TOO_LARGE;
	} else {
		copy(&copying);
	}
	load->sent = copying.done;
	load->image.missing = copying.missing;
	return 0;
}

__noinline int copy_path(struct load *load)
{
	struct copying copying;

	if (!load)
		return 0;
	start_copying(&copying, load);
	copying.of = PIECE_OF_PATH;
	copying.from = load->address;
	copying.bytes = PATH_LIMIT_BYTES;
	copy_text(&copying);
	load->image.missing = copying.missing;
	return 0;
}

#endif
