"""Processes that live and do not show: missing from /proc's listing, and not for being threads.

A pid is only called hidden after a second listing, since processes are born between two looks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterable, Iterator

from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import Gap, HiddenProcess
from gpuwarden.pattern import pattern
from gpuwarden.sensors.process.formats import parse_status
from gpuwarden.sensors.seen import Seen

# proc_pid_mountinfo(5): id parent major:minor root mount-point options … - type source options
_MOUNTINFO_LIMIT_BYTES = 4 << 20
_PROC_MOUNT = pattern(rb"^\d+ \d+ \d+:\d+ \S+ (\S+) [^\n]*? - proc \S+ (\S+)$", re.M)
_OVER_A_PROCESS = pattern(rb"^\d+ \d+ \d+:\d+ \S+ (\S*)/proc/(\d{1,10})(?:/\S*)? ", re.M)
_HIDEPID = pattern(rb"(?:^|,)hidepid=(?!0(?:,|$)|off(?:,|$))")

_STATUS_LIMIT_BYTES = 16 << 10
_PID_MAX_LIMIT = 1 << 22
"""The kernel's own limit of pid_max (threads.h: PID_MAX_LIMIT)."""
SWEEP_SECONDS = 6.0
_CHUNK = 16_384
_CANDIDATES_LIMIT = 100_000
_REMEDY = "run as root, in the host's pid namespace, without hidepid on /proc"


def parse_hidepid(mountinfo: bytes, proc: str = "/proc") -> bool:
    """Whether the mount at ``proc`` hides other users' processes. Source: proc(5)."""
    options = [found for point, found in _PROC_MOUNT.findall(mountinfo) if point == proc.encode()]
    return bool(options) and _HIDEPID.search(options[-1]) is not None


def parse_covered(mountinfo: bytes, prefix: str = "") -> list[int]:
    """pids whose /proc/<pid>, or a file in it, has something mounted over it."""
    found = _OVER_A_PROCESS.findall(mountinfo)
    pids = {int(pid) for head, pid in found if head == prefix.encode()}
    return sorted(pids)


def read(host: Host, seen: Seen) -> Iterator[HiddenProcess | Gap]:
    """Hidden processes among those that the driver or a descriptor names; ``seen.deep``: among all.

    Errors: Unavailable or Denied if /proc itself cannot be listed.
    """
    mountinfo = _mountinfo(host)
    listed = set(host.pids())
    kernel_listed = set(host.kernel_pids())
    restricted = parse_hidepid(mountinfo, host.path("/proc")) and 1 not in kernel_listed
    named: dict[int, list[str]] = {}
    for client in seen.clients:
        named.setdefault(client.pid, ["driver"])
    for holder in seen.holders:
        sources = named.setdefault(holder.pid, [])
        if "holder" not in sources:
            sources.append("holder")
    for pid in kernel_listed - listed:
        named.setdefault(pid, [])
    missing = {pid: sources for pid, sources in named.items() if pid > 0 and pid not in listed}
    covered = _covered(host, mountinfo)
    if seen.deep and not restricted:
        swept = yield from _sweep(host, listed)
        for pid in swept:
            missing.setdefault(pid, [])
    if not missing and not covered:
        return
    listed_again = set(host.pids())
    kernel_again = set(host.kernel_pids())
    for pid in sorted(missing):
        if pid not in listed_again:
            yield from _judge_missing(host, pid, missing[pid], pid in kernel_again, restricted)
    for pid in covered:
        if pid in kernel_again and host.answers_signal(pid):
            yield HiddenProcess(pid=pid, seen_by=("mount",), thread_group_leader=True)


def _mountinfo(host: Host) -> bytes:
    try:
        return host.read_bytes("/proc/self/mountinfo", _MOUNTINFO_LIMIT_BYTES)
    except GpuwardenError:
        return b""


def _covered(host: Host, mountinfo: bytes) -> list[int]:
    return parse_covered(mountinfo, "" if host.is_local else host.root)


def _judge_missing(
    host: Host, pid: int, sources: list[str], in_kernel_listing: bool, restricted: bool
) -> Iterator[HiddenProcess | Gap]:
    """A pid that two listings lack: a thread, one that has gone, one hidden from us, or hidden."""
    leader, opens = _thread_group_leader(host, pid)
    answers = host.answers_signal(pid)
    if leader is False or not (opens or answers):
        return
    if not opens and _is_thread_of_a_listed(host, pid):
        return
    if restricted:
        yield Gap(
            sensor="hidden",
            what=f"process {pid}",
            reason="/proc is mounted with hidepid, so that others' processes do not show",
            remedy=_REMEDY,
        )
        return
    if pid in host.pids():
        # Its number was free at the second look and has been taken since.
        return
    seen_by = [
        *sources,
        *(["kernel listing"] if in_kernel_listing else []),
        *(["kill"] if answers else []),
        *(["lookup"] if opens else []),
    ]
    yield HiddenProcess(pid=pid, seen_by=tuple(seen_by), thread_group_leader=leader)


def _thread_group_leader(host: Host, pid: int) -> tuple[bool | None, bool]:
    """(whether it leads its thread group, whether /proc/<pid>/status opens)."""
    try:
        status = parse_status(host.read_bytes(f"/proc/{pid}/status", _STATUS_LIMIT_BYTES))
    except Denied:
        return None, True
    except GpuwardenError:
        return None, False
    return (None if status.thread_group is None else status.thread_group == pid), True


def _is_thread_of_a_listed(host: Host, pid: int) -> bool:
    return any(pid in _threads(host, leader) for leader in host.kernel_pids())


def _threads(host: Host, pid: int) -> set[int]:
    try:
        return {int(name) for name in host.names(f"/proc/{pid}/task") if name.isdecimal()}
    except GpuwardenError:
        return set()


def _pid_max(host: Host) -> int:
    try:
        text = host.read_bytes("/proc/sys/kernel/pid_max", 32).strip()
    except GpuwardenError:
        return _PID_MAX_LIMIT
    return min(int(text), _PID_MAX_LIMIT) if text.isdigit() else _PID_MAX_LIMIT


def _sweep(host: Host, listed: set[int]) -> Generator[Gap, None, list[int]]:
    """Asks after every possible pid for at most SWEEP_SECONDS; returns those in doubt."""
    if not host.is_live:
        yield Gap(
            sensor="hidden",
            what="a sweep over all pids",
            reason="signals reach only the machine and pid namespace that the scan runs in",
            remedy="run the deep scan on the node itself",
        )
        return []
    threads: set[int] = set()
    for pid in listed:
        threads |= _threads(host, pid)
    known = threads | listed
    end = _pid_max(host)
    deadline = time.monotonic() + SWEEP_SECONDS
    doubtful: list[int] = []
    for first in range(1, end + 1, _CHUNK):
        if time.monotonic() > deadline or len(doubtful) > _CANDIDATES_LIMIT:
            yield Gap(
                sensor="hidden",
                what=f"pids {first} to {end}",
                reason=f"the sweep was stopped after {SWEEP_SECONDS:g} seconds",
                remedy="run the deep scan again when the machine is less busy",
                count=end - first + 1,
            )
            break
        chunk = range(first, min(first + _CHUNK, end + 1))
        doubtful += (pid for pid in host.answering_pids(chunk) if pid not in known)
    return list(_leaders(host, doubtful))


def _leaders(host: Host, pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        leader, opens = _thread_group_leader(host, pid)
        if leader is not False and (opens or host.answers_signal(pid)):
            yield pid
