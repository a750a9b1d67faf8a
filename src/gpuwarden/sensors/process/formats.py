"""The formats of the files in /proc/<pid> that tell who a process is; nothing here reads."""

from __future__ import annotations

from msgspec import Struct

from gpuwarden.errors import Malformed
from gpuwarden.model import LOGINUID_UNSET

ARGV_LIMIT_BYTES = 128 << 10
ARGUMENTS_LIMIT = 4096
_CGROUP_LINES_LIMIT = 64
_NSPID_LIMIT = 33
"""32 nested pid namespaces are the kernel's own limit."""
_KERNEL_UNSET = (1 << 32) - 1

# admin-guide/devices.txt; tty_nr of proc_pid_stat(5): minor in bits 31-20 and 7-0, major in 15-8.
_PTY_MAJORS = range(136, 144)
_TTY_NAMES = {(5, 0): "tty", (5, 1): "console", (5, 2): "ptmx"}
_VIRTUAL_CONSOLE_MAJOR, _VIRTUAL_CONSOLES = 4, 64
_SERIAL_NAMES = {204: ("ttyAMA", 64), 188: ("ttyUSB", 0), 229: ("hvc", 0), 166: ("ttyACM", 0)}


class StatusLines(Struct, frozen=True):
    """The part of /proc/<pid>/status that stat does not have."""

    thread_group: int | None = None
    uid: int | None = None
    effective_uid: int | None = None
    gid: int | None = None
    pids_in_namespaces: tuple[int, ...] = ()


def _numbers(text: bytes, limit: int) -> tuple[int, ...]:
    words = text.split()[:limit]
    if not all(word.isdigit() and len(word) <= 10 for word in words):
        raise Malformed("a status line whose numbers are none")
    return tuple(int(word) for word in words)


def parse_status(data: bytes) -> StatusLines:
    """Tgid, real and effective uid, gid and NSpid in the text of /proc/<pid>/status.

    A line that is absent leaves its field empty. Errors: Malformed. Source: proc_pid_status(5).
    """
    lines: dict[bytes, bytes] = {}
    for line in data.split(b"\n"):
        name, colon, value = line.partition(b":")
        if colon:
            lines.setdefault(name, value)
    group = _numbers(lines.get(b"Tgid", b""), 1)
    uids = _numbers(lines.get(b"Uid", b""), 4)
    gids = _numbers(lines.get(b"Gid", b""), 4)
    return StatusLines(
        thread_group=group[0] if group else None,
        uid=uids[0] if uids else None,
        effective_uid=uids[1] if len(uids) > 1 else None,
        gid=gids[0] if gids else None,
        pids_in_namespaces=_numbers(lines.get(b"NSpid", b""), _NSPID_LIMIT),
    )


def parse_argv(data: bytes) -> tuple[tuple[str, ...], bool]:
    """The arguments in /proc/<pid>/cmdline, and whether some were left out for their length.

    Split at NUL alone: an argument may hold blanks and newlines. Source: proc_pid_cmdline(5).
    """
    truncated = len(data) > ARGV_LIMIT_BYTES
    data = data[:ARGV_LIMIT_BYTES]
    if data.endswith(b"\0"):
        data = data[:-1]
    elif not data:
        return (), False
    words = data.split(b"\0", ARGUMENTS_LIMIT)
    truncated = truncated or len(words) > ARGUMENTS_LIMIT
    return (
        tuple(word.decode("utf-8", "backslashreplace") for word in words[:ARGUMENTS_LIMIT]),
        truncated,
    )


def parse_loginuid(data: bytes) -> int:
    """The login uid; LOGINUID_UNSET for the kernel's 4294967295. Errors: Malformed."""
    text = data.strip()
    if not text.isdigit() or len(text) > 10:
        raise Malformed("a login uid that is no number")
    number = int(text)
    return LOGINUID_UNSET if number == _KERNEL_UNSET else number


def parse_cgroup_lines(data: bytes) -> tuple[str, ...]:
    """The lines of /proc/<pid>/cgroup, at most 64. Source: cgroups(7)."""
    lines = data.decode("utf-8", "backslashreplace").split("\n")
    return tuple(line for line in lines if line)[:_CGROUP_LINES_LIMIT]


def tty_name(number: int) -> str | None:
    """The terminal that a tty_nr stands for, such as ``pts/3``; None for no terminal."""
    if number == 0:
        return None
    bits = number & 0xFFFFFFFF
    major, minor = bits >> 8 & 0xFFF, bits & 0xFF | bits >> 12 & 0xFFF00
    if major in _PTY_MAJORS:
        return f"pts/{minor + (major - _PTY_MAJORS[0]) * 256}"
    if (major, minor) in _TTY_NAMES:
        return _TTY_NAMES[major, minor]
    if major == _VIRTUAL_CONSOLE_MAJOR:
        if minor < _VIRTUAL_CONSOLES:
            return f"tty{minor}"
        return f"ttyS{minor - _VIRTUAL_CONSOLES}"
    if major in _SERIAL_NAMES and minor >= _SERIAL_NAMES[major][1]:
        name, first = _SERIAL_NAMES[major]
        return f"{name}{minor - first}"
    return f"{major}:{minor}"


def parse_boot_time(data: bytes) -> int | None:
    """``btime`` in the text of /proc/stat: when the machine came up, Unix seconds."""
    at = data.rfind(b"\nbtime ")
    text = data[at + 7 : at + 27].split(b"\n", 1)[0] if at >= 0 else b""
    return int(text) if text.isdigit() else None
