"""Launches of the kernels of some modules, as evidence for whoever tells of the modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpuwarden.finding import Evidence
from gpuwarden.model import CudaProcess, KernelUse, Process
from gpuwarden.node import Node
from gpuwarden.rules import cuda_processes as watching

SOURCE = "kernel launches"
SHOWN = 4
NAME_SHOWN = 80


def kernel_lines(node: Node, process: Process, digests: Collection[str]) -> tuple[Evidence, ...]:
    """How often the kernels of the modules with these digests were launched, the most first;
    none where no launch was seen."""
    cuda = watching.cuda_of(node, process)
    return () if cuda is None else tuple(_lines(cuda, digests))


def _lines(cuda: CudaProcess, digests: Collection[str]) -> Iterator[Evidence]:
    fit = cuda.fit
    told: dict[tuple[str, str], KernelUse] = {}
    for use in (*cuda.kernels, *(fit.outside if fit is not None else ())):
        if use.digest and use.digest in digests and use.launches:
            key = (use.name, use.digest)
            if key not in told or told[key].launches < use.launches:
                told[key] = use
    uses = sorted(told.values(), key=lambda use: (-use.launches, use.name))
    apart = {(use.name, use.digest) for use in fit.second_stream} if fit is not None else set()
    for use in uses[:SHOWN]:
        name = use.name[:NAME_SHOWN] or "without a name"
        times = f"{use.launches} times" if use.launches > 1 else "once"
        text = f"kernel {name} of module {use.digest[:12]} was launched {times}"
        if cuda.launches >= use.launches:
            text += f", {_percent(use.launches / cuda.launches)} of the process's launches"
        if (use.name, use.digest) in apart:
            text += "; it comes steadily, out of step with the workload's own launches"
        yield Evidence(source=SOURCE, text=text)
    if len(uses) > SHOWN:
        yield Evidence(
            source=SOURCE, text=f"{len(uses) - SHOWN} more kernels of these modules were launched"
        )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "under 1%"
