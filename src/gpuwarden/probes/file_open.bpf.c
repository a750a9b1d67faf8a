// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The other ways to see device opens, for machines where device_open.bpf.c does not load. The
 * loader takes the programs of one way; ways.py lists them, in order, with what each cannot see.
 *
 *   lsm_*          security hooks of the BPF LSM, before the driver is asked. They can deny.
 *   fmod_ret_*     the functions behind the same hooks, where BPF is not among the LSMs. They too.
 *   fentry_*       at the beginning of a kernel function: sees, cannot deny.
 *   kprobe_*       the same, on kernels without trampolines.
 *   descriptor     at the end of open(2) and its kin, by the descriptor that it gave.
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "kernel_types.h"
#include "told.h"
#include "returned.h"
#include "life.h"
#include "holders.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define REFUSED (-1) /* -EPERM */
#define MODE_READ 1  /* FMODE_READ */
#define MODE_WRITE 2 /* FMODE_WRITE */

/* What a traced function was called with, as it stands in the context of a program on it. */
#define ARGUMENT(context, index) ((void *)(context)[index])

static __always_inline bool use_of_file(struct use *use, struct inode *inode, struct file *file)
{
	__u32 device, mode;

	if ((BPF_CORE_READ(inode, i_mode) & CHARACTER_MASK) != CHARACTER)
		return false;
	device = BPF_CORE_READ(inode, i_rdev);
	use->major = device >> 20;
	use->minor = device & ANY_MINOR;
	if (!is_watched(use->major, use->minor))
		return false;
	mode = BPF_CORE_READ(file, f_mode);
	use->access = (mode & MODE_READ ? BPF_DEVCG_ACC_READ : 0) |
		      (mode & MODE_WRITE ? BPF_DEVCG_ACC_WRITE : 0);
	use->how = HOW_OPEN;
	return true;
}

static __noinline int opening(struct inode *inode, struct file *file, int can_deny)
{
	struct use use = { .can_deny = can_deny };

	if (!file)
		return 0;
	if (!inode)
		inode = BPF_CORE_READ(file, f_inode);
	if (!use_of_file(&use, inode, file))
		return 0;
	tell(&use);
	return unforeseen(use.denial) == DENIED ? REFUSED : 0;
}

static __noinline int making(__u64 mode, __u64 device, int can_deny)
{
	struct use use = {
		.major = (__u32)device >> 20,
		.minor = device & ANY_MINOR,
		.access = BPF_DEVCG_ACC_MKNOD,
		.how = HOW_MKNOD,
		.can_deny = can_deny,
	};

	if ((mode & CHARACTER_MASK) != CHARACTER || !is_watched(use.major, use.minor))
		return 0;
	tell(&use);
	return unforeseen(use.denial) == DENIED ? REFUSED : 0;
}

/* The verifier wants to see that nothing else can come out. */
#define ANSWER(refused) (unforeseen(refused) ? REFUSED : 0)

SEC("?lsm/file_open")
int lsm_file_open(__u64 *context)
{
	return ANSWER(opening(0, ARGUMENT(context, 0), true));
}

SEC("?lsm/inode_mknod")
int lsm_inode_mknod(__u64 *context)
{
	return ANSWER(making(context[2], context[3], true));
}

SEC("?fmod_ret/security_file_open")
int fmod_ret_file_open(__u64 *context)
{
	return ANSWER(opening(0, ARGUMENT(context, 0), true));
}

SEC("?fmod_ret/security_inode_mknod")
int fmod_ret_inode_mknod(__u64 *context)
{
	return ANSWER(making(context[2], context[3], true));
}

/* Called for character devices only, so that no other open pays for it. */
SEC("?fentry/chrdev_open")
int fentry_chrdev_open(__u64 *context)
{
	opening(ARGUMENT(context, 0), ARGUMENT(context, 1), false);
	return 0;
}

SEC("?fentry/security_file_open")
int fentry_file_open(__u64 *context)
{
	opening(0, ARGUMENT(context, 0), false);
	return 0;
}

SEC("?fentry/security_inode_mknod")
int fentry_inode_mknod(__u64 *context)
{
	making(context[2], context[3], false);
	return 0;
}

SEC("?kprobe/chrdev_open")
int kprobe_chrdev_open(struct pt_regs *context)
{
	opening((void *)ARGUMENT_1(context), (void *)ARGUMENT_2(context), false);
	return 0;
}

SEC("?kprobe/security_file_open")
int kprobe_file_open(struct pt_regs *context)
{
	opening(0, (void *)ARGUMENT_1(context), false);
	return 0;
}

SEC("?kprobe/security_inode_mknod")
int kprobe_inode_mknod(struct pt_regs *context)
{
	making(ARGUMENT_3(context), ARGUMENT_4(context), false);
	return 0;
}

/* At the end of open(2) and its kin: loading.py lists the system calls. */
SEC("?tracepoint")
int descriptor(struct system_call_exit *context)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct use use = { .opened = true };
	struct file *file;

	if (context->result < 0)
		return 0;
	file = file_of(task, context->result);
	/* A descriptor of O_PATH only names the node: its driver was never asked. */
	if (file && !(BPF_CORE_READ(file, f_mode) & MODE_PATH) &&
	    use_of_file(&use, BPF_CORE_READ(file, f_inode), file))
		tell(&use);
	return 0;
}
