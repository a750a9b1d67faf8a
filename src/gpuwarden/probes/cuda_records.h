/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is told of calls of the CUDA driver library. cuda/call_records.py declares the same. */
#ifndef GPUWARDEN_CUDA_RECORDS_H
#define GPUWARDEN_CUDA_RECORDS_H

#include "identity.h"

#define SMALL_BYTES 4096
#define MEDIUM_BYTES (32 * 1024)
#define LARGE_BYTES (256 * 1024)
#define PAGE_BYTES 4096
#define NAME_TOLD_BYTES 256
#define PATH_LIMIT_BYTES 4096 /* PATH_MAX */
#define PARTS_LIMIT 64

/* In the order of a load: that it began, its bytes, that they are all, what it came to. */
enum call_record { RECORD_LOAD = 1, RECORD_PIECE, RECORD_COPIED, RECORD_RETURN, RECORD_CONTEXT,
		   RECORD_NAME };
enum piece_of { PIECE_OF_IMAGE, PIECE_OF_PATH };

/* Why bytes are missing; captures.py has them in words. */
enum missing {
	NOTHING_MISSING,
	MISSING_ROOM, /* the ring was full */
	MISSING_UNREADABLE, /* the process's memory was not there */
	MISSING_TOO_LARGE,
	MISSING_UNKNOWN_SIZE, /* nothing that says how long it is */
	MISSING_COPY, /* programs that may sleep are not to be had here */
	MISSING_PARTS, /* more than PARTS_LIMIT fatbins behind one wrapper */
	MISSING_LIMIT, /* one process's loads are told up to a limit in a window: of more, this one */
};

struct cuda_call {
	__u64 time_ns; /* boot clock */
	__u64 begun_ns; /* the load that this is about, of this thread; 0: none */
	__u64 start_ns; /* of the process */
	__u32 tgid;
	__u32 pid;
	__u32 record;
	__u32 function;
};

struct cuda_load {
	struct cuda_call call;
	__u64 address; /* as it was given; of the path, for a load by name */
	__u64 image; /* where its first part begins */
	__u64 image_bytes; /* of all parts; 0: not known */
	__u64 within_ns; /* the load of this thread that went on to this one; 0: none */
	__u32 parts;
	__u32 input_kind; /* CUjitInputType of a linker's input */
	struct identity process;
};

struct cuda_piece {
	struct cuda_call call;
	__u64 offset;
	__u32 length;
	__u32 of;
};

struct cuda_copied {
	struct cuda_call call;
	__u64 image;
	__u64 image_bytes;
	__u64 sent_bytes;
	__u32 parts;
	__u32 missing;
	__u32 stop_asked;
	__u32 stop_outcome; /* enum stop_outcome, where a stop was asked for */
};

struct cuda_return {
	struct cuda_call call;
	__u64 handle;
	__s32 result;
	__u32 reserved;
};

struct cuda_context {
	struct cuda_call call;
	__u64 handle;
	__s32 device;
	__s32 result;
	struct identity process;
};

struct cuda_name {
	struct cuda_call call;
	__u64 handle;
	__u64 of;
	__s32 name_length; /* with its NUL; negative: it could not be read */
	__u32 reserved;
	char name[NAME_TOLD_BYTES];
};

#endif
