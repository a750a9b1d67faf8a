"""What the answers of the children add up to: modules by digest, and each target's counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module, Place, Problem
from gpuwarden.code.report import (
    FoundModule,
    ScannedProcess,
    ScannedTarget,
    Sighting,
    Standing,
    TargetKind,
)
from gpuwarden.codescan.jit_caches import cache_of
from gpuwarden.codescan.layers import Layers
from gpuwarden.codescan.tasks import (
    Answer,
    Document,
    Done,
    FileTask,
    Found,
    ImageManifest,
    Layer,
    Task,
    Trouble,
)

WHAT: dict[str, TargetKind] = {
    "file": "file",
    "wheel": "wheel",
    "archive": "archive",
    "image": "image",
    "process": "process",
}


class Ledger:
    """What one target came to."""

    def __init__(self, number: int, name: str, what: TargetKind, key: bytes) -> None:
        self.number = number
        self.name = name
        self.what = what
        self.layers = Layers(key)
        self.documents: dict[str, bytes] = {}
        """Of an image layout, asked about when all its files were read."""
        self.skipped: Counter[str] = Counter()
        self.caches: dict[str, str] = {}
        """File of a folder → the JIT cache that the files beside it tell of."""
        self.process: Callable[[], ScannedProcess] | None = None
        """Who it is, asked when all of it was read."""
        self.digest = ""
        self.read_bytes = self.files = self.problems = 0
        self.modules = self.hidden = 0
        self._began = self._ended = time.monotonic()

    def note(self, task: Task, done: Done) -> None:
        """A task of it is done."""
        self._ended = time.monotonic()
        is_repeated = isinstance(task, FileTask) and task.share > 0
        self.files += done.files
        if isinstance(task, FileTask) and task.size is not None:
            self.read_bytes += 0 if is_repeated else task.size
        else:
            self.read_bytes += done.read_bytes
        for what, count in done.skipped.items():
            if not is_repeated:
                self.skipped[what] += count
        # A folder stays one, whatever is in it; the share that sees an image is the one that tells.
        if self.what in ("file", "archive") and done.what in WHAT and done.what != "file":
            self.what = WHAT[done.what]

    def target(self) -> ScannedTarget:
        """Its line of the report."""
        images = self.layers.images
        return ScannedTarget(
            name=self.name,
            what="image" if images and self.what == "folder" else self.what,
            digest=self.digest or ", ".join(image.digest for image in images[:4] if image.digest),
            image=", ".join(dict.fromkeys(image.name for image in images[:4] if image.name)),
            read_bytes=self.read_bytes,
            files=self.files,
            modules=self.modules,
            hidden=self.hidden,
            problems=self.problems,
            skipped=tuple(f"{count} {what}" for what, count in sorted(self.skipped.items())),
            process=self.process() if self.process is not None else None,
            seconds=round(self._ended - self._began, 3),
        )


class _Entry(Struct):
    module: Module
    standing: Standing
    known_as: str
    judgement: ModuleJudgement | None
    places: list[tuple[Place, int]]


class Findings:
    """All that is found, in the order in which it is first seen."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._modules: dict[tuple[str, str], _Entry] = {}
        self._problems: list[Problem] = []
        self.ledgers: list[Ledger] = []
        self.sightings = 0

    def open(self, name: str, what: TargetKind) -> Ledger:
        """A target more."""
        ledger = Ledger(len(self.ledgers), name, what, self._key)
        self.ledgers.append(ledger)
        return ledger

    def problem(self, ledger: Ledger, problem: Problem) -> None:
        """Something of a target that could not be read."""
        ledger.problems += 1
        self._problems.append(problem)

    def take(self, ledger: Ledger, task: Task, answer: Answer) -> None:
        """One answer of a child."""
        match answer:
            case Found():
                self._found(ledger, answer)
            case Trouble(problem=problem):
                self.problem(ledger, problem)
            case Layer():
                ledger.layers.add(answer)
            case ImageManifest():
                ledger.layers.images.append(answer)
            case Document(name=name, text=text):
                ledger.documents[name] = text
            case Done():
                ledger.note(task, answer)

    def _found(self, ledger: Ledger, found: Found) -> None:
        module = found.module
        entry = self._modules.get((module.digest, module.kind))
        if entry is None:
            entry = _Entry(module, found.standing, found.known_as, found.judgement, [])
            self._modules[module.digest, module.kind] = entry
        entry.places.append((module.place, ledger.number))
        self.sightings += 1

    def modules(self) -> tuple[FoundModule, ...]:
        """Every module with all its places, counted for their targets; to be called once."""
        return tuple(
            FoundModule(
                module=entry.module,
                standing=entry.standing,
                known_as=entry.known_as,
                judgement=entry.judgement,
                sightings=tuple(self._sighting(place, at) for place, at in entry.places),
            )
            for entry in self._modules.values()
        )

    def _sighting(self, place: Place, at: int) -> Sighting:
        ledger = self.ledgers[at]
        hidden = ledger.layers.hidden(place) if ledger.layers.images else ""
        if hidden:
            ledger.hidden += 1
        else:
            ledger.modules += 1
        beside = ledger.caches.get(place.members[0], "") if place.members else ""
        return Sighting(place=place, cache=cache_of(place) or beside, hidden=hidden)

    def problems(self) -> tuple[Problem, ...]:
        """Those of the files, and layers that an image names and that could not be read."""
        for ledger in self.ledgers:
            for image, blob in ledger.layers.missing():
                place = Place(target=ledger.name, members=blob)
                reason = f"a layer of {image.name or image.digest or 'the image'} that is not there"
                self.problem(ledger, Problem(place=place, what="layer", reason=reason))
        return tuple(self._problems)
