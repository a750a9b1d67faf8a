"""`gpuwarden baseline learn`: a known-good run's JIT modules, each judged before it is taken in."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuwarden.code.baseline.entries import Entries
from gpuwarden.code.baseline.known import Baselines
from gpuwarden.code.report import CodeReport
from gpuwarden.code.standing import Assessor
from gpuwarden.codescan.baseline_build import entries_of
from gpuwarden.codescan.baseline_commands import (
    CLEAR,
    DIFFERENT,
    TOOL,
    UNREAD,
    moment_of_building,
    private_key,
    problem_lines,
    write,
    written_line,
)
from gpuwarden.codescan.baseline_text import candidates_text, text_of
from gpuwarden.codescan.command import Tell, look
from gpuwarden.codescan.known_code import baselines_of, described, warnings_of
from gpuwarden.codescan.learning import Candidate, considered, objections
from gpuwarden.codescan.origins import Label
from gpuwarden.codescan.scan import Options
from gpuwarden.errors import Unavailable
from gpuwarden.finding import Report
from gpuwarden.host import Host
from gpuwarden.outputs.told import Told
from gpuwarden.sensors.process.stat_lines import read_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NOTE_ACCEPTED = "accepted although nobody can say what it computes"


def learn(arguments: argparse.Namespace, tell: Tell) -> Told:
    """Judges every module that no baseline knows, and writes those that may be learnt.

    1 when something was refused or flagged, or a process was; 2 when not all could be read.
    Errors: UsageError, Unavailable, Denied, Malformed.
    """
    key = private_key(arguments.sign)
    when = moment_of_building()
    known = baselines_of(arguments)
    host = Host()
    # A pid is a process only together with its start: what is judged and what is read are one.
    started = {pid: read_line(host, pid).start_time_ticks for pid in arguments.pid}
    judged = _scan(host) if started else None
    refused = list(_refused(judged, started)) if judged is not None else []
    if refused:
        return Told(text_of(refused), DIFFERENT)
    options = Options(judged=True, baselines=tuple(described(one) for one in known))
    report = look(arguments, Assessor(Baselines(known)), options, tell)
    for target in report.targets:
        process = target.process
        if process is not None and process.start_time_ticks != started.get(process.pid):
            raise Unavailable(f"{target.name} has ended, or is another process by now")
    candidates = considered(report, accept_flagged=arguments.accept_flagged)
    text = candidates_text(candidates, accept_flagged=arguments.accept_flagged)
    text += text_of(problem_lines(report.problems))
    if not arguments.dry_run:
        text += _write(arguments, report, candidates, when, key)
    untaken = any(candidate.decision in ("refuse", "flag") for candidate in candidates)
    code = UNREAD if report.problems else DIFFERENT if untaken else CLEAR
    return Told(text, code, warnings_of(known) + (_unseen(judged) if judged is not None else ""))


def _write(
    arguments: argparse.Namespace,
    report: CodeReport,
    candidates: Sequence[Candidate],
    when: int,
    key: Ed25519PrivateKey | None,
) -> str:
    entries = Entries(arguments.digest_bytes)
    label = Label(source="learned", when=when, tool=TOOL)
    for note, accepted in (("", False), (NOTE_ACCEPTED, True)):
        modules = [
            candidate.found
            for candidate in candidates
            if candidate.decision == "take" and bool(candidate.why) == accepted
        ]
        own = msgspec.structs.replace(label, note=note)
        built = entries_of(report, own, digest_bytes=arguments.digest_bytes, modules=modules)
        entries.merge(iter(built.entries))
    write(arguments, entries, when, key)
    return text_of([written_line(arguments.output, entries, key)])


def _refused(judged: Report, pids: Iterable[int]) -> Iterator[str]:
    """Why nothing of these processes may be learnt."""
    for pid in pids:
        for why in objections(judged, pid):
            yield f"pid {pid}: nothing of it is learnt: {why}"


def _unseen(judged: Report) -> str:
    """Lines about what the scan could not see, which is not the same as nothing to say."""
    return text_of(
        f"note: the scan could not evaluate {run.rule}: {run.reason}"
        for run in judged.rules
        if run.state != "ok"
    )


def _scan(host: Host) -> Report:
    # Imported here: learning from files needs no look at the node.
    from gpuwarden.judge import judge
    from gpuwarden.policy import Policy
    from gpuwarden.scan import ScanOptions, take_snapshot

    return judge(take_snapshot(host, ScanOptions()), Policy(), None)
