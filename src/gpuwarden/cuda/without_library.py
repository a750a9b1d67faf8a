"""GPU libraries that a process has instead of the CUDA driver's, by what the files call themselves.

None of them clears a process: whoever hides computing can map one of these as well. They are told
so that a person, and a rule that knows which devices are held, can judge.
"""

from __future__ import annotations

from typing import NamedTuple

OTHER_VENDORS = (
    "libamdhip64",
    "libhsa-runtime64",
    "libamdocl64",
    "libdrm_amdgpu",
    "libze_intel_gpu",
    "libze_loader",
    "libigdrcl",
    "libhl-thunk",
    "libSynapse",
    "libmusa",
)
MANAGEMENT = (
    "libnvidia-ml",
    "libnvidia-cfg",
    "libnvidia-nscq",
    "libnvfm",
    "libdcgm",
    "librocm_smi64",
    "libamd_smi",
)
GRAPHICS = (
    "libnvidia-glcore",
    "libnvidia-eglcore",
    "libnvidia-glvkspirv",
    "libGLX_nvidia",
    "libEGL_nvidia",
)
COMPUTING = (
    "libcudart",
    "libnvidia-opencl",
    "libOpenCL",
    "libnvidia-ptxjitcompiler",
    "libnvidia-nvvm",
    "libcudadebugger",
    "libnvcuvid",
    "libnvidia-encode",
    "libnvrtc",
)
_NAMES = (*OTHER_VENDORS, *MANAGEMENT, *GRAPHICS, *COMPUTING)


class WithoutLibrary(NamedTuple):
    """A holder of an accelerator's descriptors that maps no CUDA driver library."""

    pid: int
    start_time_ticks: int
    libraries: tuple[str, ...]
    """SONAMEs of the GPU libraries that it has."""


def is_gpu_library(soname: str | None) -> bool:
    """Whether a SONAME is that of a GPU's user-space library."""
    return soname is not None and soname.startswith(_NAMES)
