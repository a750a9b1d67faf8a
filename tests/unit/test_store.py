"""The memory keeps its promises: limits, migration, damage, locks, full disks, readers."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.store import (
    FindingState,
    LedgerLimits,
    News,
    Sample,
    SampleLimits,
    Store,
)
from gpuwarden.store_database import open_database
from gpuwarden.store_samples import STEP

SECOND = 10**9
DAY = 86_400 * SECOND


def directory(tmp_path: Path) -> str:
    return str(tmp_path / "memory")


def news(*sequences: int, size: int = 10) -> list[News]:
    return [News(number, number, b"x" * size) for number in sequences]


def sample(second: int, **fields: object) -> Sample:
    values: dict[str, object] = {
        "at_ns": second * SECOND,
        "gpu_id": "GPU-0",
        "pid": 7,
        "start_time_ticks": 70,
        "boot_id": "boot",
        "sm_percent": second % 100,
        "memory_bytes": 1 << 30,
        "verdict": "expected",
    }
    return Sample(**(values | fields))  # type: ignore[arg-type]


class FullDisk:
    """A connection on which every write fails while ``full``, as on a full disk."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.full = True

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if self.full and sql.startswith("BEGIN"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self.connection.execute(sql, *values)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


class Damaged(FullDisk):
    """A connection to a file that turns out damaged."""

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def fill_disk(part: object) -> FullDisk:
    disk = FullDisk(part._connection)  # type: ignore[attr-defined]
    part._connection = disk  # type: ignore[attr-defined]
    return disk


def test_files_are_for_us_alone_and_synced(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        store.findings.commit([], news(1))
        for name in os.listdir(store.directory):
            mode = os.stat(f"{store.directory}/{name}").st_mode
            assert stat.S_IMODE(mode) == 0o600, name
        full = store.findings._connection.execute("PRAGMA synchronous").fetchone()[0]
        normal = store.samples._connection.execute("PRAGMA synchronous").fetchone()[0]
        assert (full, normal) == (2, 1)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    os.makedirs(directory(tmp_path))
    os.chmod(directory(tmp_path), 0o777)
    with pytest.raises(Denied, match="others may write"):
        Store(directory(tmp_path))


def test_a_second_agent_is_told_who_has_it_and_changes_nothing(tmp_path: Path) -> None:
    with Store(directory(tmp_path)):
        with pytest.raises(Unavailable, match=f"in use by another gpuwarden .pid {os.getpid()}"):
            Store(directory(tmp_path))
        assert not [name for name in os.listdir(directory(tmp_path)) if "damaged" in name]
    with Store(directory(tmp_path)) as again:
        assert again.troubles == []


def test_a_foreign_lock_gives_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(directory(tmp_path)):
        pass
    path = directory(tmp_path) + "/findings.sqlite"
    monkeypatch.setattr("gpuwarden.store_database.BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(Unavailable, match="another program holds a lock"):
        Store(directory(tmp_path))
    holder.close()
    with Store(directory(tmp_path)) as store:
        assert store.troubles == []


@pytest.mark.parametrize("name", ["findings.sqlite", "samples.sqlite"])
@pytest.mark.parametrize("damage", [b"not a database at all" * 100, b"SQLite format 3\x00rest"])
def test_a_damaged_file_is_set_aside_whole_and_told(
    tmp_path: Path, name: str, damage: bytes
) -> None:
    with Store(directory(tmp_path)) as store:
        before = store.findings.stream
    path = Path(directory(tmp_path), name)
    path.write_bytes(damage)
    with Store(directory(tmp_path)) as store:
        (gap,) = store.troubles
        assert gap.what == str(path)
        assert "set aside" in gap.reason
        store.findings.commit([FindingState("a", True, 1, b"s")], news(1))
        assert store.samples.record([sample(1)]) == 1
        assert (store.findings.stream != before) == (name == "findings.sqlite")
    (aside,) = [p for p in path.parent.iterdir() if "damaged" in p.name]
    assert aside.read_bytes() == damage


def test_pages_that_are_damaged_inside_are_noticed(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        store.findings.register(["k"])
        store.findings.commit([], news(*range(1, 400), size=200))
    path = Path(directory(tmp_path), "findings.sqlite")
    content = bytearray(path.read_bytes())
    for page in range(5, len(content) // 4096):
        content[page * 4096 : page * 4096 + 64] = os.urandom(64)
    path.write_bytes(content)
    with Store(directory(tmp_path)) as store:
        assert "damaged" in store.troubles[0].reason
        assert store.findings.last_sequence == 0


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_database_or_set_aside(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "findings.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + content)
    connection, aside = open_database(
        str(path), ("CREATE TABLE t (a)",), synchronous="NORMAL", thorough=True
    )
    connection.execute("INSERT INTO t VALUES (1)")
    connection.close()
    assert aside is not None


def test_migrations_run_once_in_order_and_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "x.sqlite")
    first = ("CREATE TABLE t (a); INSERT INTO t VALUES (1)",)
    second = (*first, "ALTER TABLE t ADD COLUMN b DEFAULT 5; INSERT INTO t VALUES (2, 6)")
    open_database(path, first, synchronous="FULL", thorough=True)[0].close()
    for _ in range(2):
        connection, _aside = open_database(path, second, synchronous="FULL", thorough=True)
        assert connection.execute("SELECT * FROM t").fetchall() == [(1, 5), (2, 6)]
        connection.close()
    with pytest.raises(Unavailable, match="newer gpuwarden"):
        open_database(path, first, synchronous="FULL", thorough=True)
    assert not [name for name in os.listdir(tmp_path) if "damaged" in name]


def test_a_migration_that_fails_leaves_the_version_before_it(tmp_path: Path) -> None:
    path = str(tmp_path / "x.sqlite")
    first = ("CREATE TABLE t (a)",)
    open_database(path, first, synchronous="FULL", thorough=True)[0].close()
    broken = (*first, "CREATE TABLE u (a); CREATE TABLE nonsense (")
    with pytest.raises(Unavailable):
        open_database(path, broken, synchronous="FULL", thorough=True)
    connection, _ = open_database(path, first, synchronous="FULL", thorough=True)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]
    connection.close()


def test_state_and_news_survive_a_restart(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        store.findings.register(["a", "b"])
        store.findings.commit([FindingState("f", True, 5, b"state")], news(1, 2, 3))
        store.findings.delivered("a", 2)
        stream = store.findings.stream
    with Store(directory(tmp_path)) as store:
        assert store.findings.stream == stream
        assert store.findings.last_sequence == 3
        assert store.findings.states() == [FindingState("f", True, 5, b"state")]
        # Before anybody registers again, more may come: nothing that waits is lost by that.
        store.findings.commit([], news(4))
        store.findings.register(["a", "b"])
        assert [n.sequence for n in store.findings.undelivered("a")] == [3, 4]
        assert [n.sequence for n in store.findings.undelivered("b")] == [1, 2, 3, 4]


def test_a_gap_in_the_sequence_is_a_defect(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store, pytest.raises(ValueError, match="sequence 2 after 0"):
        store.findings.commit([], news(2))


def test_what_every_sink_has_is_removed_and_a_removed_sink_holds_nothing_back(
    tmp_path: Path,
) -> None:
    with Store(directory(tmp_path)) as store:
        ledger = store.findings
        ledger.register(["a", "b"])
        ledger.commit([], news(*range(1, 11)))
        ledger.delivered("a", 10)
        count = "SELECT count(*) FROM outbox"
        assert ledger._connection.execute(count).fetchone()[0] == 10
        ledger.register(["a"])
        ledger.commit([], news(11))
        ledger.delivered("a", 11)
        assert ledger._connection.execute(count).fetchone()[0] == 0


@pytest.mark.parametrize(
    "limits", [LedgerLimits(spool_rows=50), LedgerLimits(spool_bytes=5000)], ids=["rows", "bytes"]
)
def test_the_spool_is_bounded_and_counts_what_each_sink_lost(
    tmp_path: Path, limits: LedgerLimits
) -> None:
    with Store(directory(tmp_path), ledger_limits=limits) as store:
        ledger = store.findings
        ledger.register(["down", "up"])
        for number in range(1, 201):
            ledger.commit([], news(number, size=100))
            ledger.delivered("up", number)
        waiting = ledger.undelivered("down", limit=1000)
        cursors = ledger.cursors()
        assert 40 <= len(waiting) <= 50
        assert waiting[-1].sequence == 200
        assert cursors["down"].dropped + len(waiting) == 200
        assert cursors["up"].dropped == 0
    with Store(directory(tmp_path)) as store:
        assert store.findings._saved_cursors()["down"].dropped == cursors["down"].dropped


def test_without_sinks_the_spool_stays_small(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        for start in range(1, 4001, 500):
            store.findings.commit([], news(*range(start, start + 500)))
        (rows,) = store.findings._connection.execute("SELECT count(*) FROM outbox").fetchone()
        assert rows <= 1000


def test_a_full_disk_delivers_from_memory_and_is_written_when_there_is_space(
    tmp_path: Path,
) -> None:
    with Store(directory(tmp_path)) as store:
        ledger = store.findings
        ledger.register(["a"])
        ledger.commit([FindingState("f", True, 1, b"one")], news(1))
        disk = fill_disk(ledger)
        assert not ledger.commit([FindingState("f", True, 2, b"two")], news(2))
        assert not ledger.commit([FindingState("g", True, 2, b"new")], news(3))
        assert "disk is full" in store.troubles[0].reason
        assert "not remembered" in store.troubles[0].reason
        assert [n.sequence for n in ledger.undelivered("a")] == [1, 2, 3]
        ledger.delivered("a", 2)
        assert [n.sequence for n in ledger.undelivered("a")] == [3]
        disk.full = False
        assert ledger.commit([], [])
        assert store.troubles == []
    with Store(directory(tmp_path)) as store:
        assert [(s.id, s.state) for s in store.findings.states()] == [("f", b"two"), ("g", b"new")]
        assert store.findings.last_sequence == 3
        store.findings.register(["a"])
        assert [n.sequence for n in store.findings.undelivered("a")] == [3]


def test_a_spool_that_cannot_be_read_holds_back_nothing_new(tmp_path: Path) -> None:
    class Unreadable(FullDisk):
        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            if sql.startswith(("SELECT sequence", "BEGIN")):
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
            return super().execute(sql, *values)

    with Store(directory(tmp_path)) as store:
        ledger = store.findings
        ledger.register(["a"])
        ledger.commit([], news(1, 2))
        ledger._connection = Unreadable(ledger._connection)  # type: ignore[assignment]
        assert ledger.undelivered("a") == []
        assert ledger.cursors()["a"].dropped == 0
        ledger.commit([], news(3))
        assert [n.sequence for n in ledger.undelivered("a")] == [3]
        assert ledger.cursors()["a"].dropped == 2
        assert "disk gave an error" in store.troubles[0].reason


def test_news_that_cannot_be_written_are_bounded_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.store_findings.UNWRITTEN_ROWS", 10)
    with Store(directory(tmp_path)) as store:
        store.findings.register(["a"])
        fill_disk(store.findings)
        for number in range(1, 31):
            store.findings.commit([], news(number))
        waiting = [n.sequence for n in store.findings.undelivered("a", limit=100)]
        assert waiting == list(range(21, 31))
        assert store.findings.cursors()["a"].dropped == 20


def test_old_resolved_findings_are_forgotten_and_open_ones_are_not(tmp_path: Path) -> None:
    with Store(directory(tmp_path), ledger_limits=LedgerLimits(resolved_age_ns=DAY)) as store:
        states = [FindingState(f"r{n}", False, 0, b"") for n in range(1500)]
        states += [FindingState("open", True, 0, b""), FindingState("new", False, 2 * DAY, b"")]
        store.findings.commit(states, [])
        assert [store.findings.trim(2 * DAY) for _ in range(3)] == [1000, 500, 0]
        left = store.findings.states(only_open=False)
        assert sorted(state.id for state in left) == ["new", "open"]


def test_a_series_says_since_when_how_much_with_whom(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        store.samples.record([sample(1, binary="/usr/bin/x", parents=("bash", "sshd"))])
        store.samples.record([sample(2, binary="/usr/bin/x", parents=("bash", "sshd"))])
        store.samples.record([sample(3, peers=("192.0.2.1:3333",)), sample(3, gpu_id="GPU-1")])
        store.samples.record([sample(4, pid=None, start_time_ticks=None)])
        store.samples.record([sample(5, start_time_ticks=99)])
        first, other_gpu, reused = store.series(pid=7)
        assert (first.binary, first.parents) == ("/usr/bin/x", ("bash", "sshd"))
        assert first.peers == ("192.0.2.1:3333",)
        assert [(p.at_ns // SECOND, p.sm_percent) for p in first.points] == [(1, 1), (2, 2), (3, 3)]
        assert other_gpu.gpu_id == "GPU-1"
        assert reused.start_time_ticks == 99
        assert [s.pid for s in store.series(gpu_id="GPU-0")] == [7, None, 7]
        assert [p.at_ns for s in store.series(pid=7, since_ns=5 * SECOND) for p in s.points] == [
            5 * SECOND
        ]
        (cut,) = store.samples.series(pid=7, gpu_id="GPU-0", limit=2)[:1]
        assert cut.more
        assert [p.sm_percent for p in cut.points] == [2, 3]


def test_a_value_that_stays_is_written_once_a_minute(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        rows = sum(store.samples.record([sample(n, sm_percent=0)]) for n in range(180))
        assert rows == 3
        assert store.samples.record([sample(181, sm_percent=1)]) == 1


def test_samples_keep_to_their_age_in_bounded_steps(tmp_path: Path) -> None:
    limits = SampleLimits(age_ns=1000 * SECOND)
    with Store(directory(tmp_path), sample_limits=limits) as store:
        store.samples.record(
            sample(n, pid=pid, sm_percent=n % 101) for n in range(600) for pid in range(10)
        )
        assert store.samples.trim(500 * SECOND) == 0
        removed = [store.samples.trim(1400 * SECOND) for _ in range(4)]
        assert removed == [STEP, STEP, 0, 0]
        assert min(p.at_ns for s in store.series(pid=3) for p in s.points) == 400 * SECOND
        while store.samples.trim(10_000 * SECOND):
            pass
        assert store.series(pid=3) == []


def test_samples_keep_to_their_size_and_give_space_back(tmp_path: Path) -> None:
    limits = SampleLimits(size_bytes=200_000)
    with Store(directory(tmp_path), sample_limits=limits) as store:
        for start in range(0, 20_000, 500):
            store.samples.record(sample(n, sm_percent=n % 101) for n in range(start, start + 500))
            store.samples.trim(start * SECOND)
        assert store.samples.bytes_used() <= 200_000 + 500 * 60
        (series,) = store.series(pid=7)
        assert series.points[-1].at_ns == 19_999 * SECOND
        assert os.stat(store.samples.path).st_size < 400_000


def test_samples_that_a_full_disk_loses_are_counted(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        store.samples.record([sample(1)])
        disk = fill_disk(store.samples)
        assert store.samples.record([sample(2), sample(3)]) == 0
        assert store.samples.trim(0) == 0
        assert store.samples.lost == 2
        assert "disk is full" in store.troubles[0].reason
        disk.full = False
        assert store.samples.record([sample(3)]) == 1
        assert store.troubles == []


def test_samples_that_turn_out_damaged_are_set_aside_at_once(tmp_path: Path) -> None:
    with Store(directory(tmp_path)) as store:
        store.samples.record(sample(n) for n in range(50))
        store.samples._connection = Damaged(store.samples._connection)  # type: ignore[assignment]
        assert store.samples.record([sample(60)]) == 0
        assert store.samples.record([sample(61)]) == 1
        assert "set aside" in store.troubles[0].reason


@pytest.mark.parametrize("while_open", [True, False])
def test_a_reader_sees_everything_and_can_change_nothing(tmp_path: Path, while_open: bool) -> None:
    store = Store(directory(tmp_path))
    store.samples.record([sample(1)])
    store.findings.commit([FindingState("f", True, 1, b"s")], news(1))
    if not while_open:
        store.close()
    with Store(directory(tmp_path), read_only=True) as reader:
        assert len(reader.series(pid=7)) == 1
        assert reader.findings.states()[0].id == "f"
        assert reader.findings.last_sequence == 1
        assert reader.samples.record([sample(2)]) == 0
        assert not reader.findings.commit([FindingState("g", True, 1, b"s")], [])
        assert [s.id for s in reader.findings.states()] == ["f"]
    if while_open:
        store.close()


def test_a_reader_where_no_agent_ran_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="not there"):
        Store(directory(tmp_path), read_only=True)
    assert not os.path.exists(directory(tmp_path))


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b"rubbish" * 500), lambda p: p.touch()])
def test_a_reader_sets_nothing_aside(tmp_path: Path, make: Callable[[Path], object]) -> None:
    os.makedirs(directory(tmp_path))
    for name in ("findings.sqlite", "samples.sqlite"):
        make(Path(directory(tmp_path), name))
    with pytest.raises(Unavailable):
        Store(directory(tmp_path), read_only=True)
    assert sorted(os.listdir(directory(tmp_path))) == ["findings.sqlite", "samples.sqlite"]
