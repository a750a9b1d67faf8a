"""What each file is that is mapped executable: looked at once, as long as it stays the same."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import NamedTuple

from gpuwarden.cuda.driver_elf import LIBRARIES, DriverElf
from gpuwarden.cuda.file_child import DESCRIPTORS_LIMIT, Answer, FileChild, Request, examine_file
from gpuwarden.cuda.library_book import Home, KnownFile, Library, LibraryBook
from gpuwarden.cuda.mapped_files import (
    Executable,
    MappedFile,
    MapsKey,
    local_devices,
    open_mapped,
    path_of,
    status_of,
)
from gpuwarden.cuda.slot_book import SlotBook
from gpuwarden.cuda.without_library import is_gpu_library
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes.cuda.functions import SLOTS

LIBRARIES_LIMIT = 256
HOMES_LIMIT = DESCRIPTORS_LIMIT - 1
"""Files that another may be the same as; beyond, one file may be attached to twice."""
PROBLEMS_LIMIT = 64
HUNG_SECONDS = 30.0
"""How long a file system that did not answer is left alone."""
UNREAD = (-1, -1, -1)
UNSEEN = {
    "foreign": "calls of this driver library are not seen",
    "broken": "not readable as an ELF file, it may be a driver library",
}
PATH_LIMIT = 512


class _Subject(NamedTuple):
    """A file that is being looked at."""

    key: MapsKey
    file: MappedFile
    path: str
    is_local: bool
    with_known: bool = False
    """It is looked at with what is known of its build-id."""


class _Asked(NamedTuple):
    """What the child was asked."""

    subject: _Subject
    elf: DriverElf | None = None
    """What the file is; then it was asked which of ``homes`` is the same file."""
    homes: tuple[Home, ...] = ()
    handles: tuple[int, ...] = ()
    """Of those, our own until the answer."""


class LibraryFiles:
    """Reads files, here or in a child, and puts the driver libraries among them into ``book``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._machine = os.uname().machine
        self.book = LibraryBook()
        self.problems: dict[str | MapsKey, str] = {}
        """What cannot be seen, by what it is about, as long as that is so."""
        self.to_read: set[int] = set()
        """Processes whose maps are to be read, since what they map has become known."""
        self.now = 0.0
        self._slots = SlotBook(host)
        self._child = FileChild(self._machine)
        self._queue: dict[MapsKey, tuple[int, Executable]] = {}
        """Files for the child, each with a process that has it mapped."""
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[MapsKey, set[int]] = {}
        """Processes that map a file of which it is not known yet what it is."""
        self._hung: dict[tuple[int, int], float] = {}
        """File systems → when they did not answer last."""
        self._mounts: dict[int, frozenset[tuple[int, int]]] = {}
        self._slots.prepare(self._machine)

    def close(self) -> None:
        for asked in self._asked.values():
            _close((asked.subject.file.handle, *asked.handles))
        self._asked.clear()
        self._slots.close()
        self._child.close()
        self.book.close()

    def filenos(self) -> set[int]:
        """Readable when there is something to take."""
        child = self._child.fileno()
        return self._slots.filenos() | (set() if child is None else {child})

    @property
    def own_pids(self) -> set[int]:
        return {os.getpid()} | self._child.pids | self._slots.pids

    def begin(self, now: float) -> None:
        """A look begins: what ended in the one before is let go."""
        self.now = now
        self._mounts.clear()
        self.book.close_left()

    def problem(self, about: str | MapsKey, text: str) -> None:
        """Something cannot be seen: a file, of which many are counted, or a thing of its own."""
        if isinstance(about, str) or about in self.problems or len(self.problems) < PROBLEMS_LIMIT:
            self.problems[about] = text
        else:
            self.problems["more"] = "and more files that cannot be read"

    def prune(self, seen_before: float) -> None:
        """Forgets files that nobody was seen to map since."""
        for key in self.book.prune(seen_before):
            self.problems.pop(key, None)
        if len(self.problems) < PROBLEMS_LIMIT:
            self.problems.pop("more", None)

    def meet(
        self, pid: int, key: MapsKey, place: Executable, generation: int | None = None
    ) -> KnownFile | None:
        """What is known of a file that a process maps; one that is new is looked at.

        None when it could not be: it is mapped no more, or was never a file.
        """
        known = self.book.files.get(key)
        if known is not None:
            known.seen_at = self.now
            if known.waits:
                self._waiting.setdefault(key, set()).add(pid)
                return known
            if not self._has_changed(known, place, generation):
                return known
            self.problems.pop(key, None)
            self.book.forget(key)
        known = KnownFile((0, 0, 0), generation, self.now, self.now, waits=True)
        if key[:2] in self._local(pid):
            subject = self._open(pid, key, place, known, is_local=True)
            if subject is not None:
                self._examine_here(subject, {})
            return self.book.files.get(key)
        self.book.files[key] = known
        self._waiting.setdefault(key, set()).add(pid)
        self._queue[key] = (pid, place)
        return known

    def take(self) -> None:
        """Takes the answers of children and gives them what waits."""
        for answer in self._child.take():
            asked = self._asked.pop(answer.number)
            _close(asked.handles)
            if answer.hung:
                self._hung[asked.subject.file.status.key[:2]] = self.now
            if answer.problem and asked.elf is None:
                self._unread(asked.subject, answer.problem)
            elif asked.elf is not None:
                self._compared(asked, answer)
            elif answer.elf is not None:
                self._examined(asked.subject, answer.elf)
        for library, slots in self._slots.take():
            self._resolved(library, slots.offsets, slots.problems)
        while self._queue and self._child.has_room:
            key = next(iter(self._queue))
            pid, place = self._queue.pop(key)
            known = self.book.files.get(key)
            if known is None or not known.waits:
                continue
            subject = self._open(pid, key, place, known, is_local=False)
            if subject is None:
                continue
            hung_at = self._hung.get(subject.file.status.key[:2])
            if hung_at is not None and self.now - hung_at < HUNG_SECONDS:
                self._unread(subject, "its file system does not answer")
            else:
                self._submit(_Asked(subject), {})

    # ---------------------------------------------------------------- files

    def _has_changed(self, known: KnownFile, place: Executable, generation: int | None) -> bool:
        if generation is not None and known.generation not in (generation, None):
            return True
        # Once a look: what is asked now is younger than every mapping that the look is about.
        if known.checked_at == self.now:
            return False
        try:
            mark = status_of(self._host, place).mark
        except GpuwardenError:
            return False
        known.checked_at = self.now
        known.generation = known.generation if generation is None else generation
        return mark != known.mark

    def _open(
        self, pid: int, key: MapsKey, place: Executable, known: KnownFile, *, is_local: bool
    ) -> _Subject | None:
        """The file opened, and known from now on; None where there is nothing to read."""
        try:
            file = open_mapped(self._host, place)
        except Unavailable:
            # It is mapped no more; others that wait for it are asked for it anew.
            self.book.files.pop(key, None)
            self.to_read |= self._waiting.pop(key, set()) - {pid}
            return None
        except GpuwardenError as error:
            self.book.files[key] = known
            self._is_nothing(key, None)
            self.problem(key, f"a file that pid {pid} maps: {error}")
            return None
        self.book.files[key] = known
        if file is None:
            self._is_nothing(key, None)
            return None
        known.mark = file.status.mark
        return _Subject(key, file, path_of(self._host, place)[:PATH_LIMIT], is_local)

    def _examine_here(self, subject: _Subject, known: dict[str, dict[str, int]]) -> None:
        file = subject.file
        try:
            elf = examine_file(file.handle, file.status.size, self._machine, known)
        except OSError as error:
            self._unread(subject, error.strerror or str(error))
        else:
            self._examined(subject, elf)

    def _submit(self, asked: _Asked, known: dict[str, dict[str, int]]) -> None:
        number = next(self._numbers)
        file = asked.subject.file
        device = file.status.key[:2]
        request = Request(number, file.status.size, bool(asked.homes), known, device)
        asked = asked._replace(handles=tuple(os.dup(home.file.handle) for home in asked.homes))
        self._asked[number] = asked
        try:
            self._child.submit(request, (file.handle, *asked.handles))
        except Unavailable as error:
            _close(self._asked.pop(number).handles)
            self._unread(asked.subject, str(error))

    def _unread(self, subject: _Subject, why: str) -> None:
        os.close(subject.file.handle)
        known = self.book.files.get(subject.key)
        if known is not None:
            # It is tried again when it is met again.
            known.mark = UNREAD
        self._is_nothing(subject.key, None)
        text = f"{subject.path} cannot be read, it may be a driver library: {why}"
        self.problem(subject.key, text)

    def _is_nothing(self, key: MapsKey, soname: str | None) -> None:
        known = self.book.files.get(key)
        if known is not None:
            known.waits = False
            known.soname = soname if is_gpu_library(soname) else None
        self._waiting.pop(key, None)

    def _local(self, pid: int) -> frozenset[tuple[int, int]]:
        if pid not in self._mounts:
            self._mounts[pid] = local_devices(self._host, pid)
        return self._mounts[pid]

    # ---------------------------------------------------------------- libraries

    def _examined(self, subject: _Subject, elf: DriverElf) -> None:
        if elf.kind not in LIBRARIES:
            os.close(subject.file.handle)
            self._is_nothing(subject.key, elf.soname)
            if elf.kind in UNSEEN:
                why = "; ".join(elf.problems)
                self.problem(subject.key, f"{subject.path}: {UNSEEN[elf.kind]}: {why}")
            return
        offsets = self._slots.known(elf.build_id)
        if not subject.with_known and not offsets.keys() <= elf.offsets.keys():
            again = subject._replace(with_known=True)
            known = {elf.build_id or "": offsets}
            if subject.is_local:
                self._examine_here(again, known)
            else:
                self._submit(_Asked(again), known)
            return
        homes = tuple(self.book.like(elf, subject.file.status.size))[:HOMES_LIMIT]
        if homes and not subject.is_local:
            self._submit(_Asked(subject, elf, homes), {})
            return
        self._settle(subject, elf, None)

    def _compared(self, asked: _Asked, answer: Answer) -> None:
        if asked.elf is None:
            return
        library = None
        if answer.same is not None and answer.same < len(asked.homes):
            library = self.book.library_of(asked.homes[answer.same])
        self._settle(asked.subject, asked.elf, library)

    def _settle(self, subject: _Subject, elf: DriverElf, library: Library | None) -> None:
        """The file is that library, or one of its own."""
        key = subject.key
        known = self.book.files.get(key)
        if known is None or (library is None and len(self.book.libraries) >= LIBRARIES_LIMIT):
            os.close(subject.file.handle)
            self._is_nothing(key, None)
            if known is not None:
                self.problem("many", f"more than {LIBRARIES_LIMIT} driver libraries are mapped")
            return
        if library is None:
            library = Library(elf, elf.points, elf.problems)
            self.book.libraries.append(library)
            self._ask_slots(library, subject)
        library.homes[key] = Home(key, subject.file, subject.path, subject.is_local)
        known.waits = False
        known.library = library
        self.to_read |= self._waiting.pop(key, set())

    def _ask_slots(self, library: Library, subject: _Subject) -> None:
        if not library.points.keys().isdisjoint(SLOTS):
            return
        try:
            self._slots.ask(library, subject.path, subject.file.status.key)
        except GpuwardenError as error:
            why = f"functions reached by export tables are not seen: {error}"
            library.problems = (*library.problems, why)
        else:
            library.waits = True

    def _resolved(
        self, library: Library, offsets: dict[str, int], problems: tuple[str, ...]
    ) -> None:
        library.waits = False
        home = next(iter(library.homes.values()), None)
        if offsets and home is not None:
            known = {library.elf.build_id or "": offsets}
            file = home.file
            try:
                elf = examine_file(file.handle, file.status.size, self._machine, known)
            except OSError as error:
                problems = (*problems, f"export tables: {error.strerror}")
            else:
                library.points, library.problems = elf.points, elf.problems
        library.problems = (*library.problems, *problems)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
