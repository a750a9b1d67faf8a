"""`gpuwarden code verify`: where every module of its targets stands; it returns what is printed."""

from __future__ import annotations

import argparse

from gpuwarden.code.baseline.known import Baselines, Lookup
from gpuwarden.code.report import CodeReport, FoundModule
from gpuwarden.code.standing import Assessor, JitRule
from gpuwarden.codescan.command import Tell, look, options_of, told_of
from gpuwarden.codescan.flags import check_targets
from gpuwarden.codescan.installed_driver import installed_driver
from gpuwarden.codescan.known_code import (
    baselines_of,
    jit_rules,
    open_profile,
    trust,
)
from gpuwarden.errors import UsageError
from gpuwarden.host import Host
from gpuwarden.outputs.told import Told
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
    assess = Assessor(Baselines(asked_of), rules)
    options = options_of(arguments, baselines, judged=True)
    report = look(arguments, assess, options, tell)
    code = exit_code(report, all_layers=arguments.all_layers)
    return told_of(report, code, arguments, baselines, width=width, colour=colour)


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
