"""What the parent asks of a confined child and what the child answers: all that passes between.

A task travels with one descriptor, which the child reads and closes. Its answers come in order and
end with ``Done``; whatever a child says is only as true as the hostile bytes that it has read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module, Place, Problem, Record
from gpuwarden.code.report import Standing
from gpuwarden.model import ProfileStanding

Buffer = bytes | memoryview

Said = (
    tuple[Standing, str, ModuleJudgement | None]
    | tuple[Standing, str, ModuleJudgement | None, tuple[ProfileStanding, ...]]
)
"""Its standing, what it is known as, what it computes, and where it stands in several profiles."""

Assess = Callable[[Module, Buffer], Said]
"""(module, decompressed image) → what is said of it.

Made before the children are forked and called in them, where no file can be opened, no process
started and nothing imported any more: whatever it needs must be open and loaded already.
"""


DOCUMENT_LIMIT_BYTES = 4 << 20
FRAME_LIMIT_BYTES = 160 << 20
"""Of one answer: a layer's are the longest, some bytes for each of its entries."""
LENGTH = struct.Struct("=I")
"""Before each message, in both directions."""


class Keep:
    """Which images are handed to the parent whole: each once, of one child.

    Each child has a copy of it, and counts for itself.
    """

    def __init__(self, *, image_bytes: int, total_bytes: int) -> None:
        """The most that one image, and all of one child, may have."""
        self.image_bytes = image_bytes
        self.left_bytes = total_bytes
        self._handed: set[str] = set()

    def takes(self, module: Module, standing: Standing, size: int) -> bool:
        """Whether this one is handed over; then it is counted."""
        if standing in ("known", "driver") or module.digest in self._handed:
            return False
        if not 0 < size <= min(self.image_bytes, self.left_bytes):
            return False
        self._handed.add(module.digest)
        self.left_bytes -= size
        return True


class Settings(Record, frozen=True, kw_only=True):
    """What every child is started with."""

    bounds: Bounds = DEFAULT
    kernels: bool = True
    """Whether the kernels of each module are told."""
    brief: bool = False
    """Of a known module no more is told than its digest and its place."""
    path_key: bytes = b""
    """Keys the hashes of paths in layers, so that nobody can make two that are alike."""
    keep: Keep | None = None


class FileTask(Record, frozen=True, kw_only=True, tag="file"):
    """A regular file, or a stream that can be read once.

    ``share`` of ``shares`` workers that are given the same file each take their share of it.
    """

    number: int
    place: Place
    size: int | None = None
    """None for a stream."""
    share: int = 0
    shares: int = 1
    in_layout: bool = False
    """It lies in an OCI image layout: documents and layers are told of."""


class DocumentsTask(Record, frozen=True, kw_only=True, tag="documents"):
    """The documents of an image layout, by their names in it; its descriptor leads nowhere."""

    number: int
    place: Place
    documents: dict[str, bytes]


class Span(Record, frozen=True, kw_only=True):
    """Bytes of a process's memory that may be read."""

    start: int
    size: int
    mapping: str = ""
    """``Place.mapping`` of what is found there."""


class MemoryTask(Record, frozen=True, kw_only=True, tag="memory"):
    """Memory behind an open ``/proc/PID/mem``: spans in order of address, adjacent ones joined.

    What begins at ``stop`` or after is another task's.
    """

    number: int
    place: Place
    spans: tuple[Span, ...]
    stop: int | None = None


class LoadTask(Record, frozen=True, kw_only=True, tag="load"):
    """What a driver was given to load, in a file of its own; it opens no archives."""

    number: int
    place: Place
    size: int


class DigestTask(Record, frozen=True, kw_only=True, tag="digest"):
    """A file of which only the digest is asked."""

    number: int
    place: Place
    size: int


Task = FileTask | DocumentsTask | MemoryTask | LoadTask | DigestTask


class Found(Record, frozen=True, kw_only=True, tag="found"):
    """One module and what was said of it where its image was at hand."""

    module: Module
    standing: Standing = ""
    known_as: str = ""
    judgement: ModuleJudgement | None = None
    standings: tuple[ProfileStanding, ...] = ()
    """Where it was compared with several profiles."""


class Image(Record, frozen=True, kw_only=True, tag="image bytes"):
    """The bytes that the digest of a module is of: decompressed, or as stored if that failed."""

    digest: str
    data: bytes


class Trouble(Record, frozen=True, kw_only=True, tag="trouble"):
    """Something that could not be read."""

    problem: Problem


class Layer(Record, frozen=True, kw_only=True, tag="layer"):
    """Part of what one tar archive, perhaps a layer of an image, would change when unpacked.

    Paths are told by keyed 64-bit hashes, little-endian, one after the other.
    """

    blob: tuple[str, ...]
    """Members down to the archive, in the target."""
    paths: bytes = b""
    """Of every entry: what was there before is gone."""
    leaves: bytes = b""
    """Of entries that are no directories: everything below is gone."""
    removed: bytes = b""
    """Of what a whiteout removes, with everything below."""
    opaque: bytes = b""
    """Of directories of which everything below was removed."""
    links: tuple[tuple[str, str], ...] = ()
    """(path, path of the file that it is another name of) of hard links."""


class ImageManifest(Record, frozen=True, kw_only=True, tag="image"):
    """An image that the target holds: its layers, lowest first, as ``Layer.blob`` names them."""

    name: str
    digest: str
    layers: tuple[tuple[str, ...], ...]


class Document(Record, frozen=True, kw_only=True, tag="document"):
    """A file of an image layout that may be JSON, to be asked about with all the others."""

    name: str
    text: bytes


class Digest(Record, frozen=True, kw_only=True, tag="digest"):
    """SHA-256 of a whole file, in hexadecimal."""

    digest: str


class Done(Record, frozen=True, kw_only=True, tag="done"):
    """The task's end."""

    number: int
    what: str
    """``file``, ``wheel``, ``archive``, ``image``: by content; ``process``, ``load``."""
    read_bytes: int
    files: int
    skipped: dict[str, int] = {}


class Ready(Record, frozen=True, kw_only=True, tag="ready"):
    """A child's first word: what of its confinement could not be had."""

    unconfined: tuple[str, ...]


Answer = Found | Image | Trouble | Layer | ImageManifest | Document | Digest | Done | Ready
