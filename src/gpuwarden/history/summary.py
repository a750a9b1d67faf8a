"""A remembered series in few numbers: how much, when, judged as what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from msgspec import Struct, field

from gpuwarden.model import Fact
from gpuwarden.store import Point, Series

SECOND_NS = 1_000_000_000
HELD_NS = 60 * SECOND_NS
"""How long a sample holds at most when no other follows, as the store has it."""
INTERVALS = 12
STEPS_SECONDS = (
    *(1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 2 * 3600, 6 * 3600, 12 * 3600),
    *(86_400, 2 * 86_400, 7 * 86_400),
)


class Amount(Fact, frozen=True, kw_only=True):
    """The least, the mean over time and the most of what was measured."""

    min: int
    mean: int
    max: int


class Interval(Fact, frozen=True, kw_only=True):
    """A stretch of time; ``covered_seconds`` of it were seen, the rest is unknown, not idle."""

    from_ns: int
    until_ns: int
    covered_seconds: float
    sm_percent: Amount | None = None
    memory_bytes: Amount | None = None


class Judged(Fact, frozen=True, kw_only=True):
    """The verdict that held in a stretch of time; None while there was none yet."""

    verdict: str | None
    from_ns: int
    until_ns: int


class Past(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What is remembered of one process on one GPU; without a pid, of the GPU as a whole."""

    gpu_id: str
    gpu: str
    pid: int | None
    start_time_ticks: int | None
    boot_id: str | None
    started_at_ns: int | None
    """Known for processes of this boot only."""
    is_current: bool
    """It is the process that has this pid now; always True of a GPU."""
    binary: str | None
    parents: tuple[str, ...]
    peers: tuple[str, ...]
    """The last ones seen; likewise ``parents``, the nearest first."""
    first_ns: int | None
    last_ns: int | None
    older_left_out: bool
    """There are older samples than ``first_ns``, too many to be read."""
    covered_seconds: float
    sm_percent: Amount | None
    memory_bytes: Amount | None
    verdicts: tuple[Judged, ...]
    intervals: tuple[Interval, ...]


Weighted = list[tuple[int, int]]
"""Values, each with the nanoseconds for which it held."""


class _Bucket(Struct):
    sm: Weighted = field(default_factory=list)
    memory: Weighted = field(default_factory=list)
    covered_ns: int = 0


def amount(values: Weighted) -> Amount | None:
    """Least, mean over time and most; None of nothing."""
    if not values:
        return None
    held_ns = sum(held for _, held in values)
    total = sum(value * held for value, held in values)
    if not held_ns:
        # A sample that nothing followed held for no known time, and is a value all the same.
        held_ns, total = len(values), sum(value for value, _ in values)
    mean = (2 * total + held_ns) // (2 * held_ns)
    return Amount(min=min(values)[0], mean=mean, max=max(values)[0])


def holds(points: Sequence[Point], now_ns: int) -> list[int]:
    """For how many nanoseconds each sample holds, oldest first."""
    if not points:
        return []
    moments = [point.at_ns for point in points]
    # The last one holds on while the next may still come; later, its end is not known.
    last = moments[-1]
    moments.append(now_ns if now_ns - last <= HELD_NS else last)
    return [min(max(after - at, 0), HELD_NS) for at, after in pairwise(moments)]


def step_ns(span_ns: int) -> int:
    """The length of the intervals of a table: round, and at most ``INTERVALS`` of them."""
    for seconds in STEPS_SECONDS:
        if span_ns < seconds * SECOND_NS * (INTERVALS - 1):
            return seconds * SECOND_NS
    weeks = span_ns // (STEPS_SECONDS[-1] * SECOND_NS * (INTERVALS - 1)) + 1
    return weeks * STEPS_SECONDS[-1] * SECOND_NS


def summarised(
    series: Series, *, gpu: str, now_ns: int, started_at_ns: int | None, is_current: bool
) -> Past:
    """The series in numbers, as of ``now_ns``."""
    points = sorted(series.points, key=lambda point: point.at_ns)
    held = holds(points, now_ns)
    step = step_ns(points[-1].at_ns + held[-1] - points[0].at_ns) if points else SECOND_NS
    buckets = _buckets(points, held, step)
    whole = _Bucket()
    for bucket in buckets.values():
        whole.sm += bucket.sm
        whole.memory += bucket.memory
        whole.covered_ns += bucket.covered_ns
    return Past(
        gpu_id=series.gpu_id,
        gpu=gpu,
        pid=series.pid,
        start_time_ticks=series.start_time_ticks,
        boot_id=series.boot_id,
        started_at_ns=started_at_ns,
        is_current=is_current,
        binary=series.binary,
        parents=series.parents,
        peers=series.peers,
        first_ns=points[0].at_ns if points else None,
        last_ns=points[-1].at_ns if points else None,
        older_left_out=series.more,
        covered_seconds=round(whole.covered_ns / SECOND_NS, 3),
        sm_percent=amount(whole.sm),
        memory_bytes=amount(whole.memory),
        verdicts=tuple(_verdicts(points)),
        intervals=tuple(
            Interval(
                from_ns=number * step,
                until_ns=(number + 1) * step,
                covered_seconds=round(bucket.covered_ns / SECOND_NS, 3),
                sm_percent=amount(bucket.sm),
                memory_bytes=amount(bucket.memory),
            )
            for number, bucket in sorted(buckets.items())
        ),
    )


def _buckets(points: Sequence[Point], held: Sequence[int], step: int) -> dict[int, _Bucket]:
    buckets: dict[int, _Bucket] = {}
    for point, held_ns in zip(points, held, strict=True):
        at_ns, end_ns = point.at_ns, point.at_ns + held_ns
        while True:
            number = at_ns // step
            next_ns = (number + 1) * step
            part_ns = (end_ns if end_ns < next_ns else next_ns) - at_ns
            bucket = buckets.get(number)
            if bucket is None:
                bucket = buckets[number] = _Bucket()
            if point.sm_percent is not None:
                bucket.sm.append((point.sm_percent, part_ns))
            if point.memory_bytes is not None:
                bucket.memory.append((point.memory_bytes, part_ns))
            bucket.covered_ns += part_ns
            if next_ns >= end_ns:
                break
            at_ns = next_ns
    return buckets


def _verdicts(points: Sequence[Point]) -> Iterator[Judged]:
    """Each verdict from its first sample to its last; between judgements there may be none."""
    for verdict, group in groupby(points, key=lambda point: point.verdict):
        run = list(group)
        yield Judged(verdict=verdict, from_ns=run[0].at_ns, until_ns=run[-1].at_ns)
