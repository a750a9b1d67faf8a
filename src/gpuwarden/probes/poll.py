"""The fallback without eBPF: polls /proc for new holders, and says that it is one.

It sees a device that is held when it looks, opened or inherited; not an open that ends between two
looks, not mknod, not access(2), not a refused open.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import Gap, Holder, Process
from gpuwarden.probes.events import (
    NANOSECONDS,
    TICKS_PER_SECOND,
    OpenEvent,
    ProcessIdentity,
    boot_offset_ns,
)
from gpuwarden.sensors import device_nodes, holders
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.seen import Seen

_Key = tuple[int, int, int, int]


class HolderPoll:
    """Each look gives an ``opened`` event, ``how`` held, for every holder that is new since."""

    limits = (
        "polls /proc: opens that end between two looks, refused opens, mknod and access are not "
        "seen"
    )

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()
        self._known: set[_Key] = set()
        self.gaps: list[Gap] = []
        """What the last look could not see."""
        self.seconds = 0.0
        """How long the last look took."""

    def look(self) -> list[OpenEvent]:
        """The holders that were not there at the last look; all of them at the first.

        Errors: as ``sensors.holders.read``; Unavailable without an accelerator's driver.
        """
        begun = time.perf_counter()
        seen = Seen(table=stat_lines.read(self._host))
        try:
            for node in device_nodes.read(self._host, seen):
                seen.add(node)
        except GpuwardenError:
            pass  # renamed nodes are then told from others by nothing; the numbers still hold
        found: dict[_Key, Holder] = {}
        self.gaps = []
        for fact in holders.read(self._host, seen):
            if isinstance(fact, Gap):
                self.gaps.append(fact)
                continue
            line = seen.table.get(fact.pid)
            ticks = 0 if line is None else line.start_time_ticks
            found[(fact.pid, ticks, fact.major, fact.minor)] = fact
        new = {key: holder for key, holder in found.items() if key not in self._known}
        self._known = set(found)
        events = self._events(seen, new)
        self.seconds = time.perf_counter() - begun
        return events

    def _events(self, seen: Seen, new: Mapping[_Key, Holder]) -> list[OpenEvent]:
        pids = sorted({holder.pid for holder in new.values()})
        processes: dict[int, Process] = {}
        for fact in details.read(self._host, seen, pids):
            if isinstance(fact, Process):
                processes[fact.pid] = fact
            else:
                self.gaps.append(fact)
        at_ns = time.time_ns()
        return [
            OpenEvent(
                at_ns=at_ns,
                since_boot_ns=at_ns - boot_offset_ns(),
                source="proc poll",
                major=holder.major,
                minor=holder.minor,
                how="held",
                state="opened",
                process=_identity(seen, pid, ticks, processes.get(pid)),
                path=holder.path,
                path_is_claimed=False,
            )
            for (pid, ticks, _, _), holder in new.items()
        ]


def _identity(seen: Seen, pid: int, ticks: int, process: Process | None) -> ProcessIdentity:
    start_ns = ticks * (NANOSECONDS // TICKS_PER_SECOND)
    line = seen.table.get(pid)
    parent = seen.table.get(line.ppid) if line is not None else None
    if process is None:
        return ProcessIdentity(
            pid=pid,
            start_time_ns=start_ns,
            ppid=0 if line is None else line.ppid,
            comm="" if line is None else line.comm,
            unread={"process": "it ended before it could be read"},
        )
    exe = process.exe
    return ProcessIdentity(
        pid=pid,
        start_time_ns=start_ns,
        ppid=process.ppid,
        uid=process.uid,
        gid=process.gid,
        loginuid=process.loginuid,
        comm=process.comm,
        parent_comm="" if parent is None else parent.comm,
        tty=process.tty,
        argv=process.argv,
        argv_truncated=process.argv_truncated,
        exe_path=None if exe is None else exe.path,
        exe_device=None if exe is None else exe.device,
        exe_inode=None if exe is None else exe.inode,
        cgroup_path=next(iter(process.cgroup.paths), None) if process.cgroup else None,
        mount_namespace=process.namespaces.get("mnt"),
        pid_namespace=process.namespaces.get("pid"),
        user_namespace=process.namespaces.get("user"),
        pid_in_namespace=process.pids_in_namespaces[-1] if process.pids_in_namespaces else None,
        unread=dict(process.unread),
    )
