"""What each file is that is mapped executable: looked at once, as long as it stays the same."""

from __future__ import annotations

import os

from gpuwarden.cuda.away_files import PATH_LIMIT, AwayFiles, Looked
from gpuwarden.cuda.driver_elf import LIBRARIES, DriverElf
from gpuwarden.cuda.file_child import examine_file
from gpuwarden.cuda.library_book import Home, KnownFile, Library, LibraryBook, Subject
from gpuwarden.cuda.mapped_files import (
    Executable,
    MapsKey,
    Mounts,
    link_of,
    open_mapped,
    path_of,
    read_mounts,
    status_of,
)
from gpuwarden.cuda.slot_book import SlotBook
from gpuwarden.cuda.without_library import is_gpu_library
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes.cuda.functions import SLOTS

LIBRARIES_LIMIT = 256
FILES_LIMIT = 100_000
PROBLEMS_LIMIT = 64
REMOTE_SECONDS = 10.0
"""After which a file of another machine is looked at again if it is mapped again."""
UNREAD = (-1, -1, -1)
UNSEEN = {
    "foreign": "calls of this driver library are not seen",
    "broken": "not readable as an ELF file, it may be a driver library",
}


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
        self._away = AwayFiles(host, self._machine)
        self._waiting: dict[MapsKey, set[int]] = {}
        """Processes that map a file of which it is not known yet what it is."""
        self._mounts: dict[int, Mounts] = {}
        self._slots.prepare(self._machine)

    def close(self) -> None:
        self._away.close()
        self._slots.close()
        self.book.close()

    def filenos(self) -> set[int]:
        """Readable when there is something to take."""
        child = self._away.fileno()
        return self._slots.filenos() | (set() if child is None else {child})

    @property
    def own_pids(self) -> set[int]:
        return {os.getpid()} | self._away.pids | self._slots.pids

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
        self.problems.pop("queue", None)

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
        return self._look_at(pid, key, place, generation)

    def take(self) -> None:
        """Takes what children have answered, and gives them what waits."""
        for looked in self._away.take(self.now):
            self._taken(looked)
        for library, slots in self._slots.take():
            self._resolved(library, slots.offsets, slots.problems)

    # ---------------------------------------------------------------- files

    def _has_changed(self, known: KnownFile, place: Executable, generation: int | None) -> bool:
        if generation is not None and known.generation not in (generation, None):
            return True
        if known.is_remote:
            late = self.now - known.checked_at >= REMOTE_SECONDS
            return late and known.library is None
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

    def _look_at(
        self, pid: int, key: MapsKey, place: Executable, generation: int | None
    ) -> KnownFile | None:
        """Looks at a file that is new: here if its file system is this machine's."""
        files = self.book.files
        if len(files) >= FILES_LIMIT:
            self.prune(self.now)
        if pid not in self._mounts:
            self._mounts[pid] = read_mounts(self._host, pid)
        mounts = self._mounts[pid]
        known = KnownFile((0, 0, 0), generation, self.now, self.now, waits=True)
        if key[:2] not in mounts.local:
            known.is_remote = key[:2] not in mounts.layered
            if not self._away.add(key, place):
                self.problem("queue", "more files are mapped than can be looked at")
                return None
            files[key] = known
            self._waiting.setdefault(key, set()).add(pid)
            return known
        try:
            file = open_mapped(link_of(self._host, place))
        except Unavailable:
            return None
        except GpuwardenError as error:
            files[key] = known
            self._unread(key, "", str(error))
            return known
        files[key] = known
        if file is None:
            self._is_nothing(key, None)
            return known
        known.mark = file.status.mark
        path = path_of(self._host, place)[:PATH_LIMIT]
        self._examine(Subject(key, file, path, is_local=True), {})
        return known

    def _examine(self, subject: Subject, known: dict[str, dict[str, int]]) -> None:
        if not subject.is_local:
            failed = self._away.examine(subject, known)
            if failed is not None:
                self._taken(failed)
            return
        try:
            elf = examine_file(subject.file.handle, self._machine, known)
        except OSError as error:
            os.close(subject.file.handle)
            self._unread(subject.key, subject.path, error.strerror or str(error))
        else:
            self._examined(subject, elf)

    def _taken(self, looked: Looked) -> None:
        """What a child found out about a file."""
        key, subject = looked.key, looked.subject
        known = self.book.files.get(key)
        if known is not None and looked.mark is not None:
            known.mark = looked.mark
        if looked.compared and subject is not None and looked.elf is not None:
            library = None if looked.home is None else self.book.library_of(looked.home)
            self._settle(subject, looked.elf, library)
        elif looked.elf is not None and subject is not None:
            self._examined(subject, looked.elf)
        elif looked.elf is not None:
            self._is_no_library(key, looked.path, looked.elf)
        else:
            if subject is not None:
                os.close(subject.file.handle)
            if looked.gone:
                # It is mapped no more where it was; others that wait for it are asked for it.
                self.book.files.pop(key, None)
                self.to_read |= self._waiting.pop(key, set())
            else:
                self._unread(key, looked.path, looked.problem)

    def _unread(self, key: MapsKey, path: str, why: str) -> None:
        known = self.book.files.get(key)
        if known is not None:
            # It is tried again when it is met again.
            known.mark = UNREAD
        self._is_nothing(key, None)
        what = path or "a file that is mapped"
        self.problem(key, f"{what} cannot be read, it may be a driver library: {why}")

    def _is_nothing(self, key: MapsKey, soname: str | None) -> None:
        known = self.book.files.get(key)
        if known is not None:
            known.waits = False
            known.checked_at = self.now
            known.soname = soname if is_gpu_library(soname) else None
        self._waiting.pop(key, None)

    def _is_no_library(self, key: MapsKey, path: str, elf: DriverElf) -> None:
        self._is_nothing(key, elf.soname)
        if elf.kind in UNSEEN:
            self.problem(key, f"{path}: {UNSEEN[elf.kind]}: {'; '.join(elf.problems)}")

    # ---------------------------------------------------------------- libraries

    def _examined(self, subject: Subject, elf: DriverElf) -> None:
        if elf.kind not in LIBRARIES:
            os.close(subject.file.handle)
            self._is_no_library(subject.key, subject.path, elf)
            return
        offsets = self._slots.known(elf.build_id)
        if not subject.with_known and not offsets.keys() <= elf.offsets.keys():
            self._examine(subject._replace(with_known=True), {elf.build_id or "": offsets})
            return
        homes = [] if subject.is_local else list(self.book.like(elf, subject.file.status.size))
        if not homes:
            self._settle(subject, elf, None)
            return
        failed = self._away.compare(subject, elf, homes)
        if failed is not None:
            self._taken(failed)

    def _settle(self, subject: Subject, elf: DriverElf, library: Library | None) -> None:
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

    def _ask_slots(self, library: Library, subject: Subject) -> None:
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
            try:
                elf = examine_file(home.file.handle, self._machine, known)
            except OSError as error:
                problems = (*problems, f"export tables: {error.strerror}")
            else:
                library.points, library.problems = elf.points, elf.problems
        library.problems = (*library.problems, *problems)
