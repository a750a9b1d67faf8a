"""NVML asked through the real binding and a stand-in library: what a healthy driver says."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from gpuwarden.host import Host
from gpuwarden.model import AccountedProcess, Gap, Gpu, GpuClient, LibraryCheck
from gpuwarden.sensors import nvml
from gpuwarden.sensors.nvml import kernel
from tests.support.fakenvml import FakeNvml
from tests.support.nvml_answer import Answer, ask

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a library that is root's alone"
)

OTHER_USER = 4242
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's own driver says stays out of the tests."""
    monkeypatch.setattr(kernel, "DRIVER_DIRECTORY", "/nowhere/driver")
    monkeypatch.setattr(nvml, "driver_is_loaded", lambda host: True)


# -------------------------------------------------------------------- what a healthy driver says


def test_a_gpu_and_its_processes_are_told_in_full() -> None:
    fake = (
        FakeNvml(driver="570.86.10", cuda=12080)
        .gpu(used=5 * GIB, reserved=600 << 20, util=80, memutil=12, temp=61, power=312500)
        .process(100, memory=4 * GIB, kinds="CG")
        .process(101, memory="na", kinds="CM")
        .sample(100, 70, mem=9, age_us=400_000)
        .sample(100, 90, age_us=1_000)
    )
    answer = ask(fake)
    assert answer.error is None
    assert (answer.query.driver_version, answer.query.cuda_version) == ("570.86.10", "12.8")
    [check] = answer.of(LibraryCheck)
    assert check.accepted
    [gpu] = answer.of(Gpu)
    assert gpu.id == gpu.uuid
    assert gpu.pci_address == "00000000:01:00.0"
    assert (gpu.index, gpu.minor, gpu.mig_enabled, gpu.error) == (0, 0, False, None)
    assert gpu.memory_used_bytes == 5 * GIB
    assert gpu.memory_reserved_bytes == 600 << 20
    assert (gpu.sm_percent, gpu.memory_busy_percent) == (80, 12)
    assert (gpu.temperature_celsius, gpu.power_watts) == (61, 312.5)
    assert gpu.unread == {}
    first, second = answer.of(GpuClient)
    assert (first.pid, first.kinds, first.memory_bytes) == (100, ("C", "G"), 4 * GIB)
    assert [s.sm_percent for s in first.samples] == [70, 90]
    assert (first.sm_percent, first.unread) == (90, {})
    assert (second.pid, second.kinds) == (101, ("C", "M"))
    assert second.memory_bytes is None
    assert second.unread == {"memory_bytes": "the driver says N/A"}
    # No sample is idle, which is an answer.
    assert second.sm_percent is None
    assert answer.of(Gap) == []


@pytest.mark.parametrize("absent", [("_v3",), ("_v3", "_v2")])
def test_an_old_driver_is_asked_for_older_functions(absent: tuple[str, ...]) -> None:
    fake = FakeNvml().gpu()
    for kind in ("Compute", "Graphics", "MPSCompute"):
        for version in absent:
            fake.answer(f"nvmlDeviceGet{kind}RunningProcesses{version}", 13)
    fake.process(100, memory=7, kinds="CG").process(101, memory="na", kinds="M")
    answer = ask(fake)
    found = [(c.pid, c.kinds, c.memory_bytes) for c in answer.of(GpuClient)]
    assert found == [(100, ("C", "G"), 7), (101, ("M",), None)]
    assert answer.of(Gap) == []


def test_the_reserve_of_an_old_driver_is_unread_and_never_zero() -> None:
    fake = FakeNvml().gpu(used=GIB, reserved=300 << 20).answer("nvmlDeviceGetMemoryInfo_v2", 13)
    [gpu] = ask(fake).of(Gpu)
    assert gpu.memory_used_bytes == GIB + (300 << 20)
    assert gpu.memory_reserved_bytes is None
    assert "reserve" in gpu.unread["memory_reserved_bytes"]


def test_unified_memory_that_is_not_told_is_unread() -> None:
    fake = FakeNvml().gpu(name="NVIDIA GB10")
    for name in ("MemoryInfo_v2", "MemoryInfo", "AddressingMode"):
        fake.answer(f"nvmlDeviceGet{name}", 3)
    [gpu] = ask(fake).of(Gpu)
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_is_numa) == (None, None, True)
    assert "memory_total_bytes" in gpu.unread


def test_memory_figures_that_cannot_be_are_unread() -> None:
    [gpu] = ask(FakeNvml().gpu(used=(1 << 64) - 5)).of(Gpu)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (None, None)
    assert "not plausible" in gpu.unread["memory_used_bytes"]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("name", "numa"), [("NVIDIA GH200 480GB", True), ("NVIDIA H100", False)])
def test_numa_memory_is_told_by_mode_or_name(told: bool, name: str, numa: bool) -> None:
    fake = FakeNvml().gpu(name=name)
    if not told:
        fake.answer("nvmlDeviceGetAddressingMode", 13)
    assert ask(fake).of(Gpu)[0].memory_is_numa is numa


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 200, 4096])
def test_every_process_is_listed_whatever_the_entries_length(count: int) -> None:
    for wide in (0, 1):
        fake = FakeNvml(wide=wide).gpu()
        for pid in range(1000, 1000 + count):
            fake.process(pid, memory=pid)
        answer = ask(fake)
        assert [(c.pid, c.memory_bytes) for c in answer.of(GpuClient)] == [
            (pid, pid) for pid in range(1000, 1000 + count)
        ]
        assert answer.of(Gap) == []


def test_more_processes_than_can_be_are_a_gap() -> None:
    fake = FakeNvml().gpu()
    for pid in range(1, 5000):
        fake.process(pid)
    answer = ask(fake)
    assert answer.of(GpuClient) == []
    assert any("C process list" in gap.what for gap in answer.of(Gap))


def test_pids_that_cannot_be_are_dropped_and_said() -> None:
    answer = ask(FakeNvml().gpu().process(100).process(4_000_000_000).process(0))
    assert [c.pid for c in answer.of(GpuClient)] == [100]
    [gap] = answer.of(Gap)
    assert (gap.count, "scrambled" in gap.reason) == (2, True)


def test_dead_pids_stay_in_the_list() -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    [client] = ask(FakeNvml().gpu().process(dead, memory=GIB)).of(GpuClient)
    assert (client.pid, client.memory_bytes) == (dead, GIB)


@pytest.mark.parametrize(
    "sample",
    [{"sm": 37100}, {"sm": 50, "mem": 9999}, {"sm": 50, "age_us": 3_600_000_000}],
)
def test_garbage_utilisation_is_not_believed(sample: dict[str, int]) -> None:
    sm = sample.pop("sm")
    fake = FakeNvml().gpu().process(100).sample(100, sm, **sample).sample(999, 99)
    answer = ask(fake)
    [client] = answer.of(GpuClient)
    assert (client.sm_percent, client.samples) == (None, ())
    assert "not plausible" in client.unread["sm_percent"]


def test_utilisation_that_cannot_be_measured_has_a_reason() -> None:
    fake = FakeNvml().gpu(util=37100).process(100)
    answer = ask(fake.answer("nvmlDeviceGetProcessUtilization", 3))
    [client], [gpu] = answer.of(GpuClient), answer.of(Gpu)
    assert "not supported" in client.unread["sm_percent"]
    assert (gpu.sm_percent, gpu.unread["sm_percent"]) == (None, "the driver said 37100 %")


def test_accounting_tells_of_ended_processes() -> None:
    fake = FakeNvml().gpu(accounting=1)
    fake.accounted(55, sm=99, memory=GIB, ms=120_000, start_us=1_700_000_000_000_000)
    fake.accounted(56, sm=4_000_000_000, running=1)
    first, second = ask(fake).of(AccountedProcess)
    assert (first.pid, first.running, first.busy_ms) == (55, False, 120_000)
    assert (first.started_at_ns, first.memory_max_bytes) == (1_700_000_000 * 10**9, GIB)
    assert (second.running, second.sm_percent, second.started_at_ns) == (True, None, None)


def test_names_of_any_bytes_are_text() -> None:
    fake = FakeNvml().gpu(name=b"bad\xff\x1b[2Jname".decode("utf-8", "surrogateescape"))
    assert ask(fake).of(Gpu)[0].name == "bad\\xff\x1b[2Jname"


# -------------------------------------------------------------------- MIG


def mig() -> FakeNvml:
    return (
        FakeNvml()
        .gpu(mig=1)
        .mig(uuid="MIG-a", gi=1, ci=0, total=10 * GIB, used=GIB)
        .process(100, memory=GIB)
        .mig(uuid="MIG-b", gi=2, ci=0, total=10 * GIB)
        .process(100, memory=5)
        .process(101, memory=6)
    )


def test_mig_devices_are_gpus_with_a_parent_and_their_processes_once() -> None:
    answer = ask(mig())
    whole, first, second = answer.of(Gpu)
    assert (whole.mig_enabled, whole.parent_id) == (True, None)
    assert (first.id, first.parent_id, first.gpu_instance_id) == ("MIG-a", whole.id, 1)
    assert (second.id, second.compute_instance_id) == ("MIG-b", 0)
    assert first.memory_used_bytes == GIB
    for gpu in (whole, first, second):
        assert "MIG" in gpu.unread["sm_percent"]
    clients = answer.of(GpuClient)
    found = [(c.gpu_id, c.pid, c.memory_bytes, c.gpu_instance_id) for c in clients]
    assert found == [("MIG-a", 100, GIB, 1), ("MIG-b", 100, 5, 2), ("MIG-b", 101, 6, 2)]
    assert all("MIG" in client.unread["sm_percent"] for client in clients)
    assert answer.of(Gap) == []


def test_an_empty_mig_list_for_an_ordinary_user_is_not_idle() -> None:
    from gpuwarden.sensors.nvml import device  # noqa: F401 - out of reach for that user

    with mig().in_place() as library:
        found = run_as(OTHER_USER, lambda: Answer(nvml.start(Host(), library=library)))
    assert "clients=0" in found
    assert "administrators only" in found


def run_as(uid: int, job: Callable[[], Answer]) -> str:
    """What ``job`` found when run by another user, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            answer = job()
            text = f"clients={len(answer.of(GpuClient))} {answer.of(Gap)} {answer.error!r}"
            os.write(writer, text.encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text
