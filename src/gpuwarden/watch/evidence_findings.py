"""What became of the archives that `watch` writes by itself, as findings."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwarden.finding import Advisory, Evidence, Finding, about_source

EVIDENCE_WRITTEN = Advisory(
    id="evidence_written",
    title="Evidence of a critical finding was written",
    severity="info",
    explanation="The policy asks for an archive when a finding opens as critical and is about a "
    "process. This is one; it shows any change that is made to it later.",
    steps=(
        "gpuwarden evidence show FILE, with the path from the evidence.",
        "Copy it off this node before anything is done about the process.",
    ),
)
EVIDENCE_FAILED = Advisory(
    id="evidence_failed",
    title="No evidence of a critical finding could be written",
    severity="warning",
    explanation="The policy asks for an archive when a finding opens as critical and is about a "
    "process. Of this one there is none, or none that is complete.",
    steps=(
        "Read why in the evidence.",
        "If the process still runs: gpuwarden evidence PID -o DIR, with a directory that has room.",
        "What a FILE.partial holds: gpuwarden evidence verify FILE.partial",
    ),
)
EVIDENCE_ADVISORIES = (EVIDENCE_WRITTEN, EVIDENCE_FAILED)
EVIDENCE_RULES = frozenset(one.id for one in EVIDENCE_ADVISORIES)


def written(finding: str, texts: Iterable[str]) -> Finding:
    """One archive, by the id of the finding that it is for."""
    return _finding(EVIDENCE_WRITTEN, finding, texts)


def failed(finding: str, texts: Iterable[str]) -> Finding:
    """One archive that is not there."""
    return _finding(EVIDENCE_FAILED, finding, texts)


def _finding(advisory: Advisory, finding: str, texts: Iterable[str]) -> Finding:
    evidence = (Evidence(source="evidence", text=text) for text in texts)
    return about_source(advisory, f"evidence of finding {finding}", evidence)
