"""The bytes of a load that found no room, read from the process while a probe keeps it stopped.

The process is continued in any case, at the latest when the time of its stop is over. What is read
is what it had in its memory when it called the driver: other threads of it can write there again
before the driver reads it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from gpuwarden.errors import Malformed, TimedOut, Unavailable
from gpuwarden.probes import errands
from gpuwarden.probes.cuda import copies
from gpuwarden.probes.cuda.stopped import StoppedMap, StopRecord, boot_ns, is_stopped
from gpuwarden.probes.events import ticks
from gpuwarden.sensors.process.stat_lines import parse_stat

STOP_LIMIT_SECONDS = 0.4
"""From the stop until it goes on, read or not; the guardian waits a little longer."""
_PIECE_BYTES = 1 << 18
_PAUSE_SECONDS = 0.0005
_STAT_BYTES = 8192


class StoppedImage(NamedTuple):
    """What could be read. Who takes it closes ``descriptor``."""

    descriptor: int | None
    """A sealed memory file; None when nothing was read."""
    captured_bytes: int
    missed: str
    """Why bytes are missing; empty if none is."""


class WantedImage(NamedTuple):
    """Where an image is in a process's memory."""

    address: int
    size_bytes: int
    """How long it is, or with ``until_nul`` how long it is at most."""
    until_nul: bool = False
    prefix: bytes = b""
    """What its first bytes are known to be: after an exec they are others."""


def read_stopped(
    stops: StoppedMap, pid: int, start_time_ns: int, thread_id: int, wanted: WantedImage
) -> StoppedImage:
    """Reads an image of a process that has been stopped for it, then continues the process."""
    record = stops.record(pid)
    if record is None or record.start_time_ns != start_time_ns:
        return StoppedImage(None, 0, "the process went on before its memory was read")
    try:
        return _read(stops, record, thread_id, wanted)
    finally:
        stops.release(record, was_sent=True)


def _read(
    stops: StoppedMap, record: StopRecord, thread_id: int, wanted: WantedImage
) -> StoppedImage:
    until_ns = record.stopped_at_ns + int(STOP_LIMIT_SECONDS * 1e9)
    while not is_stopped(record.pid, thread_id):
        if boot_ns() >= until_ns or not os.path.isdir(f"/proc/{record.pid}/task/{thread_id}"):
            return StoppedImage(None, 0, "the process was not stopped, or no longer")
        time.sleep(_PAUSE_SECONDS)
    copy = copies.empty("module")
    reason = ""
    try:
        folder = os.open(f"/proc/{record.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            memory = _memory(folder, record)
        finally:
            os.close(folder)
        try:
            answer = errands.run(
                lambda kept: _copied(kept, wanted),
                (memory, copy),
                deadline_seconds=max((until_ns - boot_ns()) / 1e9, 0.0),
            )
            reason = answer.decode("utf-8", "backslashreplace")
        finally:
            os.close(memory)
    except TimedOut:
        reason = "reading the stopped process took longer than it may be stopped"
    except Unavailable as error:
        reason = str(error)
    except OSError as error:
        reason = f"the memory of the stopped process was not read: {error.strerror}"
    if not reason and not (
        is_stopped(record.pid, thread_id) and stops.record(record.pid) == record
    ):
        reason = "the process went on while its memory was read"
    if os.pread(copy, len(wanted.prefix), 0) != wanted.prefix:
        os.close(copy)
        return StoppedImage(None, 0, reason or "its memory held other bytes when it was read")
    descriptor = copies.sealed(copy)
    size = 0 if descriptor is None else os.fstat(descriptor).st_size
    return StoppedImage(descriptor, size, reason)


def _memory(folder: int, record: StopRecord) -> int:
    """Its memory, opened, once it is known to be that process. Errors: OSError, Unavailable."""
    memory = os.open("mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        descriptor = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            line = parse_stat(os.read(descriptor, _STAT_BYTES))
        finally:
            os.close(descriptor)
        if line.start_time_ticks != ticks(record.start_time_ns):
            raise Unavailable("the process had ended")
    except (OSError, Malformed, Unavailable) as error:
        os.close(memory)
        raise Unavailable("the process had ended") from error
    return memory


def _copied(kept: Sequence[int], wanted: WantedImage) -> bytes:
    """In the child: copies the image, gives the reason why bytes are missing."""
    memory, copy = kept
    address, size_bytes, until_nul, _ = wanted
    buffer = memoryview(bytearray(_PIECE_BYTES))
    at = 0
    while at < size_bytes:
        try:
            count = os.preadv(memory, [buffer[: min(_PIECE_BYTES, size_bytes - at)]], address + at)
        except OSError as error:
            return f"at byte {at}: {error.strerror}".encode()
        if count == 0:
            return f"at byte {at}: no memory, the process has ended".encode()
        if until_nul and (end := bytes(buffer[:count]).find(b"\0")) >= 0:
            _write(copy, buffer[:end])
            return b""
        _write(copy, buffer[:count])
        at += count
    return b"its text goes on" if until_nul else b""


def _write(copy: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(copy, piece) :]
