"""Autostarts taken apart once, for the many processes that they are compared with."""

from __future__ import annotations

import posixpath
from typing import NamedTuple

from gpuwarden.command_lines.starts import Start, starts_of
from gpuwarden.model import PersistenceEntry, StartedProgram
from gpuwarden.pattern import pattern

CONTAINER_KINDS = frozenset({"container-restart", "pod-controller"})
_PATH_WORD = pattern(r"(?<![^\s'\"=;&|,(){}<>:`$@])/[^\s'\"=;&|,(){}<>:`$]{1,4095}")


class Program(NamedTuple):
    """One program of one entry, with where its name leads."""

    entry: PersistenceEntry
    start: Start
    files: tuple[StartedProgram, ...] = ()
    paths: frozenset[str] = frozenset()

    def script_paths(self, script: str) -> frozenset[str]:
        """Where a script leads that the program is given."""
        return _paths(self.entry, self.start, script, is_script=True)


class Autostart(NamedTuple):
    """An entry with what it would start."""

    entry: PersistenceEntry
    programs: tuple[Program, ...]
    codes: frozenset[str]
    """What a shell is handed to run it."""
    mentions: frozenset[str]
    """The absolute paths that stand anywhere in it."""


def taken_apart(entry: PersistenceEntry) -> Autostart:
    """What an entry would start. Pure and bounded, as ``starts_of`` is."""
    if entry.kind in CONTAINER_KINDS:
        return Autostart(entry, (), frozenset(), frozenset())
    starts = dict.fromkeys(start for command in entry.commands for start in starts_of(command))
    programs = tuple(
        Program(
            entry,
            start,
            tuple(file for file in entry.programs if file.name == start.program),
            _paths(entry, start, start.program, is_script=False),
        )
        for start in starts
    )
    texts = dict.fromkeys((entry.text, *entry.commands))
    return Autostart(
        entry,
        programs,
        frozenset(_as_shell_code(entry, command) for command in entry.commands),
        frozenset(word for text in texts for word in _PATH_WORD.findall(text)),
    )


def _as_shell_code(entry: PersistenceEntry, command: str) -> str:
    """What a shell is handed of a command: cron ends it at a ``%`` and takes ``\\%`` for one."""
    if entry.kind == "cron" and "%" in command:
        command = command.replace("\\%", "\0").partition("%")[0].replace("\0", "%")
    return command.strip()


def _paths(entry: PersistenceEntry, start: Start, name: str, *, is_script: bool) -> frozenset[str]:
    """Where a name of a line leads: as written, and as it was found."""
    found = {file.path for file in entry.programs if file.name == name and file.path is not None}
    directory = start.directory or entry.directory or ""
    if name.startswith("/"):
        found.add(posixpath.normpath(name))
    elif directory.startswith("/") and ("/" in name or is_script):
        found.add(posixpath.normpath(f"{directory}/{name}"))
    return frozenset(found)
