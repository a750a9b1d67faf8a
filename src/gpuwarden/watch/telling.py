"""Findings into the store, and from there to the sinks; what is wrong with either is one, too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from gpuwarden.errors import GpuwardenError
from gpuwarden.finding import Finding
from gpuwarden.life import FindingLife
from gpuwarden.sinks.dispatcher import Dispatcher
from gpuwarden.sinks.own_trouble import OwnTrouble
from gpuwarden.sinks.sink import Sink
from gpuwarden.sinks.specs import parse_sinks
from gpuwarden.store import Store
from gpuwarden.watch.text_sink import TextSink

DRAIN_SECONDS = 2.0


def sinks_of(specs: Iterable[str], *, events: bool) -> list[Sink]:
    """The sinks that are named; without any, text for a person. Errors: UsageError."""
    named = parse_sinks(dict.fromkeys(specs))
    if named:
        return named
    # Lines of JSON and lines for a person do not mix.
    return parse_sinks(["stdout"]) if events else [TextSink()]


class Telling:
    """The store, the life of findings and the sinks; only the agent's own thread observes."""

    def __init__(self, directory: str, sinks: Sequence[Sink], *, node: str) -> None:
        try:
            self.store = Store(directory)
        except GpuwardenError as error:
            self.store = Store.volatile(directory, error)
        self.life = FindingLife(self.store, node=node)
        self.dispatcher = Dispatcher(self.store.findings, sinks, current=self.life.current)
        self._trouble = OwnTrouble()

    def start(self, stack: ExitStack) -> None:
        """Starts the sinks' threads; at the end they get a moment for what is left."""
        stack.callback(self.store.close)
        self.dispatcher.start()
        stack.callback(self._end)

    def _end(self) -> None:
        self.dispatcher.drain(DRAIN_SECONDS)
        self.dispatcher.stop()

    def observe(self, findings: Sequence[Finding], evaluated: frozenset[str]) -> None:
        """Findings that hold now; what an evaluated rule no longer finds is on its way out."""
        if self.life.observe(findings, time.time_ns(), evaluated):
            self.dispatcher.wake()

    def troubles(self, now_ns: int) -> list[Finding]:
        """What is wrong with sinks and store."""
        return self._trouble.findings(self.dispatcher.health(), self.store.troubles, now_ns)
