"""Since when: what one snapshot knows of the past, in order, with what it does not know."""

from __future__ import annotations

import pytest

from gpuwarden import history
from gpuwarden.errors import UsageError
from gpuwarden.history import Asked
from gpuwarden.model import AccountedProcess
from gpuwarden.policy import Policy
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS, NodeBuilder, gpu_id

RECORDING = "node.json"
"""Of another machine, perhaps: this one's memory has nothing to say of it."""


def lines_of(node: NodeBuilder, asked: Asked) -> tuple[list[str], bool]:
    told = history.tell(node.snapshot(), Policy(), asked)
    assert told.complaint == ""
    return told.text.splitlines(), told.found


def of_pid(node: NodeBuilder, pid: int) -> tuple[list[str], bool]:
    return lines_of(node, Asked(pid=pid, recording=RECORDING))


def of_gpu(node: NodeBuilder, gpu: str) -> tuple[list[str], bool]:
    return lines_of(node, Asked(gpu=gpu, recording=RECORDING))


def test_a_process_tells_its_start_its_parents_its_job_and_its_faults_in_order(
    node: NodeBuilder,
) -> None:
    path = node.job("7", ["index:0"], started_at_ns=TAKEN_AT_NS - 7000 * SECOND_NS)
    node.process(
        9, ppid=0, started_at_ns=TAKEN_AT_NS - 6000 * SECOND_NS, exe="/bin/bash", role="ancestor"
    )
    node.process(10, ppid=9, cgroup=path)
    node.client(10)
    node.xid(31, pid=10, message="MMU fault")
    node.xid(13, pid=10, at_ns=TAKEN_AT_NS - 9000 * SECOND_NS, message="of an earlier process")
    lines, found = of_pid(node, 10)
    assert found
    assert lines[0] == "pid 10: since 2025-12-31 23:00:00Z, 1 h 0 min ago"
    assert lines[1] == "  on GPU 0: pid 10, expected"
    told = [line.split("Z  ")[1] for line in lines if "Z  " in line]
    assert told == [
        "job 7 started (alice)",
        "ancestor pid 9 started: /bin/bash",
        "pid 10 started: /usr/bin/python3.11",
        "Xid 31 named this pid: MMU fault",
        "this snapshot",
    ]


def test_what_is_not_known_is_said_to_be_unknown(node: NodeBuilder) -> None:
    node.client(10)
    lines, found = of_pid(node, 10)
    assert found
    assert lines[0] == "pid 10: since when is not known"
    assert any("accounting is off" in line for line in lines)


def test_a_pid_that_is_not_in_the_snapshot_is_not_found(node: NodeBuilder) -> None:
    lines, found = of_pid(node, 77)
    assert not found
    assert lines == ["pid 77: not on a GPU in this snapshot, and nothing of it is recorded"]


def test_a_gpu_tells_who_used_it_and_what_it_logged(node: NodeBuilder) -> None:
    node.accounted.append(
        AccountedProcess(
            gpu_id=gpu_id(1),
            pid=5,
            started_at_ns=TAKEN_AT_NS - 8000 * SECOND_NS,
            busy_ms=65_000,
            memory_max_bytes=3 << 30,
            running=False,
        )
    )
    node.process(10)
    node.client(10, 1)
    node.client(11, 1)
    node.xid(79, 1)
    node.xid(79, 2, message="of another GPU")
    lines, found = of_gpu(node, "1")
    assert found
    assert lines[0] == "GPU 1: Test GPU 80GB"
    text = "\n".join(lines)
    assert (
        "pid 5 began to use GPU 1 (driver's accounting; ended, busy 65 s, at most 3.0 GiB)" in text
    )
    assert "unknown               pid 11 is listed; its start is not known" in text
    assert "Xid 79: Xid 79 of the test" in text
    assert "of another GPU" not in text
    assert "accounting is off" not in text
    assert of_gpu(node, gpu_id(1))[0] == lines


def test_an_event_of_no_address_belongs_to_no_gpu() -> None:
    node = NodeBuilder()
    node.gpu(0, pci_address=None)
    node.xid(79, pci_address=None)
    assert "Xid" not in "\n".join(of_gpu(node, "0")[0])


def test_a_gpu_that_is_not_there_is_a_usage_error_that_names_those_that_are(
    node: NodeBuilder,
) -> None:
    with pytest.raises(UsageError, match="no GPU is called '9'; there are: 0, 1, 2"):
        of_gpu(node, "9")


def test_control_characters_are_escaped(node: NodeBuilder) -> None:
    node.process(10, exe="/tmp/\x1b[2J")
    node.client(10)
    assert "\x1b" not in "\n".join(of_pid(node, 10)[0])
