/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The arguments of a user function, read where it begins: its registers and stack are untouched;
 * and what it returns.
 * Source: System V ABI for AMD64; Procedure Call Standard for the Arm 64-bit Architecture.
 */
#ifndef GPUWARDEN_ENTRY_H
#define GPUWARDEN_ENTRY_H

#include "kernel_types.h"

#if defined(__TARGET_ARCH_x86)
#define ENTRY_1(registers) ((__u64)(registers)->di)
#define ENTRY_2(registers) ((__u64)(registers)->si)
#define ENTRY_3(registers) ((__u64)(registers)->dx)
#define ENTRY_4(registers) ((__u64)(registers)->cx)
#define ENTRY_5(registers) ((__u64)(registers)->r8)
#define ENTRY_6(registers) ((__u64)(registers)->r9)
/* Behind the return address; of more than six arguments the seventh is the first of these. */
#define ENTRY_STACK(registers) ((void *)((registers)->sp + 8))
#define ENTRY_REGISTERS 6
#define STACK_AT_ENTRY(registers) ((__u64)(registers)->sp)
/* When a function returns, its return address is taken from the stack. */
#define STACK_OF_RETURNED(registers) ((__u64)(registers)->sp - 8)
#define RETURNED(registers) ((__u64)(registers)->ax)
#else
#define ENTRY_1(registers) ((registers)->regs[0])
#define ENTRY_2(registers) ((registers)->regs[1])
#define ENTRY_3(registers) ((registers)->regs[2])
#define ENTRY_4(registers) ((registers)->regs[3])
#define ENTRY_5(registers) ((registers)->regs[4])
#define ENTRY_6(registers) ((registers)->regs[5])
#define ENTRY_7(registers) ((registers)->regs[6])
#define ENTRY_8(registers) ((registers)->regs[7])
#define ENTRY_STACK(registers) ((void *)(registers)->sp)
#define ENTRY_REGISTERS 8
#define STACK_AT_ENTRY(registers) ((registers)->sp)
#define STACK_OF_RETURNED(registers) ((registers)->sp)
#define RETURNED(registers) ((registers)->regs[0])
#endif

#endif
