"""The ways of seeing device opens by eBPF: their programs, and what each cannot see or do."""

from __future__ import annotations

from msgspec import Struct

from gpuwarden.probes.events import Source

# No way sees an open that the node's own permissions refuse: the kernel asks those first.
_WITHOUT_ACCESS = "sees no access(2) and no open that a container's device rules refuse"
_CANNOT_DENY = "cannot deny"


class Way(Struct, frozen=True):
    """One way; ``hooks`` are its programs, in the order of preference where a kernel differs."""

    name: Source
    object_name: str
    hooks: tuple[tuple[str, ...], ...]
    limits: str = ""
    """What it cannot see, for people; empty for the best one."""
    can_deny: bool = False
    sees_mknod: bool = True
    sees_refused: bool = False
    """Also opens that the device rules of a container refuse."""
    gives_results: bool = False
    """Each event is of an open that has succeeded; return values need nothing more."""


BY_NAME: dict[str, Way] = {
    way.name: way
    for way in (
        Way(
            name="cgroup/dev",
            object_name="device_open.bpf.o",
            hooks=(("device_access",),),
            can_deny=True,
            sees_refused=True,
        ),
        Way(
            name="lsm",
            object_name="file_open.bpf.o",
            hooks=(("lsm_file_open", "lsm_inode_mknod"),),
            limits=_WITHOUT_ACCESS,
            can_deny=True,
        ),
        Way(
            name="fmod_ret",
            object_name="file_open.bpf.o",
            hooks=(("fmod_ret_file_open", "fmod_ret_inode_mknod"),),
            limits=_WITHOUT_ACCESS,
            can_deny=True,
        ),
        Way(
            name="fentry",
            object_name="file_open.bpf.o",
            hooks=(
                ("fentry_chrdev_open", "fentry_inode_mknod"),
                ("fentry_file_open", "fentry_inode_mknod"),
            ),
            limits=f"{_WITHOUT_ACCESS}; {_CANNOT_DENY}",
        ),
        Way(
            name="kprobe",
            object_name="file_open.bpf.o",
            hooks=(
                ("kprobe_chrdev_open", "kprobe_inode_mknod"),
                ("kprobe_file_open", "kprobe_inode_mknod"),
            ),
            limits=f"{_WITHOUT_ACCESS}; {_CANNOT_DENY}",
        ),
        Way(
            name="tracepoint",
            object_name="file_open.bpf.o",
            hooks=(("descriptor",),),
            limits=(
                "sees only opens that succeed; none through io_uring or by 32-bit programs, no "
                f"mknod, no access(2); {_CANNOT_DENY}"
            ),
            sees_mknod=False,
            gives_results=True,
        ),
    )
}
