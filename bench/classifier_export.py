"""Trained boosters as the arrays that ship: thresholds in raw units, children side by side."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.classifier_data import TrainingSet
from bench.classifier_measures import COUNTED_KERNELS, HANDICAPS, Calibration
from bench.classifier_training import GATE_TREES, Boosters, View
from gpuwarden.code.classify.model import GENERATIONS, Table

LEAST_INSTRUCTIONS = 150
Arrays = dict[str, npt.NDArray[Any]]


def arrays_of_trees(boosters: Boosters, edges: list[npt.NDArray[np.float32]]) -> Arrays:
    """The boosters' trees as the tables of ``gpuwarden.code.classify.trees``; their sum is a mean.

    ``edges``: of each column of the boosters, the raw values that its codes were cut at.
    """
    roots: list[int] = []
    features: list[int] = []
    thresholds: list[float] = []
    children: list[int] = []
    values: list[float] = []
    for tree in [tree for booster in boosters for tree in booster.dump_model()["tree_info"]]:
        roots.append(len(features))
        waiting = [tree["tree_structure"]]
        start = len(features)
        for node in waiting:
            if "split_feature" in node:
                column, step = node["split_feature"], int(np.floor(node["threshold"]))
                features.append(column)
                thresholds.append(float(edges[column][step]))
                children.append(start + len(waiting))
                values.append(0.0)
                waiting += [node["left_child"], node["right_child"]]
            else:
                features.append(0)
                thresholds.append(np.inf)
                children.append(len(children))
                values.append(node["leaf_value"] / len(boosters))
    return {
        "roots": np.array(roots, np.int32),
        "features": np.array(features, np.int16),
        "thresholds": np.array(thresholds, np.float32),
        "children": np.array(children, np.int32),
        "values": np.array(values, np.float32),
    }


def arrays_of_table(name: str, table: Table) -> Arrays:
    """The knots and slope of one curve."""
    return {
        f"{name}_table_scores": table.scores.astype(np.float32),
        f"{name}_table_decades": table.decades.astype(np.float32),
        f"{name}_table_slope": np.array(table.slope, np.float32),
    }


def model_arrays(
    data: TrainingSet,
    views: tuple[View, ...],
    boosters: dict[str, Boosters],
    calibration: Calibration,
) -> Arrays:
    """All arrays of the model file."""
    arrays: Arrays = {
        "columns": np.array(data.columns),
        "least_instructions": np.array(LEAST_INSTRUCTIONS),
        "counted_kernels": np.array(COUNTED_KERNELS),
        "module_threshold": np.array(calibration.module_threshold),
        "set_threshold": np.array(calibration.set_threshold),
    }
    for view in views:
        places = [data.columns.index(name) for name in view.columns]
        trees = arrays_of_trees(boosters[view.name], [data.edges[place] for place in places])
        arrays |= {f"{view.name}_{name}": array for name, array in trees.items()}
        arrays |= {
            f"{view.name}_columns": np.array(places, np.int16),
            f"{view.name}_gate_trees": np.array(GATE_TREES),
            f"{view.name}_gate": np.array(calibration.gates[view.name]),
            f"{view.name}_handicap": np.array(HANDICAPS[view.name]),
        }
        arrays |= arrays_of_table(view.name, calibration.tables[view.name])
    for name, table in zip(GENERATIONS, calibration.generations, strict=True):
        arrays |= arrays_of_table(name, table)
    return arrays


def write_model(path: Path, arrays: Arrays) -> None:
    """Writes the model file; the same arrays give the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name, array in arrays.items():
            plain = io.BytesIO()
            np.save(plain, np.asarray(array), allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), plain.getvalue(), zipfile.ZIP_DEFLATED)
