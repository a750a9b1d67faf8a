"""What each command of `gpuwarden code` does; it returns what is to be printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from msgspec import Struct

from gpuwarden.code.baseline.known import Baselines
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module
from gpuwarden.code.report import CodeReport, Standing
from gpuwarden.code.standing import assessor
from gpuwarden.codescan.flags import check_targets
from gpuwarden.codescan.known_code import baselines_of, described
from gpuwarden.codescan.scan import Options, Progress, scan_code
from gpuwarden.codescan.targets import Target, Targets
from gpuwarden.codescan.tasks import Assess, Buffer
from gpuwarden.outputs.code_table import Wanted, render
from gpuwarden.outputs.words import json_text

CLEAR, FINDING, UNREAD = 0, 1, 2

Tell = Callable[[Progress], None]


class Told(Struct, frozen=True):
    """What the command has to say, and its exit code."""

    text: str
    code: int


def run(arguments: argparse.Namespace, tell: Tell, *, width: int, colour: bool) -> Told:
    """The command that the command line names. Errors: GpuwardenError."""
    return {"scan": scan}[arguments.action](arguments, tell, width=width, colour=colour)


def scan(arguments: argparse.Namespace, tell: Tell, *, width: int, colour: bool) -> Told:
    """Every module of the targets, looked up and judged.

    Errors: UsageError; Unavailable, Denied or Malformed for a baseline.
    """
    check_targets(arguments)
    baselines = baselines_of(arguments)
    assess = assessor(Baselines(baselines), judge=_unjudged if arguments.no_judge else None)
    options = Options(
        kernels=arguments.kernels or arguments.format == "json",
        judged=not arguments.no_judge,
        baselines=tuple(map(described, baselines)),
    )
    targets = Targets(options.workers)
    report = scan_code(
        _asked(targets, arguments),
        targets.numbers,
        _without_judgement(assess) if arguments.no_judge else assess,
        options,
        tell,
    )
    code = exit_code(report, all_layers=arguments.all_layers)
    if arguments.format == "json":
        return Told(json_text(report), code)
    wanted = Wanted(
        every_module=arguments.list, kernels=arguments.kernels, all_layers=arguments.all_layers
    )
    return Told(render(report, width=width, colour=colour, exit_code=code, wanted=wanted), code)


def _asked(targets: Targets, arguments: argparse.Namespace) -> list[Target]:
    """All that was asked for, looked up before anything is read. Errors: UsageError."""
    return [targets.target(name) for name in arguments.target]


def exit_code(report: CodeReport, *, all_layers: bool = False) -> int:
    """1 for hash-like code that is not known, else 2 when something could not be read, else 0.

    Files that a later layer hides count when they were asked for.
    """
    if any(one.is_alarming and (all_layers or not one.is_hidden) for one in report.modules):
        return FINDING
    return UNREAD if report.problems else CLEAR


def _unjudged(kind: str, image: Buffer) -> ModuleJudgement:
    return ModuleJudgement(answer="not enough code")


def _without_judgement(assess: Assess) -> Assess:
    def looked_up(module: Module, image: Buffer) -> tuple[Standing, str, ModuleJudgement | None]:
        standing, known_as, _ = assess(module, image)
        return standing, known_as, None

    return looked_up
