"""What `gpuwarden evidence` does; it returns what is to be printed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from gpuwarden.errors import UsageError
from gpuwarden.evidence.flags import SHOW, VERIFY, check_flags
from gpuwarden.outputs.told import Told
from gpuwarden.policy import Policy


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
    """The command; ``tell`` takes lines while it works, ``ask`` puts a question.

    Errors: GpuwardenError.
    """
    check_flags(arguments)
    action = arguments.what[0] if arguments.what else None
    if action in (VERIFY, SHOW):
        from gpuwarden.evidence import verify_command

        path = arguments.what[1]
        if action == VERIFY:
            return verify_command.verified(
                path,
                arguments.key,
                policy,
                as_json=arguments.format == "json",
                width=width,
                colour=colour,
            )
        return verify_command.shown(
            path, as_json=arguments.format == "json", width=width, colour=colour
        )
    return _write(arguments, policy, policy_path, tell=tell, width=width, colour=colour)


def _write(
    arguments: argparse.Namespace,
    policy: Policy,
    policy_path: str | None,
    *,
    tell: Callable[[str], None],
    width: int,
    colour: bool,
) -> Told:
    if not os.path.isdir(arguments.root):
        raise UsageError(f"--root {arguments.root}: not a directory")
    from gpuwarden.evidence import archive_text
    from gpuwarden.evidence.wanted import wanted_of
    from gpuwarden.evidence.writing import write

    why = "asked for on the command line"
    if arguments.by_watch:
        why = f"finding {arguments.finding} opened as critical"
    sealed = write(
        wanted_of(arguments),
        policy,
        policy_path,
        tell=tell,
        why=why,
        directory=arguments.output,
        limit_bytes=None if arguments.max_mib is None else arguments.max_mib << 20,
        deadline_seconds=arguments.deadline,
        by_watch=arguments.by_watch,
    )
    if arguments.format == "json":
        return Told(archive_text.sealed_json(sealed))
    return Told(archive_text.sealed(sealed, width=width, colour=colour))
