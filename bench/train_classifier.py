"""Trains the classifier of GPU code and measures it, from the compact training set alone.

Every figure is left-out: a mining family is scored by models that saw none of it, a benign library
by models that saw none of it, or under protocol B, if it is one of the three that do hash, by one
that saw its other versions. docs/classifier.md explains the tables.

    python bench/train_classifier.py --evaluate              # figures; 10 minutes on one core
    python bench/train_classifier.py --train                 # figures, then the shipped model
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from bench.classifier_data import TRAINING_SET, TrainingSet, read_training_set  # noqa: E402
from bench.classifier_export import model_arrays, write_model  # noqa: E402
from bench.classifier_measures import Raw, calibrated  # noqa: E402
from bench.classifier_tables import print_tables  # noqa: E402
from bench.classifier_training import Trainer, left_out, views  # noqa: E402
from gpuwarden.code.classify.model import MODEL_FILE, model_of  # noqa: E402


def say(line: str) -> None:
    """What is being done, apart from the figures."""
    print(line, file=sys.stderr, flush=True)


def raw_scores(data: TrainingSet, folds: int, kept: Path | None) -> dict[str, Raw]:
    """Left-out scores of both views; read from ``kept`` where they were kept before."""
    if kept and kept.exists():
        with np.load(kept, allow_pickle=False) as file:
            return {v.name: (file[v.name][0], file[v.name][1]) for v in views(data.columns)}
    raw = {
        view.name: left_out(data, Trainer(data, view), folds, say) for view in views(data.columns)
    }
    if kept:
        np.savez(kept, allow_pickle=False, **{name: np.stack(two) for name, two in raw.items()})
    return raw


def main() -> int:
    """Evaluates, and with ``--train`` writes the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--evaluate", action="store_true", help="print every figure")
    what.add_argument("--train", action="store_true", help="print them and write the model")
    parser.add_argument("--data", type=Path, default=TRAINING_SET)
    parser.add_argument("--output", type=Path, default=MODEL_FILE)
    parser.add_argument("--folds", type=int, default=12, help="0: one library and family each")
    parser.add_argument("--scores", type=Path, help="keep left-out scores in this .npz")
    options = parser.parse_args()
    data = read_training_set(options.data)
    raw = raw_scores(data, options.folds, options.scores)
    calibration, scores = calibrated(data, raw)
    print_tables(data, raw, calibration, scores)
    if not options.train:
        return 0
    everything = np.ones(len(data.codes), bool)
    both = views(data.columns)
    boosters = {view.name: Trainer(data, view).model(everything) for view in both}
    arrays = model_arrays(data, both, boosters, calibration)
    write_model(options.output, arrays)
    model = model_of(arrays)
    rows = np.random.default_rng(0).choice(np.flatnonzero(data.benign), 20_000, replace=False)
    steps = zip(data.edges, data.codes[rows].T, strict=True)
    values = np.stack([np.append(edges, edges[-1] + 1)[codes] for edges, codes in steps], axis=1)
    began = time.process_time()
    model.scores(values.astype(np.float32), 90)
    rate = len(values) / (time.process_time() - began)
    say(f"{options.output}: {options.output.stat().st_size:,} bytes; {rate:,.0f} kernels/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
