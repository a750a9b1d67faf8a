"""Processes that a verdict accuses: its finding carries their code as well, so one is told."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwarden.finding import Finding
from gpuwarden.watch.cuda_facts import NamedKey
from gpuwarden.watch.judgement import Kin

RULE = "module_loaded_hash_like"
MINER, SUSPICIOUS = "cryptominer", "suspicious"


class Accused:
    """As of the last judgement of the whole node."""

    def __init__(self) -> None:
        self._verdicts: dict[NamedKey, frozenset[str]] = {}

    def judged(self, kin: Iterable[Kin]) -> set[NamedKey]:
        """Takes the verdicts; the processes that are accused now and were not, or no longer are."""
        now = {
            (one.pid, one.start_time_ticks): accusing
            for one in kin
            if (accusing := frozenset(one.verdicts.values()) & {MINER, SUSPICIOUS})
        }
        before, self._verdicts = self._verdicts, now
        return {key for key in {*before, *now} if before.get(key) != now.get(key)}

    def has_told(self, finding: Finding) -> bool:
        """Whether the verdict's own finding says the same, no milder."""
        subject = finding.subject
        verdicts = self._verdicts.get((subject.pid or 0, subject.start_time_ticks or 0), ())
        if finding.rule != RULE:
            return False
        return MINER in verdicts or (SUSPICIOUS in verdicts and finding.severity == "error")
