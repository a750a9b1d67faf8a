"""Runs of made-up workloads as the tracer tells them: windows of launches, with or without a miner.

A training step is layers of one sequence, forward by one thread and backward by another, copies on
a stream of their own, and an optimizer; with an evaluation now and then, a start and checkpoints.
Gaps between launches vary, steps vary, names of JIT kernels have other numbers in each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gpuwarden.model import KernelUse, LaunchSample, LaunchWindow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SAMPLE_EVERY, SAMPLE_MOST = 5, 4096
MAIN, BACKWARD, MINER_THREAD = 100, 101, 109
COMPUTE, COMMUNICATION, MINER_STREAM = 7, 13, 99
EPOCH_NS = 1_000_000_000_000


def digest_of(module: str) -> str:
    """A digest for a module's name."""
    return module.encode().hex().ljust(64, "0")[:64]


@dataclass(frozen=True)
class Launches:
    """One stretch of a program: kernels, where, and how long after the one before."""

    kernel: Ints
    thread: Ints
    stream: Ints
    gap: Floats


@dataclass(frozen=True)
class MadeKernel:
    name: str
    digest: str
    jit: bool
    block: tuple[int, int, int]


@dataclass
class Workload:
    """A program that launches; the same seed makes the same one."""

    seed: int = 0
    kernels: int = 300
    step_seconds: float = 0.13
    launches: int = 600
    jit_share: float = 0.3
    step_jitter: float = 0.05
    gap_jitter: float = 0.3
    evaluation_every: int = 400
    start_seconds: float = 10.0
    table: list[MadeKernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        weights = 1 / np.arange(1, self.kernels + 1) ** 1.1
        self._weights = weights / weights.sum()
        if not self.table:
            names = np.random.default_rng([self.seed, 1])
            for number in range(self.kernels):
                jit = names.random() < self.jit_share
                module = f"jit {self.seed}.{number}" if jit else f"lib {self.seed}.{number % 40}"
                name = (
                    f"triton_poi_fused_{_word(number)}_{number}"
                    if jit
                    else f"_ZN2at6native{number}vectorized_{_word(number)}_kernelILi4EEEvi"
                )
                block = (int(names.choice([64, 128, 256, 512])), 1, 1)
                self.table.append(MadeKernel(name, digest_of(module), jit, block))
        layers = 12
        self.forward = self._layers(rng, layers, int(self.launches * 0.3), MAIN)
        self.backward = self._layers(rng, layers, int(self.launches * 0.5), BACKWARD)
        copies = int(rng.integers(self.kernels))
        stream = self.backward.stream.copy()
        kernel = self.backward.kernel.copy()
        stream[::15], kernel[::15] = COMMUNICATION, copies
        self.backward = replace(self.backward, stream=stream, kernel=kernel)
        self.optimizer = self._layers(rng, 30, int(self.launches * 0.2), MAIN)
        self.evaluation = self._layers(rng, layers, int(self.launches * 0.3), MAIN)
        self.start = self._random(rng, 400)
        # Waiting for data, and for the losses.
        self.forward.gap[0] += self.step_seconds * 0.2
        self.optimizer.gap[0] += self.step_seconds * 0.1
        total = sum(float(part.gap.sum()) for part in self._step())
        for part in (*self._step(), self.evaluation):
            part.gap[:] *= self.step_seconds / total

    def _step(self) -> tuple[Launches, Launches, Launches]:
        return self.forward, self.backward, self.optimizer

    def _layers(self, rng: np.random.Generator, layers: int, count: int, thread: int) -> Launches:
        each = max(1, count // layers)
        layer = rng.choice(self.kernels, each, p=self._weights)
        kernel = np.tile(layer, layers)
        odd = rng.random(len(kernel)) < 0.2
        kernel[odd] = rng.choice(self.kernels, int(odd.sum()), p=self._weights)
        gap = rng.lognormal(0, 0.7, len(kernel)) * 1e-4
        return Launches(kernel, np.full(len(kernel), thread), np.full(len(kernel), COMPUTE), gap)

    def _random(self, rng: np.random.Generator, count: int) -> Launches:
        kernel = rng.integers(0, self.kernels, count)
        gap = rng.lognormal(0, 1, count) * 2e-3
        return Launches(kernel, np.full(count, MAIN), np.full(count, COMPUTE), gap)

    def run(self, seconds: float, seed: int, *, start: bool = True) -> Launched:
        """What one run of it launches, with times of its own."""
        rng = np.random.default_rng(seed)
        parts: list[Launched] = []
        now, step = 0.0, 0
        if start:
            part = self.timed(rng, self.start, now)
            parts.append(part)
            now = float(part.at[-1])
        while now < seconds:
            sequence = self._step()
            if self.evaluation_every and step % self.evaluation_every == self.evaluation_every - 1:
                sequence = (self.evaluation,) * 60  # type: ignore[assignment]
                now += 1.5
            for one in sequence:
                part = self.timed(rng, one, now)
                parts.append(part)
                now = float(part.at[-1])
            step += 1
        return Launched(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("at", "kernel", "thread", "stream")
            )
        )

    def timed(self, rng: np.random.Generator, part: Launches, now: float) -> Launched:
        pace = max(0.5, rng.normal(1, self.step_jitter))
        if rng.random() < 0.01:
            pace *= 3
        gap = part.gap * pace * rng.lognormal(0, self.gap_jitter, len(part.gap))
        return Launched(now + np.cumsum(gap), part.kernel, part.thread, part.stream)

    def of_run(self, seed: int) -> Workload:
        """The same program in another run: its JIT kernels have other numbers and digests."""
        rng = np.random.default_rng(seed)
        table = [
            replace(
                one,
                name=f"{one.name.rpartition('_')[0]}_{int(rng.integers(1000))}",
                digest=digest_of(f"jit {seed}.{number}"),
            )
            if one.jit
            else one
            for number, one in enumerate(self.table)
        ]
        return replace(self, table=table)

    def with_shapes(self, seed: int, share: float = 0.3) -> Workload:
        """The same program with other shapes: other kernels of the same libraries, other times."""
        rng = np.random.default_rng(seed)
        table = [
            replace(one, name=f"{one.name[:-1]}x{seed}")
            if not one.jit and rng.random() < share
            else one
            for one in self.table
        ]
        return replace(self.of_run(seed), table=table, step_seconds=self.step_seconds * 1.7)

    def with_missed(self, seed: int, share: float = 0.3) -> Workload:
        """The same program where the bytes of some libraries' modules were not seen."""
        rng = np.random.default_rng(seed)
        missed = {one.digest for one in self.table if not one.jit and rng.random() < share}
        table = [replace(one, digest="") if one.digest in missed else one for one in self.table]
        return replace(self, table=table)

    def with_new_code(self, seed: int, share: float = 0.1) -> Workload:
        """The same program after a change: some of its JIT kernels are others."""
        rng = np.random.default_rng(seed)
        table = [
            replace(one, name=f"triton_per_fused_new_{_word(number)}_{number}")
            if one.jit and rng.random() < share
            else one
            for number, one in enumerate(self.table)
        ]
        return replace(self, table=table)

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(one.digest for one in self.table)

    @property
    def jit_digests(self) -> frozenset[str]:
        return frozenset(one.digest for one in self.table if one.jit)


@dataclass(frozen=True)
class Launched:
    """Launches in order of time, seconds since the run's start."""

    at: Floats
    kernel: Ints
    thread: Ints
    stream: Ints


MinerName = Literal["own", "renamed", "missed", "jit", "jit-known"]
"""Own module and name; own module with a known name; a known name, its module not seen; as a JIT
kernel of a new name, of a known one."""


@dataclass(frozen=True)
class Miner:
    """A kernel mixed in at a share of all launches, in a thread of its own or in the main one."""

    share: float
    name: MinerName = "own"
    own_thread: bool = True
    jitter: float = 0.1
    since: float = 0.0

    def kernel(self, workload: Workload) -> MadeKernel:
        common = next(one for one in workload.table if one.jit is (self.name == "jit-known"))
        block = (256, 1, 1)
        if self.name == "own":
            return MadeKernel("_Z12sha256d_scanPKjPjj", digest_of("miner"), False, block)
        if self.name == "jit":
            return MadeKernel("triton_red_fused_scan_7", digest_of("jit miner"), True, block)
        digest = {"renamed": digest_of("miner"), "missed": "", "jit-known": digest_of("jit miner")}
        return MadeKernel(common.name, digest[self.name], common.jit, common.block)

    def mixed(self, launched: Launched, number: int, seed: int) -> Launched:
        """The launches with those of the miner as kernel ``number`` among them."""
        rng = np.random.default_rng(seed)
        end = float(launched.at[-1])
        hz = len(launched.at) / end * self.share / (1 - self.share)
        count = int(hz * (end - self.since))
        at = self.since + np.cumsum(rng.normal(1, self.jitter, count).clip(0.1) / hz)
        at = at[at < end]
        thread, stream = np.full(len(at), MINER_THREAD), np.full(len(at), MINER_STREAM)
        if not self.own_thread:
            # When the thread comes by, after whatever it launches then.
            main = np.flatnonzero(launched.thread == MAIN)
            place = main[np.minimum(np.searchsorted(launched.at[main], at), len(main) - 1)]
            at = launched.at[place] + 2e-6 * (1 + np.arange(len(at)) % 3)
            thread[:], stream[:] = MAIN, COMPUTE
        return merged(launched, Launched(at, np.full(len(at), number), thread, stream))


def merged(*runs: Launched) -> Launched:
    """All their launches in order of time."""
    columns = [
        np.concatenate([getattr(run, name) for run in runs])
        for name in ("at", "kernel", "thread", "stream")
    ]
    order = np.argsort(columns[0], kind="stable")
    return Launched(*(column[order] for column in columns))


def beside(
    every_seconds: float, seconds: float, kernels: Ints, seed: int, *, jitter: float = 0.1
) -> Launched:
    """A thread of its own that launches some kernels in a row again and again."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.normal(1, jitter, int(seconds / every_seconds)).clip(0.1))
    at = (starts[:, None] * every_seconds + 5e-5 * np.arange(len(kernels))).ravel()
    kernel = np.tile(kernels, len(starts))
    order = np.argsort(at, kind="stable")
    count = len(at)
    return Launched(at[order], kernel[order], np.full(count, 120), np.full(count, 40))


def served(workload: Workload, threads: int, hz: float, seconds: float, seed: int) -> Launched:
    """An inference server: threads that run the evaluation whenever a request comes."""
    rng = np.random.default_rng(seed)
    parts = []
    for thread in range(threads):
        now = 0.0
        while now < seconds:
            now += float(rng.exponential(threads / hz))
            part = workload.timed(rng, workload.evaluation, now)
            count = len(part.at)
            stream = np.full(count, 50 + thread)
            parts.append(Launched(part.at, part.kernel, np.full(count, 200 + thread), stream))
            now = float(part.at[-1])
    return merged(*parts)


def windows(
    launched: Launched,
    table: list[MadeKernel],
    *,
    sample_every: int = SAMPLE_EVERY,
    sample_most: int = SAMPLE_MOST,
    grids: int = 1,
) -> Iterator[LaunchWindow]:
    """The launches as windows of a second, every so many of them sampled from its start.

    ``grids``: so many different ones are launched of each kernel.
    """
    edges = np.searchsorted(launched.at, np.arange(int(launched.at[-1]) + 1))
    for second in range(len(edges) - 1):
        low, high = int(edges[second]), int(edges[second + 1])
        if low == high:
            continue
        numbers, counts = np.unique(launched.kernel[low:high], return_counts=True)
        place: dict[tuple[str, str], int] = {}
        uses: list[int] = []
        index: dict[int, int] = {}
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            key = (table[number].name, table[number].digest)
            at = index[number] = place.setdefault(key, len(place))
            if at == len(uses):
                uses.append(0)
            uses[at] += count
        samples: tuple[LaunchSample, ...] = ()
        dropped = 0
        if sample_every and second % sample_every == 0:
            until = min(high, low + sample_most)
            dropped = high - until
            samples = tuple(
                LaunchSample(
                    EPOCH_NS + int(launched.at[i] * 1e9),
                    index[int(launched.kernel[i])],
                    int(launched.thread[i]),
                    int(launched.stream[i]),
                    (64 * (1 + i * 7919 % grids), 1, 1),
                    table[int(launched.kernel[i])].block,
                )
                for i in range(low, until)
            )
        yield LaunchWindow(
            pid=4242,
            start_time_ticks=100,
            from_ns=EPOCH_NS + second * 1_000_000_000,
            until_ns=EPOCH_NS + (second + 1) * 1_000_000_000,
            kernels=tuple(
                KernelUse(name=name, digest=digest, launches=uses[at])
                for (name, digest), at in place.items()
            ),
            samples=samples,
            dropped=dropped,
        )


def _word(number: int) -> str:
    words = "add mul sum norm relu gelu copy cat drop bias exp mean view pow".split()
    return f"{words[number % 14]}_{words[number // 14 % 14]}_{words[number // 196 % 14]}"
