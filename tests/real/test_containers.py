"""Real containers, made here: what the sensor tells of each must be what was asked for."""

from __future__ import annotations

import os
import secrets
import socket as sockets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.model import Container, Gap, Process
from gpuwarden.sensors import containers
from gpuwarden.sensors.cgroup import place
from gpuwarden.sensors.seen import Seen
from tests.support.containers import (
    Podman,
    bare_runc,
    busybox_root,
    cgroup_directories,
    dockerd,
    fake_node,
    no_new_cgroups,
    podman,
    require_docker,
    root_archive,
    wait_until,
)
from tests.support.cri import Containerd, PodSpec, containerd
from tests.support.packages import require, require_root

pytestmark = pytest.mark.real

IMAGE = "localhost/gpuwarden-test:1"
POD_UID = f"0f6e8a0a-1111-2222-3333-{secrets.token_hex(6)}"
"""As all ids here of this run: what a run that was killed left has others."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require_root()
    require("podman", "runc", "containerd", "busybox-static")
    with no_new_cgroups():
        yield tmp_path_factory.mktemp("c")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded test machine is no dead runtime."""
    monkeypatch.setattr(containers, "DEADLINE_SECONDS", 60.0)


@pytest.fixture(scope="module")
def root(scratch: Path) -> Path:
    return busybox_root(scratch / "root")


@pytest.fixture(scope="module")
def node(scratch: Path) -> Path:
    return fake_node(scratch / "dev/nvidia0")


@pytest.fixture(scope="module")
def podman_engine(scratch: Path, root: Path) -> Iterator[Podman]:
    with podman(scratch / "podman") as engine:
        engine.import_image(root, IMAGE)
        yield engine


@pytest.fixture(scope="module")
def machine(scratch: Path) -> Host:
    """This machine's /proc, with only the sockets that a test puts under it."""
    (scratch / "host/run").mkdir(parents=True)
    (scratch / "host/var").mkdir()
    (scratch / "host/var/run").symlink_to("/run")
    (scratch / "host/proc").symlink_to("/proc")
    return Host(str(scratch / "host"))


@pytest.fixture(scope="module")
def cri(scratch: Path, root: Path, machine: Host) -> Iterator[Containerd]:
    socket = Path(machine.root) / "run/containerd/containerd.sock"
    with containerd(scratch / "containerd", socket) as engine:
        engine.load_image(root, scratch / "containerd", IMAGE)
        yield engine


def answers(socket: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX) as asking:
        try:
            asking.connect(str(socket))
            asking.sendall(b"GET /_ping HTTP/1.0\r\nHost: podman\r\n\r\n")
            return b" 200 " in asking.recv(64)
        except OSError:
            return False


def process_of(pid: int) -> Process:
    lines = tuple(Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    return Process(
        pid=pid,
        start_time_ticks=1,
        cgroup_lines=lines,
        cgroup=place(lines),
        namespaces={kind: namespace(pid, kind) for kind in ("pid", "mnt")},
    )


def namespace(pid: int, kind: str) -> int:
    return int(os.readlink(f"/proc/{pid}/ns/{kind}").partition("[")[2].rstrip("]"))


def look(host: Host, *pids: int) -> tuple[dict[str, Container], list[Gap], Seen]:
    seen = Seen()
    for pid in pids:
        seen.add(process_of(pid))
    facts = list(containers.read(host, seen))
    found = {fact.id: fact for fact in facts if isinstance(fact, Container)}
    return found, [fact for fact in facts if isinstance(fact, Gap)], seen


def test_podman_is_read_from_its_state_when_no_service_runs(
    podman_engine: Podman, node: Path
) -> None:
    identity = podman_engine.start(
        IMAGE,
        "--device",
        f"{node}:/dev/nvidia0",
        "--env",
        "NVIDIA_VISIBLE_DEVICES=all",
        "--env",
        "API_TOKEN=not-to-be-kept",
        "--label",
        "team=vision",
        "--volume",
        f"{node.parent}:/data",
    )
    pid = podman_engine.pid(identity)
    found, gaps, seen = look(Host(), pid)
    placement = seen.processes[pid].cgroup
    assert placement is not None
    assert (placement.runtime, placement.container_id) == ("podman", identity)
    container = found[identity]
    assert container.confirmed
    assert (container.runtime, container.image, container.main_pid) == ("podman", IMAGE, pid)
    assert container.name is not None
    assert container.name.startswith("gpuwarden-test-")
    assert container.privileged is False
    assert any(device.endswith("/nvidia0") for device in container.devices)
    assert f"{node.parent}:/data" in container.host_mounts
    assert container.visible_devices == "all"
    assert container.entrypoint == ("sleep", "1000")
    assert container.mount_namespace == namespace(pid, "mnt")
    assert container.pid_namespace == namespace(pid, "pid")
    assert "not-to-be-kept" not in repr(container)
    assert gaps == []


def test_a_privileged_podman_container_is_known_as_such(podman_engine: Podman) -> None:
    identity = podman_engine.start(IMAGE, "--privileged")
    found, _, _ = look(Host(), podman_engine.pid(identity))
    assert found[identity].privileged is True


def test_podmans_service_is_asked_when_it_listens(
    podman_engine: Podman, machine: Host, node: Path
) -> None:
    identity = podman_engine.start(IMAGE, "--device", f"{node}:/dev/nvidia0", "--pid", "host")
    socket = Path(machine.root) / "run/podman/podman.sock"
    socket.parent.mkdir()
    service = subprocess.Popen(
        [*podman_engine._arguments, "system", "service", "--time", "0", f"unix://{socket}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # Its socket is there before anybody listens at it.
        wait_until(lambda: answers(socket), "podman's service answering")
        found, gaps, _ = look(machine, podman_engine.pid(identity))
    finally:
        service.terminate()
        service.wait()
        socket.unlink(missing_ok=True)
    container = found[identity]
    assert gaps == []
    assert container.confirmed
    assert (container.runtime, container.image, container.state) == ("podman", IMAGE, "running")
    assert container.host_pid is True
    assert container.entrypoint == ("sleep", "1000")


def test_a_bare_runc_container_may_claim_any_pod(scratch: Path, root: Path) -> None:
    identity = secrets.token_hex(32)
    cgroup = f"/kubepods/burstable/pod{POD_UID}/{identity}"
    with bare_runc(
        scratch, root, identity=identity, cgroup=cgroup, devices=["/dev/nvidia0"]
    ) as pid:
        found, _, seen = look(Host(), pid)
    placement = seen.processes[pid].cgroup
    assert placement is not None
    assert (placement.pod_uid, placement.container_id) == (POD_UID, identity)
    container = found[identity]
    assert container.runtime == "runc"
    assert container.devices == ("/dev/nvidia0",)
    assert container.environment == {"JOB_NAME": "resnet"}
    assert (container.image, container.pod_name, container.pod_namespace) == (None, None, None)
    assert "image" in container.unread


def test_a_bare_runc_container_without_an_id_in_its_cgroup_is_found_by_its_process(
    scratch: Path, root: Path
) -> None:
    loose = f"gpuwarden-loose-{secrets.token_hex(4)}"
    with bare_runc(scratch, root, identity=loose, cgroup=f"/gpuwarden-test/{loose}") as pid:
        found, _, _ = look(Host(), pid)
        assert found[loose].main_pid == pid
        assert found[loose].mount_namespace == namespace(pid, "mnt")


def test_docker_in_a_pod_keeps_the_pods_container_as_the_parent(scratch: Path, root: Path) -> None:
    outer, inner = secrets.token_hex(32), secrets.token_hex(32)
    pod = f"/kubepods/burstable/pod{POD_UID}/{outer}"
    with (
        bare_runc(scratch, root, identity=outer, cgroup=pod),
        bare_runc(scratch, root, identity=inner, cgroup=f"{pod}/docker/{inner}") as pid,
    ):
        found, _, seen = look(Host(), pid)
    placement = seen.processes[pid].cgroup
    assert placement is not None
    assert placement.chain == (f"pod:{POD_UID}", f"container:{outer}", f"docker:{inner}")
    assert found[inner].parent_id == outer
    assert found[outer].parent_id is None


def test_a_pod_on_containerd_is_told_by_cri(cri: Containerd, machine: Host, node: Path) -> None:
    pod = cri.start_pod(
        PodSpec(
            name="train-0",
            uid=POD_UID,
            labels={"app": "train", "statefulset.kubernetes.io/pod-name": "train-0"},
            devices=[(str(node), "/dev/nvidia0")],
            environment={"NVIDIA_VISIBLE_DEVICES": "GPU-x", "TEAM": "a", "DB_PASSWORD": "hidden"},
            mounts=[(str(node.parent), "/data")],
        ),
        IMAGE,
    )
    found, gaps, seen = look(machine, pod.pid)
    placement = seen.processes[pod.pid].cgroup
    assert placement is not None
    assert (placement.pod_uid, placement.container_id) == (POD_UID, pod.container_id)
    container = found[pod.container_id]
    assert gaps == []
    assert container.confirmed
    assert container.main_pid == pod.pid
    assert container.mount_namespace == namespace(pod.pid, "mnt")
    assert (container.pod_name, container.pod_namespace, container.pod_uid) == (
        "train-0",
        "team-a",
        POD_UID,
    )
    assert container.pod_container == "main"
    assert container.pod_labels["app"] == "train"
    assert container.pod_owner == "StatefulSet/train"
    assert container.image == IMAGE
    assert container.image_digest is not None
    assert container.privileged is False
    assert container.devices == (str(node),)
    assert container.host_network is True
    assert container.state == "running"
    assert container.visible_devices == "GPU-x"
    assert container.environment == {"TEAM": "a"}
    assert f"{node.parent}:/data" in container.host_mounts
    assert container.entrypoint == ("/bin/sleep", "1000")


def test_a_privileged_pod_is_known_as_such(cri: Containerd, machine: Host) -> None:
    uid = f"0f6e8a0a-1111-2222-3333-{secrets.token_hex(6)}"
    pod = cri.start_pod(PodSpec(name="rogue", uid=uid, privileged=True), IMAGE)
    found, _, _ = look(machine, pod.pid)
    assert found[pod.container_id].privileged is True


def test_a_process_moved_into_a_pods_cgroup_keeps_its_own_mounts(
    cri: Containerd, machine: Host
) -> None:
    uid = f"0f6e8a0a-1111-2222-3333-{secrets.token_hex(6)}"
    pod = cri.start_pod(PodSpec(name="victim", uid=uid), IMAGE)
    stranger = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
    try:
        for directory in cgroup_directories(pod.pid):
            (directory / "cgroup.procs").write_text(str(stranger.pid))
        found, _, seen = look(machine, stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()
    moved = seen.processes[stranger.pid]
    assert moved.cgroup is not None
    assert moved.cgroup.container_id == pod.container_id
    container = found[pod.container_id]
    assert container.confirmed
    assert container.mount_namespace is not None
    assert moved.namespaces["mnt"] != container.mount_namespace
    assert moved.namespaces["pid"] != container.pid_namespace


def test_docker_is_asked_over_its_socket(
    scratch: Path, root: Path, machine: Host, node: Path
) -> None:
    require_docker()
    socket = Path(machine.root) / "run/docker.sock"
    with dockerd(scratch / "docker", socket) as engine:
        archive = root_archive(root, scratch / "docker/root.tar")
        engine("import", str(archive), IMAGE)
        identity = engine(
            "run",
            "--detach",
            "--network",
            "none",
            "--device",
            f"{node}:/dev/nvidia0",
            "--restart",
            "always",
            "--env",
            "PAI_USER_NAME=user1",
            "--label",
            "team=vision",
            IMAGE,
            "sleep",
            "1000",
        ).splitlines()[-1]
        pid = int(engine("inspect", "--format", "{{.State.Pid}}", identity))
        found, gaps, _ = look(machine, pid)
    container = found[identity]
    assert gaps == []
    assert container.confirmed
    assert (container.runtime, container.image, container.main_pid) == ("docker", IMAGE, pid)
    assert container.restart_policy == "always"
    assert container.devices == (str(node),)
    assert container.labels["team"] == "vision"
    assert container.environment == {"PAI_USER_NAME": "user1"}
    assert container.mount_namespace is not None
