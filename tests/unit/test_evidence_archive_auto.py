"""Archives that `watch` writes by itself: which findings, how many, and what is told of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.finding import Finding, Subject, finding_id
from gpuwarden.policy import Evidence, Policy
from gpuwarden.watch import evidence_side
from gpuwarden.watch.evidence_side import EvidenceSide
from gpuwarden.watch.options import WatchOptions

SEALED = {
    "schema": "gpuwarden.evidence.sealed",
    "version": 1,
    "path": "/evidence/one.tar",
    "size_bytes": 4096,
    "manifest_sha256": "ab" * 32,
    "fingerprint": "",
    "members": 7,
    "left_out": 2,
    "unread": 1,
}
NOW_NS = 10**18
SECONDS = 20.0


def finding(
    pid: int | None = 4711, rule: str = "gpu_process_cryptominer", **changes: Any
) -> Finding:
    subject = Subject(
        kind="node" if pid is None else "process",
        pid=pid,
        start_time_ticks=None if pid is None else 77,
        boot_id="b",
    )
    fields = {
        "id": finding_id(rule, subject),
        "rule": rule,
        "severity": "critical",
        "title": "t",
        "explanation": "e",
        "subject": subject,
    }
    return Finding(**{**fields, **changes})


class Bench:
    """A side whose children are a shell script; each leaves its arguments in a file."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.said: list[str] = []
        self._program = directory / "program"
        monkeypatch.setattr("sys.executable", str(self._program))
        self.answers()
        self.policy = Policy(evidence=Evidence(when="critical", directory=str(directory / "out")))
        self.side = self.started()

    def started(self, *, is_kept: bool = True) -> EvidenceSide:
        options = WatchOptions(state_directory=str(self.directory), policy_path="/etc/policy")
        return EvidenceSide(options, is_kept=is_kept, say=self.said.append)

    def answers(self, script: str = "") -> None:
        """What a child does; without a script it says that it has written an archive."""
        script = script or f"echo '{json.dumps(SEALED)}'"
        text = f'#!/bin/sh\necho "$@" >>{self.directory}/calls\n{script}\n'
        # A program that is being run cannot be written.
        new = self._program.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o700)
        new.replace(self._program)

    @property
    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def round(self, *findings: Finding, now_ns: int = NOW_NS) -> list[Finding]:
        return self.side.round(findings, self.policy, now_ns)

    def until(
        self, condition: Callable[[list[Finding]], object], *findings: Finding
    ) -> list[Finding]:
        """Rounds until the condition holds of what they give."""
        begun = time.monotonic()
        while not condition(told := self.round(*findings)):
            assert time.monotonic() - begun < SECONDS, (told, self.said)
            time.sleep(0.01)
        return told


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def rules(told: list[Finding]) -> list[str]:
    return [one.rule for one in told]


def test_a_critical_finding_about_a_process_gets_an_archive(bench: Bench) -> None:
    one = finding()
    (told,) = bench.until(len, one)
    assert (told.rule, told.severity, told.subject.kind) == ("evidence_written", "info", "source")
    assert one.id in told.subject.name
    texts = " ".join(evidence.text for evidence in told.evidence)
    assert "/evidence/one.tar" in texts and "2 left out" in texts and "ab" * 32 in texts
    (call,) = bench.calls
    for words in (
        "-P -m gpuwarden evidence 4711 --start-time 77",
        f"--finding {one.id} --by-watch",
        f"--output {bench.directory}/out --max-mib 1024",
        "--boot-id b --policy /etc/policy",
    ):
        assert words in call
    assert any("/evidence/one.tar" in line for line in bench.said)


@pytest.mark.parametrize(
    "one",
    [
        finding(severity="error"),
        finding(silenced_by="exceptions[0]: known"),
        finding(pid=None),
        finding(subject=Subject(kind="process", pid=4711)),
    ],
)
def test_other_findings_get_none(bench: Bench, one: Finding) -> None:
    assert bench.round(one) == [] and bench.round(one) == []
    assert bench.side.pids == set() and bench.calls == []


def test_without_the_policy_there_is_none(bench: Bench) -> None:
    bench.policy = Policy()
    assert bench.round(finding()) == []
    assert bench.side.pids == set()


def test_each_finding_once_over_restarts_too(bench: Bench) -> None:
    one, other = finding(), finding(pid=5)
    bench.until(len, one)
    bench.round(one)
    bench.side = bench.started()
    bench.until(lambda told: len(told) == 1, one, other)
    assert [call.split()[4] for call in bench.calls] == ["4711", "5"]


def test_what_is_not_done_when_it_ends_is_taken_up_again(bench: Bench) -> None:
    bench.answers("exec sleep 60")
    first, second = finding(), finding(pid=5)
    bench.round(first, second)
    (pid,) = bench.side.pids
    bench.side.close()
    assert not os.path.exists(f"/proc/{pid}")
    bench.answers()
    bench.side = bench.started()
    bench.until(lambda told: len(told) == 2, first, second)
    assert [call.split()[4] for call in bench.calls[-2:]] == ["4711", "5"]


def test_one_at_a_time_and_a_process_once(bench: Bench) -> None:
    bench.answers("exec sleep 60")
    bench.round(finding(), finding(rule="another_rule"), finding(pid=5))
    for _ in range(3):
        bench.round(finding(), finding(rule="another_rule"), finding(pid=5))
    assert len(bench.side.pids) == 1
    assert any("has the archive of that process" in line for line in bench.said)
    bench.side.close()
    assert len(bench.calls) <= 1


def test_the_child_yields_to_the_workload(bench: Bench) -> None:
    bench.answers("exec sleep 60")
    bench.round(finding())
    (pid,) = bench.side.pids
    assert os.getpriority(os.PRIO_PROCESS, pid) == evidence_side.PRIORITY
    bench.side.close()


def test_a_crowd_is_bounded_and_told(bench: Bench) -> None:
    bench.answers("exec sleep 60")
    crowd = [finding(pid=pid) for pid in range(1, evidence_side.QUEUE_LIMIT + 4)]
    told = bench.round(*crowd)
    # One is at work only after all have been taken up.
    assert rules(told) == ["evidence_failed"] * 3
    assert "waiting already" in told[0].evidence[0].text
    assert len(bench.round(*crowd)) == 3
    bench.side.close()


def test_what_comes_up_between_rounds_is_begun_at_once(bench: Bench) -> None:
    heard: list[Finding] = []
    observe = bench.side.observing(heard.extend, lambda: bench.policy)
    observe([finding()])
    assert heard == [finding()] and len(bench.side.pids) == 1
    bench.until(len)


def test_a_child_that_fails_is_told_with_its_reason(bench: Bench) -> None:
    bench.answers("echo reading >&2; echo 'gpuwarden: no such process: 4711' >&2; exit 2")
    (told,) = bench.until(len, finding())
    assert (told.rule, told.severity) == ("evidence_failed", "warning")
    assert "no such process: 4711" in told.evidence[0].text
    assert bench.side.pids == set()


def test_a_child_that_says_nothing_is_told(bench: Bench) -> None:
    bench.answers("echo '{'")
    (told,) = bench.until(len, finding())
    assert told.rule == "evidence_failed"


def test_a_child_that_hangs_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_side, "DEADLINE_SECONDS", 0)
    monkeypatch.setattr(evidence_side, "GRACE_SECONDS", 0.2)
    bench.answers("trap '' TERM; while :; do sleep 1; done")
    bench.round(finding())
    (pid,) = bench.side.pids
    (told,) = bench.until(len, finding())
    assert told.rule == "evidence_failed" and "killed" in told.evidence[0].text
    assert not os.path.exists(f"/proc/{pid}")


def test_a_directory_that_is_full_is_told_until_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_side, "ROOM_SECONDS", 0.0)
    out = bench.directory / "out"
    out.mkdir(mode=0o700)
    (out / "old.tar").write_bytes(os.urandom(2 << 20))
    bounds = Evidence(when="critical", directory=str(out), keep_mib=2)
    bench.policy = Policy(evidence=bounds)
    (told,) = bench.round(finding())
    (told,) = bench.round(finding())
    assert told.rule == "evidence_failed" and "keep_mib is 2" in told.evidence[0].text
    assert bench.calls == []
    (out / "old.tar").unlink()
    told_then = bench.until(lambda told: "evidence_written" in rules(told), finding())
    assert rules(told_then) == ["evidence_written"]
    assert "--max-mib 2 " in bench.calls[0]


def test_an_outcome_is_told_for_an_hour(bench: Bench) -> None:
    bench.until(len, finding())
    assert bench.round(now_ns=NOW_NS + evidence_side.TOLD_NS)
    assert bench.round(now_ns=NOW_NS + evidence_side.TOLD_NS + 1) == []


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff", b"[" * 100000])
def test_a_memory_that_does_not_read_is_told(bench: Bench, text: bytes) -> None:
    (bench.directory / evidence_side.MEMORY_FILE).write_bytes(text)
    side = bench.started()
    assert any("does not read" in line for line in bench.said)
    side.close()
