"""The steps ``deny`` and ``allow``: further opens of accelerators by a process's control group.

The daemon is asked, so that it lasts while the daemon runs and comes back with it; without one the
probe is loaded here and pinned. Only accelerators' device numbers are ever denied.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from msgspec import Struct

from gpuwarden import control
from gpuwarden.control import GroupName, Request
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.groups import groups_of
from gpuwarden.respond import control_client, pinned_denials
from gpuwarden.respond.denied_group import DeniedGroup, RowsOf, choose
from gpuwarden.respond.step import Outcome, Step, Target, Tell
from gpuwarden.respond.untouchable import Untouchable

OPEN_STAYS = "descriptors and mappings that are open already stay open and usable"
SHOWN = 8


class DeniedNow(Struct, frozen=True):
    """A group that is denied, by whom, and as what."""

    group: GroupKey
    by: str
    """``daemon``, or the directory of its pins."""
    name: str = ""
    reason: str = ""
    since_ns: int | None = None


def denied_now(control_socket: str) -> tuple[list[DeniedNow], list[str]]:
    """What is denied on request, and what of that could not be asked. No errors."""
    found: list[DeniedNow] = []
    troubles: list[str] = []
    try:
        answer = control_client.ask(control_socket, Request(action="status"))
        for one in answer.denied if answer is not None else ():
            key = GroupKey(one.group.hierarchy, one.group.id)
            found.append(DeniedNow(key, "daemon", one.name, one.reason, one.since_ns))
        if answer is not None and not answer.done:
            troubles.append(answer.error)
    except GpuwardenError as error:
        troubles.append(str(error))
    try:
        found += [DeniedNow(one.group, one.directory) for one in pinned_denials.denied()]
    except GpuwardenError as error:
        troubles.append(str(error))
    return found, troubles


def lift(
    groups: Sequence[GroupKey], control_socket: str, *, name: str = ""
) -> tuple[list[str], list[str]]:
    """Takes denials of groups back, the daemon's and pinned ones: (lines, what stays and why)."""
    lines, stays = [], []
    found, troubles = denied_now(control_socket)
    mine = [one for one in found if one.group in set(groups)]
    by_daemon = [one.group for one in mine if one.by == "daemon"]
    if by_daemon:
        names = tuple(GroupName(one.hierarchy, one.id) for one in by_daemon)
        request = Request(action="allow", groups=names, name=name)
        try:
            answer = control_client.ask(control_socket, request)
        except GpuwardenError as error:
            stays.append(str(error))
        else:
            if answer is None:
                stays.append("the daemon has ended meanwhile; it denies again when it starts")
            elif not answer.done:
                stays.append(answer.error)
            else:
                lines += [f"the daemon allows group {shown(one)} again" for one in by_daemon]
    pinned = [one.group for one in mine if one.by != "daemon"]
    if pinned:
        try:
            ended = pinned_denials.allow(pinned)
            lines += [f"group {shown(one)} is allowed again: its pins are removed" for one in ended]
        except GpuwardenError as error:
            stays.append(str(error))
    if not mine:
        stays += troubles or ["nothing is denied on request to " + ", ".join(map(shown, groups))]
    return lines, stays


def shown(group: GroupKey) -> str:
    """``HIERARCHY:NUMBER``, as ``--allow`` takes it."""
    return f"{group.hierarchy}:{group.id}"


def allow_command(groups: Sequence[GroupKey], state_directory: str) -> str:
    """The command that takes a denial back, whatever became of the process."""
    words = ["gpuwarden", "respond"]
    if control.socket_of(state_directory) != control.SOCKET:
        words += ["--state", state_directory]
    return shlex.join([*words, "--allow", ",".join(map(shown, groups))])


class Deny:
    """The step ``deny``."""

    def __init__(
        self,
        host: Host,
        rows_of: RowsOf,
        *,
        control_socket: str,
        state_directory: str,
        reason: str = "",
    ) -> None:
        self._host = host
        self._rows_of = rows_of
        self._socket = control_socket
        self._state_directory = state_directory
        self._reason = reason

    def step(self, target: Target) -> Step | None:
        """The step for its control group; None without a process."""
        if target.identity is None:
            return None
        title = "deny it further opens of accelerators"
        try:
            chosen = self._choose(target)
        except GpuwardenError as error:
            return Step(
                name="deny",
                power="deny",
                title=title,
                changes="opens of accelerators by its control group fail",
                refused=str(error),
            )
        keys = [one.key for one in chosen.groups]
        found, _ = denied_now(self._socket)
        is_denied = set(keys) <= {one.group for one in found}
        return Step(
            name="deny",
            power="deny",
            title=title,
            changes=f"opens of accelerators by {chosen.name} and the groups below it fail; "
            f"{OPEN_STAYS}",
            hurts=_list(chosen.others),
            undo=allow_command(keys, self._state_directory),
            refused=f"{chosen.name} is denied already" if is_denied else "",
        )

    def _choose(self, target: Target) -> DeniedGroup:
        untouchable = Untouchable(self._host, socket_path=self._socket)
        return choose(self._host, target, untouchable, self._rows_of(target))

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Denies it now. Errors: GpuwardenError."""
        chosen = self._choose(target)
        keys = [one.key for one in chosen.groups]
        undo = allow_command(keys, self._state_directory)
        request = Request(
            action="deny",
            groups=tuple(GroupName(one.hierarchy, one.id) for one in keys),
            name=chosen.name,
            reason=self._reason or f"verdict {target.verdict}, finding {target.finding_id or '-'}",
        )
        answer = control_client.ask(self._socket, request)
        if answer is None:
            tell("no daemon listens here: the probe is loaded and pinned by this command")
            where = pinned_denials.deny(self._host, keys)
            lasts = f"pinned in {where}: it lasts until it is taken back or the machine restarts"
        elif not answer.done:
            raise Unavailable(f"the daemon did not deny it: {answer.error}")
        else:
            lasts = (
                "by the daemon: it lasts while that runs and comes back when that starts, until "
                "it is taken back, the group ends or the machine restarts"
            )
        numbers = ", ".join(map(shown, keys))
        return Outcome(
            step="deny",
            done=True,
            lines=(f"{chosen.name} (group {numbers}) is denied accelerators, {lasts}", OPEN_STAYS),
            undo=undo,
        )


class Allow:
    """The step ``allow``: undoes ``deny``."""

    def __init__(self, host: Host, *, control_socket: str) -> None:
        self._host = host
        self._socket = control_socket

    def step(self, target: Target) -> Step | None:
        """The step; None where nothing of the process's groups is denied on request."""
        keys = self._denied(target)
        if not keys:
            return None
        return Step(
            name="allow",
            power="evidence",
            title="allow it to open accelerators again",
            changes=f"the denial of group {', '.join(map(shown, keys))} ends",
            undo="--do deny",
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Takes the denial back. No errors: what stays is in the outcome."""
        lines, stays = lift(self._denied(target), self._socket)
        return Outcome(step="allow", done=bool(lines), lines=(*lines, *stays), complete=not stays)

    def _denied(self, target: Target) -> list[GroupKey]:
        if target.identity is None:
            return []
        mine = {one.key for one in groups_of(target.identity.pid, self._host, with_parents=True)}
        found, _ = denied_now(self._socket)
        return list(dict.fromkeys(one.group for one in found if one.group in mine))


def _list(names: Sequence[str]) -> tuple[str, ...]:
    more = len(names) - SHOWN
    shown_ones = tuple(f"{name}: denied with it" for name in names[:SHOWN])
    return (*shown_ones, f"{more} more processes: denied with it") if more > 0 else shown_ones
