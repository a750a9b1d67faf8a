"""What starts programs by itself on a machine: cron, units, start-up files, supervisord, runtimes.

The places are read in their own files; here is their order, whose home directories are looked at,
and what containers' runtimes restart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import LINK_LIMIT, Host
from gpuwarden.model import Container, Gap, PersistenceEntry
from gpuwarden.sensors.autostarts import cron, startup_files, supervisord, systemd_units
from gpuwarden.sensors.autostarts.cron import parse_crontab
from gpuwarden.sensors.autostarts.entry_selection import Selection
from gpuwarden.sensors.autostarts.place_reader import (
    COMMAND_LIMIT,
    COMMANDS_LIMIT,
    Home,
    PlaceReader,
)
from gpuwarden.sensors.autostarts.program_files import ProgramFiles
from gpuwarden.sensors.autostarts.startup_files import parse_preload, parse_shell_profile
from gpuwarden.sensors.autostarts.supervisord import parse_supervisord
from gpuwarden.sensors.autostarts.systemd_units import parse_unit
from gpuwarden.sensors.seen import Seen

__all__ = [
    "from_containers",
    "parse_crontab",
    "parse_preload",
    "parse_shell_profile",
    "parse_supervisord",
    "parse_unit",
    "read",
    "within_budget",
]

HOMES_LIMIT = 200
ROOT_TEXT_LIMIT = 1 << 20
USER_TEXT_LIMIT = 1 << 16
"""Characters of entries kept an owner."""
_NO_HOMES = ("/", "/nonexistent", "/bin", "/sbin", "/dev", "/dev/null", "/proc", "/sys")
_MOUNTS = ("/proc/1/mounts", "/proc/self/mounts")
# Reading these can wait for a server without end; stat on an automount point mounts it.
_NETWORK_TYPES = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs ceph lustre gpfs beegfs glusterfs ncpfs orangefs pvfs2 "
    "autofs wekafs panfs".split()
)
_NO_RESTART = frozenset(("", "no", "never", "none"))


def read(host: Host, seen: Seen) -> Iterator[PersistenceEntry | Gap]:
    """Yields the entries worth keeping of each place, then what could not be seen.

    All of cron, at, rc.local, ld.so.preload and supervisord; units that were added locally; and of
    packaged units, scripts and profiles those that name a process in ``seen`` or stand out in form.
    Each with the files that its programs lead to.
    """
    reader = PlaceReader(host)
    selection = Selection(seen.processes.values())
    mounts = _network_mounts(reader)
    homes = _homes(reader, mounts)
    places = (
        cron.read(reader, selection),
        systemd_units.read(reader, selection, homes),
        startup_files.read(reader, selection, homes),
        supervisord.read(reader, seen),
        from_containers(seen.containers),
    )
    files = ProgramFiles(
        host,
        {home.user: home.path for home in reversed(homes)},
        lambda path: mounts is None or _is_remote(host, path, mounts),
    )
    for fact in within_budget(chain.from_iterable(places)):
        yield files.found(fact) if isinstance(fact, PersistenceEntry) else fact
    if files.left_out:
        reader.gap(
            "programs of autostart entries",
            f"too many to look all of them up: {files.left_out} entries have more",
        )
    yield from reader.gaps()


def within_budget(facts: Iterable[PersistenceEntry | Gap]) -> Iterator[PersistenceEntry | Gap]:
    """Passes entries on until an owner's text is used up, then says how many were not kept.

    What one user writes into autostarts must not cost the judgement minutes, nor the entries of
    others their place.
    """
    spent: dict[int, int] = defaultdict(int)
    left_out: dict[int, int] = defaultdict(int)
    for fact in facts:
        if isinstance(fact, PersistenceEntry):
            owner = fact.owner_uid or 0
            texts = (fact.text, fact.search_path or "", fact.directory or "", *fact.commands)
            size = sum(map(len, texts))
            if spent[owner] + size > (ROOT_TEXT_LIMIT if owner == 0 else USER_TEXT_LIMIT):
                left_out[owner] += 1
                continue
            spent[owner] += size
        yield fact
    for owner, count in left_out.items():
        yield Gap(
            sensor="persistence",
            what=f"autostart entries of uid {owner}",
            reason="they hold more text than is looked through; these were not kept",
            remedy="look at what that user starts by itself: nobody needs that much",
            count=count,
        )


def from_containers(containers: Iterable[Container]) -> Iterator[PersistenceEntry]:
    """What runtimes restart and controllers re-create, one entry each."""
    for container in containers:
        path = f"{container.runtime}:{container.id}"
        commands = tuple(part[:COMMAND_LIMIT] for part in container.entrypoint[:COMMANDS_LIMIT])
        policy = container.restart_policy
        if policy is not None and policy.partition(":")[0].lower() not in _NO_RESTART:
            yield PersistenceEntry(
                kind="container-restart",
                path=path,
                text=f"restart policy {policy}",
                commands=(" ".join(commands)[:COMMAND_LIMIT],) if commands else (),
                unit=container.name,
                enabled=True,
            )
        if container.pod_owner:
            yield PersistenceEntry(
                kind="pod-controller",
                path=path,
                text=f"{container.pod_namespace or '?'}/{container.pod_owner}",
                commands=(" ".join(commands)[:COMMAND_LIMIT],) if commands else (),
                unit=container.pod_owner,
                enabled=True,
            )


# -------------------------------------------------------------------- home directories


def parse_homes(passwd: str) -> list[Home]:
    """The distinct home directories of passwd(5), in the file's order."""
    homes: dict[str, Home] = {}
    for line in passwd.split("\n"):
        fields = line.split(":")
        if len(fields) < 7 or not fields[5].startswith("/"):
            continue
        path = fields[5].rstrip("/") or "/"
        if path not in _NO_HOMES and "\0" not in path:
            homes.setdefault(path, Home(fields[0][:256], path))
    return list(homes.values())


def parse_network_mounts(mounts: str) -> frozenset[str]:
    """The mount points of /proc/<pid>/mounts whose files come from a server or a FUSE daemon."""
    points: set[str] = set()
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        if fields[2] in _NETWORK_TYPES or fields[2].partition(".")[0] in ("fuse", "fuseblk"):
            points.add(fields[1].replace("\\040", " ").replace("\\011", "\t"))
    return frozenset(points)


def _homes(reader: PlaceReader, mounts: frozenset[str] | None) -> list[Home]:
    passwd = reader.file("/etc/passwd")
    homes = parse_homes(passwd.text) if passwd else []
    homes.sort(key=lambda home: home.path != "/root")
    if mounts is None:
        reader.gap("home directories", "mounts unknown, so they were not entered")
        return []
    if "/home" not in mounts:
        known = {home.path for home in homes}
        # Users of a directory service have a home here and no line in the password file.
        homes += [
            Home(name, f"/home/{name}")
            for name in _directories(reader, "/home")
            if f"/home/{name}" not in known
        ]
    near: list[Home] = []
    for home in homes:
        if len(near) >= HOMES_LIMIT:
            reader.gap("home directories", f"only the first {HOMES_LIMIT} were looked at")
            break
        if _is_remote(reader.host, home.path, mounts):
            reader.gap("home directories", "on a network or FUSE file system, not entered")
        else:
            near.append(Home(home.user, home.path, reader.small_listing(home.path)))
    return near


def _directories(reader: PlaceReader, path: str) -> list[str]:
    return [name for name in reader.names(path) if name != "lost+found"]


def _network_mounts(reader: PlaceReader) -> frozenset[str] | None:
    for path in _MOUNTS:
        try:
            return parse_network_mounts(reader.host.read_text(path))
        except GpuwardenError:
            continue
    # A recorded tree without /proc is plain files; a live host without it cannot be judged.
    return frozenset() if not reader.host.is_local else None


def _is_remote(host: Host, path: str, mounts: frozenset[str]) -> bool:
    """Whether ``path`` lies on one of ``mounts``, its links followed without touching them."""
    if not mounts:
        return False
    pending = [part for part in path.split("/") if part and part != "."][::-1]
    here = ""
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            here = here.rpartition("/")[0]
            continue
        here = f"{here}/{part}"
        if here in mounts:
            return True
        try:
            target = host.read_link(here)
        except GpuwardenError:
            continue
        links += 1
        if links > LINK_LIMIT:
            return True
        here = "" if target.startswith("/") else here.rpartition("/")[0]
        pending.extend([part for part in target.split("/") if part and part != "."][::-1])
    return False
