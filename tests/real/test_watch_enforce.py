"""`gpuwarden watch --enforce` on real containers: whom it refuses, and until when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.probes import pinning
from tests.support.containers import Podman, wait_until
from tests.support.opener_images import opener_images
from tests.support.packages import require_root
from tests.support.probes import ROOT, build, node
from tests.support.respond_commands import bpf_file_system
from tests.support.watching import GPU, Watching, watching

pytestmark = pytest.mark.real

NAMED, OTHER = "localhost/gpuwarden-watch-named:1", "localhost/gpuwarden-watch-other:1"
RULE = "container_denied"
NAMES_IT = "enforce:\n- match: {image: localhost/gpuwarden-watch-named}\n  reason: no GPUs for it\n"
NAMES_ANOTHER = "enforce:\n- match: {image: localhost/nobody}\n  reason: no GPUs for it\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    require_root()
    with opener_images(tmp_path_factory.mktemp("e"), NAMED, OTHER) as made:
        yield made


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node(tmp_path_factory.mktemp("n") / "gpu", GPU)


@pytest.fixture
def start(engine: Podman, gpu: Path) -> Callable[..., str]:
    def started(image: str, *options: str, script: str = "exec sleep 1000") -> str:
        device = f"{gpu}:/dev/gpu:rwm"
        return engine.start(image, "--device", device, *options, command=("sh", "-c", script))

    return started


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(NAMES_IT)
    return path


@pytest.fixture
def pins() -> Iterator[None]:
    """A BPF file system that the agent's own mount namespace shares; no pins before or after."""
    with bpf_file_system():
        try:
            pinning.unpin()
            yield
        finally:
            pinning.unpin()


def opened(engine: Podman, identity: str, count: int = 1) -> int:
    """How many of ``count`` opens in a container worked."""
    return int(engine("exec", identity, "/bin/opener", "open", "/dev/gpu", str(count)))


def findings_of(agent: Watching, identity: str) -> list[dict[str, Any]]:
    found = agent.findings(RULE)
    return [one for one in found if one["subject"]["name"] == f"container {identity}"]


def wait_for(agent: Watching, identity: str, severity: str = "info") -> dict[str, Any]:
    """The finding that a container is denied; its denial is in force by then."""
    agent.wait(lambda: findings_of(agent, identity), f"the finding about {identity[:12]}")
    found = findings_of(agent, identity)[-1]
    assert found["severity"] == severity
    return found


def enforcing(directory: Path, policy: Path, *more: str) -> Any:
    return watching(directory, "--enforce", "--policy", str(policy), *more)


def kill(agent: Watching) -> None:
    agent.process.send_signal(signal.SIGKILL)
    agent.process.wait()


def unpin() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "watch", "--unpin"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    return done.stdout


def test_the_named_are_refused_until_the_agent_is_killed(
    engine: Podman, start: Callable[..., str], policy: Path, tmp_path: Path
) -> None:
    before, other = start(NAMED), start(OTHER)
    assert opened(engine, before) == 1
    with enforcing(tmp_path, policy) as agent:
        found = wait_for(agent, before)
        words = json.dumps(found["evidence"])
        assert NAMED in words and "no GPUs for it" in words and "denied" in words
        later = start(NAMED)
        wait_for(agent, later)
        assert [opened(engine, one, 5) for one in (before, later, other)] == [0, 0, 5]
        assert before[:12] in agent.errors and other[:12] not in agent.errors
        assert not findings_of(agent, other)

        # A container that has ended is forgotten.
        engine("rm", "--force", "--time", "0", later)
        agent.wait(
            lambda: findings_of(agent, later)[-1]["status"] == "resolved", "the end of its finding"
        )
        assert opened(engine, before) == 0
        kill(agent)
    assert opened(engine, before) == 1


def test_another_policy_lifts_a_denial_without_a_restart(
    engine: Podman, start: Callable[..., str], policy: Path, tmp_path: Path
) -> None:
    named = start(NAMED)
    with enforcing(tmp_path, policy) as agent:
        wait_for(agent, named)
        assert opened(engine, named) == 0
        policy.write_text(NAMES_ANOTHER)
        agent.process.send_signal(signal.SIGHUP)
        agent.wait(lambda: "the policy was read again" in agent.errors, "reading the policy")
        assert opened(engine, named) == 1
        assert f"no longer named by the policy: container {named[:12]}" in agent.errors
        agent.wait(
            lambda: findings_of(agent, named)[-1]["status"] == "resolved", "the end of its finding"
        )
        policy.write_text(NAMES_IT)
        agent.process.send_signal(signal.SIGHUP)
        agent.wait(lambda: findings_of(agent, named)[-1]["status"] == "opened", "denying again")
        assert opened(engine, named) == 0


@pytest.mark.usefixtures("pins")
def test_a_dry_run_tells_refuses_nothing_and_pins_nothing(
    engine: Podman, start: Callable[..., str], policy: Path, tmp_path: Path
) -> None:
    named = start(NAMED)
    with enforcing(tmp_path, policy, "--dry-run", "--pin", "--events") as agent:
        found = wait_for(agent, named)
        assert "would deny" in json.dumps(found["evidence"])
        assert opened(engine, named) == 1
        agent.wait(
            lambda: any(one["denial"] == "would deny" for one in agent.events()), "its event"
        )
        assert f"would deny: container {engine('inspect', '--format', '{{.Name}}', named)}" in (
            agent.errors
        )
        assert pinning.pinned() is None


@pytest.mark.usefixtures("pins")
def test_a_pinned_denial_stays_is_taken_over_and_ends_on_demand(
    engine: Podman, start: Callable[..., str], policy: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    script = (
        "while ! [ -e /data/begin ]; do sleep 0.05; done;"
        "while ! [ -e /data/end ]; do opener open /dev/gpu 20; sleep 0.01; done >> /data/opened;"
        "echo >> /data/ended; exec sleep 1000"
    )
    named = start(NAMED, "--volume", f"{data}:/data", script=script)
    with enforcing(tmp_path, policy, "--pin") as agent:
        wait_for(agent, named)
        kill(agent)
    assert opened(engine, named) == 0

    # It opens all the time while another agent takes over: none passes.
    (data / "begin").touch()
    wait_until((data / "opened").exists, "its opens")
    with enforcing(tmp_path, policy, "--pin") as agent:
        assert "denials of an earlier run are taken over" in agent.errors
        agent.wait(
            lambda: agent.errors.count(f"denied: container {name(engine, named)}") == 2,
            "denying it again",
        )
        wait_until(lambda: len((data / "opened").read_text().split()) > 10, "more of its opens")
        (data / "end").touch()
        wait_until((data / "ended").exists, "the end of its opens")
        assert set((data / "opened").read_text().split()) == {"0"}
        # The pins are the agent's own maps: what changes now changes in them.
        fresh = start(NAMED)
        wait_for(agent, fresh)
        kill(agent)
    assert [opened(engine, one) for one in (named, fresh)] == [0, 0]
    assert "link_device_access" in unpin()
    assert [opened(engine, one) for one in (named, fresh)] == [1, 1]
    assert unpin() == "nothing was pinned\n"


@pytest.mark.usefixtures("pins")
def test_what_the_next_policy_does_not_name_is_released(
    engine: Podman, start: Callable[..., str], policy: Path, tmp_path: Path
) -> None:
    named = start(NAMED)
    with enforcing(tmp_path, policy, "--pin") as agent:
        wait_for(agent, named)
        kill(agent)
    assert opened(engine, named) == 0
    policy.write_text(NAMES_ANOTHER)
    with enforcing(tmp_path, policy, "--pin") as agent:
        agent.wait(lambda: "an earlier run's denial ends" in agent.errors, "its release")
        agent.wait(lambda: opened(engine, named) == 1, "opening again")
        kill(agent)
    assert opened(engine, named) == 1
    there = pinning.pinned()
    assert there is not None and there.denials == ()


def name(engine: Podman, identity: str) -> str:
    return engine("inspect", "--format", "{{.Name}}", identity)


def test_pins_that_would_end_with_the_agent_are_no_pins(policy: Path, tmp_path: Path) -> None:
    """In a pid namespace, whose first process is the host's as far as the agent can tell."""
    require_root()
    build()
    private = "unshare --mount --propagation private"
    mounts = f'mount -t bpf bpf {pinning.FILE_SYSTEM} && exec "$@"'
    done = subprocess.run(
        [
            "unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c",
            f"{private} sh -c '{mounts}' sh \"$@\"; exit $?", "sh",
            sys.executable, "-m", "gpuwarden", "watch", "--state", str(tmp_path / "state"),
            "--enforce", "--pin", "--policy", str(policy), "--for", "1",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 64, done.stderr
    assert "is not the host's" in done.stderr and "mount -t bpf" in done.stderr
