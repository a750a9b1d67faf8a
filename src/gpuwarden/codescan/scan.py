"""Targets → CodeReport: the parent's loop over jobs and answers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from gpuwarden import __version__
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.module import Place, Problem
from gpuwarden.code.report import CodeReport
from gpuwarden.codescan.crew import WORKERS, Crew
from gpuwarden.codescan.findings import Findings, Ledger
from gpuwarden.codescan.judged_sets import judged_together
from gpuwarden.codescan.judging_data import load_judging
from gpuwarden.codescan.targets import Target, closing
from gpuwarden.codescan.tasks import Assess, DocumentsTask, Image, Keep, Settings
from gpuwarden.codescan.worker import Job

PATH_KEY_BYTES = 16


class Options(Struct, frozen=True, kw_only=True):
    """How a look is taken."""

    bounds: Bounds = DEFAULT
    kernels: bool = True
    brief: bool = False
    """Of a known module no more is told than its digest and its place."""
    workers: int = WORKERS
    judged: bool = False
    baselines: tuple[str, ...] = ()
    """For the report: what ``assess`` does."""
    keep: Keep | None = None
    """Which images come back whole."""


class Progress(Struct, frozen=True):
    """How far a look has come."""

    target: str
    read_bytes: int
    modules: int


def scan_code(
    targets: Iterable[Target],
    numbers: Iterator[int],
    assess: Assess | None = None,
    options: Options | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
    *,
    kept: Callable[[Image], None] = lambda image: None,
) -> CodeReport:
    """Reads all targets in confined children; what was found, in the order of finding.

    ``numbers`` gives the numbers of tasks, ``assess`` is what each module is judged by, ``tell`` is
    called a few times a second, ``kept`` with each image that ``Options.keep`` takes.

    Errors: Unavailable when no child can be made.
    """
    options = options or Options()
    began = time.monotonic()
    key = secrets.token_bytes(PATH_KEY_BYTES)
    settings = Settings(
        bounds=options.bounds,
        kernels=options.kernels,
        brief=options.brief,
        path_key=key,
        keep=options.keep,
    )
    findings = Findings(key)
    by_number: dict[int, Ledger] = {}

    def jobs() -> Iterator[Job]:
        for target in targets:
            ledger = findings.open(target.name, target.what)
            ledger.skipped, ledger.process = target.skipped, target.process
            for one in target.jobs():
                if isinstance(one, Problem):
                    findings.problem(ledger, one)
                else:
                    by_number[one.task.number] = ledger
                    if one.cache:
                        ledger.caches[one.task.place.members[0]] = one.cache
                    yield one

    def documents() -> Iterator[Job]:
        # Of image layouts: now that all their files were read, all are here.
        for ledger in findings.ledgers:
            if ledger.documents:
                nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                place = Place(target=ledger.name)
                task = DocumentsTask(number=next(numbers), place=place, documents=ledger.documents)
                by_number[task.number] = ledger
                yield Job(task, nowhere, closing(nowhere))

    def tick() -> None:
        if findings.ledgers:
            read = sum(ledger.read_bytes for ledger in findings.ledgers) + crew.read_bytes()
            tell(Progress(findings.ledgers[-1].name, read, findings.sightings))

    if options.judged:
        load_judging()
    with Crew(settings, assess, workers=options.workers, tick=tick) as crew:
        for job, answer in crew.answers(jobs()):
            if isinstance(answer, Image):
                kept(answer)
            findings.take(by_number[job.task.number], job.task, answer)
        for job, answer in crew.answers(documents()):
            findings.take(by_number[job.task.number], job.task, answer)
        unconfined = crew.unconfined
    modules = findings.modules()
    if options.judged:
        # Imported here: a look that judges nothing reads no model.
        from gpuwarden.code.classify import judge_together

        modules = judged_together(modules, judge_together)
    problems = findings.problems()
    return CodeReport(
        gpuwarden_version=__version__,
        targets=tuple(ledger.target() for ledger in findings.ledgers),
        modules=modules,
        problems=problems,
        unconfined=unconfined,
        judged=options.judged,
        baselines=options.baselines,
        seconds=round(time.monotonic() - began, 3),
    )
