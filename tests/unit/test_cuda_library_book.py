"""When a library is attached to and when no more, by who maps which of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpuwarden.cuda.driver_elf import DriverElf
from gpuwarden.cuda.library_book import (
    KEPT_ELSEWHERE_SECONDS,
    KEPT_SECONDS,
    Home,
    KnownFile,
    Library,
    LibraryBook,
)
from gpuwarden.cuda.mapped_files import MappedFile, MapsKey, Status

ONE, TWO = (0, 41, 7), (0, 42, 7)


@pytest.fixture
def book() -> Iterator[LibraryBook]:
    made = LibraryBook()
    yield made
    made.close()


def library(book: LibraryBook, *keys: MapsKey, is_local: bool = False) -> Library:
    made = Library(DriverElf("driver"), {}, ())
    for key in keys:
        handle = os.open("/", os.O_PATH)
        file = MappedFile(handle, Status(key, 0o100644, 0, 9, 0, 0))
        made.homes[key] = Home(key, file, "/x", is_local)
        book.files[key] = KnownFile((9, 0, 0), None, 0.0, 0.0, library=made)
    book.libraries.append(made)
    return made


def turned(
    book: LibraryBook, used: set[MapsKey], now: float
) -> tuple[list[MapsKey], list[MapsKey]]:
    turns = book.turns(used, now)
    book.close_left()
    return [found.key for found in turns.found], turns.gone


def test_it_is_told_once_and_gone_after_a_while(book: LibraryBook) -> None:
    library(book, ONE, is_local=True)
    assert turned(book, {ONE}, 1.0) == ([ONE], [])
    assert turned(book, {ONE}, 2.0) == ([], [])
    assert turned(book, set(), 3.0) == ([], [])
    assert turned(book, {ONE}, 3.0 + KEPT_SECONDS) == ([], [])
    assert turned(book, set(), 20.0) == ([], [])
    assert turned(book, set(), 20.0 + KEPT_SECONDS) == ([], [ONE])
    assert book.files == {}
    assert book.libraries == []


def test_what_nobody_maps_any_more_is_not_told(book: LibraryBook) -> None:
    library(book, ONE)
    assert turned(book, set(), 1.0) == ([], [])
    assert turned(book, set(), 1.0 + KEPT_ELSEWHERE_SECONDS) == ([], [])
    assert book.libraries == []


def test_a_library_waits_for_its_slots(book: LibraryBook) -> None:
    waiting = library(book, ONE)
    waiting.waits = True
    assert turned(book, {ONE}, 1.0) == ([], [])
    waiting.waits = False
    assert turned(book, {ONE}, 2.0) == ([ONE], [])


def test_it_moves_to_a_file_that_is_still_mapped(book: LibraryBook) -> None:
    library(book, ONE, TWO)
    assert turned(book, {ONE, TWO}, 1.0) == ([ONE], [])
    assert turned(book, {TWO}, 2.0) == ([], [])
    assert turned(book, {TWO}, 2.0 + KEPT_ELSEWHERE_SECONDS) == ([TWO], [ONE])
    assert TWO in book.files
    assert ONE not in book.files


def test_a_file_that_was_changed_is_let_go_at_once(book: LibraryBook) -> None:
    library(book, ONE)
    assert turned(book, {ONE}, 100.0) == ([ONE], [])
    book.forget(ONE)
    assert ONE not in book.files
    assert turned(book, {ONE}, 101.0) == ([], [ONE])


def test_descriptors_stay_open_until_the_next_look(book: LibraryBook) -> None:
    handle = library(book, ONE).homes[ONE].file.handle
    book.turns({ONE}, 1.0)
    book.turns(set(), 2.0)
    assert book.turns(set(), 10.0).gone == [ONE]
    os.fstat(handle)
    book.close_left()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_files_that_nobody_maps_any_more_are_forgotten(book: LibraryBook) -> None:
    library(book, ONE)
    for inode in range(5):
        book.files[1, 1, inode] = KnownFile((0, 0, 0), None, 0.0, seen_at=float(inode))
    book.files[1, 1, 9] = KnownFile((0, 0, 0), None, 0.0, 0.0, waits=True)
    assert book.prune(3.0) == [(1, 1, 0), (1, 1, 1), (1, 1, 2)]
    assert book.files.keys() == {ONE, (1, 1, 3), (1, 1, 4), (1, 1, 9)}
