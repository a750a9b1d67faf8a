"""What the NVML child may do, and how it ends."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.model import Gpu, GpuClient
from gpuwarden.sensors import nvml
from gpuwarden.sensors.nvml import kernel
from gpuwarden.sensors.nvml.child import start_child
from tests.support.departed import is_gone
from tests.support.fakenvml import FakeNvml
from tests.support.nvml_answer import ask

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a library that is root's alone"
)


@pytest.fixture(autouse=True)
def _no_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's own driver says stays out of the tests."""
    monkeypatch.setattr(kernel, "DRIVER_DIRECTORY", "/nowhere/driver")
    monkeypatch.setattr(nvml, "driver_is_loaded", lambda host: True)


# -------------------------------------------------------------------- the child's rights


def status_of_child(*, unprivileged: bool) -> dict[str, str]:
    def job(send: Callable[[bytes], None]) -> None:
        send(Path("/proc/self/status").read_bytes())
        limits = [resource.getrlimit(k)[1] for k in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)]
        send(f"Limits: {limits}\n".encode())
        descriptors = []
        for number in range(64):
            try:
                os.fstat(number)
            except OSError:
                continue
            descriptors.append(number)
        send(f"Descriptors: {descriptors}\n".encode())

    child = start_child(job, unprivileged=unprivileged, cpu_seconds=5)
    with os.fdopen(child.pipe, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child.pid, 0)
    fields = (line.partition(":")[::2] for line in text.splitlines() if ":" in line)
    return {key: value.strip() for key, value in fields}


def test_the_child_is_nobody_with_no_capability_at_all() -> None:
    status = status_of_child(unprivileged=True)
    assert status["Uid"].split() == ["65534"] * 4
    assert status["Gid"].split() == ["65534"] * 4
    assert status["Groups"] == ""
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0, kind
    assert status["NoNewPrivs"] == "1"
    assert status["Limits"] == "[0, 0]"
    # The standard ones lead to /dev/null, the fourth to its parent.
    assert status["Descriptors"].count(",") == 3


def test_the_second_child_keeps_one_capability() -> None:
    status = status_of_child(unprivileged=False)
    assert status["Uid"].split()[0] == "0"
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        assert int(status[kind], 16) & ~(1 << 21) == 0, kind
    assert status["NoNewPrivs"] == "1"


def test_nobody_asks_first() -> None:
    fake = FakeNvml().gpu().answer("nvmlDeviceGetName", 3, unless_root=1)
    [gpu] = ask(fake).of(Gpu)
    assert gpu.name is None
    assert "name" in gpu.unread


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("nvmlInit_v2", 4),
        ("nvmlInit_v2", 17),
        ("nvmlInit_v2", 999),
        ("nvmlDeviceGetComputeRunningProcesses_v3", 4),
        ("nvmlDeviceGetHandleByIndex_v2", 4),
    ],
)
def test_rights_are_kept_where_nobody_is_refused(function: str, code: int) -> None:
    fake = FakeNvml().gpu().process(100).answer(function, code, unless_root=1)
    answer = ask(fake)
    assert answer.error is None
    assert [client.pid for client in answer.of(GpuClient)] == [100]


def test_a_child_that_nobody_waits_for_ends_with_its_parent() -> None:
    reader, writer = os.pipe()
    with FakeNvml().answer("nvmlInit_v2", "hang").in_place() as library:
        parent = os.fork()
        if parent == 0:
            query = nvml.start(Host(), library=library, deadline_seconds=60)
            os.write(writer, str(query.child_pid).encode())
            signal.pause()
        child = int(os.read(reader, 32))
        # It must have come as far as asking to be told of its parent's end.
        deadline = time.monotonic() + 10
        while "NoNewPrivs:\t1" not in Path(f"/proc/{child}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert is_gone(child)
    os.close(reader)
    os.close(writer)


def test_an_unread_question_can_be_closed() -> None:
    with FakeNvml().answer("nvmlInit_v2", "hang").in_place() as library:
        query = nvml.start(Host(), library=library, deadline_seconds=60)
        pid = query.child_pid
        assert pid is not None
        query.close()
    assert is_gone(pid)
