"""Autostarts by what they would start, so that a process is compared with few of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpuwarden.command_lines.interpreters import given
from gpuwarden.command_lines.shell_words import basename
from gpuwarden.model import PersistenceEntry
from gpuwarden.rules.autostart_programs import CONTAINER_KINDS, Autostart, Program, taken_apart
from gpuwarden.rules.autostart_ties import Runner, template_of

COMPARED_LIMIT = 512
"""Entries of one owner that start or name the same thing; nobody needs so many."""

Key = tuple[str, str]


class AutostartIndex:
    """The entries of one node by keys; entries of one owner take no others' place."""

    def __init__(self, entries: tuple[PersistenceEntry, ...]) -> None:
        self.entries = entries
        self._autostarts = [taken_apart(entry) for entry in entries]
        self._by_key: dict[Key, list[int]] = defaultdict(list)
        self._cut: set[Key] = set()
        counts: dict[tuple[Key, int | None], int] = defaultdict(int)
        for number, autostart in enumerate(self._autostarts):
            owner = autostart.entry.owner_uid
            for key in dict.fromkeys(_keys_of(autostart)):
                counts[key, owner] += 1
                if counts[key, owner] > COMPARED_LIMIT:
                    self._cut.add(key)
                else:
                    self._by_key[key].append(number)

    def candidates(self, runner: Runner) -> list[Autostart]:
        """The entries that can be tied to a process, in the node's order."""
        numbers = {n for key in _keys_of_process(runner) for n in self._by_key.get(key, ())}
        return [self._autostarts[number] for number in sorted(numbers)]

    def is_cut(self, runner: Runner) -> bool:
        """Whether there were more of one owner than are compared.

        Of a program that everybody runs there may be: its words tie it weakly, and that is all.
        """
        return not (runner.is_general and runner.runs is None) and any(
            key in self._cut for key in _keys_of_process(runner)
        )


def _keys_of(autostart: Autostart) -> Iterator[Key]:
    entry = autostart.entry
    if entry.kind in CONTAINER_KINDS:
        yield "container", entry.path.partition(":")[2]
        return
    if entry.unit is not None:
        yield "unit", template_of(entry.unit)
    for code in autostart.codes:
        yield "code", code
    for path in autostart.mentions:
        yield "path", path
    for program in autostart.programs:
        yield from _keys_of_program(program)


def _keys_of_program(program: Program) -> Iterator[Key]:
    start = program.start
    yield from _keys_of_name(start.program, program.paths)
    for file in program.files:
        if file.inode is not None:
            yield "file", f"{file.device}:{file.inode}"
    # A link of another name can lead to an interpreter.
    for name in dict.fromkeys((start.program, *program.paths)):
        runs = given(name, start.arguments)
        if runs is None:
            continue
        if runs.kind == "code":
            yield "code", runs.text.strip()
        elif runs.kind == "module":
            yield "name", runs.text
        else:
            yield from _keys_of_name(runs.text, program.script_paths(runs.text))


def _keys_of_name(name: str, paths: frozenset[str]) -> Iterator[Key]:
    for path in paths:
        yield "path", path
    if not paths:
        yield "name", name
        yield "name", basename(name)


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
        yield ("code", runs.text.strip()) if runs.kind == "code" else ("name", runs.text)
    if runner.script is not None:
        yield "path", runner.script
    if exe is None or exe.memfd:
        if argv:
            yield "path", argv[0]
    elif not (runner.is_general and runs is not None):
        # An interpreter that was given something is looked for by that.
        yield "path", exe.path
        yield "name", basename(exe.path)
        if exe.inode is not None:
            yield "file", f"{exe.device}:{exe.inode}"
