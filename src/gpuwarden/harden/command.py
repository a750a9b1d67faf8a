"""What `gpuwarden harden` does: hands over to the site that was named."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from gpuwarden.errors import UsageError
from gpuwarden.outputs.told import Told
from gpuwarden.policy import Policy

SITES = ("kubernetes", "slurm", "host")


def run(
    arguments: argparse.Namespace,
    policy: Policy,
    policy_path: str | None,
    *,
    tell: Callable[[str], None],
    ask: Callable[[str], bool],
    width: int,
    colour: bool,
) -> Told:
    """The command of one site; ``tell`` takes lines while it works, ``ask`` puts a question.

    Errors: GpuwardenError.
    """
    # Imported by name: each site is another job, with imports of its own.
    from importlib import import_module

    if arguments.site not in SITES:
        raise UsageError(f"harden: no site is called '{arguments.site}'")
    told = import_module(f"gpuwarden.harden.{arguments.site}").run(
        arguments,
        policy,
        policy_path,
        tell=tell,
        ask=ask,
        width=width,
        colour=colour,
    )
    assert isinstance(told, Told)  # noqa: S101 - what a name gives has no type
    return told
