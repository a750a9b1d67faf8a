/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Hash tables laid out in array maps. A look-up in one is a few instructions of the program itself,
 * where that of a hash map costs its calls: here a tenth of what the trap of a probe costs.
 *
 * A slot has an owner, 0 while it is free, and the start time of its process, written last by who
 * takes it and taken away first by the reader, who alone frees slots, and only of processes that
 * have ended. Two threads that come at once may each take one for the same thing: the reader adds.
 */
#ifndef GPUWARDEN_SLOTS_H
#define GPUWARDEN_SLOTS_H

/* How many slots are looked at for one thing; half of a table at least is free. */
#define PROBES 8

#define GOLDEN 0x9e3779b97f4a7c15ull /* 2^64 / the golden ratio: spreads numbers that are alike */

static __always_inline __u64 spread(__u64 first, __u64 second, __u64 seed)
{
	__u64 mixed = (first ^ seed) * GOLDEN + second;

	return (mixed ^ mixed >> 32) * GOLDEN;
}

/* The index of the slot that is looked at in this turn. */
static __always_inline __u32 slot_index(__u64 hash, __u32 turn, __u32 mask)
{
	return ((hash >> 32) + turn * ((__u32)hash | 1)) & mask;
}

/*
 * Takes what is 0. As bytes, since the compiler knows this instruction only for programs that are
 * all made of newer ones: r0 = cmpxchg_64(r1 + 0, r0, r2); Linux 5.12.
 */
static __always_inline bool take(__u64 *owner, __u64 value)
{
	register __u64 *where asm("r1") = owner;
	register __u64 wanted asm("r2") = value;
	register __u64 found asm("r0") = 0;

	asm volatile(".8byte 0x000000f1000021db" : "+r"(found) : "r"(where), "r"(wanted) : "memory");
	return !found;
}

/* Before what others look for is written. */
#define WRITTEN_FIRST() asm volatile("" : : : "memory")

#endif
