"""The launch profile of a training loop that the test bed can run, learned as from a long run."""

from __future__ import annotations

from pathlib import Path

from gpuwarden.cuda.launches.learning import Learning
from gpuwarden.cuda.launches.profile import Origin, write_profile
from gpuwarden.model import KernelUse, LaunchSample, LaunchWindow
from tests.support.code_scans import scanned

STEP_NS = 1_000_000
SECOND_NS = 1_000_000_000
SECONDS = 180
PATTERN = (0, 1, 1)
"""One product, then two operations on elements, as ``sequence TIMES 1000 f,h*2`` launches them."""


def write_training_loop(path: Path, gemm: Path, elementwise: Path, *, workload: str) -> None:
    """Writes the profile of that loop to ``path``; the kernels are of these two modules."""
    digests = [scanned(module).modules[0].module.digest for module in (gemm, elementwise)]
    names = ("gemm_tile", "scale_and_add")
    steps = SECOND_NS // STEP_NS
    learning = Learning()
    for second in range(SECONDS):
        begin = second * SECOND_NS
        kernels = tuple(
            KernelUse(name=name, digest=digest, launches=steps * PATTERN.count(number))
            for number, (name, digest) in enumerate(zip(names, digests, strict=True))
        )
        samples = tuple(
            LaunchSample(
                begin + step * STEP_NS + 1000 * place, kernel, 1, 1, (64, 2, 1), (128, 4, 1)
            )
            for step in range(steps)
            for place, kernel in enumerate(PATTERN)
        )
        learning.add(
            LaunchWindow(
                pid=1,
                start_time_ticks=1,
                from_ns=begin,
                until_ns=begin + SECOND_NS,
                kernels=kernels,
                samples=samples if second % 5 == 0 else (),
            ),
            frozenset(digests),
        )
    write_profile(str(path), learning.profile(name="loop", origin=Origin(workload=workload)))
