"""`gpuwarden code verify`: where every module of its targets stands; it returns what is printed."""

from __future__ import annotations

import argparse

from gpuwarden.code.baseline.known import Baselines, Lookup
from gpuwarden.code.report import CodeReport, FoundModule
from gpuwarden.code.standing import JitRule, assessor
from gpuwarden.codescan.command import Tell, Told, look
from gpuwarden.codescan.flags import check_targets
from gpuwarden.codescan.installed_driver import installed_driver
from gpuwarden.codescan.known_code import (
    baselines_of,
    described,
    jit_rules,
    open_profile,
    trust,
    warnings_of,
)
from gpuwarden.codescan.scan import Options
from gpuwarden.errors import UsageError
from gpuwarden.host import Host
from gpuwarden.outputs.code_table import Wanted, render
from gpuwarden.outputs.words import json_text
from gpuwarden.policy import Policy

ALL_KNOWN, UNKNOWN, UNREAD = 0, 1, 2


def verify(
    arguments: argparse.Namespace, policy: Policy, tell: Tell, *, width: int, colour: bool
) -> Told:
    """`code verify`. Errors: UsageError; Unavailable, Denied or Malformed for a baseline."""
    check_targets(arguments)
    rules: dict[str, JitRule] = {}
    if arguments.profile is not None:
        profile = policy.profile(arguments.profile)
        if profile is None:
            raise UsageError(
                f"--profile {arguments.profile}: the policy has no profile of that name"
            )
        rules = jit_rules(profile)
        # A profile says itself whether the installed baseline counts.
        arguments.no_starter = True
        trusted = trust(arguments.key, allow_unsigned=arguments.allow_unsigned)
        baselines = [*open_profile(profile, trusted), *baselines_of(arguments)]
    else:
        baselines = baselines_of(arguments)
    asked_of: list[Lookup] = [*baselines]
    driver = installed_driver(Host())
    if len(driver):
        asked_of.append(driver)
    assess = assessor(Baselines(asked_of), rules)
    options = Options(
        kernels=arguments.kernels or arguments.format == "json",
        judged=True,
        baselines=tuple(map(described, baselines)),
    )
    report = look(arguments, assess, options, tell)
    code = exit_code(report, all_layers=arguments.all_layers)
    complaint = warnings_of(baselines)
    if arguments.format == "json":
        return Told(json_text(report), code, complaint)
    wanted = Wanted(
        every_module=arguments.list, kernels=arguments.kernels, all_layers=arguments.all_layers
    )
    text = render(report, width=width, colour=colour, exit_code=code, wanted=wanted)
    return Told(text, code, complaint)


def exit_code(report: CodeReport, *, all_layers: bool = False) -> int:
    """1 for a module that is not known, else 2 when something could not be read, else 0.

    A module that is broken could not be read. What a later layer of an image hides counts when it
    was asked for.
    """
    counted = [one for one in report.modules if all_layers or not one.is_hidden]
    if any(is_unknown(one) for one in counted):
        return UNKNOWN
    unread = report.problems or any(one.module.broken for one in counted)
    return UNREAD if unread else ALL_KNOWN


def is_unknown(found: FoundModule) -> bool:
    """Whether nothing vouches for a module that was read."""
    return not found.module.broken and (found.is_alarming or found.standing in ("unknown", ""))
