"""What `gpuwarden watch` left in its state directory: read, never written, whatever is in there."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec

from gpuwarden.errors import GpuwardenError
from gpuwarden.finding import Finding
from gpuwarden.model import Fact, Gap
from gpuwarden.store import (
    FINDINGS_FILE,
    MODULES_FILE,
    SAMPLES_FILE,
    Ledger,
    ModuleStore,
    SampleStore,
    Series,
    Sighting,
)

STATE_REMEDY = "gpuwarden watch keeps a memory; it has not run here, or not with this --state"
DAMAGED_REMEDY = "restart gpuwarden watch: it sets the file aside and begins a new one"

State = Literal["ok", "none", "failed", "not-asked"]
Opened = TypeVar("Opened", Ledger, SampleStore, ModuleStore)
Process = tuple[int | None, int | None, str | None]
"""(pid, start time in ticks, boot id)."""


class KnownFinding(Fact, frozen=True, kw_only=True):
    """A finding of the memory, in its latest life."""

    finding: Finding
    is_open: bool
    first_seen_ns: int
    last_seen_ns: int
    resolved_at_ns: int | None = None
    count: int = 1


class Remembered(Fact, frozen=True, kw_only=True):
    """What the memory holds of what was asked; ``troubles`` say what of it could not be read."""

    directory: str = ""
    state: State = "not-asked"
    troubles: tuple[Gap, ...] = ()
    series: tuple[Series, ...] = ()
    findings: tuple[KnownFinding, ...] = ()


class Sightings(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """First sightings of GPU modules; what `history --module --format json` prints."""

    schema: str = "gpuwarden.sightings"
    version: int = 1
    directory: str
    state: State
    troubles: tuple[Gap, ...]
    sightings: tuple[Sighting, ...]
    """In the order of their digests."""


class _Life(msgspec.Struct):
    """The part of what ``life.FindingLife`` writes that is told here."""

    finding: Finding
    first_seen_ns: int
    last_seen_ns: int
    told_at_ns: int
    count: int


def read(
    directory: str, *, pid: int | None = None, gpu_id: str | None = None, since_ns: int = 0
) -> Remembered:
    """What is remembered of a pid or a GPU since a moment. Errors: none; see ``troubles``."""
    memory = _Memory(directory)
    series = memory.ask(
        SAMPLES_FILE,
        SampleStore,
        lambda samples: samples.series(pid=pid, gpu_id=gpu_id, since_ns=since_ns),
    )
    processes = {_process(one) for one in series or () if one.pid is not None}

    def concerns(known: KnownFinding) -> bool:
        subject = known.finding.subject
        if not known.is_open and known.last_seen_ns < since_ns:
            return False
        if pid is not None:
            return subject.pid == pid
        of_process = (subject.pid, subject.start_time_ticks, subject.boot_id)
        return gpu_id in subject.gpu_ids or of_process in processes

    findings = memory.ask(FINDINGS_FILE, Ledger, lambda ledger: _findings(ledger, memory))
    return Remembered(
        directory=directory,
        state=memory.state,
        troubles=tuple(memory.troubles),
        series=tuple(series or ()),
        findings=tuple(sorted(filter(concerns, findings or ()), key=lambda one: one.first_seen_ns)),
    )


def finding(directory: str, identity: str) -> Remembered:
    """What is remembered of a finding by its id. Errors: none; see ``troubles``."""
    memory = _Memory(directory)
    found = memory.ask(FINDINGS_FILE, Ledger, lambda ledger: _findings(ledger, memory))
    return Remembered(
        directory=directory,
        state=memory.state,
        troubles=tuple(memory.troubles),
        findings=tuple(one for one in found or () if one.finding.id == identity),
    )


def gpus(directory: str) -> set[str]:
    """The ids of all GPUs that are remembered; empty if that cannot be read."""
    every = _Memory(directory).ask(
        SAMPLES_FILE, SampleStore, lambda samples: samples.series(limit=0)
    )
    return {one.gpu_id for one in every or ()}


def sightings(directory: str, digest: str, most: int) -> Sightings:
    """Modules whose digest begins with ``digest``. Errors: none; see ``troubles``."""
    memory = _Memory(directory)
    found = memory.ask(MODULES_FILE, ModuleStore, lambda modules: modules.like(digest, most))
    return Sightings(
        directory=directory,
        state=memory.state,
        troubles=tuple(memory.troubles),
        sightings=tuple(found or ()),
    )


def sightings_of(directory: str, digests: Iterable[str]) -> Sightings:
    """The modules of these digests. Errors: none; see ``troubles``."""
    memory = _Memory(directory)
    wanted = sorted(set(digests))
    found = memory.ask(
        MODULES_FILE,
        ModuleStore,
        lambda modules: [one for digest in wanted for one in modules.like(digest)],
    )
    return Sightings(
        directory=directory,
        state=memory.state,
        troubles=tuple(memory.troubles),
        sightings=tuple(found or ()),
    )


def _process(series: Series) -> Process:
    return series.pid, series.start_time_ticks, series.boot_id


Answer = TypeVar("Answer")


class _Memory:
    """The files of a state directory, each opened for one question."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.troubles: list[Gap] = []
        self._there = 0
        try:
            status = os.stat(directory)
            if not stat.S_ISDIR(status.st_mode):
                self.trouble(directory, "it is no directory")
            elif status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                self.trouble(directory, "others may write there: what it says may be made up")
        except FileNotFoundError:
            pass
        except OSError as error:
            self.trouble(directory, error.strerror or "cannot be looked at")

    def trouble(self, what: str, reason: str, remedy: str = "") -> None:
        self.troubles.append(Gap(sensor="store", what=what, reason=reason, remedy=remedy))

    @property
    def state(self) -> State:
        if self.troubles:
            return "failed"
        return "ok" if self._there else "none"

    def ask(
        self, name: str, kind: type[Opened], question: Callable[[Opened], Iterable[Answer]]
    ) -> list[Answer] | None:
        """The answer of one file, or None with a trouble; also None when it is not there."""
        path = os.path.join(self.directory, name)
        try:
            os.stat(path)
            readable = os.access(path, os.R_OK, effective_ids=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.trouble(path, error.strerror or "cannot be looked at", "run it as root")
            return None
        if not readable:
            self.trouble(path, "permission denied", "run it as root")
            return None
        self._there += 1
        try:
            opened = kind(path, read_only=True)
            try:
                return list(question(opened))
            finally:
                opened.close()
        except GpuwardenError as error:
            self.trouble(path, str(error).removeprefix(f"{path}: "), error.remedy)
        except sqlite3.Error as error:
            self.trouble(path, f"it cannot be read ({error})", DAMAGED_REMEDY)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            # Among them what SQLite says of a damaged schema, if that is no UTF-8.
            self.trouble(path, f"it is damaged ({error})", DAMAGED_REMEDY)
        return None


def _findings(ledger: Ledger, memory: _Memory) -> list[KnownFinding]:
    found: list[KnownFinding] = []
    unreadable = 0
    for state in ledger.states(only_open=False):
        try:
            life = msgspec.json.decode(state.state, type=_Life)
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, ValueError):
            unreadable += 1
            continue
        found.append(
            KnownFinding(
                finding=life.finding,
                is_open=state.open,
                first_seen_ns=life.first_seen_ns,
                last_seen_ns=life.last_seen_ns,
                resolved_at_ns=None if state.open else life.told_at_ns,
                count=life.count,
            )
        )
    if unreadable:
        memory.trouble(
            ledger.path, f"{unreadable} findings in it are damaged or of another version"
        )
    return found
