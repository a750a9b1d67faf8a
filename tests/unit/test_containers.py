"""Whose word counts about a container, and what is said when nobody answers."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.host import Host
from gpuwarden.model import Container, Gap, Process
from gpuwarden.sensors import containers
from gpuwarden.sensors.cgroup import place
from gpuwarden.sensors.runtimes import cri, runc_state
from gpuwarden.sensors.runtimes.oci import spec_of
from gpuwarden.sensors.seen import Seen

H = "0123456789abcdef" * 4
I = "fedcba9876543210" * 4  # noqa: E741
UID = "2f6e8a0a-1b2c-4d3e-8f40-445566778899"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's sockets are believed")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    return Host(str(tmp_path))


def seen(*paths: str) -> Seen:
    found = Seen()
    for number, path in enumerate(paths, 100):
        line = f"0::{path}"
        found.add(
            Process(pid=number, start_time_ticks=1, cgroup_lines=(line,), cgroup=place([line]))
        )
    return found


def look(host: Host, what: Seen) -> tuple[dict[str, Container], list[Gap]]:
    facts = list(containers.read(host, what))
    return (
        {fact.id: fact for fact in facts if isinstance(fact, Container)},
        [fact for fact in facts if isinstance(fact, Gap)],
    )


@contextmanager
def docker(path: Path, answer: bytes | None) -> Iterator[list[bytes]]:
    """A service on ``path`` that sends ``answer`` to each request, or nothing at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    requests: list[bytes] = []
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(8)

    def serve() -> None:
        held: list[socket.socket] = []
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                break
            held.append(client)
            request = client.recv(65536)
            if request:
                requests.append(request)
            if request and answer is not None:
                client.sendall(answer)
                client.close()
        for client in held:
            client.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield requests
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def inspect(identity: str = H) -> bytes:
    return json.dumps({"Id": identity, "Name": "/x", "Config": {"Image": "team/x:1"}}).encode()


def test_nothing_seen_nothing_asked(host: Host) -> None:
    assert look(host, seen("/system.slice/ssh.service")) == ({}, [])


def test_a_container_that_nobody_answers_for_is_unconfirmed_and_a_gap(host: Host) -> None:
    found, gaps = look(host, seen(f"/kubepods/pod{UID}/{H}", f"/docker/{I}"))
    assert not found[H].confirmed
    assert found[H].pod_uid == UID
    assert found[I].runtime == "docker"
    assert {gap.what for gap in gaps} == {"unknown containers", "docker containers"}
    assert all(gap.reason and gap.remedy for gap in gaps)


def test_many_unanswered_containers_make_one_gap(host: Host) -> None:
    paths = [f"/docker/{number:064x}" for number in range(30)]
    _, gaps = look(host, seen(*paths))
    assert [gap.count for gap in gaps] == [30]


@as_root
def test_dockers_answer_is_believed_when_the_socket_is_roots(host: Host, tmp_path: Path) -> None:
    with docker(tmp_path / "run/docker.sock", http(inspect())) as requests:
        found, gaps = look(host, seen(f"/docker/{H}"))
    assert found[H].confirmed
    assert found[H].image == "team/x:1"
    assert gaps == []
    assert requests[0].startswith(f"GET /containers/{H}/json ".encode())


@as_root
def test_a_socket_of_somebody_else_is_heard_and_not_believed(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "run/docker.sock"
    with docker(path, http(inspect())):
        os.chown(path, 65534, 65534)
        found, gaps = look(host, seen(f"/docker/{H}"))
    assert not found[H].confirmed
    assert found[H].image == "team/x:1"
    assert "65534" in gaps[0].reason


@as_root
@pytest.mark.parametrize(
    "answer",
    [
        http(b"not json"),
        http(inspect(I)),
        http(b"{}", "500 Internal Server Error"),
        http(b"{}", "403 Forbidden"),
        b"\xff\xfe\r\n\r\n",
        b"",
    ],
)
def test_an_answer_that_is_none_leaves_the_container_unconfirmed(
    host: Host, tmp_path: Path, answer: bytes
) -> None:
    with docker(tmp_path / "run/docker.sock", answer):
        found, gaps = look(host, seen(f"/docker/{H}"))
    assert not found[H].confirmed
    assert found[H].image is None
    assert len(gaps) == 1
    assert "docker.sock" in gaps[0].reason or "docker inspect" in gaps[0].reason


@as_root
def test_docker_saying_no_such_container_is_no_answer(host: Host, tmp_path: Path) -> None:
    with docker(tmp_path / "run/docker.sock", http(b"{}", "404 Not Found")):
        found, gaps = look(host, seen(f"/docker/{H}"))
    assert not found[H].confirmed
    assert len(gaps) == 1


@as_root
def test_a_runtime_that_hangs_is_given_up(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "DEADLINE_SECONDS", 0.1)
    with docker(tmp_path / "run/docker.sock", None) as requests:
        found, gaps = look(host, seen(f"/docker/{H}", f"/docker/{I}"))
    assert not found[H].confirmed
    assert not found[I].confirmed
    assert len(requests) == 1
    assert any("in time" in gap.reason for gap in gaps)


@as_root
def test_without_grpc_the_gap_says_what_to_install(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("gpuwarden.wire.unix_grpc.importlib.import_module", missing)
    with docker(tmp_path / "run/containerd/containerd.sock", None):
        found, gaps = look(host, seen(f"/kubepods/pod{UID}/{H}"))
    assert not found[H].confirmed
    assert gaps[0].remedy == "pip install 'gpuwarden[kubernetes]'"


def test_a_container_inside_a_container_names_its_parent_and_says_why_it_is_unknown(
    host: Host,
) -> None:
    found, gaps = look(host, seen(f"/docker/{H}/kubepods/pod{UID}/{I}"))
    assert found[I].parent_id == H
    assert found[I].pod_uid == UID
    assert found[H].pod_uid is None
    assert any("inside" in gap.what and H[:12] in gap.what for gap in gaps)


def test_more_containers_than_the_limit_are_a_gap(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "CONTAINER_LIMIT", 3)
    found, gaps = look(host, seen(*(f"/docker/{number:064x}" for number in range(5))))
    assert len(found) == 3
    assert gaps[0].count == 2


@as_root
def test_dockers_own_record_on_disk_stands_in_for_its_service(host: Host, tmp_path: Path) -> None:
    directory = tmp_path / f"var/lib/docker/containers/{H}"
    directory.mkdir(parents=True)
    (directory / "config.v2.json").write_text(
        json.dumps(
            {
                "ID": H,
                "Name": "/x",
                "State": {"Running": True, "Pid": 77},
                "Config": {"Image": "team/x:1", "Env": ["NVIDIA_VISIBLE_DEVICES=0"]},
                "MountPoints": {"/d": {"Source": "/s", "Destination": "/d", "Type": "bind"}},
            }
        )
    )
    (directory / "hostconfig.json").write_text(json.dumps({"Privileged": True}))
    found, gaps = look(host, seen(f"/docker/{H}"))
    container = found[H]
    assert container.confirmed
    assert (container.image, container.privileged, container.main_pid) == ("team/x:1", True, 77)
    assert container.host_mounts == ("/s:/d",)
    assert gaps == []
    (directory / "config.v2.json").chmod(0o666)
    found, _ = look(host, seen(f"/docker/{H}"))
    assert not found[H].confirmed


SPEC: dict[str, Any] = {
    "process": {"args": ["sleep", "1"], "env": ["NVIDIA_VISIBLE_DEVICES=all", "A=b"]},
    "annotations": {"cdi.k8s.io/gpu": "nvidia.com/gpu=0,nvidia.com/gpu=1"},
    "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/d", "type": "bind", "source": "/s", "options": ["rbind"]},
    ],
    "linux": {
        "devices": [{"path": "/dev/nvidia0"}, {"path": "/dev/null"}],
        "namespaces": [{"type": "mount"}, {"type": "network", "path": "/proc/1/ns/net"}],
        "resources": {"devices": [{"allow": False, "access": "rwm"}, {"allow": True, "type": "c"}]},
    },
}


def test_a_specification() -> None:
    spec = spec_of(SPEC)
    assert spec is not None
    assert spec.devices == ("/dev/nvidia0",)
    assert spec.device_requests == ("nvidia.com/gpu=0", "nvidia.com/gpu=1")
    assert spec.host_mounts == ("/s:/d",)
    assert (spec.host_pid, spec.host_network, spec.privileged) == (True, False, False)
    assert spec.visible_devices == "all"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([{"allow": True, "access": "rwm"}], True),
        ([{"allow": True, "type": "a", "access": "rwm"}], True),
        ([{"allow": True, "type": "c", "major": 195}], False),
        ([{"allow": True, "type": "a", "major": 195}], False),
        ([], None),
    ],
)
def test_privileged_is_every_device_allowed(rules: list[Any], expected: bool | None) -> None:
    spec = spec_of({"process": {"args": ["x"]}, "linux": {"resources": {"devices": rules}}})
    assert spec is not None
    assert spec.privileged is expected


def test_the_verbose_answer_of_containerd() -> None:
    verbose = cri.parse_verbose(
        json.dumps(
            {
                "pid": 42,
                "sandboxID": "s",
                "config": {
                    "devices": [{"host_path": "/dev/nvidia1", "container_path": "/dev/nvidia0"}],
                    "CDI_devices": [{"name": "nvidia.com/gpu=1"}],
                    "linux": {"security_context": {"namespace_options": {"pid": 2}}},
                },
                "runtimeSpec": SPEC,
            }
        )
    )
    assert (verbose.main_pid, verbose.sandbox_id, verbose.privileged) == (42, "s", False)
    assert verbose.host_devices == ("/dev/nvidia1",)
    assert verbose.cdi_devices == ("nvidia.com/gpu=1",)
    assert (verbose.host_pid, verbose.host_network) == (True, False)


def test_the_verbose_answer_of_crio_has_no_configuration() -> None:
    verbose = cri.parse_verbose(json.dumps({"pid": 42, "privileged": True, "runtimeSpec": SPEC}))
    assert (verbose.main_pid, verbose.privileged, verbose.host_devices) == (42, True, None)
    assert verbose.spec is not None
    assert verbose.spec.devices == ("/dev/nvidia0",)


def test_the_state_of_runc_and_of_crun() -> None:
    runc = runc_state.parse_state(
        json.dumps(
            {
                "id": "x",
                "init_process_pid": 7,
                "created": "2026-01-02T03:04:05Z",
                "cgroup_paths": {"": "/sys/fs/cgroup/x"},
                "config": {"labels": ["a=b", "bundle=/b"]},
            }
        ).encode()
    )
    assert (runc.pid, runc.bundle, runc.cgroup_paths) == (7, "/b", ("/sys/fs/cgroup/x",))
    crun = runc_state.parse_state(
        json.dumps({"pid": 8, "bundle": "/c", "cgroup-path": "/y"}).encode()
    )
    assert (crun.pid, crun.bundle, crun.cgroup_paths) == (8, "/c", ("/y",))


SCALAR = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUE = (
    SCALAR
    | st.lists(SCALAR, max_size=2)
    | st.dictionaries(
        st.sampled_from("linux process devices path type env args options labels".split()),
        SCALAR | st.lists(SCALAR, max_size=2),
        max_size=3,
    )
)
DOCUMENT = st.dictionaries(
    st.sampled_from(
        "pid id config runtimeSpec linux process mounts annotations devices sandboxID labels "
        "cgroup_paths bundle created init_process_pid CDI_devices resources namespaces".split()
    ),
    VALUE | st.lists(VALUE, max_size=2),
    max_size=5,
).map(json.dumps)


@given(DOCUMENT | st.text())
@settings(deadline=None)
def test_any_text_is_verbose_information_or_malformed(text: str) -> None:
    try:
        assert isinstance(cri.parse_verbose(text), cri.Verbose)
    except Malformed:
        pass


@given(DOCUMENT.map(str.encode) | st.binary())
@settings(deadline=None)
def test_any_bytes_are_a_state_or_malformed(data: bytes) -> None:
    try:
        assert isinstance(runc_state.parse_state(data), runc_state.RuncState)
    except Malformed:
        pass
