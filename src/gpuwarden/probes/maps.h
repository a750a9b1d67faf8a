/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps that every probe object has, and the questions to them. */
#ifndef GPUWARDEN_MAPS_H
#define GPUWARDEN_MAPS_H

#include "records.h"
#include "unforeseen.h"

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 23);
} records SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 512);
	__type(key, struct device_key);
	__type(value, __u32);
} watched_devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1 << 16);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct count_key);
	__type(value, struct count);
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cgroup_key);
	__type(value, __u32);
} denied_cgroups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 14);
	__type(key, __u64);
	__type(value, struct attempt);
} attempts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1 << 15);
	__type(key, __u32);
	__type(value, struct touched_process);
} touched_processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings_map SEC(".maps");

struct called_path {
	char text[CALLED_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct called_path);
} called_paths SEC(".maps");

static __always_inline void increment(__u32 counter)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);

	if (value)
		*value += 1;
}

static __always_inline struct settings *settings(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&settings_map, &first);
}

static __always_inline bool is_watched(__u32 major, __u32 minor)
{
	struct device_key key = { .major = major, .minor = minor };

	if (major == 1 && minor == 3)
		return false;
	if (bpf_map_lookup_elem(&watched_devices, &key))
		return true;
	key.minor = ANY_MINOR;
	return bpf_map_lookup_elem(&watched_devices, &key) != 0;
}

#endif
