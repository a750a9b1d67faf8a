"""What `gpuwarden evidence` does; it returns what is to be printed."""

from __future__ import annotations

import os

from gpuwarden.errors import UsageError
from gpuwarden.evidence.flags import SHOW, VERIFY, check_flags
from gpuwarden.outputs.told import Call, Told


def run(call: Call) -> Told:
    """The command.

    Errors: GpuwardenError.
    """
    arguments = call.arguments
    check_flags(arguments)
    action = arguments.what[0] if arguments.what else None
    if action in (VERIFY, SHOW):
        from gpuwarden.evidence import verify_command

        path = arguments.what[1]
        if action == VERIFY:
            return verify_command.verified(
                path,
                arguments.key,
                call.policy,
                as_json=arguments.format == "json",
                width=call.width,
                colour=call.colour,
            )
        return verify_command.shown(
            path, as_json=arguments.format == "json", width=call.width, colour=call.colour
        )
    return _write(call)


def _write(call: Call) -> Told:
    arguments = call.arguments
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
        call.policy,
        call.policy_path,
        tell=call.tell,
        why=why,
        directory=arguments.output,
        limit_bytes=None if arguments.max_mib is None else arguments.max_mib << 20,
        deadline_seconds=arguments.deadline,
        by_watch=arguments.by_watch,
    )
    if arguments.format == "json":
        return Told(archive_text.sealed_json(sealed))
    return Told(archive_text.sealed(sealed, width=call.width, colour=call.colour))
