"""NVML when the driver fails, hangs or lies, and when its library is not to be opened."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap, Gpu, GpuClient, LibraryCheck
from gpuwarden.sensors import nvml
from gpuwarden.sensors.nvml import kernel
from gpuwarden.sensors.nvml import library as nvml_library
from tests.support.departed import is_gone
from tests.support.fakenvml import FakeNvml, build_library, library_directory
from tests.support.nvml_answer import Answer, ask

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a library that is root's alone"
)


@pytest.fixture(autouse=True)
def _no_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's own driver says stays out of the tests."""
    monkeypatch.setattr(kernel, "DRIVER_DIRECTORY", "/nowhere/driver")
    monkeypatch.setattr(nvml, "driver_is_loaded", lambda host: True)


@pytest.fixture
def host_root() -> Iterator[Path]:
    """A root that is this very machine, seen from a container, in a directory of root's alone."""
    made = Path(tempfile.mkdtemp(prefix="root-", dir=library_directory()))
    made.chmod(0o755)
    boot_id = made / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_bytes(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    yield made
    shutil.rmtree(made)


# -------------------------------------------------------------------- a driver in trouble


def test_a_lost_gpu_costs_only_itself() -> None:
    answer = ask(FakeNvml().gpu().process(100).gpu(lost=1).gpu().process(101))
    assert answer.error is None
    assert [gpu.error is None for gpu in answer.of(Gpu)] == [True, False, True]
    assert "lost" in str(answer.of(Gpu)[1].error)
    assert [client.pid for client in answer.of(GpuClient)] == [100, 101]


def test_a_lost_gpu_gets_its_identity_from_the_kernel_module(
    host_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "DRIVER_DIRECTORY", "/proc/driver/nvidia")
    for bus, uuid, minor in (("01", "GPU-x", 0), ("02", "GPU-y", 5)):
        folder = host_root / f"proc/driver/nvidia/gpus/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA A100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (folder / "information").write_text(text)
    host = Host(str(host_root))
    gpu = ask(FakeNvml().gpu().gpu(lost=1), host=host).of(Gpu)[1]
    assert (gpu.id, gpu.uuid, gpu.pci_address) == ("GPU-y", "GPU-y", "00000000:02:00.0")
    assert (gpu.minor, gpu.name) == (5, "NVIDIA A100")
    # One that NVML does not list at all is a gap, not a smaller machine.
    answer = ask(FakeNvml().gpu(), host=host)
    assert [gap.what for gap in answer.of(Gap)] == ["GPU at 00000000:02:00.0"]


@pytest.mark.parametrize(
    ("code", "kind", "words", "remedy"),
    [
        (4, Denied, "denies", "root"),
        (9, Denied, "not loaded", "nvidia-modprobe"),
        (15, Denied, "lost", "Xid 79"),
        (16, Denied, "reset", "gpu-reset"),
        (17, Denied, "cgroup", "container"),
        (18, Denied, "different versions", "reboot"),
        (999, Denied, "not an idle GPU", "daemon-reload"),
        (12345, Denied, "12345", ""),
    ],
)
def test_what_the_driver_refuses_with_is_explained(
    code: int, kind: type[GpuwardenError], words: str, remedy: str
) -> None:
    answer = ask(FakeNvml().gpu().answer("nvmlInit_v2", code))
    assert type(answer.error) is kind
    assert words in str(answer.error)
    assert remedy in answer.error.remedy
    assert [check.accepted for check in answer.of(LibraryCheck)] == [True]


def test_a_library_without_a_driver_is_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "driver_is_loaded", lambda host: False)
    answer = ask(FakeNvml().answer("nvmlInit_v2", 9))
    assert type(answer.error) is Unavailable


@pytest.mark.parametrize("code", [15, 16, 999])
def test_a_gpu_that_answers_with_a_fault_carries_it(code: int) -> None:
    fake = FakeNvml().gpu().gpu().answer("nvmlDeviceGetUUID", code, gpu=1)
    first, second = ask(fake).of(Gpu)
    assert first.error is None
    assert f"NVML {code}" in str(second.error)
    assert second.id == second.pci_address


def test_a_process_list_that_cannot_be_had_is_a_gap() -> None:
    fake = FakeNvml().gpu().process(100).process(101, kinds="G")
    answer = ask(fake.answer("nvmlDeviceGetComputeRunningProcesses_v3", 999))
    assert [client.pid for client in answer.of(GpuClient)] == [101]
    assert [gap.what.split()[0] for gap in answer.of(Gap)] == ["C"]


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetCount_v2"])
def test_a_hanging_start_ends_at_the_deadline_and_leaves_no_child(function: str) -> None:
    with FakeNvml().gpu().answer(function, "hang").in_place() as library:
        query = nvml.start(Host(), library=library, deadline_seconds=0.6)
        pid = query.child_pid
        assert pid is not None
        answer = Answer(query)
    assert isinstance(answer.error, TimedOut)
    assert "starting" in str(answer.error)
    assert "Xid" in answer.error.remedy
    assert is_gone(pid)
    assert query.child_pid is None


def test_a_gpu_that_hangs_does_not_cost_those_before_it() -> None:
    fake = FakeNvml().gpu().process(100).gpu().gpu()
    answer = ask(fake.answer("nvmlDeviceGetUUID", "hang", gpu=1), deadline_seconds=3.0)
    assert isinstance(answer.error, TimedOut)
    assert "GPU 1 of 3" in str(answer.error)
    assert [gpu.index for gpu in answer.of(Gpu)] == [0]
    assert [client.pid for client in answer.of(GpuClient)] == [100]


def test_a_child_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    real_kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    answer = ask(FakeNvml().answer("nvmlInit_v2", "hang"), deadline_seconds=0.1)
    monkeypatch.undo()
    assert "left behind" in str(answer.error)
    [pid] = killed
    real_kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_crash_is_said_and_costs_only_the_child() -> None:
    answer = ask(FakeNvml().gpu().gpu().answer("nvmlDeviceGetName", "crash", gpu=1))
    assert isinstance(answer.error, Malformed)
    assert f"signal {signal.SIGSEGV.value}" in str(answer.error)
    assert [gpu.index for gpu in answer.of(Gpu)] == [0]


@contextmanager
def standard_output_to(writer: int) -> Iterator[None]:
    """Sends descriptors 1 and 2 elsewhere for a while."""
    kept = [os.dup(standard) for standard in (1, 2)]
    for standard in (1, 2):
        os.dup2(writer, standard)
    try:
        yield
    finally:
        for standard, before in zip((1, 2), kept, strict=True):
            os.dup2(before, standard)
            os.close(before)


def test_a_library_that_writes_to_stdout_is_not_heard() -> None:
    fake = FakeNvml().gpu()
    fake.answer("nvmlInit_v2", "print").answer("nvmlDeviceGetName", "print")
    # A pipe: the child's limit on file sizes would keep a file from being written to.
    reader, writer = os.pipe()
    with standard_output_to(writer):
        answer = ask(fake)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b""
    assert answer.error is None
    assert len(answer.of(Gpu)) == 1


# -------------------------------------------------------------------- which library


def test_a_refused_library_is_told_and_never_opened(tmp_path: Path) -> None:
    path = shutil.copy(build_library(), tmp_path / "libnvidia-ml.so.1")
    query = nvml.start(Host(), library=str(path))
    assert query.child_pid is None
    answer = Answer(query)
    assert isinstance(answer.error, Denied)
    assert [check.accepted for check in answer.of(LibraryCheck)] == [False]
    assert "others" in answer.of(LibraryCheck)[0].reason


def test_no_library_and_no_driver_is_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_library, "DIRECTORIES", ("/nowhere",))
    assert isinstance(Answer(nvml.start(Host())).error, Denied)
    monkeypatch.setattr(nvml, "driver_is_loaded", lambda host: False)
    assert type(Answer(nvml.start(Host())).error) is Unavailable


def test_a_recorded_machine_has_no_driver_to_ask(tmp_path: Path) -> None:
    answer = Answer(nvml.start(Host(str(tmp_path)), library=str(build_library())))
    assert type(answer.error) is Unavailable
    assert answer.facts == []


def test_the_mounted_hosts_library_is_used_and_said(
    host_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = host_root / "usr/lib64"
    folder.mkdir(parents=True)
    shutil.copy(build_library(), folder / "libnvidia-ml.so.1")
    for part in (folder, folder.parent):
        part.chmod(0o755)
    monkeypatch.setattr(nvml_library, "DIRECTORIES", ("/usr/lib64/nowhere", "/usr/lib64"))
    real = os.path.lexists
    monkeypatch.setattr(
        os.path,
        "lexists",
        lambda path: str(path).startswith(str(host_root)) and real(path),
    )
    with FakeNvml().gpu().in_place():
        answer = Answer(nvml.start(Host(str(host_root))))
    assert answer.error is None
    assert len(answer.of(Gpu)) == 1
    assert [gap.what for gap in answer.of(Gap)] == ["our own NVML library"]


def test_a_file_that_is_no_library_of_this_machine_is_denied(host_root: Path) -> None:
    path = host_root / "libnvidia-ml.so.1"
    header = bytearray(Path(os.path.realpath(sys.executable)).read_bytes()[:64])
    header[56:58] = b"\0\0"
    path.write_bytes(bytes(header))
    answer = Answer(nvml.start(Host(), library=str(path)))
    assert isinstance(answer.error, Denied)
    assert "cannot be used" in str(answer.error)
