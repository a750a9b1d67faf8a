"""A module where it was found, before it is decompressed or described."""

from __future__ import annotations

from threading import Lock

from msgspec import Struct

from gpuwarden.code import elf
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.codecs import decompress
from gpuwarden.code.module import Codec, FoundBy, Kind, Place
from gpuwarden.errors import Malformed

ALIGNMENT = 8
"""What toolkits pad an image to."""


def place_at(place: Place, offset: int) -> Place:
    """A place that many bytes further."""
    return Place(
        target=place.target,
        members=place.members,
        offset=(place.offset or 0) + offset,
        section=place.section,
        found_by=place.found_by,
        mapping=place.mapping,
    )


def place_found(place: Place, found_by: FoundBy, section: str = "") -> Place:
    """A place with how its modules are found."""
    return Place(
        target=place.target,
        members=place.members,
        offset=place.offset,
        section=section or place.section,
        found_by=found_by,
        mapping=place.mapping,
    )


class Stream:
    """One compressed stream that several images share, decompressed once for all of them."""

    def __init__(
        self,
        codec: Codec,
        stored: memoryview,
        size: int,
        images: int,
        held: memoryview | None = None,
    ) -> None:
        self.codec, self.stored, self.size = codec, stored, size
        self._left, self._held = images, held
        self._lock = Lock()

    def part(self, start: int, end: int, bounds: Bounds) -> memoryview:
        """Bytes of the decompressed stream; it is let go of when each image was asked for once."""
        with self._lock:
            whole = self._held
            if whole is None:
                whole = memoryview(decompress(self.codec, self.stored, self.size, bounds))
            self._left -= 1
            self._held = whole if self._left > 0 else None
        if not 0 <= start <= end <= len(whole):
            raise Malformed("an image outside the stream that it shares")
        return whole[start:end]


class Located(Struct):
    """One GPU code image and where it was; ``image()`` gives its bytes."""

    kind: Kind
    arch: str
    """Empty when the place does not tell; ``describe`` looks into the image."""
    stored: memoryview
    """As they are there: compressed, or the image with the padding behind it."""
    image_bytes: int
    """Of the image as its container claims, not yet checked."""
    place: Place
    codec: Codec = "none"
    identifier: str = ""
    options: str = ""
    padded: bool = False
    """Up to seven bytes behind the image are the container's."""
    stream: Stream | None = None
    start: int = 0
    """Of the image in ``stream``."""

    def image(self, bounds: Bounds = DEFAULT) -> bytes | memoryview:
        """The decompressed image without its padding. Errors: Malformed."""
        if self.stream is not None:
            end = self.start + self.image_bytes
            image: bytes | memoryview = self.stream.part(self.start, end, bounds)
        elif self.codec == "none":
            image = self.stored
        else:
            image = decompress(self.codec, self.stored, self.image_bytes, bounds)
        if self.kind == "ptx":
            return _without_nuls(image)
        return _without_padding(image) if self.padded and self.kind == "cubin" else image


def _without_nuls(text: bytes | memoryview) -> bytes | memoryview:
    """PTX without the NUL that ends it, which a stored text has and a file has not."""
    if not len(text) or text[-1]:
        return text
    size = len(text) - len(bytes(text[-ALIGNMENT:])) + len(bytes(text[-ALIGNMENT:]).rstrip(b"\0"))
    return memoryview(text)[:size]


def _without_padding(image: bytes | memoryview) -> bytes | memoryview:
    try:
        end = elf.end_of(image)
    except Malformed:
        return image
    if 0 < len(image) - end < ALIGNMENT and not any(image[end:]):
        return memoryview(image)[:end]
    return image
