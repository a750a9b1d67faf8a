"""The classifier's compact training set: codes of kernels, and what these belong to."""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

TRAINING_SET = Path(__file__).resolve().parent / "data/kernel_features.npz.xz"

# Hash libraries that hash: under protocol B they are scored on other versions of themselves.
HASHING = ("nv_curand", "nv_libnvcomp", "libcudf")
HASHING_OTHER_VERSIONS = ("nv_curand", "nv_curand_cu11", "nv_nvcomp", "libcudf")
LOWERED = "mutated_miner:rotxor"

Mask = npt.NDArray[np.bool_]
Names = npt.NDArray[np.str_]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingSet:
    """Kernels of at least 150 instructions, a row each (``count`` alike in one module are one).

    ``codes`` (rows, columns) are steps of a column: code k is above ``edges[column][k - 1]`` and
    at most ``edges[column][k]``, in raw units. The rest is a value a row. ``module``, ``set_unit``
    (library, or project and family, with its architecture) number what verdicts are about;
    ``every_module`` and ``every_unit`` tell of those too that have no kernel that could be scored.
    """

    columns: tuple[str, ...]
    edges: tuple[npt.NDArray[np.float32], ...]
    codes: npt.NDArray[np.uint8]
    count: Numbers
    first: Mask
    kind: Names
    part: Names
    project: Names
    family: Names
    library: Names
    arch: Numbers
    module: Numbers
    unit: Numbers
    every_module: dict[str, Numbers]
    """By library and part: the modules there are."""
    every_unit: dict[str, Numbers]

    @property
    def benign(self) -> Mask:
        """Benign kernels of the main versions."""
        return _both(self.kind == "benign", self.part == "main")

    @property
    def mining(self) -> Mask:
        """Mining kernels as their projects build them."""
        return _both(self.kind == "miner", self.part == "main")

    @property
    def other_versions(self) -> Mask:
        """Benign kernels of other versions of libraries."""
        return np.asarray(self.part == "old_version")

    @property
    def hashing_other_versions(self) -> Mask:
        """Other versions of the libraries that hash."""
        return self.other_versions & np.isin(self.library, HASHING_OTHER_VERSIONS)

    def negatives(self, protocol: str) -> Mask:
        """What counts as benign under protocol ``A`` or ``B``."""
        if protocol == "A":
            return self.benign
        return (self.benign & ~np.isin(self.library, HASHING)) | self.hashing_other_versions


def _both(one: npt.ArrayLike, other: npt.ArrayLike) -> Mask:
    return np.logical_and(one, other)


def read_training_set(path: Path = TRAINING_SET) -> TrainingSet:
    """The compact training set at ``path``."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    group = arrays["group"].astype(np.int64)
    named = {
        name: arrays[f"{name}_names"][arrays[f"group_{name}"]]
        for name in ("cls", "set", "project", "family", "library")
    }
    arch = arrays["group_arch"].astype(np.int64)
    owner = np.where(
        named["cls"] == "benign",
        named["library"],
        np.char.add(np.char.add(named["project"], "|"), named["family"]),
    )
    unit_names = np.char.add(
        np.char.add(np.char.add(owner, "|"), named["set"]), np.char.mod("|%d", arch)
    )
    unit = np.unique(unit_names, return_inverse=True)[1].astype(np.int64)
    module = arrays["group_module"].astype(np.int64)
    home = np.char.add(np.char.add(named["library"], "|"), named["set"])
    columns = arrays["columns"]
    stops = np.cumsum(arrays["edge_counts"].astype(np.int64))
    rows = len(group)
    return TrainingSet(
        columns=tuple(str(name) for name in columns),
        edges=tuple(np.split(arrays["edges"], stops[:-1])),
        codes=np.ascontiguousarray(arrays["codes"].T),
        count=arrays["count"].astype(np.int64),
        first=np.unpackbits(arrays["first"], count=rows).astype(bool),
        kind=named["cls"][group],
        part=named["set"][group],
        project=named["project"][group],
        family=named["family"][group],
        library=named["library"][group],
        arch=arch[group],
        module=module[group],
        unit=unit[group],
        every_module={str(h): np.unique(module[home == h]) for h in np.unique(home)},
        every_unit={str(h): np.unique(unit[home == h]) for h in np.unique(home)},
    )


def generation_of(arch: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0: sm_70 to sm_89, 1: sm_90, 2: sm_100 and later; each encodes instructions its own way."""
    return np.digitize(arch, (90, 100))
