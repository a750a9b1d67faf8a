"""A finder of driver libraries that is asked until it has said something."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuwarden.cuda.libraries import Libraries, LibraryNews
from gpuwarden.host import Host
from gpuwarden.probes.cuda.library import FoundLibrary, LibraryKey
from tests.support.containers import wait_until


class Finder:
    """What was found and has gone since it was started."""

    def __init__(self, libraries: Libraries) -> None:
        self.libraries = libraries
        self.found: list[FoundLibrary] = []
        self.gone: list[LibraryKey] = []
        self.news = LibraryNews([], [], {}, [])
        self._poll = select.epoll()
        self._poll.register(libraries.fileno(), select.EPOLLIN)

    def look(self, pids: list[int] | None = None) -> LibraryNews:
        self.news = self.libraries.look(pids)
        self.found += self.news.found
        self.gone += self.news.gone
        return self.news

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Looks when there is something, as the agent does. Errors: AssertionError."""

        def looked() -> bool:
            self._poll.poll(0.3)
            self.look()
            return condition()

        wait_until(looked, what)

    def mapped_by(self, pid: int) -> tuple[LibraryKey, ...]:
        """Which libraries that were found a process has mapped, by the last look."""
        return next((keys for (one, _), keys in self.news.mapped.items() if one == pid), ())

    def library_of(self, pid: int) -> FoundLibrary:
        """The library that a process maps, waited for."""
        self.until(lambda: bool(self.mapped_by(pid)), f"the library of pid {pid} found")
        key = self.mapped_by(pid)[0]
        return [found for found in self.found if found.key == key][-1]

    def close(self) -> None:
        self._poll.close()
        self.libraries.close()


@contextmanager
def finder(*, side_band: bool = True) -> Iterator[Finder]:
    """A finder that has looked at all processes once."""
    made = Finder(Libraries(Host(), side_band=side_band))
    try:
        made.look()
        yield made
    finally:
        made.close()


def key_of(path: Path) -> LibraryKey:
    """The key of a file on a file system that is not layered."""
    import os

    status = path.stat()
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
