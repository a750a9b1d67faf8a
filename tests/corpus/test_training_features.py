"""Features of a public library's kernels are those in the set that the classifier is trained on.

training_rows.npz holds rows of that set for kernels of one version of cuRAND: the values to three
significant digits, and the hashes of the kernel's opcodes and name by which they are found here.
Columns of a module's constants are not among them, for those differ between builds.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpuwarden.code.bounds import DEFAULT
from gpuwarden.code.extract import modules_in
from gpuwarden.code.module import Place, Problem
from gpuwarden.code.sass import kernel_features
from gpuwarden.code.sass.opcodes import OLDEST
from gpuwarden.code.sass.sections import read_sections
from tests.support.public_wheels import wheel_of

LIBRARY = "nvidia-curand-cu12==10.3.10.19"
ROWS = Path(__file__).with_name("training_rows.npz")
DIGITS = 3

Key = tuple[int, str, str]


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def features_of_library(
    columns: tuple[str, ...],
) -> Iterator[tuple[Key, npt.NDArray[np.float32]]]:
    with zipfile.ZipFile(wheel_of(LIBRARY)) as wheel:
        files = [wheel.read(name) for name in wheel.namelist() if ".so" in name]
    for data in files:
        for located in modules_in(data, Place(target=LIBRARY)):
            if isinstance(located, Problem) or located.kind != "cubin":
                continue
            image = bytes(located.image(DEFAULT))
            sections = read_sections(image)
            if sections.arch < OLDEST:
                continue
            table = kernel_features(image, columns)
            for number, name, values in zip(
                table.sections, table.kernels, table.values, strict=True
            ):
                one = sections.code[number]
                words = np.frombuffer(image, np.uint64, one.size // 16 * 2, one.offset)[::2]
                opcodes = (words & np.uint64(0xFFF)).astype("<i4")
                yield (table.arch, hash_of(opcodes.tobytes()), hash_of(name.encode())), values


def test_features_are_those_of_the_training_set() -> None:
    rows = np.load(ROWS)
    columns = tuple(rows["columns"].tolist())
    found: dict[Key, list[npt.NDArray[np.float32]]] = defaultdict(list)
    for key, values in features_of_library(columns):
        found[key].append(values)
    keys = zip(rows["arch"].tolist(), rows["code"].tolist(), rows["kernel"].tolist(), strict=True)
    different = {}
    for key, expected in zip(keys, rows["values"], strict=True):
        # Kernels of one name and the same opcodes may differ in their numbers.
        nearest = min((unlike(values, expected) for values in found[key]), key=len)
        if len(nearest):
            different[key] = [columns[place] for place in nearest]
    assert different == {}
    assert len(rows["values"]) > 300


def unlike(
    values: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """Where they differ by more than half a unit of the last digit."""
    size = np.abs(values.astype(np.float64))
    unit = 10.0 ** (np.floor(np.log10(np.maximum(size, 1e-30))) - DIGITS + 1)
    return np.flatnonzero(np.abs(values.astype(np.float64) - expected) > 0.5 * unit + 1e-6 * size)
