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

#include "cuda_thread.h"
#include "unforeseen.h"

#define TRIES 4 /* a page that was fetched can be gone again */
#define PIECES_LIMIT (1 << 18)
#define WAIT_TURNS (1 << 22)
#define KEPT_SHARE 8 /* of the ring, one part is for records without bytes */

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

static long fetch_page(__u32 index, struct turn *turn)
{
	struct pages *pages = &turn->thread->pages;
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
static __always_inline int fetch(struct thread *thread, __u64 from, __u64 bytes)
{
	struct turn turn = { .thread = thread };

	if (!thread)
		return 0;
	thread->pages.at = from;
	thread->pages.end = from + bytes;
	thread->pages.absent = 0;
	bpf_loop(LARGE_BYTES / PAGE_BYTES + 1, fetch_page, &turn, 0);
	return !thread->pages.absent;
}

static __always_inline bool has_room(__u64 bytes)
{
	__u64 size = bpf_ringbuf_query(&records, BPF_RB_RING_SIZE);

	return bpf_ringbuf_query(&records, BPF_RB_AVAIL_DATA) + bytes + 16 < size - size / KEPT_SHARE;
}

/*
 * Lets others run on this CPU, as kernels do on their way to another process's pages: without, some
 * would not run the reader of the ring here before the copy is over.
 */
static __always_inline void let_run(__u64 at)
{
	char byte;

	bpf_copy_from_user_task(&byte, 1, (void *)at, bpf_get_current_task_btf(), 0);
}

struct wait {
	__u64 until;
	__u64 bytes;
	__u64 found;
	__u64 at;
};

static long wait_turn(__u32 index, struct wait *wait)
{
	if (has_room(wait->bytes)) {
		wait->found = 1;
		return 1;
	}
	let_run(wait->at);
	return bpf_ktime_get_boot_ns() >= wait->until;
}

/* Whether there is room, also after some time; that time is of the load as a whole. */
static __noinline int wait_for_room(struct thread *thread, __u64 bytes)
{
	struct call_settings *set = settings();
	struct wait wait = { .bytes = bytes };

	if (!thread || !set)
		return 0;
	if (has_room(bytes))
		return 1;
	if (!thread->load.waited_until)
		thread->load.waited_until = bpf_ktime_get_boot_ns() + set->wait_ns;
	wait.until = thread->load.waited_until;
	wait.at = thread->copying.from;
	bpf_loop(WAIT_TURNS, wait_turn, &wait, 0);
	return wait.found;
}

static __noinline int fill_piece(struct cuda_piece *piece, struct thread *thread, __u32 length)
{
	if (!piece || !thread)
		return 0;
	piece->call = thread->told;
	piece->call.record = RECORD_PIECE;
	piece->offset = thread->copying.offset + thread->copying.done;
	piece->length = length;
	piece->of = thread->copying.of;
	return 0;
}

/* Counts a try; how many there were is not followed when the program is checked. */
static __always_inline bool may_try(struct copying *copying)
{
	copying->tries = unforeseen(copying->tries + 1);
	return copying->tries <= TRIES;
}

/* Has the pages of a piece fetched that could not be read; 0 where the copy is to go on. */
static __noinline int fetch_piece(struct thread *thread, __u64 length)
{
	struct copying *copying;

	if (!thread)
		return 1;
	copying = &thread->copying;
	if (may_try(copying) && fetch(thread, copying->from + copying->done, length))
		return 0;
	copying->missing = MISSING_UNREADABLE;
	return 1;
}

/* There was room a moment ago; 0 where the copy is to go on. */
static __noinline int miss_room(struct thread *thread)
{
	if (!thread)
		return 1;
	if (may_try(&thread->copying))
		return 0;
	thread->copying.missing = MISSING_ROOM;
	return 1;
}

/* Sends the next bytes; 0 where the copy is to go on. */
#define SENDER(name, size)                                                                         \
	static __noinline int send_##name(struct thread *thread, __u64 length)                     \
	{                                                                                          \
		struct name##_piece *record;                                                       \
		struct copying *copying;                                                           \
                                                                                                   \
		if (!thread)                                                                       \
			return 1;                                                                  \
		copying = &thread->copying;                                                        \
		if (length > size)                                                                 \
			length = size;                                                             \
		record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);                        \
		if (!record)                                                                       \
			return miss_room(thread);                                                  \
		if (bpf_probe_read_user(record->bytes, length,                                     \
					(void *)(copying->from + copying->done))) {                \
			bpf_ringbuf_discard(record, 0);                                            \
			return fetch_piece(thread, length);                                        \
		}                                                                                  \
		fill_piece(&record->piece, thread, length);                                        \
		bpf_ringbuf_submit(record, 0);                                                     \
		copying->done += length;                                                           \
		copying->tries = 0;                                                                \
		return 0;                                                                          \
	}

SENDER(small, SMALL_BYTES)
SENDER(medium, MEDIUM_BYTES)
SENDER(large, LARGE_BYTES)

/* The bytes of the next piece; 0 if there is none. */
static __noinline __u64 next_piece(struct thread *thread)
{
	__u64 left;

	if (!thread)
		return 0;
	left = thread->copying.bytes - thread->copying.done;
	if (left > LARGE_BYTES)
		left = LARGE_BYTES;
	let_run(thread->copying.from + thread->copying.done);
	/* What is not there would be a record for nothing. */
	if (left && !fetch(thread, thread->copying.from + thread->copying.done, left))
		thread->copying.missing = MISSING_UNREADABLE;
	return left;
}

static long copy_next(__u32 index, struct turn *turn)
{
	struct thread *thread = turn->thread;
	__u64 left = next_piece(thread), needed = LARGE_BYTES;

	if (!left || thread->copying.missing)
		return 1;
	if (left <= SMALL_BYTES)
		needed = SMALL_BYTES;
	else if (left <= MEDIUM_BYTES)
		needed = MEDIUM_BYTES;
	if (!wait_for_room(thread, needed + sizeof(struct cuda_piece))) {
		thread->copying.missing = MISSING_ROOM;
		return 1;
	}
	if (needed == SMALL_BYTES)
		return send_small(thread, left);
	if (needed == MEDIUM_BYTES)
		return send_medium(thread, left);
	return send_large(thread, left);
}

/*
 * Sends text from an address on, ``most`` bytes at most: 0 where the copy is to go on, 1 where it is
 * over, 2 where it could not be read for now.
 */
#define TEXT_SENDER(name, size)                                                                    \
	static __noinline int send_##name##_text(struct thread *thread, __u64 at, __u32 most)      \
	{                                                                                          \
		struct name##_piece *record;                                                       \
		__u64 room = most;                                                                 \
		__u32 length;                                                                      \
		char last = 0;                                                                     \
		long read;                                                                         \
                                                                                                   \
		if (!thread)                                                                       \
			return 1;                                                                  \
		record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);                        \
		if (!record)                                                                       \
			return miss_room(thread);                                                  \
		if (room > size || !room)                                                          \
			room = size;                                                               \
		/* Bounded once more for verifiers that lose sight of a bound (seen with 6.1). */  \
		asm volatile("" : "+r"(room));                                                     \
		room = ((room - 1) & (size - 1)) + 1;                                              \
		read = bpf_probe_read_user_str(record->bytes, room, (void *)at);                   \
		if (read <= 0 ||                                                                   \
		    (read == room && bpf_probe_read_user(&last, 1, (void *)(at + room - 1)))) {    \
			bpf_ringbuf_discard(record, 0);                                            \
			return 2;                                                                  \
		}                                                                                  \
		/* What is cut has a NUL as well, in place of its last character. */               \
		length = (read - 1) & (size - 1);                                                  \
		if (last)                                                                          \
			record->bytes[length++] = last;                                            \
		fill_piece(&record->piece, thread, length);                                        \
		bpf_ringbuf_submit(record, 0);                                                     \
		thread->copying.done += length;                                                    \
		thread->copying.tries = 0;                                                         \
		thread->copying.ended = !last;                                                     \
		return !last;                                                                      \
	}

TEXT_SENDER(small, SMALL_BYTES)
TEXT_SENDER(medium, MEDIUM_BYTES)

/* Sends a text of at most PATH_LIMIT_BYTES as far as it can be read now; whether there is any. */
static __noinline int send_text_now(struct thread *thread)
{
	struct small_piece *record;
	long read;

	if (!thread)
		return 0;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record)
		return 0;
	read = bpf_probe_read_user_str(record->bytes, sizeof(record->bytes),
				       (void *)thread->copying.from);
	if (read <= 0) {
		bpf_ringbuf_discard(record, 0);
		return 0;
	}
	fill_piece(&record->piece, thread, read - 1);
	bpf_ringbuf_submit(record, 0);
	return 1;
}

/*
 * Text goes page by page where it is not all there: what is behind the page of its end may be
 * nobody's. Its first page too, for most of it is short.
 */
static long copy_text_page(__u32 index, struct turn *turn)
{
	struct thread *thread = turn->thread;
	__u64 at = thread->copying.from + thread->copying.done;
	__u64 left = thread->copying.bytes - thread->copying.done;
	__u32 room = PAGE_BYTES - (at & (PAGE_BYTES - 1));
	int sent;

	if (!left || thread->copying.missing) {
		if (!left)
			thread->copying.missing = MISSING_TOO_LARGE;
		return 1;
	}
	if (!wait_for_room(thread, sizeof(struct medium_piece))) {
		thread->copying.missing = MISSING_ROOM;
		return 1;
	}
	if (index && left >= MEDIUM_BYTES) {
		let_run(at);
		sent = send_medium_text(thread, at, MEDIUM_BYTES);
		if (sent != 2)
			return sent;
	}
	sent = send_small_text(thread, at, room > left ? left : room);
	return sent == 2 ? fetch_piece(thread, 1) : sent;
}

/* Begins to send bytes from an address on. */
static __always_inline void begin(struct copying *copying, __u64 from, __u64 bytes)
{
	__builtin_memset(copying, 0, sizeof(*copying));
	copying->from = from;
	copying->bytes = bytes;
}

static __always_inline void copy(struct thread *thread)
{
	struct turn turn = { .thread = thread };

	bpf_loop(PIECES_LIMIT, copy_next, &turn, 0);
}

static __always_inline void copy_text(struct thread *thread)
{
	struct turn turn = { .thread = thread };

	bpf_loop(PIECES_LIMIT, copy_text_page, &turn, 0);
}

#endif
