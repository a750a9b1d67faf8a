"""`gpuwarden watch --falco-listen`: what Falco says of real containers becomes findings of ours."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.sensors.falco import GPU_RULE
from tests.support.containers import Podman, busybox_root, no_new_cgroups, podman
from tests.support.packages import require, require_root
from tests.support.probes import build, node
from tests.support.watching import GPU, PATIENT, SECONDS, Watching, stopped, watching

pytestmark = pytest.mark.real

IMAGE = "localhost/gpuwarden-watch-falco:1"
RULE = "container_opens_accelerator"
TOKEN = "a-token-for-tests"
HELD = "exec 3<$NODE; exec sleep 1000"
SHORT = "exec 3<$NODE; exec 3<&-; exec sleep 1000"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require_root()
    require("podman", "runc", "busybox-static")
    build()
    with no_new_cgroups():
        yield tmp_path_factory.mktemp("f")


@pytest.fixture(scope="module")
def engine(scratch: Path) -> Iterator[Podman]:
    with podman(scratch / "podman") as engine:
        engine.import_image(busybox_root(scratch / "root"), IMAGE)
        yield engine


@pytest.fixture(scope="module")
def gpu(scratch: Path) -> Iterator[Path]:
    """A node of the GPU that this host has in a folder for NVIDIA's, under a name like theirs."""
    folder = Path(f"/dev/nvidia-gpuwarden-{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        yield node(folder / "gpu", GPU)
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.fixture(scope="module")
def probing_agent(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[Watching]:
    arguments = ("--falco-listen", "127.0.0.1:0", "--events")
    with watching(tmp_path_factory.mktemp("b"), *arguments, program=PATIENT) as agent:
        yield agent


@pytest.fixture(scope="module")
def polling_agent(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[Watching]:
    """It sees what is held when it looks, and nothing else but by Falco."""
    directory = tmp_path_factory.mktemp("p")
    token = directory / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with watching(
        directory, "--falco-listen", "127.0.0.1:0", "--falco-token-file", str(token),
        "--way", "poll", "--events", program=("tests.support.quick_watch", "0.3", "60"),
    ) as agent:  # fmt: skip
        yield agent


@pytest.fixture
def start(engine: Podman, gpu: Path) -> Callable[[str], tuple[str, int]]:
    """Starts a container with the GPU that runs a script; its id and its first process."""

    def started(script: str) -> tuple[str, int]:
        words = ("sh", "-c", script.replace("$NODE", str(gpu)))
        identity = engine.start(IMAGE, "--device", f"{gpu}:{gpu}", command=words)
        pid = engine.pid(identity)
        end = time.monotonic() + SECONDS
        while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < end, "it did not come to its end"
            time.sleep(0.01)
        return identity, pid

    return started


def address(agent: Watching) -> str:
    said = "Falco's events are taken at "
    agent.wait(lambda: said in agent.errors, "the listener")
    return agent.errors.split(said)[1].split()[0]


def post(agent: Watching, body: bytes, *, token: str = "") -> int:
    """The answer's status."""
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(address(agent), body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def told(gpu: Path, identity: str, **more: Any) -> bytes:
    """What the rule of Falco's catalogue says about a container; it names no pid by itself."""
    fields = {
        "container.id": identity[:12],
        "evt.time": time.time_ns(),
        "evt.type": "open",
        "fd.name": str(gpu),
        "proc.cmdline": "sleep 1000",
        "proc.exepath": "/bin/busybox",
        "proc.name": "sleep",
        "proc.pname": None,
        "proc.tty": 0,
        "user.loginuid": -1,
        "user.name": "root",
        "user.uid": 0,
        **more,
    }
    return json.dumps(
        {
            "hostname": os.uname().nodename,
            "output": "01:02:03.000000000: Critical Container accessing GPU device",
            "output_fields": fields,
            "priority": "Critical",
            "rule": GPU_RULE,
            "source": "syscall",
            "tags": ["T1496", "container"],
            "time": "2026-01-01T00:00:00.000000000Z",
        }
    ).encode()


def finding(agent: Watching, engine: Podman, identity: str, pid: int) -> dict[str, Any]:
    agent.wait(lambda: agent.findings(RULE, pid), "the finding")
    found = agent.findings(RULE, pid)
    assert len({one["id"] for one in found}) == 1
    words = json.dumps(found[-1])
    assert IMAGE in words
    assert engine("inspect", "--format", "{{.Name}}", identity) in words
    return found[-1]


def opens(agent: Watching, pid: int) -> list[dict[str, Any]]:
    """Not the mknod of the runtime, which is the same process before it becomes the container."""
    return [one for one in agent.events(pid) if one["how"] == "open"]


def test_what_probe_and_falco_both_saw_is_one_finding(
    probing_agent: Watching, engine: Podman, gpu: Path, start: Callable[[str], tuple[str, int]]
) -> None:
    agent = probing_agent
    identity, pid = start(HELD)
    by_probe = finding(agent, engine, identity, pid)
    agent.wait(lambda: opens(agent, pid), "its event")
    assert post(agent, told(gpu, identity, **{"proc.pid": pid})) == 200
    assert post(agent, told(gpu, identity)) == 200
    # One that only Falco tells of comes after them, in the same queue.
    other, other_pid = start("exec sleep 1000")
    assert post(agent, told(gpu, other, **{"proc.pid": other_pid})) == 200
    finding(agent, engine, other, other_pid)
    assert finding(agent, engine, identity, pid)["id"] == by_probe["id"]
    # Events are told in their order: another one of the first container would be there.
    agent.wait(lambda: opens(agent, other_pid), "the other's event")
    assert [one["source"] for one in opens(agent, pid)] == ["cgroup/dev"]
    assert [one["source"] for one in opens(agent, other_pid)] == ["falco"]


@pytest.mark.parametrize("with_pid", [True, False], ids=["with proc.pid", "as the stock rule"])
def test_falco_alone_brings_an_open_that_a_poll_misses(
    polling_agent: Watching,
    engine: Podman,
    gpu: Path,
    start: Callable[[str], tuple[str, int]],
    with_pid: bool,
) -> None:
    agent = polling_agent
    # It looks at no moment at which the node is open.
    with stopped(agent.pid):
        identity, pid = start(SHORT)
    more = {"proc.pid": pid} if with_pid else {}
    assert post(agent, told(gpu, identity, **more)) == 401
    assert post(agent, told(gpu, identity, **more), token=TOKEN) == 200
    found = finding(agent, engine, identity, pid)
    assert "opened" in json.dumps(found["evidence"])
    (event,) = agent.wait_for_events(pid)
    assert (event["source"], event["state"]) == ("falco", "opened")
    assert event["container"]["id"] == identity
    # Nobody else tells that it ends.
    engine("rm", "--force", "--time", "0", identity)
    agent.wait(
        lambda: agent.findings(RULE, pid)[-1]["status"] == "resolved", "the finding's end", 60
    )


def test_a_process_that_is_gone_is_told(probing_agent: Watching, gpu: Path) -> None:
    agent, rule = probing_agent, "falco_open_unmatched"
    process = subprocess.Popen(["true"])
    process.wait()
    identity = secrets.token_hex(32)
    assert post(agent, told(gpu, identity, **{"proc.pid": process.pid})) == 200

    def about_it() -> list[dict[str, Any]]:
        return [one for one in agent.findings(rule) if identity[:12] in one["subject"]["name"]]

    agent.wait(about_it, "the finding")
    assert "had ended" in json.dumps(about_it()[0]["evidence"])
    assert not agent.findings(RULE, process.pid)
    # Whoever posts makes up no more than a few.
    for _ in range(50):
        assert post(agent, told(gpu, secrets.token_hex(32), **{"proc.pid": process.pid})) == 200
    agent.wait(
        lambda: any("other processes" in one["subject"]["name"] for one in agent.findings(rule)),
        "those that are told together",
    )
    assert len({one["id"] for one in agent.findings(rule)}) <= 9


def test_what_falco_lost_is_told(probing_agent: Watching) -> None:
    agent, rule = probing_agent, "falco_events_dropped"
    name = f"node-{secrets.token_hex(4)}"
    body = {
        "hostname": name,
        "output": "Falco internal: syscall event drop. 7 system calls dropped in last second.",
        "output_fields": {"n_drops": "7", "n_evts": "100"},
        "priority": "Debug",
        "rule": "Falco internal: syscall event drop",
        "time": "2026-01-01T00:00:00.000000000Z",
    }
    assert post(agent, json.dumps(body).encode()) == 200

    def about_it() -> list[dict[str, Any]]:
        return [one for one in agent.findings(rule) if name in one["subject"]["name"]]

    agent.wait(about_it, "the finding")
    assert "7 system calls lost" in json.dumps(about_it()[0]["evidence"])


@pytest.mark.parametrize("body", [b"", b"\xff\x00{", b"[" * 100_000, b"{}", b'{"rule": 7}'])
def test_garbage_is_answered_for_and_the_agent_lives(probing_agent: Watching, body: bytes) -> None:
    agent = probing_agent
    assert post(agent, body) in (400, 411)
    assert post(agent, json.dumps({"rule": "A rule", "priority": "Notice"}).encode()) == 200
    assert agent.process.poll() is None


def test_events_of_another_machine_are_nobodys_here(
    probing_agent: Watching, engine: Podman, gpu: Path, start: Callable[[str], tuple[str, int]]
) -> None:
    agent = probing_agent
    _, pid = start("exec sleep 1000")
    elsewhere = json.loads(told(gpu, "ab" * 32, **{"proc.pid": pid}))
    elsewhere["hostname"] = "another-machine"
    assert post(agent, json.dumps(elsewhere).encode()) == 200
    identity, after = start("exec sleep 1000")
    assert post(agent, told(gpu, identity, **{"proc.pid": after})) == 200
    finding(agent, engine, identity, after)
    assert not agent.findings(RULE, pid)
