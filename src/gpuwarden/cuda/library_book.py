"""What is known of the files that are mapped executable, and of the driver libraries among them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct, field

from gpuwarden.cuda.driver_elf import DriverElf
from gpuwarden.cuda.mapped_files import MappedFile, MapsKey
from gpuwarden.probes.cuda.library import EntryPoint, FoundLibrary, LibraryKey

KEPT_SECONDS = 5.0
KEPT_ELSEWHERE_SECONDS = 2.0
"""How long a library that nobody maps is kept: what is attached to keeps its file system in use,
which matters where that is a container's own."""


class KnownFile(Struct):
    """A file that was looked at, or is being looked at."""

    mark: tuple[int, int, int]
    generation: int | None
    checked_at: float
    seen_at: float
    soname: str | None = None
    """Where it is that of a GPU library."""
    library: Library | None = None
    waits: bool = False
    """What it is, is not known yet."""
    is_remote: bool = False
    """It is on another machine, or on what is no file system of a kernel's own: never asked here.
    """


class Subject(NamedTuple):
    """A file that is being looked at."""

    key: MapsKey
    file: MappedFile
    path: str
    is_local: bool
    with_known: bool = False
    """It is looked at with what is known of its build-id."""


class Home(Struct):
    """One of the files by which a library is mapped; layered mounts give it several."""

    key: MapsKey
    file: MappedFile
    path: str
    is_local: bool
    idle_since: float | None = None


class Library(Struct):
    """A driver library: one file, with one set of pages, wherever it is mapped from."""

    elf: DriverElf
    points: dict[str, EntryPoint]
    problems: tuple[str, ...]
    homes: dict[MapsKey, Home] = field(default_factory=dict)
    told: Home | None = None
    """The one that it was told by, whose key is the library's."""
    waits: bool = False
    """For its slots."""

    def found(self, home: Home) -> FoundLibrary:
        """It as the probes are given it."""
        return FoundLibrary(
            key=home.file.status.key,
            descriptor=home.file.handle,
            path=home.path,
            build_id=self.elf.build_id,
            soname=self.elf.soname,
            points=self.points,
            problems=self.problems,
        )


class Turns(Struct):
    """What has changed: libraries to attach to, and keys whose attachment ends."""

    found: list[FoundLibrary] = field(default_factory=list)
    gone: list[LibraryKey] = field(default_factory=list)


class LibraryBook:
    """Files by the key that maps files give them. Whoever takes a library out closes its files."""

    def __init__(self) -> None:
        self.files: dict[MapsKey, KnownFile] = {}
        self.libraries: list[Library] = []
        self._leaving: list[Home] = []

    def close(self) -> None:
        for library in self.libraries:
            for home in library.homes.values():
                os.close(home.file.handle)
        self.close_left()
        self.libraries.clear()
        self.files.clear()

    def like(self, elf: DriverElf, size: int) -> Iterator[Home]:
        """Files of libraries that may be the same one as a file of that size."""
        for library in self.libraries:
            if library.elf.build_id == elf.build_id:
                for home in library.homes.values():
                    if home.file.status.size == size:
                        yield home

    def library_of(self, home: Home) -> Library | None:
        """The library that the file belongs to, if it still does."""
        known = self.files.get(home.key)
        library = known.library if known is not None else None
        return library if library is not None and home.key in library.homes else None

    def forget(self, key: MapsKey) -> None:
        """The file was changed, or another has its number: it is looked at anew when met."""
        known = self.files.pop(key, None)
        if known is not None and known.library is not None and key in known.library.homes:
            home = known.library.homes[key]
            home.idle_since = 0.0

    def turns(self, used: Iterable[MapsKey], now: float) -> Turns:
        """Attachments that begin, and end, now that those files are mapped.

        What ends stays open until ``close_left``: its attachment is on it.
        """
        turns = Turns()
        using = set(used)
        for library in list(self.libraries):
            for home in list(library.homes.values()):
                known = self.files.get(home.key)
                if home.key in using and known is not None and known.library is library:
                    home.idle_since = None
                elif home.idle_since is None:
                    home.idle_since = now
                elif now - home.idle_since >= _kept(home):
                    del library.homes[home.key]
                    if known is not None and known.library is library:
                        del self.files[home.key]
                    self._leave(library, home, turns)
            if library.told is None and not library.waits:
                self._tell(library, turns)
            if not library.homes:
                self.libraries.remove(library)
        return turns

    def _tell(self, library: Library, turns: Turns) -> None:
        for home in library.homes.values():
            if home.idle_since is None:
                library.told = home
                turns.found.append(library.found(home))
                return

    def _leave(self, library: Library, home: Home, turns: Turns) -> None:
        self._leaving.append(home)
        if library.told is home:
            library.told = None
            turns.gone.append(home.file.status.key)

    def close_left(self) -> None:
        """Closes the files of what has ended in an earlier turn."""
        for home in self._leaving:
            os.close(home.file.handle)
        self._leaving.clear()

    def prune(self, seen_before: float) -> list[MapsKey]:
        """Forgets files that no library is, and that nobody was seen to map since; which."""
        old = [
            key
            for key, known in self.files.items()
            if known.library is None and not known.waits and known.seen_at < seen_before
        ]
        for key in old:
            del self.files[key]
        return old


def _kept(home: Home) -> float:
    return KEPT_SECONDS if home.is_local else KEPT_ELSEWHERE_SECONDS
