"""Programs of the host that make or open device nodes by themselves, and how that is proven.

A name proves nothing. On the host a root-owned file in a system directory that only root can
write does. A runtime's first process in a new container runs a copy of the runtime's own file,
made so that the container cannot write it: either the same inode under another path, or a memfd.
Its parent is the runtime then, and it is pid 1 of its namespace; nothing of the image has run.
"""

from __future__ import annotations

import re

from gpuwarden.model import Container, DeviceOpen, Process
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.rules import system_programs
from gpuwarden.rules.container_allocation import granted_by_runtime
from gpuwarden.rules.masquerade import basename

OCI_RUNTIMES = pattern(r"runc|crun|youki|kata-agent|runsc|nvidia-container-runtime(?:[.-].+)?")
RUNTIMES = pattern(
    r"runc|crun|youki|kata-agent|runsc|nvidia-container-.+|nvidia-ctk|nvidia-cdi-hook"
    r"|containerd|containerd-shim.*|dockerd|docker-containerd.*|conmon|conmonrs|crio|podman"
)
SCHEDULERS = pattern(r"slurmd|slurmstepd|kubelet|k3s|k3s-server|k3s-agent|rke2")
NODE_MAKERS = pattern(
    r"systemd-udevd|udevadm|nvidia-modprobe|kmod|modprobe|systemd-tmpfiles|systemd|systemd-logind"
    r"|plymouthd|systemd-sysusers|systemd-executor"
)
TOOLS = pattern(
    r"nvidia-smi|nvidia-debugdump|nvidia-persistenced|nvidia-cuda-mps-(?:control|server)|rocm-smi"
    r"|rocm_smi\.py|rocminfo|amd-smi|nvtop|nvitop|gpustat|dcgmi|xpu-smi|hl-smi"
)
"""GPU management tools, by the whole name of their file."""
INTERPRETERS = pattern(r"python[0-9.]*|bash|dash|sh|perl")


def is_hosts_own(node: Node, process: Process, names: re.Pattern[str]) -> bool:
    """Whether its binary is one of those names, root's alone to write, on the host."""
    exe = process.exe
    if exe is None or not names.fullmatch(basename(exe.path)):
        return False
    return next(system_programs.doubts(node, process, exe), None) is None


def is_host_program(node: Node, process: Process) -> bool:
    """A kernel thread, runtime, scheduler or maker of device nodes, proven."""
    return process.kernel_thread or any(
        is_hosts_own(node, process, names) for names in (RUNTIMES, SCHEDULERS, NODE_MAKERS)
    )


def is_runtime(node: Node, process: Process) -> bool:
    """The runtime itself, or the first process of a container before it runs its image."""
    if process.kernel_thread or is_hosts_own(node, process, RUNTIMES):
        return True
    parent = node.processes.get(process.ppid)
    exe = process.exe
    if exe is None or parent is None or parent.exe is None:
        return False
    if not is_hosts_own(node, parent, OCI_RUNTIMES):
        return False
    if exe.inode is not None and exe.inode == parent.exe.inode:
        return exe.device == parent.exe.device
    return exe.memfd and process.pids_in_namespaces[-1:] == (1,)


def may_be_runtime(node: Node, process: Process) -> bool:
    """As ``is_runtime``, of a first process whose runtime had ended before anybody looked at it."""
    exe, parent = process.exe, node.processes.get(process.ppid)
    if exe is None or process.pids_in_namespaces[-1:] != (1,):
        return False
    # A runtime runs a copy of itself: in memory, or a mount that is nowhere, which takes rights.
    if exe.memfd:
        return parent is None
    return exe.path == "/" and (parent is None or is_hosts_own(node, parent, RUNTIMES))


def is_listed(node: Node, container: Container, one: DeviceOpen) -> bool:
    """Whether the runtime was told to give the container that device, by its number."""
    paths = {
        n.path for n in node.snapshot.device_nodes if (n.major, n.minor) == (one.major, one.minor)
    }
    if paths & set(container.devices):
        return True
    # Requests name GPUs, not nodes: the control nodes come with any of them.
    asked = container.device_requests or (container.visible_devices or "void") not in ("void", "")
    return bool(asked) and granted_by_runtime(container)


def tool_of(process: Process) -> str | None:
    """The GPU management tool that a process is by its file; None when it is none.

    Never by the comm, which the kernel cuts at 15 characters and a process can change.
    """
    exe = basename(process.exe.path) if process.exe is not None else None
    if exe is not None and TOOLS.fullmatch(exe):
        return exe
    argv = process.argv or ()
    said = [basename(argv[0])] if argv else []
    if exe is not None and INTERPRETERS.fullmatch(exe):
        said += [basename(word) for word in argv[1:3] if not word.startswith("-")][:1]
    return next((name for name in said if TOOLS.fullmatch(name)), None)
