"""What each function of the driver library is watched for, as its probe is told by a cookie.

cuda_thread.h reads it. Argument positions: cuda.h of CUDA 13, 1 to 6, and 0 for none; those of
tables' functions: measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpuwarden.probes.cuda.functions import slot_name
from gpuwarden.probes.cuda.library import EntryPoint
from gpuwarden.probes.cuda.records import ContextCallName
from gpuwarden.probes.uprobes import Point

IMAGE, TABLE_IMAGE, SIZED_IMAGE, PATH, LINKED, CONTEXT, NAME = range(1, 8)
"""By ``enum task`` of cuda_thread.h."""


class Call(NamedTuple):
    """A function: what it is watched for, and which of its arguments has what."""

    function: str
    task: int
    out: int = 0
    subject: int = 0
    """The image, the path, the context, or what a name is asked of."""
    extra: int = 0
    """The image's size, or the name."""
    device: int = 0
    input_kind: int = 0
    context: ContextCallName | None = None


CALLS = (
    Call("cuModuleLoad", PATH, 1, 2),
    Call("cuModuleLoadData", IMAGE, 1, 2),
    Call("cuModuleLoadDataEx", IMAGE, 1, 2),
    Call("cuModuleLoadFatBinary", IMAGE, 1, 2),
    Call("cuLibraryLoadData", IMAGE, 1, 2),
    Call("cuLibraryLoadFromFile", PATH, 1, 2),
    Call("cuLinkAddData", SIZED_IMAGE, 0, 3, 4, input_kind=2),
    Call("cuLinkAddData_v2", SIZED_IMAGE, 0, 3, 4, input_kind=2),
    Call("cuLinkAddFile", PATH, 0, 3, input_kind=2),
    Call("cuLinkAddFile_v2", PATH, 0, 3, input_kind=2),
    Call("cuLinkComplete", LINKED, 2, 0, 3),
    Call(slot_name("CUDART_INTERFACE", 1), TABLE_IMAGE),
    Call(slot_name("CUDART_INTERFACE", 6), TABLE_IMAGE),
    Call(slot_name("CUDART_INTERFACE", 8), TABLE_IMAGE),
    Call("cuCtxCreate", CONTEXT, 1, device=3, context="created"),
    Call("cuCtxCreate_v2", CONTEXT, 1, device=3, context="created"),
    Call("cuCtxCreate_v3", CONTEXT, 1, device=5, context="created"),
    Call("cuCtxCreate_v4", CONTEXT, 1, device=4, context="created"),
    Call("cuGLCtxCreate", CONTEXT, 1, device=3, context="created"),
    Call("cuGLCtxCreate_v2", CONTEXT, 1, device=3, context="created"),
    Call("cuVDPAUCtxCreate", CONTEXT, 1, device=3, context="created"),
    Call("cuVDPAUCtxCreate_v2", CONTEXT, 1, device=3, context="created"),
    Call(slot_name("CTX_CREATE_BYPASS", 1), CONTEXT, 1, device=3, context="created"),
    Call("cuCtxDestroy", CONTEXT, 0, 1, context="destroyed"),
    Call("cuCtxDestroy_v2", CONTEXT, 0, 1, context="destroyed"),
    Call("cuDevicePrimaryCtxRetain", CONTEXT, 1, device=2, context="retained"),
    Call(slot_name("CUDART_INTERFACE", 2), CONTEXT, 1, device=2, context="retained"),
    Call("cuDevicePrimaryCtxRelease", CONTEXT, device=1, context="released"),
    Call("cuDevicePrimaryCtxRelease_v2", CONTEXT, device=1, context="released"),
    Call("cuDevicePrimaryCtxReset", CONTEXT, device=1, context="reset"),
    Call("cuDevicePrimaryCtxReset_v2", CONTEXT, device=1, context="reset"),
    Call("cuGreenCtxCreate", CONTEXT, 1, device=3, context="green"),
    Call("cuCtxFromGreenCtx", CONTEXT, 1, 2, context="green"),
    Call("cuGreenCtxDestroy", CONTEXT, 0, 1, context="destroyed"),
    Call("cuModuleGetFunction", NAME, 1, 2, 3),
    Call("cuLibraryGetKernel", NAME, 1, 2, 3),
    Call("cuLibraryGetModule", NAME, 1, 2),
    Call("cuKernelGetFunction", NAME, 1, 2),
)
"""Their order gives them the numbers that records have."""

_LOADS = (IMAGE, TABLE_IMAGE, SIZED_IMAGE, PATH, LINKED)


class Points(NamedTuple):
    """Where each program goes: by its name in the object, and whether at the function's return."""

    program: str
    returns: bool
    points: list[Point]
    functions: list[str]


def cookie(number: int) -> int:
    """What the probe is told of a call by its number in ``CALLS``."""
    call = CALLS[number]
    positions = (call.out, call.subject, call.extra, call.device, call.input_kind)
    return (number | call.task << 8) | sum(
        position << bit for bit, position in zip(range(16, 36, 4), positions, strict=True)
    )


def points(entries: Mapping[str, EntryPoint], *, sleeping: bool, returns: bool) -> list[Points]:
    """What goes where in a library. Names of one and the same place are one point, the first.

    ``sleeping``: programs that copy are to be had; ``returns``: probes of returns are.
    """
    loading = Points("loading" if sleeping else "loading_told", False, [], [])
    calling = Points("calling", False, [], [])
    linked = Points("linked" if sleeping else "linked_told", True, [], [])
    returned = Points("returned", True, [], [])
    taken: set[int] = set()
    for number, call in enumerate(CALLS):
        entry = entries.get(call.function)
        if entry is None or entry.file_offset in taken:
            continue
        taken.add(entry.file_offset)
        begins = loading if call.task in _LOADS else calling
        ends = linked if call.task == LINKED else returned
        for one in (begins, ends) if returns else (begins,):
            one.points.append(Point(entry.file_offset, cookie(number)))
            one.functions.append(call.function)
    return [one for one in (returned, linked, loading, calling) if one.points]
