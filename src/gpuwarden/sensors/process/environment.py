"""The environment hints that tell where a process says it belongs; nothing else is kept."""

from __future__ import annotations

import re

from gpuwarden.pattern import pattern

NAMES = frozenset(
    {
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_STEP_ID",
        "SLURM_STEPID",
        "SLURM_JOB_USER",
        "SLURM_JOB_UID",
        "SLURM_JOB_ACCOUNT",
        "SLURM_JOB_PARTITION",
        "SLURM_JOB_NAME",
        "SLURM_JOB_GPUS",
        "SLURM_STEP_GPUS",
        "SLURMD_NODENAME",
        "SLURM_LOCALID",
        "SLURM_PROCID",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ZE_AFFINITY_MASK",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_INJECTION64_PATH",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "POOL_USER",
        "POOL_URL",
        "POOL_PASS",
        "PBS_JOBID",
        "LSB_JOBID",
        "JOB_ID",
        "SSH_CONNECTION",
        "SUDO_USER",
        "container",
        "HOSTNAME",
        "INVOCATION_ID",
    }
)
PREFIXES = ("XMRIG", "POOL_", "MINER_", "WALLET")
PRESENCE_ONLY = frozenset({"KUBERNETES_SERVICE_HOST", "POOL_PASS"})
"""Kept with the value PRESENT: that it is set says all, its value is nobody's business."""
PRESENT = "set"

LIMIT_BYTES = 2 << 20
_VALUE_LIMIT = 512
_NAME_LIMIT = 64
_HINTS_LIMIT = 64
_NAME = pattern(r"[A-Za-z_]\w{0,63}", re.ASCII)


def parse_environ(data: bytes) -> dict[str, str]:
    """The known hints in /proc/<pid>/environ: NUL-separated ``name=value``, the first one counts.

    Values are cut at 512 characters. Source: proc_pid_environ(5).
    """
    hints: dict[str, str] = {}
    for entry in data.split(b"\0"):
        raw_name, equals, raw_value = entry.partition(b"=")
        if not equals or len(raw_name) > _NAME_LIMIT:
            continue
        name = raw_name.decode("utf-8", "backslashreplace")
        if name not in NAMES and name not in PRESENCE_ONLY and not name.startswith(PREFIXES):
            continue
        if _NAME.fullmatch(name) is None or name in hints:
            continue
        if name in PRESENCE_ONLY:
            hints[name] = PRESENT
        else:
            value = raw_value[: _VALUE_LIMIT * 4].decode("utf-8", "backslashreplace")
            hints[name] = value[:_VALUE_LIMIT]
        if len(hints) >= _HINTS_LIMIT:
            break
    return hints
