"""Handles of a process: which kernel of which module they are, and launches by window."""

from __future__ import annotations

import pytest

from gpuwarden.cuda.handles import HANDLES_LIMIT, Handles
from gpuwarden.cuda.traced import KERNELS_LIMIT, Processes
from gpuwarden.model import KernelUse, LoadedModule
from gpuwarden.probes.cuda.records import HandleNamed, LaunchCount, SampledLaunch

KEY = (42, 5_000_000_000)
GEMM = LoadedModule(digest="gg", kind="cubin", kernels=("gemm",), kernel_count=1)
HASH = LoadedModule(digest="hh", kind="cubin", kernels=("sha256d",), kernel_count=1)


def _named(handle: int, of: int, name: str = "") -> HandleNamed:
    return HandleNamed(*KEY, "f", handle, of, name)


def test_a_function_is_of_the_module_that_its_load_came_to() -> None:
    handles = Handles()
    handles.examined(1, [GEMM])
    handles.examined(2, [HASH])
    handles.came(1, 100)
    handles.came(2, 200)
    handles.named(_named(101, 100, "gemm"))
    handles.named(_named(201, 200, "sha256d"))
    assert handles.kernel(101) == ("gemm", "gg")
    assert handles.kernel(201) == ("sha256d", "hh")
    assert handles.kernel(999) == ("", "")


def test_a_function_of_a_kernel_of_a_library_is_followed() -> None:
    handles = Handles()
    handles.examined(1, [GEMM, HASH])
    handles.came(1, 100)
    handles.named(_named(150, 100, "sha256d"))
    handles.named(_named(151, 150))
    assert handles.kernel(151) == ("sha256d", "hh")


def test_what_is_known_later_counts() -> None:
    handles = Handles()
    handles.named(_named(101, 100, "gemm"))
    assert handles.kernel(101) == ("gemm", "")
    handles.came(1, 100)
    handles.examined(1, [GEMM])
    assert handles.kernel(101) == ("gemm", "gg")


def test_a_handle_that_is_given_again_is_the_new_one() -> None:
    handles = Handles()
    handles.named(_named(101, 100, "gemm"))
    assert handles.kernel(101)[0] == "gemm"
    handles.named(_named(101, 200, "sha256d"))
    assert handles.kernel(101)[0] == "sha256d"


def test_handles_that_lead_in_a_circle_end() -> None:
    handles = Handles()
    handles.named(_named(1, 2))
    handles.named(_named(2, 1))
    assert handles.kernel(1) == ("", "")


def test_handles_are_bounded() -> None:
    handles = Handles()
    for handle in range(HANDLES_LIMIT + 10):
        handles.named(_named(handle + 1, 0, f"k{handle}"))
    assert handles.kernel(1) == ("", "")
    assert handles.kernel(HANDLES_LIMIT + 10)[0] == f"k{HANDLES_LIMIT + 9}"


def _windows(processes: Processes, counts: list[LaunchCount], samples=()):  # type: ignore[no-untyped-def]
    return list(processes.windows(counts, samples, {}, 0, 10))


def test_windows_hold_what_was_launched_since_the_last_one() -> None:
    processes = Processes()
    handles = processes.handles(KEY)
    handles.named(_named(101, 100, "gemm"))
    [(key, window)] = _windows(processes, [LaunchCount(*KEY, 101, 5), LaunchCount(*KEY, 0, 2)])
    assert key == KEY
    assert window.kernels == (KernelUse(name="gemm", launches=5),)
    assert window.graph_launches == 2
    [(_, window)] = _windows(processes, [LaunchCount(*KEY, 101, 8), LaunchCount(*KEY, 0, 2)])
    assert window.kernels == (KernelUse(name="gemm", launches=3),)
    assert window.graph_launches == 0
    assert _windows(processes, [LaunchCount(*KEY, 101, 8)]) == []


def test_samples_point_to_the_kernels_of_their_window() -> None:
    processes = Processes()
    handles = processes.handles(KEY)
    handles.named(_named(1, 0, "a"))
    handles.named(_named(2, 0, "b"))
    counts = [LaunchCount(*KEY, 1, 1), LaunchCount(*KEY, 2, 1)]
    samples = [
        SampledLaunch(5, *KEY, 42, 2, 7, (1, 1, 1), (32, 1, 1)),
        SampledLaunch(6, *KEY, 42, 1, 7, (1, 1, 1), (32, 1, 1)),
    ]
    [(_, window)] = _windows(processes, counts, samples)
    assert [window.kernels[one.kernel].name for one in window.samples] == ["b", "a"]
    assert [one.at_ns for one in window.samples] == [5, 6]


@pytest.mark.parametrize("extra", [0, 50])
def test_a_window_of_very_many_kernels_keeps_every_launch(extra: int) -> None:
    processes = Processes()
    handles = processes.handles(KEY)
    many = KERNELS_LIMIT + extra
    for handle in range(1, many + 1):
        handles.named(_named(handle, 0, f"k{handle}"))
    [(_, window)] = _windows(processes, [LaunchCount(*KEY, h, 2) for h in range(1, many + 1)])
    assert len(window.kernels) == KERNELS_LIMIT
    assert sum(one.launches for one in window.kernels) == 2 * many
