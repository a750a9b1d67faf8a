"""Walks along the journal's lines and says what does not follow; it reads no file itself."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

from gpuwarden.errors import Malformed
from gpuwarden.journal.entry import (
    FIRST_PREVIOUS,
    SET_ASIDE,
    Entry,
    Head,
    hash_of,
    is_cut_off,
    parse,
    unsigned_bytes,
)
from gpuwarden.model import Fact

PROBLEMS_LIMIT = 100
NOTES_LIMIT = 20
INTENTS_LIMIT = 1000

Check = Callable[[bytes, bytes], bool]
"""Whether a signature is that of a message, by one public key."""
Kind = Literal["edited", "missing", "order", "replaced", "signature", "cut"]


class Problem(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """Something that no honest writer leaves behind. ``number`` is the entry's, ``line`` from 1."""

    kind: Kind
    number: int
    line: int
    offset: int
    text: str

    def __str__(self) -> str:
        return f"entry {self.number} (line {self.line}, byte {self.offset}): {self.text}"


class _Astray:
    """Bytes since the last entry that are none."""

    def __init__(self, line: int, offset: int) -> None:
        self.line, self.offset = line, offset
        self.size = 0
        self.digest = hashlib.sha256()
        self.changed_lines = 0
        """Lines that no death explains: each may have been an entry."""

    def add(self, data: bytes, *, cut: bool) -> None:
        self.size += len(data)
        self.digest.update(data)
        self.changed_lines += not cut

    def is_named_by(self, entry: Entry) -> bool:
        """Whether that entry sets exactly these bytes aside."""
        said = (entry.subject.get("bytes"), entry.subject.get("sha256"))
        return entry.action == SET_ASIDE and said == (self.size, self.digest.hexdigest())


class Walk:
    """What is known after so many lines; ``keys`` are trusted ones by their fingerprints.

    ``keys`` None: signatures are not looked at, only whether they stop. ``head`` is one that was
    seen or exported before.
    """

    def __init__(
        self, *, keys: Mapping[str, Check] | None = None, head: Head | None = None
    ) -> None:
        self._keys = keys
        self._head = head
        self.last: Entry | None = None
        self.number, self.hash = 0, FIRST_PREVIOUS
        self.line = self.offset = 0
        self.entries = self.signed = 0
        self.problems: list[Problem] = []
        self.more_problems = 0
        self.notes: list[str] = []
        self.more_notes = 0
        self._astray: _Astray | None = None
        self._unsigned: Problem | None = None
        self._intents: dict[int, str] = {}
        self._old_intents: deque[int] = deque()
        self._met_head = False
        self._lacks_end = False

    @property
    def is_sound(self) -> bool:
        return not self.problems

    def feed(self, line: bytes, *, ended: bool) -> Entry | None:
        """Takes the next line without its newline; ``ended``: there was one.

        A line longer than an entry can be comes in pieces. Gives the entry if it is one.
        """
        number, offset = self.line + 1, self.offset
        self.line += ended
        self.offset += len(line) + ended
        try:
            entry = parse(line)
            fault = "" if hash_of(line) == entry.hash else "its bytes do not have its hash: edited"
        except Malformed as error:
            entry, fault = None, str(error)
        if entry is not None and not fault:
            self._take(entry, number, offset)
            self._lacks_end = not ended
            return entry
        if self._astray is None:
            self._astray = _Astray(number, offset)
        cut = is_cut_off(line, self.number + 1, self.hash)
        self._astray.add(line + b"\n" * ended, cut=cut)
        if not cut:
            self._wrong("edited", self.number + self._astray.changed_lines, number, offset, fault)
        return None

    def finish(self) -> None:
        """There are no more lines."""
        head, where = self._head, (self.line + 1, self.offset)
        if self._astray is not None and not self._astray.changed_lines:
            size, offset = self._astray.size, self._astray.offset
            self._note(
                f"after entry {self.number} (byte {offset}): {size} bytes of a line that was cut "
                "off while it was written; the next entry sets them aside"
            )
        if self._lacks_end:
            self._note(
                f"the line of entry {self.number} has no end yet; the next one gives it that"
            )
        if head is not None and not self._met_head:
            if head.number > self.number:
                text = f"the head that was kept is entry {head.number}; the journal ends before it"
                self._wrong("cut", self.number + 1, *where, text)
            elif self.is_sound:
                self._wrong("missing", head.number, *where, "the head that was kept is not there")
        if self._keys is not None and self._unsigned is not None:
            if not self.signed:
                self._tell(self._unsigned)
            else:
                self._note(
                    f"entries from {self._unsigned.number} up to the first signed one bear no "
                    "signature of their own; that one covers them"
                )
        for number, action in self._intents.items():
            self._note(f"entry {number}: what came of this intent ({action}) is not written down")

    def _take(self, entry: Entry, line: int, offset: int) -> None:
        self._follow(entry, line, offset)
        self._check_signature(entry, line, offset)
        head = self._head
        if head is not None and entry.number == head.number:
            self._met_head = True
            if entry.hash != head.hash:
                text = f"not the entry that the head {str(head)[:28]}… was kept of: rewritten since"
                self._wrong("replaced", entry.number, line, offset, text)
        if self.last is not None and entry.time_ns < self.last.time_ns:
            self._note(f"entry {entry.number} is earlier than the one before: a clock was set back")
        if entry.stage == "intent":
            self._intents[entry.number] = entry.action
            if len(self._intents) > INTENTS_LIMIT:
                del self._intents[next(iter(self._intents))]
        elif entry.of is not None:
            self._intents.pop(entry.of, None)
        self.last = entry
        self.number, self.hash = entry.number, entry.hash
        self.entries += 1

    def _follow(self, entry: Entry, line: int, offset: int) -> None:
        """Number, previous hash, and what stood between."""
        astray, self._astray = self._astray, None
        next_number = self.number + 1
        changed = 0 if astray is None else astray.changed_lines
        follows = (entry.number, entry.previous) == (next_number, self.hash)
        if astray is not None and not changed:
            if follows and astray.is_named_by(entry):
                self._note(
                    f"before entry {entry.number} (byte {astray.offset}): {astray.size} bytes of a "
                    "line that was cut off while it was written, set aside"
                )
            else:
                text = "a line without its end, which no entry after it sets aside: edited"
                self._wrong("edited", next_number, astray.line, astray.offset, text)
                changed = 1
        elif astray is None and entry.action == SET_ASIDE:
            text = f"it sets aside {entry.subject.get('bytes')} bytes, which are not there: removed"
            self._wrong("missing", entry.number, line, offset, text[:200])
        if follows or (changed and next_number < entry.number <= next_number + changed):
            return
        if entry.number > next_number + changed:
            first = next_number + changed
            gone = f"{first}" if entry.number == first + 1 else f"{first} to {entry.number - 1}"
            text = f"what comes before it is missing: {gone}"
            self._wrong("missing", entry.number, line, offset, text)
        elif entry.number == next_number:
            text = f"it does not follow on entry {self.number}: one of the two is another than then"
            self._wrong("replaced", entry.number, line, offset, text)
        else:
            text = f"it stands after entry {self.number}: inserted, or in another order"
            self._wrong("order", entry.number, line, offset, text)

    def _check_signature(self, entry: Entry, line: int, offset: int) -> None:
        text = ""
        if not entry.signed_by and not entry.signature:
            if self.signed:
                text = "not signed, while those before it are"
            elif self._unsigned is None:
                self._unsigned = Problem(
                    kind="signature",
                    number=entry.number,
                    line=line,
                    offset=offset,
                    text="not signed, and neither is any entry after it",
                )
        elif not entry.signature or not entry.signed_by:
            text = "its signature is missing: removed"
        else:
            self.signed += 1
            check = None if self._keys is None else self._keys.get(entry.signed_by)
            if self._keys is not None and check is None:
                text = f"signed by another key: {entry.signed_by[:32]}"
            elif check and not check(bytes.fromhex(entry.signature), unsigned_bytes(entry)):
                text = "its signature is not by the key that it names"
        if text:
            self._wrong("signature", entry.number, line, offset, text)

    def _wrong(self, kind: Kind, number: int, line: int, offset: int, text: str) -> None:
        self._tell(Problem(kind=kind, number=number, line=line, offset=offset, text=text))

    def _tell(self, problem: Problem) -> None:
        if len(self.problems) < PROBLEMS_LIMIT:
            self.problems.append(problem)
        else:
            self.more_problems += 1

    def _note(self, text: str) -> None:
        if len(self.notes) < NOTES_LIMIT:
            self.notes.append(text)
        else:
            self.more_notes += 1
