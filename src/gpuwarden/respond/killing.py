"""Ending one process, and looking whether that brought what it should.

Everything goes through a pidfd that was opened before the process was compared. SIGTERM comes
first, SIGKILL after a stated patience; what is frozen or stopped gets SIGKILL at once, since it
would have to run to hear SIGTERM. Its children are not ended: each has a verdict of its own.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from msgspec import Struct, field

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Process
from gpuwarden.outputs.words import escape
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond import freezer_group, gpu_use, returning
from gpuwarden.respond.gpu_use import Fall, GpuUse, Look
from gpuwarden.respond.identity import HeldProcess, hold
from gpuwarden.respond.returning import Watcher
from gpuwarden.respond.step import Outcome, Step, Target, Tell
from gpuwarden.respond.threads import at_rest, is_stopped, moving
from gpuwarden.respond.untouchable import Untouchable, named
from gpuwarden.sensors.process import stat_lines

PATIENCE_SECONDS: Final = 10.0
"""Between SIGTERM and SIGKILL."""
END_SECONDS: Final = 10.0
"""How long it is waited for a process that SIGKILL was sent to."""
VERIFY_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.25
_ASK_SECONDS: Final = 2.0
"""Between two questions to the driver."""
_SHARE: Final = 10
"""Looking takes at most a tenth of the time."""
_NAMED: Final = 16
_NO_UNDO: Final = "none: a process that was ended does not come back; its owner starts it again"


class Kill:
    """The step ``kill``."""

    def __init__(
        self,
        host: Host,
        *,
        verify_seconds: float = VERIFY_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        nvml_library: str | None = None,
        look: Look | None = None,
        counts: ExecCounts | None = None,
    ) -> None:
        """``look`` tells of the GPUs instead of the driver."""
        self._host = host
        self._verify_seconds = verify_seconds
        self._patience_seconds = patience_seconds
        self._counts = counts
        self._look = look or (lambda: gpu_use.look(host, nvml_library))

    def step(self, target: Target) -> Step | None:
        """The step; None without a process."""
        if target.identity is None:
            return None
        pid = target.identity.pid
        refused, hurts = "", []
        try:
            untouchable = Untouchable(self._host)
            refused = untouchable.reason(pid) or _dead(self._host, pid)
            hurts = [*_ends_with_it(target), *_going_on(untouchable, pid)]
        except GpuwardenError as error:
            refused = str(error)
        return Step(
            name="kill",
            power="kill",
            title="End it",
            changes=(
                f"process {pid} gets SIGTERM and, if it lives {self._patience_seconds:g} s later, "
                f"SIGKILL; then it is looked for {self._verify_seconds:g} s whether its GPU memory "
                "and utilisation fell and whether it comes back"
            ),
            hurts=tuple(hurts),
            undo=_NO_UNDO,
            refused=refused,
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Ends it and looks afterwards. Errors: Changed before anything was sent; Denied,
        Unavailable.
        """
        if target.identity is None:
            raise Unavailable("a GPU alone cannot be ended, and nothing on it is known")
        pid = target.identity.pid
        untouchable = Untouchable(self._host)
        if why := untouchable.reason(pid):
            return Outcome(step="kill", done=False, lines=(f"not ended: it is {why}",))
        with hold(self._host, target.identity, self._counts) as held:
            if held.weaker:
                tell(held.weaker)
            before = self._look()
            if before.unseen and not before.gpus:
                before = GpuUse(target.snapshot.gpus, target.snapshot.clients, before.unseen)
            former = returning.remember(self._host, pid, target.process)
            try:
                watcher = Watcher(self._host, former, target.snapshot)
                children = untouchable.below(pid)
                ended, line = self._end(target, held, tell)
                if not ended:
                    return Outcome(step="kill", done=False, lines=(line,), undo=_NO_UNDO)
                seen = self._verify(target, before, watcher, tell)
            finally:
                former.close()
        lines = [line, *_zombie(self._host, target), *seen.fall.lines]
        lines += _left(self._host, untouchable, children, target)
        lines += self._came_back(target, seen.returned)
        if watcher.overflowed:
            lines.append(
                f"more than {returning.NEW_LIMIT} processes began meanwhile: not all were looked at"
            )
        complete = seen.fall.seen and seen.fall.given_back and not seen.returned
        return Outcome(
            step="kill",
            done=True,
            lines=tuple(lines),
            undo=_NO_UNDO,
            complete=complete and not watcher.overflowed,
        )

    # ---------------------------------------------------------------- ending it

    def _end(self, target: Target, held: HeldProcess, tell: Tell) -> tuple[bool, str]:
        """(whether it has ended, what is to be said of it)."""
        pid, began = held.pid, time.monotonic()
        group = freezer_group.switched_of(self._host, pid, target.container)
        if group is not None or is_stopped(self._host, pid):
            tell(f"process {pid} is frozen or stopped: SIGKILL at once, it is not to run again")
            held.send(signal.SIGKILL)
            by = "SIGKILL"
            if group is not None and group.version == 1:
                _through(group, held)
        else:
            held.send(signal.SIGTERM)
            tell(f"SIGTERM sent to process {pid}; SIGKILL follows in {self._patience_seconds:g} s")
            by = "SIGTERM"
            if not held.has_ended(self._patience_seconds):
                # Not compared anew: an exec in between would be its answer to SIGTERM.
                held.send_again(signal.SIGKILL)
                tell(f"SIGKILL sent to process {pid}")
                by = "SIGKILL"
        if held.has_ended(END_SECONDS):
            return True, f"process {pid} has ended by {by}, {time.monotonic() - began:.1f} s later"
        hanging = ", ".join(moving(self._host, [pid])) or "nothing of it moves"
        return False, (
            f"process {pid} got SIGKILL and is there after {END_SECONDS:g} s: {hanging}. A thread "
            "in state D waits in the kernel, mostly for the driver, and ends when that answers, if "
            "ever: see dmesg; a reset of the GPU or of the node is the last resort"
        )

    # ---------------------------------------------------------------- afterwards

    def _verify(self, target: Target, before: GpuUse, watcher: Watcher, tell: Tell) -> _Seen:
        pid = target.identity.pid if target.identity is not None else 0
        ids = [row.gpu_id for row in target.rows if row.gpu_id is not None]
        seen = _Seen(fall=Fall(seen=False, given_back=False, lines=()))
        end = time.monotonic() + self._verify_seconds
        ask_at = 0.0
        tell(f"it is looked for {self._verify_seconds:g} s whether that helped and it comes back")
        while True:
            began = time.monotonic()
            last = began >= end
            if not seen.fall.given_back and (began >= ask_at or last):
                seen.fall = gpu_use.compare(pid, ids, before, self._look())
                ask_at = time.monotonic() + _ASK_SECONDS
                if seen.fall.given_back:
                    tell("; ".join(seen.fall.lines))
            for process in watcher.look():
                tell(f"it came back: {_described(process)}")
                seen.returned.append(process)
            if last or (seen.returned and seen.fall.given_back):
                return seen
            took = time.monotonic() - began
            time.sleep(min(max(_LOOK_SECONDS, took * _SHARE), max(0.0, end - time.monotonic())))

    def _came_back(self, target: Target, returned: Sequence[Process]) -> list[str]:
        lines = []
        for process in returned[:_NAMED]:
            starters = list(
                returning.who_started(self._host, process, target.snapshot, target.container)
            )
            lines.append(
                f"it came back: {_described(process)}; "
                + "; ".join(starters or ["by whom is not seen"])
            )
        if len(returned) > _NAMED:
            lines.append(f"it came back {len(returned) - _NAMED} times more")
        if returned:
            lines.append("end what starts it first, then it: the plan begins anew with the new pid")
        elif self._verify_seconds > 0:
            lines.append(f"nothing like it began within {self._verify_seconds:g} s")
        return lines


class _Seen(Struct):
    fall: Fall
    returned: list[Process] = field(default_factory=list)


def _through(group: freezer_group.FreezerGroup, held: HeldProcess) -> None:
    """Version 1 lets a frozen process die only once its group goes on; the rest is frozen anew."""
    freezer_group.switch(group, frozen=False)
    held.has_ended(END_SECONDS)
    with suppress(GpuwardenError):
        if freezer_group.members(group):
            freezer_group.switch(group, frozen=True)


def _described(process: Process) -> str:
    path = process.exe.path if process.exe is not None else process.comm
    return f"pid {process.pid} ({escape(path)[:200]})"


def _dead(host: Host, pid: int) -> str:
    """Why a signal would do nothing; empty when it may."""
    line = stat_lines.read_one(host, pid)
    if line is None:
        return "it has ended"
    if line.state in "ZX" and stat_lines.living_thread(host, line) is None and at_rest(host, pid):
        return (
            f"it has ended and is a zombie until its parent, pid {line.ppid}, collects it; what it "
            "had of a GPU is held by whoever inherited its descriptors"
        )
    return ""


def _zombie(host: Host, target: Target) -> list[str]:
    identity = target.identity
    line = stat_lines.read_one(host, identity.pid) if identity is not None else None
    if identity is None or line is None or line.start_time_ticks != identity.start_time_ticks:
        return []
    return [
        f"it is a zombie until its parent, pid {line.ppid}, collects it: it computes nothing and "
        "has no memory"
    ]


def _ends_with_it(target: Target) -> list[str]:
    process, container = target.process, target.container
    inner = process.pids_in_namespaces if process is not None else ()
    if len(inner) < 2 or inner[-1] != 1:
        return []
    whose = f" of container {escape(container.name or container.id[:12])}" if container else ""
    return [f"it is the first process of its pid namespace: every process{whose} ends with it"]


def _going_on(untouchable: Untouchable, pid: int) -> list[str]:
    below = untouchable.below(pid)
    names = [f"{named(untouchable, one)} goes on: a child of it" for one in below[:_NAMED]]
    return names + ([f"{len(below) - _NAMED} more children go on"] if len(below) > _NAMED else [])


def _left(
    host: Host, untouchable: Untouchable, children: Sequence[int], target: Target
) -> list[str]:
    """Children that live on, those with a GPU first in mind."""
    numbers = {(node.major, node.minor) for node in target.snapshot.device_nodes}
    lines = []
    for pid in children[:_NAMED]:
        line, before = stat_lines.read_one(host, pid), untouchable.table.get(pid)
        if line is None or before is None or line.start_time_ticks != before.start_time_ticks:
            continue
        holds = ""
        with suppress(GpuwardenError):
            devices = host.open_files(f"/proc/{pid}/fd").devices
            if any(number in numbers for _, number in devices):
                holds = " and holds a GPU's device"
        lines.append(f"{named(untouchable, pid)} goes on{holds}: a child of it")
    return lines
