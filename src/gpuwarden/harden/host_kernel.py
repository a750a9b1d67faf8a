"""Settings of the kernel: who sees whose processes, and who can put code into it.

Sources: the kernel's admin-guide (sysctl/kernel.rst, LSM/Yama.rst), proc(5), kernel_lockdown(7).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.harden.setting import About, Setting, State
from gpuwarden.host import Host
from gpuwarden.pattern import pattern

_PTRACE = "/proc/sys/kernel/yama/ptrace_scope"
_BPF = "/proc/sys/kernel/unprivileged_bpf_disabled"
_LOCKDOWN = "/sys/kernel/security/lockdown"
_SIGNATURES = "/sys/module/module/parameters/sig_enforce"
_MODULES = "/proc/sys/kernel/modules_disabled"
_LOADED = "/proc/modules"
_MOUNTS = ("/proc/1/mounts", "/proc/mounts")
_MOUNTS_LIMIT = 4 << 20
_LOCKED = pattern(r"\[(none|integrity|confidentiality)\]")
_HIDING = frozenset({"1", "2", "4", "noaccess", "invisible", "ptraceable"})

HIDEPID = About(
    "hidepid",
    "who sees other users' command lines",
    "Command lines of all jobs, with what secrets stand in them, can be read by every account; "
    "so can who is on which GPU.",
    commands=(
        "mount -o remount,hidepid=invisible /proc",
        "echo 'proc /proc proc defaults,hidepid=invisible 0 0' >> /etc/fstab",
    ),
    may_break="monitoring that does not run as root, and logind's and polkit's view of sessions "
    "(give their group with gid=)",
)
PTRACE = About(
    "ptrace-scope",
    "who may take over a process of the same user",
    "A process can read another one's memory and take its open GPU descriptors "
    "(pidfd_getfd) when both are one user's.",
    commands=(
        "sysctl -w kernel.yama.ptrace_scope=1",
        "echo 'kernel.yama.ptrace_scope = 1' > /etc/sysctl.d/60-gpuwarden.conf",
    ),
    may_break="attaching a debugger to a process that it did not start, some profilers, and MPI "
    "libraries that copy memory between ranks (cross memory attach)",
)
BPF = About(
    "unprivileged-bpf",
    "who may load eBPF programs",
    "Programs in the kernel are a way to get at what other processes do, and have been a way to "
    "become root.",
    commands=(
        "sysctl -w kernel.unprivileged_bpf_disabled=2",
        "echo 'kernel.unprivileged_bpf_disabled = 2' > /etc/sysctl.d/61-gpuwarden.conf",
    ),
    may_break="tools that trace without rights; gpuwarden's own probes load with CAP_BPF",
)
MODULES = About(
    "kernel-modules",
    "whether root can load any kernel module",
    "A module can hide processes, and lie about the GPU to everybody, gpuwarden included.",
    commands=(
        "echo 'GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX module.sig_enforce=1\"' "
        "> /etc/default/grub.d/gpuwarden.cfg",
        "update-grub",
    ),
    may_break="a GPU driver that was built on this host and is not signed with an enrolled key; "
    "lockdown=confidentiality also stops eBPF from reading kernel memory, gpuwarden's probes too",
)


def read(host: Host) -> Iterator[Setting]:
    """The kernel's settings, one after the other."""
    yield hidepid(host)
    yield ptrace(host)
    yield BPF.of_file(host, _BPF, _bpf, absent=("absent", "this kernel has no bpf system call"))
    yield modules(host)


def hidepid(host: Host) -> Setting:
    """How /proc is mounted."""
    failure = ""
    for path in _MOUNTS:
        try:
            text = host.read_text(path, _MOUNTS_LIMIT)
        except GpuwardenError as error:
            failure = failure or str(error)
            continue
        options = proc_options(text)
        if options is None:
            return HIDEPID.said("unknown", "/proc is not among the mounts", path)
        value = next((o[8:] for o in options if o.startswith("hidepid=")), "0")
        state: State = "sound" if value in _HIDING else "open"
        return HIDEPID.said(state, f"hidepid={value}", path)
    return HIDEPID.said("unknown", failure, _MOUNTS[0])


def proc_options(text: str) -> list[str] | None:
    """The options of the last proc mounted on /proc; None when there is none."""
    found: list[str] | None = None
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 4 and fields[1] == "/proc" and fields[2] == "proc":
            found = fields[3].split(",")
    return found


def ptrace(host: Host) -> Setting:
    """Yama's setting; a kernel without Yama lets each process trace its user's others."""
    without: tuple[State, str] = ("open", "this kernel has no Yama, so nothing restricts it")
    setting = PTRACE.of_file(host, _PTRACE, _ptrace, absent=without)
    if setting.now == without[1]:
        return PTRACE.said("open", setting.now, _PTRACE, commands=())
    return setting


def _number(text: str) -> int | None:
    bare = text.strip()
    return int(bare) if bare.isascii() and bare.isdigit() and len(bare) < 10 else None


def _ptrace(text: str) -> tuple[State, str]:
    value = _number(text)
    if value is None:
        return "unknown", "not a number"
    return ("open" if value == 0 else "sound"), f"ptrace_scope={value}"


def _bpf(text: str) -> tuple[State, str]:
    value = _number(text)
    if value is None:
        return "unknown", "not a number"
    return ("open" if value == 0 else "sound"), f"unprivileged_bpf_disabled={value}"


def modules(host: Host) -> Setting:
    """Whether anything keeps root from loading a module that nobody signed."""
    seen: list[str] = []
    missing: list[str] = []
    closed = False
    for path in (_LOCKDOWN, _SIGNATURES, _MODULES):
        name = path.rpartition("/")[2]
        try:
            text = host.read_text(path, 4096).strip()
        except Unavailable:
            missing.append(name)
            continue
        except GpuwardenError as error:
            return MODULES.said("unknown", str(error), path)
        locked = _LOCKED.search(text)
        if path == _LOCKDOWN:
            value = locked[1] if locked is not None else "?"
            closed = closed or value in ("integrity", "confidentiality")
        else:
            value = text[:8]
            closed = closed or value in ("Y", "1")
        seen.append(f"{name}={value}")
    now = ", ".join([*seen, *(f"no {name}" for name in missing)])
    if not seen:
        loads = _is_there(host, _LOADED) or not _is_there(host, "/proc/sys/kernel")
        if not loads:
            return MODULES.said("sound", "this kernel loads no modules", _LOADED)
        return MODULES.said("unknown", now, _SIGNATURES)
    return MODULES.said("sound" if closed else "open", now, f"{_LOCKDOWN}, {_SIGNATURES}")


def _is_there(host: Host, path: str) -> bool:
    try:
        host.status(path)
    except GpuwardenError:
        return False
    return True
