"""Files that a child looks at: asked one after the other, and what came of it."""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

from gpuwarden.cuda.driver_elf import DriverElf
from gpuwarden.cuda.file_child import DESCRIPTORS_LIMIT, Answer, FileChild, Request, close_all
from gpuwarden.cuda.library_book import Home, Subject
from gpuwarden.cuda.mapped_files import Executable, MappedFile, MapsKey, link_of, path_of
from gpuwarden.errors import Unavailable
from gpuwarden.host import Host

QUEUE_LIMIT = 20_000
HUNG_SECONDS = 30.0
"""How long a file system that did not answer is left alone."""
HOMES_LIMIT = DESCRIPTORS_LIMIT - 1
"""Files that another may be the same as; beyond, one file may be attached to twice."""
PATH_LIMIT = 512


class Looked(NamedTuple):
    """A file that was looked at."""

    key: MapsKey
    path: str
    subject: Subject | None = None
    """Open, when it is a driver library; who takes it closes it."""
    elf: DriverElf | None = None
    mark: tuple[int, int, int] | None = None
    compared: bool = False
    """It was asked whether it is the same as others; ``home`` is the one that it is, if any."""
    home: Home | None = None
    problem: str = ""
    gone: bool = False


class _Asked(NamedTuple):
    key: MapsKey
    path: str
    subject: Subject | None = None
    elf: DriverElf | None = None
    homes: tuple[Home, ...] = ()
    handles: tuple[int, ...] = ()
    """Of ``homes``, our own until the answer."""


class AwayFiles:
    """Nothing here waits."""

    def __init__(self, host: Host, machine: str) -> None:
        self._host = host
        self._child = FileChild(machine)
        self._queue: dict[MapsKey, Executable] = {}
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._hung: dict[tuple[int, int], float] = {}
        """File systems, as maps tell them → when they did not answer last."""

    def close(self) -> None:
        for asked in self._asked.values():
            close_all(asked.handles)
            if asked.subject is not None:
                os.close(asked.subject.file.handle)
        self._asked.clear()
        self._child.close()

    @property
    def pids(self) -> set[int]:
        return self._child.pids

    def fileno(self) -> int | None:
        return self._child.fileno()

    def add(self, key: MapsKey, place: Executable) -> bool:
        """Puts a file into the queue; False when that is full."""
        if len(self._queue) >= QUEUE_LIMIT:
            return False
        self._queue[key] = place
        return True

    def examine(self, subject: Subject, known: dict[str, dict[str, int]]) -> Looked | None:
        """Has a file looked at again; a failure at once, else None."""
        return self._ask(_Asked(subject.key, subject.path, subject), known=known)

    def compare(self, subject: Subject, elf: DriverElf, homes: list[Home]) -> Looked | None:
        """Has it asked which of ``homes`` is the same file; a failure at once, else None."""
        some = tuple(homes[:HOMES_LIMIT])
        handles = tuple(os.dup(home.file.handle) for home in some)
        return self._ask(_Asked(subject.key, subject.path, subject, elf, some, handles))

    def take(self, now: float) -> list[Looked]:
        """What came of it by now; gives the child what is next."""
        found = []
        for answer, handle in self._child.take():
            asked = self._asked.pop(answer.number)
            close_all(asked.handles)
            if answer.hung:
                self._hung[asked.key[:2]] = now
            found.append(_looked(asked, answer, handle))
        while self._queue and self._child.has_room:
            key = next(iter(self._queue))
            place = self._queue.pop(key)
            if now - self._hung.get(key[:2], -HUNG_SECONDS) < HUNG_SECONDS:
                found.append(Looked(key, "", problem="its file system does not answer"))
                continue
            asked = _Asked(key, path_of(self._host, place)[:PATH_LIMIT])
            failed = self._ask(asked, link_of(self._host, place))
            if failed is not None:
                found.append(failed)
        return found

    def _ask(
        self, asked: _Asked, link: str = "", known: dict[str, dict[str, int]] | None = None
    ) -> Looked | None:
        number = next(self._numbers)
        request = Request(number, link, bool(asked.homes), known or {}, asked.key[:2])
        subject = asked.subject
        handles = asked.handles if subject is None else (subject.file.handle, *asked.handles)
        try:
            self._child.submit(request, handles)
        except Unavailable as error:
            close_all(asked.handles)
            return _looked(asked, Answer(number, problem=str(error)), None)
        self._asked[number] = asked
        return None


def _looked(asked: _Asked, answer: Answer, handle: int | None) -> Looked:
    key, path, subject = asked.key, asked.path, asked.subject
    if asked.homes:
        at = answer.same
        home = asked.homes[at] if at is not None and at < len(asked.homes) else None
        return Looked(key, path, subject, asked.elf, compared=True, home=home)
    mark = answer.status.mark if answer.status is not None else None
    if handle is not None:
        if answer.status is None:
            os.close(handle)
        else:
            subject = Subject(key, MappedFile(handle, answer.status), path, is_local=False)
    return Looked(key, path, subject, answer.elf, mark, problem=answer.problem, gone=answer.gone)
