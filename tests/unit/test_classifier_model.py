"""The shipped model, and that numpy walks trees to where the trainer's own prediction comes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.classifier_data import Mask, TrainingSet, read_training_set
from bench.classifier_export import arrays_of_trees, model_arrays, write_model
from bench.classifier_measures import Raw, calibrated, grouped
from bench.classifier_training import GATE_TREES, Boosters, Trainer, View, left_out
from gpuwarden.code.classify.model import MODEL_FILE, Model, load_model, model_of
from gpuwarden.code.classify.trees import Trees

Trained = dict[str, tuple[Trainer, Boosters]]


@pytest.fixture(scope="module")
def whole() -> TrainingSet:
    return read_training_set()


@pytest.fixture(scope="module")
def part(whole: TrainingSet) -> TrainingSet:
    """Some thousand kernels of few libraries and families: enough to train something."""
    kept = np.isin(whole.library, ("nv_curand", "nv_nvjpeg", "nv_cufft", "nv_nvcomp", "ggml-cuda"))
    kept |= np.isin(whole.family, ("blake", "skein", "jh", "simd"))
    kept &= np.random.default_rng(1).random(len(kept)) < 0.4
    rows: dict[str, Any] = {
        field.name: value[kept]
        for field in dataclasses.fields(whole)
        if isinstance(value := getattr(whole, field.name), np.ndarray)
    }
    return dataclasses.replace(whole, **rows)


@pytest.fixture(scope="module")
def shipped() -> Model:
    return load_model()


@pytest.fixture(scope="module")
def small_views(whole: TrainingSet) -> tuple[View, View]:
    window = tuple(name for name in whole.columns if name.startswith("h"))
    deep = {"num_leaves": 20, "max_depth": 8, "min_data_in_leaf": 5, "learning_rate": 0.1}
    return (
        View("whole", whole.columns, GATE_TREES + 7, deep, lowered=True),
        View("window", window, GATE_TREES + 3, {**deep, "num_leaves": 4}, lowered=False),
    )


@pytest.fixture(scope="module")
def boosters(part: TrainingSet, small_views: tuple[View, View]) -> Trained:
    everything = np.ones(len(part.codes), bool)
    trainers = {view.name: Trainer(part, view) for view in small_views}
    return {name: (trainer, trainer.model(everything)) for name, trainer in trainers.items()}


def raw_values(data: TrainingSet, seed: int) -> npt.NDArray[np.float32]:
    """Values in raw units that have the codes of ``data``: some on an edge, some between two."""
    random = np.random.default_rng(seed)
    values = np.empty(data.codes.shape, np.float32)
    for column, edges in enumerate(data.edges):
        low = np.concatenate([[-1], edges])[data.codes[:, column]].astype(np.float32)
        high = np.concatenate([edges, [2 * (edges[-1] if len(edges) else 0) + 1]])
        high = high[data.codes[:, column]].astype(np.float32)
        between = (low + (high - low) * random.random(len(low))).astype(np.float32)
        inside = (between > low) & (random.random(len(low)) < 0.5)
        values[:, column] = np.where(inside, between, high)
    return values


def test_walks_end_where_the_trainers_prediction_does(
    part: TrainingSet, small_views: tuple[View, View], boosters: Trained
) -> None:
    values = raw_values(part, 2)
    everything = np.ones(len(part.codes), bool)
    for view in small_views:
        trainer, booster = boosters[view.name]
        places = [part.columns.index(name) for name in view.columns]
        trees = Trees.of(**arrays_of_trees(booster, [part.edges[p] for p in places]))
        mine = np.ascontiguousarray(values[:, places])
        first, full = trainer.predicted(booster, everything)
        assert np.abs(trees.sums(mine, 0, GATE_TREES) - first).max() < 1e-5
        assert np.abs(trees.sums(mine, 0, len(trees.roots)) - full).max() < 1e-5
        assert np.ptp(full) > 1


def test_a_model_made_of_boosters_gives_the_scores_that_were_measured(
    part: TrainingSet, small_views: tuple[View, View], boosters: Trained
) -> None:
    everything = np.ones(len(part.codes), bool)
    raw = {n: trainer.predicted(booster, everything) for n, (trainer, booster) in boosters.items()}
    calibration, scores = calibrated(part, raw)
    trained = {name: booster for name, (_, booster) in boosters.items()}
    model = model_of(model_arrays(part, small_views, trained, calibration))
    values = raw_values(part, 3)
    for arch in np.unique(part.arch):
        rows = part.arch == arch
        found = model.scores(values[rows], int(arch))
        assert np.abs(found - scores[rows]).max() < 1e-3
    assert scores[part.mining].mean() > scores[part.benign].mean() + 1
    for module in np.unique(part.module[part.mining])[:20]:
        rows = part.module == module
        (measured,) = grouped(part.module[rows], scores[rows], part.count[rows])
        every_kernel = np.repeat(scores[rows], part.count[rows])
        assert model.module_answer(every_kernel)[0] == pytest.approx(measured)


def test_left_out_code_is_scored_by_a_model_that_did_not_see_it(
    part: TrainingSet, small_views: tuple[View, View], boosters: Trained
) -> None:
    class Watched(Trainer):
        kept: Mask

        def model(self, kept: Mask) -> Boosters:
            self.kept = kept
            return boosters["window"][1]

        def predicted(self, model: Boosters, rows: Mask) -> Raw:
            seen = self.kept
            if (part.kind[rows] == "miner").any() or part.benign[rows].any():
                assert not (seen & rows).any()
                mining = rows & (part.kind == "miner")
                assert not (seen & np.isin(part.family, np.unique(part.family[mining]))).any()
                main = rows & part.benign
                libraries = np.unique(part.library[main])
                assert not (seen & part.benign & np.isin(part.library, libraries)).any()
            return np.ones(rows.sum()), np.ones(rows.sum())

    first, full = left_out(part, Watched(part, small_views[1]), 3, lambda line: None)
    assert (first == 1).all()
    assert (full == 1).all()


def test_the_shipped_file_is_what_the_script_writes(
    whole: TrainingSet, shipped: Model, tmp_path: Path
) -> None:
    with np.load(MODEL_FILE, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    write_model(tmp_path / "again.npz", arrays)
    assert (tmp_path / "again.npz").read_bytes() == MODEL_FILE.read_bytes()
    assert shipped.columns == whole.columns
    for view in shipped.views:
        inner = np.isfinite(view.trees.thresholds)
        columns = view.columns[view.trees.features[inner]]
        for column, threshold in zip(columns, view.trees.thresholds[inner], strict=True):
            assert threshold in whole.edges[column]


def test_the_shipped_model_tells_mining_from_benign_code(
    whole: TrainingSet, shipped: Model
) -> None:
    random = np.random.default_rng(4)
    shares = {}
    for name, rows in (("mining", whole.mining), ("benign", whole.benign)):
        chosen = random.choice(np.flatnonzero(rows & (whole.arch == 80)), 300, replace=False)
        codes = whole.codes[chosen]
        values = np.stack(
            [np.append(edges, 1e9)[codes[:, c]] for c, edges in enumerate(whole.edges)], axis=1
        )
        scores = shipped.scores(values.astype(np.float32), 80)
        shares[name] = np.mean([shipped.module_answer(one)[1] for one in scores[:, None]])
    assert shares["mining"] > 0.6
    assert shares["benign"] < 0.02


def test_kernels_that_were_added_hide_nothing_beyond_a_bound(shipped: Model) -> None:
    high = np.array([shipped.module_threshold + np.log10(shipped.counted_kernels) + 0.01])
    junk = np.zeros(100_000)
    assert shipped.module_answer(high)[1]
    assert shipped.module_answer(np.concatenate([high, junk]))[1]
    barely = np.array([shipped.module_threshold + 0.01])
    assert not shipped.module_answer(np.concatenate([barely, junk]))[1]


def test_a_set_is_all_kernels_of_its_modules(shipped: Model) -> None:
    high = np.array([9.0])
    assert shipped.set_answer([high])[0] == pytest.approx(9.0)
    assert shipped.set_answer([high, np.zeros(9)])[0] == pytest.approx(8.0)
    assert shipped.set_answer([]) == (0.0, False)
    assert shipped.module_answer(np.zeros(0)) == (0.0, False)


@given(
    numbers=st.lists(st.floats(width=32), min_size=0, max_size=40),
    arch=st.integers(-5, 2000),
)
def test_any_numbers_have_a_score(numbers: list[float], arch: int) -> None:
    model = load_model()
    values = np.zeros((len(numbers), len(model.columns)), np.float32)
    values[:, 0] = numbers
    values[:, -1] = numbers[::-1]
    scores = model.scores(values, arch)
    assert scores.shape == (len(numbers),)
    assert np.isfinite(scores).all()
    assert (scores >= 0).all()


def test_each_kernel_is_scored_by_itself(whole: TrainingSet, shipped: Model) -> None:
    rows = np.flatnonzero(whole.mining)[:2000]
    values = raw_values(dataclasses.replace(whole, codes=whole.codes[rows]), 5)
    together = shipped.scores(values, 90)
    apart = np.concatenate([shipped.scores(values[at : at + 1], 90) for at in range(0, 2000, 97)])
    assert np.array_equal(together[::97], apart)
