"""How Slurm's steps put things: command lines for a person's shell, ids in a row; their bounds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gpuwarden.expected.slurm.site import CONFIGURATION_PATHS, Site

COMMAND_SECONDS = 5.0
LOOK_SECONDS = 10.0
ACT_SECONDS = 60.0
SHOWN = 12
DEFAULT_PATH = CONFIGURATION_PATHS[0]


def command_line(site: Site, program: str, *words: str) -> str:
    """A command for a person's shell, of this host's cluster."""
    configuration = site.configuration
    if configuration is None or configuration == DEFAULT_PATH:
        return shlex.join([program, *words])
    return shlex.join(["env", f"SLURM_CONF={configuration}", program, *words])


def count(number: int, noun: str) -> str:
    """``1 job``, ``3 jobs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shortened(ids: Sequence[str]) -> str:
    """The first ids, and how many more there are."""
    more = len(ids) - SHOWN
    return ", ".join(ids[:SHOWN]) + (f" and {more} more" if more > 0 else "")
