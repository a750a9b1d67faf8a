"""Which control group is denied for a process: its container's own, else its own innermost one.

Never a group that holds more than that: a root, a slice, what pods, jobs or logins are kept in, a
group with gpuwarden or its shell in it, or with somebody on a GPU whose verdict grants no denial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from gpuwarden.enforcement import located_by_process
from gpuwarden.errors import GpuwardenError, Unavailable, UsageError
from gpuwarden.finding import Row
from gpuwarden.host import Host
from gpuwarden.pattern import pattern
from gpuwarden.probes.groups import Group, groups_of
from gpuwarden.respond import freezer_group
from gpuwarden.respond.allowed import grant
from gpuwarden.respond.freezer_group import FreezerGroup
from gpuwarden.respond.step import Target
from gpuwarden.respond.untouchable import Untouchable
from gpuwarden.sensors.process import stat_lines

RowsOf = Callable[[Target], Sequence[Row]]
NAME_LIMIT = 200

_MANY_OWNERS = pattern(
    r".*\.slice|kubepods.*|pod[0-9a-f_-]{8,}|docker|containerd|libpod_parent|lxc|lxc\.payload|"
    r"machine|podman|crio|slurm|slurm_[^/]*|slurmstepd\.scope|uid_[0-9]+|system|user|garden|"
    r"user@[0-9]+\.service|init\.scope|init"
)
"""Names of groups that several owners' processes are kept in or below."""


class DeniedGroup(Struct, frozen=True):
    """What is denied: groups that hold the same processes, in one or several hierarchies."""

    groups: tuple[Group, ...]
    name: str
    """For a person: ``container 0123456789ab`` or the group's path."""
    others: tuple[str, ...] = ()
    """The other processes in it."""


def choose(
    host: Host, target: Target, untouchable: Untouchable, rows: Sequence[Row]
) -> DeniedGroup:
    """The group to be denied for a target.

    ``rows``: of everybody on the node's GPUs. Errors: UsageError where none may be denied, with
    the reason; Unavailable, Denied where that cannot be seen.
    """
    if target.identity is None:
        raise UsageError("there is no process whose control group it would be")
    pid = target.identity.pid
    groups = groups_of(pid, host, with_parents=True)
    process = target.process
    placement = process.cgroup if process is not None else None
    container = target.container.id if target.container is not None else None
    container = container or (placement.container_id if placement is not None else None)
    if container is not None:
        chosen = _of_container(host, pid, container, groups)
        name = f"container {container[:12]}"
    else:
        chosen = _innermost(pid, host)
        name = chosen[0].path[:NAME_LIMIT]
    others: dict[int, str] = {}
    for group in chosen:
        for one in _members(group):
            if one != pid:
                others[one] = _named(untouchable, one)
            _object(group, one, host, target, untouchable, rows=rows)
    return DeniedGroup(chosen, name, tuple(others.values()))


def _of_container(
    host: Host, pid: int, container: str, groups: Sequence[Group]
) -> tuple[Group, ...]:
    located = [one for one in located_by_process(host, pid) if one.container_id == container]
    keys = {key for one in located for key in one.groups}
    found = tuple(group for group in groups if group.key in keys)
    if not found:
        raise UsageError(f"the control group of container {container[:12]} is not in sight here")
    return found


def _innermost(pid: int, host: Host) -> tuple[Group, ...]:
    groups = sorted(groups_of(pid, host), key=lambda group: group.key.hierarchy != 0)
    if not groups:
        raise UsageError("it is in the root group only, which holds every process of the machine")
    # Version 2's comes first; where that one is kept for a crowd, version 1 may have its own.
    refused = ""
    for group in groups:
        last = group.path.rsplit("/", 1)[-1]
        if _MANY_OWNERS.fullmatch(last):
            refused = refused or f"the group {group.path[:NAME_LIMIT]} is kept for many"
            continue
        return (group,)
    raise UsageError(refused)


def _members(group: Group) -> list[int]:
    version: Literal[1, 2] = 2 if group.key.hierarchy == 0 else 1
    return freezer_group.members(FreezerGroup(group.directory, version, "leaf", group.path))


def _object(
    group: Group,
    pid: int,
    host: Host,
    target: Target,
    untouchable: Untouchable,
    *,
    rows: Sequence[Row],
) -> None:
    """Errors: UsageError for a process that must not be denied together with the target."""
    where = f"the group {group.path[:NAME_LIMIT]} holds {_named(untouchable, pid)}"
    if reason := untouchable.reason(pid):
        raise UsageError(f"{where}: {reason}")
    if target.identity is not None and pid == target.identity.pid:
        return
    line = stat_lines.read_one(host, pid)
    start = line.start_time_ticks if line is not None else None
    own = [one for one in rows if one.pid == pid and one.start_time_ticks in (None, start)]
    for row in own:
        if row.silenced_by is not None:
            raise UsageError(f"{where}, which the policy excepts")
        if grant(row.verdict, "deny") is None:
            raise UsageError(f"{where}, whose verdict is {row.verdict}")
    if not own and _holds_an_accelerator(host, target, pid):
        raise UsageError(f"{where}, which came to an accelerator since and was not judged")


def _holds_an_accelerator(host: Host, target: Target, pid: int) -> bool:
    numbers = {(node.major, node.minor) for node in target.snapshot.device_nodes}
    try:
        devices = host.open_files(f"/proc/{pid}/fd").devices
    except Unavailable:
        return False
    except GpuwardenError as error:
        raise UsageError(f"pid {pid} of its group cannot be looked into: {error}") from error
    return any(number in numbers for _, number in devices)


def _named(untouchable: Untouchable, pid: int) -> str:
    line = untouchable.table.get(pid)
    return f"pid {pid} ({line.comm})" if line is not None else f"pid {pid}"
