"""The 32-bit words that code and its constants hold, for naming algorithms."""

from __future__ import annotations

import numpy as np

from gpuwarden.code.constants import known_words
from gpuwarden.code.sass.decode import decode
from gpuwarden.code.sass.immediates import Words, numbers_in
from gpuwarden.code.sass.sections import CubinSections


def constant_words(image: bytes | memoryview, sections: CubinSections) -> Words:
    """The different words of a module's constants that some algorithm has."""
    parts = [np.frombuffer(image, np.uint32, size // 4, at) for at, size in sections.constants]
    found = [words[known_words(words)] for words in parts]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint32)


def instruction_words(image: bytes | memoryview, sections: CubinSections, number: int) -> Words:
    """The different numbers in the integer instructions of one kernel, by its section's number."""
    stream = decode(image, sections.code, [number], sections.arch)
    _, words = numbers_in(stream)
    return np.unique(words)
