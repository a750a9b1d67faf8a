"""The driver asked again and again by one lasting child: every sample once, and every failure."""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden import scan
from gpuwarden.errors import Denied, GpuwardenError, Malformed, TimedOut, Unavailable
from gpuwarden.host import Host
from gpuwarden.sensors import nvml
from gpuwarden.sensors.nvml import kernel, sampler
from gpuwarden.sensors.nvml import library as nvml_library
from gpuwarden.sensors.nvml.sampler import Round, Sampler
from gpuwarden.sensors.process import stat_lines
from tests.support.departed import children, is_gone
from tests.support.fakenvml import FakeNvml, build_library, library_directory
from tests.support.idle import wait_for

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a library that is root's alone"
)

PERIOD_US = 20_000


@pytest.fixture(autouse=True)
def _no_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's own driver says stays out of the tests."""
    monkeypatch.setattr(kernel, "DRIVER_DIRECTORY", "/nowhere/driver")
    monkeypatch.setattr(sampler, "driver_is_loaded", lambda host: True)


class Clock:
    """Monotonic seconds that pass when a test says so, however slow the machine is."""

    def __init__(self) -> None:
        self.skipped = 1000.0

    def __call__(self) -> float:
        return self.skipped


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., Sampler]


@pytest.fixture
def make(clock: Clock) -> Iterator[Make]:
    made: list[Sampler] = []

    def one(library: str | None, deadline_seconds: float = 60.0) -> Sampler:
        made.append(Sampler(Host(), library, deadline_seconds, clock=clock))
        return made[-1]

    before = children()
    yield one
    for each in made:
        each.close()
    assert children() <= before


def taken(asked: Sampler) -> Round:
    """The round that is under way, waited for as a daemon's loop would."""

    def look() -> Round | None:
        select.select([asked], [], [], 0.05)
        return asked.take()

    found = wait_for(look, "a round")
    assert isinstance(found, Round)
    return found


def ask(asked: Sampler) -> Round:
    asked.request()
    return taken(asked)


def child_of(asked: Sampler) -> int:
    [pid] = asked.child_pids
    return pid


# -------------------------------------------------------------------- what a round says


def test_one_child_answers_every_round(make: Make) -> None:
    fake = FakeNvml(driver="570.86.10", cuda=12080).gpu(used=5, util=80).process(100, memory=7)
    with fake.gpu().process(101, kinds="G").in_place() as library:
        asked = make(library)
        assert asked.child_pids == ()
        first = ask(asked)
        pid = child_of(asked)
        rounds = [ask(asked) for _ in range(5)]
        assert (asked.starts, child_of(asked), asked.ignored) == (1, pid, 0)
    for told in rounds:
        assert told.error is None
        assert (told.driver_version, told.cuda_version) == ("570.86.10", "12.8")
        assert [gpu.sm_percent for gpu in told.gpus] == [80, 0]
        assert [(c.pid, c.kinds, c.memory_bytes) for c in told.clients] == [
            (100, ("C",), 7),
            (101, ("G",), 0),
        ]
        assert (told.gaps, told.unlisted, told.child_pid) == ((), (), pid)
        assert told.gpus[0].uuid == first.gpus[0].uuid is not None
        assert told.at_ns > first.at_ns
        assert [check.accepted for check in told.libraries] == [True]
    assert asked.libraries == told.libraries


def test_a_round_is_asked_for_once_and_its_descriptor_tells_of_it(make: Make) -> None:
    with FakeNvml().gpu().in_place() as library:
        asked = make(library)
        descriptor = asked.fileno()
        assert select.select([descriptor], [], [], 0)[0] == []
        assert asked.take() is None
        asked.request()
        asked.request()
        assert asked.ignored == 1
        assert select.select([descriptor], [], [], 20)[0] == [descriptor]
        assert taken(asked).error is None
        assert asked.take() is None
        assert (asked.fileno(), select.select([descriptor], [], [], 0)[0]) == (descriptor, [])


def test_the_child_has_no_rights_no_descriptors_of_ours_and_no_limit_of_time(make: Make) -> None:
    with FakeNvml().gpu().in_place() as library:
        asked = make(library)
        ask(asked)
        folder = Path(f"/proc/{child_of(asked)}")
        status = (folder / "status").read_text()
        assert "Uid:\t65534\t65534\t65534\t65534" in status
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        [line] = [x for x in (folder / "limits").read_text().splitlines() if "cpu time" in x]
        assert line.split()[3:5] == ["unlimited", "unlimited"]
        assert len(list((folder / "fd").iterdir())) == 5


def test_processes_that_leave_the_list_are_told_with_their_last_samples(make: Make) -> None:
    def state(*pids: int) -> FakeNvml:
        fake = FakeNvml(live=1).gpu()
        for pid in pids:
            fake.process(pid, memory=pid)
        return fake.stream(100, 50, period_us=PERIOD_US).stream(101, 70, period_us=PERIOD_US)

    with state(100, 101).in_place() as library:
        asked = make(library)
        before = ask(asked)
        assert [c.pid for c in before.clients] == [100, 101]
        time.sleep(0.2)
        state(100).replace()
        told = ask(asked)
        assert [c.pid for c in told.clients] == [100]
        [left] = told.unlisted
        assert (left.pid, left.memory_bytes, left.sm_percent) == (101, 101, 70)
        assert left.samples[0].at_ns > before.clients[1].samples[-1].at_ns
        assert ask(asked).unlisted == ()


def test_mig_processes_are_told_by_a_second_child_with_one_right(make: Make) -> None:
    fake = FakeNvml().gpu(mig=1).mig(uuid="MIG-a", gi=1, ci=0).process(100, memory=5)
    with fake.in_place() as library:
        asked = make(library)
        first, second = ask(asked), ask(asked)
        assert asked.starts == 2
        for told in (first, second):
            assert told.error is None
            assert [(c.gpu_id, c.pid) for c in told.clients] == [("MIG-a", 100)]
        status = Path(f"/proc/{child_of(asked)}/status").read_text()
        assert "Uid:\t0\t" in status
        effective = int(status.split("CapEff:")[1].split()[0], 16)
        assert effective & ~(1 << 21) == 0


def test_accounted_processes_stay_between_the_rounds_that_ask_for_them(make: Make) -> None:
    with FakeNvml().gpu(accounting=1).accounted(55, sm=99, ms=1000).in_place() as library:
        asked = make(library)
        assert [[one.pid for one in ask(asked).accounted] for _ in range(3)] == [[55]] * 3


# -------------------------------------------------------------------- every sample, once


def stamps(told: Round, pid: int) -> list[int]:
    """Each sample's number: its time in periods."""
    found = [s for c in (*told.clients, *told.unlisted) if c.pid == pid for s in c.samples]
    assert all(s.at_ns % (PERIOD_US * 1000) == 0 for s in found)
    return [s.at_ns // (PERIOD_US * 1000) for s in found]


def test_samples_are_never_twice_and_never_lost(make: Make) -> None:
    fake = FakeNvml().gpu()
    fake.process(100).stream(100, 50, period_us=PERIOD_US)
    fake.process(101).stream(101, 60, period_us=PERIOD_US, late_us=300_000)
    fake.gpu().process(102).stream(102, 70, period_us=PERIOD_US, late_us=100_000)
    seen: dict[int, list[int]] = {100: [], 101: [], 102: []}
    with fake.in_place() as library:
        asked = make(library)
        for number in range(21):
            told = ask(asked)
            assert told.error is None
            for pid in seen:
                seen[pid] += stamps(told, pid)
            time.sleep(0.02 + number % 5 * 0.05)
        until_us = told.at_ns // 1000 - 300_000
        assert asked.starts == 1
    for numbers in seen.values():
        assert len(numbers) > 100
        assert len(set(numbers)) == len(numbers)
        missing = set(range(min(numbers), until_us // PERIOD_US)) - set(numbers)
        assert missing == set()


def test_samples_go_on_when_the_drivers_clock_goes_back(make: Make) -> None:
    shift = 60_000_000

    def state(shift_us: int) -> FakeNvml:
        fake = FakeNvml(live=1).gpu().process(100)
        return fake.stream(100, 50, period_us=PERIOD_US, keep_us=2_000_000, shift_us=shift_us)

    with state(0).in_place() as library:
        asked = make(library)
        ask(asked)
        state(-shift).replace()
        numbers: list[int] = []
        for _ in range(12):
            time.sleep(0.05)
            numbers += stamps(told := ask(asked), 100)
    assert len(set(numbers)) == len(numbers) > 0
    assert set(range(min(numbers), max(numbers))) <= set(numbers)
    # The newest of the last round is of that round.
    assert max(numbers) * PERIOD_US > told.at_ns // 1000 - shift - 1_000_000


def test_a_new_child_does_not_give_what_the_one_before_gave(make: Make, clock: Clock) -> None:
    with FakeNvml().gpu().process(100).stream(100, 50, period_us=PERIOD_US).in_place() as library:
        asked = make(library)
        numbers = stamps(ask(asked), 100)
        os.kill(child_of(asked), signal.SIGKILL)
        assert ask(asked).error is not None
        clock.skipped += 1.5
        told = ask(asked)
        assert (told.error, asked.starts) == (None, 2)
        numbers += stamps(told, 100)
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_a_scans_question_is_answered_with_the_newest_use(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvml(driver="1.2").gpu().process(100, memory=5).sample(100, 90, age_us=1000)
    with fake.gpu(lost=1).in_place() as library:
        asked = make(library)
        ask(asked)
        time.sleep(0.01)
        FakeNvml(driver="1.2").gpu().process(100, memory=5).replace()
        told = ask(asked)
        while told.clients[0].samples:
            told = ask(asked)
        monkeypatch.setattr(nvml, "start", lambda host, **options: told.as_query())
        options = scan.ScanOptions(sensors=frozenset({"nvml"}))
        snapshot = scan.take_snapshot(Host(), options)
        own = stat_lines.own_pids(Host(), stat_lines.read(Host()))
        assert {child_of(asked), told.as_query().child_pid} <= own
        assert snapshot.node.driver_version == "1.2"
        assert [(c.pid, c.sm_percent) for c in snapshot.clients] == [(100, 90)]
        assert snapshot.gpus == told.gpus
        assert snapshot.libraries == asked.libraries
    failed = Round(at_ns=1, error=Denied("why", remedy="what"))
    monkeypatch.setattr(nvml, "start", lambda host, **options: failed.as_query())
    [run] = [r for r in scan.take_snapshot(Host(), options).sensors if r.name == "nvml"]
    assert (run.state, run.reason, run.remedy) == ("failed", "why", "what")


# -------------------------------------------------------------------- GPUs that come and go


def test_another_number_of_gpus_is_noticed_by_the_same_child(make: Make) -> None:
    with FakeNvml(live=1).gpu(uuid="GPU-a").process(100).in_place() as library:
        asked = make(library)
        assert [gpu.id for gpu in ask(asked).gpus] == ["GPU-a"]
        FakeNvml(live=1).gpu(uuid="GPU-b").gpu(uuid="GPU-a").process(101).gpu().replace()
        told = ask(asked)
        assert [gpu.id for gpu in told.gpus][:2] == ["GPU-b", "GPU-a"]
        assert [(c.gpu_id, c.pid) for c in told.clients] == [("GPU-a", 101)]
        FakeNvml(live=1).replace()
        assert (ask(asked).gpus, asked.starts) == ((), 1)


def test_a_lost_gpu_is_looked_for_again_and_costs_only_itself(make: Make) -> None:
    with FakeNvml().gpu().process(100).gpu(uuid="GPU-b", lost=1).in_place() as library:
        asked = make(library)
        for _ in range(3):
            told = ask(asked)
            assert [gpu.error is None for gpu in told.gpus] == [True, False]
            assert [c.pid for c in told.clients] == [100]
        FakeNvml().gpu().process(100).gpu(uuid="GPU-b", util=9).replace()
        wait_for(lambda: ask(asked).gpus[1].error is None, "the GPU is back")
        told = ask(asked)
        assert ([g.error for g in told.gpus], told.gpus[1].sm_percent) == ([None, None], 9)
        assert asked.starts == 1


def test_a_gpu_that_the_kernel_lists_anew_is_looked_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel, "DRIVER_DIRECTORY", str(tmp_path))
    (tmp_path / "gpus/0000:01:00.0").mkdir(parents=True)
    with FakeNvml().gpu().in_place() as library:
        asked = make(library)
        assert len(ask(asked).gpus) == 1
        FakeNvml().gpu().gpu().replace()
        assert len(ask(asked).gpus) == 1
        (tmp_path / "gpus/0000:03:00.0").mkdir()
        told = ask(asked)
        assert len(told.gpus) == 2
        # The one that only the kernel lists is a gap.
        assert [gap.what for gap in told.gaps] == ["GPU at 00000000:03:00.0"]


def test_a_driver_that_goes_away_is_said_and_asked_again(make: Make, clock: Clock) -> None:
    with FakeNvml(live=1).gpu().in_place() as library:
        asked = make(library)
        assert ask(asked).error is None
        FakeNvml(live=1).gpu().gpu().answer("nvmlInit_v2", 18).replace()
        assert "different versions" in str(ask(asked).error)
        FakeNvml(live=1).gpu().gpu().replace()
        clock.skipped += 1.5
        assert (ask(asked).error, asked.starts) == (None, 2)


# -------------------------------------------------------------------- a child that fails


def failing(asked: Sampler) -> GpuwardenError:
    told = ask(asked)
    assert told.error is not None
    return told.error


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_child_that_hangs_is_ended_told_and_replaced(make: Make, clock: Clock, how: str) -> None:
    fake = FakeNvml().gpu().process(100).gpu().answer("nvmlDeviceGetUUID", how, gpu=1)
    with fake.in_place() as library:
        asked = make(library, 5.0)
        asked.request()
        pid = child_of(asked)
        assert not asked.overdue(clock())
        wait_for(lambda: asked.take() or asked.messages_so_far >= 2, "it has said what it can")
        assert asked.overdue(clock()) is False
        clock.skipped += 5.0
        assert asked.overdue(clock())
        told = taken(asked)
        assert isinstance(told.error, TimedOut)
        assert "GPU 1 of 2" in str(told.error)
        assert [c.pid for c in told.clients] == [100]
        assert is_gone(pid)
        assert asked.child_pids == ()
        FakeNvml().gpu().gpu().replace()
        # Until its time comes there is none, and every round says so.
        assert isinstance(failing(asked), TimedOut)
        assert asked.starts == 1
        clock.skipped += 1.5
        told = ask(asked)
        assert (told.error, len(told.gpus), asked.starts) == (None, 2, 2)


def test_a_child_that_cannot_be_killed_is_left_behind_and_no_more_than_three(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    real_kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    with FakeNvml().answer("nvmlInit_v2", "hang").in_place() as library:
        asked = make(library, 5.0)
        for count in range(1, 4):
            asked.request()
            clock.skipped += 6
            assert asked.take() is None
            clock.skipped += 1
            told = taken(asked)
            assert "left behind" in str(told.error)
            assert len(asked.child_pids) == count
            clock.skipped += 61
        assert "cannot be killed" in str(failing(asked))
        assert asked.starts == 3
        monkeypatch.undo()
        for pid in killed:
            real_kill(pid, signal.SIGKILL)
        FakeNvml().gpu().replace()
        wait_for(lambda: asked.take() is None and not asked.child_pids, "they ended")
    with FakeNvml().gpu().in_place():
        clock.skipped += 61
        assert ask(asked).error is None


def test_a_crash_is_told_and_the_pauses_grow_to_a_minute(make: Make, clock: Clock) -> None:
    fake = FakeNvml().gpu().gpu().answer("nvmlDeviceGetName", "crash", gpu=1)
    with fake.in_place() as library:
        asked = make(library)
        told = ask(asked)
        assert isinstance(told.error, Malformed)
        assert f"signal {signal.SIGSEGV.value}" in str(told.error)
        assert [gpu.index for gpu in told.gpus] == [0]
        for starts, pause in enumerate((1, 2, 4, 8, 16, 32, 60, 60), 1):
            clock.skipped += pause - 0.1
            assert isinstance(failing(asked), Malformed)
            assert asked.starts == starts
            clock.skipped += 0.1
            assert isinstance(failing(asked), Malformed)
            assert asked.starts == starts + 1


def test_a_child_that_ends_between_rounds_is_noticed_at_once(make: Make, clock: Clock) -> None:
    with FakeNvml().gpu().in_place() as library:
        asked = make(library)
        ask(asked)
        os.kill(child_of(asked), signal.SIGKILL)

        def noticed() -> bool:
            select.select([asked], [], [], 0.05)
            return asked.take() is None and not asked.child_pids

        wait_for(noticed, "its end is noticed")
        assert select.select([asked], [], [], 0)[0] == []
        assert "signal 9" in str(failing(asked))
        clock.skipped += 1.5
        assert ask(asked).error is None


def test_pauses_start_anew_after_a_steady_time(make: Make, clock: Clock) -> None:
    with FakeNvml().gpu().in_place() as library:
        asked = make(library)
        for _ in range(4):
            assert ask(asked).error is None
            clock.skipped += 59
            assert ask(asked).error is None
            clock.skipped += 2
            os.kill(child_of(asked), signal.SIGKILL)
            assert isinstance(failing(asked), Malformed)
            clock.skipped += 1.1
        assert asked.starts == 4


def test_the_child_ends_with_its_parent() -> None:
    reader, writer = os.pipe()
    with FakeNvml().gpu().in_place() as library:
        parent = os.fork()
        if parent == 0:
            asked = Sampler(Host(), library)
            ask(asked)
            os.write(writer, str(child_of(asked)).encode())
            signal.pause()
        child = int(os.read(reader, 32))
        assert Path(f"/proc/{child}").exists()
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert is_gone(child)
    os.close(reader)
    os.close(writer)


def test_closing_ends_the_child_in_the_middle_of_a_round() -> None:
    with FakeNvml().answer("nvmlInit_v2", "hang").in_place() as library:
        asked = Sampler(Host(), library)
        asked.request()
        pid = child_of(asked)
        asked.close()
        assert is_gone(pid)
        asked.close()


# -------------------------------------------------------------------- which library


@pytest.fixture
def own_library() -> Iterator[Path]:
    """A copy of the stand-in that a test may spoil."""
    folder = library_directory() / f"own-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o755)
    yield Path(shutil.copy(build_library(), folder / "libnvidia-ml.so.1"))
    shutil.rmtree(folder)


@pytest.mark.parametrize("dies", [True, False])
def test_a_library_that_others_can_write_by_now_is_refused(
    make: Make, clock: Clock, own_library: Path, dies: bool
) -> None:
    with FakeNvml().gpu().in_place():
        asked = make(str(own_library))
        assert ask(asked).error is None
        pid = child_of(asked)
        spoilt = own_library.with_suffix(".new")
        shutil.copy(own_library, spoilt)
        spoilt.chmod(0o777)
        spoilt.rename(own_library)
        if dies:
            os.kill(pid, signal.SIGKILL)
            failing(asked)
            clock.skipped += 1.5
        else:
            assert ask(asked).error is None
            clock.skipped += 61
        told = ask(asked)
        assert isinstance(told.error, Denied)
        assert "others than root" in str(told.error)
        assert [check.accepted for check in asked.libraries] == [False]
        assert told.libraries == asked.libraries
        wait_for(lambda: asked.take() is None and pid not in children(), "its end is noticed")
        own_library.chmod(0o755)
        clock.skipped += 5
        assert ask(asked).error is None


def test_without_a_driver_it_is_asked_once_a_minute(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_library, "DIRECTORIES", ("/nowhere",))
    monkeypatch.setattr(sampler, "driver_is_loaded", lambda host: False)
    asked = make(None)
    assert type(failing(asked)) is Unavailable
    folder = str(build_library().parent)
    monkeypatch.setattr(nvml_library, "DIRECTORIES", (folder,))
    with FakeNvml().gpu().in_place():
        clock.skipped += 55
        assert type(failing(asked)) is Unavailable
        clock.skipped += 6
        assert (ask(asked).error, asked.starts) == (None, 1)
