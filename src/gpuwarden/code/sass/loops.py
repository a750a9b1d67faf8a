"""Loops, as branches back: how deep each instruction lies in them, up to three.

A static count says how often an instruction stands there, not how often it runs; a weight of
eight for each loop around it comes nearer.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gpuwarden.code.sass import groups
from gpuwarden.code.sass.decode import Integers, Stream

DEEPEST = 3
SHORTEST = 2
INSTRUCTION_BYTES = 16


class Loops(Struct, frozen=True):
    """For each kernel of a stream: its loops, and a histogram (by kernel, depth, code)."""

    count: Integers
    longest: Integers
    """Instructions from a loop's branch back to its target, padding in."""
    deepest: Integers
    histogram: Integers


def find_loops(stream: Stream, arch: int) -> Loops:
    """The loops of every kernel and the histogram of codes by depth; linear but for one sort."""
    kernels = len(stream.kernels)
    home, target, source = _back_edges(stream, arch)
    count = np.bincount(home, minlength=kernels)
    longest = np.zeros(kernels, np.int64)
    np.maximum.at(longest, home, source - target)
    places = np.concatenate((target, source + 1))
    steps = np.concatenate((np.ones(len(target), np.int64), np.full(len(source), -1)))
    order = np.argsort(places, kind="stable")
    places, depth = places[order], np.cumsum(steps[order])
    last = np.append(places[1:] != places[:-1], True)[: len(places)]
    places, depth = places[last], np.minimum(depth[last], DEEPEST)
    deepest = np.zeros(kernels, np.int64)
    inside = np.flatnonzero(depth > 0)
    np.maximum.at(deepest, _home(stream, places[inside]), depth[inside])
    return Loops(count, longest, deepest, _histogram(stream, places, depth))


def _back_edges(stream: Stream, arch: int) -> tuple[Integers, Integers, Integers]:
    """For each branch back in a kernel: its kernel, and the rows of its target and of itself."""
    rows = stream.branches
    part = np.searchsorted(stream.word_starts, rows, side="right") - 1
    offset = stream.words[rows, 1].view(np.int32).astype(np.int64)
    if arch >= 90:  # bits 16 to 23 hold the lowest bits, in units of an instruction's quarter
        low = stream.words[rows, 0].astype(np.int64) >> 16 & 0xFF
        offset = ((offset >> 2 << 8) | low) * 4
    first = stream.word_starts[part]
    target = rows + (INSTRUCTION_BYTES + offset) // INSTRUCTION_BYTES
    home = _home(stream, rows)
    back = (target >= first) & (target <= rows - SHORTEST) & (home >= 0)
    return home[back], target[back], rows[back]


def _home(stream: Stream, rows: Integers) -> Integers:
    """The number in the stream of the kernel that each row belongs to, -1 for a dropped one."""
    part = np.searchsorted(stream.word_starts, rows, side="right") - 1
    kept = np.full(len(stream.word_starts), -1)
    if len(stream.kernels):
        firsts = stream.places[stream.starts[:-1]]
        kept[np.searchsorted(stream.word_starts, firsts, side="right") - 1] = np.arange(len(firsts))
    return kept[part]


def _histogram(stream: Stream, places: Integers, depth: Integers) -> Integers:
    """Codes by kernel and depth; ``depth`` holds from each of ``places`` (rows) to the next."""
    kernels, width = len(stream.kernels), groups.WIDTH
    turns = np.searchsorted(stream.places, places)
    cuts = np.union1d(stream.starts[:-1], turns)
    cuts = cuts[cuts < len(stream.codes)]
    levels = np.concatenate(([0], depth))[np.searchsorted(turns, cuts, side="right")]
    keys = (stream.kernel_of(cuts) * (DEEPEST + 1) + levels) * width
    lengths = np.diff(np.append(cuts, len(stream.codes)))
    flat = np.bincount(
        np.repeat(keys, lengths) + stream.codes, minlength=kernels * (DEEPEST + 1) * width
    )
    return flat.reshape(kernels, DEEPEST + 1, width)
