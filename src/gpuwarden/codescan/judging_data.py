"""What judging needs is loaded before children are forked: they can open nothing any more."""

from __future__ import annotations

import contextlib


def load_judging() -> None:
    """Reads the classifier's models and the listings of opcodes, and makes its tables, once.

    What cannot be read is a problem of each module that would be judged by it.
    """
    # Imported here: a look that judges nothing reads none of it. numpy imports its masked arrays
    # when one of its functions asks whether it was given one.
    import numpy.ma  # noqa: F401

    from gpuwarden.code import constants
    from gpuwarden.code.classify.model import load_model
    from gpuwarden.code.classify.ptx_score import load_score
    from gpuwarden.code.sass import opcodes

    def load_opcodes() -> None:
        for architecture in (opcodes.OLDEST, 90, opcodes.NEWEST):
            opcodes.first_codes(opcodes.generation(architecture))
        opcodes.known_opcodes()

    for load in (load_model, load_score, load_opcodes, constants.table):
        with contextlib.suppress(OSError, ValueError, KeyError):
            load()
