"""The entry points of libcuda that are watched, and what each is watched for.

Argument positions: cuda.h of CUDA 13; the slots of export tables: measured with drivers 470 to 555.
"""

from __future__ import annotations

CONTEXTS = (
    "cuCtxCreate",
    "cuCtxCreate_v2",
    "cuCtxCreate_v3",
    "cuCtxCreate_v4",
    "cuGLCtxCreate",
    "cuGLCtxCreate_v2",
    "cuVDPAUCtxCreate",
    "cuVDPAUCtxCreate_v2",
    "cuCtxDestroy",
    "cuCtxDestroy_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxReset_v2",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuCtxFromGreenCtx",
)
LOADS = (
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleLoadFatBinary",
    "cuLibraryLoadData",
    "cuLibraryLoadFromFile",
    "cuLinkAddData",
    "cuLinkAddData_v2",
    "cuLinkAddFile",
    "cuLinkAddFile_v2",
    "cuLinkComplete",
)
NAMES_GIVEN = (
    "cuModuleGetFunction",
    "cuLibraryGetKernel",
    "cuLibraryGetModule",
    "cuKernelGetFunction",
)
"""Which kernel a handle is."""
OLD_LAUNCHES = ("cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync")
"""Of CUDA 3 and still there: shapes and streams of theirs are not read."""
LAUNCHES = (
    "cuLaunchKernel",
    "cuLaunchKernel_ptsz",
    "cuLaunchCooperativeKernel",
    "cuLaunchCooperativeKernel_ptsz",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    *OLD_LAUNCHES,
)
GRAPH_LAUNCHES = ("cuGraphLaunch", "cuGraphLaunch_ptsz")

EXPORT_TABLES: dict[str, tuple[bytes, dict[int, str]]] = {
    "CUDART_INTERFACE": (
        bytes.fromhex("6bd5fb6c5bf4e74a8987d93912fd9df9"),
        {1: "load", 2: "primary context", 6: "load", 8: "load"},
    ),
    "CTX_CREATE_BYPASS": (bytes.fromhex("0ca50b8c1004929a89a7d0df10e77286"), {1: "context"}),
}
"""Tables that cuGetExportTable gives by UUID: slot → what a call of it does.

Loads through slots 1 and 6 take a fatbin wrapper, through 8 a fatbin's header. Runtimes call the
primary context's slot for each device while they count them, which makes no context.
"""


def slot_name(table: str, slot: int) -> str:
    """How a slot is called among entry points: ``CUDART_INTERFACE[1]``."""
    return f"{table}[{slot}]"


SLOTS = tuple(
    slot_name(table, slot) for table, (_, slots) in EXPORT_TABLES.items() for slot in slots
)
WATCHED = (*CONTEXTS, *LOADS, *NAMES_GIVEN, *LAUNCHES, *GRAPH_LAUNCHES)
"""Exported names; which of them a driver has depends on its age."""
