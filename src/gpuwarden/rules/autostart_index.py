"""Autostarts by what they would start, so that a process is compared with few of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpuwarden.command_lines.interpreters import given
from gpuwarden.command_lines.shell_words import basename
from gpuwarden.command_lines.starts import starts_of
from gpuwarden.model import PersistenceEntry
from gpuwarden.rules.autostart_ties import (
    CONTAINER_KINDS,
    PATH_WORD,
    Runner,
    as_shell_code,
    template_of,
)

COMPARED_LIMIT = 512
"""Entries of one owner that name the same thing; nobody needs so many."""

Key = tuple[str, str]


class AutostartIndex:
    """The entries of one node by keys; entries of one owner take no others' place."""

    def __init__(self, entries: tuple[PersistenceEntry, ...]) -> None:
        self.entries = entries
        self._by_key: dict[Key, list[int]] = defaultdict(list)
        self._cut: set[Key] = set()
        counts: dict[tuple[Key, int | None], int] = defaultdict(int)
        for number, entry in enumerate(entries):
            for key in dict.fromkeys(_keys_of(entry)):
                counts[key, entry.owner_uid] += 1
                if counts[key, entry.owner_uid] > COMPARED_LIMIT:
                    self._cut.add(key)
                else:
                    self._by_key[key].append(number)

    def candidates(self, runner: Runner) -> list[PersistenceEntry]:
        """The entries that can be tied to a process, in the node's order."""
        numbers = {
            number for key in _keys_of_process(runner) for number in self._by_key.get(key, ())
        }
        return [self.entries[number] for number in sorted(numbers)]

    def is_cut(self, runner: Runner) -> bool:
        """Whether there were more of one owner than are compared."""
        return any(key in self._cut for key in _keys_of_process(runner))


def _keys_of(entry: PersistenceEntry) -> Iterator[Key]:
    if entry.kind in CONTAINER_KINDS:
        yield "container", entry.path.partition(":")[2]
        return
    if entry.unit is not None:
        yield "unit", template_of(entry.unit)
    for program in entry.programs:
        if program.inode is not None:
            yield "file", f"{program.device}:{program.inode}"
        if program.path is not None:
            yield "name", basename(program.path)
    for command in entry.commands:
        yield "code", as_shell_code(entry, command)
        for start in starts_of(command):
            yield "name", basename(start.program)
            runs = given(start.program, start.arguments)
            if runs is not None and runs.kind == "code":
                yield "code", runs.text.strip()
            elif runs is not None:
                yield "name", basename(runs.text)
    for text in (entry.text, *entry.commands):
        for word in PATH_WORD.findall(text):
            yield "name", basename(word)


def _keys_of_process(runner: Runner) -> Iterator[Key]:
    process, runs = runner.process, runner.runs
    placement, exe, argv = process.cgroup, process.exe, process.argv
    if placement is not None:
        if placement.unit is not None:
            yield "unit", template_of(placement.unit)
        for link in placement.chain:
            yield "container", link.partition(":")[2]
        if placement.container_id is not None:
            yield "container", placement.container_id
    if runs is not None:
        yield ("code", runs.text.strip()) if runs.kind == "code" else ("name", basename(runs.text))
    if exe is None or exe.memfd:
        if argv:
            yield "name", basename(argv[0])
    elif not (runner.is_general and runs is not None):
        # An interpreter that was given something is looked for by that.
        yield "name", basename(exe.path)
        if exe.inode is not None:
            yield "file", f"{exe.device}:{exe.inode}"
