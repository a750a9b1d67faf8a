"""Freeze, thaw and kill on real processes and containers; who was exchanged meanwhile is spared."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwarden.finding import Row
from gpuwarden.host import Host
from gpuwarden.model import Container, Gpu, GpuClient, NodeFacts, PersistenceEntry, Snapshot
from gpuwarden.respond import gpu_use, killing
from gpuwarden.respond.freezing import Freeze, Thaw
from gpuwarden.respond.gpu_use import GpuUse
from gpuwarden.respond.killing import Kill
from tests.support.acted_on import (
    child_of,
    children,
    freezer_mounts,
    group_of,
    mount_of,
    nobody_tells,
    running,
    stands_still,
    state,
    target_of,
    untouched,
    wait_for_computing,
    wait_for_sleeping,
    wait_for_trap,
    wait_for_words,
)
from tests.support.containers import (
    Podman,
    busybox_root,
    no_new_cgroups,
    podman,
    wait_until,
)
from tests.support.fakenvml import FakeNvml
from tests.support.packages import require, require_root
from tests.support.probes import build

pytestmark = pytest.mark.real

HOST = Host()
BUSY = ("sh", "-c", "while :; do :; done")
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def probes() -> None:
    require_root()
    build()


def freeze(rows: Sequence[Row] = ()) -> Freeze:
    return Freeze(HOST, lambda target: rows)


def no_gpus() -> GpuUse:
    return GpuUse()


def kill(*, verify: float = 0, patience: float = 60) -> Kill:
    """``patience``: one who hears SIGTERM may be let to the processor late."""
    return Kill(HOST, verify_seconds=verify, patience_seconds=patience, look=no_gpus)


# ---------------------------------------------------------------- control groups


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_of_its_own_is_frozen_and_let_go(version: int) -> None:
    with running(*BUSY) as process, group_of(mount_of(version), process.pid):
        target = target_of(process.pid)
        step = freeze().step(target)
        assert step is not None and not step.refused and f"version {version}" in step.changes
        outcome = freeze().do(target, nobody_tells)
        assert outcome.done and outcome.complete, outcome
        assert stands_still(process.pid) and state(process.pid) != "T"
        assert outcome.undo == f"gpuwarden respond {process.pid} --do thaw"
        let_go = Thaw(HOST).do(target, nobody_tells)
        assert let_go.done and let_go.complete
        wait_for_computing(process.pid)
        assert Thaw(HOST).step(target) is None


def test_a_stranger_in_the_group_is_not_frozen_with_it() -> None:
    _, mount = freezer_mounts()[0]
    with (
        running(*BUSY) as process,
        running("sleep", "61") as stranger,
        group_of(mount, process.pid, stranger.pid),
    ):
        target = target_of(process.pid)
        step = freeze().step(target)
        assert step is not None and "SIGSTOP" in step.changes
        assert f"pid {stranger.pid} (sleep) too" in step.changes
        outcome = freeze().do(target, nobody_tells)
        assert outcome.done and outcome.complete
        assert state(process.pid) == "T" and untouched(stranger.pid, ("sleep", "61"))()
        assert Thaw(HOST).do(target, nobody_tells).done
        wait_for_computing(process.pid)


def test_a_stopped_process_leaves_its_children_and_says_so() -> None:
    line = "sleep 62 & while :; do :; done"
    with running("sh", "-c", line) as process:
        child = child_of(process.pid, "sleep", "62")
        wait_for_sleeping(child)
        outcome = freeze().do(target_of(process.pid), nobody_tells)
        assert state(process.pid) == "T"
        assert any(f"pid {child} (sleep) goes on" in x for x in outcome.lines)
        assert state(child) == "S"


@pytest.mark.parametrize(
    "pid", [1, 2, os.getpid(), os.getppid()], ids=["init", "kernel", "us", "parent"]
)
def test_the_machine_and_who_runs_this_are_out_of_bounds(pid: int) -> None:
    target = target_of(pid)
    for actor in (freeze(), kill()):
        step = actor.step(target)
        assert step is not None and step.refused
        assert not actor.do(target, nobody_tells).done
    assert state(pid) in "SRID"


# ---------------------------------------------------------------- containers


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    require("podman", "runc", "busybox-static")
    scratch = tmp_path_factory.mktemp("podman")
    with no_new_cgroups(), podman(scratch) as found:
        found.import_image(busybox_root(scratch / "root"), "localhost/busy:1")
        yield found


def busy_container(engine: Podman, command: str) -> tuple[int, Container]:
    identity = engine.start("localhost/busy:1", command=("sh", "-c", command))
    pid = engine.pid(identity)
    wait_for_words(pid, ("sh", "-c", command))
    return pid, Container(id=identity, runtime="podman", confirmed=True, name="busy", main_pid=pid)


def test_a_container_is_frozen_whole_let_go_and_ended(engine: Podman) -> None:
    pid, container = busy_container(engine, "sleep 63 & while :; do :; done")
    child_of(pid, "sleep", "63")
    target = target_of(pid, container=container)
    step = freeze().step(target)
    assert step is not None and f"container {container.id[:12]}" in step.changes
    assert any("(sleep) stands still" in one for one in step.hurts)
    outcome = freeze().do(target, nobody_tells)
    assert outcome.done and outcome.complete, outcome
    assert stands_still(pid)
    assert Thaw(HOST).do(target, nobody_tells).complete
    wait_for_computing(pid)
    assert freeze().do(target, nobody_tells).complete
    step = kill().step(target)
    assert step is not None and any("first process of its pid namespace" in x for x in step.hurts)
    # Frozen: SIGKILL at once, and it dies although version 1 keeps what is frozen.
    ended = kill().do(target, nobody_tells)
    assert ended.done and "SIGKILL" in ended.lines[0]
    assert not Path(f"/proc/{pid}").exists() or state(pid) == "Z"


def test_an_innocent_in_the_container_keeps_it_from_being_frozen_whole(engine: Podman) -> None:
    pid, container = busy_container(engine, "sleep 64 & while :; do :; done")
    innocent = child_of(pid, "sleep", "64")
    wait_for_sleeping(innocent)
    rows = [Row(gpu_id="g", gpu="0", pid=innocent, verdict="expected", severity="info")]
    target = target_of(pid, container=container)
    assert freeze(rows).do(target, nobody_tells).complete
    assert state(pid) == "T" and state(innocent) == "S"
    guilty = [replace(rows[0], verdict="suspicious")]
    assert Thaw(HOST).do(target, nobody_tells).complete
    step = freeze(guilty).step(target)
    assert step is not None and f"container {container.id[:12]}" in step.changes
    claimed = target_of(pid, container=replace(container, confirmed=False))
    step = freeze().step(claimed)
    assert step is not None and container.id[:12] + " stands" not in step.changes


# ---------------------------------------------------------------- ending


@pytest.mark.parametrize(
    ("trap", "patience", "signal"), [("", 60, "SIGTERM"), ("trap '' TERM; ", 1, "SIGKILL")]
)
def test_a_process_is_ended(trap: str, patience: float, signal: str) -> None:
    with running("sh", "-c", f"{trap}while :; do :; done") as process:
        if trap:
            wait_for_trap(process.pid)
        outcome = kill(patience=patience).do(target_of(process.pid), nobody_tells)
        assert outcome.done and f"ended by {signal}" in outcome.lines[0]
        assert any("zombie" in line for line in outcome.lines)
        step = kill().step(target_of(process.pid))
        assert step is not None and "zombie" in step.refused


def test_a_stopped_process_is_ended_without_running_again() -> None:
    with running("sh", "-c", "trap 'exit 7' TERM; while :; do :; done") as process:
        wait_for_trap(process.pid)
        assert freeze().do(target_of(process.pid), nobody_tells).complete
        told: list[str] = []
        assert "SIGKILL" in kill().do(target_of(process.pid), told.append).lines[0]
        assert process.wait() == -9 and "SIGKILL at once" in told[0]


@pytest.mark.parametrize("version", [1, 2])
def test_one_of_a_frozen_group_is_ended_and_the_rest_stays_frozen(version: int) -> None:
    mount = mount_of(version)
    with (
        running("sh", "-c", "while :; do :; done & while :; do :; done") as process,
        group_of(mount) as group,
    ):
        wait_until(lambda: bool(children(process.pid)), "its child")
        child = children(process.pid)[0]
        for pid in (process.pid, child):
            (group / "cgroup.procs").write_text(str(pid))
        target = target_of(process.pid)
        assert freeze().do(target, nobody_tells).complete
        outcome = kill().do(target, nobody_tells)
        assert outcome.done and "SIGKILL" in outcome.lines[0], outcome
        wait_until(lambda: stands_still(child), "the child standing still", 2)
        assert any(f"pid {child} (sh) goes on" in line for line in outcome.lines)


def test_one_that_does_not_die_is_said_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killing, "END_SECONDS", 0.2)
    monkeypatch.setattr("gpuwarden.respond.identity.HeldProcess.send", lambda *_: None)
    monkeypatch.setattr("gpuwarden.respond.identity.HeldProcess.send_again", lambda *_: None)
    with running(*BUSY) as process:
        outcome = kill(patience=0.2).do(target_of(process.pid), nobody_tells)
    assert not outcome.done and "state R" in outcome.lines[0]


# ---------------------------------------------------------------- what it brought


def on_gpu(pid: int) -> Snapshot:
    return Snapshot(
        taken_at_ns=0,
        node=NodeFacts(hostname="here"),
        gpus=(Gpu(id="GPU-a", index=0),),
        clients=(GpuClient(gpu_id="GPU-a", pid=pid),),
    )


@pytest.mark.parametrize("gives_back", [True, False])
def test_memory_and_utilisation_are_looked_for(gives_back: bool) -> None:
    require("gcc")
    gpu = {"uuid": "GPU-a", "total": 8000 * MIB}
    with running(*BUSY) as process:
        busy = FakeNvml().gpu(**gpu, used=6000 * MIB, util=97)
        busy.process(process.pid, memory=5900 * MIB)
        with busy.in_place() as library:
            before = gpu_use.look(HOST, library)
            assert [one.pid for one in before.clients] == [process.pid], before
            after = FakeNvml().gpu(**gpu, used=(100 if gives_back else 5990) * MIB, util=0)

            def told(line: str) -> None:
                if "SIGTERM" in line:
                    after.replace()

            actor = Kill(HOST, verify_seconds=0.5, patience_seconds=2, nvml_library=library)
            outcome = actor.do(target_of(process.pid, snapshot=on_gpu(process.pid)), told)
    assert outcome.done and outcome.complete is gives_back, outcome
    said = next(line for line in outcome.lines if line.startswith("GPU 0"))
    assert ("did not come back" in said) is not gives_back and "97 % to 0 %" in said


def test_without_a_driver_it_is_said_that_nothing_was_seen() -> None:
    with running(*BUSY) as process:
        actor = Kill(HOST, verify_seconds=0, nvml_library="/nonexistent")
        outcome = actor.do(target_of(process.pid, snapshot=on_gpu(process.pid)), nobody_tells)
    assert outcome.done and not outcome.complete
    assert any("not seen" in line for line in outcome.lines)


@pytest.mark.parametrize("copied", [False, True])
def test_a_respawner_is_named(tmp_path: Path, copied: bool) -> None:
    miner = tmp_path / "kworkerd"
    shutil.copy("/bin/sleep", miner)
    # Another file with other words, or the very same program that cron has, too.
    again = f"cp {miner} {miner}.new && mv {miner}.new {miner}; n=7$n;" if copied else ""
    script = tmp_path / "watchdog.sh"
    script.write_text(f"n=600; while :; do {miner} $n; {again} done\n")
    entry = PersistenceEntry(
        kind="cron", path="/etc/cron.d/x", text=f"* * * * * root {miner}", commands=(str(miner),)
    )
    entries = () if copied else (entry,)
    snapshot = Snapshot(taken_at_ns=0, node=NodeFacts(hostname="here"), persistence=entries)
    with running("sh", str(script)) as watchdog:
        wait_until(lambda: bool(children(watchdog.pid)), "the miner")
        pid = children(watchdog.pid)[0]
        wait_for_words(pid, (str(miner), "600"))
        outcome = kill(verify=10).do(target_of(pid, snapshot=snapshot), nobody_tells)
        now = children(watchdog.pid)
    assert outcome.done and not outcome.complete
    came = [line for line in outcome.lines if line.startswith("it came back")]
    assert len(came) == 1 and f"its parent is pid {watchdog.pid} (sh)" in came[0], outcome.lines
    assert f"it came back: pid {now[0]} ({miner})" in came[0]
    assert ("/etc/cron.d/x" in came[0]) is not copied


def test_what_others_start_meanwhile_has_not_come_back() -> None:
    with running("sleep", "65") as process:
        target = target_of(process.pid)
        actor = kill(verify=1)
        others: list[subprocess.Popen[bytes]] = []

        def told(line: str) -> None:
            if "it is looked for" in line:
                others.append(subprocess.Popen(["sh", "-c", "sleep 66; :"]))
                child_of(others[0].pid, "sleep", "66")

        outcome = actor.do(target, told)
        for one in others:
            subprocess.run(["kill", *map(str, children(one.pid))], check=False)
            one.wait()
    assert any("nothing like it began" in line for line in outcome.lines), outcome.lines
