"""Enforcement while watching: each container is asked for as its group is made, then decided on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec
from msgspec import Struct

from gpuwarden.enforcement import (
    GROUPS_LIMIT,
    Decision,
    Enforcer,
    Located,
    located_by_event,
    located_by_process,
)
from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.finding import Finding
from gpuwarden.host import Host
from gpuwarden.model import Container
from gpuwarden.policy import Policy
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.events import GroupEvent
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.sensors.process import stat_lines
from gpuwarden.watch import denial_findings, doorman, group_ids
from gpuwarden.watch.pins import Pins
from gpuwarden.watch.workers import Worker

RETRY_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""A runtime may come to know a container a moment after its group was made."""
CONTAINERS_LIMIT = 4096
ASKED_AT_ONCE = 64
LOOK_SECONDS = 2.0
LOOKED_AT_ONCE = 256
"""Containers whose groups are looked for at a time: all of them in about half a minute."""
AGAIN_SECONDS = 30.0
TURNED_AWAY_STAYS_NS = 3600 * 10**9
TELL_SECONDS = 60.0


class _Met(Struct):
    """A container as its groups name it, and what came of asking for it."""

    located: Located
    tries: int = 0
    next_try: float = 0.0
    confirmed: bool = False
    claim: Container | None = None
    """What only a user's own runtime says of it: shown once nobody better has answered."""
    told: str = ""


class Denying:
    """Keeps the denials of a probe in step with the containers that come and go; one thread."""

    def __init__(
        self,
        host: Host,
        policy: Policy,
        probe: DeviceOpenProbe,
        worker: Worker,
        *,
        dry_run: bool,
        tell: Callable[[str], None],
        asked: Callable[[GroupKey], bool] = lambda group: False,
    ) -> None:
        """``tell`` takes a line for a person, once for each decision that is new.

        ``asked``: whether somebody asked for a group's denial; that is neither lifted nor weakened.
        """
        self.enforcer = Enforcer(policy, self._deny, self._allow, dry_run=dry_run)
        self._asked_for = asked
        self.worker = worker
        self.turned_away = 0
        """Containers that were not asked for, since too many others were."""
        self._host = host
        self._probe = probe
        self._tell = tell
        self._met: dict[str, _Met] = {}
        self._waiting: dict[str, _Met] = {}
        """Those of ``_met`` that are to be asked for, the oldest first."""
        self._asked: list[str] = []
        self._pins = Pins(probe, tell, dry_run=dry_run)
        self._taken_over = self._pins.taken_over
        self._turned_away_ns = 0
        self._turned_away_told = float("-inf")
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._again_at = time.monotonic() + AGAIN_SECONDS
        self._next_looked_at = 0

    # ---------------------------------------------------------------- who is met

    def begin(self, *, pin: bool) -> None:
        """Takes over what an earlier run pinned, then the containers that run already.

        With ``pin`` denials outlive this process. Errors: UsageError when that cannot be had.
        """
        try:
            self._pins.take_over(pin=pin)
            self._taken_over -= {one for one in self._taken_over if self._asked_for(one)}
            self.existing()
            self._pins.begin()
        except GpuwardenError as error:
            raise UsageError(f"--pin: {error}", remedy=error.remedy) from error

    def existing(self) -> set[str]:
        """Takes the containers that run already, by the groups of every process; their ids."""
        found: set[str] = set()
        try:
            pids = list(stat_lines.read(self._host))
        except GpuwardenError as error:
            self._tell(f"containers that run already are not known: {error}")
            return found
        for pid in pids:
            try:
                located = located_by_process(self._host, pid)
            except GpuwardenError:
                continue
            for one in located:
                found.add(one.container_id)
                self._add(one)
        return found

    def turn(self, groups: Sequence[GroupEvent]) -> None:
        """Takes groups that were made, asks about them, takes answers, looks again when due."""
        self.events(groups)
        self.ask()
        self.answered()
        self.look()

    def events(self, events: Iterable[GroupEvent]) -> None:
        """Control groups that were made."""
        for event in events:
            try:
                located = located_by_event(self._host, event)
            except GpuwardenError:
                continue
            if located is not None:
                self._add(located)

    def _add(self, located: Located) -> None:
        key = located.container_id
        met = self._met.get(key)
        if met is None:
            if len(self._met) >= CONTAINERS_LIMIT and not self._makes_room():
                self._turn_away(key)
                return
            met = self._met[key] = _Met(located)
        else:
            if set(located.groups) <= set(met.located.groups):
                return
            groups = tuple(dict.fromkeys((*met.located.groups, *located.groups)))
            # One more than may be denied, so that it shows that there are more.
            groups = groups[: GROUPS_LIMIT + 1]
            met.located = msgspec.structs.replace(located, groups=groups)
            met.tries, met.next_try = 0, 0.0
        self._waiting[key] = met

    def _makes_room(self) -> bool:
        """Forgets the oldest that no runtime knows: whoever makes groups can make many of those."""
        if len(self._waiting) >= CONTAINERS_LIMIT:
            return False
        for key, met in self._met.items():
            if key not in self._waiting and not (met.confirmed or self._is_taken_over(met)):
                self._forget(key)
                return True
        return False

    def _turn_away(self, key: str) -> None:
        """The newest is not asked for: an older one may be the one that matters, and is in time."""
        self.turned_away += 1
        self._turned_away_ns = time.time_ns()
        now = time.monotonic()
        if now - self._turned_away_told >= TELL_SECONDS:
            self._turned_away_told = now
            self._tell(f"not asked for, so not denied: container {key[:12]}; {self._crowd()}")

    def _crowd(self) -> str:
        return f"{CONTAINERS_LIMIT} others are; {self.turned_away} turned away since the start"

    # ---------------------------------------------------------------- asking

    def known(self, found: Iterable[Container]) -> None:
        """Containers that somebody else asked for, in full."""
        for container in found:
            met = self._met.get(container.id)
            if met is not None and container.confirmed:
                self._waiting.pop(container.id, None)
                self._decide(container, met)

    def ask(self) -> None:
        """Asks for what waits, if the worker is free."""
        now = time.monotonic()
        if self.worker.busy:
            return
        waiting = (key for key, met in self._waiting.items() if met.next_try <= now)
        due = list(islice(waiting, ASKED_AT_ONCE))
        if not due:
            return
        question = doorman.encode(self._waiting[key].located for key in due)
        try:
            if self.worker.request(question):
                self._asked = due
        except GpuwardenError:
            return

    def answered(self) -> None:
        """Takes the worker's answer, if it is there, and decides."""
        try:
            body = self.worker.take()
        except GpuwardenError:
            body = doorman.NOBODY
        if body is None:
            return
        now = time.monotonic()
        for container in doorman.decode(body):
            met = self._waiting.get(container.id)
            if met is None:
                continue
            if container.confirmed:
                del self._waiting[container.id]
                self._decide(container, met)
            else:
                met.claim = container
        for key in self._asked:
            met = self._waiting.get(key)
            if met is None:
                continue
            if met.tries >= len(RETRY_SECONDS):
                del self._waiting[key]
                if met.claim is not None:
                    self._decide(met.claim, met)
                continue
            met.next_try = now + RETRY_SECONDS[met.tries]
            met.tries += 1
        self._asked = []
        self.ask()

    def seconds_to_wait(self) -> float:
        """Until something is to be done, at most two seconds."""
        times = [self._look_at]
        if not self.worker.busy:
            times += [met.next_try for met in self._waiting.values()]
        return max(min(times) - time.monotonic(), 0.0)

    # ---------------------------------------------------------------- decisions

    def _deny(self, group: GroupKey, dry_run: bool) -> None:
        if not (dry_run and self._asked_for(group)):
            self._probe.deny_group(group, dry_run=dry_run)

    def _allow(self, group: GroupKey) -> None:
        if not self._asked_for(group):
            self._probe.allow(group)

    def _decide(self, container: Container, met: _Met) -> None:
        decision = self.enforcer.container(container, met.located.groups)
        if container.confirmed:
            met.confirmed, met.claim = True, None
            self._settle(met.located.groups)
        self._tell_of(container.id, met, decision)

    def _tell_of(self, key: str, met: _Met, decision: Decision | None) -> None:
        text = "" if decision is None else decision.text
        if text != met.told:
            self._tell(text or f"no longer named by the policy: container {key[:12]}")
            met.told = text

    def _settle(self, groups: Iterable[GroupKey]) -> None:
        """An earlier run's denials of these groups are confirmed by a decision, or end."""
        mine = self._taken_over.intersection(groups)
        if not mine:
            return
        self._taken_over -= mine
        denied = {group for decision in self.decisions() for group in decision.groups}
        for group in mine - denied:
            self._allow(group)
            self._tell(f"an earlier run's denial ends: group {group.hierarchy}:{group.id}")

    def _is_taken_over(self, met: _Met) -> bool:
        return not self._taken_over.isdisjoint(met.located.groups)

    def reload(self, policy: Policy) -> None:
        """Takes another policy."""
        self.enforcer.reload(policy)
        decisions = {decision.container.id: decision for decision in self.decisions()}
        for key, met in self._met.items():
            self._tell_of(key, met, decisions.get(key))

    def decisions(self) -> tuple[Decision, ...]:
        return self.enforcer.decisions()

    # ---------------------------------------------------------------- time

    def look(self) -> None:
        """What is due: a late pin, containers that have ended, and who did not answer before."""
        now = time.monotonic()
        self._pins.later(settled=not self._waiting)
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        keys = list(self._met)
        at = self._next_looked_at if self._next_looked_at < len(keys) else 0
        self._next_looked_at = at + LOOKED_AT_ONCE
        self._forget_ended(keys[at : at + LOOKED_AT_ONCE])
        if now >= self._again_at:
            self._again_at = now + AGAIN_SECONDS
            self._again()

    def _forget_ended(self, keys: Sequence[str]) -> None:
        alive = group_ids.existing(g for key in keys for g in self._met[key].located.groups)
        for key in keys:
            met = self._met[key]
            groups = met.located.groups
            left = tuple(group for group in groups if group in alive)
            if groups and not left:
                self._forget(key)
            elif left != groups:
                met.located = msgspec.structs.replace(met.located, groups=left)
                self.enforcer.groups_gone(key, set(groups) - alive)

    def _forget(self, key: str) -> None:
        met = self._met.pop(key)
        self._waiting.pop(key, None)
        self.enforcer.gone(key)
        self._settle(met.located.groups)

    def _again(self) -> None:
        """Half a minute later: those that no runtime knew, and denials whose owner is not known."""
        unknown = (key for key, met in self._met.items() if not met.confirmed)
        for key in list(islice((k for k in unknown if k not in self._waiting), ASKED_AT_ONCE)):
            met = self._met[key] = self._met.pop(key)  # the others' turn is next time
            met.tries, met.next_try = len(RETRY_SECONDS), 0.0
            self._waiting[key] = met
        self._settle(self._taken_over - group_ids.existing(self._taken_over))
        groupless = [key for key, met in self._met.items() if not met.located.groups]
        if groupless or self._taken_over:
            there = self.existing()
            for key in groupless:
                if key not in there:
                    self._forget(key)

    # ---------------------------------------------------------------- findings

    def findings(self, at_ns: int) -> list[Finding]:
        """What was decided, and what is not as the policy asks."""
        found = list(denial_findings.of_decisions(self.decisions()))
        if self.turned_away and at_ns - self._turned_away_ns < TURNED_AWAY_STAYS_NS:
            found.append(denial_findings.trouble("containers not asked for", [self._crowd()]))
        if self._taken_over and not self._waiting:
            groups = sorted(f"{group.hierarchy}:{group.id}" for group in self._taken_over)
            lines = [f"group {one} is denied, whose it is not known" for one in groups]
            found.append(denial_findings.trouble("denials of an earlier run", lines))
        if self._pins.trouble:
            found.append(denial_findings.trouble("pins", [self._pins.trouble]))
        return found
