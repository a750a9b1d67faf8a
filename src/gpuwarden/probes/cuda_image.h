/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How long an image is that a process points to, by what it says of itself; what is none of the
 * formats is text with a NUL. cuda/image_memory.py does the same for what is read from outside.
 */
#ifndef GPUWARDEN_CUDA_IMAGE_H
#define GPUWARDEN_CUDA_IMAGE_H

#include "cuda_thread.h"
#include "unforeseen.h"

static __always_inline bool read_head(struct thread *thread, __u32 bytes, __u64 at)
{
	return !bpf_copy_from_user(&thread->head, bytes, (void *)at);
}

static __always_inline void reach(struct tables *tables, __u64 offset, __u64 size)
{
	__u64 end = offset + size;

	if (end < offset)
		tables->missing = MISSING_TOO_LARGE;
	else if (end > tables->end)
		tables->end = end;
}

static long reach_section(__u32 index, struct turn *turn)
{
	struct thread *thread = turn->thread;
	struct elf_section *section = &thread->head.section;
	struct tables *tables = &thread->tables;

	if (!read_head(thread, sizeof(*section), tables->at)) {
		tables->missing = MISSING_UNREADABLE;
		return 1;
	}
	tables->at += tables->step;
	if (section->type && section->type != SECTION_WITHOUT_BYTES &&
	    section->type != SECTION_OF_SHARED_MEMORY)
		reach(tables, section->offset, section->size);
	return tables->missing != 0;
}

static long reach_segment(__u32 index, struct turn *turn)
{
	struct thread *thread = turn->thread;
	struct elf_segment *segment = &thread->head.segment;
	struct tables *tables = &thread->tables;

	if (!read_head(thread, sizeof(*segment), tables->at)) {
		tables->missing = MISSING_UNREADABLE;
		return 1;
	}
	tables->at += tables->step;
	reach(tables, segment->offset, segment->file_bytes);
	return tables->missing != 0;
}

/* How many sections there are: as many as do not fit their field are counted in the first. */
static __noinline __u64 count_sections(struct thread *thread)
{
	__u64 first, count = 0;

	if (!thread)
		return 0;
	if (thread->head.elf.section_count || !thread->head.elf.sections)
		return thread->head.elf.section_count;
	first = thread->load.image.at + thread->head.elf.sections;
	if (bpf_copy_from_user(&count, sizeof(count),
			       (void *)(first + __builtin_offsetof(struct elf_section, size))))
		return SECTIONS_LIMIT + 1;
	return count;
}

static __noinline int measure_elf(struct thread *thread)
{
	struct turn turn = { .thread = thread };
	struct tables *tables;
	__u64 count, segments;
	__u32 segment_bytes, segment_count;

	if (!thread)
		return 0;
	tables = &thread->tables;
	__builtin_memset(tables, 0, sizeof(*tables));
	if (!read_head(thread, sizeof(struct elf_head), thread->load.image.at)) {
		thread->load.image.missing = MISSING_UNREADABLE;
		return 0;
	}
	count = count_sections(thread);
	if (thread->head.elf.class != ELF_CLASS_64 || count > SECTIONS_LIMIT) {
		thread->load.image.missing = MISSING_UNKNOWN_SIZE;
		return 0;
	}
	segments = thread->head.elf.segments;
	segment_bytes = thread->head.elf.segment_bytes;
	segment_count = thread->head.elf.segment_count;
	tables->end = sizeof(struct elf_head);
	tables->step = thread->head.elf.section_bytes;
	tables->at = thread->load.image.at + thread->head.elf.sections;
	reach(tables, thread->head.elf.sections, count * tables->step);
	if (tables->step >= sizeof(struct elf_section))
		bpf_loop(count, reach_section, &turn, 0);
	tables->step = segment_bytes;
	tables->at = thread->load.image.at + segments;
	reach(tables, segments, (__u64)segment_count * segment_bytes);
	if (!count && !tables->missing && segment_bytes >= sizeof(struct elf_segment))
		bpf_loop(segment_count, reach_segment, &turn, 0);
	thread->load.image.bytes = tables->end;
	thread->load.image.missing = tables->missing;
	return 0;
}

static long add_byte(__u32 index, struct turn *turn)
{
	struct thread *thread = turn->thread;
	struct tables *tables = &thread->tables;

	if (!read_head(thread, 1, tables->at)) {
		tables->missing = MISSING_UNREADABLE;
		return 1;
	}
	tables->at++;
	tables->number |= (__u64)(thread->head.byte & 0x7f) << (tables->shift & 63);
	tables->shift = unforeseen(tables->shift + 7);
	return thread->head.byte < 0x80;
}

/* An unsigned LEB128 number of at most 64 bits; its bytes are added to where it is read. */
static __noinline __u64 tile_number(struct thread *thread)
{
	struct turn turn = { .thread = thread };

	if (!thread)
		return 0;
	thread->tables.number = thread->tables.shift = 0;
	thread->head.byte = 0;
	bpf_loop(10, add_byte, &turn, 0);
	if (thread->head.byte >= 0x80)
		thread->tables.missing = MISSING_UNKNOWN_SIZE;
	return thread->tables.number;
}

/* Steps over a section of Tile IR: its number, its size, its alignment, padding, its bytes. */
static long reach_tile_section(__u32 index, struct turn *turn)
{
	struct thread *thread = turn->thread;
	struct tables *tables = &thread->tables;
	__u64 size, alignment, before = tables->at;
	__u8 section;

	if (!read_head(thread, 1, tables->at)) {
		tables->missing = MISSING_UNREADABLE;
		return 1;
	}
	section = thread->head.byte;
	tables->at++;
	if (!section) {
		tables->end = tables->at - thread->load.image.at;
		return 1;
	}
	size = tile_number(thread);
	if (section & TILE_IR_ALIGNED) {
		alignment = tile_number(thread);
		if (!alignment || alignment & (alignment - 1))
			tables->missing = MISSING_UNKNOWN_SIZE;
		else
			tables->at += (thread->load.image.at - tables->at) & (alignment - 1);
	}
	tables->at += size;
	if (tables->at < before)
		tables->missing = MISSING_TOO_LARGE;
	return tables->missing != 0;
}

static __noinline int measure_tile_ir(struct thread *thread)
{
	struct turn turn = { .thread = thread };
	struct tables *tables;

	if (!thread)
		return 0;
	tables = &thread->tables;
	__builtin_memset(tables, 0, sizeof(*tables));
	tables->at = thread->load.image.at + TILE_IR_HEAD_BYTES;
	bpf_loop(TILE_IR_SECTIONS_LIMIT, reach_tile_section, &turn, 0);
	thread->load.image.bytes = tables->end;
	thread->load.image.missing = tables->missing;
	if (!tables->end && !tables->missing)
		thread->load.image.missing = MISSING_UNKNOWN_SIZE;
	return 0;
}

/* The size of the fatbin that was read, with its header; 0 if it is none. */
static __always_inline __u64 fatbin_bytes(struct thread *thread)
{
	__u64 bytes = thread->head.fatbin.bytes + thread->head.fatbin.header_bytes;

	if (thread->head.fatbin.magic != FATBIN_MAGIC)
		return 0;
	return bytes < thread->head.fatbin.bytes ? ~0ULL : bytes;
}

/*
 * What the image of the load at hand is and how long. Checked by itself, once for whoever calls it,
 * as all functions here that are not static.
 */
__noinline int measure(struct thread *thread)
{
	struct image *image;

	if (!thread)
		return 0;
	image = &thread->load.image;
	if (!read_head(thread, sizeof(struct fatbin_head), image->at)) {
		/* A short text may end where its mapping ends. */
		image->form = FORM_TEXT;
		return 0;
	}
	if (thread->head.words[0] == WRAPPER_MAGIC) {
		if (!read_head(thread, sizeof(struct wrapper_head), image->at)) {
			image->missing = MISSING_UNREADABLE;
			return 0;
		}
		image->at = thread->head.wrapper.fatbin;
		if (thread->head.wrapper.version == 2 && thread->head.wrapper.others) {
			image->others = thread->head.wrapper.others;
			image->form = FORM_PARTS;
		}
		if (!read_head(thread, sizeof(struct fatbin_head), image->at)) {
			image->missing = MISSING_UNREADABLE;
			return 0;
		}
	}
	image->bytes = fatbin_bytes(thread);
	if (image->bytes)
		return 0;
	if (thread->head.words[0] == ELF_MAGIC)
		return measure_elf(thread);
	if (thread->head.words[0] == TILE_IR_MAGIC_1 && thread->head.words[1] == TILE_IR_MAGIC_2)
		return measure_tile_ir(thread);
	image->form = FORM_TEXT;
	return 0;
}

/* Whether a pointer leads to what one of the runtime's tables takes. */
static __noinline int is_table_image(__u64 at, bool sleeps)
{
	__u32 magic = 0;

	if (!at)
		return 0;
	if (sleeps)
		bpf_copy_from_user(&magic, sizeof(magic), (void *)at);
	else
		bpf_probe_read_user(&magic, sizeof(magic), (void *)at);
	return magic == WRAPPER_MAGIC || magic == FATBIN_MAGIC;
}

#endif
