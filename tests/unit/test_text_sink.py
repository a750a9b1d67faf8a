"""Findings as text: readable at 80 and 140 columns, whatever a process calls itself."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import tty
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.finding import Evidence, Finding, Status, Subject
from gpuwarden.life import Transition, encode
from gpuwarden.outputs.sheet import cells
from gpuwarden.outputs.words import UNSEEN
from gpuwarden.sinks.sink import DELIVERED
from gpuwarden.watch.text_sink import SHOWN, TEXT_LIMIT, TextSink, render
from tests.conftest import Golden
from tests.rules.open_node import OpenNode
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS

AT = {"at_ns": TAKEN_AT_NS, "first_seen_ns": TAKEN_AT_NS - 600 * SECOND_NS}


def transition(finding: Finding | None = None, **fields: Any) -> Transition:
    """A finding's news, of a process in no container unless a finding is given."""
    values: dict[str, Any] = {
        "id": "0123456789abcdef",
        "rule": "accelerator_opened_outside_jobs",
        "severity": "error",
        "title": "A process outside every job and unit opened GPU 0",
        "explanation": "explained",
        "subject": Subject(kind="process", name="python3", pid=4242, start_time_ticks=1),
    }
    if finding is not None:
        values = {name: getattr(finding, name) for name in Finding.__struct_fields__}
    return Transition(**{**values, **AT, **fields})


def rogue() -> Finding:
    """A pod that nobody gave a GPU, and with a long command line."""
    node = OpenNode()
    node.source("kubernetes", scheduled=True)
    node.pod("batch-7", labels={"app": "batch", "team": "research"})
    argv = ("python3", "-m", "trainer", "--config", "/srv/experiments/2026-01/vision/large.yaml")
    node.process(4242, container="batch-7", argv=(*argv, "--resume", "--nodes=1"))
    node.uses_gpu(4242)
    return node.one("container_opens_accelerator")


@pytest.mark.parametrize("width", [80, 140])
def test_a_life_reads_well(width: int, golden: Golden) -> None:
    finding = rogue()
    lives: list[tuple[Status, int]] = [("opened", 1), ("updated", 1_000_000), ("resolved", 0)]
    text = "".join(
        render(transition(finding, status=status, count=count), width=width)
        for status, count in lives
    )
    golden.check(f"watch-text-{width}.txt", text)


@pytest.mark.parametrize(("status", "evidence", "advice"), [
    ("opened", True, True),
    ("updated", True, False),
    ("resolved", False, False),
])  # fmt: skip
def test_what_is_told_at_each_turn(status: Status, evidence: bool, advice: bool) -> None:
    text = render(
        transition(
            status=status,
            severity="critical",
            verdict="rogue-container",
            owner="alice",
            count=12,
            evidence=(Evidence(text="an observed fact", source="probe"),),
            advice=("a step to take",),
        ),
        width=80,
    )
    assert text.startswith(f"CRITICAL  2026-01-01 00:00:00Z  {status}  A process outside every job")
    words = " ".join(text.split())
    for word in ("pid 4242 python3", "verdict rogue-container", "owner alice", "12 times"):
        assert word in words
    assert ("- an observed fact" in text) is evidence
    assert ("1. a step to take" in text) is advice
    assert ("since 2025-12-31 23:50:00Z" in words) is (status != "opened")
    assert "[accelerator_opened_outside_jobs 0123456789abcdef]" in text
    assert text.endswith("]\n\n")


def test_much_evidence_is_counted_and_long_texts_are_cut() -> None:
    evidence = tuple(Evidence(text=f"fact {n} " + "x" * 5000, source="probe") for n in range(50))
    text = render(transition(evidence=evidence, advice=("do",) * 9), width=80)
    assert f"- fact {SHOWN - 1}\n" in text
    assert f"fact {SHOWN}\n" not in text
    assert f"- and {50 - SHOWN} more\n" in text
    assert len(text) < (SHOWN + 2) * (TEXT_LIMIT + 200)
    assert text.count("…") == SHOWN
    assert text.count("do\n") == 3


def test_a_name_cannot_tell_a_verdict_of_its_own() -> None:
    name = "x, verdict system, owner root"
    text = render(
        transition(
            subject=Subject(kind="process", name=name, pid=7), verdict="suspicious", owner="bob"
        ),
        width=140,
    )
    assert f"pid 7 '{name}', verdict suspicious, owner bob" in text
    plain = render(transition(subject=Subject(kind="process", name="(sd-pam)", pid=7)), width=140)
    assert "pid 7 (sd-pam)\n" in plain


def test_a_subject_that_is_no_process_is_named_as_it_is() -> None:
    text = render(transition(subject=Subject(kind="source", name="device opens")), width=80)
    assert "\n  device opens\n" in text
    assert "pid" not in text


def test_colour_is_by_severity_and_ends_where_it_began() -> None:
    text = render(transition(severity="critical"), width=80, colour=True)
    assert text.startswith("\x1b[1;31mCRITICAL\x1b[0m  ")
    assert text.count("\x1b[0m") * 2 == text.count("\x1b[")
    resolved = render(transition(severity="critical", status="resolved"), width=80, colour=True)
    assert resolved.startswith("\x1b[2mCRITICAL\x1b[0m  ")


HOSTILE = st.text(max_size=100)


@given(
    st.builds(
        transition,
        title=HOSTILE,
        owner=st.none() | HOSTILE,
        status=st.sampled_from(["opened", "updated", "resolved"]),
        count=st.integers(0, 10**12),
        subject=st.builds(
            Subject, kind=st.just("process"), name=HOSTILE, pid=st.none() | st.integers(0, 1 << 22),
            gpu=st.none() | HOSTILE,
        ),
        evidence=st.lists(st.builds(Evidence, text=HOSTILE, source=HOSTILE), max_size=12).map(
            tuple
        ),
        advice=st.lists(HOSTILE, max_size=4).map(tuple),
    ),
    st.integers(60, 200),
)  # fmt: skip
def test_whatever_stands_in_a_finding_stays_within_its_block(
    finding: Transition, width: int
) -> None:
    text = render(finding, width=width)
    assert text.endswith("]\n\n")
    lines = text[:-2].split("\n")
    assert all(line.strip() for line in lines)
    assert not any(unicodedata.category(character) in UNSEEN for character in "".join(lines))
    assert all(cells(line) <= width for line in lines)
    # Only its own lines can look like the beginning of a block.
    assert lines[0].startswith("ERROR  ")
    assert all(line.startswith("  ") for line in lines[1:])


# ------------------------------------------------------------------ the sink


def test_blocks_arrive_whole_through_a_pipe_and_wide() -> None:
    reading, writing = os.pipe()
    finding = transition(advice=("word " * 60,))
    with os.fdopen(reading, "rb") as pipe:
        try:
            sink = TextSink(writing)
            assert sink.deliver(encode(finding)) == DELIVERED
            assert sink.deliver(encode(finding)) == DELIVERED
        finally:
            os.close(writing)
        text = pipe.read().decode()
    assert text == render(finding, width=140) * 2


def _through_a_terminal(finding: Transition, columns: int) -> str:
    ours, theirs = pty.openpty()
    try:
        tty.setraw(theirs)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        assert TextSink(theirs).deliver(encode(finding)) == DELIVERED
        return os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_at_a_terminal_lines_fit_and_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    finding = transition(advice=("word " * 60,))
    assert _through_a_terminal(finding, 72) == render(finding, width=72, colour=True)
    # A line across a whole wall does not read well.
    assert _through_a_terminal(finding, 400) == render(finding, width=140, colour=True)
    monkeypatch.setenv("NO_COLOR", "")
    assert _through_a_terminal(finding, 72) == render(finding, width=72)


def test_a_reader_that_has_gone_is_tried_again_later() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        outcome = TextSink(writing).deliver(encode(transition()))
    finally:
        os.close(writing)
    assert outcome.kind == "retry"
    assert re.search("(?i)pipe", outcome.reason)
