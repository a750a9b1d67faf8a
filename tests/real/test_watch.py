"""A real `gpuwarden watch`: each way of using a device becomes the right finding, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.packages import require_root
from tests.support.probes import build, node
from tests.support.watching import GPU, NOT_THERE, Watching, watching

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require_root()
    build()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    with watching(tmp_path_factory.mktemp("watch"), "--events", "--limit", "0") as agent:
        yield agent


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A node of the GPU under a name that is not its own."""
    return node(tmp_path / "cat.jpg", GPU)


def hold(path: Path) -> subprocess.Popen[bytes]:
    """A process that opens the node, says so, and keeps it until its input ends."""
    program = (
        "import os, sys\n"
        f"held = os.open({str(path)!r}, os.O_RDONLY)\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


RECEIVER = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
connection, _ = server.accept()
_, held, _, _ = socket.recv_fds(connection, 1, 1)
print("held", flush=True)
sys.stdin.read()
"""
SENDER = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
socket.send_fds(connection, [b"x"], [os.open(sys.argv[2], os.O_RDONLY)])
"""


@contextmanager
def passed(gpu: Path, folder: Path) -> Iterator[int]:
    """A process that has the node open because a stranger passed it its descriptor; its pid."""
    address = str(folder / "s")
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        subprocess.run([sys.executable, "-c", SENDER, address, str(gpu)], check=True)
        assert receiver.stdout.readline() == b"held\n"
        yield receiver.pid


def test_another_name_is_told_with_who_and_becomes_opened(agent: Watching, gpu: Path) -> None:
    process = hold(gpu)
    try:
        rule = "accelerator_opened_by_other_name"
        agent.wait(lambda: agent.findings(rule, process.pid), "the finding")
        told = agent.findings(rule, process.pid)
        assert {one["id"] for one in told} == {told[0]["id"]}
        evidence = json.dumps(told[0]["evidence"])
        assert str(gpu) in evidence
        assert os.path.realpath(sys.executable) in evidence
        (event,) = [one for one in agent.wait_for_events(process.pid) if one["how"] == "open"]
        assert event["state"] == "opened"
        assert event["device"]["path"] == str(gpu)
        assert event["process"]["argv"][0] == sys.executable
        assert event["process"]["exe"] == os.path.realpath(sys.executable)
        assert event["parent"]["pid"] == os.getpid()
        assert event["container"]["state"] == "none"
    finally:
        end(process)


def test_a_number_without_a_device_stays_an_attempt(
    agent: Watching, opener: Path, tmp_path: Path
) -> None:
    path = node(tmp_path / "nvidia7", NOT_THERE)
    process = subprocess.Popen([str(opener), "open", str(path)], stdout=subprocess.DEVNULL)
    process.wait()
    (event,) = agent.wait_for_events(process.pid)
    assert event["state"] == "attempted"
    assert (event["device"]["major"], event["device"]["minor"]) == NOT_THERE


def test_a_node_made_by_hand_is_told(agent: Watching, tmp_path: Path) -> None:
    path = tmp_path / "made"
    maker = subprocess.Popen(["mknod", str(path), "c", str(GPU[0]), str(GPU[1])])
    maker.wait()
    agent.wait(lambda: agent.findings("accelerator_node_made", maker.pid), "the finding")
    told = agent.findings("accelerator_node_made", maker.pid)
    assert "mknod" in json.dumps(told[0]["evidence"])


def test_an_open_through_io_uring_is_told(agent: Watching, opener: Path, gpu: Path) -> None:
    process = subprocess.Popen([str(opener), "uring", str(gpu)], stdout=subprocess.PIPE)
    process.communicate()
    events = agent.wait_for_events(process.pid)
    assert any(event["io_uring"] for event in events)


def test_a_fork_that_inherited_is_seen_and_accuses_nobody(
    agent: Watching, opener: Path, gpu: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [str(opener), "inherit", str(gpu)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline().split()[1])
    process.wait()
    try:
        agent.wait(lambda: [e for e in agent.events(pid) if e["how"] == "held"], "the event")
        # Its parent has ended, as a launcher's does; data loaders come by a device in this way.
        # One that comes later is told: then this one's would have been.
        with passed(gpu, tmp_path) as other:
            agent.wait(lambda: agent.findings("holder_without_open", other), "another's finding")
        assert agent.findings("holder_without_open", pid) == []
    finally:
        os.kill(pid, 9)


def test_a_descriptor_that_was_passed_by_a_stranger_is_a_finding(
    agent: Watching, gpu: Path, tmp_path: Path
) -> None:
    rule = "holder_without_open"
    with passed(gpu, tmp_path) as pid:
        agent.wait(lambda: agent.findings(rule, pid), "the finding")
        assert agent.findings(rule, pid)[0]["severity"] == "error"
        assert any(event["how"] == "held" for event in agent.wait_for_events(pid))


def test_processes_that_live_a_moment_are_all_seen_in_full(
    agent: Watching, opener: Path, gpu: Path
) -> None:
    pids = []
    for _ in range(500):
        process = subprocess.Popen(
            [str(opener), "open", str(gpu)], stdout=subprocess.DEVNULL, close_fds=False
        )
        process.wait()
        pids.append(process.pid)
    wanted = set(pids)

    def seen() -> dict[int, dict[str, object]]:
        return {
            event["process"]["pid"]: event["process"]
            for event in agent.events()
            if event["process"]["pid"] in wanted
        }

    agent.wait(lambda: len(seen()) == 500, "all events", 60)
    for process_seen in seen().values():
        assert process_seen["exe"] == str(opener)
        assert process_seen["argv"] == [str(opener), "open", str(gpu)]


def test_a_flood_is_one_finding_with_an_exact_count(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    rule = "accelerator_opened_by_other_name"
    # Long enough for the kernel's own count, which is asked for ten seconds later at the latest.
    quick = ("tests.support.quick_watch", "12", "60")
    with watching(tmp_path, program=quick) as agent:
        flood = subprocess.Popen(
            [str(opener), "open", str(gpu), "100000"], stdout=subprocess.PIPE, text=True
        )
        out, _ = flood.communicate()
        assert int(out.split()[0]) == 100_000
        other = hold(gpu)
        agent.wait(lambda: agent.findings(rule, other.pid), "the other process's finding")
        end(other)

        def over() -> list[int]:
            told = agent.findings(rule, flood.pid)
            return [one["count"] for one in told if one["status"] == "resolved"]

        agent.wait(over, "the end of the finding", 60)
        assert over() == [100_000]
        assert len({one["id"] for one in agent.findings(rule, flood.pid)}) == 1


def test_polling_says_that_it_is_a_poll_and_sees_a_holder(tmp_path: Path, gpu: Path) -> None:
    with watching(tmp_path, "--way", "poll", "--interval", "0.2", "--events") as agent:
        agent.wait(lambda: agent.findings("device_opens_polled"), "saying so")
        process = hold(gpu)
        agent.wait(lambda: agent.events(process.pid), "the event")
        (event,) = agent.events(process.pid)
        assert (event["state"], event["source"]) == ("opened", "proc poll")
        assert agent.findings("holder_without_open") == []
        end(process)


def test_the_agent_does_not_tell_of_itself(agent: Watching) -> None:
    own = {agent.pid}
    for line in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        own.add(int(line))
    assert not [event for event in agent.events() if event["process"]["pid"] in own]


def test_doctor_says_how_opens_would_be_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "doctor", "--format", "json"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": "src"},
        check=False,
    )
    opens = json.loads(done.stdout)["opens"]
    assert (opens["state"], opens["reason"]) == ("ok", "by eBPF (cgroup/dev)")


def test_metrics_and_health_are_served(tmp_path: Path, gpu: Path) -> None:
    with watching(tmp_path, "--metrics", "127.0.0.1:0") as agent:
        agent.wait(lambda: "metrics at" in agent.errors, "the endpoint")
        url = agent.errors.split("metrics at ")[1].split()[0]
        process = hold(gpu)

        def told() -> bool:
            text = urllib.request.urlopen(url, timeout=5).read().decode()
            return 'gpuwarden_events_total{kind="open"' in text

        agent.wait(told, "the count of opens")

        def is_healthy() -> bool:
            try:
                health = urllib.request.urlopen(url.replace("/metrics", "/healthz"), timeout=5)
            except urllib.error.HTTPError:
                return False  # nothing was sampled or judged yet
            with health:
                return bool(health.status == 200)

        agent.wait(is_healthy, "health")
        end(process)


def test_a_restart_repeats_no_alarm_and_leaves_no_gap(tmp_path: Path, gpu: Path) -> None:
    rule = "accelerator_opened_by_other_name"
    with watching(tmp_path) as agent:
        process = hold(gpu)
        agent.wait(lambda: agent.findings(rule, process.pid), "the finding")
        os.kill(agent.pid, 9)
        agent.process.wait()
    with watching(tmp_path) as agent:
        second = hold(gpu)
        agent.wait(lambda: agent.findings(rule, second.pid), "the second finding")
        mine = [one for one in agent.findings(rule, process.pid) if one["status"] == "opened"]
        assert len({one["sequence"] for one in mine}) == 1
        sequences = sorted({one["sequence"] for one in agent.findings()})
        assert sequences == list(range(1, len(sequences) + 1))
        end(second)
    end(process)
