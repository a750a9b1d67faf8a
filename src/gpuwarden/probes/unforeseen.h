/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the verifier is not to know. */
#ifndef GPUWARDEN_UNFORESEEN_H
#define GPUWARDEN_UNFORESEEN_H

/*
 * A value as it is, of which the verifier knows nothing. Some kernels (seen with 6.1: a denial that
 * was told of and not given) take the first answer of a function for the only one it can have, and
 * remove what follows from another as dead code. Every decision on such an answer goes through this.
 */
static __always_inline __u64 unforeseen(__u64 value)
{
	__u64 salt = (__u64)bpf_get_current_task();

	value ^= salt;
	asm volatile("" : "+r"(value));
	return value ^ salt;
}

#endif
