"""Opens that Falco saw and that were put to no process of this machine: told, not dropped."""

from __future__ import annotations

from msgspec import Struct

from gpuwarden.falco_losses import FALCO_EVENTS_DROPPED
from gpuwarden.finding import Advisory, Evidence, Finding, about_source

NAME_SHOWN = 100
LOST_NAMED = 8
LOST_STAYS_NS = 3600 * 10**9
OTHERS = ("other processes", "")

FALCO_OPEN_UNMATCHED = Advisory(
    id="falco_open_unmatched",
    title="Falco saw a device open by a process that is not there to look at",
    severity="warning",
    explanation="The process had ended, or Falco did not tell enough to know which one it was, so "
    "whether it belongs here could not be judged.",
    steps=(
        "Let Falco's rules tell proc.pid (append_output in falco.yaml).",
        "Run the probe of gpuwarden on this node: it keeps who it was at the moment of the open.",
    ),
)
FALCO_ADVISORIES = (FALCO_EVENTS_DROPPED, FALCO_OPEN_UNMATCHED)
FALCO_RULES = frozenset(advisory.id for advisory in FALCO_ADVISORIES)


class _Lost(Struct):
    last_ns: int
    text: str
    times: int


class Unmatched:
    """Opens that were put to no process, by the name and the path that Falco claims.

    Whoever can post can make up both: the first few are told apart, the rest together.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lost: dict[tuple[str, str], _Lost] = {}

    def note(self, name: str, path: str, text: str, at_ns: int) -> None:
        self.count += 1
        key = (name[:NAME_SHOWN], path[:NAME_SHOWN])
        if key not in self._lost and len(self._lost.keys() - {OTHERS}) >= LOST_NAMED:
            self._forget(at_ns)
            if len(self._lost.keys() - {OTHERS}) >= LOST_NAMED:
                key = OTHERS
        before = self._lost.get(key)
        self._lost[key] = _Lost(at_ns, text, 1 if before is None else before.times + 1)

    def _forget(self, at_ns: int) -> None:
        for key, lost in list(self._lost.items()):
            if at_ns - lost.last_ns >= LOST_STAYS_NS:
                del self._lost[key]

    def findings(self, at_ns: int) -> list[Finding]:
        """Those of the last hour."""
        self._forget(at_ns)
        found = []
        for (name, path), lost in self._lost.items():
            named = f"falco: {name} {path}".rstrip()
            texts = (f"{lost.times} opens in the last hour or since it began", lost.text)
            evidence = (Evidence(source="falco", text=text) for text in texts)
            found.append(about_source(FALCO_OPEN_UNMATCHED, named, evidence))
        return found
