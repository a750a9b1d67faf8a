"""How far a look has come, on a line of a terminal that is written over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from gpuwarden.codescan.scan import Progress
from gpuwarden.outputs.sheet import cut
from gpuwarden.outputs.words import MIB, escape

_LINE, _CLEARED = "\r", "\x1b[K"


@contextmanager
def progress_on(stream: TextIO, *, width: int, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """What is told goes to ``stream`` if that is a terminal; the line is gone afterwards."""
    if quiet or not stream.isatty():
        yield lambda progress: None
        return

    def tell(progress: Progress) -> None:
        done = f"{progress.read_bytes / MIB:,.0f} MiB, {progress.modules:,} modules: "
        stream.write(_LINE + cut(done + escape(progress.target), width - 1) + _CLEARED)
        stream.flush()

    try:
        yield tell
    finally:
        stream.write(_LINE + _CLEARED)
        stream.flush()
