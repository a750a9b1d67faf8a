// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Stops every caller: what the probes of the CUDA layer do when a module finds no room. */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"
#include "stop.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* How often each outcome of enum stop_outcome was had. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 8);
	__type(key, __u32);
	__type(value, __u64);
} outcomes SEC(".maps");

SEC("uprobe.s") int stop_caller(void *context)
{
	__u32 outcome = stop_process();
	__u64 *count = bpf_map_lookup_elem(&outcomes, &outcome);

	if (count)
		__sync_fetch_and_add(count, 1);
	return 0;
}
