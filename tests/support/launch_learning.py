"""Made-up runs learned and compared, for tests that ask what is said of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from gpuwarden.cuda.launches.comparison import Comparison
from gpuwarden.cuda.launches.learning import Learning
from gpuwarden.cuda.launches.profile import LaunchProfile, Origin
from gpuwarden.model import KernelUse, LaunchFit, LaunchWindow
from tests.support.launch_runs import EPOCH_NS, Launched, MadeKernel, Workload, digest_of, windows

LEARN_SECONDS = 150.0
ORIGIN = Origin(node="node1", workload="training", policy_profile="torch", learned=1_700_000_000)
MINER_JIT = digest_of("jit miner")


def learning_of(
    workload: Workload, seed: int, seconds: float = LEARN_SECONDS, **made: int
) -> Learning:
    """The windows of one run, taken up."""
    learning = Learning()
    for window in windows(workload.run(seconds, seed), workload.table, **made):
        learning.add(window, workload.digests, jit_digests=workload.jit_digests)
    return learning


@cache
def training() -> Workload:
    """A small training."""
    return Workload(seed=3, kernels=60, launches=150, evaluation_every=200)


@cache
def profile() -> LaunchProfile:
    """What it teaches."""
    return learning_of(training(), 1).profile(name="train", origin=ORIGIN, tool="test")


def fits(
    launched: Launched, workload: Workload, table: list[MadeKernel], **made: int
) -> list[LaunchFit | None]:
    """What is said after each window; JIT code that looks like the workload's is allowed."""
    comparison = Comparison(profile(), wall_offset_ns=0)
    jit = workload.jit_digests | {MINER_JIT}
    return [
        comparison.add(window, workload.digests | jit, jit_digests=jit)
        for window in windows(launched, table, **made)
    ]


def window_of(kernels: Iterable[KernelUse], second: int = 0, **fields: object) -> LaunchWindow:
    """A window of a second without samples."""
    values: dict[str, object] = {
        "pid": 4242,
        "start_time_ticks": 100,
        "from_ns": EPOCH_NS + second * 1_000_000_000,
        "until_ns": EPOCH_NS + (second + 1) * 1_000_000_000,
        "kernels": tuple(kernels),
        **fields,
    }
    return LaunchWindow(**values)  # type: ignore[arg-type]


def accused(fit: LaunchFit | None) -> Iterator[str]:
    """Of what a fit accuses the process."""
    if fit is not None:
        yield from ("outside",) if fit.outside else ()
        yield from ("second",) if fit.second_stream else ()
        yield from ("unexplained",) if fit.unexplained else ()
