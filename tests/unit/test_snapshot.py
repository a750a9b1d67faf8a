"""Snapshot files: what is written reads again, old files read, and no bytes break the reader."""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden import snapshot as snapshots
from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable, UsageError
from gpuwarden.model import (
    SNAPSHOT_VERSION,
    Gap,
    Gpu,
    GpuClient,
    NodeFacts,
    Process,
    SensorRun,
    Snapshot,
    SourceRun,
    UtilisationSample,
)

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SMALL = Snapshot(taken_at_ns=1, node=NodeFacts(hostname="node-1"))


def document(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "schema": "gpuwarden.snapshot",
        "version": SNAPSHOT_VERSION,
        "taken_at_ns": 1,
        "node": {"hostname": "node-1"},
    }
    return json.dumps({**fields, **changes}).encode()


# ---------------------------------------------------------------------------------- round trip

TEXT = st.text(max_size=12)
COUNT = st.integers(0, (1 << 64) - 1)
MAYBE = st.none() | COUNT
UNREAD = st.dictionaries(st.sampled_from(["memory_bytes", "exe"]), TEXT, max_size=2)
SNAPSHOTS = st.builds(
    Snapshot,
    tool_version=TEXT,
    taken_at_ns=st.integers(0, 1 << 62),
    node=st.builds(NodeFacts, hostname=TEXT, boot_time_ns=MAYBE, kernel=st.none() | TEXT),
    sensors=st.lists(
        st.builds(
            SensorRun,
            name=TEXT,
            state=st.sampled_from(["ok", "partial", "absent", "failed", "skipped"]),
            seconds=st.floats(0, 1e6, allow_nan=False),
        ),
        max_size=3,
    ).map(tuple),
    sources=st.lists(
        st.builds(
            SourceRun,
            name=TEXT,
            state=st.sampled_from(["ok", "absent"]),
            running=st.lists(TEXT, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    gaps=st.lists(st.builds(Gap, sensor=TEXT, what=TEXT, reason=TEXT), max_size=2).map(tuple),
    gpus=st.lists(
        st.builds(
            Gpu,
            id=TEXT,
            index=MAYBE,
            power_watts=st.none() | st.floats(0, 1e5, allow_nan=False),
            unread=UNREAD,
        ),
        max_size=3,
    ).map(tuple),
    clients=st.lists(
        st.builds(
            GpuClient,
            gpu_id=TEXT,
            pid=COUNT,
            kinds=st.lists(st.sampled_from(["C", "G", "M"]), max_size=3).map(tuple),
            memory_bytes=MAYBE,
            samples=st.lists(
                st.builds(UtilisationSample, at_ns=COUNT, sm_percent=st.integers(0, 100)),
                max_size=2,
            ).map(tuple),
            reported_name=st.none() | TEXT,
            engine_ns=st.dictionaries(TEXT, COUNT, max_size=2),
        ),
        max_size=3,
    ).map(tuple),
    processes=st.lists(
        st.builds(
            Process,
            pid=COUNT,
            start_time_ticks=COUNT,
            argv=st.none() | st.lists(TEXT, max_size=3).map(tuple),
            loginuid=st.none() | st.integers(-1, 1 << 32),
        ),
        max_size=3,
    ).map(tuple),
)


@given(SNAPSHOTS)
@settings(deadline=None)
def test_what_is_encoded_decodes_to_the_same(snapshot: Snapshot) -> None:
    data = snapshots.encode(snapshot)
    assert snapshots.decode(data) == snapshot
    assert snapshots.decode(gzip.decompress(data)) == snapshot
    assert snapshots.encode(snapshot) == data


def test_the_document_names_its_schema_and_version_first() -> None:
    text = gzip.decompress(snapshots.encode(SMALL))
    assert text.startswith(b'{"schema":"gpuwarden.snapshot","version":1,')
    assert list(json.loads(text)).count("version") == 1
    # An odd schema in the value itself cannot be written into a file that then does not read.
    odd = Snapshot(schema="x", version=7, taken_at_ns=1, node=NodeFacts(hostname="node-1"))
    assert snapshots.decode(snapshots.encode(odd)) == SMALL


def test_equal_facts_give_equal_bytes_whatever_their_order() -> None:
    one = Snapshot(taken_at_ns=1, node=NodeFacts(hostname="n", unread={"a": "1", "b": "2"}))
    two = Snapshot(taken_at_ns=1, node=NodeFacts(hostname="n", unread={"b": "2", "a": "1"}))
    assert snapshots.encode(one) == snapshots.encode(two)
    assert snapshots.encode(one)[4:8] == bytes(4), "the gzip header holds a time"


def test_text_that_is_not_unicode_is_malformed_when_written() -> None:
    broken = Snapshot(taken_at_ns=1, node=NodeFacts(hostname="\ud800"))
    with pytest.raises(Malformed, match="cannot be written"):
        snapshots.encode(broken)


# ---------------------------------------------------------------------------- versions, mistakes


def test_a_version_0_file_reads() -> None:
    data = (FIXTURES / "snapshots" / "v0.json").read_bytes()
    for form in (data, gzip.compress(data)):
        old = snapshots.decode(form)
        assert old.version == SNAPSHOT_VERSION
        assert old.node.hostname == "node-1"
        assert [c.pid for c in old.clients] == [4001]
        assert {s.state for s in old.sources} == {"skipped"}
        assert all("old snapshot" in s.reason for s in old.sources)


def test_there_is_a_migration_for_every_old_version() -> None:
    assert len(snapshots.MIGRATIONS) == SNAPSHOT_VERSION


def test_a_newer_version_says_to_upgrade() -> None:
    with pytest.raises(Malformed, match=f"version {SNAPSHOT_VERSION + 41}") as caught:
        snapshots.decode(document(version=SNAPSHOT_VERSION + 41, node="reshaped"))
    assert "upgrade" in caught.value.remedy


def test_unknown_fields_are_ignored() -> None:
    assert snapshots.decode(document(later=[1, {"a": 2}])) == SMALL


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (document(gpus=[{"id": "a", "index": "0"}]), "Expected `int | null`, got `str`"),
        (document(gpus=[{"id": "a", "index": "0"}]), "$.gpus[0].index"),
        (document(node={}), "$.node"),
        (document(taken_at_ns="x"), "$.taken_at_ns"),
        (document(schema="gpuwarden.report"), "'gpuwarden.report'"),
        (document(version="1"), "$.version"),
        (document(version=-1), "$.version"),
        (document(version=None), "$.version"),
        (b'{"version":1}', "names no schema"),
        (b"[]", "Expected `object`"),
        (b"", "not JSON"),
        (document(version=0, node={"hostname": 1}), "$.node.hostname"),
        (document().replace(b'"node-1"', b'"\\ud800"'), "not JSON"),
        (document().replace(b'"node-1"', b'"\xff"'), "not JSON"),
        (document().replace(b'"taken_at_ns": 1', b'"taken_at_ns": NaN'), "not JSON"),
        (document().replace(b'"taken_at_ns": 1', b'"taken_at_ns": 1e400'), "taken_at_ns"),
        (document(taken_at_ns=1 << 64), "$.taken_at_ns"),
        (document(clients=[{"gpu_id": "a", "pid": 10**60}]), "$.clients[0].pid"),
        (document(clients=[{"gpu_id": "a", "pid": 1, "engine_ns": {"e": 10**60}}]), "engine_ns.e"),
        (document(later=1)[:-2] + b"[" * 200_000, "nested too deeply"),
        (b"[" * 200_000, ""),
        (document()[:-1], "not JSON"),
    ],
)
def test_a_mistake_is_malformed_with_its_place(data: bytes, words: str) -> None:
    with pytest.raises(Malformed) as caught:
        snapshots.decode(data)
    assert words in str(caught.value)


@pytest.mark.parametrize("version", [0, SNAPSHOT_VERSION])
def test_long_digits_in_text_and_64_bit_integers_are_fine(version: int) -> None:
    data = document(version=version, tool_version="9" * 80, taken_at_ns=(1 << 64) - 1)
    assert snapshots.decode(data).taken_at_ns == (1 << 64) - 1


# ------------------------------------------------------------------------------------- compression


def test_a_cut_off_file_is_malformed_wherever_it_is_cut() -> None:
    data = snapshots.encode(SMALL)
    for end in range(2, len(data)):
        with pytest.raises(Malformed, match="cut off"):
            snapshots.decode(data[:end])


def test_damage_and_trailing_bytes_are_malformed() -> None:
    data = snapshots.encode(SMALL)
    with pytest.raises(Malformed, match="damaged"):
        snapshots.decode(data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])
    with pytest.raises(Malformed, match="after the end"):
        snapshots.decode(data + b"x")
    assert snapshots.decode(data + b"\0" * 512) == SMALL


def test_several_gzip_members_are_one_document() -> None:
    whole = document()
    assert snapshots.decode(gzip.compress(whole[:20]) + gzip.compress(whole[20:])) == SMALL


def test_a_compression_bomb_is_refused_early() -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(64)) + packer.flush()
    with pytest.raises(Malformed, match="-fold"):
        snapshots.decode(bomb)


def test_the_inflated_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "INFLATED_LIMIT_BYTES", 1 << 20)
    with pytest.raises(Malformed, match="when inflated"):
        snapshots.decode(gzip.compress(os.urandom(1 << 10) * (3 << 10)))


# --------------------------------------------------------------------------------------- files


def test_a_written_file_is_private_whole_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "node.snapshot"
    path.write_text("before")
    path.chmod(0o644)
    snapshots.write(str(path), SMALL)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert snapshots.open_recording(str(path)) == SMALL
    assert [p.name for p in tmp_path.iterdir()] == ["node.snapshot"]


@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "fifo"])
def test_only_regular_files_are_written(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "out", tmp_path / "target"
    if kind == "link":
        target.write_text("precious")
    if kind in ("link", "dangling"):
        path.symlink_to(target)
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        snapshots.write(str(path), SMALL)
    assert ("symbolic link" in str(caught.value)) == (kind in ("link", "dangling"))
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    if kind == "link":
        assert target.read_text() == "precious"


def test_a_failed_write_leaves_nothing_and_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.snapshot"
    snapshots.write(str(path), SMALL)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unavailable, match="No space left"):
        snapshots.write(str(path), Snapshot(taken_at_ns=2, node=NodeFacts(hostname="other")))
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["node.snapshot"]
    assert snapshots.open_recording(str(path)) == SMALL


def test_places_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="not there"):
        snapshots.write(str(tmp_path / "no" / "file"), SMALL)
    with pytest.raises(Unavailable, match="not there"):
        snapshots.open_recording(str(tmp_path / "nothing"))
    with pytest.raises(Malformed, match="not a regular file"):
        snapshots.open_recording(str(tmp_path))
    with pytest.raises(Malformed, match="not a regular file"):
        snapshots.open_recording("/dev/null")
    with pytest.raises(UsageError):
        snapshots.open_recording("a\0b")
    with pytest.raises(UsageError):
        snapshots.write("a\0b", SMALL)


def test_an_unreadable_file_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(Denied, match="permission denied"):
        snapshots.open_recording(str(tmp_path / "secret"))
    with pytest.raises(Denied, match="permission denied"):
        snapshots.write(str(tmp_path / "secret"), SMALL)


def test_a_recording_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 100)
    monkeypatch.setattr(snapshots, "RECORDING_LIMIT_BYTES", 99)
    with pytest.raises(Malformed, match="more than"):
        snapshots.open_recording(str(path))


# ------------------------------------------------------------------------------------ recordings


def test_a_dump_becomes_a_snapshot_that_says_what_it_lacks() -> None:
    path = FIXTURES / "nvidia-smi" / "miner-on-two-of-six-384.xml"
    node = snapshots.open_recording(str(path))
    assert node.node.origin == "nvidia-smi-xml"
    assert node.node.hostname == "unknown"
    assert node.node.driver_version == "384.66"
    assert node.node.host_pid_namespace is None
    assert "pid namespace" in node.node.unread["host_pid_namespace"]
    assert node.taken_at_ns == 1505160732 * 10**9
    runs = {run.name: run for run in node.sensors}
    assert runs["nvidia_smi"].state == "partial"
    assert runs["nvidia_smi"].facts == 5
    assert set(runs) == {"nvidia_smi", *snapshots.UNSEEN_SENSORS}
    assert {runs[name].state for name in snapshots.UNSEEN_SENSORS} == {"absent"}
    assert all(runs[name].reason for name in snapshots.UNSEEN_SENSORS)
    assert [s.name for s in node.sources] == list(snapshots.UNSEEN_SOURCES)
    assert {s.state for s in node.sources} == {"absent"}
    assert [c.pid for c in node.clients] == [3093, 1357, 3093]
    assert snapshots.decode(snapshots.encode(node)) == node


def test_a_dump_without_a_time_says_so() -> None:
    node = snapshots.read_recording(b"pid, process_name\n5, python\n")
    assert node.taken_at_ns == 0
    assert "no time" in node.node.unread["taken_at_ns"]
    assert any("time of the dump" in gap.what for gap in node.gaps)
    assert node.node.unread["driver_version"]


def test_a_whole_idle_dump_is_ok_not_partial() -> None:
    node = snapshots.read_recording(
        b"<nvidia_smi_log><timestamp>Thu Apr 11 14:36:26 2019</timestamp>"
        b"<driver_version>550.1</driver_version><attached_gpus>1</attached_gpus>"
        b"<gpu id='00000000:01:00.0'><processes></processes></gpu></nvidia_smi_log>"
    )
    assert node.sensors[0].state == "ok"
    assert not node.gaps


def test_a_compressed_dump_reads_too() -> None:
    data = gzip.compress((FIXTURES / "nvidia-smi" / "pmon-bare.txt").read_bytes())
    assert snapshots.read_recording(data).node.origin == "nvidia-smi-pmon"


@pytest.mark.parametrize("data", [b"", b"hello", b"\x7fELF", gzip.compress(b"hello", mtime=0)])
def test_unknown_content_names_what_is_understood(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(Malformed, match="neither a gpuwarden snapshot") as caught:
        snapshots.open_recording(str(path))
    assert str(path) in str(caught.value)
    for known in ("gpuwarden snapshot", "-q -x", "compute-apps", "pmon"):
        assert known in caught.value.remedy


# ------------------------------------------------------------------------------------- any bytes

FULL = Snapshot(
    taken_at_ns=1,
    node=NodeFacts(hostname="node-1", unread={"kernel": "denied"}),
    gpus=(Gpu(id="GPU-1", index=0, memory_used_bytes=1 << 40, power_watts=1.5),),
    clients=(GpuClient(gpu_id="GPU-1", pid=7, kinds=("C",), reported_name="päth\x1b"),),
)


def sound(data: bytes) -> None:
    try:
        value = snapshots.read_recording(data)
    except GpuwardenError as error:
        assert isinstance(error, Malformed)
        return
    assert snapshots.decode(snapshots.encode(value)) == value


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_a_snapshot_or_malformed(data: bytes) -> None:
    sound(data)
    sound(b"\x1f\x8b\x08\x00" + data)
    sound(gzip.compress(data))
    sound(b'{"schema":"gpuwarden.snapshot","version":1,' + data)


EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(max_size=6)),
    min_size=1,
    max_size=6,
)


@given(EDITS, st.booleans(), st.sampled_from([0, 1]))
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_a_snapshot_or_malformed(
    edits: list[tuple[float, int, bytes]], compressed: bool, version: int
) -> None:
    packed = snapshots.encode(FULL)
    data = packed if compressed else gzip.decompress(packed)
    if version == 0:
        data = (FIXTURES / "snapshots" / "v0.json").read_bytes()
        data = gzip.compress(data, mtime=0) if compressed else data
    for where, gone, new in edits:
        at = int(where * len(data))
        data = data[:at] + new + data[at + gone :]
    sound(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["GPU-1", "C", "ok", "nvml"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["hostname", "id", "pid", "gpu_id", "kinds", "name", "state", "unread"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["node", "host", "taken_at_ns", "sensors", "sources", "gpus", "clients", "processes"]
        ),
        JSON,
        max_size=5,
    ),
    st.sampled_from([0, 1]),
)
@settings(deadline=None)
def test_any_json_under_the_schema_is_a_snapshot_or_malformed(
    changes: dict[str, Any], version: int
) -> None:
    sound(document(version=version, **changes))
