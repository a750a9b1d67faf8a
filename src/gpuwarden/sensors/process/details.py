"""Processes that matter, in full: what the kernel keeps of them and what they say of themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import LOGINUID_UNSET, CgroupPlacement, Executable, Gap, Process
from gpuwarden.sensors.process import environment, exec_mark, stat_lines
from gpuwarden.sensors.process.executables import (
    Binaries,
    new_binaries,
    parse_namespace,
    read_executable,
    split_deleted,
)
from gpuwarden.sensors.process.fan_out import fan_out, workers_for
from gpuwarden.sensors.process.formats import (
    ARGV_LIMIT_BYTES,
    StatusLines,
    parse_argv,
    parse_boot_time,
    parse_cgroup_lines,
    parse_loginuid,
    parse_status,
    tty_name,
)
from gpuwarden.sensors.process.mapped_libraries import LibraryIdentities, read_driver_libraries
from gpuwarden.sensors.process.users import UserNames, look_up, read_names
from gpuwarden.sensors.seen import Seen, StatLine

_STATUS_LIMIT_BYTES = 16 << 10
_CGROUP_LIMIT_BYTES = 64 << 10
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_ANCESTORS_LIMIT = 64
_LEAST_EACH = 24
"""Fewer processes than this are not worth a child of their own."""
_DEADLINE_SECONDS = 20.0

T = TypeVar("T")
_Answer = tuple[list[Process], list[Gap]]


class _Reading(Struct):
    """What is read once for all processes of one call."""

    host: Host
    binaries: Binaries
    identities: LibraryIdentities = field(default_factory=LibraryIdentities)
    boot_time_seconds: int | None = None
    ticks_per_second: int = 100
    addresses_are_drawn: bool = False


def ancestors(seen: Seen, pids: Iterable[int]) -> list[int]:
    """The parents of ``pids``, and theirs, up to pid 1; each once, none of ``pids`` itself.

    At most 64 generations; a loop in a damaged table ends.
    """
    subjects = set(pids)
    found: dict[int, None] = {}
    for pid in subjects:
        line = seen.table.get(pid)
        for _ in range(_ANCESTORS_LIMIT):
            if line is None or line.ppid <= 0 or line.ppid in found:
                break
            if line.ppid not in subjects:
                found[line.ppid] = None
            line = seen.table.get(line.ppid)
    return [pid for pid in found if pid in seen.table]


def read(
    host: Host,
    seen: Seen,
    pids: Iterable[int],
    role: str = "subject",
    binaries: Binaries | None = None,
) -> Iterator[Process | Gap]:
    """One Process for each of ``pids`` that is still there; a Gap for each hidden from us.

    ``binaries``: what an earlier call learned of binaries, mounts and names, to go on with.

    What of a process may not be read is None with its reason in ``unread``. A process that ends
    meanwhile is left out, as is one whose number another process has taken.
    """
    wanted = [pid for pid in dict.fromkeys(pids) if pid > 0]
    if binaries is None:
        binaries = new_binaries(host, read_names(host))
    names = binaries.names
    reading = _new_reading(host, binaries)

    def share(some: Sequence[int]) -> bytes:
        facts = list(_read_share(reading, seen, some, role))
        processes = [fact for fact in facts if isinstance(fact, Process)]
        return msgspec.msgpack.encode((processes, [f for f in facts if isinstance(f, Gap)]))

    workers = workers_for(len(wanted), least_each=_LEAST_EACH) if host.is_live else 1
    found: list[Process | Gap] = []
    if workers == 1:
        found.extend(_read_share(reading, seen, wanted, role))
    else:
        for some, answer in fan_out(
            wanted, share, workers=workers, deadline_seconds=_DEADLINE_SECONDS
        ):
            if isinstance(answer, Exception):
                found.append(_unanswered(some, answer))
                found += _by_the_table_alone(seen, some, role, answer)
            else:
                processes, gaps = msgspec.msgpack.decode(answer, type=_Answer)
                found += [*processes, *gaps]
    yield from _with_names(host, names, found)


def _unanswered(pids: Sequence[int], error: Exception) -> Gap:
    return Gap(
        sensor="processes",
        what="processes " + ", ".join(str(pid) for pid in pids[:16]),
        reason=f"reading them did not end: {error}",
        count=len(pids),
    )


def _by_the_table_alone(
    seen: Seen, pids: Sequence[int], role: str, error: Exception
) -> Iterator[Process]:
    """What the process table holds of processes that could not be read: they are not gone."""
    fields = ("exe", "argv", "environment", "uid", "cgroup", "namespaces", "loginuid")
    for pid in pids:
        line = seen.table.get(pid)
        if line is not None:
            yield Process(
                pid=pid,
                start_time_ticks=line.start_time_ticks,
                ppid=line.ppid,
                process_group=line.process_group,
                session_id=line.session_id,
                comm=line.comm,
                state=line.state,
                kernel_thread=stat_lines.is_kernel_thread(line),
                thread_count=line.thread_count,
                role=role,
                unread=dict.fromkeys(fields, f"reading it did not end: {error}"),
            )


def _new_reading(host: Host, binaries: Binaries) -> _Reading:
    reading = _Reading(host, binaries)
    if host.is_live:
        reading.ticks_per_second = os.sysconf("SC_CLK_TCK")
        reading.addresses_are_drawn = exec_mark.addresses_are_drawn(host)
    try:
        reading.boot_time_seconds = parse_boot_time(host.read_bytes("/proc/stat", 1 << 20))
    except GpuwardenError:
        reading.boot_time_seconds = None
    return reading


def _read_share(
    reading: _Reading, seen: Seen, pids: Iterable[int], role: str
) -> Iterator[Process | Gap]:
    for pid in pids:
        fact = _read_one(reading, seen, pid, role)
        if fact is not None:
            yield fact


def _hidden_from_us(host: Host, pid: int, error: GpuwardenError) -> Gap | None:
    if not isinstance(error, Denied) and not host.answers_signal(pid):
        return None
    return Gap(
        sensor="processes",
        what=f"process {pid}",
        reason=f"it is alive and /proc does not show it to us ({error})",
        remedy="run as root, in the host's pid namespace, without hidepid on /proc",
    )


def _read_one(reading: _Reading, seen: Seen, pid: int, role: str) -> Process | Gap | None:
    host = reading.host
    try:
        line = stat_lines.read_line(host, pid)
    except GpuwardenError as error:
        return _hidden_from_us(host, pid, error)
    known = seen.table.get(pid)
    if known is not None and known.start_time_ticks != line.start_time_ticks:
        return None
    process = _details(reading, line, role)
    thread = stat_lines.living_thread(host, line)
    if thread is not None:
        of_thread = _details(reading, thread, role)
        names = ("pid", "start_time_ticks", "started_at_ns", "comm", "pids_in_namespaces")
        process = msgspec.structs.replace(
            of_thread, **{name: getattr(process, name) for name in names}
        )
    try:
        after = stat_lines.read_line(host, pid)
    except Denied:
        # It has changed its user meanwhile, not ended.
        return process
    except GpuwardenError:
        return None
    return process if after.start_time_ticks == line.start_time_ticks else None


class _Fields:
    """Reads fields one by one, keeping the reason for each that cannot be read."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}

    def get(self, names: str, read_field: Callable[[], T]) -> T | None:
        try:
            return read_field()
        except GpuwardenError as error:
            self.unread.update(dict.fromkeys(names.split(), str(error)))
            return None


def _details(reading: _Reading, line: StatLine, role: str) -> Process:
    host, pid, fields = reading.host, line.pid, _Fields()
    folder = f"/proc/{pid}"
    kernel = stat_lines.is_kernel_thread(line)
    has_memory = not kernel and line.state not in "ZX"
    status = fields.get(
        "uid effective_uid gid pids_in_namespaces",
        lambda: parse_status(host.read_bytes(f"{folder}/status", _STATUS_LIMIT_BYTES)),
    )
    status = status or StatusLines()
    namespaces = _namespaces(host, folder, fields)
    argv: tuple[tuple[str, ...], bool] | None = None
    hints: dict[str, str] | None = None
    libraries = None
    if has_memory:
        argv = fields.get(
            "argv",
            lambda: parse_argv(host.read_bytes(f"{folder}/cmdline", ARGV_LIMIT_BYTES + 1)),
        )
        hints = fields.get(
            "environment",
            lambda: environment.parse_environ(
                host.read_bytes(f"{folder}/environ", environment.LIMIT_BYTES)
            ),
        )
        libraries = fields.get(
            "driver_libraries",
            lambda: read_driver_libraries(host, pid, reading.identities),
        )
    exe = None if kernel else _executable(reading, line, namespaces, fields)
    lines = fields.get(
        "cgroup_lines cgroup",
        lambda: parse_cgroup_lines(host.read_bytes(f"{folder}/cgroup", _CGROUP_LIMIT_BYTES)),
    )
    cwd = fields.get("cwd", lambda: _directory(host, pid, fields)) if has_memory else None
    return Process(
        pid=pid,
        start_time_ticks=line.start_time_ticks,
        started_at_ns=_started_at_ns(reading, line, fields),
        ppid=line.ppid,
        process_group=line.process_group,
        session_id=line.session_id,
        comm=line.comm,
        state=line.state,
        kernel_thread=kernel,
        argv=None if argv is None else argv[0],
        argv_truncated=argv is not None and argv[1],
        exe=exe,
        exec_mark=_mark(reading, pid, exe) if has_memory and role == "subject" else None,
        cwd=None if cwd is None else cwd[0],
        cwd_deleted=cwd is not None and cwd[1],
        uid=status.uid,
        effective_uid=status.effective_uid,
        gid=status.gid,
        loginuid=fields.get(
            "loginuid", lambda: parse_loginuid(host.read_short(f"{folder}/loginuid", 32))
        ),
        tty=tty_name(line.tty_number),
        thread_count=line.thread_count,
        cpu_seconds=line.cpu_ticks / reading.ticks_per_second,
        namespaces=namespaces,
        pids_in_namespaces=status.pids_in_namespaces,
        cgroup_lines=lines or (),
        cgroup=None if lines is None else _placement(lines),
        environment=hints or {},
        driver_libraries=libraries or (),
        role=role,
        unread=fields.unread,
    )


def _mark(reading: _Reading, pid: int, exe: Executable | None) -> str | None:
    drawn = reading.addresses_are_drawn
    return exec_mark.read_mark(reading.host, pid, exec_mark.binary(exe), drawn=drawn)


def _placement(lines: tuple[str, ...]) -> CgroupPlacement:
    from gpuwarden.sensors.cgroup import place

    return place(lines)


def _started_at_ns(reading: _Reading, line: StatLine, fields: _Fields) -> int | None:
    if reading.boot_time_seconds is None:
        fields.unread["started_at_ns"] = "/proc/stat does not tell when the machine came up"
        return None
    ticks = line.start_time_ticks * 1_000_000_000 // reading.ticks_per_second
    return reading.boot_time_seconds * 1_000_000_000 + ticks


def _namespaces(host: Host, folder: str, fields: _Fields) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in _NAMESPACES:
        try:
            inode = parse_namespace(host.read_link(f"{folder}/ns/{kind}"))
        except Denied as error:
            fields.unread["namespaces"] = str(error)
            break
        except (Unavailable, Malformed) as error:
            if kind in ("pid", "mnt"):
                fields.unread.setdefault("namespaces", str(error))
            continue
        if inode is not None:
            found[kind] = inode
    return found


def _executable(
    reading: _Reading, line: StatLine, namespaces: dict[str, int], fields: _Fields
) -> Executable | None:
    answer = read_executable(reading.binaries, line.pid, namespaces.get("mnt"))
    if isinstance(answer, str):
        fields.unread["exe"] = answer
        return None
    if answer is None:
        ended = line.state in "ZX"
        fields.unread["exe"] = (
            "the process has ended and waits for its parent: the kernel keeps no binary of it"
            if ended
            else "the kernel shows no binary for it"
        )
    return answer


def _directory(host: Host, pid: int, fields: _Fields) -> tuple[str, bool]:
    link = f"/proc/{pid}/cwd"
    text = host.read_link(link)
    status = fields.get("cwd_deleted", lambda: host.link_target_status(link))
    if status is None:
        return text, False
    path, deleted = split_deleted(host, pid, text, status)
    return path, deleted and path != text


def _with_names(
    host: Host, names: UserNames, found: list[Process | Gap]
) -> Iterator[Process | Gap]:
    processes = [fact for fact in found if isinstance(fact, Process)]
    uids = [p.uid for p in processes if p.uid is not None]
    uids += [p.loginuid for p in processes if p.loginuid not in (None, LOGINUID_UNSET)]
    look_up(host, names, uids, [p.gid for p in processes if p.gid is not None])
    for fact in found:
        yield _named(names, fact) if isinstance(fact, Process) else fact


def _named(names: UserNames, process: Process) -> Process:
    unread = dict(process.unread)
    user = _name(names, names.users, process.uid, "user", unread)
    group = _name(names, names.groups, process.gid, "group", unread)
    login = process.loginuid if process.loginuid != LOGINUID_UNSET else None
    login_user = _name(names, names.users, login, "login_user", unread)
    return msgspec.structs.replace(
        process, user=user, group=group, login_user=login_user, unread=unread
    )


def _name(
    names: UserNames, table: dict[int, str], number: int | None, what: str, unread: dict[str, str]
) -> str | None:
    if number is None:
        return None
    name = table.get(number)
    if name is None:
        unread[what] = names.failure or f"no name is known for id {number}"
    return name
