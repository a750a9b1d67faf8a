"""Writes an evidence archive: one tar, bounded, that shows any change once it is sealed.

While it is written it is called ``NAME.partial``; each member carries its digest in its headers, so
that what was had can be told whole when the tool or the machine dies in the middle. For one thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from gpuwarden import __version__, tar_format
from gpuwarden.errors import GpuwardenError, Malformed, Unavailable, UsageError
from gpuwarden.evidence import manifest as words
from gpuwarden.evidence.clock import read_clock
from gpuwarden.evidence.directory import free_bytes, open_directory, refuse
from gpuwarden.evidence.intake import Data, Intake
from gpuwarden.evidence.manifest import Account, Manifest, Member, Omission, Tool

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PARTIAL = ".partial"
RESERVED_BYTES = 256 << 10
"""Kept free for what the manifest says beside its members."""
SMALLEST_BYTES = 2 * RESERVED_BYTES
DISK_RESERVE_BYTES = 256 << 20
"""Left free on the file system: evidence must not stop the node."""
_WRITE_BACK_BYTES = 16 << 20
_FRAMING_BYTES = tar_format.HEADER_BYTES + tar_format.BLOCK_BYTES + 2 * words.TEXT_LIMIT + 1024
"""The most that a member takes beside its content, its line in the manifest with it."""
_MANIFEST_BYTES = words.MANIFEST_LIMIT_BYTES - (4 << 20)
_ACCOUNT_BYTES = RESERVED_BYTES - (32 << 10)
INFINITE = float("inf")
_now = time.monotonic
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Sealed(Struct, frozen=True, kw_only=True):
    """An archive that is complete."""

    path: str
    size_bytes: int
    manifest_sha256: str
    """Names the archive: it fixes every byte of it."""
    fingerprint: str
    """Of the key that signed it; empty: nobody did."""
    manifest: Manifest


class _Full(Exception):
    """The disk has no more room."""


class ArchiveWriter:
    """One archive that is being written; a context manager, which leaves what was not sealed.

    ``path`` is where it stands once it is sealed; its directory is made with mode 0700.
    ``limit_bytes`` is the most that the file may hold. After ``deadline_seconds`` nothing more is
    taken, and what is being read is cut. Errors: UsageError, Denied, Unavailable.
    """

    def __init__(
        self,
        path: str,
        *,
        limit_bytes: int,
        command: str = "",
        deadline_seconds: float | None = None,
    ) -> None:
        if limit_bytes < SMALLEST_BYTES:
            raise UsageError(f"an archive has at least {SMALLEST_BYTES >> 10} KiB")
        self.path = os.path.abspath(path)
        self.limit_bytes = limit_bytes
        self.members: list[Member] = []
        self._command = command
        self._deadline = INFINITE if deadline_seconds is None else _now() + deadline_seconds
        self._left: list[Omission] = []
        self._unread: list[Omission] = []
        self._more = [0, 0]
        self._names: set[str] = set()
        self._folders: set[str] = set()
        self._at = self._written_back = 0
        self._reserved = RESERVED_BYTES
        self._begun = read_clock()
        self._mtime = max(0, self._begun.realtime_ns // 10**9) & tar_format.MTIME_LIMIT
        self._file: int | None = None
        self._directory = open_directory(os.path.dirname(self.path))
        try:
            spare = free_bytes(self._directory) - DISK_RESERVE_BYTES
            if spare < SMALLEST_BYTES:
                raise Unavailable(f"{self.path}: no room: {DISK_RESERVE_BYTES >> 20} MiB stay free")
            self.limit_bytes = min(limit_bytes, spare)
            self._file = self._create()
        except GpuwardenError:
            self.abandon()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    # ----------------------------------------------------------------------- what goes in

    @property
    def room_bytes(self) -> int:
        """How many bytes of content one more member may have."""
        left = self.limit_bytes - self._at - self._reserved - _FRAMING_BYTES
        return max(0, min(left, tar_format.SIZE_LIMIT_BYTES))

    @property
    def left_seconds(self) -> float:
        """Until the deadline; infinite if there is none."""
        return max(0.0, self._deadline - _now())

    @property
    def is_late(self) -> bool:
        """Whether the deadline is over."""
        return _now() >= self._deadline

    def add(
        self,
        name: str,
        data: Data,
        *,
        what: str,
        size_bytes: int | None = None,
        limit_bytes: int | None = None,
        compress: bool = False,
        cut: bool = False,
    ) -> Member | None:
        """One more member; None when it is among what was left out or unread instead.

        ``size_bytes`` is how large the source is said to be: what will not fit is not read at all.
        What gives more than ``limit_bytes`` or the room is left out, or, with ``cut``, kept up to
        there. A source that fails in the middle leaves what it gave. ``compress`` stores it as
        ``name.zst``. Errors: UsageError for a name that cannot be; Unavailable if nothing can be
        written.
        """
        stored = self._take_name(name, compress)
        size = len(data) if isinstance(data, bytes) else size_bytes
        room = self.room_bytes
        # What zstd cannot make smaller it makes a little larger.
        fits = room - room // 128 - 1024 if compress else room
        most = tar_format.SIZE_LIMIT_BYTES if compress and not cut else max(0, fits)
        most = most if limit_bytes is None else min(most, limit_bytes)
        many = len(self.members) >= words.MEMBERS_LIMIT or self._reserved > _MANIFEST_BYTES
        if many or room <= 0 or self.is_late:
            why = "no time left" if self.is_late else "no room in the archive"
            self.left_out(what, why, size)
            return None
        if not cut and size is not None and size > most:
            self.left_out(what, f"larger than the {most} bytes left for it", size)
            return None
        read_at_ns, start = time.time_ns(), self._at
        intake = Intake(data, most, is_late=lambda: self.is_late)
        try:
            written, digest = self._content(stored, intake, compress)
        except _Full:
            written = -1
        trouble = ""
        if written < 0:
            trouble = "the disk has no more room"
        elif intake.is_over and not cut:
            trouble = f"larger than the {most} bytes left for it"
        elif written > room:
            trouble = f"larger than the {room} bytes left for it, although compressed"
        if trouble:
            self._back_to(start)
            self.left_out(what, trouble, size)
            return None
        if intake.error and not intake.size:
            self._back_to(start)
            self.unread(what, intake.error)
            return None
        reason = intake.error or (f"only the first {most} bytes" if intake.is_over else "")
        member = Member(
            name=stored,
            what=_text(what),
            size_bytes=written,
            sha256=digest.hex(),
            read_at_ns=read_at_ns,
            plain_size_bytes=intake.size if compress else None,
            plain_sha256=intake.sha256 if compress else None,
            cut=_text(reason),
        )
        self._finish(start, tar_format.Header(stored, written, self._mtime, digest))
        self.members.append(member)
        self._reserved += len(words.encode(member)) + 256
        return member

    def left_out(self, what: str, why: str, size_bytes: int | None = None) -> None:
        """Notes what is not taken, for want of room or because nobody asked for it."""
        self._note(0, self._left, Omission(what=_text(what), why=_text(why), size_bytes=size_bytes))

    def unread(self, what: str, why: str) -> None:
        """Notes what could not be read."""
        self._note(1, self._unread, Omission(what=_text(what), why=_text(why)))

    # ------------------------------------------------------------------------------ the end

    def close(self, account: Account, key: Ed25519PrivateKey | None) -> Sealed:
        """Writes the manifest and the seal, and gives the file its name.

        Errors: Malformed for an account that is no text or too long (224 KiB); UsageError if the
        name is taken by now; Unavailable.
        """
        if len(words.encode(account)) > _ACCOUNT_BYTES:
            raise Malformed(f"the account of an archive has at most {_ACCOUNT_BYTES >> 10} KiB")
        manifest = Manifest(
            tool=Tool(
                name="gpuwarden",
                version=__version__,
                python=platform.python_version(),
                command=_text(self._command),
            ),
            begun=self._begun,
            ended=read_clock(),
            account=account,
            limit_bytes=self.limit_bytes,
            members=tuple(self.members),
            left_out=tuple(self._left),
            left_out_more=self._more[0],
            unread=tuple(self._unread),
            unread_more=self._more[1],
        )
        body = words.encode(manifest)
        seal = words.seal(body, key)
        try:
            for name, data in ((words.MANIFEST, body), (words.SEAL, words.encode(seal))):
                self._whole(name, data)
            self._put(tar_format.END)
            os.fsync(self._opened())
        except (_Full, OSError) as error:
            raise Unavailable(f"{self.path}: the disk has no room for the manifest") from error
        self._rename()
        sealed = Sealed(
            path=self.path,
            size_bytes=self._at,
            manifest_sha256=seal.manifest_sha256,
            fingerprint=seal.fingerprint,
            manifest=manifest,
        )
        self._release()
        return sealed

    def abandon(self) -> None:
        """Ends without a seal: the partial file stays if anything is in it."""
        if self._file is not None and not self.members:
            with contextlib.suppress(OSError):
                os.unlink(self._partial, dir_fd=self._directory)
        self._release()

    # ------------------------------------------------------------------------------ the file

    @property
    def _partial(self) -> str:
        return os.path.basename(self.path) + PARTIAL

    def _create(self) -> int:
        name = os.path.basename(self.path)
        if self._stands(name):
            raise UsageError(f"{self.path}: is there already")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._partial, flags, 0o600, dir_fd=self._directory)
        except FileExistsError as error:
            raise UsageError(f"{self.path}{PARTIAL}: is there already") from error
        except (OSError, ValueError) as error:
            refuse(error, self.path + PARTIAL)

    def _stands(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except (OSError, ValueError):
            return False
        return True

    def _rename(self) -> None:
        name = os.path.basename(self.path)
        if self._stands(name):
            raise UsageError(f"{self.path}: is there already; sealed as {self._partial}")
        try:
            os.rename(self._partial, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            os.fsync(self._directory)
        except OSError as error:
            refuse(error, self.path)

    def _opened(self) -> int:
        if self._file is None:
            raise UsageError(f"{self.path}: is closed")
        return self._file

    def _release(self) -> None:
        for handle in (self._file, self._directory):
            if handle is not None and handle >= 0:
                os.close(handle)
        self._file, self._directory = None, -1

    # --------------------------------------------------------------------------- its bytes

    def _content(self, name: str, intake: Intake, compress: bool) -> tuple[int, bytes]:
        """Writes a member whose length is not known yet: its size and digest. Errors: _Full."""
        empty = tar_format.Header(name, 0, self._mtime, tar_format.UNFINISHED)
        self._put(tar_format.encode(empty))
        room = self.limit_bytes - self._reserved
        digest, size = hashlib.sha256(), 0
        for piece in intake.compressed() if compress else intake.pieces():
            digest.update(piece)
            size += len(piece)
            if self._at + len(piece) > room:
                break
            self._put(piece)
        return size, digest.digest()

    def _finish(self, start: int, header: tar_format.Header) -> None:
        """Fills up the last block, then puts the headers in the place of the unfinished ones."""
        try:
            self._put(bytes(header.padding))
            self._write(tar_format.encode(header), start)
        except _Full as error:
            raise Unavailable(f"{self.path}: the disk has no more room") from error

    def _whole(self, name: str, data: bytes) -> None:
        digest = hashlib.sha256(data).digest()
        header = tar_format.Header(name, len(data), self._mtime, digest)
        self._put(tar_format.encode(header) + data + bytes(header.padding))

    def _put(self, data: bytes) -> None:
        self._write(data, self._at)
        self._at += len(data)
        if self._at - self._written_back >= _WRITE_BACK_BYTES:
            # Begins to write it out now, and keeps the page cache for the workload.
            length = self._at - self._written_back
            os.posix_fadvise(self._opened(), self._written_back, length, os.POSIX_FADV_DONTNEED)
            self._written_back = self._at

    def _write(self, data: bytes, at: int) -> None:
        file, left = self._opened(), memoryview(data)
        while left:
            try:
                count = os.pwrite(file, left, at)
            except OSError as error:
                if error.errno in _FULL:
                    raise _Full from error
                refuse(error, self.path)
            left, at = left[count:], at + count

    def _back_to(self, start: int) -> None:
        try:
            os.ftruncate(self._opened(), start)
        except OSError as error:
            refuse(error, self.path)
        self._at = start
        self._written_back = min(self._written_back, start)

    # ---------------------------------------------------------------------- names and notes

    def _take_name(self, name: str, compress: bool) -> str:
        stored = name + words.SQUEEZED if compress else name
        folders = set(_folders_of(stored))
        if not words.is_member_name(name):
            raise UsageError(f"no member can be called {name[:120]!r}")
        if stored in self._names or stored in self._folders or folders & self._names:
            raise UsageError(f"there is a member called {stored} already")
        self._names.add(stored)
        self._folders |= folders
        return stored

    def _note(self, which: int, notes: list[Omission], note: Omission) -> None:
        cost = len(words.encode(note)) + 256
        full = self.room_bytes <= cost or self._reserved > _MANIFEST_BYTES
        if full or len(notes) >= words.OMISSIONS_LIMIT:
            self._more[which] += 1
            return
        notes.append(note)
        self._reserved += cost


def _folders_of(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _text(text: str) -> str:
    """Bounded, and such that JSON can hold it."""
    return text[: words.TEXT_LIMIT].encode(errors="backslashreplace").decode()
