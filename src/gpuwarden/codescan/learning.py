"""What of a known-good run may become known: a miner that was there while learning must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Record
from gpuwarden.code.report import CodeReport, FoundModule
from gpuwarden.expectation import REFUSED_VERDICTS
from gpuwarden.finding import Report, severity_rank

Decision = Literal["take", "flag", "refuse", "known", "leave"]

TAKEN = frozenset({"not hash-like", "not enough code"})
FLAGGED = frozenset({"architecture too old", "architecture unknown", "form not judged"})
"""Nothing can be said of what these compute; a person may answer for them."""


class Candidate(Record, frozen=True, kw_only=True):
    """One module of a run, and whether it may be learnt."""

    found: FoundModule
    decision: Decision
    why: str = ""


def consider(found: FoundModule, *, accept_flagged: bool = False) -> Candidate:
    """Whether a module may be learnt. Hash-like code and what cannot be read never may."""
    if found.standing in ("known", "rebuilt", "driver"):
        return Candidate(found=found, decision="known", why=found.known_as)
    if found.module.broken:
        return Candidate(
            found=found, decision="refuse", why=f"cannot be read: {found.module.broken}"
        )
    judgement = found.judgement or ModuleJudgement(answer="unreadable")
    reasons = "; ".join(judgement.reasons)
    why = judgement.answer + (f": {reasons}" if reasons else "")
    if found.together == "hash-like":
        why = "hash-like together with the other unknown code of its file or process"
        return Candidate(found=found, decision="refuse", why=why)
    if judgement.answer in TAKEN:
        return Candidate(found=found, decision="take")
    if judgement.answer in FLAGGED:
        return Candidate(found=found, decision="take" if accept_flagged else "flag", why=why)
    return Candidate(found=found, decision="refuse", why=why)


def considered(report: CodeReport, *, accept_flagged: bool = False) -> list[Candidate]:
    """Every module of a report, each decided.

    Of a process whose unknown code is hash-like, one module alone or all together, nothing is
    learnt. What is in its mapped files is no JIT code: a baseline of the files is for that.
    """
    candidates = [consider(found, accept_flagged=accept_flagged) for found in report.modules]
    processes = {target.name for target in report.targets if target.what == "process"}
    tainted = {
        sighting.place.target
        for candidate in candidates
        if candidate.found.is_alarming
        for sighting in candidate.found.sightings
    } & processes
    return [_in_processes(candidate, processes, tainted) for candidate in candidates]


def _in_processes(candidate: Candidate, processes: set[str], tainted: set[str]) -> Candidate:
    sightings = candidate.found.sightings
    if candidate.decision not in ("take", "flag"):
        return candidate
    held_by = sorted({sighting.place.target for sighting in sightings} & tainted)
    if held_by:
        why = f"{held_by[0]} holds hash-like code: nothing of it is learnt"
        return Candidate(found=candidate.found, decision="refuse", why=why)
    if all(s.place.target in processes and not s.in_no_mapped_file for s in sightings):
        return Candidate(
            found=candidate.found,
            decision="leave",
            why="it is in a mapped file: gpuwarden baseline build makes a baseline of that",
        )
    return candidate


def objections(report: Report, pid: int) -> Iterator[str]:
    """Why nothing of a process may be learnt: what a scan says of it at or above an error."""
    for row in report.rows:
        if row.pid == pid and row.verdict in REFUSED_VERDICTS:
            yield f"{row.verdict} on GPU {row.gpu}: {row.path[-1] if row.path else 'see scan'}"
    for finding in report.findings:
        # A silenced finding was looked at by a person, and is one all the same.
        if finding.subject.pid == pid and severity_rank(finding.severity) >= severity_rank("error"):
            yield f"{finding.rule}: {finding.title}"
