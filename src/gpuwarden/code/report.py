"""What a look at targets found: every module with where it was, and what could not be read."""

from __future__ import annotations

from typing import Literal

from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module, Place, Problem, Record

SCHEMA = "gpuwarden.code"
VERSION = 1

Standing = Literal["known", "rebuilt", "driver", "jit", "unknown", ""]
"""Exactly known, known code built elsewhere, the driver's own, of a JIT class that is allowed, none
of these; empty where nothing was looked up."""

TargetKind = Literal["file", "folder", "wheel", "archive", "image", "process", "unreadable"]


class Sighting(Record, frozen=True, kw_only=True):
    """One place of a module."""

    place: Place
    cache: str = ""
    """The JIT cache that its path says it is in: ``Triton``, ``CUDA``, ``torch.compile``."""
    hidden: str = ""
    """In an image: what a later layer did to the file, so that no container of it has it."""
    in_no_mapped_file: bool = False
    """In a process's memory, and in none of the files that it has mapped."""


class FoundModule(Record, frozen=True, kw_only=True):
    """One module by its digest, and everywhere that it was."""

    module: Module
    standing: Standing = ""
    known_as: str = ""
    """Of what the baseline says it is, such as ``torch 2.9.1 libtorch_cuda.so``."""
    judgement: ModuleJudgement | None = None
    together: Literal["hash-like", "not hash-like", ""] = ""
    """What all unknown cubins of its file or process and its architecture come to, as far as it is
    this one's doing; empty where they were not judged together."""
    sightings: tuple[Sighting, ...] = ()

    @property
    def is_hidden(self) -> bool:
        """Whether it is only where no container of the image would find it."""
        return bool(self.sightings) and all(one.hidden for one in self.sightings)

    @property
    def is_alarming(self) -> bool:
        """Whether it is not known and computes like a hash, also among all its neighbours."""
        alone = self.judgement is not None and self.judgement.answer == "hash-like"
        judged = self.together == "hash-like" or (alone and not self.together)
        return judged and self.standing in ("unknown", "jit", "")


class ScannedProcess(Record, frozen=True, kw_only=True):
    """Who a process is, and how much of the code in it could be seen. It was never stopped."""

    pid: int
    start_time_ticks: int
    boot_id: str = ""
    comm: str = ""
    exe: str = ""
    user: str = ""
    container: str = ""
    """``docker:4f5c…`` as its cgroup names it: a claim."""
    files: int = 0
    """Mapped files that were read, here or where another process had them mapped as well."""
    memory_bytes: int = 0
    """Of its own memory, read."""
    swapped_bytes: int = 0
    """In swap or in a device's memory: not read, so as not to bring it back."""
    device_mappings: int = 0
    """Never read."""
    incomplete: str = ""
    """Why not all was read that could have been; empty when all was."""
    limits: tuple[str, ...] = ()
    """What no look at memory can see, in words."""


class ScannedTarget(Record, frozen=True, kw_only=True):
    """One thing that was asked for, and how much of it was seen."""

    name: str
    what: TargetKind
    digest: str = ""
    """Of an image: its manifest's or its configuration's, as the archive says."""
    image: str = ""
    """The reference that the archive gives its image; of several, all."""
    read_bytes: int = 0
    """Read of it as it is stored."""
    files: int = 0
    """Files looked into, members of archives among them."""
    modules: int = 0
    """Sightings, a module that is there twice counted twice; hidden ones are not among them."""
    hidden: int = 0
    problems: int = 0
    skipped: tuple[str, ...] = ()
    """What was left out by rule, with counts: ``2 device nodes``."""
    process: ScannedProcess | None = None
    seconds: float = 0.0


class CodeReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """All that one look at targets found; modules in the order in which they were first seen."""

    schema: str = SCHEMA
    version: int = VERSION
    gpuwarden_version: str
    targets: tuple[ScannedTarget, ...]
    modules: tuple[FoundModule, ...]
    problems: tuple[Problem, ...]
    unconfined: tuple[str, ...] = ()
    """What of the confinement of the parsing child could not be had, in words."""
    judged: bool = False
    baselines: tuple[str, ...] = ()
    seconds: float = 0.0
