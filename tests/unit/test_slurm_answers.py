"""What Slurm's commands print of queues, nodes and settings, and what any bytes give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.expected.slurm.answers import (
    NodeState,
    QueuedJob,
    parse_node_state,
    parse_queue,
    parse_settings,
    seconds_of,
)
from gpuwarden.expected.slurm.draining import REASON_LIMIT, reason_argument

HEADER = b"JOBID|STATE|UID|PRIORITY|REASON\n"
NODE = b"""NodeName=gpu-007 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=1 CPUEfctv=4 CPUTot=4 CPULoad=0.40
   State=MIXED+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu
   Reason=fan State=IDLE [root@2026-11-30T23:18:01]

"""


def test_a_queue_tells_who_holds_each_job() -> None:
    rows = (
        b"4|PENDING|65534|0|JobHeldAdmin\n3|PENDING|65534|0|JobHeldUser\n"
        b"2|PENDING|1000|4294901758|Priority\n1|RUNNING|1000|4294901759|None\n"
        b"5|PENDING|1000|0|launch failed requeued held\n"
    )
    assert parse_queue(HEADER + rows) == [
        QueuedJob("4", "PENDING", 65534, "admin"),
        QueuedJob("3", "PENDING", 65534, "user"),
        QueuedJob("2", "PENDING", 1000, "none"),
        QueuedJob("1", "RUNNING", 1000, "none"),
        QueuedJob("5", "PENDING", 1000, "admin"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"2|PENDING|1000|1|None\n",
        HEADER + b"2|PENDING|1000|1|None",
        HEADER + b"2|PENDING|1000\n",
        HEADER + b"x|PENDING|1000|1|None\n",
        HEADER + b"2|PENDING|-1|1|None\n",
    ],
)
def test_a_queue_that_is_cut_or_is_none_is_no_answer(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_queue(data)


def test_an_empty_queue_is_one_with_its_header() -> None:
    assert parse_queue(HEADER) == []


def test_a_node_has_one_state_whatever_its_reason_says() -> None:
    state = parse_node_state(NODE, "gpu-007")
    assert state == NodeState(("MIXED", "DRAIN"), "fan State=IDLE [root@2026-11-30T23:18:01]")
    assert state.is_drained
    assert not state.is_down
    down = parse_node_state(NODE.replace(b"MIXED+DRAIN", b"DOWN*"), "gpu-007")
    assert down.is_down
    assert not down.is_drained


def test_another_node_s_answer_and_two_states_are_no_answer() -> None:
    for data, name in (
        (NODE, "gpu-008"),
        (NODE, "gpu-00"),
        (NODE + b"   State=IDLE ThreadsPerCore=1\n", "gpu-007"),
        (NODE.replace(b"   State=MIXED", b"   Stat=MIXED"), "gpu-007"),
    ):
        with pytest.raises(Malformed):
            parse_node_state(data, name)


def test_settings_are_read_by_name() -> None:
    data = (
        b"Configuration data as of 2026-11-30T23:18:01\nProlog                  = (null)\n"
        b"PrologEpilogTimeout     = 65534\nBatchStartTimeout       = 10 sec\nPrologFlags = Alloc\n"
    )
    found = parse_settings(data)
    assert found["Prolog"] == ""
    assert found["PrologFlags"] == "Alloc"
    assert seconds_of(found["BatchStartTimeout"]) == 10
    assert seconds_of(found["PrologEpilogTimeout"]) is None
    with pytest.raises(Malformed):
        parse_settings(b"slurm_load_ctl_conf error: Unable to contact slurm controller\n")


@given(
    st.one_of(st.binary(max_size=400), st.binary(max_size=300).map(lambda b: HEADER + b + b"\n"))
)
def test_any_bytes_are_a_queue_or_malformed(data: bytes) -> None:
    try:
        for job in parse_queue(data):
            assert job.id.isdigit()
    except Malformed:
        pass


@given(
    st.one_of(
        st.binary(max_size=400),
        st.tuples(st.integers(0, len(NODE)), st.binary(max_size=20)).map(
            lambda cut: NODE[: cut[0]] + cut[1] + NODE[cut[0] :]
        ),
    )
)
def test_any_bytes_are_a_node_settings_or_malformed(data: bytes) -> None:
    for parse in (lambda: parse_node_state(data, "gpu-007"), lambda: parse_settings(data)):
        try:
            parse()
        except Malformed:
            pass


@given(st.text(max_size=600))
def test_a_reason_is_one_plain_word_for_scontrol(text: str) -> None:
    argument = reason_argument(text)
    assert argument.startswith("reason=")
    assert len(argument) <= REASON_LIMIT + 7
    assert argument.isascii()
    assert argument.isprintable()
    assert not set(argument) & set("\"'\\")
