"""Windows along a kernel: where bit work is densest, and what is done there.

A window's sum is a difference of running sums over blocks of 32 instructions, since all windows
start at a multiple of that. ``Hot`` windows run over the stream without floating point, so that a
hash cannot be thinned out by arithmetic that touches nothing of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gpuwarden.code.sass import groups
from gpuwarden.code.sass.decode import Integers, Stream

BLOCK = 32
NARROW, WIDE = 128, 512
"""Windows over all instructions; they move by a quarter of their width."""
HOT = {"h1": 256, "h2": 1024}
"""Windows without floating point; they move by an eighth."""
DENSE_MIXING, DENSE_CORE = 0.3, 0.5
FIELD_BITS = 12
FIELD = np.uint64((1 << FIELD_BITS) - 1)

_MASKS = (
    groups.IS_MIXING, groups.IS_CORE, groups.IS_ROTATE | groups.IS_BYTE_ROTATE,
    groups.IS_INTEGER, groups.IS_MEMORY,
)  # fmt: skip
# A count of at most 512 in each field, so that one running sum serves all of them.
_PACKED = np.zeros(groups.WIDTH, np.uint64)
for _place, _mask in enumerate(_MASKS):
    _PACKED |= _mask.astype(np.uint64) << np.uint64(FIELD_BITS * _place)


class Blocks:
    """Running sums, block by block, over a stream of values cut into kernels."""

    def __init__(self, values: npt.NDArray[np.generic], starts: Integers) -> None:
        self.sizes = np.diff(starts)
        """Items of each kernel; it may be none."""
        counts = -(-self.sizes // BLOCK)
        self.first = np.concatenate(([0], np.cumsum(counts)))
        """Index of each kernel's first block."""
        self.kernel = np.repeat(np.arange(len(counts)), counts)
        self.place = np.arange(len(self.kernel)) - self.first[self.kernel]
        """Of each block in its kernel."""
        begins = starts[self.kernel] + BLOCK * self.place
        self.sums = sums = np.zeros(len(begins) + 1, np.uint64)
        if len(begins):
            np.cumsum(np.add.reduceat(values, begins, dtype=np.uint64), out=sums[1:])
        self.totals = sums[self.first[1:]] - sums[self.first[:-1]]
        """Of each kernel."""

    def windows(self, width: int, step: int) -> tuple[Integers, npt.NDArray[np.uint64]]:
        """Block at which each whole window starts, and the window's sum."""
        blocks = width // BLOCK
        fits = (self.place + blocks) * BLOCK <= self.sizes[self.kernel]
        begins = np.flatnonzero(fits & (self.place % (step // BLOCK) == 0))
        return begins, self.sums[begins + blocks] - self.sums[begins]

    def per_kernel(self, begins: Integers) -> Integers:
        """For each kernel, the index of its first window among ``begins``; one more at the end."""
        return np.searchsorted(begins, self.first)


def plain_windows(stream: Stream) -> dict[str, npt.NDArray[np.float64]]:
    """Densest windows over all instructions: name of a feature → a value for each kernel."""
    blocks = Blocks(_PACKED.take(stream.codes), stream.starts)
    columns: dict[str, npt.NDArray[np.float64]] = {}
    for width, suffix, fields in ((NARROW, "", 5), (WIDE, "512", 2)):
        begins, sums = blocks.windows(width, width // 4)
        parts = blocks.per_kernel(begins)
        whole = np.diff(parts) == 0
        names = ("bitwin", "corewin", "rotwin", "intwin", "memwin")[:fields]
        for place, name in enumerate(names):
            shift = np.uint64(FIELD_BITS * place)
            values = (sums >> shift & FIELD).astype(np.float64) / width
            short = (blocks.totals >> shift & FIELD).astype(np.float64) / width
            densest = np.where(whole, short, _maximum(values, parts))
            columns[f"{name}{suffix}_max"] = densest
            bar = {"bitwin": DENSE_MIXING, "corewin": DENSE_CORE}.get(name)
            if suffix or bar is None:
                continue
            dense = np.where(whole, short > bar, _total(values > bar, parts))
            tag = f"{name}_frac{round(100 * bar)}"
            columns[tag] = dense / np.maximum(np.diff(parts), 1)
            if name == "bitwin":
                columns["bitwin_n30"] = dense
    return columns


class HotWindows(Struct, frozen=True):
    """The densest window of each kernel without floating point.

    ``sizes`` are instructions in it, ``histogram`` (a row a kernel, a column a code) its codes,
    ``first`` and ``last`` the indices in the stream that it spans.
    """

    sizes: Integers
    histogram: npt.NDArray[np.float64]
    first: Integers
    last: Integers


def hot_windows(
    stream: Stream, totals: npt.NDArray[np.float64]
) -> tuple[dict[str, HotWindows], npt.NDArray[np.float64]]:
    """The hot windows by name, and ``h_nwin``; ``totals`` is the same of all instructions."""
    solid = np.flatnonzero(~groups.IS_FLOAT.take(stream.codes))
    codes = stream.codes[solid]
    starts = np.searchsorted(solid, stream.starts)
    blocks = Blocks(groups.IS_MIXING.take(codes), starts)
    everything = np.where(groups.IS_FLOAT, 0, totals)
    windows = {}
    for name, width in HOT.items():
        begins, sums = blocks.windows(width, width // 8)
        parts = blocks.per_kernel(begins)
        large = np.flatnonzero(blocks.sizes > width)
        # The densest, and of those the first: the higher the key, the earlier the window.
        keys = sums.astype(np.int64) * (len(begins) + 1) + np.arange(len(begins), 0, -1)
        best = _maximum(keys, parts)[large] % (len(begins) + 1)
        place = blocks.place[begins[len(begins) - best]] * BLOCK
        histogram = everything.copy()
        first, last = stream.starts[:-1].copy(), stream.starts[1:] - 1
        if len(large):
            index = (starts[large] + place)[:, None] + np.arange(width)
            histogram[large] = _rows(codes[index])
            first[large], last[large] = solid[index[:, 0]], solid[index[:, -1]]
        windows[name] = HotWindows(np.minimum(blocks.sizes, width), histogram, first, last)
    return windows, _count_of_dense(blocks)


def _count_of_dense(blocks: Blocks) -> npt.NDArray[np.float64]:
    """log2 of one and the dense windows end to end; where none fits, whether the whole is dense."""
    width = HOT["h1"]
    begins, sums = blocks.windows(width, width)
    dense = _total(sums / width > DENSE_MIXING, blocks.per_kernel(begins))
    short = blocks.totals > DENSE_MIXING * np.maximum(blocks.sizes, 1)
    return np.where(blocks.sizes >= width, np.log2(1 + dense), short.astype(np.float64))


def longest_runs(stream: Stream) -> Integers:
    """For each kernel, the most instructions in a row without float, memory, branch or barrier."""
    breaks = np.flatnonzero(groups.IS_BREAK.take(stream.codes))
    parts = np.searchsorted(breaks, stream.starts)
    kernels = len(stream.kernels)
    # A break before each kernel, which ends the one before: every kernel moves on by one more.
    breaks = breaks + np.repeat(np.arange(1, kernels + 1), np.diff(parts))
    fences = stream.starts + np.arange(kernels + 1)
    cuts = np.insert(breaks, parts, fences)
    gaps = np.diff(cuts)
    return np.maximum.reduceat(gaps, parts[:-1] + np.arange(kernels)) - 1


def _maximum(values: npt.NDArray[np.generic], parts: Integers) -> npt.NDArray[np.generic]:
    """The largest of each part, 0 for an empty one."""
    return _reduced(np.maximum, values, parts)


def _total(values: npt.NDArray[np.generic], parts: Integers) -> npt.NDArray[np.generic]:
    return _reduced(np.add, values.astype(np.float64), parts)


def _reduced(
    operation: np.ufunc, values: npt.NDArray[np.generic], parts: Integers
) -> npt.NDArray[np.generic]:
    reduced = np.zeros(len(parts) - 1, values.dtype)
    filled = np.flatnonzero(np.diff(parts))
    if len(filled):
        reduced[filled] = operation.reduceat(values, parts[filled])
    return reduced


def _rows(codes: npt.NDArray[np.uint8]) -> Integers:
    """A histogram for each row of codes."""
    rows, width = len(codes), groups.WIDTH
    keys = codes + (np.arange(rows) * width)[:, None]
    return np.bincount(keys.ravel(), minlength=rows * width).reshape(rows, width)
