"""Who opened a device: the kernel's word at that moment, and what /proc still adds to it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import LOGINUID_UNSET, CgroupPlacement, Executable, Process
from gpuwarden.probes.events import ProcessIdentity
from gpuwarden.sensors.cgroup import place
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.process.executables import Binaries, new_binaries, read_namespace
from gpuwarden.sensors.process.users import read_names
from gpuwarden.sensors.seen import Seen

KNOWN_LIMIT = 4096
LINEAGES_LIMIT = 1024
ANCESTORS_LIMIT = 64
GONE = "it had ended before /proc could be read"
BINARIES_SECONDS = 10.0
_FROM_PROC = ("environment", "cwd", "effective_uid", "process_group", "session_id")
_DELETED = " (deleted)"

Key = tuple[int, int]
"""(pid, start time in ticks)."""


def placement(identity: ProcessIdentity) -> CgroupPlacement | None:
    """Where its control group puts it, as the kernel named that group."""
    if identity.cgroup_path is None:
        return None
    path = identity.cgroup_path
    if identity.cgroup_path_cut:
        # The names nearest to the process are there; those above them are not.
        path = "/" + path.lstrip("/")
    hierarchy = identity.cgroup_path_hierarchy or 0
    return place((f"{hierarchy}:{'devices' if hierarchy else ''}:{path}",))


def of_kernel(identity: ProcessIdentity, boot_time_ns: int | None) -> Process:
    """The process as the event has it, whatever became of it since."""
    unread = dict(identity.unread)
    unread |= dict.fromkeys(_FROM_PROC, GONE)
    exe = None
    if identity.exe_path is not None:
        path = identity.exe_path
        deleted = path.endswith(_DELETED)
        exe = Executable(
            path=path.removesuffix(_DELETED),
            deleted=deleted,
            memfd=path.startswith("/memfd:"),
            device=identity.exe_device,
            inode=identity.exe_inode,
            unread={"owner_uid": GONE, "path_is_genuine": GONE},
        )
    namespaces = {
        kind: inode
        for kind, inode in (
            ("mnt", identity.mount_namespace),
            ("pid", identity.pid_namespace),
            ("user", identity.user_namespace),
        )
        if inode is not None
    }
    started = None if boot_time_ns is None else boot_time_ns + identity.start_time_ns
    return Process(
        pid=identity.pid,
        start_time_ticks=identity.start_time_ticks,
        started_at_ns=started,
        ppid=identity.ppid,
        comm=identity.comm,
        argv=identity.argv,
        argv_truncated=identity.argv_truncated,
        exe=exe,
        uid=identity.uid,
        gid=identity.gid,
        loginuid=identity.loginuid,
        tty=identity.tty,
        namespaces=namespaces,
        pids_in_namespaces=(identity.pid,)
        if identity.pid_in_namespace in (None, identity.pid)
        else (identity.pid, identity.pid_in_namespace),
        cgroup=placement(identity),
        unread=unread,
    )


def merged(of_event: Process, of_proc: Process) -> Process:
    """What /proc tells, corrected by the event where the process has become another since."""
    kept: dict[str, Any] = {
        # Who has made it, also when that one has ended since: a runtime is known by it.
        "ppid": of_event.ppid or of_proc.ppid,
        "comm": of_event.comm,
        "argv": of_event.argv if of_event.argv is not None else of_proc.argv,
        "argv_truncated": of_event.argv_truncated
        if of_event.argv is not None
        else of_proc.argv_truncated,
        "uid": of_proc.uid if of_event.uid is None else of_event.uid,
        "loginuid": of_proc.loginuid if of_event.loginuid is None else of_event.loginuid,
    }
    if of_event.argv_truncated and of_proc.argv is not None:
        kept["argv"], kept["argv_truncated"] = of_proc.argv, of_proc.argv_truncated
    mine, theirs = of_event.exe, of_proc.exe
    if mine is not None and (theirs is None or mine.inode != theirs.inode):
        # It has executed another program since: this one is what opened the device.
        kept["exe"] = mine
        kept["exec_mark"] = None
    elif of_event.argv not in (None, of_proc.argv) and not of_event.argv_truncated:
        # As it was when it was judged is not known: it is judged again before anybody acts.
        kept["exec_mark"] = None
    if of_event.cgroup is not None and not _says_where(of_proc.cgroup):
        kept["cgroup"] = of_event.cgroup
    return replace(of_proc, **kept)


def program_and_place(process: Process) -> str:
    """Its binary and the innermost owner of its control group, for telling of a crowd at once."""
    exe, placement = process.exe, process.cgroup
    where = "the host"
    if placement is not None and placement.chain:
        where = placement.chain[-1]
    return f"{process.comm if exe is None else exe.path} in {where}"


def _says_where(placement: CgroupPlacement | None) -> bool:
    """Whether /proc's paths begin at the root: from a cgroup namespace of our own they do not."""
    if placement is None or placement.private_namespace:
        return False
    return not any(path.startswith("/..") for path in placement.paths)


class Identities:
    """Processes by identity, remembered while they may be needed again; parents are shared."""

    def __init__(self, host: Host, *, boot_time_ns: int | None, same_pids: bool) -> None:
        """``same_pids``: /proc numbers processes as the kernel's events do."""
        self._host = host
        self._boot_time_ns = boot_time_ns
        self._same_pids = same_pids
        self._known: OrderedDict[Key, Process] = OrderedDict()
        self._lineages: OrderedDict[tuple[Key, int | None], list[Process]] = OrderedDict()
        self._binaries: Binaries | None = None
        self._binaries_until = 0.0
        self._users: dict[int, str] = {}
        self.vanished = 0
        """Processes that were gone before /proc was read: known from their events alone."""

    def process(self, identity: ProcessIdentity) -> Process:
        """The process of an event. Errors: none; what cannot be read is in ``unread``."""
        key = (identity.pid, identity.start_time_ticks)
        known = self._known.get(key)
        if known is not None and _is_same_program(known, identity):
            self._known.move_to_end(key)
            return known
        found = of_kernel(identity, self._boot_time_ns)
        if self._same_pids:
            read = self._read([identity.pid])
            now = read.get(identity.pid)
            if now is not None and now.start_time_ticks == identity.start_time_ticks:
                found = merged(found, now)
            else:
                self.vanished += 1
                found = self._named(found)
        self._keep(key, found)
        return found

    def named(self, key: Key) -> Process | None:
        """A process of which no event told, as it is now; None when it is not there."""
        known = self._known.get(key)
        if known is None:
            known = self._read([key[0]]).get(key[0])
            if known is None or known.start_time_ticks != key[1]:
                return None
            self._keep(key, known)
        return known

    def know_users(self, users: Mapping[int, str]) -> None:
        """Names that a judgement asked a name service for; here nobody waits for one."""
        self._users.update(users)

    def _now(self) -> Binaries:
        """What is known of names, mounts and binaries; read anew every few seconds."""
        now = time.monotonic()
        if self._binaries is None or now >= self._binaries_until:
            names = read_names(self._host)
            names.from_files_only = True
            names.users.update(self._users)
            self._binaries = new_binaries(self._host, names)
            self._binaries_until = now + BINARIES_SECONDS
        return self._binaries

    def _named(self, process: Process) -> Process:
        names = self._now().names
        login = process.loginuid if process.loginuid != LOGINUID_UNSET else None
        users = names.users
        return replace(
            process,
            user=None if process.uid is None else users.get(process.uid),
            group=None if process.gid is None else names.groups.get(process.gid),
            login_user=None if login is None else users.get(login),
        )

    def is_alive(self, key: Key) -> bool:
        """Whether that process is still there; True where /proc numbers processes otherwise."""
        if not self._same_pids:
            return True
        line = stat_lines.read_one(self._host, key[0])
        return line is not None and line.start_time_ticks == key[1]

    def init(self) -> Process | None:
        """Process 1, whose namespaces are the host's, as far as it may be read."""
        return self._read([1], role="ancestor").get(1)

    def lineage(self, process: Process) -> list[Process]:
        """Its parents from the nearest up, as far as they were there when it was first seen.

        A runtime that makes a container ends before anybody has told whose the container is.
        """
        exe = process.exe
        key = (process.pid, process.start_time_ticks), None if exe is None else exe.inode
        known = self._lineages.get(key)
        if known is not None:
            self._lineages.move_to_end(key)
            return known
        found: list[Process] = []
        if not self._same_pids:
            return found
        pid, seen = process.ppid, {process.pid}
        if self._parent(pid) is None:
            line = stat_lines.read_one(self._host, process.pid)
            if line is not None and line.start_time_ticks == process.start_time_ticks:
                pid = line.ppid
        while pid > 0 and pid not in seen and len(found) < ANCESTORS_LIMIT:
            seen.add(pid)
            parent = self._parent(pid)
            if parent is None:
                break
            found.append(parent)
            pid = parent.ppid
        self._lineages[key] = found
        if len(self._lineages) > LINEAGES_LIMIT:
            self._lineages.popitem(last=False)
        return found

    def _parent(self, pid: int) -> Process | None:
        line = stat_lines.read_one(self._host, pid)
        if line is None:
            return None
        key = (pid, line.start_time_ticks)
        known = self._known.get(key)
        if known is not None and known.comm == line.comm and known.ppid == line.ppid:
            self._known.move_to_end(key)
            return known
        process = self._read([pid], role="ancestor").get(pid)
        if process is not None:
            self._keep(key, process)
        return process

    def _read(self, pids: Iterable[int], role: str = "subject") -> dict[int, Process]:
        try:
            facts = list(details.read(self._host, Seen(), pids, role=role, binaries=self._now()))
        except GpuwardenError:
            return {}
        return {fact.pid: fact for fact in facts if isinstance(fact, Process)}

    def _keep(self, key: Key, process: Process) -> None:
        self._known[key] = process
        if len(self._known) > KNOWN_LIMIT:
            self._known.popitem(last=False)

    def forget(self, key: Key) -> None:
        """A process that has ended, or became another program."""
        self._known.pop(key, None)


def _is_same_program(process: Process, identity: ProcessIdentity) -> bool:
    exe = process.exe
    if identity.exe_inode is None:
        return True  # known from a descriptor alone, which tells of no program
    if exe is None:
        return False
    # One binary can be many programs: an interpreter, a shell that becomes another of its tools.
    told = identity.argv is not None and not identity.argv_truncated
    if told and process.argv != identity.argv:
        return False
    return exe.inode == identity.exe_inode and process.uid == identity.uid


def host_mounts(host: Host) -> int | None:
    """The mount namespace of the host's init: its own, or kthreadd's, or as a last resort ours."""
    found = read_namespace(host, 1, "mnt")
    if found is None:
        line = stat_lines.read_one(host, 2)
        if line is not None and stat_lines.is_kernel_thread(line):
            found = read_namespace(host, 2, "mnt")
    return found if found is not None else read_namespace(host, "self", "mnt")
