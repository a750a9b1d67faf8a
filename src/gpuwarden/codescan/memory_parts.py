"""The memory of a process in parts for several children, none of which cuts a module."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gpuwarden.codescan.memory_windows import LIMIT_BYTES
from gpuwarden.codescan.tasks import Span

PART_BYTES = 64 << 20
PART_SPANS = 50_000
_PAGE_MASK = ~((1 << 16) - 1)


class Part(NamedTuple):
    """What one child reads: everything below ``stop``, and beyond it what begins below."""

    spans: tuple[Span, ...]
    stop: int
    bytes: int
    """Of memory that is this part's own."""


def parts(
    spans: Sequence[Span], size: int = PART_BYTES, beyond: int = LIMIT_BYTES
) -> Iterator[Part]:
    """Spans, by address, in parts of about ``size`` bytes; each sees ``beyond`` bytes further."""
    starts = [span.start for span in spans]
    index, at = 0, starts[0] if starts else 0
    while index < len(spans):
        first, begin, own = index, at, 0
        while index < len(spans) and own < size and index - first < PART_SPANS:
            span = spans[index]
            left = span.start + span.size - max(at, span.start)
            # A rest that is not worth a part of its own stays.
            if own + left >= size + size // 2:
                at = max(at, span.start) + (size - own & _PAGE_MASK)
                own = size
                break
            own += left
            index += 1
            at = span.start + span.size
        last = bisect_left(starts, at + beyond)
        seen = list(spans[first : min(last, index + PART_SPANS)])
        if begin > seen[0].start:
            end = seen[0].start + seen[0].size
            seen[0] = replace(seen[0], start=begin, size=end - begin)
        yield Part(tuple(seen), at, own)
