"""A CUDA driver library as the finder hands it to the probes: an open file and where to attach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LibraryKey = tuple[int, int, int]
"""(major, minor, inode) of the open file (fstat), which on overlayfs is not the mapping's."""


class EntryPoint(NamedTuple):
    """Where a function is attached to: an offset in the file, in bytes."""

    file_offset: int
    at_start: bool
    """At +0: its prologue is not the known one, and each call costs a trap that single-steps."""


class FoundLibrary(NamedTuple):
    """A driver library that somebody maps; its finder closes ``descriptor`` once it is gone."""

    key: LibraryKey
    descriptor: int
    path: str
    build_id: str | None
    soname: str | None
    points: Mapping[str, EntryPoint]
    """By exported name (``functions.WATCHED``) or slot (``functions.SLOTS``)."""
    problems: tuple[str, ...] = ()
    """What of it cannot be seen, and why: slots that were not resolved, functions it lacks."""
