"""Containers that open a GPU's node under a running `gpuwarden watch`: told with who they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.containers import (
    Podman,
    bare_runc,
    busybox_root,
    dockerd,
    no_new_cgroups,
    podman,
    require_docker,
    root_archive,
    run,
)
from tests.support.packages import require, require_root
from tests.support.probes import ROOT, build, node
from tests.support.watching import GPU, PATIENT, Watching, stopped, watching

pytestmark = pytest.mark.real

IMAGE = "localhost/gpuwarden-test:1"
EXCEPTED = "localhost/gpuwarden-excepted:1"
OPENERS_SOURCE = ROOT / "tests/support/openers.c"
RULE = "container_opens_accelerator"


def holding(path: str) -> tuple[str, ...]:
    """A shell that opens a node and becomes a program that keeps it."""
    return ("sh", "-c", f"exec 3<{path}; exec sleep 1000")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require_root()
    require("podman", "runc", "busybox-static")
    build()
    with no_new_cgroups():
        yield tmp_path_factory.mktemp("w")


@pytest.fixture(scope="module")
def root(scratch: Path) -> Path:
    directory = busybox_root(scratch / "root")
    for name in ("mknod", "mkdir", "chmod"):
        (directory / "bin" / name).symlink_to("busybox")
    # Opens what it is told to, under a management tool's name.
    run("gcc", "-O2", "-static", "-o", str(directory / "bin/nvidia-smi"), str(OPENERS_SOURCE))
    return directory


@pytest.fixture(scope="module")
def gpu(scratch: Path) -> Path:
    (scratch / "dev").mkdir()
    return node(scratch / "dev/nvidia0", GPU)


@pytest.fixture(scope="module")
def engine(scratch: Path, root: Path) -> Iterator[Podman]:
    with podman(scratch / "podman") as engine:
        engine.import_image(root, IMAGE)
        yield engine


@pytest.fixture(scope="module")
def policy(scratch: Path, root: Path, engine: Podman) -> Path:
    """A policy that excepts one image by its digest; that image is there."""
    (root / "etc/excepted").touch()
    engine.import_image(root, EXCEPTED)
    digest = engine("image", "inspect", "--format", "{{.Id}}", EXCEPTED)
    path = scratch / "policy.yaml"
    path.write_text(
        "user_known_gpu_workloads:\n"
        "  - reason: an exporter that sees every GPU by design\n"
        f"    match: {{image_digest: 'sha256:{digest}'}}\n"
    )
    return path


@pytest.fixture(scope="module")
def agent(scratch: Path, policy: Path) -> Iterator[Watching]:
    with watching(scratch, "--events", "--policy", str(policy), program=PATIENT) as agent:
        yield agent


class Told:
    """Waits for a finding of a process and notes how long it took from the open itself."""

    def __init__(self, agent: Watching, note: Callable[[str, object], None]) -> None:
        self._agent = agent
        self._note = note

    def __call__(
        self, pid: int, rule: str = RULE, *, until: Callable[[dict[str, Any]], bool] | None = None
    ) -> dict[str, Any]:
        def wanted() -> list[dict[str, Any]]:
            found = self._agent.findings(rule, pid)
            return [one for one in found if until is None or until(one)]

        self._agent.wait(wanted, f"{rule} of {pid}")
        finding = wanted()[0]
        seconds = time.time() - finding["since_ns"] / 1e9
        self._note(f"seconds until {rule}", round(seconds, 3))
        print(f"{rule}: {seconds:.3f} s after the open")
        return finding


@pytest.fixture
def told(agent: Watching, record_property: Callable[[str, object], None]) -> Told:
    return Told(agent, record_property)


def words(finding: dict[str, Any]) -> str:
    return json.dumps(finding["evidence"])


def tells_of(finding: dict[str, Any], *expected: str) -> None:
    for one in expected:
        assert one in words(finding), f"{one} is not in {words(finding)}"


def opens_of(agent: Watching, pid: int) -> list[dict[str, Any]]:
    """The events of a process's opens, once there are any."""

    def opens() -> list[dict[str, Any]]:
        return [one for one in agent.events(pid) if one["how"] == "open"]

    agent.wait(opens, f"an open of {pid}")
    return opens()


def test_a_podman_container_that_was_passed_the_device_is_a_warning(
    agent: Watching, engine: Podman, gpu: Path, told: Told
) -> None:
    identity = engine.start(
        IMAGE, "--device", f"{gpu}:/dev/nvidia0", command=holding("/dev/nvidia0")
    )
    pid = engine.pid(identity)
    finding = told(pid)
    name = engine("inspect", "--format", "{{.Name}}", identity)
    digest = engine("image", "inspect", "--format", "{{.Id}}", IMAGE)
    # A person passed it in, no scheduler hands GPUs out here: unusual, not criminal.
    assert finding["severity"] == "warning"
    tells_of(finding, f"container {name}", f"image {IMAGE}", f"sha256:{digest}", "/dev/nvidia0")
    tells_of(finding, "whoever started it passed GPUs in")
    event = opens_of(agent, pid)[0]
    container = event["container"]
    assert event["process"]["argv"] == list(holding("/dev/nvidia0"))
    assert (container["state"], container["id"], container["name"]) == ("known", identity, name)
    assert (container["image"], container["confirmed"]) == (IMAGE, True)


def test_a_node_that_only_the_runtime_made_is_no_use_of_it(
    agent: Watching, engine: Podman, gpu: Path, told: Told
) -> None:
    idle = engine.pid(engine.start(IMAGE, "--device", f"{gpu}:/dev/nvidia0"))
    (made,) = agent.wait_for_events(idle)
    assert made["how"] == "mknod"
    user = engine.start(IMAGE, "--device", f"{gpu}:/dev/nvidia0", command=holding("/dev/nvidia0"))
    told(engine.pid(user))
    assert agent.findings(RULE, idle) == []


def test_a_node_that_the_runtime_made_while_nobody_looked_is_no_use_of_it(
    agent: Watching, engine: Podman, gpu: Path, told: Told
) -> None:
    with stopped(agent.pid):
        # The runtime has ended by the time at which its event is read.
        idle = engine.pid(engine.start(IMAGE, "--device", f"{gpu}:/dev/nvidia0"))
    (made,) = agent.wait_for_events(idle)
    assert made["how"] == "mknod"
    user = engine.start(IMAGE, "--device", f"{gpu}:/dev/nvidia0", command=holding("/dev/nvidia0"))
    told(engine.pid(user))
    assert agent.findings(RULE, idle) == []


@pytest.mark.parametrize("named", [True, False])
def test_a_bare_runc_container_is_told(
    agent: Watching, scratch: Path, root: Path, told: Told, named: bool
) -> None:
    identity = "ab" * 32 if named else "gpuwarden-loose"
    with bare_runc(
        scratch, root, identity=identity, cgroup=f"/gpuwarden-test/{identity}",
        devices=["/dev/nvidia0"], number=GPU, command=holding("/dev/nvidia0"),
    ) as pid:  # fmt: skip
        finding = told(pid)
        assert finding["severity"] == "warning"
        tells_of(finding, f"container {identity[:12]}")
        opened = opens_of(agent, pid)[0]
        assert opened["container"]["state"] == "known"
        assert opened["container"]["id"] == identity


def test_the_hosts_devices_mounted_elsewhere_in_a_privileged_container(
    agent: Watching, engine: Podman, gpu: Path, told: Told
) -> None:
    identity = engine.start(
        IMAGE, "--privileged", "--volume", f"{gpu.parent}:/hostdev",
        command=holding("/hostdev/nvidia0"),
    )  # fmt: skip
    pid = engine.pid(identity)
    agent.wait(lambda: any(e["state"] == "opened" for e in agent.events(pid)), "the open's end")
    # The runtime's init, which has the same pid, made device nodes before; that can be told first.
    finding = told(pid, until=lambda one: "/hostdev/nvidia0 (203:0)" in words(one))
    name = engine("inspect", "--format", "{{.Name}}", identity)
    tells_of(finding, "it is privileged", name)
    tells_of(told(pid, "accelerator_opened_by_other_name"), name)


def test_a_node_made_inside_and_refused_is_a_warning(
    agent: Watching, scratch: Path, root: Path, told: Told
) -> None:
    script = f"mknod /tmp/x c {GPU[0]} {GPU[1]}; cat /tmp/x; exec sleep 1000"
    with bare_runc(
        scratch, root, identity="cd" * 32, cgroup=f"/gpuwarden-test/{'cd' * 32}",
        command=("sh", "-c", script), capabilities=("CAP_MKNOD",),
    ) as pid:  # fmt: skip

        def of_children(rule: str) -> list[dict[str, Any]]:
            return [f for f in agent.findings(rule) if "/tmp/x (203:0)" in words(f)]

        agent.wait(lambda: of_children(RULE), "the refused open")
        agent.wait(lambda: of_children("accelerator_node_made"), "the node")
        assert {one["severity"] for one in of_children(RULE)} == {"warning"}
        tells_of(of_children(RULE)[-1], "cdcdcdcdcdcd")
        pids = {f["subject"]["pid"] for f in of_children(RULE)}
        states = {
            (event["how"], event["state"])
            for one in pids
            for event in agent.wait_for_events(one)
            if event["how"] == "open"
        }
        assert states <= {("open", "attempted"), ("open", "denied")}
        assert pid not in pids


def test_an_excepted_image_is_told_by_nobody(
    agent: Watching, engine: Podman, gpu: Path, told: Told
) -> None:
    excepted, other = (
        engine.pid(
            engine.start(image, "--device", f"{gpu}:/dev/nvidia0", command=holding("/dev/nvidia0"))
        )
        for image in (EXCEPTED, IMAGE)
    )
    told(other)
    agent.wait(lambda: any(e["how"] == "open" for e in agent.events(excepted)), "its event")
    assert agent.findings(RULE, excepted) == []


@pytest.mark.parametrize("opens", [True, False])
def test_a_management_tool_in_a_container_is_told(
    agent: Watching, engine: Podman, gpu: Path, opens: bool
) -> None:
    rule = "gpu_tool_in_container"
    identity = engine.start(
        IMAGE, "--device", f"{gpu}:/dev/nvidia0", "--entrypoint", "/bin/nvidia-smi",
        command=("open", "/dev/nvidia0" if opens else "/etc/nothing", "3"),
    )  # fmt: skip
    name = engine("inspect", "--format", "{{.Name}}", identity)
    agent.wait(lambda: [f for f in agent.findings(rule) if name in words(f)], "the finding")
    finding = next(f for f in agent.findings(rule) if name in words(f))
    assert finding["severity"] == "warning"
    tells_of(finding, "runs nvidia-smi", IMAGE, "binary /bin/nvidia-smi")
    pid = finding["subject"]["pid"]
    if opens:
        event = opens_of(agent, pid)[0]
        assert event["process"]["argv"][0].endswith("nvidia-smi")
        agent.wait(lambda: agent.findings(RULE, pid), "its opens")
    else:
        # One that comes later is told: then this one's would have been.
        other = engine.start(
            IMAGE, "--device", f"{gpu}:/dev/nvidia0", command=holding("/dev/nvidia0")
        )
        agent.wait(lambda: agent.findings(RULE, engine.pid(other)), "another's open")
        assert agent.findings(RULE, pid) == []


@pytest.fixture
def usual_agent(tmp_path: Path) -> Iterator[Watching]:
    """One that waits no longer for an answer than any agent."""
    with watching(tmp_path, "--events") as agent:
        yield agent


def test_a_container_that_ends_at_once_is_told_by_name_or_as_unknown(
    usual_agent: Watching, engine: Podman, gpu: Path
) -> None:
    agent = usual_agent
    before = {one["process"]["pid"] for one in agent.events()}
    image_of: dict[int, str | None] = {}
    for number in range(5):
        engine.run(
            IMAGE, "--rm", "--device", f"{gpu}:/dev/nvidia0", "--name", f"short-{number}",
            command=("sh", "-c", ": < /dev/nvidia0"),
        )  # fmt: skip

    def mine() -> list[dict[str, Any]]:
        return [
            one
            for one in agent.events()
            if one["process"]["pid"] not in before
            and one["how"] == "open"
            and one["process"]["argv"] == ["sh", "-c", ": < /dev/nvidia0"]
        ]

    agent.wait(lambda: len(mine()) == 5, "five events")
    ended = {one["process"]["pid"] for one in mine()}

    def told_of() -> set[int]:
        return {one["subject"]["pid"] for one in agent.findings(RULE)} & ended

    agent.wait(lambda: told_of() == ended, "their findings")
    for one in mine():
        container = one["container"]
        assert container["state"] in ("known", "unknown"), container
        assert container["id"], container
        image_of[one["process"]["pid"]] = container.get("image")
    print("images of containers that ended at once:", image_of)


def test_a_container_of_a_runtime_that_nobody_knows_is_told_as_unknown(
    usual_agent: Watching,
    scratch: Path,
    root: Path,
    record_property: Callable[[str, object], None],
) -> None:
    agent, told = usual_agent, Told(usual_agent, record_property)
    identity = "ef" * 32
    private = scratch / "private"
    with bare_runc(
        scratch, root, identity=identity, cgroup=f"/gpuwarden-test/{identity}", state=private,
        devices=["/dev/nvidia0"], number=GPU, command=holding("/dev/nvidia0"),
    ) as pid:  # fmt: skip
        finding = told(pid)
        assert finding["severity"] != "critical"
        tells_of(finding, identity[:12])
        opened = opens_of(agent, pid)[0]
        container = opened["container"]
        assert (container["state"], container["id"]) == ("unknown", identity)
        assert container.get("image") is None


def test_a_hundred_opens_and_a_restart_are_one_finding(
    tmp_path: Path, engine: Podman, gpu: Path
) -> None:
    script = (
        "i=0; while [ $i -lt 99 ]; do : < /dev/nvidia0; i=$((i+1)); done; "
        "exec 3</dev/nvidia0; exec sleep 1000"
    )
    with watching(tmp_path) as agent:
        identity = engine.start(
            IMAGE, "--device", f"{gpu}:/dev/nvidia0", command=("sh", "-c", script)
        )
        pid = engine.pid(identity)
        agent.wait(lambda: agent.findings(RULE, pid), "the finding")
        # The last of the hundred is the one that it holds: then all have been.
        agent.wait(lambda: os.path.exists(f"/proc/{pid}/fd/3"), "the last open")
        # Another one that comes after them is told: so all of them were looked at.
        after = subprocess.Popen(["sh", "-c", ': < "$0"', str(gpu)])
        after.wait()
        agent.wait(lambda: agent.findings(pid=after.pid), "what comes after")
        os.kill(agent.pid, signal.SIGKILL)
        agent.process.wait()
    with watching(tmp_path) as agent:
        # A new process in the same container shows that the second agent sees it all.
        engine("exec", "--detach", identity, *holding("/dev/nvidia0"))

        def others() -> set[int]:
            return {f["subject"]["pid"] for f in agent.findings(RULE)} - {pid}

        agent.wait(others, "the finding of another process")
        assert len({f["id"] for f in agent.findings(RULE, pid)}) == 1
        assert [f["status"] for f in agent.findings(RULE, pid)].count("opened") == 1


def test_a_container_of_docker_is_told_with_its_labels(
    scratch: Path, root: Path, gpu: Path, record_property: Callable[[str, object], None]
) -> None:
    require_docker()
    # This machine's /proc, with only the socket that this test puts under it.
    machine = scratch / "host"
    (machine / "var").mkdir(parents=True)
    (machine / "var/run").symlink_to("../run")
    (machine / "proc").symlink_to("/proc")
    with (
        dockerd(scratch / "docker", machine / "run/docker.sock") as engine,
        watching(machine, "--events", "--root", str(machine), program=PATIENT) as agent,
    ):
        engine("import", str(root_archive(root, scratch / "docker/root.tar")), IMAGE)
        identity = engine(
            "run", "--detach", "--network", "none", "--device", f"{gpu}:/dev/nvidia0",
            "--label", "team=vision", IMAGE, *holding("/dev/nvidia0"),
        ).splitlines()[-1]  # fmt: skip
        pid = int(engine("inspect", "--format", "{{.State.Pid}}", identity))
        finding = Told(agent, record_property)(pid)
        assert finding["severity"] == "warning"
        tells_of(finding, f"image {IMAGE}", "team=vision", "digest sha256:")
        container = opens_of(agent, pid)[0]["container"]
        assert (container["runtime"], container["id"]) == ("docker", identity)
