"""The findings that are open, the news of them that sinks have yet to get, and who got which."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from gpuwarden.errors import Unavailable
from gpuwarden.model import Gap
from gpuwarden.store_database import (
    BUSY,
    BUSY_SECONDS,
    LOCKED,
    ToldMark,
    bytes_used,
    open_database,
    open_read_only,
    primary_code,
    transaction,
    trouble,
)
from gpuwarden.store_spool import FindingState, LedgerLimits, News, SinkCursor, Unwritten

MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE findings (
        id TEXT PRIMARY KEY, open INTEGER NOT NULL, last_seen_ns INTEGER NOT NULL,
        state BLOB NOT NULL) WITHOUT ROWID;
    CREATE INDEX findings_by_age ON findings (open, last_seen_ns);
    CREATE TABLE outbox (
        sequence INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, body BLOB NOT NULL);
    CREATE TABLE sinks (
        key TEXT PRIMARY KEY, cursor INTEGER NOT NULL, dropped INTEGER NOT NULL) WITHOUT ROWID;
    INSERT INTO meta VALUES ('sequence', 0);
    INSERT INTO meta VALUES ('stream', lower(hex(randomblob(8))))
    """,
)
STEP = 1000
"""Rows that one call removes at most, so that no round waits for a clean-up."""

UNWRITTEN_ROWS = 4000
"""News kept in memory while they cannot be written."""
UNWRITTEN_STATES = 1000
"""States so kept; beyond it, findings that began and ended meanwhile are not remembered."""


class Ledger:
    """``findings.sqlite``: may be used from several threads.

    State and news of a round are written in one transaction, synced, before a sink can see them.
    When the disk is full or gives errors, they are kept in memory, still delivered, and written as
    soon as that works again: a full disk silences no alarm. ``trouble`` then says so.
    """

    def __init__(
        self, path: str, limits: LedgerLimits | None = None, *, read_only: bool = False
    ) -> None:
        """Errors: Unavailable, Denied."""
        self.path = path
        self.limits = limits or LedgerLimits()
        self.trouble: Gap | None = None
        self.set_aside: Gap | None = None
        self._lock = threading.RLock()
        self._unwritten = Unwritten()
        self._sinks: dict[str, SinkCursor] = {}
        self._mark = ToldMark(path)
        if read_only:
            self._connection = open_read_only(path)
        else:
            self._connection, self.set_aside = open_database(
                path, MIGRATIONS, synchronous="FULL", thorough=True
            )
        try:
            self._load()
            if not read_only:
                self._settle_stream()
        except (sqlite3.Error, KeyError) as error:
            self._connection.close()
            raise Unavailable(f"{path}: not a memory of gpuwarden ({error})") from error

    def _load(self) -> None:
        meta = dict(self._connection.execute("SELECT key, value FROM meta"))
        self.stream = str(meta["stream"])
        """Names this run of sequences: a new one begins with a new database, and after a death with
        news that were told and could not be written: their numbers are given again."""
        self.last_sequence = int(meta["sequence"])
        self._rows, self._bytes = self._connection.execute(
            "SELECT count(*), coalesce(sum(length(body)), 0) FROM outbox"
        ).fetchone()
        # Before anything is removed: a sink that is not registered yet still wants what is here.
        self._sinks = self._saved_cursors()
        self._written_sequence = self.last_sequence

    def _settle_stream(self) -> None:
        """Begins a new stream where sequences were told, before a death, that are not in here."""
        if self.last_sequence and not self._mark.is_set:
            self.stream = os.urandom(8).hex()
            try:
                with transaction(self._connection) as connection:
                    connection.execute(
                        "UPDATE meta SET value = ? WHERE key = 'stream'", (self.stream,)
                    )
            except sqlite3.Error:
                return  # the mark stays away: the next start tries again
        self._mark.set()

    def _saved_cursors(self) -> dict[str, SinkCursor]:
        return {
            key: SinkCursor(cursor, dropped)
            for key, cursor, dropped in self._connection.execute(
                "SELECT key, cursor, dropped FROM sinks"
            )
        }

    def close(self) -> None:
        with self._lock:
            if self._unwritten:
                self._flush()
            self._connection.close()

    def states(self, *, only_open: bool = True) -> list[FindingState]:
        """What was written of findings, oldest first."""
        query = "SELECT id, open, last_seen_ns, state FROM findings"
        if only_open:
            query += " WHERE open"
        with self._lock:
            rows = self._connection.execute(f"{query} ORDER BY last_seen_ns, id").fetchall()
        return [FindingState(key, bool(is_open), seen, state) for key, is_open, seen, state in rows]

    def commit(self, states: Iterable[FindingState], news: Sequence[News]) -> bool:
        """Writes both or neither; False when they are in memory only, see ``trouble``.

        ``news`` continue at ``last_sequence + 1`` without a gap.
        """
        with self._lock:
            for state in states:
                self._unwritten.states[state.id] = state
            for item in news:
                if item.sequence != self.last_sequence + 1:
                    raise ValueError(f"sequence {item.sequence} after {self.last_sequence}")
                self.last_sequence = item.sequence
                self._unwritten.news.append(item)
                self._rows += 1
                self._bytes += len(item.body)
            written = self._flush() if self._unwritten else True
            if len(self._unwritten.states) > UNWRITTEN_STATES:
                self._forget_unwritten()
            self._shorten()
            return written

    def _flush(self) -> bool:
        try:
            self._write()
        except sqlite3.Error as error:
            if primary_code(error) not in (BUSY, LOCKED):
                try:
                    # Gives back the log's space: often enough for the next attempt.
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                    self._write()
                except sqlite3.Error as again:
                    error = again
                else:
                    return True
            self.trouble = trouble(
                self.path, error, "findings are delivered but not remembered over a restart"
            )
            if self._unwritten.news:
                self._mark.clear()
            with suppress(sqlite3.Error):
                # Another wait for a foreign lock would delay every round and every delivery.
                self._connection.execute("PRAGMA busy_timeout=100")
            return False
        return True

    def _forget_unwritten(self) -> None:
        """Lets go of resolved findings, but for those that a restart would take for open ones."""
        try:
            rows = self._connection.execute("SELECT id FROM findings WHERE open").fetchall()
        except sqlite3.Error:
            rows = []  # what cannot be read now is not what a restart goes on from
        open_on_disk = {key for (key,) in rows}
        self._unwritten.states = {
            key: state
            for key, state in self._unwritten.states.items()
            if state.open or key in open_on_disk
        }

    def _write(self) -> None:
        unwritten = self._unwritten
        durable = bool(unwritten.states or unwritten.news)
        # A cursor that is lost costs a second delivery, not an alarm: it need not wait for a disk.
        self._connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        with transaction(self._connection) as connection:
            if unwritten.states:
                connection.executemany(
                    "INSERT OR REPLACE INTO findings (id, open, last_seen_ns, state) "
                    "VALUES (?, ?, ?, ?)",
                    unwritten.states.values(),
                )
            if unwritten.news:
                connection.executemany("INSERT INTO outbox VALUES (?, ?, ?)", unwritten.news)
            if self._written_sequence != self.last_sequence:
                connection.execute(
                    "UPDATE meta SET value = ? WHERE key = 'sequence'", (self.last_sequence,)
                )
            if unwritten.cursors:
                connection.executemany(
                    "INSERT OR REPLACE INTO sinks (key, cursor, dropped) VALUES (?, ?, ?)",
                    [(key, sink.cursor, sink.dropped) for key, sink in self._sinks.items()],
                )
        unwritten.clear()
        self._written_sequence = self.last_sequence
        if self.trouble is not None:
            self.trouble = None
            self._mark.set()
            self._connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")

    def register(self, keys: Sequence[str]) -> None:
        """Says which sinks there are; one that is new begins with what is still in the spool."""
        with self._lock:
            known = self._saved_cursors()
            first = self._first()
            self._sinks = {
                key: self._sinks.get(key) or SinkCursor(cursor=first - 1) for key in keys
            }
            try:
                with transaction(self._connection) as connection:
                    connection.executemany(
                        "DELETE FROM sinks WHERE key = ?",
                        [(key,) for key in known if key not in self._sinks],
                    )
            except sqlite3.Error:
                pass  # a row too many holds nothing back: cursors in use are in memory
            self._unwritten.cursors = True
            self._flush()

    def _first(self) -> int:
        first = self._connection.execute("SELECT min(sequence) FROM outbox").fetchone()[0]
        if first is not None:
            return int(first)
        return self._unwritten.news[0].sequence if self._unwritten.news else self.last_sequence + 1

    def undelivered(self, key: str, limit: int = 32) -> list[News]:
        """The next news for a sink, in order; what could not be written is among them."""
        with self._lock:
            sink = self._sinks[key]
            cursor = sink.cursor
            try:
                rows = self._connection.execute(
                    "SELECT sequence, at_ns, body FROM outbox WHERE sequence > ? "
                    "ORDER BY sequence LIMIT ?",
                    (cursor, limit),
                ).fetchall()
            except sqlite3.Error as error:
                rows = []
                self.trouble = trouble(self.path, error, "what waits for the sinks is not readable")
                waiting = [n.sequence for n in self._unwritten.news if n.sequence > cursor]
                if waiting:
                    # What is on disk may be lost; what is in memory need not wait for it.
                    sink.dropped += waiting[0] - 1 - cursor
                    sink.cursor = cursor = waiting[0] - 1
            found = [News(*row) for row in rows]
            found += [item for item in self._unwritten.news if item.sequence > cursor]
            return found[:limit]

    def delivered(self, key: str, sequence: int, *, refused: bool = False) -> None:
        """Moves a sink on; ``refused`` counts the item as dropped."""
        with self._lock:
            sink = self._sinks[key]
            if sequence > sink.cursor:
                sink.cursor = sequence
                sink.dropped += refused
                self._unwritten.cursors = True
                self._flush()
                if not sequence % 64 or sequence == self.last_sequence:
                    self._prune()

    def cursors(self) -> dict[str, SinkCursor]:
        """A copy: how far every sink is."""
        with self._lock:
            return {key: SinkCursor(s.cursor, s.dropped) for key, s in self._sinks.items()}

    def _prune(self) -> None:
        """Removes what every sink has, at most ``STEP`` rows of it."""
        self._remove_through(min(sink.cursor for sink in self._sinks.values()))

    def _remove_through(self, sequence: int) -> None:
        unwritten = self._unwritten.news
        while unwritten and unwritten[0].sequence <= sequence:
            self._rows -= 1
            self._bytes -= len(unwritten.popleft().body)
        try:
            with transaction(self._connection) as connection:
                rows, size = connection.execute(
                    "SELECT count(*), coalesce(sum(length(body)), 0) FROM (SELECT body FROM outbox "
                    "WHERE sequence <= ? ORDER BY sequence LIMIT ?)",
                    (sequence, STEP),
                ).fetchone()
                if rows:
                    connection.execute(
                        "DELETE FROM outbox WHERE sequence IN (SELECT sequence FROM outbox "
                        "WHERE sequence <= ? ORDER BY sequence LIMIT ?)",
                        (sequence, STEP),
                    )
            self._rows -= rows
            self._bytes -= size
        except sqlite3.Error as error:
            self.trouble = trouble(self.path, error, "the spool cannot be shortened")

    def _shorten(self) -> None:
        """Keeps the spool within its limits: the oldest goes, and is counted for who lacks it."""
        while len(self._unwritten.news) > UNWRITTEN_ROWS:
            lost_item = self._unwritten.news.popleft()
            self._rows -= 1
            self._bytes -= len(lost_item.body)
            for sink in self._sinks.values():
                sink.dropped += sink.cursor < lost_item.sequence
        rows = self.limits.spool_rows if self._sinks else min(STEP, self.limits.spool_rows)
        too_many = self._rows - rows
        too_big = self._bytes - self.limits.spool_bytes
        if too_many <= 0 and too_big <= 0:
            return
        average = max(self._bytes // max(self._rows, 1), 1)
        surplus = min(max(too_many, -(-too_big // average), 1), STEP)
        through = self._first() + surplus - 1
        for sink in self._sinks.values():
            lost = through - sink.cursor
            if lost > 0:
                sink.dropped += lost
                sink.cursor = through
        self._unwritten.cursors = True
        # The count first: a death in between must not leave a loss that nobody counted.
        self._flush()
        self._remove_through(through)

    def bytes_used(self) -> int:
        """Bytes in use in the database file, without its free pages and its log."""
        with self._lock:
            return bytes_used(self._connection)

    def trim(self, now_ns: int) -> int:
        """Forgets resolved findings that are too old or too many, some thousand at most.

        Gives the number removed.
        """
        with self._lock:
            try:
                with transaction(self._connection) as connection:
                    removed = connection.execute(
                        "DELETE FROM findings WHERE id IN (SELECT id FROM findings "
                        "WHERE open = 0 AND last_seen_ns < ? LIMIT ?)",
                        (now_ns - self.limits.resolved_age_ns, STEP),
                    ).rowcount
                    removed += connection.execute(
                        "DELETE FROM findings WHERE id IN (SELECT id FROM findings WHERE open = 0 "
                        "ORDER BY last_seen_ns LIMIT max(0, min(?, "
                        "(SELECT count(*) FROM findings WHERE open = 0) - ?)))",
                        (4 * STEP, self.limits.resolved_rows),
                    ).rowcount
                self._connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
            except sqlite3.Error as error:
                self.trouble = trouble(self.path, error, "old findings are not removed")
                return 0
            return int(removed)
