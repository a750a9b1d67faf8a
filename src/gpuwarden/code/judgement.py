"""What unknown code computes, as far as its instructions tell: one kind of evidence, no more."""

from __future__ import annotations

from typing import Literal

from gpuwarden.code.module import Record

Answer = Literal[
    "hash-like",
    "not hash-like",
    "not enough code",
    "architecture too old",
    "architecture unknown",
    "unknown opcodes",
    "form not judged",
    "unreadable",
]
"""``hash-like`` is integer compute as in a hash function, be it a miner, a cracker or a library.
``form not judged``: AMD code objects, LTO-IR, Tile IR."""


class KernelJudgement(Record, frozen=True, kw_only=True):
    """What one kernel computes.

    ``score`` is calibrated on its architecture generation: -log10 of the share of benign kernels
    that score as high; None with an answer that is no score.
    """

    name: str
    answer: Answer
    score: float | None = None
    reasons: tuple[str, ...] = ()
    consistent_with: tuple[str, ...] = ()
    """Algorithms whose constants are there: ``SHA-256``, ``Keccak``…"""


class ModuleJudgement(Record, frozen=True, kw_only=True):
    """What one module computes: that of its highest kernel."""

    answer: Answer
    score: float | None = None
    reasons: tuple[str, ...] = ()
    consistent_with: tuple[str, ...] = ()
    kernels: tuple[KernelJudgement, ...] = ()
    """The highest, at most ten; ``judged`` counts all that were scored."""
    judged: int = 0
