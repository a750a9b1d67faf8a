"""Members of a zip archive that is in memory or mapped (APPNOTE.TXT), by way of Python's zipfile.

Nothing is written: a name is a name, whatever it leads to.
"""

from __future__ import annotations

import codecs
import os
import zipfile
from collections.abc import Iterator

from msgspec import Struct

from gpuwarden.codescan.streams import CHUNK_BYTES, RATIO_FROM_BYTES, RATIO_LIMIT, Budget, Stream
from gpuwarden.errors import Malformed

MEMBER, EMPTY = b"PK\3\4", b"PK\5\6"
END_RECORD_BYTES, COMMENT_LIMIT_BYTES = 22, 0xFFFF
LOCAL_HEADER_BYTES, DESCRIPTOR_BYTES, CENTRAL_HEADER_BYTES = 30, 24, 46
ENCRYPTED = 0x1
GAP_LIMIT_BYTES = 64 << 10

# Names are in it unless they say otherwise; loaded here, for a confined child can load nothing.
codecs.lookup("cp437")


class ZipMember(Struct, frozen=True):
    """A file of the archive; ``refusal`` says why its bytes cannot be read."""

    name: str
    packed: int
    """Bytes as it is stored."""
    data: Stream
    refusal: str = ""


def starts_zip(head: bytes) -> bool:
    """Whether a file that begins so is a zip archive."""
    return head.startswith((MEMBER, EMPTY))


def is_zip(view: memoryview) -> bool:
    """Whether it is a zip archive, perhaps behind a program that unpacks it."""
    if starts_zip(bytes(view[:4])):
        return True
    tail = bytes(view[max(0, len(view) - END_RECORD_BYTES - COMMENT_LIMIT_BYTES) :])
    at = tail.rfind(EMPTY)
    return at >= 0 and at + END_RECORD_BYTES <= len(tail)


class ZipArchive:
    """The archive's members. Errors of the constructor: Malformed."""

    def __init__(self, view: memoryview, budget: Budget, limit: int) -> None:
        self._size = len(view)
        self._budget = budget
        self._given = 0
        self._is_over = False
        try:
            self._file = zipfile.ZipFile(_ViewFile(view))
            self._members = self._file.infolist()
        except MemoryError as error:
            raise Malformed("zip: its directory needs too much memory") from error
        except Exception as error:
            # BadZipFile, and what its parsing lets through: struct.error, ValueError and others.
            raise Malformed(f"zip: {error}") from error
        if len(self._members) > limit:
            raise Malformed(f"zip: more than {limit} members")

    @property
    def has_gaps(self) -> bool:
        """Whether many bytes belong to no member: there, too, something can be."""
        known = END_RECORD_BYTES + len(self._file.comment)
        for member in self._members:
            headers = LOCAL_HEADER_BYTES + CENTRAL_HEADER_BYTES + DESCRIPTOR_BYTES
            names = 2 * (len(os.fsencode(member.orig_filename)) + len(member.extra))
            known += headers + names + member.compress_size + len(member.comment)
        return self._size - known > GAP_LIMIT_BYTES

    def members(self) -> Iterator[ZipMember]:
        """Its files; each is to be read before the next is asked for."""
        for member in self._members:
            if self._is_over:
                return
            # zipfile's own is_dir cannot take an empty name.
            if member.filename.endswith("/") or member.file_size == 0:
                continue
            refusal = "encrypted" if member.flag_bits & ENCRYPTED else ""
            data = _Contents(self, member)
            yield ZipMember(member.filename, member.compress_size, data, refusal)

    def open(self, member: zipfile.ZipInfo) -> zipfile.ZipExtFile:
        """zipfile's reader of one member; it raises what it likes."""
        return self._file.open(member)  # type: ignore[return-value]

    def take(self, size: int) -> None:
        """Counts unpacked bytes. Errors: Malformed when they are too many."""
        self._budget.take(size)
        self._given += size
        self._is_over = self._given > max(RATIO_FROM_BYTES, RATIO_LIMIT * self._size)
        if self._is_over:
            reason = f"zip: unpacks to more than {RATIO_LIMIT} times its size"
            raise Malformed(f"{reason}; what follows in it was not read")


class _Contents:
    """A member's bytes, opened when they are first asked for."""

    def __init__(self, archive: ZipArchive, member: zipfile.ZipInfo) -> None:
        self._archive = archive
        self._member = member
        self._file: zipfile.ZipExtFile | None = None

    def read(self, size: int, /) -> bytes:
        try:
            if self._file is None:
                self._file = self._archive.open(self._member)
            data = self._file.read1(min(size, CHUNK_BYTES))
        except MemoryError as error:
            raise Malformed("zip: a member needs too much memory") from error
        except Exception as error:
            raise Malformed(f"zip: {error}") from error
        self._archive.take(len(data))
        return data


class _ViewFile:
    """A buffer as the file that zipfile wants."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        if start + offset < 0:
            raise OSError("a seek to before the beginning")
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = len(self._view) if size < 0 else self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data

    def close(self) -> None:
        self._view = memoryview(b"")
