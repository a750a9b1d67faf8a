"""Freezing a process and letting it go on: its container's control group, else it alone.

A frozen group costs its processes nothing but time and they cannot tell. A single process is
stopped by SIGSTOP instead where the group holds somebody who must go on; its parent is told.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.finding import Row
from gpuwarden.host import Host
from gpuwarden.outputs.words import escape
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond import freezer_group
from gpuwarden.respond.allowed import grant
from gpuwarden.respond.freezer_group import FreezerGroup
from gpuwarden.respond.identity import HeldProcess, hold
from gpuwarden.respond.step import Identity, Outcome, Step, Target, Tell
from gpuwarden.respond.threads import is_stopped, moving
from gpuwarden.respond.untouchable import Untouchable, named
from gpuwarden.sensors.process import stat_lines

CONFIRM_SECONDS: Final = 10.0
"""How long it is waited for everything to come to rest."""
_PAUSE_SECONDS: Final = 0.02
_NAMED: Final = 16
_QUEUED: Final = (
    "what it has queued on a GPU runs to its end there, and its GPU memory stays its own"
)


def thaw_command(pid: int) -> str:
    """The command that undoes a freeze."""
    return f"gpuwarden respond {pid} --do thaw"


class Freeze:
    """The step ``freeze``. ``rows_of`` judges the target's snapshot: whose verdict grants what."""

    def __init__(
        self,
        host: Host,
        rows_of: Callable[[Target], Sequence[Row]],
        *,
        confirm_seconds: float = CONFIRM_SECONDS,
        counts: ExecCounts | None = None,
    ) -> None:
        self._host = host
        self._rows_of = rows_of
        self._confirm_seconds = confirm_seconds
        self._counts = counts

    def step(self, target: Target) -> Step | None:
        """The step, by the group if one fits and else by SIGSTOP; None without a process."""
        if target.identity is None:
            return None
        pid = target.identity.pid
        title, undo = "Freeze it", thaw_command(pid)
        try:
            group, why, mates = self._choose(target, Untouchable(self._host))
            if group is not None:
                return Step(
                    name="freeze",
                    power="freeze",
                    title=title,
                    changes=(
                        f"everything in {_named(group)} stands still ({_way(group)}); {_QUEUED}"
                    ),
                    hurts=tuple(_list(mates, "stands still with it")),
                    undo=undo,
                )
            return Step(
                name="freeze",
                power="freeze",
                title=title,
                changes=(
                    f"process {pid} alone is stopped (SIGSTOP), all its threads; its parent is "
                    f"told and can continue it; {_QUEUED}. Its group goes on: {why}"
                ),
                hurts=tuple(_list(_descendants(self._host, pid), "goes on: a child of it")),
                undo=undo,
                refused=Untouchable(self._host).reason(pid),
            )
        except GpuwardenError as error:
            return Step(
                name="freeze",
                power="freeze",
                title=title,
                changes="it stands still",
                undo=undo,
                refused=str(error),
            )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Freezes it and waits until it is at rest.

        Errors: Changed when it is another process by now; Denied, Unavailable.
        """
        identity = _identity(target)
        untouchable = Untouchable(self._host)
        if why := untouchable.reason(identity.pid):
            return Outcome(step="freeze", done=False, lines=(f"not frozen: it is {why}",))
        with hold(self._host, identity, self._counts) as held:
            if held.weaker:
                tell(held.weaker)
            group, why, _ = self._choose(target, untouchable)
            if group is not None:
                outcome = self._freeze_group(target, held, group, tell)
                if outcome is not None:
                    return outcome
                why = "somebody who must go on came into it meanwhile"
            return self._stop(held, why, tell)

    def _choose(
        self, target: Target, untouchable: Untouchable
    ) -> tuple[FreezerGroup | None, str, list[str]]:
        """(the group to freeze, else why none; the others in it)."""
        pid = _identity(target).pid
        why = "it has none of its own"
        for group in freezer_group.groups_of(self._host, pid, target.container):
            try:
                inside = freezer_group.members(group)
            except GpuwardenError as error:
                why = str(error)
                continue
            objection = self._objection(group, inside, target, untouchable)
            if not objection:
                others = [one for one in inside if one != pid]
                return group, "", [named(untouchable, one) for one in others]
            why = objection
        return None, why, []

    def _objection(
        self, group: FreezerGroup, inside: list[int], target: Target, untouchable: Untouchable
    ) -> str:
        """Why a group is not frozen; empty when nobody is in it who must go on."""
        pid = _identity(target).pid
        if pid not in inside:
            return f"{_named(group)} does not hold it"
        for one in inside:
            reason = untouchable.reason(one)
            if reason:
                return f"{_named(group)} holds {named(untouchable, one)}: {reason}"
        if group.kind == "leaf":
            family = {pid, *untouchable.below(pid)}
            stranger = next((one for one in inside if one not in family), None)
            if stranger is not None:
                return f"{_named(group)} holds {named(untouchable, stranger)} too"
        rows = self._rows_of(target)
        for one in inside:
            if one != pid and (innocent := _innocent(self._host, target, rows, one)):
                return f"{_named(group)} holds {named(untouchable, one)}: {innocent}"
        return ""

    def _freeze_group(
        self, target: Target, held: HeldProcess, group: FreezerGroup, tell: Tell
    ) -> Outcome | None:
        """None when it was let go on again for somebody who came into it."""
        held.check()
        freezer_group.switch(group, frozen=True)
        try:
            tell(f"{_named(group)} was told to freeze ({_way(group)})")
            at_rest = _wait(lambda: freezer_group.is_frozen(group), self._confirm_seconds)
            held.check()
            inside = freezer_group.members(group)
            if self._objection(group, inside, target, Untouchable(self._host)):
                freezer_group.switch(group, frozen=False)
                return None
        except BaseException:
            # Who has executed another program, or left, is not frozen for another's deeds.
            freezer_group.switch(group, frozen=False)
            raise
        lines = [f"{_named(group)} is {'frozen' if at_rest else 'told to freeze'}: {_QUEUED}"]
        lines += [f"frozen with it: {len(inside) - 1} more processes"] if len(inside) > 1 else []
        if not at_rest:
            lines.append(
                f"it is not at rest after {self._confirm_seconds:g} s: "
                + ", ".join(moving(self._host, inside))
            )
        return Outcome(
            step="freeze",
            done=True,
            lines=tuple(lines),
            undo=thaw_command(held.pid),
            complete=at_rest,
        )

    def _stop(self, held: HeldProcess, why: str, tell: Tell) -> Outcome:
        pid = held.pid
        held.send(signal.SIGSTOP)
        tell(f"SIGSTOP sent to process {pid}")
        at_rest = _wait(lambda: not moving(self._host, [pid]), self._confirm_seconds)
        lines = [
            f"process {pid} is {'stopped' if at_rest else 'told to stop'} by SIGSTOP, it alone; of "
            f"its group: {why}",
            "its parent is told of it and can continue it; " + _QUEUED,
        ]
        if not at_rest:
            lines.append(
                f"it is not at rest after {self._confirm_seconds:g} s: "
                + ", ".join(moving(self._host, [pid]))
            )
        lines += _list(_descendants(self._host, pid), "goes on: a child of it")
        return Outcome(
            step="freeze", done=True, lines=tuple(lines), undo=thaw_command(pid), complete=at_rest
        )


class Thaw:
    """The step ``thaw``: undoes ``freeze``, by whichever of its two ways it was frozen."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def step(self, target: Target) -> Step | None:
        """The step; None for a process that is neither frozen nor stopped."""
        if target.identity is None:
            return None
        pid = target.identity.pid
        group = freezer_group.switched_of(self._host, pid, target.container)
        stopped = is_stopped(self._host, pid)
        if group is None and not stopped:
            return None
        ways = [f"{_named(group)} goes on ({_way(group)})"] if group is not None else []
        ways += [f"process {pid} goes on (SIGCONT)"] if stopped else []
        return Step(
            name="thaw",
            power="evidence",
            title="Let it go on",
            changes="; ".join(ways),
            undo=f"gpuwarden respond {pid} --do freeze",
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Lets it go on. Errors: Changed; Denied, Unavailable."""
        identity = _identity(target)
        lines = []
        # It is given back what was taken from it, whatever it has become.
        with hold(self._host, identity, any_exec=True) as held:
            group = freezer_group.switched_of(self._host, held.pid, target.container)
            if group is not None:
                freezer_group.switch(group, frozen=False)
                lines.append(f"{_named(group)} was told to go on")
                if not _wait(lambda: not freezer_group.is_frozen(group), CONFIRM_SECONDS):
                    lines.append("a group above it is frozen: it stands still with that one")
            if is_stopped(self._host, held.pid):
                held.send(signal.SIGCONT)
                lines.append(f"SIGCONT sent to process {held.pid}")
        for line in lines:
            tell(line)
        moving = "a group above" not in " ".join(lines)
        return Outcome(
            step="thaw",
            done=bool(lines),
            lines=tuple(lines) or ("it is neither frozen nor stopped",),
            undo=f"gpuwarden respond {identity.pid} --do freeze",
            complete=moving,
        )


# ---------------------------------------------------------------- who is innocent


def _innocent(host: Host, target: Target, rows: Sequence[Row], pid: int) -> str:
    """Why a process in the group must go on; empty where its verdict grants a freeze, or it is on
    no GPU at all.
    """
    line = stat_lines.read_one(host, pid)
    start = line.start_time_ticks if line is not None else None
    own = [row for row in rows if row.pid == pid and row.start_time_ticks in (None, start)]
    for row in own:
        if row.silenced_by is not None or grant(row.verdict, "freeze") is None:
            return f"its verdict is {row.verdict}"
    if own:
        return ""
    numbers = {(node.major, node.minor) for node in target.snapshot.device_nodes}
    try:
        devices = host.open_files(f"/proc/{pid}/fd").devices
    except GpuwardenError as error:
        return "" if isinstance(error, Unavailable) else f"it cannot be looked into: {error}"
    if any(number in numbers for _, number in devices):
        return "it has come to a GPU since and was not judged"
    return ""


# ---------------------------------------------------------------- words and waiting


def _identity(target: Target) -> Identity:
    if target.identity is None:
        raise Unavailable("a GPU alone cannot be frozen, and nothing on it is known")
    return target.identity


def _named(group: FreezerGroup) -> str:
    kinds = {"container": "container", "job": "the job's group", "leaf": "the group"}
    return f"{kinds[group.kind]} {escape(group.name)[:200]}"


def _way(group: FreezerGroup) -> str:
    return f"cgroup freezer, version {group.version}"


def _list(names: Sequence[str], what: str) -> Iterator[str]:
    yield from (f"{name} {what}" for name in names[:_NAMED])
    if len(names) > _NAMED:
        yield f"{len(names) - _NAMED} more processes: each {what}"


def _descendants(host: Host, pid: int) -> list[str]:
    untouchable = Untouchable(host)
    return [named(untouchable, one) for one in untouchable.below(pid)]


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
