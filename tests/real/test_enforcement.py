"""Enforcement on real containers: the policy's are refused accelerators, others are not."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.enforcement import (
    Decision,
    Enforcer,
    Located,
    located_by_event,
    located_by_process,
)
from gpuwarden.host import Host
from gpuwarden.model import Container
from gpuwarden.policy import Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.events import Event, GroupEvent, OpenEvent
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.probes.settings import Settings
from gpuwarden.sensors import containers as sensor
from gpuwarden.sensors.containers import look_up
from tests.support import containers
from tests.support.containers import (
    Podman,
    wait_until,
)
from tests.support.cri import Containerd, PodSpec, containerd
from tests.support.opener_images import opener_images
from tests.support.packages import require
from tests.support.probes import node, probing

pytestmark = pytest.mark.real

CPUID = (203, 0)
"""A device that really opens and that hardly anything uses."""
NAMED, OTHER = "localhost/gpuwarden-test-named:1", "localhost/gpuwarden-test-other:1"
POD_IMAGE = "localhost/gpuwarden-test:1"
"""The name that containerd is told to make its sandboxes of."""
FLOOD = 100_000
POLICY = parse_policy(
    b"enforce:\n- match: {image: localhost/gpuwarden-test-named}\n  reason: it computes nothing\n",
    "policy.yaml",
)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded test machine is no dead runtime."""
    monkeypatch.setattr(sensor, "DEADLINE_SECONDS", 60.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    with opener_images(tmp_path_factory.mktemp("e"), NAMED, OTHER) as made:
        yield made


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = node(tmp_path_factory.mktemp("n") / "gpu", CPUID)
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"no driver for character device {CPUID} here: {error}")
    return path


def start(engine: Podman, gpu: Path, image: str, *options: str) -> str:
    return engine.start(image, "--device", f"{gpu}:/dev/gpu:rwm", *options)


def opened(engine: Podman, identity: str, count: int = 1) -> int:
    """How many of ``count`` opens in a container worked."""
    return int(engine("exec", identity, "/bin/opener", "open", "/dev/gpu", str(count)))


def refusal(engine: Podman, identity: str) -> str:
    """What cat in a container says of an open that fails."""
    return engine("exec", identity, "sh", "-c", "cat /dev/gpu 2>&1 || true")


def enforcer_of(
    probe: DeviceOpenProbe, policy: Policy = POLICY, *, dry_run: bool = False
) -> Enforcer:
    def deny(group: GroupKey, dry: bool) -> None:
        probe.deny_group(group, dry_run=dry)

    return Enforcer(policy, deny, probe.allow, dry_run=dry_run)


def met(enforcer: Enforcer, engine: Podman, identity: str) -> Decision | None:
    """Shows a running container to the enforcer, found by its first process."""
    (located,) = located_by_process(Host(), engine.pid(identity))
    assert located.container_id == identity and located.groups
    return shown(enforcer, located)


def shown(enforcer: Enforcer, located: Located) -> Decision | None:
    container = look_up(Host(), located.container_id, located.runtime, located.pod_uid)
    assert isinstance(container, Container) and container.confirmed
    return enforcer.container(container, located.groups)


def events_of(probe: DeviceOpenProbe, identity: str) -> list[OpenEvent]:
    found: list[OpenEvent] = []
    while batch := probe.poll(0):
        found += [
            event
            for event in batch
            if isinstance(event, OpenEvent) and identity in (event.process.cgroup_path or "")
        ]
    return [event for event in found if event.how == "open" and event.path == "/dev/gpu"]


def test_the_named_container_is_refused_and_another_is_not(engine: Podman, gpu: Path) -> None:
    named, other = start(engine, gpu, NAMED), start(engine, gpu, OTHER)
    with probing(Settings(), (CPUID[0], None)) as probe:
        enforcer = enforcer_of(probe)
        assert (opened(engine, named), opened(engine, other)) == (1, 1)
        decision = met(enforcer, engine, named)
        assert decision is not None and decision.state == "denied"
        assert decision.container.image == NAMED and decision.groups
        assert met(enforcer, engine, other) is None
        events_of(probe, named)

        assert (opened(engine, named), opened(engine, other)) == (0, 1)
        # EPERM; EACCES would read "Permission denied".
        assert "Operation not permitted" in refusal(engine, named)
        states = [(e.state, e.denial) for e in events_of(probe, named)]
        assert set(states) == {("denied", "denied")} and len(states) >= 2

        enforcer.gone(named)
        assert opened(engine, named) == 1
        assert enforcer.decisions() == ()
        met(enforcer, engine, named)
        assert opened(engine, named) == 0
        enforcer.reload(Policy())
        assert opened(engine, named) == 1
        enforcer.reload(POLICY)
        assert opened(engine, named) == 0
    assert opened(engine, named) == 1


def test_a_flood_of_opens_lets_none_pass(engine: Podman, gpu: Path) -> None:
    named = start(engine, gpu, NAMED)
    with probing(Settings(limit_events=2, ring_bytes=1 << 16), (CPUID[0], None)) as probe:
        met(enforcer_of(probe), engine, named)
        assert opened(engine, named, FLOOD) == 0
        assert probe.counters().denied >= FLOOD
    assert opened(engine, named, 1000) == 1000


def test_a_dry_run_refuses_nothing_and_tells(engine: Podman, gpu: Path) -> None:
    named = start(engine, gpu, NAMED)
    with probing(Settings(), (CPUID[0], None)) as probe:
        enforcer = enforcer_of(probe, dry_run=True)
        decision = met(enforcer, engine, named)
        assert decision is not None and decision.state == "would deny"
        assert NAMED in decision.text and "it computes nothing" in decision.text
        events_of(probe, named)
        assert opened(engine, named) == 1
        states = {(e.state, e.denial) for e in events_of(probe, named)}
        assert states == {("attempted", "would deny")}
        assert probe.counters().denied == 0


def test_a_container_is_denied_by_the_group_that_was_made_for_it(
    engine: Podman, gpu: Path, tmp_path: Path
) -> None:
    """No process of the container is looked at: its group is known before there is one."""
    script = "while ! [ -e /data/go ]; do sleep 0.05; done; opener open /dev/gpu > /data/opened"
    with probing(Settings(groups=True), (CPUID[0], None)) as probe:
        enforcer = enforcer_of(probe)
        named = start_with(engine, gpu, NAMED, tmp_path / "named", script)
        other = start_with(engine, gpu, OTHER, tmp_path / "other", script)
        found = groups_made(probe, {named, other})
        for located in found:
            shown(enforcer, located)
        assert {one.container_id for one in found} == {named, other}
        (decision,) = enforcer.decisions()
        assert decision.container.id == named
        (by_process,) = located_by_process(Host(), engine.pid(named))
        assert set(by_process.groups) <= set(decision.groups)
        results = {}
        for name in ("named", "other"):
            (tmp_path / name / "go").touch()
            result = tmp_path / name / "opened"
            wait_until(lambda file=result: file.exists() and file.read_text(), "its open")  # type: ignore[misc]
            results[name] = result.read_text().strip()
    assert results == {"named": "0", "other": "1"}


def start_with(engine: Podman, gpu: Path, image: str, data: Path, script: str) -> str:
    data.mkdir()
    device = f"{gpu}:/dev/gpu:rwm"
    return engine.start(
        image, "--device", device, "--volume", f"{data}:/data", command=("sh", "-c", script)
    )


def groups_made(probe: DeviceOpenProbe, identities: set[str]) -> list[Located]:
    events: list[Event] = []
    while batch := probe.poll(0):
        events += batch
    made = [event for event in events if isinstance(event, GroupEvent)]
    found = [one for event in made if (one := located_by_event(Host(), event)) is not None]
    return [one for one in found if one.container_id in identities]


def test_the_runtimes_helper_and_the_machine_are_not_denied(engine: Podman, gpu: Path) -> None:
    named = start(engine, gpu, NAMED)
    with probing(Settings(), (CPUID[0], None)) as probe:
        met(enforcer_of(probe), engine, named)
        assert opened(engine, named) == 0
        helper = int(engine("inspect", "--format", "{{.State.ConmonPid}}", named))
        assert [one for one in located_by_process(Host(), helper) if one.groups] == []
        os.close(os.open(gpu, os.O_RDONLY))
        with open("/dev/null", "wb") as nothing:
            nothing.write(b"x")
        assert engine("exec", named, "sh", "-c", "echo > /dev/null && echo fine") == "fine"


@pytest.fixture(scope="module")
def cri(tmp_path_factory: pytest.TempPathFactory, engine: Podman) -> Iterator[Containerd]:
    """A containerd, and with it the socket of a machine of its own in ``<scratch>/host``."""
    require("containerd")
    scratch = tmp_path_factory.mktemp("k")
    (scratch / "host/run/containerd").mkdir(parents=True)
    (scratch / "host/proc").symlink_to("/proc")
    root = engine.scratch.parent / "root"
    with containerd(scratch, scratch / "host/run/containerd/containerd.sock") as made:
        made.load_image(root, scratch, POD_IMAGE)
        yield made


def test_a_pod_is_denied_by_its_namespace_and_its_neighbour_is_not(
    cri: Containerd, gpu: Path
) -> None:
    """Through CRI, in kubepods: neither the pods' shared parents nor another pod are touched."""
    machine = Host(str(cri.socket.parents[2]))
    policy = parse_policy(
        b"enforce:\n- match: {pod_namespace: free, pod_labels: {tier: low}}\n  reason: no GPUs\n",
        "policy.yaml",
    )

    def pod(namespace: str, tier: str) -> PodSpec:
        uid = "0f6e8a0a-0000-4000-8000-" + secrets.token_hex(6)
        return PodSpec(
            "main", uid, namespace, labels={"tier": tier}, devices=[(str(gpu), "/dev/gpu")]
        )

    def opened_in_pod(identity: str) -> int:
        return int(
            containers.run(
                "ctr", "--address", str(cri.socket), "--namespace", "k8s.io",
                "tasks", "exec", "--exec-id", secrets.token_hex(4), identity,
                "/bin/opener", "open", "/dev/gpu",
            )
        )  # fmt: skip

    with probing(Settings(groups=True), (CPUID[0], None)) as probe:
        enforcer = enforcer_of(probe, policy)
        pods = {
            names: cri.start_pod(pod(*names), POD_IMAGE)
            for names in (("free", "low"), ("free", "high"), ("paid", "low"))
        }
        ids = {running.container_id for running in pods.values()}
        sandboxes = {running.sandbox_id for running in pods.values()}
        found = groups_made(probe, ids | sandboxes)
        assert {one.container_id for one in found} == ids | sandboxes
        for located in found:
            told = look_up(machine, located.container_id, located.runtime, located.pod_uid)
            assert isinstance(told, Container) and told.confirmed
            enforcer.container(told, located.groups)
        # A process tells of the same container, on a machine whose root is mounted elsewhere.
        named = pods["free", "low"]
        (by_process,) = located_by_process(machine, named.pid)
        assert by_process.container_id == named.container_id
        by_id = {d.container.id: d for d in enforcer.decisions()}
        assert set(by_id) == {named.container_id, named.sandbox_id}
        assert set(by_process.groups) <= set(by_id[named.container_id].groups)
        opened_by = {names: opened_in_pod(one.container_id) for names, one in pods.items()}
    assert opened_by == {("free", "low"): 0, ("free", "high"): 1, ("paid", "low"): 1}
