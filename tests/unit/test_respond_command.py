"""`gpuwarden respond` on real processes that a made-up GPU is said to have."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden import cli
from gpuwarden.errors import Unavailable
from gpuwarden.evidence import writing
from gpuwarden.finding import Finding, Row, Subject, Verdict, about_source, finding_id
from gpuwarden.history.remembered import KnownFinding
from gpuwarden.host import Host
from gpuwarden.life import FindingLife
from gpuwarden.policy import Policy
from gpuwarden.respond import evidence_step, hung
from gpuwarden.respond.doing import Confirmations
from gpuwarden.respond.evidence_step import Evidence
from gpuwarden.respond.identity import read_identity
from gpuwarden.respond.judged import STALE_NS, gravest, verdict_of
from gpuwarden.respond.means import RealMeans
from gpuwarden.respond.settings import Settings
from gpuwarden.respond.step import Identity
from gpuwarden.sensors.process import stat_lines
from gpuwarden.store import Store
from gpuwarden.watch.denial_findings import DENIED_ON_REQUEST
from tests.support.containers import wait_until
from tests.support.nodes import NodeBuilder, executable
from tests.support.responding import IDENTITY, PID, target_of

HOST = Host()


def row(verdict: Verdict, severity: Any = "warning", **fields: Any) -> Row:
    return Row(gpu_id="0", gpu="0", pid=PID, verdict=verdict, severity=severity, **fields)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which executes another program when it is told to."""
    shell = ("sh", "-c", "read word; exec sleep 1001")
    one = subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True)
    try:
        wait_until(lambda: "sh" in os.readlink(f"/proc/{one.pid}/exe"), "its first program")
        yield one
    finally:
        one.kill()
        one.wait()
        assert one.stdin is not None
        one.stdin.close()


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Archives that were taken; none is written in full."""
    taken: list[str] = []

    def take(self: Evidence, target: Any, tell: Any) -> str:
        taken.append(str(tmp_path / f"{len(taken)}.tar"))
        return taken[-1]

    monkeypatch.setattr(Evidence, "take", take)
    return taken


def is_stopped(pid: int) -> bool:
    return stat_lines.read_line(HOST, pid).state == "T"


def mined(pid: int, monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool = True) -> None:
    """A scan sees this process as a miner on a GPU, or not at all."""
    now = read_identity(HOST, pid)
    node = NodeBuilder(boot_id=now.boot_id)
    node.gpu(0)
    if on_gpu:
        exe = executable("/tmp/.x/kworker", device=now.exe_device, inode=now.exe_inode)
        words = ("x", "-o", "stratum+tcp://pool.example.net:3333", "-u", "x.rig", "-a", "kawpow")
        node.process(pid, exe=exe, argv=words, start_time_ticks=now.start_time_ticks)
        node.client(pid, sm_percent=99)
    snapshot = replace(node.snapshot(), taken_at_ns=time.time_ns())
    monkeypatch.setattr("gpuwarden.respond.command.node_of", lambda *arguments: snapshot)


def remembered(state: Path, one: Identity, at_ns: int, verdict: Verdict = "cryptominer") -> str:
    subject = Subject(
        kind="process",
        name="kworker",
        pid=one.pid,
        start_time_ticks=one.start_time_ticks,
        boot_id=one.boot_id,
        exe_device=one.exe_device,
        exe_inode=one.exe_inode,
        exec_mark=one.exec_mark,
        exec_count=one.exec_count,
    )
    rule = "gpu_cryptominer"
    finding = Finding(
        id=finding_id(rule, subject),
        rule=rule,
        severity="critical",
        title="A miner",
        explanation="",
        subject=subject,
        verdict=verdict,
    )
    with Store(str(state)) as store:
        FindingLife(store).observe([finding], at_ns, frozenset())
    return finding.id


def respond(
    capsys: pytest.CaptureFixture[str], state: Path, *arguments: str
) -> tuple[int, str, str]:
    directory = str(state / "evidence")
    words = ["respond", "--state", str(state), "--evidence-dir", directory, *arguments]
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def entries(state: Path) -> list[tuple[str, str]]:
    lines = (state / "journal").read_text().splitlines()
    return [(json.loads(line)["action"], json.loads(line)["stage"]) for line in lines]


def test_freeze_and_thaw_by_the_command(
    process: subprocess.Popen[bytes],
    archives: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mined(process.pid, monkeypatch)
    code, text, _ = respond(capsys, tmp_path, str(process.pid))
    assert code == 1 and "CRYPTOMINER" in text and "--do freeze" in text and not archives
    code, text, _ = respond(capsys, tmp_path, str(process.pid), "--do", "freeze")
    assert code == 1 and "--yes" in text and not is_stopped(process.pid)
    code, text, _ = respond(capsys, tmp_path, str(process.pid), "--do", "freeze", "--yes")
    assert code == 0 and archives[-1] in "".join(text.split())
    # What undoes it names the journal and the memory that it was done with.
    undo = next(line for line in text.splitlines() if "undo:" in line)
    assert f"--state {tmp_path}" in undo and undo.endswith("--do thaw")
    assert is_stopped(process.pid)
    code, _, _ = respond(capsys, tmp_path, str(process.pid), "--do", "thaw", "--yes")
    assert code == 0 and not is_stopped(process.pid)
    assert entries(tmp_path) == [
        ("freeze", "intent"), ("freeze", "failed"), ("freeze", "intent"), ("freeze", "done"),
        ("thaw", "intent"), ("thaw", "done"),
    ]  # fmt: skip


def test_without_evidence_nothing_is_done(
    process: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def take(self: Evidence, target: Any, tell: Any) -> str:
        raise Unavailable("the disk is full")

    monkeypatch.setattr(Evidence, "take", take)
    mined(process.pid, monkeypatch)
    code, text, _ = respond(capsys, tmp_path, str(process.pid), "--do", "freeze", "--yes")
    assert code == 1 and "the disk is full" in text and not is_stopped(process.pid)


def test_a_journal_that_cannot_be_written_lets_nothing_be_done(
    process: subprocess.Popen[bytes],
    archives: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mined(process.pid, monkeypatch)
    (tmp_path / "journal").mkdir()
    code, _, complaint = respond(capsys, tmp_path, str(process.pid), "--do", "freeze", "--yes")
    assert code == 2 and "journal" in complaint
    assert not is_stopped(process.pid) and not archives


def test_who_has_executed_another_program_is_judged_again_and_not_acted_on(
    process: subprocess.Popen[bytes],
    archives: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = remembered(tmp_path, read_identity(HOST, process.pid), time.time_ns())
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    wait_until(lambda: "sleep" in os.readlink(f"/proc/{process.pid}/exe"), "its next program")
    mined(process.pid, monkeypatch)
    code, text, complaint = respond(capsys, tmp_path, finding, "--do", "kill", "--yes")
    assert code == 1 and "Judged again" in text and "kill was not done" in complaint
    assert process.poll() is None and not archives
    assert entries(tmp_path) == [("judged-again", "fact")]


def test_an_open_finding_holds_for_who_has_left_the_gpu(
    process: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = remembered(tmp_path, read_identity(HOST, process.pid), time.time_ns())
    mined(process.pid, monkeypatch, on_gpu=False)
    code, text, _ = respond(capsys, tmp_path, finding, "--format", "json")
    plan = json.loads(text)
    assert (code, plan["verdict"], plan["judged_again"]) == (1, "cryptominer", "")
    assert plan["subject"]["pid"] == process.pid and plan["schema"] == "gpuwarden.plan"
    assert any("no accelerator" in note for note in plan["notes"])


def test_a_finding_whose_process_has_ended_leaves_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = subprocess.Popen(["sleep", "1000"])
    found = read_identity(HOST, one.pid)
    finding = remembered(tmp_path, found, time.time_ns())
    one.kill()
    one.wait()
    mined(os.getpid(), monkeypatch, on_gpu=False)
    code, text, _ = respond(capsys, tmp_path, finding, "--do", "kill", "--yes")
    assert code == 1 and "has ended" in text and "--do" not in text


def test_a_dead_context_owner_is_planned_for_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = (1 << 22) - 2
    node = NodeBuilder()
    node.gpu(0)
    node.client(dead)
    snapshot = replace(node.snapshot(), taken_at_ns=time.time_ns())
    monkeypatch.setattr("gpuwarden.respond.command.node_of", lambda *arguments: snapshot)
    code, text, _ = respond(capsys, tmp_path, str(dead))
    assert (
        code == 1 and f"ZOMBIE-CONTEXT pid {dead} on GPU 0" in text and "never resets a GPU" in text
    )
    code, text, _ = respond(capsys, tmp_path, str(dead), "--do", "kill", "--yes")
    assert code == 1 and "REFUSED" in text


def test_nothing_is_done_to_ourselves(
    archives: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for pid in (os.getpid(), os.getppid()):
        mined(pid, monkeypatch)
        code, text, _ = respond(capsys, tmp_path, str(pid), "--do", "freeze", "--yes")
        assert code == 1 and "nothing is done to it" in text
    assert not archives


def test_what_is_asked_for_must_be_one_thing_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mined(os.getpid(), monkeypatch, on_gpu=False)
    for line in ("", "x", "0123456789abcdef", "--denied 7", "--denied --do kill", "--allow x",
                 "7 --yes", "-7", "--allow 0:1,", "7 --do reset"):  # fmt: skip
        words = line.split()
        try:
            code, _, _ = respond(capsys, tmp_path, *words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        assert code == 64, words
    assert respond(capsys, tmp_path, "4999999")[0] == 2


def test_a_finding_about_no_process_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = about_source(DENIED_ON_REQUEST, "container abc", [])
    with Store(str(tmp_path)) as store:
        FindingLife(store).observe([finding], time.time_ns(), frozenset())
    code, _, complaint = respond(capsys, tmp_path, finding.id)
    assert code == 64 and "container abc" in complaint


@pytest.mark.parametrize(
    ("verdict", "other", "is_protected"),
    [
        ("suspicious", row("expected"), True),
        ("suspicious", row("system"), True),
        ("suspicious", row("unattributed"), False),
        ("cryptominer", row("expected"), False),
        ("cryptominer", row("cryptominer", silenced_by="exception of the policy"), True),
    ],
)
def test_who_belongs_here_on_one_gpu_is_left_alone_but_for_a_miner(
    verdict: Verdict, other: Row, is_protected: bool, tmp_path: Path
) -> None:
    settings = Settings(host=HOST, state_directory=str(tmp_path))
    means = RealMeans(settings, Policy(), Confirmations())
    target = target_of(verdict, identity=replace(IDENTITY, pid=(1 << 22) - 1))
    target = replace(target, rows=(*target.rows, other))
    assert bool(means.protected(target)) == is_protected


# ---------------------------------------------------------------- which verdict holds


def known(verdict: Verdict | None, *, is_open: bool = True, seen_ns: int = 0) -> KnownFinding:
    subject = Subject(kind="process", pid=PID)
    finding = Finding(
        id="0" * 16, rule="r", severity="error", title="", explanation="", subject=subject,
        verdict=verdict,
    )  # fmt: skip
    return KnownFinding(finding=finding, is_open=is_open, first_seen_ns=0, last_seen_ns=seen_ns)


@pytest.mark.parametrize(
    ("finding", "rows", "verdict"),
    [
        (None, (), None),
        (None, (row("unattributed"), row("suspicious", "error")), "suspicious"),
        (None, (row("orphaned-job"), row("other-team")), "other-team"),
        (known("cryptominer"), (row("suspicious", "error"),), "cryptominer"),
        (known("cryptominer"), (row("expected", "info"),), "expected"),
        (known("cryptominer"), (row("other-team"),), "other-team"),
        (known("cryptominer"), (), "cryptominer"),
        (known("cryptominer", is_open=False), (), None),
        (known("cryptominer", is_open=False), (row("unattributed"),), "unattributed"),
        (known("cryptominer", seen_ns=-STALE_NS - 1), (row("unattributed"),), "unattributed"),
        (known("suspicious"), (row("cryptominer", "critical"),), "cryptominer"),
        (known("orphaned-job"), (row("unattributed"),), "unattributed"),
        (known(None), (row("suspicious", "error"),), "suspicious"),
    ],
)
def test_where_two_verdicts_are_meant_the_one_that_allows_less_holds(
    finding: KnownFinding | None, rows: tuple[Row, ...], verdict: Verdict | None
) -> None:
    assert verdict_of(finding, rows, 0).verdict == verdict
    for order in (rows, rows[::-1]):
        best = gravest(order)
        assert best is None or best.verdict == gravest(rows).verdict  # type: ignore[union-attr]


# ---------------------------------------------------------------- whether it hangs


def state_line(state: str) -> Any:
    return stat_lines.parse_stat(
        f"{PID} (x) {state} 1 1 1 0 0 0 0 0 0 0 1 1 0 0 0 0 1 0 {IDENTITY.start_time_ticks} 0"
        .encode()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("states", "shown"),
    [("Z", True), ("S", False), ("DD", True), ("DS", False), ("X", True), ("R", False)],
)
def test_hung_is_dead_or_twice_in_the_kernel(
    states: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(states)
    waits: list[float] = []
    monkeypatch.setattr(stat_lines, "read_line", lambda host, pid: state_line(left.pop(0)))
    monkeypatch.setattr(stat_lines, "living_thread", lambda host, line: None)
    target = target_of("zombie-context")
    assert hung.shown(HOST, target, sleep=waits.append)[0] == shown
    assert waits == ([hung.HUNG_SECONDS] if states.startswith("D") else [])


def test_who_only_inherited_from_the_dead_is_shown_to_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heir = replace(row("zombie-context"), inherited_from=77, listed=False)
    target = replace(target_of("zombie-context"), rows=(heir,))
    monkeypatch.setattr(stat_lines, "read_one", lambda host, pid: None)
    assert hung.shown(HOST, target)[0]
    monkeypatch.setattr(stat_lines, "read_one", lambda host, pid: state_line("S"))
    monkeypatch.setattr(stat_lines, "read_line", lambda host, pid: state_line("S"))
    assert not hung.shown(HOST, target)[0]


def test_another_verdict_is_never_shown_to_hang() -> None:
    assert hung.shown(HOST, target_of("cryptominer")) == (False, "")


def test_an_archive_of_another_exec_is_none_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Evidence(Settings(host=HOST, evidence_directory=str(tmp_path)))
    monkeypatch.setattr(writing, "written_before", lambda *a, **b: "/evidence/a.tar")
    for archived, there in (
        (IDENTITY, "/evidence/a.tar"),
        (replace(IDENTITY, exec_count=2), ""),
        (replace(IDENTITY, exec_count=None), ""),
        (replace(IDENTITY, exe_inode=8), ""),
        (None, ""),
    ):
        monkeypatch.setattr(evidence_step, "_identity_in", lambda path, one=archived: one)
        assert step.before(target_of("cryptominer")) == there
