"""Which GPU modules this node has seen: the first process that loaded each, and how often since."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from gpuwarden.model import Fact, ModuleLoad, Process
from gpuwarden.store_lossy import LossyDatabase

MIGRATIONS = (
    """
    CREATE TABLE modules (
        digest TEXT NOT NULL, kind TEXT NOT NULL, first_ns INTEGER NOT NULL,
        last_ns INTEGER NOT NULL, loads INTEGER NOT NULL, worth INTEGER NOT NULL,
        told BLOB NOT NULL, PRIMARY KEY (digest, kind)) WITHOUT ROWID;
    CREATE INDEX modules_by_worth ON modules (worth, last_ns);
    CREATE INDEX modules_by_age ON modules (first_ns)
    """,
)
STEP = 2000
"""Rows that one call removes at most."""
NEW_ROWS = 2000
"""Rows that one call adds at most: who makes up modules fills no disk."""
TEXT = 512
KERNELS_KEPT = 8
HASH_LIKE = "hash-like"


class ModuleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many modules are remembered: known ones go first, hash-like ones last."""

    rows: int = 200_000
    size_bytes: int = 128 << 20


class Sighting(Fact, frozen=True, kw_only=True):
    """A module as the node saw it first; texts are the process's own word where it gave them."""

    digest: str
    kind: str
    code_digest: str = ""
    arch: str = ""
    image_bytes: int = 0
    first_ns: int
    """Wall clock."""
    last_ns: int
    loads: int = 1
    """How often it was seen being loaded."""
    pid: int
    start_time_ticks: int
    exe: str = ""
    user: str = ""
    uid: int | None = None
    container_id: str = ""
    image: str = ""
    workload: str = ""
    profile: str = ""
    """Empty: it declared none, and was compared with the installed baseline."""
    standing: str = "unknown"
    known_as: str = ""
    answer: str = ""
    score: float | None = None
    function: str = ""
    path: str = ""
    """For a load by name."""
    kernels: tuple[str, ...] = ()
    kernel_count: int = 0


class Whose(msgspec.Struct, frozen=True, kw_only=True):
    """Whose load it was, as far as that is known."""

    process: Process | None = None
    image: str = ""
    """Of its container."""
    workload: str = ""
    profile: str = ""


def sightings(load: ModuleLoad, whose: Whose) -> Iterator[Sighting]:
    """What a load says of its modules."""
    process, placement = whose.process, None
    exe = user = ""
    if process is not None:
        placement = process.cgroup
        exe = process.exe.path if process.exe is not None else ""
        user = process.user or ""
    for module in load.modules:
        standing = next((one for one in module.standings if one.profile == whose.profile), None)
        yield Sighting(
            digest=module.digest,
            kind=module.kind,
            code_digest=module.code_digest,
            arch=module.arch,
            image_bytes=module.image_bytes,
            first_ns=load.at_ns,
            last_ns=load.at_ns,
            pid=load.pid,
            start_time_ticks=load.start_time_ticks,
            exe=_text(exe),
            user=_text(user),
            uid=process.uid if process is not None else None,
            container_id=_text((placement.container_id or "") if placement is not None else ""),
            image=_text(whose.image),
            workload=_text(whose.workload),
            profile=_text(whose.profile),
            standing=standing.standing if standing is not None else "unknown",
            known_as=_text(standing.known_as if standing is not None else ""),
            answer=module.answer,
            score=module.score,
            function=_text(load.function),
            path=_text(load.path or ""),
            kernels=tuple(map(_text, module.kernels[:KERNELS_KEPT])),
            kernel_count=module.kernel_count,
        )


def _text(text: str) -> str:
    # A path that is no UTF-8 would not go into JSON.
    return text[:TEXT].encode("utf-8", "backslashreplace").decode()


class ModuleStore(LossyDatabase):
    """``modules.sqlite``: a first sighting is evidence of when, and no alarm needs it."""

    def __init__(
        self, path: str, limits: ModuleLimits | None = None, *, read_only: bool = False
    ) -> None:
        """Errors: Unavailable, Denied."""
        self.limits = limits or ModuleLimits()
        self._rows: int | None = None
        super().__init__(path, MIGRATIONS, read_only=read_only)

    def record(self, seen: Iterable[Sighting]) -> int:
        """Writes one round; how many modules the node had not seen before."""
        batch: dict[tuple[str, str], Sighting] = {}
        for one in seen:
            key = one.digest, one.kind
            before = batch.get(key)
            batch[key] = one if before is None else _joined(before, one)
        if not batch:
            return 0
        with self._lock:
            effect = "first sightings of GPU modules are lost meanwhile"
            new = self._written(len(batch), lambda c: self._write(c, batch.values()), effect)
            self._rows = None if self._rows is None or new is None else self._rows + new
            return new or 0

    def _write(self, connection: sqlite3.Connection, batch: Iterable[Sighting]) -> int:
        new = 0
        for one in batch:
            worth = _worth(one)
            known = connection.execute(
                "UPDATE modules SET loads = loads + ?, last_ns = max(last_ns, ?), "
                "worth = max(worth, ?) WHERE digest = ? AND kind = ?",
                (one.loads, one.last_ns, worth, one.digest, one.kind),
            ).rowcount
            if known:
                continue
            if new >= NEW_ROWS:
                self.lost += 1
                continue
            new += 1
            connection.execute(
                "INSERT INTO modules VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    one.digest,
                    one.kind,
                    one.first_ns,
                    one.last_ns,
                    one.loads,
                    worth,
                    msgspec.json.encode(one),
                ),
            )
        return new

    def trim(self) -> int:
        """One bounded step towards the limits; the number of rows removed."""
        removed = self._trimmed(self._trim, "old sightings of GPU modules are not removed")
        with self._lock:
            self._rows = None if self._rows is None else self._rows - removed
        return removed

    def _trim(self) -> int:
        rows = self._rows
        if rows is None:
            (rows,) = self._connection.execute("SELECT count(*) FROM modules").fetchone()
            self._rows = rows
        surplus = rows - self.limits.rows
        used = self.bytes_used()
        if used > self.limits.size_bytes:
            # About as many as make up what is too much.
            surplus = max(surplus, rows - int(rows * self.limits.size_bytes / used))
        removed = 0
        if surplus > 0:
            removed = self._connection.execute(
                "DELETE FROM modules WHERE (digest, kind) IN "
                "(SELECT digest, kind FROM modules ORDER BY worth, last_ns LIMIT ?)",
                (min(surplus, STEP),),
            ).rowcount
        self._connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
        return int(removed)

    def first_sighting(self, digest: str) -> Sighting | None:
        """The module of this digest as it was seen first, None when it is not remembered."""
        return next(iter(self._read("WHERE digest = ? ORDER BY first_ns LIMIT 1", digest)), None)

    def like(self, beginning: str, limit: int = 100) -> list[Sighting]:
        """Those whose digest begins with these hexadecimal digits, in the order of digests."""
        return self._read(
            "WHERE digest >= ? AND digest < ? ORDER BY digest, first_ns LIMIT ?",
            beginning,
            f"{beginning}g",
            limit,
        )

    def recent(self, limit: int = 100) -> list[Sighting]:
        """Those first seen last, the newest first."""
        return self._read("ORDER BY first_ns DESC, digest LIMIT ?", limit)

    def _read(self, which: str, *values: Any) -> list[Sighting]:
        with self._lock:
            try:
                rows = self._connection.execute(
                    f"SELECT told, last_ns, loads FROM modules {which}",  # noqa: S608
                    values,
                ).fetchall()
            except sqlite3.Error as error:
                self._failed(error, "first sightings of GPU modules cannot be read")
                return []
        return [one for row in rows if (one := _parsed(*row)) is not None]


def _parsed(told: bytes, last_ns: int, loads: int) -> Sighting | None:
    try:
        sighting = msgspec.json.decode(told, type=Sighting)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return replace(sighting, last_ns=last_ns, loads=loads)


def _joined(first: Sighting, second: Sighting) -> Sighting:
    """Two sightings of one module: the earlier one, with both counted."""
    early = min(first, second, key=lambda one: one.first_ns)
    last_ns = max(first.last_ns, second.last_ns)
    return replace(early, last_ns=last_ns, loads=first.loads + second.loads)


def _worth(one: Sighting) -> int:
    """What is kept longer: known modules make room first, unknown hashes last."""
    if one.standing != "unknown":
        return 0
    return 2 if one.answer == HASH_LIKE else 1
