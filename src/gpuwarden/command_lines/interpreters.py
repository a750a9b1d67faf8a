"""What an interpreter is given to run: a script, a module or code, by its own manual's options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gpuwarden.command_lines.shell_words import basename
from gpuwarden.pattern import pattern

INTERPRETERS = pattern(
    r"(?:python|pypy|perl|ruby|node|nodejs|java|php|lua|julia|Rscript)(?:[\d.]*|3?-dbg)"
    r"|(?:ba|da|a|z|k|mk|rba|fi)?sh|ld-(?:linux|musl)[\w.-]*"
)
WORDS_LOOKED_AT = 64


class Given(NamedTuple):
    """What an interpreter runs, and the arguments of that."""

    kind: Literal["script", "module", "code"]
    text: str
    arguments: tuple[str, ...]


class _Options(NamedTuple):
    code: frozenset[str] = frozenset()
    """Options whose value is the code itself."""
    module: frozenset[str] = frozenset()
    script: frozenset[str] = frozenset()
    """Options whose value is the script."""
    valued: frozenset[str] = frozenset()
    first: Literal["script", "module"] = "script"
    """What the first word is that is no option."""


def _options(code: str, module: str = "", script: str = "", valued: str = "") -> _Options:
    sets = [frozenset(words.split()) for words in (code, module, script, valued)]
    return _Options(code=sets[0], module=sets[1], script=sets[2], valued=sets[3])


_FAMILIES: tuple[tuple[str, _Options], ...] = (
    ("python", _options("-c", "-m", valued="-W -X --check-hash-based-pycs")),
    ("pypy", _options("-c", "-m", valued="-W -X")),
    ("perl", _options("-e -E", valued="-I")),
    ("ruby", _options("-e", valued="-I -r")),
    ("node", _options("-e -p --eval --print", valued="-r --require --import --loader")),
    (
        "java",
        _options("", script="-jar", valued="-cp -classpath --class-path -p --module-path")._replace(
            first="module"
        ),
    ),
    ("php", _options("-r", script="-f", valued="-d -c")),
    ("lua", _options("-e", valued="-l")),
    ("julia", _options("-e -E --eval", valued="-L -J -p -t")),
    ("Rscript", _options("-e")),
    ("ld-", _options("", valued="--library-path --argv0 --preload --audit --inhibit-rpath")),
)
_SHELL = _options("", valued="-o +o -O +O --rcfile --init-file")


def given(name: str, arguments: Sequence[str]) -> Given | None:
    """What an interpreter of that name runs; None for a name that is none, or nothing given."""
    program = basename(name)
    if not INTERPRETERS.fullmatch(program):
        return None
    family = next((o for prefix, o in _FAMILIES if program.startswith(prefix)), _SHELL)
    index = 0
    ended = False
    while index < min(len(arguments), WORDS_LOOKED_AT):
        word = arguments[index]
        rest = tuple(arguments[index + 2 :])
        after = arguments[index + 1] if index + 1 < len(arguments) else None
        if ended or word == "-" or not word.startswith(("-", "+")):
            return Given(family.first, word, tuple(arguments[index + 1 :]))
        if word == "--":
            ended = True
        elif word in family.code or (family is _SHELL and _runs_a_string(word)):
            return Given("code", after, rest) if after is not None else None
        elif word in family.module:
            return Given("module", after, rest) if after is not None else None
        elif word in family.script:
            return Given("script", after, rest) if after is not None else None
        elif word in family.valued or (family is _SHELL and _takes_a_value(word)):
            index += 1
        index += 1
    return None


def _takes_a_value(option: str) -> bool:
    # bash -euo pipefail.
    return option[1:2] not in ("-", "+") and option[-1] in "oO" and len(option) <= 6


def _runs_a_string(option: str) -> bool:
    # sh -c, bash -lc, sh -ec.
    return option[0] == "-" and option[1:2] != "-" and "c" in option and len(option) <= 6
