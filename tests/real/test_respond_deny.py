"""`gpuwarden respond` denies a real container: by the daemon, across its restart, and by pins."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwarden import control
from gpuwarden.respond import pinned_denials
from tests.support.containers import Podman, cgroup_mounts, wait_until
from tests.support.opener_images import opener_images
from tests.support.packages import require_root
from tests.support.probes import ROOT, node
from tests.support.respond_commands import bpf_file_system, respond
from tests.support.watching import GPU, watching

pytestmark = pytest.mark.real

IMAGE = "localhost/gpuwarden-respond:1"
HOLDS = (
    "busybox mkdir /bin/.x && busybox cp /bin/busybox /bin/.x/sleep && "
    "exec 3</dev/gpu; exec /bin/.x/sleep 1000"
)
"""In a hidden place: a sign, so that its verdict allows a denial."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    require_root()
    with opener_images(tmp_path_factory.mktemp("e"), IMAGE) as made:
        yield made


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node(tmp_path_factory.mktemp("n") / "gpu", GPU)


@pytest.fixture
def start(engine: Podman, gpu: Path) -> Callable[[], tuple[str, int]]:
    """Starts a container that holds the device; its id and its first process."""

    def started() -> tuple[str, int]:
        device = f"{gpu}:/dev/gpu:rwm"
        identity = engine.start(IMAGE, "--device", device, command=("sh", "-c", HOLDS))
        pid = engine.pid(identity)
        wait_until(lambda: "/.x/" in os.readlink(f"/proc/{pid}/exe"), "holding the device")
        return identity, pid

    return started


@pytest.fixture
def pins() -> Iterator[None]:
    with bpf_file_system():
        try:
            yield
        finally:
            for one in pinned_denials.denied():
                pinned_denials.allow([one.group])


def opened(engine: Podman, identity: str) -> int:
    """How many of three opens in a container worked."""
    return int(engine("exec", identity, "/bin/opener", "open", "/dev/gpu", "3"))


def entries(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state / "journal").read_text().splitlines()]


def allow_by(line: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command that undoes a denial, as it was printed."""
    words = shlex.split(line[line.index("gpuwarden respond") :])
    at = words.index("--allow")
    return respond(directory, "--allow", words[at + 1], "--yes", check=0)


def undo_in(text: str) -> str:
    return next(line for line in text.splitlines() if "--allow" in line and "undo" in line)


def test_by_the_daemon_until_it_is_taken_back_and_across_its_restart(
    engine: Podman, start: Callable[[], tuple[str, int]], tmp_path: Path
) -> None:
    (named, pid), (other, _) = start(), start()
    with watching(tmp_path) as agent:
        assert opened(engine, named) == 3
        plan = respond(tmp_path, str(pid), check=1)
        # Rogue where a scheduler answers that nobody was given it; else one sign alone.
        assert plan.stdout.startswith(("ROGUE-CONTAINER", "SUSPICIOUS"))
        assert "--do deny" in plan.stdout

        done = respond(tmp_path, str(pid), "--do", "deny", "--yes", "--reason", "T-7", check=0)
        words = " ".join(done.stdout.split())
        assert "by the daemon" in words and "open already stay open" in words
        assert [opened(engine, one) for one in (named, other)] == [0, 3]
        assert os.path.exists(f"/proc/{pid}/fd/3")
        agent.wait(lambda: agent.findings("denied_on_request"), "its finding")
        found = agent.findings("denied_on_request")[-1]
        assert named[:12] in found["subject"]["name"] and "T-7" in json.dumps(found["evidence"])
        assert list((tmp_path / "evidence").iterdir())
        agent.kill()
    # A child of its own may hold what it inherited a moment longer.
    wait_until(lambda: opened(engine, named) == 3, "the denial ending with the agent")

    with watching(tmp_path) as agent:
        assert [opened(engine, one) for one in (named, other)] == [0, 3]
        listed = respond(tmp_path, "--denied", check=0).stdout
        assert named[:12] in listed and "by daemon" in listed
        allow_by(undo_in(done.stdout), tmp_path)
        assert opened(engine, named) == 3
        assert respond(tmp_path, "--denied", check=0).stdout == "nothing is denied on request\n"
        agent.wait(
            lambda: agent.findings("denied_on_request")[-1]["status"] == "resolved", "its end"
        )
    stages = [(one["action"], one["stage"]) for one in entries(tmp_path / "state")]
    assert [one for one in stages if one[0] != "evidence"] == [
        ("deny", "intent"), ("deny", "done"), ("allow", "done"),
    ]  # fmt: skip


@pytest.mark.usefixtures("pins")
def test_without_a_daemon_by_pins_that_outlive_the_command(
    engine: Podman, start: Callable[[], tuple[str, int]], tmp_path: Path
) -> None:
    (named, pid), (other, _) = start(), start()
    done = respond(tmp_path, str(pid), "--do", "deny", "--yes", check=0)
    assert "pinned in /sys/fs/bpf/gpuwarden-respond" in " ".join(done.stdout.split())
    assert [opened(engine, one) for one in (named, other)] == [0, 3]
    again = respond(tmp_path, str(pid), "--do", "deny", "--yes", check=1)
    assert "denied already" in again.stdout
    assert "/sys/fs/bpf" in respond(tmp_path, "--denied", check=0).stdout
    allow_by(undo_in(done.stdout), tmp_path)
    assert opened(engine, named) == 3
    assert not os.path.exists(pinned_denials.DIRECTORY)

    # By the process, too, which is undoing: no evidence, no verdict is asked for.
    respond(tmp_path, str(pid), "--do", "deny", "--yes", check=0)
    assert opened(engine, named) == 0
    respond(tmp_path, str(pid), "--do", "allow", "--yes", check=0)
    assert opened(engine, named) == 3


def hidden_sleep(directory: Path) -> Path:
    """A program that is called like a thread of the kernel: one kind of evidence."""
    hidden = directory / ".x/kworker"
    hidden.parent.mkdir()
    hidden.write_bytes(Path("/bin/sleep").read_bytes())
    hidden.chmod(0o755)
    return hidden


@contextmanager
def holding(gpu: Path, *argv: str | Path, group: Path | None = None) -> Iterator[int]:
    """A process of the host that holds the device, in a control group of its own if one is said."""
    join = f"echo $$ > {group}/cgroup.procs; " if group is not None else ""
    with gpu.open("rb") as held:
        words = ["sh", "-c", f'{join}exec "$@"', "sh", *map(str, argv)]
        process = subprocess.Popen(words, pass_fds=(held.fileno(),))
    try:
        name = str(argv[0])
        wait_until(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith(name), "its program")
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def group() -> Iterator[Path]:
    """A service's control group, version 2."""
    made = cgroup_mounts()[""] / f"gpuwarden-respond-{os.getpid()}.service"
    made.mkdir()
    try:
        yield made
    finally:
        made.rmdir()


def opens_in(group: Path, opener: Path, gpu: Path) -> int:
    """How many of three opens work in a control group."""
    script = f"echo $$ > {group}/cgroup.procs; exec {opener} open {gpu} 3"
    return int(subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout)


def test_the_group_of_our_own_shell_is_not_denied(gpu: Path, tmp_path: Path) -> None:
    """A process outside of any container, in the group that this test is in."""
    with holding(gpu, hidden_sleep(tmp_path), "1000") as pid:
        done = respond(tmp_path, str(pid), "--do", "deny", "--yes", check=1)
        words = " ".join(done.stdout.split())
        assert "REFUSED" in words and ("is kept for many" in words or "root group" in words)


@pytest.mark.usefixtures("pins")
def test_a_service_is_denied_but_not_with_somebody_whose_verdict_grants_none(
    gpu: Path, opener: Path, group: Path, tmp_path: Path
) -> None:
    with holding(gpu, hidden_sleep(tmp_path), "1000", group=group) as pid:
        with holding(gpu, shutil.which("sleep") or "", "1000", group=group) as other:
            refused = respond(tmp_path, str(pid), "--do", "deny", "--yes", check=1)
            words = " ".join(refused.stdout.split())
            assert f"pid {other} (sleep)" in words and "verdict is" in words
            assert opens_in(group, opener, gpu) == 3
        done = respond(tmp_path, str(pid), "--do", "deny", "--yes", check=0)
        assert opens_in(group, opener, gpu) == 0
        allow_by(undo_in(done.stdout), tmp_path)
        assert opens_in(group, opener, gpu) == 3


def test_nobody_but_root_is_answered(tmp_path: Path) -> None:
    script = (
        "import sys; from gpuwarden.control import Request; "
        "from gpuwarden.respond.control_client import ask; "
        "print(ask(sys.argv[1], Request(action='status')))"
    )

    def as_nobody(path: str) -> str:
        argv = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        done = subprocess.run(
            [*argv, sys.executable, "-c", script, path],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        return done.stdout + done.stderr

    with tempfile.TemporaryDirectory() as state, watching(tmp_path, state=Path(state)):
        path = control.socket_of(state)
        assert "only root may ask the daemon" in as_nobody(path)
        # Even where somebody has opened it to others.
        os.chmod(state, 0o755)
        os.chmod(path, 0o666)
        told = as_nobody(path)
        assert "done=False" in told and "only root may ask" in told
