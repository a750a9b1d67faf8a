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


_SHIFTS = np.arange(len(_MASKS), dtype=np.uint64) * np.uint64(FIELD_BITS)
_NARROW_NAMES = ("bitwin_max", "corewin_max", "rotwin_max", "intwin_max", "memwin_max")
_WIDE_NAMES = ("bitwin512_max", "corewin512_max")


class Blocks:
    """Running sums, block by block, over a stream of values cut into kernels."""

    def __init__(self, values: npt.NDArray[np.generic], starts: Integers) -> None:
        self.sizes = starts[1:] - starts[:-1]
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
    for width, names in ((NARROW, _NARROW_NAMES), (WIDE, _WIDE_NAMES)):
        begins, sums = blocks.windows(width, width // 4)
        parts = blocks.per_kernel(begins)
        many = parts[1:] - parts[:-1]
        shifts = _SHIFTS[: len(names), None]
        shares = (sums >> shifts & FIELD).astype(np.float64) / width
        # Of a kernel in which no window fits, the whole counts as one.
        short = (blocks.totals >> shifts & FIELD).astype(np.float64) / width
        densest = np.where(many == 0, short, _reduced(np.maximum, shares, parts))
        columns |= zip(names, densest, strict=True)
        if width == NARROW:
            bars = np.array([[DENSE_MIXING], [DENSE_CORE]])
            dense = _reduced(np.add, (shares[:2] > bars).astype(np.float64), parts)
            mixing, core = np.where(many == 0, short[:2] > bars, dense)
            columns["bitwin_n30"] = mixing
            columns["bitwin_frac30"] = mixing / np.maximum(many, 1)
            columns["corewin_frac50"] = core / np.maximum(many, 1)
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
        best = _reduced(np.maximum, keys, parts)[large] % (len(begins) + 1)
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
    dense = _reduced(
        np.add, (sums / width > DENSE_MIXING).astype(np.float64), blocks.per_kernel(begins)
    )
    short = blocks.totals > DENSE_MIXING * np.maximum(blocks.sizes, 1)
    counted: npt.NDArray[np.float64] = np.log2(1 + dense)
    return np.where(blocks.sizes >= width, counted, short.astype(np.float64))


def longest_runs(stream: Stream) -> Integers:
    """For each kernel, the most instructions in a row without float, memory, branch or barrier."""
    breaks = np.flatnonzero(groups.IS_BREAK.take(stream.codes))
    parts = np.searchsorted(breaks, stream.starts)
    kernels = len(stream.kernels)
    # A break before each kernel, which ends the one before: every kernel moves on by one more.
    breaks = breaks + np.repeat(np.arange(1, kernels + 1), parts[1:] - parts[:-1])
    fences = stream.starts + np.arange(kernels + 1)
    cuts = np.insert(breaks, parts, fences)
    gaps = cuts[1:] - cuts[:-1]
    return np.maximum.reduceat(gaps, parts[:-1] + np.arange(kernels)) - 1


def _reduced(
    operation: np.ufunc, values: npt.NDArray[np.generic], parts: Integers
) -> npt.NDArray[np.generic]:
    """Each part of the last axis reduced to one value, 0 for an empty one."""
    reduced = np.zeros((*values.shape[:-1], len(parts) - 1), values.dtype)
    filled = np.flatnonzero(parts[1:] - parts[:-1])
    if len(filled):
        reduced[..., filled] = operation.reduceat(values, parts[filled], axis=-1)
    return reduced


def _rows(codes: npt.NDArray[np.uint8]) -> Integers:
    """A histogram for each row of codes."""
    rows, width = len(codes), groups.WIDTH
    keys = codes + (np.arange(rows) * width)[:, None]
    return np.bincount(keys.ravel(), minlength=rows * width).reshape(rows, width)
