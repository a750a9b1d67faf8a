/* Entries of the driver library's functions: a test of a word that tells whether the driver has shut
 * down, then a jump through a pointer. Its layout is what drivers 470 to 555 have on x86-64. What only
 * export tables lead to pushes a frame pointer there.
 *
 *   PROLOGUE_PUSH   a frame pointer is pushed in all
 *   LAUNCH_ENDBR    cuLaunchKernel begins with endbr64
 *
 * Each exported entry is also listed, name and address, between exported_begin and exported_end.
 */
	.data
	.balign 8
	.hidden driver_state
	.globl driver_state
driver_state:
	.long 1

	.section .rodata.names, "a"
	.section .data.rel.ro.exported, "aw"
	.balign 8
	.hidden exported_begin
	.globl exported_begin
exported_begin:

#if defined(__x86_64__)
	.macro pushing name
	push %rbp
	mov $3, %eax
	mov %rsp, %rbp
	pop %rbp
	jmp *pointer_\name(%rip)
	.endm

	.macro testing name
#ifdef PROLOGUE_PUSH
	pushing \name
#else
	cmpl $0x321cba00, driver_state(%rip)
	je 1f
	jmp *pointer_\name(%rip)
	.balign 8
1:	mov $4, %eax
	ret
#endif
	.endm
#elif defined(__aarch64__)
	.macro pushing name
	adrp x16, pointer_\name
	ldr x16, [x16, :lo12:pointer_\name]
	br x16
	.endm

	.macro testing name
	pushing \name
	.endm
#endif

	.macro code name, body
	.section .data.rel.local, "aw"
	.balign 8
pointer_\name:
	.quad impl_\name
	.text
	.type \name, %function
	.balign 16
\name:
#if defined(__x86_64__) && defined(LAUNCH_ENDBR)
	.ifc \name, cuLaunchKernel
	endbr64
	.endif
#endif
	\body \name
	.size \name, . - \name
	.endm

	.macro exported names:vararg
	.irp name, \names
	.globl \name
	code \name, testing
	.section .rodata.names
name_\name:
	.asciz "\name"
	.section .data.rel.ro.exported
	.quad name_\name, \name
	.endr
	.endm

	/* Reached through export tables alone. */
	.macro internal names:vararg
	.irp name, \names
	.globl \name
	.hidden \name
	code \name, pushing
	.endr
	.endm

	exported cuInit, cuDriverGetVersion, cuDeviceGetCount, cuDeviceGet, cuDeviceGetName
	exported cuDeviceGetAttribute, cuGetErrorName
	exported cuGetProcAddress, cuGetProcAddress_v2, cuGetExportTable

	exported cuGLCtxCreate, cuGLCtxCreate_v2, cuVDPAUCtxCreate, cuVDPAUCtxCreate_v2
	exported cuCtxCreate_v2, cuCtxCreate_v3, cuCtxCreate_v4, cuCtxDestroy_v2
	exported cuCtxGetCurrent, cuCtxSetCurrent, cuCtxSynchronize
	exported cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxReset_v2
	exported cuDeviceGetDevResource, cuDevResourceGenerateDesc
	exported cuGreenCtxCreate, cuGreenCtxDestroy, cuCtxFromGreenCtx

	exported cuModuleLoad, cuModuleLoadData, cuModuleLoadDataEx, cuModuleLoadFatBinary
	exported cuModuleUnload, cuModuleGetFunction
	exported cuLibraryLoadData, cuLibraryLoadFromFile, cuLibraryUnload
	exported cuLibraryGetKernel, cuLibraryGetModule, cuKernelGetFunction
	exported cuLinkCreate_v2, cuLinkAddData_v2, cuLinkAddFile_v2, cuLinkComplete, cuLinkDestroy

	exported cuMemAlloc_v2, cuMemFree_v2, cuMemcpyHtoD_v2, cuMemcpyDtoH_v2
	exported cuStreamCreate, cuStreamSynchronize

	exported cuLaunchKernel, cuLaunchKernel_ptsz
	exported cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz
	exported cuLaunchKernelEx, cuLaunchKernelEx_ptsz
	exported cuGraphCreate, cuGraphAddKernelNode_v2, cuGraphInstantiateWithFlags
	exported cuGraphLaunch, cuGraphLaunch_ptsz

	/* Older forms, which drivers still have and headers no longer name. */
	exported cuCtxCreate, cuCtxDestroy, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxReset
	exported cuLinkAddData, cuLinkAddFile, cuLaunch, cuLaunchGrid, cuLaunchGridAsync

	internal table_load, table_primary, table_load_more, table_load_header, table_other
	internal table_create

	.section .data.rel.ro.exported
	.hidden exported_end
	.globl exported_end
exported_end:

	/* Driver libraries are large, and the toolkit's stubs of them are not. */
	.section .rodata.tables, "a"
	.zero 2 << 20

	.section .note.GNU-stack, "", %progbits
