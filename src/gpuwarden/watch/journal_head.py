"""The journal's head goes to the sinks: there it cannot be taken back by who is root here.

Once a round the file's status is looked at. What was added is read and its chain checked, and the
whole file again when it changed otherwise, at the start, and with the first change of each hour; a
quarter of a MiB a round at most. Signatures are left to `gpuwarden journal verify`.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from gpuwarden.errors import GpuwardenError, TimedOut, Unavailable
from gpuwarden.finding import Advisory, Evidence, Finding, about_source
from gpuwarden.journal.chain import Walk
from gpuwarden.journal.entry import LINE_LIMIT_BYTES, Entry, Head
from gpuwarden.journal.place import for_reading
from gpuwarden.journal.verification import head_after, lines
from gpuwarden.outputs.words import moment

JOURNAL_FILE = "journal"
KEPT_FILE = "journal_head.json"
"""Beside the journal, in watch's state directory."""
STEP_BYTES = 256 << 10
"""Read in a round; some 20 ms of hashing and parsing."""
WHOLE_PASS_NS = 3600 * 10**9
LOCKED_NS = 60 * 10**9
KEPT_LIMIT_BYTES = 4096
SHOWN = 8

JOURNAL_WRITTEN = Advisory(
    id="journal_written",
    title="The head of the journal of what gpuwarden did on this node",
    severity="info",
    explanation="Each entry holds the hash of the one before, so this head stands for all of them. "
    "Kept away from the node, it shows later whether entries were changed or cut off. It resolves "
    "when the next one takes its place.",
    steps=(
        "gpuwarden journal: the entries.",
        "gpuwarden journal verify --head NUMBER:HASH, with the head from here.",
    ),
)
JOURNAL_BROKEN = Advisory(
    id="journal_broken",
    title="The journal was changed, cut or taken away",
    severity="error",
    explanation="The file no longer continues what was seen of it before. gpuwarden only adds to "
    "it, so somebody with root's rights, or a damaged disk, did that.",
    steps=(
        "gpuwarden journal verify --head NUMBER:HASH, with the last head that a sink has.",
        "Copy the file away as it is; do not mend it.",
        "Once explained: remove journal_head.json from the state directory, then restart "
        "gpuwarden watch.",
    ),
)
JOURNAL_ADVISORIES = (JOURNAL_WRITTEN, JOURNAL_BROKEN)
JOURNAL_RULES = frozenset(one.id for one in JOURNAL_ADVISORIES)

_Stamp = tuple[int, int, int, int, int]


class JournalHead:
    """Follows one journal; ``kept_path`` is where the last head outlives this process."""

    def __init__(self, path: str, kept_path: str | None = None) -> None:
        self.path = path
        self._kept_path = kept_path
        self._unread_memory = ""
        self.seen = self._recall()
        """The last head of a journal that was sound."""
        self._walk = Walk(head=self.seen)
        self._stamp: _Stamp | None = None
        self._is_behind = True
        self._passed_at_ns: int | None = None
        self._locked_since_ns: int | None = None
        self._name = ""
        self._written: list[str] = []
        self._broken: list[str] = []

    def findings(self, now_ns: int) -> list[Finding]:
        """What holds now; cheap while the file does not change."""
        try:
            stamp = _stamp(self.path)
        except FileNotFoundError:
            self._begin()
            gone = f"there is no file; the last head seen was {self.seen}"
            return [] if self.seen is None else [self._trouble([gone])]
        except OSError as error:
            return [self._trouble([f"{self.path}: {error.strerror}"])]
        if stamp != self._stamp or self._is_behind:
            try:
                self._step(stamp, now_ns)
            except TimedOut:
                return self._while_locked(now_ns)
            except Unavailable:
                return self._told()  # it went away a moment ago: the next round tells
            except (GpuwardenError, OSError) as error:
                return [self._trouble([str(error)])]
            self._locked_since_ns = None
        return self._told()

    def _told(self) -> list[Finding]:
        found = []
        if self._written:
            # Each head is a finding of its own: a change of one is told after a minute only.
            found.append(about_source(JOURNAL_WRITTEN, self._name, _evidence(self._written)))
        broken = [*self._broken, *filter(None, [self._unread_memory])]
        if broken:
            found.append(self._trouble(broken))
        return found

    def _trouble(self, texts: list[str]) -> Finding:
        return about_source(JOURNAL_BROKEN, JOURNAL_FILE, _evidence(texts))

    def _while_locked(self, now_ns: int) -> list[Finding]:
        if self._locked_since_ns is None:
            self._locked_since_ns = now_ns
        if now_ns - self._locked_since_ns < LOCKED_NS:
            return self._told()
        since = moment(self._locked_since_ns)
        text = f"a process keeps its lock since {since}: nothing is written down meanwhile"
        return [*self._told(), self._trouble([text])]

    def _begin(self) -> None:
        """From the beginning of the file, at the next step."""
        self._walk = Walk(head=self.seen)
        self._stamp = self._passed_at_ns = None
        self._is_behind = True

    def _step(self, stamp: _Stamp, now_ns: int) -> None:
        with for_reading(self.path, patience_seconds=0) as (descriptor, size):
            if stamp != self._stamp and self._is_another(size, stamp, now_ns):
                self._begin()
            self._stamp = stamp
            if self._passed_at_ns is None:
                self._passed_at_ns = now_ns
            walk = self._walk
            until = walk.offset + STEP_BYTES
            self._is_behind = False
            for line, ended in lines(descriptor, walk.offset, size):
                if not ended and len(line) <= LINE_LIMIT_BYTES:
                    break  # cut off: the next writer deals with it
                if walk.offset >= until:
                    self._is_behind = True
                    break
                walk.feed(line, ended=ended)
        if not self._is_behind:
            self._conclude()

    def _is_another(self, size: int, stamp: _Stamp, now_ns: int) -> bool:
        """Whether it has to be read from the beginning."""
        before = self._stamp
        if before is None or self._passed_at_ns is None:
            return False
        if stamp[:2] != before[:2] or size < self._walk.offset or now_ns < self._passed_at_ns:
            return True
        if not self._is_behind and now_ns - self._passed_at_ns >= WHOLE_PASS_NS:
            return True
        return stamp[2] <= before[2]  # written to, and nothing was added

    def _conclude(self) -> None:
        """All of it was read."""
        walk, seen = self._walk, self.seen
        self._name = f"{JOURNAL_FILE} {walk.number}:{walk.hash[:16]}"
        self._written = [] if walk.last is None else _lines_of(walk.last)
        self._broken = [str(problem) for problem in walk.problems]
        if seen is not None and walk.number < seen.number:
            self._broken.append(
                f"the last head seen was {seen}; now it ends with entry {walk.number}"
            )
        head = head_after(walk)
        if head is not None and not self._broken and head != seen:
            self.seen = head
            self._remember(head)

    def _recall(self) -> Head | None:
        if self._kept_path is None:
            return None
        try:
            with open(self._kept_path, "rb") as file:
                return msgspec.json.decode(file.read(KEPT_LIMIT_BYTES), type=Head)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self._unread_memory = f"the head last seen is not known: {self._kept_path}: {error}"
            return None

    def _remember(self, head: Head) -> None:
        if self._kept_path is None:
            return
        # A full disk is told of by the store; then only this process knows it.
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(f"{self._kept_path}.new", flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(head))
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{self._kept_path}.new", self._kept_path)


def _stamp(path: str) -> _Stamp:
    """What changes with any write; only the last of these cannot be set at will."""
    status = os.lstat(path)
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _lines_of(last: Entry) -> list[str]:
    stage = "" if last.stage == "fact" else f" ({last.stage})"
    return [
        f"head {last.number}:{last.hash}",
        f"last entry: {last.action}{stage}, {moment(last.time_ns)}",
        f"signed by {last.signed_by}" if last.signed_by else "not signed",
    ]


def _evidence(texts: list[str]) -> list[Evidence]:
    more = len(texts) - SHOWN
    shown = texts[:SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return [Evidence(source="journal", text=text[:400]) for text in shown]
