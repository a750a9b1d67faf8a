"""Cubins: each kernel is scored by its features, the module by its kernels."""

from __future__ import annotations

import numpy as np

from gpuwarden.code import constants, reasons
from gpuwarden.code.classify.model import load_model
from gpuwarden.code.judgement import Answer, KernelJudgement, ModuleJudgement
from gpuwarden.code.sass import opcodes
from gpuwarden.code.sass.decode import MOST_INSTRUCTIONS, Integers
from gpuwarden.code.sass.features import KernelTable, features_of
from gpuwarden.code.sass.sections import read_sections
from gpuwarden.code.sass.words import constant_words, instruction_words

KERNELS_TOLD = 10
MOST_UNKNOWN = 0.05
"""Share of opcodes in no listing above which a kernel that looks harmless cannot be told."""


def judge_cubin(image: bytes | memoryview) -> ModuleJudgement:
    """The judgement of a cubin. Errors: Malformed."""
    sections = read_sections(image)
    if sections.arch < opcodes.OLDEST:
        reason = f"sm_{sections.arch} is older than sm_{opcodes.OLDEST}"
        return ModuleJudgement(answer="architecture too old", reasons=(reason,))
    if sections.arch > opcodes.NEWEST:
        reason = f"sm_{sections.arch} is not known here"
        return ModuleJudgement(answer="architecture unknown", reasons=(reason,))
    model = load_model()
    columns = tuple(dict.fromkeys((*model.columns, *reasons.COLUMNS)))
    table = features_of(image, sections, columns)
    enough = np.flatnonzero(table.instructions >= model.least_instructions)
    values = table.values[:, [columns.index(name) for name in model.columns]]
    scores = model.scores(values[enough], table.arch)
    order = np.argsort(-scores, kind="stable")[:KERNELS_TOLD]
    told = []
    for place in order:
        row = int(enough[place])
        words = instruction_words(image, sections, int(table.sections[row]))
        algorithms = constants.named_algorithms(words)
        score, is_hash_like = model.module_answer(scores[place : place + 1])
        told.append(_judge_kernel(table, row, score, is_hash_like, algorithms))
    in_constants = constants.named_algorithms(constant_words(image, sections))
    named = (*(name for one in told for name in one.consistent_with), *in_constants)
    algorithms = tuple(dict.fromkeys(named))
    score, is_hash_like = model.module_answer(scores)
    answer, why = _answer_of_module(table, enough, is_hash_like)
    if answer == "hash-like":
        why = reasons.of_kernel(_features(table, int(enough[order[0]])))
    return ModuleJudgement(
        answer=answer,
        score=score if answer in ("hash-like", "not hash-like") else None,
        reasons=(*why, *reasons.of_constants(algorithms)),
        consistent_with=algorithms,
        kernels=tuple(told),
        judged=len(enough),
    )


def _answer_of_module(
    table: KernelTable, enough: Integers, is_hash_like: bool
) -> tuple[Answer, tuple[str, ...]]:
    """The answer, and its reason where it is no score; what could not be seen is never clean."""
    if is_hash_like:
        return "hash-like", ()
    if table.oversized:
        return "unreadable", (f"a kernel of more than {MOST_INSTRUCTIONS:,} instructions",)
    if (table.unknown[enough] > MOST_UNKNOWN).any():
        return "unknown opcodes", ("a kernel with many opcodes that are not known here",)
    if not len(enough):
        return "not enough code", ("no kernel is long enough to tell",)
    return "not hash-like", ()


def _features(table: KernelTable, row: int) -> dict[str, float]:
    return dict(zip(table.columns, table.values[row].tolist(), strict=True))


def _judge_kernel(
    table: KernelTable, row: int, score: float, is_hash_like: bool, algorithms: tuple[str, ...]
) -> KernelJudgement:
    answer: Answer = "not hash-like"
    why = reasons.of_constants(algorithms)
    if is_hash_like:
        answer, why = "hash-like", reasons.of_kernel(_features(table, row), algorithms)
    elif table.unknown[row] > MOST_UNKNOWN:
        answer = "unknown opcodes"
        why = (f"{table.unknown[row]:.0%} of its opcodes are not known here", *why)
    return KernelJudgement(
        name=table.kernels[row],
        answer=answer,
        score=None if answer == "unknown opcodes" else score,
        reasons=why,
        consistent_with=algorithms,
    )
