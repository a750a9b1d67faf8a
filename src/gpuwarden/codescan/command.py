"""What each command of `gpuwarden code` does; it returns what is to be printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpuwarden.code.baseline.known import Baselines
from gpuwarden.code.baseline.reader import Baseline
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module, Problem
from gpuwarden.code.report import CodeReport, Standing
from gpuwarden.code.standing import Assessor
from gpuwarden.codescan.flags import check_targets
from gpuwarden.codescan.known_code import baselines_of, described, warnings_of
from gpuwarden.codescan.processes import Processes
from gpuwarden.codescan.scan import Options, Progress, scan_code
from gpuwarden.codescan.targets import Targets
from gpuwarden.codescan.tasks import Assess, Buffer
from gpuwarden.host import Host
from gpuwarden.outputs.code_table import Wanted, render
from gpuwarden.outputs.told import Told
from gpuwarden.outputs.words import json_text
from gpuwarden.policy import Policy

CLEAR, FINDING, UNREAD = 0, 1, 2

Tell = Callable[[Progress], None]


def run(
    arguments: argparse.Namespace, policy: Policy, tell: Tell, *, width: int, colour: bool
) -> Told:
    """The command that the command line names. Errors: GpuwardenError."""
    if arguments.action == "verify":
        from gpuwarden.codescan.verify_command import verify

        return verify(arguments, policy, tell, width=width, colour=colour)
    return scan(arguments, tell, width=width, colour=colour)


def scan(arguments: argparse.Namespace, tell: Tell, *, width: int, colour: bool) -> Told:
    """Every module of the targets, looked up and judged.

    Errors: UsageError; Unavailable, Denied or Malformed for a baseline.
    """
    check_targets(arguments)
    baselines = baselines_of(arguments)
    assess = (LookUp if arguments.no_judge else Assessor)(Baselines(baselines))
    options = options_of(arguments, baselines, judged=not arguments.no_judge)
    report = look(arguments, assess, options, tell)
    code = exit_code(report, all_layers=arguments.all_layers)
    return told_of(report, code, arguments, baselines, width=width, colour=colour)


def options_of(
    arguments: argparse.Namespace, baselines: Sequence[Baseline], *, judged: bool
) -> Options:
    """How a look is taken for what is to be told."""
    return Options(
        kernels=arguments.kernels or arguments.format == "json",
        brief=not (arguments.kernels or arguments.list or arguments.format == "json"),
        judged=judged,
        baselines=tuple(map(described, baselines)),
    )


def told_of(
    report: CodeReport,
    code: int,
    arguments: argparse.Namespace,
    baselines: Sequence[Baseline],
    *,
    width: int,
    colour: bool,
) -> Told:
    """A report as the command line asks for it."""
    complaint = warnings_of(baselines)
    if arguments.format == "json":
        return Told(json_text(report), code, complaint)
    wanted = Wanted(
        every_module=arguments.list, kernels=arguments.kernels, all_layers=arguments.all_layers
    )
    text = render(report, width=width, colour=colour, exit_code=code, wanted=wanted)
    return Told(text, code, complaint)


def look(
    arguments: argparse.Namespace, assess: Assess | None, options: Options, tell: Tell
) -> CodeReport:
    """What is in the targets and processes that the command line names.

    All are looked up before anything is read. Errors: UsageError, Unavailable.
    """
    targets = Targets(options.workers)
    host = Host()
    processes = Processes(host, targets.numbers, shares=options.workers)
    asked = [targets.target(name) for name in arguments.target]
    pids: list[int] = list(arguments.pid)
    unseen: tuple[Problem, ...] = ()
    if getattr(arguments, "all_gpu_processes", False):
        # Imported here: most looks are at files.
        from gpuwarden.codescan.gpu_processes import gpu_processes

        found, unseen = gpu_processes(host, arguments.nvml_library)
        pids += found
    asked += [processes.target(pid) for pid in dict.fromkeys(pids)]
    report = processes.finished(scan_code(asked, targets.numbers, assess, options, tell))
    return replace(report, problems=(*unseen, *report.problems))


def exit_code(report: CodeReport, *, all_layers: bool = False) -> int:
    """1 for hash-like code that is not known, else 2 when something could not be read, else 0.

    Files that a later layer hides count when they were asked for.
    """
    if any(one.is_alarming and (all_layers or not one.is_hidden) for one in report.modules):
        return FINDING
    return UNREAD if report.problems else CLEAR


class LookUp(Assessor):
    """Says where a module stands, and not what it computes."""

    def __init__(self, baselines: Baselines) -> None:
        super().__init__(baselines, judge=_unjudged)

    def __call__(self, module: Module, image: Buffer) -> tuple[Standing, str, None]:
        standing, known_as, _ = super().__call__(module, image)
        return standing, known_as, None


def _unjudged(kind: str, image: Buffer) -> ModuleJudgement:
    return ModuleJudgement(answer="not enough code")
