"""The names of the steps; apart from all else, since every start reads the command line."""

from __future__ import annotations

from typing import Literal, get_args

StepName = Literal[
    "evidence",
    "freeze",
    "thaw",
    "deny",
    "allow",
    "hold-jobs",
    "drain-node",
    "cordon",
    "kill",
    "delete-pod",
]
STEPS: tuple[StepName, ...] = get_args(StepName)
