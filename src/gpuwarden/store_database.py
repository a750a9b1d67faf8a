"""One SQLite file of the agent's memory: opened, checked, migrated, set aside when damaged."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.model import Gap

Synchronous = Literal["FULL", "NORMAL"]

HEADER = b"SQLite format 3\x00"
BUSY_SECONDS = 5.0
WAL_PAGES = 256
WAL_KEPT_BYTES = 1 << 20
IN_MEMORY = ":memory:"
COMPANIONS = ("", "-wal", "-shm")

# Primary result codes (sqlite.org/rescode.html); an extended code has its primary one in the low
# byte.
BUSY, LOCKED, READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB = 5, 6, 8, 10, 11, 13, 14, 26
REASONS = {
    BUSY: ("another program holds a lock on it", "find it with: fuser {path}"),
    LOCKED: ("another program holds a lock on it", "find it with: fuser {path}"),
    READONLY: ("it is read-only", "make its file system writable"),
    IOERR: ("the disk gave an error, or is full", "look at: df {path}; dmesg"),
    CORRUPT: ("it is damaged", "restart gpuwarden: it sets the file aside and begins a new one"),
    NOTADB: ("it is damaged", "restart gpuwarden: it sets the file aside and begins a new one"),
    FULL: ("the disk is full", "free space: df {path}"),
    CANTOPEN: ("it cannot be opened", "look at: ls -l {path}"),
}


def primary_code(error: sqlite3.Error) -> int:
    """The primary result code of an error; 0 when it has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else 0


def trouble(path: str, error: sqlite3.Error, effect: str) -> Gap:
    """What an error of a database file means, for a person; ``effect`` says what it costs."""
    reason, remedy = REASONS.get(primary_code(error), (str(error), ""))
    return Gap(
        sensor="store", what=path, reason=f"{reason}; {effect}", remedy=remedy.format(path=path)
    )


def hold_directory(directory: str) -> int:
    """The descriptor of a lock that keeps a second agent out of a directory.

    The directory is made if it is not there. Errors: Unavailable when another process has it,
    Denied when others may write there or we may not.
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        status = os.stat(directory)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Denied(
                f"{directory}: others may write there",
                remedy=f"chown root: {directory} && chmod 700 {directory}",
            )
        lock = os.open(
            f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise Denied(f"{directory}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise Unavailable(
            f"{directory} is in use by another gpuwarden (pid {holder})",
            remedy="stop that one, or give this one a directory of its own",
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same, it only does not name us
    return lock


def _uri(path: str, query: str) -> str:
    quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return f"file:{quoted}?{query}"


def open_read_only(path: str) -> sqlite3.Connection:
    """A connection that cannot change anything.

    Errors: Unavailable when there is no such file or it cannot be read as a database.
    """
    if not os.path.exists(path):
        raise Unavailable(
            f"{path}: not there", remedy="gpuwarden watch keeps it; has it run on this node?"
        )
    # Without a log there is nothing in flux: an immutable file needs no shared memory beside it,
    # which a reader without write permission could not make.
    queries = ("mode=ro",) if os.path.exists(f"{path}-wal") else ("mode=ro&immutable=1", "mode=ro")
    failure: sqlite3.Error | None = None
    for query in queries:
        connection = None
        try:
            connection = sqlite3.connect(
                _uri(path, query), uri=True, timeout=BUSY_SECONDS, check_same_thread=False
            )
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection
        except sqlite3.Error as error:
            failure = error
            if connection is not None:
                connection.close()
    assert failure is not None  # noqa: S101
    gap = trouble(path, failure, "nothing can be read from it")
    raise Unavailable(f"{path}: {gap.reason}", remedy=gap.remedy) from failure


def _damage(path: str, *, thorough: bool) -> str | None:
    """What is wrong with a file, or None; nothing is changed on the way."""
    with open(path, "rb") as file:
        header = file.read(len(HEADER))
    if not header:
        return None
    if header != HEADER:
        return "it is no SQLite database"
    # A reader does not write the log back when it closes: what is damaged stays as it was found.
    connection = sqlite3.connect(_uri(path, "mode=ro"), uri=True, timeout=BUSY_SECONDS)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if thorough:
            answer = connection.execute("PRAGMA quick_check(1)").fetchone()
            if answer is None or answer[0] != "ok":
                return "its contents are damaged"
    except sqlite3.DatabaseError as error:
        if primary_code(error) in (CORRUPT, NOTADB):
            return "its contents are damaged"
        raise
    finally:
        connection.close()
    return None


def set_aside(path: str) -> str:
    """The new name of a damaged database; its log and index move with it."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    number = 0
    while os.path.lexists(aside := f"{path}.damaged-{stamp}" + (f"-{number}" if number else "")):
        number += 1
    for companion in COMPANIONS:
        try:
            os.rename(path + companion, aside + companion)
        except FileNotFoundError:
            continue
    return aside


def _migrate(connection: sqlite3.Connection, path: str, migrations: Sequence[str]) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations):
        raise Unavailable(
            f"{path}: written by a newer gpuwarden (its version is {version}, "
            f"this one knows {len(migrations)})",
            remedy="run the newer gpuwarden, or move the file away",
        )
    for number, script in enumerate(migrations[version:], start=version + 1):
        # One transaction a step: killed half way, the step is done again from its beginning.
        with transaction(connection):
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={number}")


def _make_file(path: str) -> None:
    """SQLite would make it readable for all."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _prepare(path: str, *, thorough: bool) -> Gap | None:
    """Makes sure that there is a sound file; what was set aside for it."""
    _make_file(path)
    damage = _damage(path, thorough=thorough)
    if damage is None:
        return None
    aside = set_aside(path)
    _make_file(path)
    return Gap(
        sensor="store",
        what=path,
        reason=f"{damage}; it was set aside as {aside}, a new one was begun",
        remedy="keep the old file if its history matters; nothing of it is used",
    )


def open_database(
    path: str, migrations: Sequence[str], *, synchronous: Synchronous, thorough: bool
) -> tuple[sqlite3.Connection, Gap | None]:
    """A connection to an up-to-date database, and what was set aside for it.

    ``migrations[n]`` leads from schema version n to n + 1, statements split at semicolons.
    ``thorough`` reads all pages (``PRAGMA quick_check``). ``IN_MEMORY`` is a path too. Errors:
    Unavailable, Denied.
    """
    aside: Gap | None = None
    try:
        if path != IN_MEMORY:
            aside = _prepare(path, thorough=thorough)
        connection = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except OSError as error:
        raise Denied(f"{path}: {error.strerror}") from error
    except sqlite3.Error as error:
        raise _refused(path, error) from error
    try:
        # Must precede the first table: deleted samples give their space back in bounded steps.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit={WAL_KEPT_BYTES}")
        connection.execute("PRAGMA cache_size=-2000")
        connection.execute("PRAGMA trusted_schema=OFF")
        _migrate(connection, path, migrations)
        with suppress(sqlite3.OperationalError):
            # The log starts short: on a disk that fills up later, that room is worth having.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        connection.close()
        raise _refused(path, error) from error
    except Unavailable:
        connection.close()
        raise
    return connection, aside


def _refused(path: str, error: sqlite3.Error) -> Unavailable:
    gap = trouble(path, error, "gpuwarden cannot remember anything")
    return Unavailable(f"{path}: {gap.reason}", remedy=gap.remedy)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing; errors of SQLite pass through after the rollback."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite has rolled back by itself, as it does when a disk is full
        raise


def bytes_used(connection: sqlite3.Connection) -> int:
    """Bytes in use in a database file, without its free pages and its log."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


class ToldMark:
    """A file beside a database that is there while all that was told of it is written in it.

    A full disk takes no new byte, but lets a file be removed.
    """

    def __init__(self, path: str) -> None:
        self._path = None if path == IN_MEMORY else f"{path}-told"

    @property
    def is_set(self) -> bool:
        return self._path is None or os.path.lexists(self._path)

    def set(self) -> None:
        """Where it cannot be made, the next start takes it for not set."""
        if self._path is not None:
            with suppress(OSError):
                _make_file(self._path)

    def clear(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)
