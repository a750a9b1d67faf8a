/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* GPU management tools, by the name they are run under or the name of their file. */
#ifndef GPUWARDEN_TOOLS_H
#define GPUWARDEN_TOOLS_H

#include "maps.h"

#define BEGINS(name, with) begins(name, with, sizeof(with) - 1)

static __always_inline bool begins(const char *name, const char *with, __u32 length)
{
	char differs = 0;

#pragma unroll
	for (__u32 at = 0; at < length; at++)
		differs |= name[at] ^ with[at];
	return !differs;
}

/* Names of GPU management tools; events.py has the same ones, and a test runs each. */
static __noinline int is_tool(const struct tool_name *tool)
{
	const char *name;

	if (!tool)
		return 0;
	name = tool->text;
	return BEGINS(name, "nvidia-smi") || BEGINS(name, "nvidia-debugdump") ||
	       BEGINS(name, "nvidia-persistenced") || BEGINS(name, "nvidia-cuda-mps") ||
	       BEGINS(name, "nvtop") || BEGINS(name, "nvitop") || BEGINS(name, "rocm-smi") ||
	       BEGINS(name, "rocminfo") || BEGINS(name, "amd-smi") || BEGINS(name, "gpustat") ||
	       BEGINS(name, "dcgmi") || BEGINS(name, "xpu-smi") || BEGINS(name, "hl-smi");
}

/* The last part of the path that execve(2) was given: a script's own, not its interpreter's. */
static __noinline int read_called_name(struct linux_binprm *program, struct tool_name *out)
{
	__u32 first = 0;
	struct called_path *path = bpf_map_lookup_elem(&called_paths, &first);
	long length;
	__u32 at;

	if (!path || !out)
		return 0;
	out->text[0] = 0;
	length = bpf_probe_read_kernel_str(path->text, sizeof(path->text),
					   BPF_CORE_READ(program, filename));
	if (length <= 1)
		return 0;
	at = length - 1;
	for (int step = 0; step < NAME_MAX; step++) {
		if (!at || path->text[(at - 1) & (CALLED_BYTES - 1)] == '/')
			break;
		at--;
	}
	bpf_probe_read_kernel_str(out->text, sizeof(out->text),
				  path->text + (at & (CALLED_BYTES - 1)));
	return 0;
}

static __always_inline int tool_of(struct task_struct *task, struct linux_binprm *program,
				   struct tool_name *name)
{
	read_called_name(program, name);
	if (unforeseen(is_tool(name)))
		return TOOL_BY_CALL;
	bpf_probe_read_kernel_str(name->text, sizeof(name->text),
				  BPF_CORE_READ(task, mm, exe_file, f_path.dentry, d_name.name));
	return unforeseen(is_tool(name)) ? TOOL_BY_FILE : NO_TOOL;
}

#endif
