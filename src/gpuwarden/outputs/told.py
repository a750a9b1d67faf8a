"""What a command is called with, and what it has to say when it is done."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from gpuwarden.policy import Policy

CLEAR, FINDING, BLIND = 0, 1, 2
"""Exit codes: nothing wrong; something is; something could not be seen or done."""


class Told(Struct, frozen=True):
    """The text of a command, its exit code, and what it warns of beside that."""

    text: str
    code: int = CLEAR
    complaint: str = ""


class Call(NamedTuple):
    """What a command is called with."""

    arguments: argparse.Namespace
    policy: Policy
    policy_path: str | None
    tell: Callable[[str], None]
    """Takes a line for the person who waits."""
    ask: Callable[[str], bool]
    """Puts a question; nobody there is no."""
    width: int
    colour: bool
