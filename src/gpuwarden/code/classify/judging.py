"""One answer for each module, whatever its bytes; "cannot be told" is an answer of its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpuwarden.code.classify.cubin_judging import judge_cubin
from gpuwarden.code.classify.model import load_model
from gpuwarden.code.classify.ptx_judging import judge_ptx
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Kind
from gpuwarden.errors import Malformed

NOT_JUDGED = {
    "amdgpu": "AMD's instructions are not judged",
    "lto-ir": "LTO-IR is compressed bitcode; what the linker makes of it can be judged",
    "tile-ir": "Tile IR is not judged",
    "unknown": "a module of no known kind",
}


def judge(kind: Kind, image: bytes | memoryview) -> ModuleJudgement:
    """What the module computes, from its decompressed image; any bytes have an answer."""
    if kind in NOT_JUDGED:
        return ModuleJudgement(answer="form not judged", reasons=(NOT_JUDGED[kind],))
    try:
        return judge_cubin(image) if kind == "cubin" else judge_ptx(image)
    except Malformed as error:
        return ModuleJudgement(answer="unreadable", reasons=(str(error),))


def judge_together(judgements: Iterable[ModuleJudgement]) -> tuple[float, bool]:
    """The score of all unknown cubins of a process or file, and whether they are hash-like.

    One alarm for many modules needs a bar of its own: each of them is another try at being taken
    for a hash. A module without a score counts as nothing here; its answer stands for itself.
    """
    scores = []
    for one in judgements:
        if one.score is not None and one.judged:
            of_module = np.zeros(one.judged)
            told = [kernel.score or 0.0 for kernel in one.kernels][: one.judged]
            of_module[: len(told)] = told
            scores.append(of_module)
    return load_model().set_answer(scores)
