"""The children that examine loads: what waits for them is bounded, and who ends is replaced."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable

import pytest

from gpuwarden.code.module import Module
from gpuwarden.codescan import inside
from gpuwarden.cuda import examining_child, modules
from gpuwarden.cuda.load_queue import SMALL_BYTES, QueueLimits
from gpuwarden.cuda.modules import ModuleExaminer
from gpuwarden.policy import Policy
from tests.support.captured_loads import answers, assessing, captured, examined, large
from tests.support.code_scans import code
from tests.support.departed import children

# ------------------------------------------------------------------------------ bounds


def test_what_finds_no_room_is_answered_and_said() -> None:
    limits = QueueLimits(loads=3)
    with ModuleExaminer(Policy(), limits=limits, assess=assessing(lambda module: None)) as examiner:
        for number in range(5):
            examiner.submit(captured(code(f"k{number}"), number))
        found = {one.number: one for one in answers(examiner, 5)}
        assert [len(found[number].modules) for number in range(5)] == [1, 1, 1, 0, 0]
        refused = ("not examined: 3 loads were waiting already",)
        assert [found[number].problems for number in (2, 3, 4)] == [(), refused, refused]
        assert examined(examiner, code("later"), 6).modules


def test_bytes_that_find_no_room_are_known_when_they_wait_already() -> None:
    limits = QueueLimits(size_bytes=5 << 20)
    with ModuleExaminer(Policy(), limits=limits, assess=assessing(lambda module: None)) as examiner:
        for number in range(3):
            examiner.submit(captured(large(f"k{number}") + bytes(1 << 20), number))
        found = {one.number: one for one in answers(examiner, 3)}
        assert found[2].problems == ("not examined: 4 MiB of loads were waiting already",)
        # As many again as would fit, of which the first is no stranger by then.
        for number in (3, 4):
            examiner.submit(captured(large(f"n{number}") + bytes(1 << 20), number))
        examiner.submit(captured(large("k0") + bytes(1 << 20), 5))
        found = {one.number: one for one in answers(examiner, 3)}
        assert found[5].problems == ()
        assert found[5].modules[0].kernels == ("k0",)


def test_a_small_module_does_not_wait_for_a_large_one() -> None:
    def wait(module: Module) -> None:
        if module.kernels and module.kernels[0].name == "large":
            time.sleep(3600)

    with ModuleExaminer(Policy(), assess=assessing(wait)) as examiner:
        for number in range(3):
            examiner.submit(captured(large("large") + bytes(number), number))
        # Until all are hashed: then only the long work is left.
        for _ in range(20):
            select.select([examiner], [], [], 0.05)
            assert examiner.take() == []
        assert examined(examiner, code("small"), 9).modules[0].kernels == ("small",)


def test_descriptors_and_children_are_gone_at_the_end() -> None:
    before, mine = set(os.listdir("/proc/self/fd")), children()
    with ModuleExaminer(Policy(), assess=assessing(lambda module: time.sleep(3600))) as examiner:
        for number in range(6):
            examiner.submit(captured(code(f"k{number}"), number))
            examiner.submit(captured(large(f"k{number}"), number))
        examiner.submit(captured(b""))
    assert set(os.listdir("/proc/self/fd")) == before
    assert children() == mine


# ------------------------------------------------------------------------------ children that end


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(7)


@pytest.mark.parametrize(("end", "how"), [(crash, "by SIGSEGV"), (leave, "with status 7")])
@pytest.mark.parametrize("size", [0, SMALL_BYTES])
def test_a_child_that_ends_costs_one_answer_and_is_replaced(
    end: Callable[[], None], how: str, size: int
) -> None:
    def fail(module: Module) -> None:
        if module.kernels and module.kernels[0].name == "bad":
            end()

    with ModuleExaminer(Policy(), assess=assessing(fail)) as examiner:
        for number, name in enumerate(["a", "bad", "b", "c"]):
            examiner.submit(captured(code(name) + bytes(size), number))
        found = {one.number: one for one in answers(examiner, 4)}
        assert found[1].modules == ()
        assert found[1].problems == (
            f"the child that examined it ended before it was done: it ended {how}",
        )
        assert [found[n].modules[0].kernels for n in (0, 2, 3)] == [("a",), ("b",), ("c",)]
        assert examiner.replaced == 1


def test_a_child_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining_child, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(modules, "LOOK_SECONDS", 0.05)

    def spin(module: Module) -> None:
        while module.kernels and module.kernels[0].name == "endless":
            pass

    with ModuleExaminer(Policy(), assess=assessing(spin)) as examiner:
        answer = examined(examiner, code("endless"))
        assert answer.problems == ("not examined to its end: it took too long",)
        assert examined(examiner, code("next")).modules
        monkeypatch.setattr(examining_child, "WAITING_FACTOR", 0.5)
        assert examiner.replaced == 1


def test_a_child_that_is_killed_while_it_has_nothing_to_do_is_replaced() -> None:
    others = children()
    with ModuleExaminer(Policy(), assess=assessing(lambda module: None)) as examiner:
        examined(examiner, code("a"))
        for child in children() - others:
            os.kill(child, signal.SIGKILL)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert examined(examiner, code("b")).modules


def test_children_that_do_not_come_up_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "FORK_AGAIN_SECONDS", 0.01)

    def confine(settings: object) -> tuple[str, ...]:
        raise PermissionError("capset")

    with monkeypatch.context() as patch:
        patch.setattr(inside, "confine", confine)
        examiner = ModuleExaminer(Policy(), assess=assessing(lambda module: None))
        answer = examined(examiner, code("a"))
        assert answer.problems == ("not examined: it ended with status 1",)
        assert "did not come up" in examiner.problems[0]
    with examiner:
        assert examined(examiner, code("a")).modules
        assert examiner.problems == ()
