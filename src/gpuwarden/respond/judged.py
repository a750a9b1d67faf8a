"""Rows and a finding → the one verdict that is acted on, and why it is that one.

Where two could be meant, the one that allows less: what clears a process now holds over what
accused it before, and among equally grave verdicts the one that gives fewer powers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gpuwarden.finding import VERDICT_SEVERITY, Row, Verdict, severity_rank
from gpuwarden.history.remembered import KnownFinding
from gpuwarden.respond.allowed import GRANTS

CLEARING: frozenset[Verdict] = frozenset({"expected", "system", "other-team", "wrong-gpu"})
"""Verdicts that name somebody whose process it is."""
STALE_NS = 15 * 60 * 10**9
"""An open finding that was not seen for so long: the daemon that saw it is not there any more."""


class Ruled(Struct, frozen=True):
    """The verdict, and what a person should know of how it was chosen."""

    verdict: Verdict | None
    note: str = ""


def gravest(rows: Sequence[Row]) -> Row | None:
    """The row that speaks for a process; of equally grave ones the one that allows least."""
    if not rows:
        return None
    return max(rows, key=lambda row: (severity_rank(row.severity), -len(GRANTS[row.verdict])))


def verdict_of(known: KnownFinding | None, rows: Sequence[Row], now_ns: int) -> Ruled:
    """The verdict of a process whose rows are those of now; ``known``: the finding asked about."""
    row = gravest(rows)
    now = row.verdict if row is not None else None
    before = known.finding.verdict if known is not None else None
    if known is None or before is None or now == before:
        return Ruled(now, "" if now is not None else "it uses no accelerator at this moment")
    stale = now_ns - known.last_seen_ns > STALE_NS
    if not known.is_open or stale:
        why = "is over" if not known.is_open else "was not seen for a quarter of an hour"
        judged = f"judged now it is {now}" if now else "the process uses no accelerator now"
        return Ruled(now, f"the finding said {before}, and {why}; {judged}")
    if now is None:
        return Ruled(before, "it uses no accelerator at this moment; the finding is open")
    if now in CLEARING:
        return Ruled(now, f"the finding said {before}; judged now it is {now}, which holds")
    if severity_rank(VERDICT_SEVERITY[before]) > severity_rank(VERDICT_SEVERITY[now]):
        return Ruled(before, f"by what was seen over time; one look now says {now}")
    return Ruled(now, f"the finding said {before}; judged now it is {now}")
