"""Enforcement while watching: containers are asked for as their groups are made, then decided on.

A worker of its own asks the runtimes: nothing else must stand before a denial.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from gpuwarden.enforcement import (
    Decision,
    Enforcer,
    Located,
    located_by_event,
    located_by_process,
)
from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import Container, Fact
from gpuwarden.policy import Policy
from gpuwarden.probes.events import GroupEvent
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.sensors import containers
from gpuwarden.sensors.process import stat_lines
from gpuwarden.watch.workers import Worker

DEADLINE_SECONDS = 10.0
RETRY_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""A runtime may come to know a container a moment after its group was made."""
WAITING_LIMIT = 4096
GONE_SECONDS = 30.0


class LookUp(Fact, frozen=True, kw_only=True):
    """One container to ask for, as its group names it."""

    container_id: str
    runtime: str | None = None
    pod_uid: str | None = None
    user_uid: int | None = None


class LookUps(Fact, frozen=True, kw_only=True):
    wanted: tuple[LookUp, ...]


class Found(Fact, frozen=True, kw_only=True):
    """The containers that a runtime knows; the others were not told."""

    containers: tuple[Container, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_question = msgspec.msgpack.Decoder(LookUps)
_answer = msgspec.msgpack.Decoder(Found)


class Doorman:
    """The job of the child: asks the runtimes for containers by id."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._host: Host | None = None

    def __call__(self, body: bytes) -> bytes:
        if self._host is None:
            # Made here, in the child: a Host remembers whose /proc/self it saw.
            self._host = Host(self._root)
        found = []
        for one in _question.decode(body).wanted:
            told = containers.look_up(
                self._host, one.container_id, one.runtime, one.pod_uid, user_uid=one.user_uid
            )
            if isinstance(told, Container):
                found.append(told)
        return _encoder.encode(Found(containers=tuple(found)))


class _Waiting(Struct):
    located: Located
    tries: int = 0
    next_try: float = 0.0


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
    ) -> None:
        """``tell`` takes a line for a person, once for each decision that is new."""
        self.enforcer = Enforcer(
            policy,
            lambda group, dry: probe.deny_group(group, dry_run=dry),
            probe.allow,
            dry_run=dry_run,
        )
        self.worker = worker
        self._host = host
        self._tell = tell
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._asked: list[str] = []
        self._told: dict[str, str] = {}
        self._groups: dict[str, Located] = {}
        self._looked_at = 0.0

    def existing(self) -> None:
        """Takes the containers that run already, by the groups of every process."""
        for pid in stat_lines.read(self._host):
            try:
                located = located_by_process(self._host, pid)
            except GpuwardenError:
                continue
            for one in located:
                self._add(one)

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
        known = self._groups.get(located.container_id)
        if known is not None and set(located.groups) <= set(known.groups):
            return
        if known is not None:
            groups = tuple(dict.fromkeys((*known.groups, *located.groups)))
            located = msgspec.structs.replace(located, groups=groups)
        self._groups[located.container_id] = located
        while len(self._groups) > WAITING_LIMIT:
            self._groups.pop(next(iter(self._groups)))
        self._waiting[located.container_id] = _Waiting(located)
        while len(self._waiting) > WAITING_LIMIT:
            self._waiting.popitem(last=False)

    def known(self, found: Iterable[Container]) -> None:
        """Containers that somebody else asked for, in full."""
        for container in found:
            located = self._groups.get(container.id)
            if located is not None and container.confirmed:
                self._decide(container, located)

    def ask(self) -> None:
        """Asks for what waits, if the worker is free."""
        now = time.monotonic()
        if self.worker.busy:
            return
        due = [key for key, one in self._waiting.items() if one.next_try <= now][:64]
        if not due:
            return
        wanted = []
        for key in due:
            located = self._waiting[key].located
            wanted.append(
                LookUp(
                    container_id=located.container_id,
                    runtime=located.runtime,
                    pod_uid=located.pod_uid,
                    user_uid=located.user_uid,
                )
            )
        try:
            if self.worker.request(_encoder.encode(LookUps(wanted=tuple(wanted)))):
                self._asked = due
        except GpuwardenError:
            return

    def answered(self) -> None:
        """Takes the worker's answer, if it is there, and decides."""
        try:
            body = self.worker.take()
        except GpuwardenError:
            body = _encoder.encode(Found())
        if body is None:
            return
        now = time.monotonic()
        for container in _answer.decode(body).containers:
            waiting = self._waiting.get(container.id)
            if waiting is not None and container.confirmed:
                del self._waiting[container.id]
                self._decide(container, waiting.located)
        for key in self._asked:
            waiting = self._waiting.get(key)
            if waiting is None:
                continue
            if waiting.tries >= len(RETRY_SECONDS):
                del self._waiting[key]
                continue
            waiting.next_try = now + RETRY_SECONDS[waiting.tries]
            waiting.tries += 1
        self._asked = []
        self.ask()

    def seconds_to_wait(self) -> float | None:
        """Until somebody is to be asked for; None when nobody waits."""
        if not self._waiting or self.worker.busy:
            return None
        return max(min(one.next_try for one in self._waiting.values()) - time.monotonic(), 0.0)

    def _decide(self, container: Container, located: Located) -> None:
        decision = self.enforcer.container(container, located.groups)
        if decision is not None and self._told.get(container.id) != decision.text:
            self._told[container.id] = decision.text
            self._tell(decision.text)

    def reload(self, policy: Policy) -> None:
        """Takes another policy."""
        self.enforcer.reload(policy)

    def gone(self, alive: Iterable[str]) -> None:
        """Forgets containers that are no longer there; ``alive`` are the ids that are."""
        there = set(alive)
        for key in [key for key in self._told if key not in there]:
            self._told.pop(key)
            self._groups.pop(key, None)
            self.enforcer.gone(key)

    def decisions(self) -> tuple[Decision, ...]:
        return self.enforcer.decisions()
