"""Findings as JSON lines: to standard output, or to a file that is rotated by size."""

from __future__ import annotations

import os
import select
import stat
import threading

from gpuwarden.sinks.sink import DELIVERED, Outcome

ROTATE_BYTES = 64 << 20
KEPT_FILES = 5
_whole_lines = threading.Lock()
"""Several threads write to standard output; a pipe would cut long lines where it is full."""


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class StdoutSink:
    """One line a transition to a descriptor that is open already."""

    repeat_seconds = None
    key = "stdout"
    name = "stdout"

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor

    def deliver(self, finding_json: bytes) -> Outcome:
        return self.write(finding_json + b"\n")

    def write(self, data: bytes) -> Outcome:
        """All of it, as it is."""
        try:
            with _whole_lines:
                _write_all(self._descriptor, data)
        except OSError as error:
            return Outcome("retry", error.strerror or "cannot be written")
        return DELIVERED

    @property
    def reader_is_gone(self) -> bool:
        """Nobody will read it again: the other end of the pipe, or the terminal, is closed."""
        poll = select.poll()
        try:
            poll.register(self._descriptor, 0)
            # Errors and hang-ups are told of unasked.
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        pass


class FileSink:
    """One line a transition, synced; PATH.1 is the youngest of the files that were full.

    A line that a full disk cut is taken back. One that our death cut stays (programs that follow a
    file read all of it again when it shrinks): it is ended, and comes again whole after it.
    """

    repeat_seconds = None

    def __init__(
        self, path: str, *, rotate_bytes: int = ROTATE_BYTES, kept_files: int = KEPT_FILES
    ) -> None:
        self.path = path
        self.key = f"file:{path}"
        self.name = f"file {path}"
        self._rotate_bytes = rotate_bytes
        self._kept_files = kept_files
        self._descriptor: int | None = None

    def deliver(self, finding_json: bytes) -> Outcome:
        try:
            descriptor = self._opened(len(finding_json) + 1)
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, finding_json + b"\n")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        except OSError as error:
            self.close()
            return Outcome("retry", error.strerror or "cannot be written")
        return DELIVERED

    def _opened(self, more_bytes: int) -> int:
        """A descriptor of what PATH names now: another program may have moved our file away."""
        if self._descriptor is not None:
            ours = os.fstat(self._descriptor)
            try:
                named = os.stat(self.path, follow_symlinks=False)
            except FileNotFoundError:
                named = None
            if named is None or (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):
                self.close()
            elif ours.st_size and ours.st_size + more_bytes > self._rotate_bytes:
                self._rotate()
        if self._descriptor is None:
            self._descriptor = self._open()
        return self._descriptor

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "not a regular file")
            if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
                _write_all(descriptor, b"\n")
            self._sync_directory()
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _rotate(self) -> None:
        self.close()
        for number in range(self._kept_files - 1, 0, -1):
            older = f"{self.path}.{number}"
            if os.path.lexists(older):
                os.replace(older, f"{self.path}.{number + 1}")
        os.replace(self.path, f"{self.path}.1")

    def _sync_directory(self) -> None:
        directory = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
