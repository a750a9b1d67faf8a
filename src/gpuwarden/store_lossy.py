"""A database whose loss costs no alarm: errors lose what was to be written, and stop nothing."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence

from gpuwarden.errors import GpuwardenError
from gpuwarden.model import Gap
from gpuwarden.store_database import (
    CORRUPT,
    NOTADB,
    bytes_used,
    open_database,
    open_read_only,
    primary_code,
    set_aside,
    transaction,
    trouble,
)


class LossyDatabase:
    """May be used from several threads.

    It is not synced write by write, a full disk loses rows (counted in ``lost``), and a file that
    turns out damaged is set aside at once.
    """

    def __init__(self, path: str, migrations: Sequence[str], *, read_only: bool = False) -> None:
        """Errors: Unavailable, Denied."""
        self.path = path
        self.trouble: Gap | None = None
        self.set_aside: Gap | None = None
        self.lost = 0
        self._migrations = migrations
        self._lock = threading.RLock()
        self._read_only = read_only
        if read_only:
            self._connection = open_read_only(path)
        else:
            self._open()

    def _open(self) -> None:
        self._connection, aside = open_database(
            self.path, self._migrations, synchronous="NORMAL", thorough=False
        )
        self.set_aside = aside or self.set_aside

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def bytes_used(self) -> int:
        """Bytes in use in the database file, without its free pages and its log."""
        with self._lock:
            return bytes_used(self._connection)

    def _written(
        self, count: int, write: Callable[[sqlite3.Connection], int], effect: str
    ) -> int | None:
        """What ``write`` gave, all or nothing; None when its ``count`` rows are lost."""
        try:
            with transaction(self._connection) as connection:
                written = write(connection)
        except sqlite3.Error as error:
            self.lost += count
            self._failed(error, effect)
            return None
        self.trouble = None
        return written

    def _trimmed(self, trim: Callable[[], int], effect: str) -> int:
        """What ``trim`` removed; nothing when it fails."""
        with self._lock:
            try:
                return trim()
            except sqlite3.Error as error:
                self._failed(error, effect)
                return 0

    def _failed(self, error: sqlite3.Error, effect: str) -> None:
        self.trouble = trouble(self.path, error, effect)
        if self._read_only:
            return
        try:
            if primary_code(error) in (CORRUPT, NOTADB):
                self._connection.close()
                aside = set_aside(self.path)
                self._open()
                self.set_aside = Gap(
                    sensor="store",
                    what=self.path,
                    reason=f"it was damaged; it was set aside as {aside}, a new one was begun",
                )
            else:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except (sqlite3.Error, OSError, GpuwardenError):
            pass  # the trouble that led here is already told
