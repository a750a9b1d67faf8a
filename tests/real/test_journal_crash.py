"""Several writers at once, killed again and again; and a file system that is really full."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.errors import Unavailable
from gpuwarden.journal.book import Journal
from gpuwarden.journal.chain import NOTES_LIMIT
from gpuwarden.journal.entry import SET_ASIDE
from gpuwarden.journal.verification import verify
from tests.support.journals import entries, private_key, raw_public, told

pytestmark = pytest.mark.real

FORKED = multiprocessing.get_context("fork")
WRITERS = 4
KILLS = 60
DEADLINE_SECONDS = 120.0

PIECE_BYTES = 64
PIECE_SECONDS = 0.0001
MOST_PIECES = 24
"""Of an entry that is not whole by then."""


def short_write(write: Callable[[int, bytes], int], halt: mmap.mmap) -> Callable[[int, bytes], int]:
    """A write that takes a few bytes at a time, as any write may: deaths fall between them.

    ``halt`` holds after how many more pieces the writer stands still in the middle of an entry, 0
    for never, and whether it does.
    """

    def short(descriptor: int, data: bytes) -> int:
        time.sleep(PIECE_SECONDS)
        count = write(descriptor, data[:PIECE_BYTES])
        if count < len(data) and halt[0]:
            halt[0] -= 1
            if not halt[0]:
                halt[1] = 1
                signal.pause()
        return count

    return short


def write_for_ever(path: str, key: Any, name: int, out: int, halt: mmap.mmap) -> None:
    """Says after each entry, by its number and hash, that it was told it is there."""
    journal = Journal(path, key=key)
    say = os.write
    os.write = short_write(os.write, halt)  # type: ignore[assignment]
    while True:
        intent = journal.intend("freeze", {"writer": name, "text": "x" * 900})
        say(out, f"{intent.number} {intent.hash}\n".encode())
        done = journal.conclude(intent, "y" * 900)
        say(out, f"{done.number} {done.hash}\n".encode())


class Writer:
    """A child that writes entries until it is killed."""

    def __init__(self, path: Path, key: Any, name: int) -> None:
        self._out, into = os.pipe()
        self._halt = mmap.mmap(-1, 2)
        arguments = (str(path), key, name, into, self._halt)
        self._process = FORKED.Process(target=write_for_ever, args=arguments)
        self._process.start()
        os.close(into)
        self._said = b""

    def heard(self) -> bool:
        """Whether it has said anything so far; takes what is there."""
        while select.select([self._out], [], [], 0)[0]:
            piece = os.read(self._out, 65536)
            if not piece:
                break
            self._said += piece
        return bool(self._said)

    def halt(self, pieces: int) -> None:
        """Has it stand still in the middle of an entry, that many pieces further."""
        self._halt[0] = pieces

    @property
    def stands(self) -> bool:
        """Whether it does."""
        return bool(self._halt[1])

    def kill(self) -> dict[int, str]:
        """kill -9; the entries that it said are there."""
        assert self._process.is_alive(), "it ended by itself"
        self._process.kill()
        self._process.join()
        self.heard()
        os.close(self._out)
        lines = (line.split() for line in self._said.split(b"\n")[:-1])
        return {int(number): digest.decode() for number, digest in lines}


def test_writers_that_are_killed_lose_nothing_that_they_were_told_is_written(
    tmp_path: Path,
) -> None:
    key = private_key()
    path = tmp_path / "state" / "journal"
    dice = random.Random(6)
    writers = [Writer(path, key, number) for number in range(WRITERS)]
    acknowledged: dict[int, str] = {}
    until = time.monotonic() + DEADLINE_SECONDS
    try:
        for number_of_kill in range(KILLS):
            victim = dice.randrange(WRITERS)
            while not writers[victim].heard():
                assert time.monotonic() < until, "no writer gets on"
                time.sleep(0.01)
            # At any moment; where the disk is slow that is seldom within a write: some are there.
            if number_of_kill % 3:
                time.sleep(dice.uniform(0, 0.02))
            else:
                writers[victim].halt(dice.randint(1, MOST_PIECES))
                while not writers[victim].stands:
                    assert time.monotonic() < until, "no writer gets on"
                    time.sleep(0.001)
            for number, digest in writers[victim].kill().items():
                assert acknowledged.setdefault(number, digest) == digest
            writers[victim] = Writer(path, key, WRITERS + number_of_kill)
    finally:
        for writer in writers:
            acknowledged |= writer.kill()
    last = Journal(str(path), key=key).append("note", {})
    verification = verify(str(path), keys=[raw_public(key)])
    assert verification.is_sound, told(verification)
    written = entries(path)
    assert [one.number for one in written] == list(range(1, last.number + 1))
    by_number = {one.number: one.hash for one in written}
    assert len(acknowledged) > KILLS
    assert all(by_number[number] == digest for number, digest in acknowledged.items())
    aside = sum(one.action == SET_ASIDE for one in written)
    noted = sum("set aside" in note for note in verification.notes)
    assert noted == min(aside, NOTES_LIMIT)
    assert aside > 0, "no death fell into a write"


@contextmanager
def small_file_system(folder: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB."""
    folder.mkdir(mode=0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small") as folder:
        ballast = folder / "ballast"
        path = folder / "journal"
        journal = Journal(str(path))
        with pytest.raises(Unavailable, match="No space left") as raised:
            for number in range(1000):
                journal.append("note", {"number": number, "text": "z" * 900})
        assert "make room" in raised.value.remedy
        size = path.stat().st_size
        assert verify(str(path)).is_sound
        assert verify(str(path)).notes[0].startswith("no head from elsewhere")
        ballast.touch()
        with pytest.raises(Unavailable):
            journal.append("note", {"text": ["z" * 900] * 10})
        assert path.stat().st_size == size
        head = journal.head()
    assert head is not None


def test_a_journal_with_the_append_only_attribute_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "state" / "journal"
    Journal(str(path)).append("note", {})
    attribute = subprocess.run(["chattr", "+a", str(path)], check=False, capture_output=True)
    if attribute.returncode:
        pytest.skip("this file system has no append-only attribute")
    try:
        with pytest.raises(PermissionError):
            os.truncate(path, 0)
        torn = b'{"bytes":700,"num'
        with path.open("ab") as file:
            file.write(torn)
        Journal(str(path)).append("note", {})
    finally:
        subprocess.run(["chattr", "-a", str(path)], check=True)
    verification = verify(str(path))
    assert verification.is_sound, told(verification)
    assert [json.loads(line)["action"] for line in path.read_bytes().splitlines()[2:]] == [
        SET_ASIDE,
        "note",
    ]
