"""The score of PTX text: fitted on public libraries and textbook hashes, and how well it does.

    bench/ptx_score.py                       fit on bench/data/ptx_features.npz, print, write
    bench/ptx_score.py --collect WHEEL…      compute that file anew, from PTX in wheels and from
                                             bench/hashes, which nvcc compiles

A logistic regression on six numbers, so that a person can see why. Every figure is held out: a
library is scored by weights that never saw it, a hash by weights that never saw that algorithm.
Mining code was not at hand as PTX: the hashes are compressions out of textbooks, which is what
miners are made of, but they are few, and no one has tried to hide them.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpuwarden.code.classify.ptx_score import COLUMNS, LEAST_WORK, PtxScore, columns_of  # noqa: E402
from gpuwarden.code.extract import modules_in  # noqa: E402
from gpuwarden.code.module import Place, Problem  # noqa: E402
from gpuwarden.code.ptx_features import functions  # noqa: E402
from gpuwarden.errors import Malformed  # noqa: E402
from tests.support import nvcc  # noqa: E402

FEATURES = ROOT / "bench/data/ptx_features.npz"
SCORE = ROOT / "src/gpuwarden/code/classify/data/ptx_score.json"
HASHES = ROOT / "bench/hashes"
ARCHES = ("80", "120")
"""PTX differs: for newer targets the compiler splits rotations of 64 bits itself."""
MODULES_TAKEN = 40
"""Texts of one library."""
RIDGE = 1.0
ROUNDS = 30
SHARE = 5e-3
"""Of benign functions that may score above the threshold, libraries weighing the same."""
KNOTS = 40

Values = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--collect", nargs="+", type=Path, metavar="WHEEL")
    options = parser.parse_args()
    if options.collect:
        _collect(options.collect)
    with np.load(FEATURES) as file:
        values, library, name, text = (file[key] for key in ("values", "library", "name", "text"))
    values = values.astype(np.float64)
    is_hash = library == "textbook"
    held = _held_out(values, is_hash, np.where(is_hash, name, library))
    threshold = _threshold(held[~is_hash], library[~is_hash])
    _report(held, is_hash, library, name, text, threshold)
    centre, scale, weights = _fit(values, is_hash, _weights(is_hash, library, name))
    benign = np.sort(held[~is_hash])
    decades = -np.log10((len(benign) - np.arange(len(benign))) / (len(benign) + 1))
    places = np.unique(np.geomspace(1, len(benign), KNOTS).astype(int))
    at = np.unique(np.concatenate(([0], len(benign) - places)))
    score = PtxScore(
        centre=tuple(centre.round(6).tolist()),
        scale=tuple(scale.round(6).tolist()),
        weights=tuple(weights.round(6).tolist()),
        scores=tuple(benign[at].round(5).tolist()),
        decades=tuple(decades[at].round(5).tolist()),
        threshold=round(float(np.interp(threshold, benign[at], decades[at])), 5),
    )
    SCORE.write_text(json.dumps(score.document(), indent=1) + "\n")


def _fit(values: Values, is_hash: npt.NDArray[np.bool_], weight: Values) -> tuple[Values, ...]:
    """Centre, scale and weights (the last is the constant) of a ridge logistic regression."""
    centre = np.average(values, axis=0, weights=weight)
    scale = np.sqrt(np.average((values - centre) ** 2, axis=0, weights=weight)) + 1e-9
    rows = np.column_stack(((values - centre) / scale, np.ones(len(values))))
    weights = np.zeros(rows.shape[1])
    ridge = RIDGE * np.diag([*[1.0] * len(COLUMNS), 0.0])
    for _ in range(ROUNDS):
        likely = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        slope = rows.T @ (weight * (likely - is_hash)) + ridge @ weights
        curve = (rows * (weight * likely * (1 - likely))[:, None]).T @ rows + ridge
        weights = weights - np.linalg.solve(curve, slope)
    return centre, scale, weights


def _weights(is_hash: npt.NDArray[np.bool_], library: Names, name: Names) -> Values:
    """Each library weighs the same, each hash too, and all of one kind as much as the other."""
    group = np.where(is_hash, np.char.add("textbook ", name), library)
    _, which, count = np.unique(group, return_inverse=True, return_counts=True)
    weight: Values = 1.0 / count[which]
    for kind in (is_hash, ~is_hash):
        weight[kind] *= 500 / weight[kind].sum()
    return weight


def _held_out(values: Values, is_hash: npt.NDArray[np.bool_], group: Names) -> Values:
    weight = _weights(is_hash, group, group)
    scores = np.zeros(len(values))
    for one in np.unique(group):
        mine = group == one
        centre, scale, weights = _fit(values[~mine], is_hash[~mine], weight[~mine])
        scores[mine] = (values[mine] - centre) / scale @ weights[:-1] + weights[-1]
    return scores


def _threshold(scores: Values, library: Names) -> float:
    """Where the share of benign functions above, each library weighing the same, is ``SHARE``."""
    _, which, count = np.unique(library, return_inverse=True, return_counts=True)
    weight = 1 / count[which] / len(count)
    order = np.argsort(-scores)
    over = np.cumsum(weight[order]) > SHARE
    return float(scores[order][np.argmax(over)])


def _report(
    held: Values,
    is_hash: npt.NDArray[np.bool_],
    library: Names,
    name: Names,
    text: npt.NDArray[np.int64],
    threshold: float,
) -> None:
    benign = np.sort(held[~is_hash])[::-1]
    print(f"{len(benign):,} benign functions, {is_hash.sum()} hash-like, all held out")
    for share in (1e-2, 1e-3, 1e-4):
        bar = benign[int(share * len(benign))]
        print(f"at {share:g} of benign functions: {(held[is_hash] > bar).mean():.2f} of hashes")
    caught = held >= threshold
    print(f"threshold {threshold:.2f}: {caught[is_hash].mean():.2f} of hashes")
    for one in np.unique(library[~is_hash]):
        mine = library == one
        texts = np.unique(text[mine])
        alarmed = np.unique(text[mine & caught])
        print(f"  {one:22} functions {mine.sum():6} above {caught[mine].sum():4}  "
              f"texts {len(texts):4} above {len(alarmed):3}")  # fmt: skip
    for one in np.unique(name[is_hash]):
        mine = is_hash & (name == one)
        print(f"  {one:12} {caught[mine].sum()} of {mine.sum()}, lowest {held[mine].min():.1f}")


def _collect(wheels: list[Path]) -> None:
    rows: list[Values] = []
    library: list[str] = []
    name: list[str] = []
    text: list[int] = []
    texts = iter(range(1 << 30))

    def add(data: bytes, of: str, called: str = "") -> None:
        text_number = next(texts)
        for function in functions(data):
            if function.worked >= LEAST_WORK:
                rows.append(columns_of(function))
                library.append(of)
                name.append(called)
                text.append(text_number)

    for source in sorted(HASHES.glob("*.cu")):
        for arch in ARCHES:
            add(nvcc.ptx(source, arch).read_bytes(), "textbook", source.stem)
    for wheel in wheels:
        package = wheel.name.split("-")[0]
        for number, data in enumerate(_texts(wheel)):
            if number == MODULES_TAKEN:
                break
            add(data, package)
        print(package, len(rows), flush=True)
    FEATURES.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        FEATURES,
        values=np.array(rows).astype(np.float16),
        library=np.array(library),
        name=np.array(name),
        text=np.array(text),
    )


def _texts(wheel: Path) -> Iterator[bytes]:
    """The different PTX texts in a wheel's libraries."""
    seen = set()
    with zipfile.ZipFile(wheel) as file:
        for member in file.namelist():
            with file.open(member) as opened:
                if opened.read(4) != b"\x7fELF":
                    continue
            for located in modules_in(file.read(member), Place(target=wheel.name)):
                if isinstance(located, Problem) or located.kind != "ptx":
                    continue
                try:
                    data = bytes(located.image())
                except Malformed:
                    continue
                if hash(data) not in seen:
                    seen.add(hash(data))
                    yield data


if __name__ == "__main__":
    main()
