"""PTX text: each entry and function is scored by itself, the module by its highest."""

from __future__ import annotations

from gpuwarden.code import constants, ptx, reasons
from gpuwarden.code.classify.ptx_score import LEAST_WORK, PtxScore, columns_of, load_score
from gpuwarden.code.judgement import Answer, KernelJudgement, ModuleJudgement
from gpuwarden.code.ptx_features import Function, functions, number_words, table_words
from gpuwarden.errors import Malformed

FUNCTIONS_TOLD = 10


def judge_ptx(text: bytes | memoryview) -> ModuleJudgement:
    """The judgement of PTX text. Errors: Malformed."""
    if ptx.head_of(text) is None:
        raise Malformed("PTX: it does not begin with .version and .target")
    score = load_score()
    judged = 0
    highest: list[tuple[float, Function]] = []
    for function in functions(text):
        if function.worked < LEAST_WORK:
            continue
        judged += 1
        highest.append((score(columns_of(function)), function))
        if len(highest) > 2 * FUNCTIONS_TOLD:
            highest = _first(highest)
    told = [_judge_function(decades, function, score) for decades, function in _first(highest)]
    in_tables = constants.named_algorithms(table_words(text))
    named = (*(name for one in told for name in one.consistent_with), *in_tables)
    algorithms = tuple(dict.fromkeys(named))
    if not told:
        why = ("no function that does enough to tell", *reasons.of_constants(algorithms))
        return ModuleJudgement(answer="not enough code", reasons=why, consistent_with=algorithms)
    first = told[0]
    why = first.reasons[:1] if first.answer == "hash-like" else ()
    return ModuleJudgement(
        answer=first.answer,
        score=first.score,
        reasons=(*why, *reasons.of_constants(algorithms)),
        consistent_with=algorithms,
        kernels=tuple(told),
        judged=judged,
    )


def _first(highest: list[tuple[float, Function]]) -> list[tuple[float, Function]]:
    return sorted(highest, key=lambda one: -one[0])[:FUNCTIONS_TOLD]


def _judge_function(decades: float, function: Function, score: PtxScore) -> KernelJudgement:
    algorithms = constants.named_algorithms(number_words(function))
    answer: Answer = "not hash-like"
    why = reasons.of_constants(algorithms)
    if decades >= score.threshold:
        answer = "hash-like"
        why = reasons.of_function(function, algorithms)
    return KernelJudgement(
        name=function.name,
        answer=answer,
        score=decades,
        reasons=why,
        consistent_with=algorithms,
    )
