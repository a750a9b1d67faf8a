"""Where the packages of a distribution put programs."""

from __future__ import annotations

from gpuwarden.pattern import pattern

_DIRECTORIES = pattern(
    r"(?:/usr)?/s?bin|/usr/local/s?bin|/usr/lib(?:exec|32|64|x32)?(?:/.*)?|/lib(?:32|64)?(?:/.*)?"
    r"|/snap/.*|/nix/store/.*|/gnu/store/.*|/run/current-system/.*"
)


def is_packaged(path: str) -> bool:
    """Whether a file's path lies where packages put programs; says nothing of who put it there."""
    return _DIRECTORIES.fullmatch(path.rpartition("/")[0]) is not None
