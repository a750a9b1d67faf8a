"""The bar for all unknown cubins of a process together, without numpy and the rest of the model.

The same numbers as ``classify.judge_together``, for a process that lasts and judges nothing itself.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Iterable
from functools import cache

from msgspec import Struct

from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.errors import Malformed

MODEL_FILE = os.path.join(os.path.dirname(__file__), "classify/data/model.npz")
# numpy.lib.format, version 1: magic, version, length of the header that follows.
_HEAD = struct.Struct("<6sBBH")
_MAGIC = b"\x93NUMPY"
_NUMBERS = {b"'<i8'": struct.Struct("<q"), b"'<f8'": struct.Struct("<d")}


class SetBar(Struct, frozen=True):
    """What a set must reach, and how many of its kernels count as tries at most."""

    threshold: float
    counted_kernels: int

    def __call__(self, judgements: Iterable[ModuleJudgement]) -> tuple[float, bool]:
        """The score of a set, and whether it is hash-like."""
        highest, tries = 0.0, 0
        for one in judgements:
            if one.score is not None and one.judged > 0:
                tries += one.judged
                told = (kernel.score or 0.0 for kernel in one.kernels[: one.judged])
                highest = max(highest, *told, 0.0)
        counted = max(min(tries, self.counted_kernels), 1)
        score = max(highest - math.log10(counted), 0.0)
        return score, score >= self.threshold


@cache
def load_set_bar() -> SetBar:
    """That of the model that ships with this package. Errors: OSError, Malformed."""
    try:
        with zipfile.ZipFile(MODEL_FILE) as file:
            return SetBar(
                threshold=float(_scalar(file.read("set_threshold.npy"))),
                counted_kernels=int(_scalar(file.read("counted_kernels.npy"))),
            )
    except (zipfile.BadZipFile, KeyError) as error:
        raise Malformed(f"{MODEL_FILE}: not the model ({error})") from error


def _scalar(raw: bytes) -> float:
    """The one number of an array without dimensions, as numpy stores it. Errors: Malformed."""
    if len(raw) < _HEAD.size:
        raise Malformed(f"{MODEL_FILE}: a number that is cut off")
    magic, major, _, size = _HEAD.unpack_from(raw)
    header, data = raw[_HEAD.size : _HEAD.size + size], raw[_HEAD.size + size :]
    form = next((form for name, form in _NUMBERS.items() if name in header), None)
    if magic != _MAGIC or major != 1 or form is None or len(data) != form.size:
        raise Malformed(f"{MODEL_FILE}: not a number as numpy stores it")
    number: float = form.unpack(data)[0]
    return number
