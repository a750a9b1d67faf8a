"""Asks NVML through the stand-in library and keeps what came of it."""

from __future__ import annotations

from typing import TypeVar

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.sensors import nvml
from gpuwarden.sensors.nvml import Fact, NvmlQuery
from gpuwarden.sensors.seen import Seen
from tests.support.fakenvml import FakeNvml

F = TypeVar("F", bound=Fact)


class Answer:
    """What a question brought: facts, the error it ended with, and the question itself."""

    def __init__(self, query: NvmlQuery) -> None:
        self.query = query
        self.facts: list[Fact] = []
        self.error: GpuwardenError | None = None
        try:
            for fact in query.read(Seen()):
                self.facts.append(fact)
        except GpuwardenError as error:
            self.error = error

    def of(self, kind: type[F]) -> list[F]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


def ask(fake: FakeNvml, *, deadline_seconds: float = 20.0, host: Host | None = None) -> Answer:
    with fake.in_place() as library:
        return Answer(
            nvml.start(host or Host(), library=library, deadline_seconds=deadline_seconds)
        )
