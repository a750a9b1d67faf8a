"""Bytes that come once, in order: a descriptor, memory, or what a compressed stream unpacks to.

Every stream has ``read(size)``, which gives at least one byte, at most ``size``, and none at the
end. What is unpacked is bounded by a ``Budget``, and by its ratio to what was packed.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import secrets
import zlib
from collections.abc import Callable
from typing import IO, Protocol, cast

import lz4.frame  # type: ignore[import-untyped]
import zstandard

from gpuwarden.errors import Malformed

CHUNK_BYTES = 1 << 20
PACKED_BYTES = 1 << 17
ZSTD_WINDOW_LIMIT_BYTES = 1 << 27
XZ_MEMORY_LIMIT_BYTES = 1 << 28
RATIO_LIMIT = 250
"""Unpacked to packed bytes, from ``RATIO_FROM_BYTES`` on: no library compresses so well."""
RATIO_FROM_BYTES = 64 << 20


class Stream(Protocol):
    """Something to be read once."""

    def read(self, size: int, /) -> bytes: ...


class Exhausted(Malformed):
    """A task's budget is used up, so that nothing more of it is read."""


class Budget:
    """How many bytes one task may still unpack, all its members together."""

    def __init__(self, total_bytes: int) -> None:
        self.left = total_bytes
        self.total_bytes = total_bytes

    def take(self, size: int) -> None:
        """Errors: Exhausted when it is used up."""
        self.left -= size
        if self.left < 0:
            raise Exhausted(f"unpacks to more than {self.total_bytes} bytes")


def _uncounted(size: int) -> None:
    pass


class DescriptorStream:
    """An open file of ``size`` bytes, from its start; or, without a size, a pipe or socket.

    ``told`` is called with the size of each read. Others may read the same file at the same time.
    """

    def __init__(
        self, descriptor: int, size: int | None, told: Callable[[int], None] = _uncounted
    ) -> None:
        self._descriptor = descriptor
        self._size = size
        self._at = 0
        self._told = told

    def read(self, size: int, /) -> bytes:
        """Errors: Malformed when reading fails."""
        size = min(size, CHUNK_BYTES)
        try:
            if self._size is None:
                data = os.read(self._descriptor, size)
            else:
                left = max(0, self._size - self._at)
                data = os.pread(self._descriptor, min(size, left), self._at)
        except OSError as error:
            raise Malformed(f"reading failed: {error.strerror}") from error
        self._at += len(data)
        self._told(len(data))
        return data

    def skip(self, size: int) -> int:
        """Leaves out so many bytes at most; how many it could."""
        if self._size is None:
            return 0
        skipped = max(0, min(size, self._size - self._at))
        self._at += skipped
        return skipped


class MemoryStream:
    """Bytes that are in memory, or mapped."""

    def __init__(self, view: memoryview | bytes | bytearray) -> None:
        self._view = memoryview(view)
        self._at = 0

    def read(self, size: int, /) -> bytes:
        data = bytes(self._view[self._at : self._at + min(size, CHUNK_BYTES)])
        self._at += len(data)
        return data


class Chained:
    """Bytes that were already read of a stream, and then its rest."""

    def __init__(self, data: bytes | bytearray, rest: Stream) -> None:
        self._data: MemoryStream | None = MemoryStream(data)
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        if self._data is not None:
            if data := self._data.read(size):
                return data
            self._data = None
        return self._rest.read(size)


class Part:
    """The next ``size`` bytes of a stream, such as a member of an archive."""

    def __init__(self, stream: Buffered, size: int) -> None:
        self._stream = stream
        self.left = size

    def read(self, size: int, /) -> bytes:
        """Errors: Malformed when the stream ends before its part does."""
        if self.left == 0:
            return b""
        data = self._stream.read(min(size, self.left))
        if not data:
            raise Malformed(f"ends {self.left} bytes too early")
        self.left -= len(data)
        return data

    def skip(self) -> None:
        """Leaves out what is left of it. Errors: Malformed as of ``read``."""
        self.left -= self._stream.skip(self.left)
        while self.left:
            self.read(CHUNK_BYTES)


class Buffered:
    """A stream whose first bytes can be looked at before they are read, and read in small parts."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._held = b""
        self._at = 0

    def peek(self, size: int) -> bytes:
        """Its next bytes, fewer where it ends; all of them are still to be read."""
        self._fill(size)
        return self._held[self._at : self._at + size]

    def read(self, size: int, /) -> bytes:
        left = len(self._held) - self._at
        if left == 0:
            if size >= CHUNK_BYTES:
                return self._stream.read(size)
            self._held, self._at = self._stream.read(CHUNK_BYTES), 0
            left = len(self._held)
        start = self._at
        self._at += min(size, left)
        return self._held[start : self._at]

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer only at its end; for small sizes."""
        self._fill(size)
        return self.read(size) if size else b""

    def skip(self, size: int) -> int:
        """Leaves out so many bytes at most; how many it could without reading them."""
        held = min(size, len(self._held) - self._at)
        self._at += held
        if held < size and isinstance(self._stream, DescriptorStream):
            held += self._stream.skip(size - held)
        return held

    def _fill(self, size: int) -> None:
        while len(self._held) - self._at < size:
            more = self._stream.read(CHUNK_BYTES)
            if not more:
                break
            self._held, self._at = self._held[self._at :] + more, 0


def read_up_to(stream: Stream, size: int) -> bytearray:
    """Its next ``size`` bytes, fewer only at its end. Errors: Malformed, and the stream's."""
    data = bytearray()
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            break
        data += more
    return data


class _Frame(Protocol):
    """What zlib, bz2, lzma and lz4 have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes | None: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _gzip() -> _Frame:
    return cast(_Frame, zlib.decompressobj(wbits=zlib.MAX_WBITS | 16))


def _xz() -> _Frame:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT_BYTES)


def _lz4() -> _Frame:
    return cast(_Frame, lz4.frame.LZ4FrameDecompressor())


FRAMES: dict[str, tuple[bytes, Callable[[], _Frame]]] = {
    "gzip": (b"\x1f\x8b\x08", _gzip),
    "xz": (b"\xfd7zXZ\0", _xz),
    "bzip2": (b"BZh", bz2.BZ2Decompressor),
    "lz4": (b"\x04\x22\x4d\x18", _lz4),
}
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_NO_FRAME = "Unknown frame descriptor"
ZSTD_SKIPPED_MAGIC = b"\x50\x2a\x4d\x18"
FILLING_LIMIT_BYTES = 1 << 16
# A frame to be skipped may come first: any low half byte, RFC 8878 section 3.1.2.
ZSTD_SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")


def compression(head: bytes) -> str:
    """The method that these first bytes are of, empty if it is none that can be unpacked."""
    if head.startswith(ZSTD_MAGIC) or ZSTD_SKIPPED.match(head):
        return "zstd"
    return next((name for name, (magic, _) in FRAMES.items() if head.startswith(magic)), "")


class Unpacked:
    """What frames of one compression unpack to, one after the other; what follows them is left."""

    def __init__(self, stream: Stream, method: str, budget: Budget) -> None:
        self._stream = stream
        self._method = method
        self._budget = budget
        self._read = self._zstd() if method == "zstd" else self._frames()
        self._taken = 0
        self._given = 0

    def read(self, size: int, /) -> bytes:
        """Errors: Malformed for what is not of this compression, cut short, or over a bound."""
        try:
            data = self._read(min(size, CHUNK_BYTES))
        except Malformed:
            raise
        except MemoryError as error:
            raise Malformed(f"{self._method}: needs too much memory") from error
        except Exception as error:
            # zlib.error, LZMAError, ZstdError, RuntimeError of lz4, OSError and EOFError of bz2.
            raise Malformed(f"{self._method}: {error}") from error
        self._given += len(data)
        self._budget.take(len(data))
        if self._given > max(RATIO_FROM_BYTES, self._taken * RATIO_LIMIT):
            raise Malformed(f"{self._method}: unpacks to more than {RATIO_LIMIT} times its size")
        return data

    def _frames(self) -> Callable[[int], bytes]:
        magic, start = FRAMES[self._method]
        frame = start()
        packed = b""

        def read(size: int) -> bytes:
            nonlocal frame, packed
            while True:
                if frame.eof:
                    rest = packed or frame.unused_data or b""
                    while len(rest) < len(magic) and (more := self._source(CHUNK_BYTES)):
                        rest += more
                    packed = b""
                    if not rest.startswith(magic):
                        return b""
                    frame, packed = start(), rest
                left = getattr(frame, "unconsumed_tail", b"")
                data = frame.decompress(left + packed, size)
                packed = b""
                if data:
                    return data
                if not frame.eof and not (packed := self._source(PACKED_BYTES)):
                    raise Malformed(f"{self._method}: cut short")

        return read

    def _zstd(self) -> Callable[[int], bytes]:
        whole = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_LIMIT_BYTES)
        # The reader does not tell a frame that is cut short from its end. So behind all of it comes
        # a frame to be skipped, and then what is no frame: whoever complains before that had not
        # come to an end. Its length is nobody's to know, who could cut a frame by as much.
        filling = secrets.randbelow(FILLING_LIMIT_BYTES)
        behind = [
            ZSTD_SKIPPED_MAGIC + filling.to_bytes(4, "little") + b"\xff" * filling,
            bytes(len(ZSTD_MAGIC)),
        ]
        told = 0

        def source(size: int) -> bytes:
            nonlocal told
            data = self._source(size)
            if not data and told < len(behind):
                told += 1
                return behind[told - 1]
            return data

        reader = whole.stream_reader(
            cast(IO[bytes], _Readable(source)), PACKED_BYTES, read_across_frames=True
        )

        def read(size: int) -> bytes:
            try:
                data = reader.read1(size)
            except zstandard.ZstdError as error:
                if ZSTD_NO_FRAME in str(error) and told != 1:
                    return b""
                raise
            if not data:
                raise Malformed("zstd: cut short")
            return data

        return read

    def _source(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._taken += len(data)
        return data


class _Readable:
    """A function as what zstandard takes for a file."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self.read = read
