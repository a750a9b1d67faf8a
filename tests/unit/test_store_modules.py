"""Which GPU modules a node has seen is remembered within bounds, and its loss stops nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import GpuwardenError
from gpuwarden.model import (
    CgroupPlacement,
    Executable,
    LoadedModule,
    ModuleLoad,
    Process,
    ProfileStanding,
)
from gpuwarden.store import ModuleLimits, ModuleStore, Sighting, Store
from gpuwarden.store_database import IN_MEMORY
from gpuwarden.store_modules import Whose, sightings
from tests.unit.test_store import Damaged, fill_disk

AT = 10**18


def sighting(number: int, at: int = 0, **given: object) -> Sighting:
    values: dict[str, object] = {
        "digest": f"{number:064x}",
        "kind": "cubin",
        "first_ns": AT + at,
        "last_ns": AT + at,
        "pid": 7,
        "start_time_ticks": 1,
        **given,
    }
    return Sighting(**values)  # type: ignore[arg-type]


def digest(number: int) -> str:
    return f"{number:064x}"


def test_the_first_sighting_stays_and_later_ones_are_counted(tmp_path: Path) -> None:
    directory = str(tmp_path / "memory")
    with Store(directory) as store:
        assert store.modules.record([sighting(1, pid=10), sighting(2)]) == 2
        assert store.modules.record([sighting(1, 5, pid=11), sighting(1, 9, pid=12)]) == 0
    with Store(directory, read_only=True) as store:
        first = store.modules.first_sighting(digest(1))
        assert first == sighting(1, pid=10, last_ns=AT + 9, loads=3)
        assert store.modules.first_sighting(digest(3)) is None
        assert store.troubles == []


def test_those_first_seen_last_come_first() -> None:
    store = ModuleStore(IN_MEMORY)
    store.record([sighting(number, at) for number, at in ((1, 5), (2, 9), (3, 1))])
    assert [one.digest for one in store.recent(2)] == [digest(2), digest(1)]


def test_of_one_round_the_earliest_is_the_first() -> None:
    store = ModuleStore(IN_MEMORY)
    assert store.record([sighting(1, 9, pid=2), sighting(1, 3, pid=1)]) == 1
    assert store.first_sighting(digest(1)) == sighting(1, 3, pid=1, last_ns=AT + 9, loads=2)


def test_a_load_says_who_where_and_against_which_profile() -> None:
    module = LoadedModule(
        digest=digest(1),
        code_digest=digest(2),
        kind="cubin",
        arch="sm_90",
        image_bytes=100,
        kernels=tuple(f"k{number}" for number in range(20)),
        kernel_count=20,
        answer="hash-like",
        score=7.0,
        standings=(
            ProfileStanding(profile="", standing="known", known_as="torch"),
            ProfileStanding(profile="training", standing="unknown", known_as="looks like nvrtc"),
        ),
    )
    load = ModuleLoad(
        pid=7,
        start_time_ticks=3,
        number=1,
        at_ns=AT,
        thread_id=7,
        function="cuModuleLoad",
        path="/tmp/\udcffx",
        modules=(module,),
    )
    process = Process(
        pid=7,
        start_time_ticks=3,
        comm="python3",
        user="alice",
        uid=1000,
        exe=Executable(path="/usr/bin/python3"),
        cgroup=CgroupPlacement(container_id="ab" * 32),
    )
    whose = Whose(process=process, image="img:1", workload="train", profile="training")
    [told] = sightings(load, whose)
    assert (told.exe, told.user, told.uid) == ("/usr/bin/python3", "alice", 1000)
    assert (told.container_id, told.image, told.workload) == ("ab" * 32, "img:1", "train")
    assert (told.profile, told.standing) == ("training", "unknown")
    assert (told.known_as, told.answer, told.score) == ("looks like nvrtc", "hash-like", 7.0)
    assert (told.function, told.path, told.kernel_count) == ("cuModuleLoad", "/tmp/\\udcffx", 20)
    assert told.kernels == tuple(f"k{number}" for number in range(8))
    [nobody] = sightings(load, Whose())
    assert (nobody.standing, nobody.exe, nobody.uid) == ("known", "", None)
    store = ModuleStore(IN_MEMORY)
    assert store.record([told]) == 1
    assert store.first_sighting(told.digest) == told


def test_known_modules_make_room_first_and_hash_like_ones_last() -> None:
    store = ModuleStore(IN_MEMORY, ModuleLimits(rows=6))
    hashes = [sighting(number, 0, answer="hash-like") for number in range(2)]
    unknown = [sighting(number, 1) for number in range(10, 14)]
    known = [sighting(number, 2 + number, standing="known") for number in range(20, 24)]
    store.record([*hashes, *unknown, *known])
    assert store.trim() == 4
    assert {one.digest for one in store.recent()} == {one.digest for one in (*hashes, *unknown)}
    store.record([sighting(30, 50), sighting(11, 51)])
    assert store.trim() == 1
    assert store.first_sighting(digest(10)) is None
    assert store.first_sighting(digest(11)) is not None
    store.record([sighting(number, 60) for number in range(40, 50)])
    store.trim()
    assert {one.digest for one in hashes} <= {one.digest for one in store.recent()}
    assert len(store.recent()) == 6


def test_a_module_that_somebody_does_not_know_is_kept_as_unknown() -> None:
    store = ModuleStore(IN_MEMORY, ModuleLimits(rows=1))
    store.record([sighting(1, standing="known"), sighting(2, 9, standing="known")])
    store.record([sighting(1, 1, standing="unknown")])
    store.trim()
    assert store.first_sighting(digest(1)) is not None
    assert store.first_sighting(digest(2)) is None


def test_bytes_are_bounded(tmp_path: Path) -> None:
    limits = ModuleLimits(size_bytes=1 << 20)
    with Store(str(tmp_path / "memory"), module_limits=limits) as store:
        for part in range(5):
            found = [
                sighting(part * 1000 + number, kernels=("k" * 500,) * 4) for number in range(1000)
            ]
            store.modules.record(found)
        assert store.modules.bytes_used() > 2 << 20
        while store.trim(AT):
            pass
        assert store.modules.bytes_used() <= 1 << 20
        assert len(store.modules.recent(10_000)) > 100


def test_who_makes_up_modules_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.store_modules.NEW_ROWS", 10)
    store = ModuleStore(IN_MEMORY)
    assert store.record(sighting(number) for number in range(15)) == 10
    assert store.lost == 5
    assert store.record([sighting(3), sighting(99)]) == 1


def test_a_full_disk_loses_sightings_and_says_so(tmp_path: Path) -> None:
    with Store(str(tmp_path / "memory")) as store:
        disk = fill_disk(store.modules)
        assert store.modules.record([sighting(1), sighting(2)]) == 0
        assert store.modules.lost == 2
        assert "disk is full" in store.troubles[0].reason
        assert store.findings.commit([], [])
        disk.full = False
        assert store.modules.record([sighting(1)]) == 1
        assert store.troubles == []


def test_a_file_that_turns_out_damaged_is_set_aside(tmp_path: Path) -> None:
    with Store(str(tmp_path / "memory")) as store:
        store.modules.record([sighting(1)])
        store.modules._connection = Damaged(store.modules._connection)  # type: ignore[assignment]
        assert store.modules.recent() == []
        assert store.modules.record([sighting(2)]) == 1
        assert store.modules.first_sighting(digest(1)) is None
        assert "set aside" in store.troubles[0].reason


def test_who_only_reads_sets_nothing_aside(tmp_path: Path) -> None:
    directory = tmp_path / "memory"
    Store(str(directory)).close()
    with Store(str(directory), read_only=True) as store:
        store.modules._connection = Damaged(store.modules._connection)  # type: ignore[assignment]
        assert store.modules.recent() == []
        assert "damaged" in store.troubles[0].reason
    assert (directory / "modules.sqlite").exists()
    assert not list(directory.glob("*.damaged*"))


def test_a_memory_from_before_there_were_modules_in_it_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "memory"
    Store(str(directory)).close()
    for file in directory.glob("modules.sqlite*"):
        file.unlink()
    with Store(str(directory), read_only=True) as store:
        assert store.modules.recent() == []
    assert not list(directory.glob("modules.sqlite*"))


def test_without_a_disk_sightings_are_kept_in_memory() -> None:
    with Store.volatile("/nowhere", GpuwardenError("no")) as store:
        assert store.modules.record([sighting(1)]) == 1
        assert store.modules.first_sighting(digest(1)) is not None


@given(told=st.binary(max_size=200))
def test_a_damaged_row_is_none(told: bytes) -> None:
    store = ModuleStore(IN_MEMORY)
    store._connection.execute(
        "INSERT INTO modules VALUES (?, 'cubin', 1, 1, 1, 1, ?)", (digest(1), told)
    )
    assert store.first_sighting(digest(1)) is None
    store.close()
