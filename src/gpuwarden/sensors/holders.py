"""Who holds an accelerator: every descriptor on, and mapping of, its device node, by number.

Looks at each process's own descriptor table. Not seen: descriptors that are in flight in a unix
socket's queue or registered with io_uring only, and the table of a thread that left its process's
(``unshare(CLONE_FILES)``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host, OpenFiles
from gpuwarden.model import Gap, Holder, NodeKind
from gpuwarden.pattern import pattern
from gpuwarden.sensors.device_nodes import Majors, assigned_majors, kind_of, read_majors
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.process.fan_out import fan_out, workers_for
from gpuwarden.sensors.seen import Seen, StatLine

# proc_pid_maps(5): start-end perms offset major:minor inode path; all but the inode hexadecimal.
_SHARED_FILE = pattern(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) [r-][w-][x-]s [0-9a-f]{1,16} "
    rb"([0-9a-f]{1,8}):([0-9a-f]{1,8}) ([1-9]\d{0,19}) *([^\n]{0,4096})",
    re.M,
)
_SHARED = pattern(rb" [r-][w-][x-]s ")
_MAPS_LIMIT_BYTES = 16 << 20
_DESCRIPTOR_LIMIT = 4096
_THREADS_LIMIT = 256
_LEAST_EACH = 200
"""Fewer processes than this are not worth a child of their own."""
_DEADLINE_SECONDS = 20.0
DELETED = " (deleted)"

FileKey = tuple[tuple[int, int], int]
"""((major, minor) of the file system, inode) as the kernel's maps tell it."""


class MappedFile(Struct, frozen=True):
    """A shared file mapping that a maps file tells of; ``path`` is what stands there, raw."""

    start: int
    end: int
    device: tuple[int, int]
    inode: int
    path: str


def parse_shared_mappings(data: bytes) -> list[MappedFile]:
    """The shared mappings of files in the text of /proc/<pid>/maps; other lines are skipped.

    Source: proc_pid_maps(5).
    """
    if _SHARED.search(data) is None:
        return []
    return [
        MappedFile(
            int(start, 16),
            int(end, 16),
            (int(major, 16), int(minor, 16)),
            int(inode),
            path.decode("utf-8", "backslashreplace"),
        )
        for start, end, major, minor, inode, path in _SHARED_FILE.findall(data)
    ]


class _Share(msgspec.Struct):
    """What was found at one share of the processes, possibly in a child of its own."""

    holders: list[Holder] = []
    socket_owners: dict[int, int] = {}
    denied_descriptors: int = 0
    denied_mappings: int = 0
    mapped_by_path: list[int] = []
    """Processes whose mapped nodes are known by their path alone."""


class _Look(Struct):
    """What one pass needs to remember: known nodes, files already identified, what was refused."""

    host: Host
    majors: Majors
    paths: set[tuple[str, int, int]]
    nodes_by_file: dict[FileKey, tuple[int, int]]
    nodes_by_path: dict[str, tuple[int, int]]
    identified: dict[FileKey, tuple[int, int] | None] = field(default_factory=dict)
    share: _Share = field(default_factory=_Share)


def _device_key(text: str | None) -> tuple[int, int]:
    major, _, minor = (text or "").partition(":")
    return int(major), int(minor)


def _new_look(host: Host, seen: Seen, majors: Majors) -> _Look:
    return _Look(
        host=host,
        majors=majors,
        paths={(node.path, node.major, node.minor) for node in seen.device_nodes},
        nodes_by_file={
            (_device_key(node.device), node.inode): (node.major, node.minor)
            for node in seen.device_nodes
            if node.device is not None and node.inode is not None
        },
        nodes_by_path={node.path: (node.major, node.minor) for node in seen.device_nodes},
    )


def read(host: Host, seen: Seen) -> Iterator[Holder | Gap]:
    """One Holder per process and device number, from all processes of ``seen.table`` but ours.

    Fills ``seen.socket_owners`` on the way. Errors: Unavailable if the machine has no
    accelerator's driver and the driver's list names no process either (there is nothing to hold).
    """
    try:
        majors = read_majors(host)
    except GpuwardenError as error:
        majors = assigned_majors()
        yield Gap(
            sensor="holders",
            what="device numbers given out by the kernel (nvidia-uvm, nvidia-caps, kfd)",
            reason=str(error),
            remedy="give the scan a readable /proc/devices",
        )
    if not majors and not seen.clients:
        raise Unavailable("no accelerator's driver is loaded, so there is nothing to hold")
    look = _new_look(host, seen, majors)
    if not seen.table:
        seen.table.update(stat_lines.read(host))
    unreadable = _complete(host, seen.table)
    own = stat_lines.own_pids(host, seen.table)
    lines = [
        line
        for pid, line in seen.table.items()
        if pid not in own and not stat_lines.is_kernel_thread(line)
    ]
    workers = workers_for(len(lines), least_each=_LEAST_EACH) if host.is_live else 1
    if workers == 1:
        share = _read_share(look, lines)
        share.denied_descriptors += unreadable
        yield from _keep(seen, share)
        yield from _gaps(share)
        return
    total = _Share(denied_descriptors=unreadable)
    for some, answer in fan_out(
        lines,
        lambda some: msgspec.msgpack.encode(_read_share(look, some)),
        workers=workers,
        deadline_seconds=_DEADLINE_SECONDS,
    ):
        if isinstance(answer, Exception):
            yield _unanswered(some, answer)
            continue
        share = msgspec.msgpack.decode(answer, type=_Share)
        yield from _keep(seen, share)
        total.denied_descriptors += share.denied_descriptors
        total.denied_mappings += share.denied_mappings
        total.mapped_by_path += share.mapped_by_path
    yield from _gaps(total)


def _complete(host: Host, table: dict[int, StatLine]) -> int:
    """Adds processes born since the table was read; how many are listed and may not be read."""
    try:
        missing = [pid for pid in host.kernel_pids() if pid not in table]
    except GpuwardenError:
        return 0
    denied = 0
    for pid in missing:
        try:
            table[pid] = stat_lines.read_line(host, pid)
        except Denied:
            denied += 1
        except GpuwardenError:
            continue
    return denied


def _keep(seen: Seen, share: _Share) -> Iterator[Holder]:
    for inode, pid in share.socket_owners.items():
        seen.socket_owners.setdefault(inode, pid)
    yield from share.holders


def _read_share(look: _Look, lines: Sequence[StatLine]) -> _Share:
    look.share = _Share()
    for line in lines:
        look.share.holders.extend(_holders_of(look, line))
    return look.share


def _unanswered(lines: Sequence[StatLine], error: Exception) -> Gap:
    return Gap(
        sensor="holders",
        what="descriptors of processes " + ", ".join(str(line.pid) for line in lines[:16]),
        reason=f"reading them did not end: {error}",
        count=len(lines),
    )


def _holders_of(look: _Look, line: StatLine) -> Iterator[Holder]:
    pid = line.pid
    devices: dict[tuple[int, int], tuple[NodeKind, list[tuple[str, int]]]] = {}
    for folder in _descriptor_folders(look.host, line):
        files = _open_files(look, folder)
        if files is None:
            continue
        for inode in files.sockets:
            look.share.socket_owners.setdefault(inode, pid)
        for descriptor, number in files.devices:
            kind = kind_of(*number, look.majors)
            if kind is not None:
                devices.setdefault(number, (kind, []))[1].append((folder, descriptor))
    mapped = _mapped_devices(look, pid) if look.majors else {}
    for number, (kind, descriptors) in devices.items():
        folder, first = descriptors[0]
        path = _link(look.host, f"{folder}/{first}")
        yield Holder(
            pid=pid,
            major=number[0],
            minor=number[1],
            kind=kind,
            path=path,
            descriptors=tuple(sorted({fd for _, fd in descriptors})[:_DESCRIPTOR_LIMIT]),
            mapped=number in mapped,
            renamed=(path, *number) not in look.paths,
        )
    for number, path in mapped.items():
        kind = kind_of(*number, look.majors)
        if number not in devices and kind is not None:
            yield Holder(
                pid=pid,
                major=number[0],
                minor=number[1],
                kind=kind,
                path=path,
                mapped=True,
                renamed=(path, *number) not in look.paths,
            )


def _descriptor_folders(host: Host, line: StatLine) -> list[str]:
    """Where a process's descriptors are listed: under its threads if its first thread has ended."""
    if line.state != "Z" or line.thread_count < 2:
        return [f"/proc/{line.pid}/fd"]
    try:
        threads = host.names(f"/proc/{line.pid}/task")[:_THREADS_LIMIT]
    except GpuwardenError:
        threads = []
    return [f"/proc/{line.pid}/task/{thread}/fd" for thread in threads]


def _open_files(look: _Look, folder: str) -> OpenFiles | None:
    try:
        files = look.host.open_files(folder)
    except Denied:
        look.share.denied_descriptors += 1
        return None
    except (Unavailable, Malformed):
        return None
    look.share.denied_descriptors += files.unread > 0
    return files


def _link(host: Host, path: str) -> str:
    """What a link says, or else the link's own path: the device is known by its number anyway."""
    try:
        return host.read_link(path)
    except GpuwardenError:
        return path


def _mapped_devices(look: _Look, pid: int) -> dict[tuple[int, int], str]:
    """Device numbers that a process has mapped, with the path that the mapping shows."""
    try:
        found = look.host.shared_mappings(pid)
        if found is None:
            text = look.host.read_bytes(f"/proc/{pid}/maps", _MAPS_LIMIT_BYTES)
            files = parse_shared_mappings(text)
        else:
            files = [MappedFile(m.start, m.end, m.device, m.inode, "") for m in found if m.inode]
    except Denied:
        look.share.denied_mappings += 1
        return {}
    except (Unavailable, Malformed):
        return {}
    devices: dict[tuple[int, int], str] = {}
    for file in files:
        number = _mapped_number(look, pid, file)
        if number is not None and number not in devices:
            devices[number] = file.path or _link(look.host, _map_file(pid, file))
    return devices


def _map_file(pid: int, file: MappedFile) -> str:
    return f"/proc/{pid}/map_files/{file.start:x}-{file.end:x}"


def _mapped_number(look: _Look, pid: int, file: MappedFile) -> tuple[int, int] | None:
    """The device number behind a mapping: by file if it is a known node, else through the link."""
    key = (file.device, file.inode)
    if key in look.nodes_by_file:
        return look.nodes_by_file[key]
    if key in look.identified:
        return look.identified[key]
    number: tuple[int, int] | None = None
    try:
        status = look.host.link_target_status(_map_file(pid, file))
        number = status.special if status.is_character_device else None
    except (Denied, Malformed):
        number = look.nodes_by_path.get(file.path.removesuffix(DELETED))
        if number is not None:
            look.share.mapped_by_path.append(pid)
        return number
    except Unavailable:
        return look.nodes_by_path.get(file.path.removesuffix(DELETED))
    if number is not None and kind_of(*number, look.majors) is None:
        number = None
    look.identified[key] = number
    return number


def _gaps(share: _Share) -> Iterator[Gap]:
    remedy = "run as root with CAP_SYS_PTRACE (and without hidepid on /proc)"
    if share.denied_descriptors:
        yield Gap(
            sensor="holders",
            what="open descriptors of other users' processes",
            reason="permission denied for /proc/<pid>/fd",
            remedy=remedy,
            count=share.denied_descriptors,
        )
    if share.denied_mappings > share.denied_descriptors:
        yield Gap(
            sensor="holders",
            what="memory mappings of processes",
            reason="permission denied for /proc/<pid>/maps",
            remedy=remedy,
            count=share.denied_mappings,
        )
    if share.mapped_by_path:
        yield Gap(
            sensor="holders",
            what="mapped device nodes known by their path alone: "
            + ", ".join(f"pid {pid}" for pid in share.mapped_by_path[:8]),
            reason="permission denied for /proc/<pid>/map_files",
            remedy="run with CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE",
            count=len(share.mapped_by_path),
        )
