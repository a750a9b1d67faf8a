"""What a command has to say when it is done."""

from __future__ import annotations

from msgspec import Struct

CLEAR, FINDING, BLIND = 0, 1, 2
"""Exit codes: nothing wrong; something is; something could not be seen or done."""


class Told(Struct, frozen=True):
    """The text of a command, its exit code, and what it warns of beside that."""

    text: str
    code: int = CLEAR
    complaint: str = ""
