"""Since when: what `watch` remembers, whatever is in its files, beside what one snapshot knows."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden import cli, history
from gpuwarden.errors import UsageError
from gpuwarden.finding import Finding, Subject, finding_id
from gpuwarden.history import Asked, History, Told, summary
from gpuwarden.life import FindingLife
from gpuwarden.model import Snapshot
from gpuwarden.outputs.sheet import cells
from gpuwarden.policy import Policy
from gpuwarden.snapshot import write
from gpuwarden.store import FINDINGS_FILE, SAMPLES_FILE, Point, Sample, Series, Store
from gpuwarden.watch.options import STATE_DIRECTORY
from tests.conftest import Golden
from tests.support.nodes import BOOT_ID, GIB, SECOND_NS, TAKEN_AT_NS, NodeBuilder, gpu_id

HOUR_NS = 3600 * SECOND_NS
MINER = 4242
STATE = "state"


def ticks_of(snapshot: Snapshot, pid: int) -> int:
    return next(p.start_time_ticks for p in snapshot.processes if p.pid == pid)


def ago(seconds: float) -> int:
    return TAKEN_AT_NS - int(seconds * SECOND_NS)


def sample(at_ns: int, pid: int | None = MINER, gpu: int = 0, **fields: object) -> Sample:
    known: dict[str, object] = {"boot_id": BOOT_ID, "sm_percent": 50, "memory_bytes": GIB}
    return Sample(at_ns=at_ns, gpu_id=gpu_id(gpu), pid=pid, **{**known, **fields})  # type: ignore[arg-type]


def finding(rule: str, pid: int, ticks: int, boot_id: str | None = BOOT_ID) -> Finding:
    subject = Subject(
        kind="process",
        name="python3",
        pid=pid,
        start_time_ticks=ticks,
        boot_id=boot_id,
        gpu_ids=(gpu_id(0),),
    )
    return Finding(
        id=finding_id(rule, subject),
        rule=rule,
        severity="critical",
        title=f"Title of {rule}",
        explanation="",
        subject=subject,
    )


@pytest.fixture
def mined(node: NodeBuilder) -> Snapshot:
    """A miner that has been there for three hours."""
    node.process(9, ppid=0, exe="/bin/bash", role="ancestor", started_at_ns=ago(11_000))
    node.process(MINER, ppid=9, exe="/tmp/.x/python3", started_at_ns=ago(10_800))
    node.client(MINER, sm_percent=97)
    return node.snapshot()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A memory that is there and empty; its name is the same in every run."""
    monkeypatch.chdir(tmp_path)
    Store(STATE).close()
    return STATE


def remember(*samples: Sample) -> None:
    with Store(STATE) as store:
        store.samples.record(samples)


def told(snapshot: Snapshot, width: int = 140, **asked: Any) -> Told:
    return history.tell(snapshot, Policy(), history.asked({"state": STATE, **asked}), width=width)


def document(snapshot: Snapshot, **asked: Any) -> History:
    text = told(snapshot, format="json", **asked).text
    return msgspec.json.decode(text, type=History)


# -------------------------------------------------------------------- what is told


def three_hours(snapshot: Snapshot) -> None:
    """A load that pauses for 10 minutes in each half hour, judged by and by; a hole of an hour."""
    ticks = ticks_of(snapshot, MINER)
    samples = []
    for second in range(0, 10_800, 30):
        if 3600 <= second < 7200:
            continue
        sm = 0 if second % 1800 < 600 else 97
        judged = None if second < 60 else "unattributed" if second < 1800 else "cryptominer"
        at_ns = ago(10_800 - second)
        samples += [
            sample(at_ns, None, sm_percent=sm, memory_bytes=4 * GIB + second),
            sample(
                at_ns,
                start_time_ticks=ticks,
                sm_percent=sm,
                memory_bytes=4 * GIB,
                verdict=judged,
                binary="/tmp/.x/python3",
                parents=("/bin/bash", "/usr/sbin/sshd"),
                peers=("203.0.113.82:3333", "198.51.100.7:443"),
            ),
        ]
    yesterday = ago(86_400)
    for second in range(0, 90, 10):
        samples.append(
            sample(
                yesterday + second * SECOND_NS,
                gpu=1,
                start_time_ticks=77,
                boot_id="an-earlier-boot",
                sm_percent=second,
                binary="/usr/bin/python3.11",
                verdict="expected",
            )
        )
    with Store(STATE) as store:
        store.samples.record(samples)
        life = FindingLife(store, node="node1")
        miner = finding("gpu_cryptominer", MINER, ticks)
        opened = finding("container_opens_accelerator", MINER, 77, "an-earlier-boot")
        life.observe([opened], yesterday, frozenset())
        for number in range(4):
            life.observe([miner], ago(9000 - number), frozenset({opened.rule}))


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize(
    ("name", "asked"),
    [("pid", {"pid": MINER}), ("gpu", {"gpu": "0"}), ("gpu-since", {"gpu": "1", "since": "2d"})],
)
def test_the_past_reads_well_and_fits(
    mined: Snapshot, state: str, golden: Golden, name: str, asked: dict[str, Any], width: int
) -> None:
    three_hours(mined)
    found = told(mined, width, **asked)
    assert found.found
    assert found.complaint == ""
    assert max(map(len, found.text.splitlines())) <= width
    golden.check(f"history/{name}-{width}.txt", found.text)


def test_json_tells_the_same_in_numbers(mined: Snapshot, state: str) -> None:
    three_hours(mined)
    found = document(mined, pid=MINER)
    raw = json.loads(told(mined, pid=MINER, format="json").text)
    assert (raw["schema"], raw["version"]) == ("gpuwarden.history", 1)
    earlier, now = found.pasts
    assert (earlier.is_current, earlier.boot_id) == (False, "an-earlier-boot")
    assert earlier.started_at_ns is None
    assert now.is_current
    assert now.started_at_ns == ago(10_800)
    assert now.sm_percent is not None
    assert (now.sm_percent.min, now.sm_percent.max) == (0, 97)
    assert now.sm_percent.mean == pytest.approx(97 * 2 / 3, abs=1)
    # The last sample before the hole holds for 60 seconds, and not for an hour.
    assert 7200 <= now.covered_seconds <= 7260
    assert [one.verdict for one in now.verdicts] == [None, "unattributed", "cryptominer"]
    assert now.verdicts[2].from_ns == ago(10_800 - 1800)
    assert now.parents == ("/bin/bash", "/usr/sbin/sshd")
    assert now.peers == ("203.0.113.82:3333", "198.51.100.7:443")
    opened, miner = found.findings
    assert (opened.is_open, opened.resolved_at_ns) == (False, ago(8998))
    assert (miner.is_open, miner.finding.rule) == (True, "gpu_cryptominer")
    assert miner.first_seen_ns == ago(9000)


def test_a_process_that_is_gone_is_told_from_memory_alone(node: NodeBuilder, state: str) -> None:
    remember(
        sample(ago(600), 77, start_time_ticks=5, binary="/opt/app", verdict="suspicious"),
        sample(ago(590), 77, start_time_ticks=5, sm_percent=99),
    )
    found = told(node.snapshot(), pid=77)
    assert found.found
    lines = found.text.splitlines()
    assert lines[0] == (
        "pid 77: not on a GPU in this snapshot, what is remembered of this number follows"
    )
    assert "    binary   /opt/app" in lines
    assert any(line.startswith("  The process, started ") for line in lines)
    assert "this snapshot" not in lines[1]


def test_processes_that_had_the_pid_before_are_told_apart(mined: Snapshot, state: str) -> None:
    mine = ticks_of(mined, MINER)
    remember(
        sample(ago(40_000), start_time_ticks=mine, boot_id="another", sm_percent=1),
        sample(ago(30_000), start_time_ticks=mine - 1, sm_percent=2),
        sample(ago(20_000), start_time_ticks=None, sm_percent=3),
        sample(ago(600), start_time_ticks=mine, sm_percent=4),
    )
    found = document(mined, pid=MINER)
    assert [one.sm_percent and one.sm_percent.max for one in found.pasts] == [1, 2, 3, 4]
    assert [one.is_current for one in found.pasts] == [False, False, False, True]
    text = told(mined, pid=MINER).text
    assert text.count("Another process of this number") == 3
    assert text.count("This process on GPU 0") == 1
    assert "of boot another" in text
    assert "whose start is not known" in text


def test_another_process_is_never_taken_for_this_one(mined: Snapshot, state: str) -> None:
    ticks = ticks_of(mined, MINER)
    remember(sample(ago(600), start_time_ticks=ticks - 1))
    with Store(STATE) as store:
        FindingLife(store).observe([finding("some_rule", MINER, ticks - 1)], ago(600), frozenset())
    text = told(mined, pid=MINER).text
    assert "No samples of this process, only of others that had its number before." in text
    assert "of another process of this number" in text


def test_only_what_is_since_then(mined: Snapshot, state: str) -> None:
    ticks = ticks_of(mined, MINER)
    remember(
        *(
            sample(ago(seconds), start_time_ticks=ticks, sm_percent=seconds // 100)
            for seconds in (9000, 7000, 5000)
        )
    )
    with Store(STATE) as store:
        life = FindingLife(store)
        life.observe([finding("old_rule", MINER, ticks)], ago(9000), frozenset())
        for _ in range(3):
            life.observe([], ago(9000), frozenset({"old_rule"}))
        life.observe([finding("open_rule", MINER, ticks)], ago(9000), frozenset())
    found = document(mined, pid=MINER, since="2h")
    (past,) = found.pasts
    assert past.first_ns == ago(7000)
    assert [one.finding.rule for one in found.findings] == ["open_rule"]
    assert len(document(mined, pid=MINER).findings) == 2
    # Of a GPU the last day is shown unless more is asked for.
    remember(sample(ago(90_000), 5, start_time_ticks=1))
    assert {one.pid for one in document(mined, gpu="0").pasts} == {MINER}
    assert {one.pid for one in document(mined, gpu="0", since="2d").pasts} == {MINER, 5}


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "0h", "2 h", "2y", "1.5h", "9999999d", "٢h"])
def test_a_time_that_is_none_is_a_usage_error(state: str, text: str) -> None:
    with pytest.raises(UsageError, match=r"--since .*: expected a time such as 30m, 2h or 7d"):
        history.asked({"pid": 1, "since": text})


def test_a_gpu_that_fell_off_is_told_from_memory(node: NodeBuilder, state: str) -> None:
    lost = gpu_id(7)
    remember(sample(ago(100), None, gpu=7), sample(ago(100), 55, gpu=7, start_time_ticks=3))
    found = told(node.snapshot(), gpu=lost)
    assert found.found
    assert found.text.startswith(f"GPU {lost}: not in this snapshot\n")
    with pytest.raises(UsageError, match=f"no GPU is called '7'; .*; remembered: {lost}"):
        told(node.snapshot(), gpu="7")


def test_findings_of_a_gpu_are_those_of_its_processes_too(mined: Snapshot, state: str) -> None:
    ticks = ticks_of(mined, MINER)
    remember(sample(ago(60), start_time_ticks=ticks))
    with Store(STATE) as store:
        # The open of a device by a process names no GPU.
        of_open = finding("device_opened", MINER, ticks)
        of_open = msgspec.structs.replace(
            of_open, subject=msgspec.structs.replace(of_open.subject, gpu_ids=())
        )
        other = finding("device_opened", 4243, ticks)
        other = msgspec.structs.replace(
            other, subject=msgspec.structs.replace(other.subject, gpu_ids=(gpu_id(2),))
        )
        FindingLife(store).observe([of_open, other], ago(60), frozenset())
    assert [one.finding.subject.pid for one in document(mined, gpu="0").findings] == [MINER]
    assert [one.finding.subject.pid for one in document(mined, gpu="2").findings] == [4243]


def test_a_flood_of_findings_hides_no_other(mined: Snapshot, state: str) -> None:
    ticks = ticks_of(mined, MINER)
    with Store(STATE) as store:
        life = FindingLife(store)
        life.observe([finding("the_one", MINER, ticks)], ago(900), frozenset())
        flood = [
            msgspec.structs.replace(finding("a_flood", pid, 7), severity="warning")
            for pid in range(5000, 5300)
        ]
        life.observe(flood, ago(60), frozenset())
    lines = told(mined, gpu="0").text.splitlines()
    at = lines.index("  Findings")
    assert lines[at + 1].endswith(f"CRITICAL  pid {MINER}: Title of the_one")
    assert "WARNING  300 findings: Title of a_flood" in lines[at + 4]
    assert lines[at + 5].startswith("      300 open, last seen ")
    assert lines[at + 6].endswith(" and 292 more; --format json has all")
    assert len(lines) == at + 8
    assert len(document(mined, gpu="0").findings) == 301


def test_a_program_that_respawns_hides_no_process_that_stays(mined: Snapshot, state: str) -> None:
    mine = ticks_of(mined, MINER)
    remember(
        sample(ago(5000), start_time_ticks=mine),
        *(sample(ago(4000 - pid), pid, start_time_ticks=pid) for pid in range(100, 150)),
        sample(ago(1), start_time_ticks=mine),
    )
    text = told(mined, gpu="0").text
    assert "31 earlier ones are left out; --format json has them" in text
    assert f"    {MINER:>8}  2025-12-31 22:36:40Z" in text


def test_nothing_remembered_acts_on_the_terminal(mined: Snapshot, state: str) -> None:
    evil = "/tmp/\x1b[2J\u202e\x07"
    remember(
        sample(
            ago(60),
            start_time_ticks=ticks_of(mined, MINER),
            binary=evil,
            parents=(evil,),
            peers=(evil,),
            verdict=evil,
        )
    )
    for form in ("table", "json"):
        for asked in ({"pid": MINER}, {"gpu": "0"}):
            text = told(mined, format=form, **asked).text
            assert "2J" in text
            assert not {"\x1b", "\u202e", "\x07"} & set(text)


# -------------------------------------------------------------------- no memory, or a bad one


def test_without_a_memory_one_line_says_how_to_get_one(
    mined: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir(STATE)
    found = told(mined, pid=MINER)
    assert found.found
    assert found.complaint == ""
    assert found.text.splitlines()[-1] == (
        "No memory in state: gpuwarden watch keeps a memory; it has not run here, or not with "
        "this --state."
    )
    without = history.tell(mined, Policy(), Asked(pid=MINER, recording="node.json"))
    assert found.text.startswith(without.text)
    assert os.listdir(STATE) == []


def test_a_directory_that_is_named_and_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--state .*nowhere: no such directory"):
        history.asked({"pid": 1, "state": str(tmp_path / "nowhere")})


def test_a_recording_is_not_told_with_this_machines_memory() -> None:
    assert history.asked({"pid": 1, "recording": "node.json"}).directory is None
    assert history.asked({"pid": 1, "recording": "n", "state": "/tmp"}).directory == "/tmp"
    assert history.asked({"pid": 1}).directory == STATE_DIRECTORY


@pytest.mark.skipif(os.geteuid() != 0, reason="without root there is no other user to be")
def test_a_memory_that_may_not_be_read_is_one_clear_error(
    mined: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # only what watch itself closes is closed
        monkeypatch.chdir(directory)
        three_hours(mined)
        os.seteuid(65534)
        try:
            found = told(mined, pid=MINER)
        finally:
            os.seteuid(0)
            monkeypatch.undo()
    assert "gpuwarden: state/samples.sqlite: Permission denied\n  run it as root\n" in (
        found.complaint
    )
    assert "suspicious" in found.text  # what the snapshot knows is told all the same
    assert "Not all of it could be read" in found.text
    assert "No samples" not in found.text


@pytest.mark.parametrize("damaged", [SAMPLES_FILE, FINDINGS_FILE])
@pytest.mark.parametrize("contents", [b"no database", b"", None])
def test_a_damaged_file_is_a_clear_error_and_the_other_is_still_read(
    mined: Snapshot, state: str, damaged: str, contents: bytes | None
) -> None:
    three_hours(mined)
    path = Path(STATE, damaged)
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100) if contents is None else contents)
    before = path.read_bytes()
    found = told(mined, pid=MINER)
    complaints = [line for line in found.complaint.splitlines() if not line.startswith(" ")]
    assert len(complaints) == 1
    assert found.complaint.startswith(f"gpuwarden: {STATE}/{damaged}: ")
    assert ("peers " in found.text) == (damaged != SAMPLES_FILE)
    assert ("gpu_cryptominer" in found.text) == (damaged != FINDINGS_FILE)
    assert path.read_bytes() == before
    raw = json.loads(told(mined, pid=MINER, format="json").text)
    assert raw["memory"]["state"] == "failed"


def test_exit_codes(mined: Snapshot, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    three_hours(mined)
    write("node.json", mined)

    def run(*arguments: str) -> int:
        return cli.main(["history", *arguments, "--from", "node.json", "--state", STATE])

    assert run(str(MINER)) == 0
    assert run("31337") == 2
    assert run("31337", "--since", "soon") == 64
    capsys.readouterr()
    Path(STATE, SAMPLES_FILE).write_bytes(b"no database")
    assert run(str(MINER)) == 2
    out, err = capsys.readouterr()
    assert "on GPU 0: pid 4242" in out
    assert err.startswith(f"gpuwarden: {STATE}/{SAMPLES_FILE}: it is damaged")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (SAMPLES_FILE, "UPDATE samples SET at_ns = 'soon'"),
        (SAMPLES_FILE, "UPDATE samples SET sm_percent = x'00ff'"),
        (SAMPLES_FILE, "UPDATE samples SET memory_bytes = 1.5"),
        (SAMPLES_FILE, "UPDATE samples SET verdict = CAST(x'ff' AS TEXT)"),
        (SAMPLES_FILE, "UPDATE series SET binary = x'ff'"),
        (SAMPLES_FILE, "UPDATE series SET boot_id = x'ff'"),
        (SAMPLES_FILE, "DROP TABLE samples"),
        (FINDINGS_FILE, "UPDATE findings SET state = 'not bytes'"),
        (FINDINGS_FILE, "UPDATE findings SET state = x'7b7d'"),
        (FINDINGS_FILE, "UPDATE findings SET state = 7"),
        (FINDINGS_FILE, "DROP TABLE findings"),
        (FINDINGS_FILE, "DROP TABLE meta"),
        (FINDINGS_FILE, "DELETE FROM meta"),
    ],
)
def test_rows_that_no_agent_wrote_are_told_as_damage(
    mined: Snapshot, state: str, file: str, change: str
) -> None:
    three_hours(mined)
    with sqlite3.connect(Path(STATE, file)) as connection:
        connection.execute(change)
    connection.close()
    for form in ("table", "json"):
        found = told(mined, pid=MINER, format=form)
        assert found.complaint.startswith(f"gpuwarden: {STATE}/{file}: ")
        assert found.found


def test_a_memory_that_others_may_write_is_said_to_be_one(mined: Snapshot, state: str) -> None:
    three_hours(mined)
    os.chmod(STATE, 0o777)
    found = told(mined, pid=MINER)
    assert found.complaint == (
        "gpuwarden: state: others may write there: what it says may be made up\n"
    )
    assert "peers " in found.text


def test_it_reads_beside_a_running_agent_and_changes_nothing(mined: Snapshot, state: str) -> None:
    with Store(STATE) as store:
        store.samples.record([sample(ago(60), start_time_ticks=ticks_of(mined, MINER))])
        names = ("", "-wal")
        before = [Path(STATE, SAMPLES_FILE + name).read_bytes() for name in names]
        assert len(document(mined, pid=MINER).pasts) == 1
        assert [Path(STATE, SAMPLES_FILE + name).read_bytes() for name in names] == before
        store.samples.record([sample(ago(50), start_time_ticks=ticks_of(mined, MINER), gpu=1)])
        assert len(document(mined, pid=MINER).pasts) == 2


# -------------------------------------------------------------------- any bytes, any samples


@settings(max_examples=60, deadline=None)
@given(
    file=st.sampled_from([SAMPLES_FILE, FINDINGS_FILE]),
    at=st.floats(0, 1),
    patch=st.binary(min_size=1, max_size=400),
)
def test_any_bytes_in_its_files_give_a_past_or_a_complaint(
    tmp_path_factory: pytest.TempPathFactory, file: str, at: float, patch: bytes
) -> None:
    directory = str(tmp_path_factory.mktemp("state"))
    with Store(directory) as store:
        store.samples.record([sample(ago(s), start_time_ticks=1) for s in range(1, 400)])
        FindingLife(store).observe([finding("some_rule", MINER, 1)], ago(60), frozenset())
    path = Path(directory, file)
    whole = bytearray(path.read_bytes())
    place = int(at * (len(whole) - 1))
    whole[place : place + len(patch)] = patch
    path.write_bytes(whole)
    node = NodeBuilder()
    node.gpu(0)
    for form in ("table", "json"):
        asked = history.asked({"pid": MINER, "state": directory, "format": form})
        found = history.tell(node.snapshot(), Policy(), asked, width=80)
        assert found.complaint or found.found or found.text
        if form == "json":
            msgspec.json.decode(found.text, type=History)


def points() -> st.SearchStrategy[list[Point]]:
    values = st.none() | st.integers(-(2**63), 2**63 - 1)
    return st.lists(
        st.builds(
            Point,
            at_ns=st.integers(-(2**63), 2**63 - 1) | st.integers(ago(4000), ago(0)),
            sm_percent=st.none() | st.integers(0, 100) | values,
            memory_bytes=values,
            verdict=st.sampled_from([None, "expected", "cryptominer"]),
        ),
        max_size=40,
    )


@settings(max_examples=150, deadline=None)
@given(points())
def test_any_samples_add_up(drawn: list[Point]) -> None:
    series = Series(gpu_id="g", points=tuple(drawn))
    past = summary.summarised(
        series, gpu="0", now_ns=TAKEN_AT_NS, started_at_ns=None, is_current=True
    )
    assert len(past.intervals) <= summary.INTERVALS + 1
    assert past.covered_seconds <= 60 * len(drawn) + 0.001
    total = sum(one.covered_seconds for one in past.intervals)
    assert total == pytest.approx(past.covered_seconds, abs=0.02)
    for amount in (past.sm_percent, past.memory_bytes):
        assert amount is None or amount.min <= amount.mean <= amount.max
    for before, after in zip(past.intervals, past.intervals[1:], strict=False):
        assert before.until_ns <= after.from_ns
    seen = [point.sm_percent for point in drawn if point.sm_percent is not None]
    assert (past.sm_percent is None) == (not seen)
    if past.sm_percent is not None:
        assert (past.sm_percent.min, past.sm_percent.max) == (min(seen), max(seen))


@settings(max_examples=60, deadline=None)
@given(points(), st.text(max_size=300), st.integers(20, 200))
def test_any_samples_fit_any_width(drawn: list[Point], name: str, width: int) -> None:
    from gpuwarden.history import page, remembered

    node = NodeBuilder()
    node.gpu(0)
    node.process(MINER, exe=f"/{name}" if "\0" not in name else "/x")
    node.client(MINER)
    series = Series(gpu_id=gpu_id(0), pid=MINER, binary=name, peers=(name,), points=tuple(drawn))
    before = history.tell(node.snapshot(), Policy(), Asked(pid=MINER, recording="x", format="json"))
    empty = msgspec.json.decode(before.text, type=History)
    full = msgspec.structs.replace(
        empty,
        memory=history.Memory(directory=name, state="ok", since_ns=0, troubles=()),
        pasts=(
            summary.summarised(
                series, gpu="0", now_ns=TAKEN_AT_NS, started_at_ns=None, is_current=False
            ),
        ),
        findings=(
            remembered.KnownFinding(
                finding=finding(name or "rule", MINER, 1),
                is_open=False,
                first_seen_ns=0,
                last_seen_ns=0,
            ),
        ),
    )
    for shown in (full, msgspec.structs.replace(full, pid=None, gpu="0")):
        for line in page.render(shown, width).splitlines():
            # Numbers that no driver gives may be wider than their column.
            assert cells(line) <= max(width, page.NARROWEST) or "iB" in line
