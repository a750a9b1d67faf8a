"""What the open watch did, for metrics."""

from __future__ import annotations

from msgspec import Struct, field

FIRST_STATES = ("attempted", "opened", "denied")
KINDS: tuple[tuple[str, str], ...] = (
    *((how, state) for how in ("open", "mknod", "access", "other") for state in FIRST_STATES),
    ("held", "opened"),
)
"""What is counted from the start: a count that first appears above zero hides its first rise."""


class Counts(Struct):
    """Since the start."""

    opens: int = 0
    returns: int = 0
    execs: int = 0
    exits: int = 0
    tools: int = 0
    judged: int = 0
    held: int = 0
    """Processes that had to wait for their container or job."""
    unknown: int = 0
    """Of them, those that were judged without: nobody told in time."""
    ask_failures: int = 0
    would_deny: int = 0
    """Opens that enforcement would have denied, were it not a dry run."""
    queue_full: int = 0
    by_kind: dict[tuple[str, str], int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Events by how and, at the time they came, state."""

    def event(self, kind: str, state: str) -> None:
        """Counts one event."""
        key = (kind, state)
        self.by_kind[key] = self.by_kind.get(key, 0) + 1
