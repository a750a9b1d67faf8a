"""What a line of cron, systemd, an init script or a profile would start, and with which words.

A reading that is good enough to compare with what runs; it runs and opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from gpuwarden.command_lines.shell_words import (
    MAX_DEPTH,
    MAX_TEXT,
    Command,
    basename,
    split_commands,
)
from gpuwarden.command_lines.wrappers import unwrap
from gpuwarden.pattern import pattern

_LOOKED_AT = 16
# Init scripts choose by names of programs: "slurmd)" starts none. One with a path could end a
# subshell that begins on another line.
_LABEL_WORD = r"[^\s/()|'\"`$;&<>#=]{1,200}"
_CASE_LABEL = pattern(
    rf"\s{{0,80}}{_LABEL_WORD}(?:[ \t]*\|[ \t]*{_LABEL_WORD}){{0,32}}[ \t]*\)(?=\s|\Z)"
)
_KEPT = 2048
_BUILTINS = frozenset(
    ": . [ [[ alias bg break case cd continue declare echo esac eval exit export false fg getopts "
    "hash in jobs let local printf pwd read readonly return set shift shopt source test times trap "
    "true type typeset ulimit umask unalias unset wait".split()
)


class Start(NamedTuple):
    """One program of a line, as written, with its arguments."""

    program: str
    arguments: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    """What stands around it: sudo, sh, docker, in the order written."""
    directory: str | None = None
    """Where the line itself changes to before."""
    search_path: str | None = None
    """The PATH that the line itself sets before."""


@lru_cache(maxsize=_KEPT)
def starts_of(line: str) -> tuple[Start, ...]:
    """Every program that a line would start, each once, in the order written.

    What is a shell's own (cd, test, echo) is none. A program behind a wrapper is one, and so is the
    wrapper, which may be called so and be another program. Bounds are those of ``split_commands``.
    """
    label = _CASE_LABEL.match(line)
    start = label.end() if label is not None else 0
    return tuple(dict.fromkeys(_line(line[start : start + MAX_TEXT], (), None, None, 0)))


def _line(
    text: str, through: tuple[str, ...], directory: str | None, search: str | None, depth: int
) -> Iterator[Start]:
    for command in split_commands(text):
        search = _path_of(command.assignments) or search
        words = command.words
        if not words:
            continue
        if words[0] == "cd":
            directory = _changed(directory, words)
            continue
        yield from _command(command, through, directory, search, depth)


def _command(
    command: Command,
    through: tuple[str, ...],
    directory: str | None,
    search: str | None,
    depth: int,
) -> Iterator[Start]:
    words = command.words
    inner = unwrap(words)
    search = _path_of(inner.assignments) or search
    around = frozenset(inner.wrapped_by)
    for at, word in enumerate(words[:_LOOKED_AT] if around else ()):
        if basename(word).lower() in around and word not in _BUILTINS:
            yield Start(word, words[at + 1 :], through, directory, search)
    through = (*through, *inner.wrapped_by)
    if inner.line is not None and depth < MAX_DEPTH:
        yield from _line(inner.line, through, directory, search, depth + 1)
    elif inner.words and inner.words[0] not in _BUILTINS:
        yield Start(inner.words[0], inner.words[1:], through, directory, search)


def _path_of(assignments: Iterable[tuple[str, str]]) -> str | None:
    return next((value for name, value in assignments if name == "PATH"), None)


def _changed(directory: str | None, words: tuple[str, ...]) -> str | None:
    """Where ``cd`` leads; None when that cannot be told from the words."""
    target = next((word for word in words[1:] if not word.startswith("-")), "~")
    if target.startswith(("/", "~")):
        return target
    return f"{directory}/{target}" if directory is not None else None
