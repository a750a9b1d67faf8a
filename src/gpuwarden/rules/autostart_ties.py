"""How an autostart is tied to a process: by what its commands would start, and with which words.

The binary by device and inode or by its path; the script, module or code that an interpreter was
given; the unit or container that it lives in. A name alone ties nothing that everybody runs: there
the arguments must fit as well.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Literal, NamedTuple

from gpuwarden.command_lines.interpreters import Given, given
from gpuwarden.command_lines.program_places import is_packaged
from gpuwarden.command_lines.shell_words import basename
from gpuwarden.command_lines.starts import Start
from gpuwarden.model import PersistenceEntry, Process
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.rules.autostart_programs import CONTAINER_KINDS, Autostart, Program
from gpuwarden.rules.general_programs import is_general, is_general_path, is_interpreter

_USER_UNIT = pattern(r"(?:.*/)?systemd/user(?:\.control)?/.*")
# Behind these, paths are those of another root.
_INTO_ROOTS = frozenset(
    "docker podman nerdctl crictl kubectl oc apptainer singularity chroot nsenter unshare".split()
)
# Behind these, a line may start something as another user.
_USER_SWITCHES = frozenset("sudo doas su runuser gosu su-exec systemd-run".split()) | _INTO_ROOTS
_MULTICALL = frozenset({"busybox", "toybox", "coreutils"})
_UNSETTLED = frozenset("$`*?[%")
_SHOWN = 200
_NAME_MINIMUM = 3

Kind = Literal[
    "unit", "container", "file", "path", "script", "line", "words", "name", "claim", "mention"
]
_NOUNS: dict[Kind, str] = {
    "unit": "unit",
    "container": "container",
    "file": "file",
    "path": "path",
    "line": "command line",
    "words": "words alone",
    "name": "name alone",
    "claim": "first argument, where its file says nothing",
    "mention": "path, which is mentioned there",
}


class Tie(NamedTuple):
    """What ties an entry to a process, and whether that is more than likely."""

    kind: Kind
    sure: bool
    noun: str
    as_other_user: bool = False

    @property
    def weight(self) -> tuple[bool, bool]:
        """Larger for the better of two."""
        return self.sure, self.kind != "mention"


class Runner(NamedTuple):
    """A process with what comparing it to many entries takes."""

    process: Process
    in_host_root: bool
    is_general: bool
    runs: Given | None
    script: str | None
    """Absolute, as far as the directory is known that the process is in."""


def runner_of(node: Node, process: Process) -> Runner:
    """What is compared of a process."""
    exe, argv = process.exe, process.argv or ()
    genuine = exe is not None and exe.path_is_genuine is True
    shares = node.shares_host_namespace(process, "mnt")
    in_container = process.cgroup is not None and process.cgroup.container_id is not None
    runs: Given | None = None
    if exe is not None and not exe.memfd and is_interpreter(exe.path):
        runs = given(exe.path, argv[1:])
    elif exe is None and argv:
        runs = given(argv[0], argv[1:])
    script = runs.text if runs is not None and runs.kind == "script" else None
    if script is not None and not script.startswith("/") and process.cwd is not None:
        script = f"{process.cwd}/{script}"
    return Runner(
        process,
        genuine or (shares if shares is not None else not in_container),
        exe is not None and not exe.memfd and is_general(exe),
        runs,
        posixpath.normpath(script) if script is not None else None,
    )


def tie_of(autostart: Autostart, runner: Runner) -> Tie | None:
    """The best tie of an entry to a process; None if it would start something else."""
    entry, runs = autostart.entry, runner.runs
    if _lives_in(entry, runner.process):
        kind: Kind = "container" if entry.kind in CONTAINER_KINDS else "unit"
        return Tie(kind, True, _NOUNS[kind])
    best: Tie | None = None
    if runs is not None and runs.kind == "code" and runs.text.strip() in autostart.codes:
        # A shell that was given the whole command, as cron starts it.
        best = _Pair(Program(entry, Start("")), runner).tie("line", True)
    for program in autostart.programs:
        if best is not None and best.sure:
            return best
        tie = _by_program(_Pair(program, runner))
        if tie is not None and (best is None or tie.weight > best.weight):
            best = tie
    return best or _by_mention(autostart, runner)


# -------------------------------------------------------------------- where it lives


def _lives_in(entry: PersistenceEntry, process: Process) -> bool:
    placement = process.cgroup
    if placement is None:
        return False
    if entry.kind in CONTAINER_KINDS:
        identifier = entry.path.partition(":")[2]
        links = (link.partition(":")[2] for link in placement.chain)
        return bool(identifier) and identifier in (placement.container_id, *links)
    if not entry.kind.startswith("systemd-") or not entry.unit or not placement.unit:
        return False
    if not is_unit(entry.unit, placement.unit):
        return False
    of_user = _USER_UNIT.fullmatch(entry.path) is not None
    if of_user != (placement.user_slice_uid is not None):
        return False
    return not of_user or entry.owner_uid in (None, 0, placement.user_slice_uid)


def is_unit(entry: str, unit: str) -> bool:
    """Whether a unit is an entry's, itself or as an instance of its template."""
    stem, at, suffix = entry.partition("@")
    return entry == unit or (
        bool(at) and suffix.startswith(".") and template_of(unit) == stem + at + suffix
    )


def template_of(unit: str) -> str:
    """``worker@.service`` for ``worker@1.service``; other units as they are."""
    stem, at, instance = unit.partition("@")
    return f"{stem}@.{instance.rpartition('.')[2]}" if at else unit


# -------------------------------------------------------------------- what it runs


class _Pair(NamedTuple):
    """One program of an entry beside one process."""

    program: Program
    runner: Runner

    @property
    def start(self) -> Start:
        """What the line says of the program."""
        return self.program.start

    @property
    def is_comparable(self) -> bool:
        """Whether a path of the line and one of the process mean the same file."""
        return self.runner.in_host_root or not _INTO_ROOTS.isdisjoint(self.start.through)

    def tie(self, kind: Kind, sure: bool, script: str | None = None) -> Tie | None:
        """The tie, unless the entry starts things for another user; root may become that one."""
        noun = f"script {(script or '')[:_SHOWN]}" if kind == "script" else _NOUNS[kind]
        entry, through = self.program.entry, self.start.through
        process, placement = self.runner.process, self.runner.process.cgroup
        if (
            entry.kind.startswith("systemd-")
            and placement is not None
            and (placement.unit or placement.session)
            and _USER_SWITCHES.isdisjoint(through)
        ):
            # What a unit starts stays in it: this one was started by another, whatever it is.
            sure, noun = False, f"{noun}, outside of that unit"
        if not _USER_SWITCHES.isdisjoint(through) or _may_be_of(entry.user, process):
            return Tie(kind, sure, noun)
        if entry.user in ("root", "0"):
            return Tie(kind, False, f"{noun}, under another user", True)
        return None


def _may_be_of(user: str | None, process: Process) -> bool:
    """Whether a process can run as a user that an entry names; what is not known can be."""
    if user is None:
        return True
    if user in ("root", "0"):
        return process.uid in (None, 0) and process.user in (None, "root")
    mine = {process.user, None if process.uid is None else str(process.uid)}
    # A number that has no name here may be anybody's but root's.
    return user in mine or (process.user is None and process.uid != 0)


def _by_program(pair: _Pair) -> Tie | None:
    start, runner = pair.start, pair.runner
    process, runs = runner.process, runner.runs
    paths = pair.program.paths
    if runs is not None and runs.kind == "script" and pair.is_comparable:
        if runner.script in paths:
            return pair.tie("script", True, runner.script)
        if not paths and runs.text == start.program and not is_general_path(start.program):
            return pair.tie("script", False, runner.script)
    kind = _same_program(pair)
    if kind is None:
        return None
    exe, argv = process.exe, process.argv or ("",)
    if runner.is_general or (kind == "claim" and is_general_path(argv[0])):
        return _by_arguments(pair)
    sure = kind in ("file", "path")
    if sure and exe is not None and is_interpreter(exe.path) and exe.links_python is None:
        # Perhaps an interpreter in a place of its own, which runs other things as well.
        better = _by_arguments(pair)
        if better is not None:
            return better
        sure = not start.arguments or process.argv is None
    return pair.tie(kind, sure)


def _same_program(pair: _Pair) -> Kind | None:
    start, process = pair.start, pair.runner.process
    files, paths = pair.program.files, pair.program.paths
    exe, argv = process.exe, process.argv or ()
    if exe is None or exe.memfd:
        return "claim" if argv and argv[0] in paths else None
    if exe.inode is not None and any(
        (file.device, file.inode) == (exe.device, exe.inode) for file in files
    ):
        return "file"
    if exe.path in paths and pair.is_comparable:
        return "path" if exe.deleted or exe.path_is_genuine is not False else None
    known = any(file.inode is not None for file in files)
    if pair.runner.is_general and not known and is_interpreter(start.program):
        # /bin/sh may be a link to dash: what it was given decides.
        return "name" if is_interpreter(exe.path) else None
    name = basename(start.program)
    if paths or len(name) < _NAME_MINIMUM or basename(exe.path) != name:
        return None
    if files and not any(file.unread for file in files):
        # Looked for and not there: it may be what was there until its binary was deleted.
        return "name" if exe.deleted and _is_searched(pair, exe.path) else None
    return "name"


def _is_searched(pair: _Pair, path: str) -> bool:
    """Whether a file lay in a directory of the line's PATH."""
    search = pair.start.search_path or pair.program.entry.search_path
    if search is None:
        return is_packaged(path)
    return posixpath.dirname(path) in search.split(":")


def _by_arguments(pair: _Pair) -> Tie | None:
    """A program that everybody runs: only what it was given tells one use from another."""
    start, runner = pair.start, pair.runner
    process, runs = runner.process, runner.runs
    argv = process.argv
    if not argv:
        return None
    program = process.exe.path if process.exe is not None else argv[0]
    if not is_interpreter(program):
        if basename(program) in _MULTICALL and basename(argv[0]) != basename(start.program):
            return None
        fits = _fit(start.arguments, argv[1:], process.argv_truncated)
        return pair.tie("words", False) if fits else None
    there = given(program, start.arguments)
    if there is None or runs is None or there.kind != runs.kind:
        return None
    if runs.kind == "code":
        return pair.tie("line", True) if there.text.strip() == runs.text.strip() else None
    if runs.kind == "module":
        if there.text != runs.text:
            return None
        if not there.arguments and not runs.arguments:
            return pair.tie("words", False)
        fits = _fit(there.arguments, runs.arguments, process.argv_truncated)
        return pair.tie("words", True) if fits else None
    if not pair.is_comparable:
        return None
    paths = pair.program.script_paths(there.text)
    if runner.script in paths:
        return pair.tie("script", True, runner.script)
    if not paths and runs.text == there.text:
        return pair.tie("script", False, there.text)
    return None


def _fit(line: Sequence[str], words: Sequence[str], truncated: bool) -> bool:
    """Whether words can be a line's arguments; variables and wildcards stand for any words."""
    open_at = [at for at, word in enumerate(line) if not _UNSETTLED.isdisjoint(word)]
    if not open_at:
        same = tuple(line) == tuple(words)
        cut = truncated and len(words) > 1 and tuple(line[: len(words) - 1]) == tuple(words[:-1])
        return bool(line) and (same or cut)
    before, after = tuple(line[: open_at[0]]), tuple(line[open_at[-1] + 1 :])
    if not (before or after) or len(words) < len(before) + len(after):
        return False
    ends = truncated or not after or tuple(words[-len(after) :]) == after
    return tuple(words[: len(before)]) == before and ends


# -------------------------------------------------------------------- what is only said


def _by_mention(autostart: Autostart, runner: Runner) -> Tie | None:
    """Its own path in the text: in a variable, an argument, or in what could not be taken apart."""
    exe = runner.process.exe
    wanted = runner.script
    if exe is not None and not exe.memfd and not runner.is_general:
        wanted = exe.path
        if exe.path_is_genuine is False and not exe.deleted:
            return None
    if wanted is None or not runner.in_host_root:
        return None
    if is_packaged(wanted):
        return None  # scripts of packages are full of them
    if is_interpreter(wanted) and exe is not None and exe.links_python is not False:
        return None
    if wanted not in autostart.mentions:
        return None
    return _Pair(Program(autostart.entry, Start("")), runner).tie("mention", False)
