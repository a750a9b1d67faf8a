"""What each process did on each GPU over time, within a size and an age limit."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from gpuwarden.model import Fact
from gpuwarden.store_database import transaction
from gpuwarden.store_lossy import LossyDatabase

MIGRATIONS = (
    """
    CREATE TABLE series (
        id INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, pid INTEGER NOT NULL,
        start_time_ticks INTEGER NOT NULL, gpu_id TEXT NOT NULL,
        binary TEXT, parents TEXT NOT NULL, peers TEXT NOT NULL, until_ns INTEGER NOT NULL,
        UNIQUE (boot_id, pid, start_time_ticks, gpu_id));
    CREATE INDEX series_by_pid ON series (pid);
    CREATE INDEX series_by_gpu ON series (gpu_id);
    CREATE INDEX series_by_age ON series (until_ns);
    CREATE TABLE samples (
        series_id INTEGER NOT NULL, at_ns INTEGER NOT NULL, sm_percent INTEGER,
        memory_bytes INTEGER, verdict TEXT);
    CREATE INDEX samples_by_series ON samples (series_id, at_ns)
    """,
)
STEP = 2000
UNCHANGED_NS = 60 * 10**9
"""A value that stays the same is written again after this long, and not before."""
GPU_ITSELF = -1
"""Stored as the pid, and as the start, of a series that is about a GPU and no process."""
LISTED = 32
TEXT = 512


class SampleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of samples is kept."""

    size_bytes: int = 256 << 20
    age_ns: int = 30 * 86_400 * 10**9


class Sample(Fact, frozen=True, kw_only=True):
    """One process on one GPU at one moment; without a pid, the GPU as a whole."""

    at_ns: int
    gpu_id: str
    pid: int | None = None
    start_time_ticks: int | None = None
    boot_id: str | None = None
    sm_percent: int | None = None
    memory_bytes: int | None = None
    verdict: str | None = None
    binary: str | None = None
    parents: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()


class Point(Fact, frozen=True, kw_only=True):
    """One sample of a series; it holds until the next one, and for 60 s at most."""

    at_ns: int
    sm_percent: int | None = None
    memory_bytes: int | None = None
    verdict: str | None = None


class Series(Fact, frozen=True, kw_only=True):
    """Everything that is remembered of one process on one GPU, oldest first."""

    gpu_id: str
    pid: int | None = None
    start_time_ticks: int | None = None
    boot_id: str | None = None
    binary: str | None = None
    parents: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    """The last ones seen."""
    points: tuple[Point, ...] = ()
    more: bool = False
    """There are more points than were asked for; the oldest are left out."""


class _Known(msgspec.Struct):
    id: int
    written: Sample | None = None


def _listed(texts: Iterable[str]) -> str:
    return "\n".join(text.replace("\n", " ")[:TEXT] for text in list(texts)[:LISTED])


class SampleStore(LossyDatabase):
    """``samples.sqlite``: samples are worth less than findings."""

    def __init__(
        self, path: str, limits: SampleLimits | None = None, *, read_only: bool = False
    ) -> None:
        """Errors: Unavailable, Denied."""
        self.limits = limits or SampleLimits()
        self._known: dict[tuple[str, int, int, str], _Known] = {}
        super().__init__(path, MIGRATIONS, read_only=read_only)

    def record(self, samples: Iterable[Sample]) -> int:
        """Writes one round; the number of rows that it took.

        A sample equal to the last one of its series is left out for up to 60 s.
        """
        batch = list(samples)
        with self._lock:
            written = self._written(
                len(batch),
                lambda connection: sum(self._write(connection, sample) for sample in batch),
                "samples are lost meanwhile",
            )
            if written is None:
                self._known.clear()
                return 0
            return written

    def _write(self, connection: sqlite3.Connection, sample: Sample) -> bool:
        key = (
            sample.boot_id or "",
            GPU_ITSELF if sample.pid is None else sample.pid,
            GPU_ITSELF if sample.start_time_ticks is None else sample.start_time_ticks,
            sample.gpu_id,
        )
        known = self._known.get(key)
        if known is None or known.written is None or not _same_surroundings(known.written, sample):
            known = _Known(self._series_id(connection, key, sample))
            fresh = True
        else:
            fresh = _differs(known.written, sample)
        if fresh:
            connection.execute(
                "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
                (known.id, sample.at_ns, sample.sm_percent, sample.memory_bytes, sample.verdict),
            )
            connection.execute(
                "UPDATE series SET until_ns = ? WHERE id = ?", (sample.at_ns, known.id)
            )
            self._known[key] = _Known(known.id, sample)
        return fresh

    @staticmethod
    def _series_id(
        connection: sqlite3.Connection, key: tuple[str, int, int, str], sample: Sample
    ) -> int:
        row = connection.execute(
            "INSERT INTO series (boot_id, pid, start_time_ticks, gpu_id, binary, parents, peers, "
            "until_ns) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (boot_id, pid, start_time_ticks, gpu_id) DO UPDATE SET "
            "binary = coalesce(excluded.binary, binary), "
            "parents = CASE excluded.parents WHEN '' THEN parents ELSE excluded.parents END, "
            "peers = CASE excluded.peers WHEN '' THEN peers ELSE excluded.peers END RETURNING id",
            (
                *key,
                sample.binary[:TEXT] if sample.binary else None,
                _listed(sample.parents),
                _listed(sample.peers),
                sample.at_ns,
            ),
        ).fetchone()
        return int(row[0])

    def trim(self, now_ns: int) -> int:
        """Removes what is too old or too much, at most ``STEP`` samples; the number removed.

        Call it once a round: it then keeps up with any rate below ``STEP`` samples a round.
        """
        return self._trimmed(lambda: self._trim(now_ns), "old samples are not removed")

    def _trim(self, now_ns: int) -> int:
        limit = now_ns - self.limits.age_ns
        with transaction(self._connection) as connection:
            if self.bytes_used() > self.limits.size_bytes:
                # Rows are in the order they were written: the first ones are the oldest.
                removed = connection.execute(
                    "DELETE FROM samples WHERE rowid IN "
                    "(SELECT rowid FROM samples ORDER BY rowid LIMIT ?)",
                    (STEP,),
                ).rowcount
            else:
                removed = connection.execute(
                    "DELETE FROM samples WHERE rowid IN (SELECT rowid FROM "
                    "(SELECT rowid, at_ns FROM samples ORDER BY rowid LIMIT ?) WHERE at_ns < ?)",
                    (STEP, limit),
                ).rowcount
            gone = connection.execute(
                "SELECT id FROM series WHERE until_ns < ? AND NOT EXISTS "
                "(SELECT 1 FROM samples WHERE series_id = series.id) ORDER BY until_ns LIMIT 100",
                (now_ns - UNCHANGED_NS,),
            ).fetchall()
            connection.executemany("DELETE FROM series WHERE id = ?", gone)
        if gone:
            ids = {row[0] for row in gone}
            self._known = {k: known for k, known in self._known.items() if known.id not in ids}
        if len(self._known) > 4096:
            self._known.clear()
        self._connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
        return int(removed)

    def series(
        self,
        *,
        pid: int | None = None,
        gpu_id: str | None = None,
        since_ns: int = 0,
        limit: int = 100_000,
    ) -> list[Series]:
        """What is remembered of a pid, of a GPU, or of both together, oldest series first.

        A pid may have several series: one a GPU, and one a process that had this pid. At most
        ``limit`` points each, the latest ones.
        """
        conditions, values = ["until_ns >= ?"], [since_ns]
        texts: list[str] = []
        if pid is not None:
            conditions.append("pid = ?")
            values.append(pid)
        if gpu_id is not None:
            conditions.append("gpu_id = ?")
            texts.append(gpu_id)
        with self._lock:
            rows = self._connection.execute(
                "SELECT id, boot_id, pid, start_time_ticks, gpu_id, binary, parents, peers "  # noqa: S608
                f"FROM series WHERE {' AND '.join(conditions)} ORDER BY id",
                (*values, *texts),
            ).fetchall()
            return [self._one(row, since_ns, limit) for row in rows]

    def _one(self, row: tuple[object, ...], since_ns: int, limit: int) -> Series:
        points = self._connection.execute(
            "SELECT at_ns, sm_percent, memory_bytes, verdict FROM samples "
            "WHERE series_id = ? AND at_ns >= ? ORDER BY at_ns DESC LIMIT ?",
            (row[0], since_ns, limit + 1),
        ).fetchall()
        _, boot_id, pid, start, gpu_id, binary, parents, peers = row
        return msgspec.convert(
            {
                "gpu_id": gpu_id,
                "pid": None if pid == GPU_ITSELF else pid,
                "start_time_ticks": None if start == GPU_ITSELF else start,
                "boot_id": boot_id or None,
                "binary": binary,
                "parents": str(parents).split("\n") if parents else [],
                "peers": str(peers).split("\n") if peers else [],
                "points": [
                    {"at_ns": at, "sm_percent": sm, "memory_bytes": memory, "verdict": verdict}
                    for at, sm, memory, verdict in reversed(points[:limit])
                ],
                "more": len(points) > limit,
            },
            Series,
        )


def _same_surroundings(old: Sample, new: Sample) -> bool:
    return (old.binary, old.parents, old.peers) == (new.binary, new.parents, new.peers)


def _differs(old: Sample, new: Sample) -> bool:
    return (old.sm_percent, old.memory_bytes, old.verdict) != (
        new.sm_percent,
        new.memory_bytes,
        new.verdict,
    ) or not 0 <= new.at_ns - old.at_ns < UNCHANGED_NS
