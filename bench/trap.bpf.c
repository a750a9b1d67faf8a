// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What a uprobe costs before its program has done anything. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

SEC("?uprobe")
int nothing(void *context)
{
	return 0;
}
