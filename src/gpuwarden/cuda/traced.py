"""What the tracer keeps of each process that uses the CUDA driver library."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from gpuwarden.cuda.handles import Handles, Kernel
from gpuwarden.model import KernelUse, LaunchSample, LaunchWindow
from gpuwarden.probes.cuda.records import LaunchCount, SampledLaunch
from gpuwarden.probes.events import ticks

PROCESSES_LIMIT = 4096
KERNELS_LIMIT = 1024
"""Of one window; those launched least are one entry without a name."""

Key = tuple[int, int]
"""(pid, start time since boot in ns)."""


class _Traced(Struct):
    handles: Handles = field(default_factory=Handles)
    counted: dict[int, int] = {}
    """Handle → launches as of the last window."""


class Processes:
    """One entry a process; bounded, the one that was heard of longest ago makes room."""

    def __init__(self) -> None:
        self._traced: OrderedDict[Key, _Traced] = OrderedDict()
        self.crowded_out = 0

    def handles(self, key: Key) -> Handles:
        return self._of(key).handles

    def _of(self, key: Key) -> _Traced:
        found = self._traced.get(key)
        if found is None:
            found = self._traced[key] = _Traced(counted={})
            if len(self._traced) > PROCESSES_LIMIT:
                self._traced.popitem(last=False)
                self.crowded_out += 1
        self._traced.move_to_end(key)
        return found

    def known(self) -> list[Key]:
        return list(self._traced)

    def forget(self, key: Key) -> None:
        self._traced.pop(key, None)

    # ---------------------------------------------------------------- launches

    def windows(
        self,
        counts: Iterable[LaunchCount],
        samples: Iterable[SampledLaunch],
        dropped: dict[int, int],
        from_ns: int,
        until_ns: int,
    ) -> Iterator[tuple[Key, LaunchWindow]]:
        """The window of each process that launched anything; ``dropped`` is by pid."""
        launched: dict[Key, dict[int, int]] = {}
        for one in counts:
            key = (one.pid, one.start_time_ns)
            traced = self._of(key)
            more = one.launches - traced.counted.get(one.handle, 0)
            traced.counted[one.handle] = one.launches
            if more > 0:
                launched.setdefault(key, {})[one.handle] = more
        sampled: dict[Key, list[SampledLaunch]] = {}
        for sample in samples:
            sampled.setdefault((sample.pid, sample.start_time_ns), []).append(sample)
        for key, handles in launched.items():
            graphs = handles.pop(0, 0)
            known = self._of(key).handles
            kernels = _kernels(known, handles)
            yield (
                key,
                LaunchWindow(
                    pid=key[0],
                    start_time_ticks=ticks(key[1]),
                    from_ns=from_ns,
                    until_ns=until_ns,
                    kernels=kernels,
                    graph_launches=graphs,
                    samples=tuple(_samples(known, kernels, sampled.get(key, ()))),
                    dropped=dropped.get(key[0], 0),
                ),
            )


def _samples(
    known: Handles, kernels: Iterable[KernelUse], sampled: Iterable[SampledLaunch]
) -> Iterator[LaunchSample]:
    index = {(one.name, one.digest): at for at, one in enumerate(kernels)}
    rest = index.get(("", ""))
    for one in sampled:
        at = index.get(known.kernel(one.handle), rest)
        if at is not None:
            yield LaunchSample(one.at_ns, at, one.thread_id, one.stream, one.grid, one.block)


def _kernels(known: Handles, handles: dict[int, int]) -> tuple[KernelUse, ...]:
    uses: dict[Kernel, int] = {}
    for handle, launches in handles.items():
        kernel = known.kernel(handle)
        uses[kernel] = uses.get(kernel, 0) + launches
    if len(uses) > KERNELS_LIMIT:
        by_count = sorted(uses.items(), key=lambda one: -one[1])
        rest = sum(count for _, count in by_count[KERNELS_LIMIT - 1 :])
        uses = dict(by_count[: KERNELS_LIMIT - 1])
        uses["", ""] = uses.get(("", ""), 0) + rest
    return tuple(
        KernelUse(name=name, digest=digest, launches=launches)
        for (name, digest), launches in uses.items()
    )
