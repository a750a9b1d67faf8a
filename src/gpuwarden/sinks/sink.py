"""What every sink is."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol


class Outcome(NamedTuple):
    """How a delivery went: ``retry`` later, or ``refused`` for what is in it."""

    kind: Literal["delivered", "retry", "refused"]
    reason: str = ""


DELIVERED = Outcome("delivered")


class Sink(Protocol):
    """A place that takes findings, one at a time, from one thread."""

    @property
    def key(self) -> str:
        """Stable and without secrets: under it, the store remembers how far this sink is."""
        ...

    @property
    def name(self) -> str:
        """For a person, without secrets (a webhook's path may be one)."""
        ...

    @property
    def repeat_seconds(self) -> float | None:
        """How often it wants to hear again of every open finding; None: never."""
        ...

    def deliver(self, finding_json: bytes) -> Outcome:
        """Tells one transition; returns when it is safe with the receiver, or not."""
        ...

    def close(self) -> None:
        """Gives back what the sink holds."""
        ...
