"""What an NVML return code means for the person who reads it (nvmlReturn_t in nvml.h)."""

from __future__ import annotations

SUCCESS = 0
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
BLOCKED = 17
VERSION_MISMATCH = 18
UNKNOWN = 999

FAULT_CODES = (GPU_IS_LOST, RESET_REQUIRED, UNKNOWN)
"""A GPU that answers so is in trouble."""
PERMISSION_CODES = (NO_PERMISSION, BLOCKED)
MAYBE_PERMISSION_CODES = (NO_PERMISSION, DRIVER_NOT_LOADED, BLOCKED, UNKNOWN)
"""Codes with which nvmlInit answers a caller who may not open the device nodes."""

MEANINGS: dict[int, tuple[str, str]] = {
    1: ("NVML is not initialised", ""),
    2: ("NVML refused an argument", ""),
    NOT_SUPPORTED: ("not supported by this GPU or driver", ""),
    NO_PERMISSION: (
        "the driver denies this to the calling user",
        "run as root, or give this user access to the /dev/nvidia* nodes",
    ),
    NOT_FOUND: ("the driver has none", ""),
    8: ("the GPU's external power cables are not attached", "attach them"),
    DRIVER_NOT_LOADED: (
        "the NVIDIA kernel driver is not loaded, or its device nodes are missing",
        "see whether `lsmod` lists nvidia, then run `nvidia-modprobe -c 0 -u`",
    ),
    10: ("the driver did not answer in time", "look for Xid lines in the kernel log"),
    11: ("the kernel has a problem with the GPU's interrupts", "read the kernel log"),
    FUNCTION_NOT_FOUND: ("this driver version does not have the function", ""),
    14: ("the GPU's infoROM is damaged", "have the card checked"),
    GPU_IS_LOST: (
        "the GPU is lost: it has fallen off the bus or cannot be reached",
        "look for Xid 79 in the kernel log; drain the node, then reset the GPU or reboot",
    ),
    RESET_REQUIRED: (
        "the GPU needs a reset before it can be used again",
        "drain its processes, then `nvidia-smi --gpu-reset -i N`, or reboot",
    ),
    BLOCKED: (
        "the operating system or a cgroup blocks access to the GPU",
        "run on the host, or allow the container the /dev/nvidia* devices",
    ),
    VERSION_MISMATCH: (
        "the driver library and the loaded kernel module have different versions",
        "the driver was upgraded under a running kernel: reload its modules or reboot",
    ),
    20: ("the driver is out of memory", ""),
    UNKNOWN: (
        "the driver answers with an unknown error; this is a fault, not an idle GPU",
        "restart the container if a daemon-reload took its devices away; read the kernel log",
    ),
}


def meaning(code: int) -> str:
    """One clause that says what the code means, with its number."""
    return f"{MEANINGS.get(code, ('an NVML error without a name here', ''))[0]} (NVML {code})"


def remedy(code: int) -> str:
    """What to do about the code, or an empty string."""
    return MEANINGS.get(code, ("", ""))[1]
