/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What images of GPU code begin with: fatbins and wrappers of them (fatbinary_section.h of the CUDA
 * toolkit), ELF files, Tile IR.
 */
#ifndef GPUWARDEN_CUDA_FORMATS_H
#define GPUWARDEN_CUDA_FORMATS_H

#define WRAPPER_MAGIC 0x466243b1
#define FATBIN_MAGIC 0xba55ed50
#define ELF_MAGIC 0x464c457f
#define ELF_CLASS_64 2
#define SECTION_WITHOUT_BYTES 8 /* SHT_NOBITS */
#define SECTION_OF_SHARED_MEMORY 0x7000000a /* of cubins that are linked later; no bytes either */
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

/* As much of an image as is looked at once. */
union head {
	__u64 arguments[8];
	__u32 words[4];
	__u8 byte;
	struct wrapper_head wrapper;
	struct fatbin_head fatbin;
	struct elf_head elf;
	struct elf_section section;
	struct elf_segment segment;
};

#endif
