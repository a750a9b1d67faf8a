"""What a person at a terminal is told while a command works, and is asked before it acts."""

from __future__ import annotations

import sys

from gpuwarden.outputs.words import escape


def tell(line: str) -> None:
    """A line of progress for the person who waits."""
    sys.stderr.write(escape(line) + "\n")
    sys.stderr.flush()


def ask(question: str) -> bool:
    """Whether a person at a terminal says yes; nobody there is no."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"{escape(question)} [yes/NO] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip() == "yes"
