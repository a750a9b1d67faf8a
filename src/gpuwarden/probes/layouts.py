"""The byte layouts of what device_open.bpf.c writes; compared with its BTF at each load."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from gpuwarden.errors import Malformed

NAME_BYTES = 128
ARGV_BYTES = 512
EXE_BYTES = 256 + NAME_BYTES
CGROUP_BYTES = 384 + NAME_BYTES
PATH_BYTES = 256
GROUP_PATH_BYTES = 1024

# A layout is its members in order: (name, code of the struct module or name of another layout).
Layout = tuple[tuple[str, str], ...]
Layouts = Mapping[str, Layout]

LAYOUTS: Layouts = {
    "path_buffer": (("length", "I"), ("text", f"{EXE_BYTES}s")),
    "cgroup_buffer": (("length", "I"), ("text", f"{CGROUP_BYTES}s")),
    "tool_name": (("text", f"{NAME_BYTES}s"),),
    "identity": (
        ("start_ns", "Q"),
        ("exe_inode", "Q"),
        ("cgroup_id", "Q"),
        ("cgroup_v1_id", "Q"),
        ("pid", "I"),
        ("tgid", "I"),
        ("ppid", "I"),
        ("uid", "I"),
        ("gid", "I"),
        ("loginuid", "I"),
        ("mount_namespace", "I"),
        ("pid_namespace", "I"),
        ("user_namespace", "I"),
        ("inner_tgid", "I"),
        ("exe_device", "I"),
        ("cgroup_v1_hierarchy", "I"),
        ("cgroup_names_hierarchy", "I"),
        ("traits", "I"),
        ("argv_bytes", "I"),
        ("argv_read", "I"),
        ("comm", "16s"),
        ("parent_comm", "16s"),
        ("tty", "16s"),
        ("argv", f"{ARGV_BYTES}s"),
        ("exe", "path_buffer"),
        ("cgroup", "cgroup_buffer"),
    ),
    "open_record": (
        ("time_ns", "Q"),
        ("hits", "Q"),
        ("kind", "I"),
        ("major", "I"),
        ("minor", "I"),
        ("access", "I"),
        ("how", "I"),
        ("denial", "I"),
        ("syscall", "I"),
        ("path_length", "i"),
        ("opened", "I"),
        ("reserved", "I"),
        ("open_flags", "Q"),
        ("process", "identity"),
        ("path", f"{PATH_BYTES}s"),
    ),
    "return_record": (
        ("time_ns", "Q"),
        ("attempt_ns", "Q"),
        ("start_ns", "Q"),
        ("kind", "I"),
        ("pid", "I"),
        ("tgid", "I"),
        ("major", "I"),
        ("minor", "I"),
        ("result", "i"),
        ("open_flags", "I"),
        ("path", "path_buffer"),
    ),
    "exec_record": (
        ("time_ns", "Q"),
        ("kind", "I"),
        ("touched", "I"),
        ("tool", "I"),
        ("reserved", "I"),
        ("process", "identity"),
        ("tool_name", "tool_name"),
    ),
    "group_record": (
        ("time_ns", "Q"),
        ("cgroup_id", "Q"),
        ("kind", "I"),
        ("hierarchy", "I"),
        ("path_length", "i"),
        ("reserved", "I"),
        ("path", f"{GROUP_PATH_BYTES}s"),
    ),
    "exit_record": (
        ("time_ns", "Q"),
        ("start_ns", "Q"),
        ("kind", "I"),
        ("tgid", "I"),
        ("exit_code", "i"),
        ("reserved", "I"),
        ("comm", "16s"),
    ),
    "holder_record": (
        ("start_ns", "Q"),
        ("inode", "Q"),
        ("tgid", "I"),
        ("pid", "I"),
        ("descriptor", "I"),
        ("major", "I"),
        ("minor", "I"),
        ("open_flags", "I"),
        ("uid", "I"),
        ("reserved", "I"),
        ("comm", "16s"),
    ),
    "device_key": (("major", "I"), ("minor", "I")),
    "count_key": (
        ("start_ns", "Q"),
        ("tgid", "I"),
        ("major", "I"),
        ("minor", "I"),
        ("how", "I"),
    ),
    "count": (("hits", "Q"), ("window_ns", "Q"), ("in_window", "Q")),
    "touched_process": (
        ("start_ns", "Q"),
        ("opener_start_ns", "Q"),
        ("opener", "I"),
        ("reserved", "I"),
    ),
    "cgroup_key": (("id", "Q"), ("hierarchy", "I"), ("reserved", "I")),
    "settings": (
        ("limit_window_ns", "Q"),
        ("limit_events", "I"),
        ("return_values", "I"),
        ("every_exec", "I"),
        ("denying", "I"),
    ),
}


def packed(name: str, *, until: str | None = None, among: Layouts | None = None) -> struct.Struct:
    """The layout as one Struct, those in it included; ``until`` leaves that member and the rest.

    ``among``: another object's layouts, here as below, instead of ``LAYOUTS``.
    """
    return struct.Struct("<" + _codes(name, LAYOUTS if among is None else among, until))


def _codes(name: str, among: Layouts, until: str | None = None) -> str:
    codes = ""
    for member, code in among[name]:
        if member == until:
            break
        codes += _codes(code, among) if code in among else code
    return codes


def offset(name: str, member: str, *, among: Layouts | None = None) -> int:
    """Where a member begins, in bytes."""
    return packed(name, until=member, among=among).size


def size(name: str, *, among: Layouts | None = None) -> int:
    """How long a record of this layout is, in bytes."""
    return packed(name, among=among).size


Members = dict[str, tuple[int, int]]
"""Member → (offset, size), both in bytes."""


def declared(name: str, *, among: Layouts | None = None) -> Members:
    """A layout's members as declared here."""
    layouts = LAYOUTS if among is None else among
    found: Members = {}
    for member, code in layouts[name]:
        length = size(code, among=among) if code in layouts else struct.calcsize("<" + code)
        found[member] = (offset(name, member, among=among), length)
    return found


def check(built: Mapping[str, tuple[int, Members]], *, among: Layouts | None = None) -> None:
    """Compares every layout with what an object was built with: name → (size, members).

    Errors: Malformed, naming the first difference.
    """
    for name in LAYOUTS if among is None else among:
        if name not in built:
            raise Malformed(f"the probe object does not describe struct {name}")
        length, members = built[name]
        wanted = declared(name, among=among)
        for member in {**wanted, **members}:
            if wanted.get(member) != members.get(member):
                raise Malformed(
                    f"struct {name}: {member} is at {_place(members.get(member))} in the probe "
                    f"object and at {_place(wanted.get(member))} in this program",
                    remedy="build the probes anew: scripts/build_probes",
                )
        if length != (wanted_length := size(name, among=among)):
            raise Malformed(
                f"struct {name}: {length} bytes in the probe object, {wanted_length} in this "
                "program",
                remedy="build the probes anew: scripts/build_probes",
            )


def _place(place: tuple[int, int] | None) -> str:
    return "no byte" if place is None else f"bytes {place[0]} to {place[0] + place[1] - 1}"
