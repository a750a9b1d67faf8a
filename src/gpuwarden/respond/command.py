"""What `gpuwarden respond` does; it returns what is to be printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from gpuwarden.errors import UsageError
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
    raise UsageError("respond: not in this build")
