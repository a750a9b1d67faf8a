/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How long an image is that a process points to, by what it says of itself: fatbins and wrappers of
 * them (fatbinary_section.h of the CUDA toolkit), ELF files, Tile IR, else text with a NUL.
 * cuda/image_memory.py does the same for what is read from outside.
 */
#ifndef GPUWARDEN_CUDA_IMAGE_H
#define GPUWARDEN_CUDA_IMAGE_H

#include "cuda_records.h"
#include "unforeseen.h"

#define WRAPPER_MAGIC 0x466243b1
#define FATBIN_MAGIC 0xba55ed50
#define ELF_MAGIC 0x464c457f
#define ELF_CLASS_64 2
#define SECTION_WITHOUT_BYTES 8 /* SHT_NOBITS */
#define SECTIONS_LIMIT 65536
#define TILE_IR_MAGIC_1 0x6c69547f
#define TILE_IR_MAGIC_2 0x00524965
#define TILE_IR_HEAD_BYTES 12
#define TILE_IR_SECTIONS_LIMIT 128
#define TILE_IR_ALIGNED 0x80

enum form { FORM_SIZED, FORM_TEXT, FORM_PARTS };

struct image {
	__u64 at;
	__u64 bytes; /* 0: not known */
	__u64 others; /* of more fatbins: where pointers to them are, a NULL at the end */
	__u32 form;
	__u32 missing;
};

struct wrapper_head {
	__u32 magic;
	__u32 version;
	__u64 fatbin;
	__u64 others;
};

struct fatbin_head {
	__u32 magic;
	__u16 version;
	__u16 header_bytes;
	__u64 bytes;
};

struct elf_head {
	__u32 magic;
	__u8 class;
	__u8 ident[11];
	__u16 type;
	__u16 machine;
	__u32 version;
	__u64 entry;
	__u64 segments;
	__u64 sections;
	__u32 flags;
	__u16 head_bytes;
	__u16 segment_bytes;
	__u16 segment_count;
	__u16 section_bytes;
	__u16 section_count;
	__u16 names;
};

struct elf_section {
	__u32 name;
	__u32 type;
	__u64 flags;
	__u64 address;
	__u64 offset;
	__u64 size;
	__u64 link_and_info;
	__u64 alignment;
	__u64 entry_bytes;
};

struct elf_segment {
	__u32 type;
	__u32 flags;
	__u64 offset;
	__u64 address;
	__u64 physical;
	__u64 file_bytes;
	__u64 memory_bytes;
	__u64 alignment;
};

struct tables {
	__u64 base;
	__u64 at;
	__u64 end;
	__u32 missing;
	__u32 step;
};

static __always_inline void reach(struct tables *tables, __u64 offset, __u64 size)
{
	__u64 end = offset + size;

	if (end < offset)
		tables->missing = MISSING_TOO_LARGE;
	else if (end > tables->end)
		tables->end = end;
}

static long reach_section(__u32 index, struct tables *tables)
{
	struct elf_section section;

	if (bpf_copy_from_user(&section, sizeof(section), (void *)tables->at)) {
		tables->missing = MISSING_UNREADABLE;
		return 1;
	}
	tables->at += tables->step;
	if (section.type != SECTION_WITHOUT_BYTES && section.type)
		reach(tables, section.offset, section.size);
	return tables->missing != 0;
}

static long reach_segment(__u32 index, struct tables *tables)
{
	struct elf_segment segment;

	if (bpf_copy_from_user(&segment, sizeof(segment), (void *)tables->at)) {
		tables->missing = MISSING_UNREADABLE;
		return 1;
	}
	tables->at += tables->step;
	reach(tables, segment.offset, segment.file_bytes);
	return tables->missing != 0;
}

static __noinline int measure_elf(struct image *image)
{
	struct elf_head head;
	struct tables tables = {};
	__u64 count;

	if (!image)
		return 0;
	if (bpf_copy_from_user(&head, sizeof(head), (void *)image->at)) {
		image->missing = MISSING_UNREADABLE;
		return 0;
	}
	if (head.class != ELF_CLASS_64) {
		image->missing = MISSING_UNKNOWN_SIZE;
		return 0;
	}
	tables.end = sizeof(head);
	count = head.section_count;
	if (!count && head.sections) {
		struct elf_section first;

		/* As many as do not fit its field are counted in the first of them. */
		if (bpf_copy_from_user(&first, sizeof(first), (void *)(image->at + head.sections)))
			image->missing = MISSING_UNREADABLE;
		else
			count = first.size;
		if (image->missing)
			return 0;
	}
	if (count > SECTIONS_LIMIT) {
		image->missing = MISSING_UNKNOWN_SIZE;
		return 0;
	}
	reach(&tables, head.sections, count * head.section_bytes);
	if (head.section_bytes >= sizeof(struct elf_section)) {
		tables.at = image->at + head.sections;
		tables.step = head.section_bytes;
		bpf_loop(count, reach_section, &tables, 0);
	}
	reach(&tables, head.segments, (__u64)head.segment_count * head.segment_bytes);
	if (!tables.missing && head.segment_bytes >= sizeof(struct elf_segment)) {
		tables.at = image->at + head.segments;
		tables.step = head.segment_bytes;
		bpf_loop(head.segment_count, reach_segment, &tables, 0);
	}
	image->bytes = tables.end;
	image->missing = tables.missing;
	return 0;
}

struct number {
	__u64 at;
	__u64 value;
	__u64 shift;
	__u32 ended;
	__u32 missing;
};

static long add_byte(__u32 index, struct number *number)
{
	__u8 byte;

	if (bpf_copy_from_user(&byte, 1, (void *)number->at)) {
		number->missing = MISSING_UNREADABLE;
		return 1;
	}
	number->at++;
	number->value |= (__u64)(byte & 0x7f) << (number->shift & 63);
	number->shift = unforeseen(number->shift + 7);
	number->ended = byte < 0x80;
	return byte < 0x80;
}

/* An unsigned LEB128 number of at most 64 bits; its bytes are added to where it is read. */
static __noinline __u64 tile_number(struct tables *tables)
{
	struct number number = {};

	if (!tables)
		return 0;
	number.at = tables->at;
	bpf_loop(10, add_byte, &number, 0);
	tables->at = number.at;
	if (number.missing)
		tables->missing = number.missing;
	else if (!number.ended)
		tables->missing = MISSING_UNKNOWN_SIZE;
	return number.value;
}

/* Steps over a section of Tile IR: its number, its size, its alignment, padding, its bytes. */
static long reach_tile_section(__u32 index, struct tables *tables)
{
	__u64 size, alignment, before = tables->at;
	__u8 section;

	if (bpf_copy_from_user(&section, 1, (void *)tables->at)) {
		tables->missing = MISSING_UNREADABLE;
		return 1;
	}
	tables->at++;
	if (!section) {
		tables->end = tables->at - tables->base;
		return 1;
	}
	size = tile_number(tables);
	if (section & TILE_IR_ALIGNED) {
		alignment = tile_number(tables);
		if (!alignment || alignment & (alignment - 1))
			tables->missing = MISSING_UNKNOWN_SIZE;
		else
			tables->at += (tables->base - tables->at) & (alignment - 1);
	}
	tables->at += size;
	if (tables->at < before)
		tables->missing = MISSING_TOO_LARGE;
	return tables->missing != 0;
}

static __noinline int measure_tile_ir(struct image *image)
{
	struct tables tables = {};

	if (!image)
		return 0;
	tables.base = image->at;
	tables.at = image->at + TILE_IR_HEAD_BYTES;
	bpf_loop(TILE_IR_SECTIONS_LIMIT, reach_tile_section, &tables, 0);
	image->bytes = tables.end;
	image->missing = tables.missing;
	if (!tables.end && !tables.missing)
		image->missing = MISSING_UNKNOWN_SIZE;
	return 0;
}

/* The size of the fatbin there, with its header; 0 if there is none. */
static __always_inline __u64 fatbin_bytes(struct fatbin_head *head)
{
	__u64 bytes = head->bytes + head->header_bytes;

	if (head->magic != FATBIN_MAGIC)
		return 0;
	return bytes < head->bytes ? ~0ULL : bytes;
}

/* What the image at an address is and how long. Checked by itself, once for whoever calls it. */
__noinline int measure(struct image *image)
{
	union {
		struct fatbin_head fatbin;
		__u32 words[4];
	} head;

	if (!image)
		return 0;
	if (bpf_copy_from_user(&head, sizeof(head), (void *)image->at)) {
		/* A short text may end where its mapping ends. */
		image->form = FORM_TEXT;
		return 0;
	}
	if (head.words[0] == WRAPPER_MAGIC) {
		struct wrapper_head wrapper;

		if (bpf_copy_from_user(&wrapper, sizeof(wrapper), (void *)image->at) ||
		    bpf_copy_from_user(&head, sizeof(head), (void *)wrapper.fatbin)) {
			image->missing = MISSING_UNREADABLE;
			return 0;
		}
		image->at = wrapper.fatbin;
		if (wrapper.version == 2 && wrapper.others) {
			image->others = wrapper.others;
			image->form = FORM_PARTS;
		}
	}
	image->bytes = fatbin_bytes(&head.fatbin);
	if (image->bytes)
		return 0;
	if (head.words[0] == ELF_MAGIC)
		return measure_elf(image);
	if (head.words[0] == TILE_IR_MAGIC_1 && head.words[1] == TILE_IR_MAGIC_2)
		return measure_tile_ir(image);
	image->form = FORM_TEXT;
	return 0;
}

/* Whether a pointer leads to what one of the runtime's tables takes. */
static __always_inline bool is_table_image(__u64 at, bool sleeps)
{
	__u32 magic = 0;

	if (!at)
		return false;
	if (sleeps)
		bpf_copy_from_user(&magic, sizeof(magic), (void *)at);
	else
		bpf_probe_read_user(&magic, sizeof(magic), (void *)at);
	return magic == WRAPPER_MAGIC || magic == FATBIN_MAGIC;
}

#endif
