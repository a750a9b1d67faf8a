/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Copies bytes of the calling process into the ring, piece by piece, while the process waits.
 *
 * No room of the ring is held while a page is fetched: whoever serves the process's pages (a file
 * server, a handler of page faults) could else keep every record behind it from being read. Pages
 * that are not there are fetched with nothing held, then all of a piece is read at once.
 */
#ifndef GPUWARDEN_CUDA_COPY_H
#define GPUWARDEN_CUDA_COPY_H

#include "cuda_maps.h"
#include "unforeseen.h"

#define TRIES 4 /* a page that was fetched can be gone again */
#define PIECES_LIMIT (1 << 18)
#define WAIT_TURNS (1 << 22)
#define KEPT_SHARE 8 /* of the ring, one part is for records without bytes */

struct copying {
	struct cuda_call call;
	__u64 from;
	__u64 bytes; /* from there; of text: at most */
	__u64 done;
	__u64 offset; /* where these bytes begin in what is told */
	__u64 waited_until; /* 0: it did not wait so far */
	__u32 of;
	__u32 missing;
	__u32 tries;
	__u32 ended; /* text: its NUL was found */
};

struct small_piece {
	struct cuda_piece piece;
	char bytes[SMALL_BYTES];
};

struct medium_piece {
	struct cuda_piece piece;
	char bytes[MEDIUM_BYTES];
};

struct large_piece {
	struct cuda_piece piece;
	char bytes[LARGE_BYTES];
};

struct pages {
	__u64 at;
	__u64 end;
	__u64 absent;
};

static long fetch_page(__u32 index, struct pages *pages)
{
	char byte;

	if (pages->at >= pages->end)
		return 1;
	if (bpf_copy_from_user(&byte, 1, (void *)pages->at)) {
		pages->absent = 1;
		return 1;
	}
	pages->at = (pages->at | (PAGE_BYTES - 1)) + 1;
	return 0;
}

/* Fetches what cannot be read for now; whether it was there. */
static __noinline int fetch(__u64 from, __u64 bytes)
{
	struct pages pages = { .at = from, .end = from + bytes };

	if (!bytes)
		return 1;
	bpf_loop(LARGE_BYTES / PAGE_BYTES + 1, fetch_page, &pages, 0);
	return !pages.absent;
}

static __always_inline bool has_room(__u64 bytes)
{
	__u64 size = bpf_ringbuf_query(&records, BPF_RB_RING_SIZE);

	return bpf_ringbuf_query(&records, BPF_RB_AVAIL_DATA) + bytes + 16 < size - size / KEPT_SHARE;
}

struct wait {
	__u64 until;
	__u64 bytes;
	__u64 found;
};

static long wait_turn(__u32 index, struct wait *wait)
{
	if (has_room(wait->bytes)) {
		wait->found = 1;
		return 1;
	}
	return bpf_ktime_get_boot_ns() >= wait->until;
}

/* Whether there is room, also after some time; that time is of the load as a whole. */
static __noinline int wait_for_room(struct copying *copying, __u64 bytes)
{
	struct call_settings *set = settings();
	struct wait wait = { .bytes = bytes };

	if (!copying || !set)
		return 0;
	if (has_room(bytes))
		return 1;
	if (!copying->waited_until)
		copying->waited_until = bpf_ktime_get_boot_ns() + set->wait_ns;
	wait.until = copying->waited_until;
	bpf_loop(WAIT_TURNS, wait_turn, &wait, 0);
	return wait.found;
}

static __noinline int fill_piece(struct cuda_piece *piece, struct copying *copying, __u32 length)
{
	if (!piece || !copying)
		return 0;
	piece->call = copying->call;
	piece->call.record = RECORD_PIECE;
	piece->offset = copying->offset + copying->done;
	piece->length = length;
	piece->of = copying->of;
	return 0;
}

/* Bytes that were sent; how many is not followed when the program is checked. */
static __always_inline void sent(struct copying *copying, __u64 length)
{
	copying->done = unforeseen(copying->done + length);
	copying->tries = 0;
}

/* Counts a try; how many there were is not followed when the program is checked. */
static __always_inline bool may_try(struct copying *copying)
{
	copying->tries = unforeseen(copying->tries + 1);
	return copying->tries <= TRIES;
}

/* Has a piece's pages fetched; whether it is worth another try. */
static __noinline int try_again(struct copying *copying, __u64 length)
{
	if (!copying)
		return 0;
	if (may_try(copying) && fetch(copying->from + copying->done, length))
		return 1;
	copying->missing = MISSING_UNREADABLE;
	return 0;
}

/* Sends the next bytes; 0 where the copy is to go on. */
#define SENDER(name, size)                                                                         \
	static __noinline int send_##name(struct copying *copying, __u64 length)                   \
	{                                                                                          \
		struct name##_piece *record;                                                       \
                                                                                                   \
		if (!copying)                                                                      \
			return 1;                                                                  \
		if (length > size)                                                                 \
			length = size;                                                             \
		record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);                        \
		if (!record) {                                                                     \
			if (may_try(copying))                                                      \
				return 0;                                                          \
			copying->missing = MISSING_ROOM;                                           \
			return 1;                                                                  \
		}                                                                                  \
		if (bpf_probe_read_user(record->bytes, length,                                     \
					(void *)(copying->from + copying->done))) {                \
			bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP);                             \
			return !try_again(copying, length);                                        \
		}                                                                                  \
		fill_piece(&record->piece, copying, length);                                       \
		bpf_ringbuf_submit(record, 0);                                                     \
		sent(copying, length);                                                             \
		return 0;                                                                          \
	}

SENDER(small, SMALL_BYTES)
SENDER(medium, MEDIUM_BYTES)
SENDER(large, LARGE_BYTES)

static long copy_next(__u32 index, struct copying *copying)
{
	__u64 left = copying->bytes - copying->done, needed = LARGE_BYTES;

	if (!left || copying->missing)
		return 1;
	if (left <= SMALL_BYTES)
		needed = SMALL_BYTES;
	else if (left <= MEDIUM_BYTES)
		needed = MEDIUM_BYTES;
	if (!wait_for_room(copying, needed + sizeof(struct cuda_piece))) {
		copying->missing = MISSING_ROOM;
		return 1;
	}
	if (needed == SMALL_BYTES)
		return send_small(copying, left);
	if (needed == MEDIUM_BYTES)
		return send_medium(copying, left);
	return send_large(copying, left);
}

/* Text goes page by page: what is behind the page of its end may be nobody's. */
static long copy_text_page(__u32 index, struct copying *copying)
{
	__u64 at = copying->from + copying->done, left = copying->bytes - copying->done;
	struct small_piece *record;
	__u32 room = PAGE_BYTES - (at & (PAGE_BYTES - 1)), length;
	char last = 0;
	long read;

	if (!left) {
		copying->missing = MISSING_TOO_LARGE;
		return 1;
	}
	if (room > left)
		room = left;
	if (!wait_for_room(copying, sizeof(*record))) {
		copying->missing = MISSING_ROOM;
		return 1;
	}
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		if (may_try(copying))
			return 0;
		copying->missing = MISSING_ROOM;
		return 1;
	}
	if (room > PAGE_BYTES || !room)
		room = PAGE_BYTES;
	read = bpf_probe_read_user_str(record->bytes, room, (void *)at);
	if (read <= 0 || (read == room && bpf_probe_read_user(&last, 1, (void *)(at + room - 1)))) {
		bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP);
		return !try_again(copying, 1);
	}
	/* What is cut has a NUL as well, in place of its last character. */
	length = (read - 1) & (PAGE_BYTES - 1);
	copying->ended = !last;
	if (last)
		record->bytes[length++] = last;
	fill_piece(&record->piece, copying, length);
	bpf_ringbuf_submit(record, 0);
	sent(copying, length);
	return !last;
}

static __always_inline void copy(struct copying *copying)
{
	copying->done = copying->tries = 0;
	bpf_loop(PIECES_LIMIT, copy_next, copying, 0);
}

static __always_inline void copy_text(struct copying *copying)
{
	copying->done = copying->tries = copying->ended = 0;
	bpf_loop(PIECES_LIMIT, copy_text_page, copying, 0);
}

#endif
