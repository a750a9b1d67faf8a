"""Recordings of a node: gpuwarden's own snapshot files, and nvidia-smi dumps read as one.

A snapshot is one JSON document (``schema``, ``version``, then the fields of ``model.Snapshot``),
gzip'ed and byte for byte the same for the same facts. Fields that hold their default are left
out; unknown ones are ignored; an older version is migrated, a newer one refused. An evidence
archive holds one.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shlex
import stat
import zlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

from gpuwarden import tar_format
from gpuwarden.errors import Denied, Malformed, Unavailable, UsageError
from gpuwarden.expected.registry import SOURCES
from gpuwarden.model import (
    SNAPSHOT_SCHEMA,
    SNAPSHOT_VERSION,
    Gap,
    NodeFacts,
    SensorRun,
    Snapshot,
    SourceRun,
)
from gpuwarden.pattern import pattern
from gpuwarden.sensors.nvidia_smi import DUMP_LIMIT_BYTES, Dump, read_dump
from gpuwarden.sensors.registry import SENSOR_NAMES

RECORDING_LIMIT_BYTES = 1 << 30
INFLATED_LIMIT_BYTES = 512 << 20
RATIO_LIMIT = 200
"""JSON of a node shrinks ten- to fortyfold; what shrinks far more was made to burst."""
RATIO_GRACE_BYTES = 16 << 20
INTEGER_RANGE = range(-(1 << 63), 1 << 64)

IN_ARCHIVE = "snapshot.json.gz"
"""The member of an evidence archive that is a snapshot."""

DUMP_SENSOR = "nvidia_smi"
UNSEEN_SENSORS = SENSOR_NAMES
"""Sensors that a dump stands in for or lacks: each is reported absent."""
UNSEEN_SOURCES = ("policy", *(name for name, _ in SOURCES))
NOT_IN_A_DUMP = "not in an nvidia-smi dump"

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_CHUNK_BYTES = 1 << 20
_LONG_INTEGER = pattern(rb"\d{19}")
_PATH_PREFIX = ".gpuwarden-"

Document = dict[str, Any]
T = TypeVar("T")


# ------------------------------------------------------------------------------- old versions


def _from_version_0(document: Document) -> Document:
    """Version 0 called the node ``host`` and did not record the sources of the expected set."""
    document = dict(document)
    if "host" in document:
        document["node"] = document.pop("host")
    document.setdefault(
        "sources",
        [
            {"name": name, "state": "skipped", "reason": "not recorded by this old snapshot"}
            for name in UNSEEN_SOURCES
        ],
    )
    return document


MIGRATIONS: tuple[Callable[[Document], Document], ...] = (_from_version_0,)
"""``MIGRATIONS[n]`` turns a document of version n into one of version n + 1."""


class _Header(msgspec.Struct):
    schema: str = ""
    version: int | None = None


# --------------------------------------------------------------------------- encode and decode


def encode(snapshot: Snapshot) -> bytes:
    """The snapshot as a gzip'ed JSON document. Errors: Malformed if text in it is not Unicode."""
    # The model leaves defaults out, and the schema and the version are defaults.
    plain = msgspec.structs.replace(snapshot, schema=SNAPSHOT_SCHEMA, version=SNAPSHOT_VERSION)
    try:
        body = msgspec.json.encode(plain, order="deterministic")
        header = msgspec.json.encode({"schema": SNAPSHOT_SCHEMA, "version": SNAPSHOT_VERSION})
    except (ValueError, OverflowError, RecursionError) as error:
        raise Malformed(f"the snapshot cannot be written as JSON: {error}") from error
    return gzip.compress(header[:-1] + b"," + body[1:], compresslevel=6, mtime=0)


def decode(data: bytes) -> Snapshot:
    """The snapshot in a gzip'ed or plain JSON document. Errors: Malformed, with the place."""
    if data.startswith(_GZIP_MAGIC):
        data = _inflated(data)
    data = data.removeprefix(b"\xef\xbb\xbf")
    header = _parsed(data, _Header)
    if header.schema != SNAPSHOT_SCHEMA:
        named = f"its schema is {header.schema[:60]!r}" if header.schema else "it names no schema"
        raise Malformed(f"not a gpuwarden snapshot: {named}, not {SNAPSHOT_SCHEMA!r}")
    version = header.version
    if version is None or version < 0:
        raise Malformed("a snapshot without a valid version - at `$.version`")
    if version > SNAPSHOT_VERSION:
        raise Malformed(
            f"the snapshot has version {version} and this gpuwarden reads up to {SNAPSHOT_VERSION}",
            remedy="upgrade gpuwarden",
        )
    if version == SNAPSHOT_VERSION:
        snapshot = _parsed(data, Snapshot)
    else:
        document = _parsed(data, Document)
        for migrate in MIGRATIONS[version:]:
            document = migrate(document)
        document["version"] = SNAPSHOT_VERSION
        try:
            snapshot = msgspec.convert(document, Snapshot)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a snapshot of version {version} does not read: {error}") from error
    # The parser takes integers of any length; what reads them does not.
    if _LONG_INTEGER.search(data):
        _check_integers(snapshot, "$")
    return snapshot


def _parsed(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Malformed(f"the snapshot does not read: {error}") from error
    except RecursionError as error:
        raise Malformed("the snapshot does not read: nested too deeply") from error
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise Malformed(f"the snapshot is not JSON: {error}") from error


def _check_integers(value: Any, place: str) -> None:
    if isinstance(value, int):
        if value not in INTEGER_RANGE:
            raise Malformed(f"Expected an integer of at most 64 bits - at `{place}`")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check_integers(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_integers(item, f"{place}[{i}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_integers(item, f"{place}.{str(name)[:60]}")


def _inflated(data: bytes) -> bytes:
    """The content of a gzip file, of one or several members, within the limits."""
    out = bytearray()
    consumed = 0
    while data[consumed : consumed + 2] == _GZIP_MAGIC:
        inflater = zlib.decompressobj(_GZIP_WINDOW)
        while not inflater.eof:
            block = inflater.unconsumed_tail
            if not block:
                block = data[consumed : consumed + _CHUNK_BYTES]
                consumed += len(block)
            if not block:
                raise Malformed("the recording is cut off: its gzip stream has no end")
            try:
                out += inflater.decompress(block, _CHUNK_BYTES)
            except zlib.error as error:
                raise Malformed(f"the recording's gzip stream is damaged: {error}") from error
            if len(out) > INFLATED_LIMIT_BYTES:
                raise Malformed(
                    f"the recording holds more than {INFLATED_LIMIT_BYTES >> 20} MiB when inflated"
                )
            if len(out) > RATIO_GRACE_BYTES and len(out) > RATIO_LIMIT * consumed:
                raise Malformed(f"the recording inflates more than {RATIO_LIMIT}-fold")
        consumed -= len(inflater.unused_data)
    if data[consumed:].strip(b"\0"):
        raise Malformed("the recording has bytes after the end of its gzip stream")
    return bytes(out)


# ---------------------------------------------------------------------------------- files


def write(path: str, snapshot: Snapshot) -> None:
    """Writes a snapshot file that is whole or not there at all, readable by its owner only.

    An existing file is replaced; a link, a directory or a device is refused. Errors: UsageError,
    Denied, Unavailable.
    """
    data = encode(snapshot)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        _refuse(error, path)
    if stat.S_ISLNK(mode):
        raise UsageError(f"{path}: is a symbolic link, which is not followed")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path}: is not a regular file")
    directory = os.path.dirname(path) or "."
    temporary = os.path.join(directory, _PATH_PREFIX + os.urandom(8).hex())
    try:
        _write_whole(temporary, data)
        try:
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        _refuse(error, path)
    # The file stands; not every file system can also promise that its name does.
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_whole(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:
        os.unlink(path)
        raise


def _refuse(error: OSError | ValueError, path: str) -> NoReturn:
    if isinstance(error, PermissionError):
        raise Denied(f"{path}: permission denied") from error
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        raise Unavailable(f"{path}: not there") from error
    if isinstance(error, OSError):
        raise Unavailable(f"{path}: {error.strerror or error}") from error
    raise UsageError(f"{path!r}: not a path") from error


def open_recording(path: str) -> Snapshot:
    """The recorded node in a file: a gpuwarden snapshot, an evidence archive with one, or an
    nvidia-smi dump, told by content.

    Errors: Unavailable, Denied; Malformed if it is neither, is damaged or is too large.
    """
    data = _read(path)
    try:
        return read_recording(data)
    except Malformed as error:
        raise Malformed(f"{path}: {error}", remedy=error.remedy) from error


def read_recording(data: bytes) -> Snapshot:
    """``open_recording`` of bytes already read. Errors: Malformed."""
    if data.startswith(_GZIP_MAGIC):
        data = _inflated(data)
    if data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        return decode(data)
    dump = read_dump(data) if len(data) <= DUMP_LIMIT_BYTES else None
    if dump is None:
        raise Malformed(
            "neither a gpuwarden snapshot nor an nvidia-smi dump",
            remedy="understood are: files of `gpuwarden snapshot`, the output of `nvidia-smi -q -x`"
            ", of `nvidia-smi --query-compute-apps=… --format=csv`, of `nvidia-smi pmon` or dmon, "
            "and the plain nvidia-smi table",
        )
    return snapshot_of(dump)


def _read(path: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        _refuse(error, path)
    chunks: list[bytes] = []
    size = 0
    try:
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise Malformed(f"{path}: not a regular file")
        if stat.S_ISREG(mode) and tar_format.looks_like(
            os.pread(handle, tar_format.BLOCK_BYTES, 0)
        ):
            return _of_archive(handle, path)
        while chunk := os.read(handle, _CHUNK_BYTES):
            size += len(chunk)
            if size > RECORDING_LIMIT_BYTES:
                raise Malformed(f"{path}: more than {RECORDING_LIMIT_BYTES >> 20} MiB")
            chunks.append(chunk)
    except OSError as error:
        _refuse(error, path)
    finally:
        os.close(handle)
    return b"".join(chunks)


def _of_archive(handle: int, path: str) -> bytes:
    data = tar_format.find(handle, IN_ARCHIVE, INFLATED_LIMIT_BYTES)
    if data is None:
        raise Malformed(
            f"{path}: an evidence archive without a whole {IN_ARCHIVE}",
            remedy=f"gpuwarden evidence verify {shlex.quote(path)}",
        )
    return data


def snapshot_of(dump: Dump) -> Snapshot:
    """A dump as the snapshot of a node of which nothing else is known.

    Without a time in the dump ``taken_at_ns`` is 0, and ``node.unread`` says so.
    """
    unread = {
        "hostname": NOT_IN_A_DUMP,
        "boot_id": NOT_IN_A_DUMP,
        "kernel": NOT_IN_A_DUMP,
        "host_pid_namespace": "a dump does not tell from which pid namespace it was taken",
    }
    gaps = list(dump.gaps)
    if dump.taken_at_ns is None:
        unread["taken_at_ns"] = "the dump carries no time"
        gaps.append(Gap(sensor=DUMP_SENSOR, what="the time of the dump", reason="not in the dump"))
    else:
        unread["time_zone"] = "the dump carries none: its time is read as UTC"
    if dump.driver_version is None:
        unread["driver_version"] = "not in the dump"
    if dump.cuda_version is None:
        unread["cuda_version"] = "not in the dump"
    run = SensorRun(
        name=DUMP_SENSOR,
        state="partial" if gaps else "ok",
        reason="; ".join(f"{gap.what}: {gap.reason}" for gap in gaps[:3]),
        remedy=next((gap.remedy for gap in gaps if gap.remedy), ""),
        facts=len(dump.gpus) + len(dump.clients) + len(dump.accounted),
    )
    return Snapshot(
        taken_at_ns=dump.taken_at_ns or 0,
        node=NodeFacts(
            hostname="unknown",
            origin=dump.kind,
            driver_version=dump.driver_version,
            cuda_version=dump.cuda_version,
            unread=unread,
        ),
        sensors=(
            run,
            *(
                SensorRun(name=name, state="absent", reason=NOT_IN_A_DUMP)
                for name in UNSEEN_SENSORS
            ),
        ),
        sources=tuple(
            SourceRun(name=name, state="absent", reason=NOT_IN_A_DUMP) for name in UNSEEN_SOURCES
        ),
        gaps=tuple(gaps),
        gpus=dump.gpus,
        clients=dump.clients,
        accounted=dump.accounted,
    )
