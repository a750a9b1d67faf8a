"""Which files the programs of autostarts lead to: through their PATH, their directory and links.

Nothing is opened: a file is looked up by its name and known by its device and inode. Defaults of
PATH: crontab(5), systemd.exec(5), udev(7). What a file server or a FUSE daemon would have to
answer for is not asked.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from gpuwarden.command_lines.interpreters import given
from gpuwarden.command_lines.starts import Start, starts_of
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import PersistenceEntry, StartedProgram

ROOT_LOOK_UPS_LIMIT = 20_000
USER_LOOK_UPS_LIMIT = 2_000
"""An owner's: what one user writes must not cost others their place."""
PATH_LIMIT = 1024
PROGRAMS_LIMIT = 64
"""Programs looked up of one entry; a line that starts more of them is odd by itself."""
_DIRECTORIES_LIMIT = 32
_NAME_LIMIT = 4096
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CRON = "/usr/bin:/bin"
_SEARCH_PATHS = {"cron": _CRON, "at": _CRON, "udev-rule": "/usr/lib/udev:/lib/udev"}
_FROM_RUNTIMES = ("container-restart", "pod-controller", "preload")
# What a shell or systemd would put other words in for.
_UNSETTLED = frozenset("$`*?[]%{}\0\n")


class ProgramFiles:
    """Looks programs up on one host; each name once in a directory or along a PATH."""

    def __init__(
        self, host: Host, homes: Mapping[str, str], is_remote: Callable[[str], bool]
    ) -> None:
        """``homes``: user → home directory. ``is_remote``: whether a path asks a server."""
        self._host = host
        self._homes = homes
        self._is_remote = is_remote
        self._known: dict[tuple[str, str], StartedProgram] = {}
        self._look_ups: dict[int, int] = defaultdict(int)
        self.left_out = 0
        """Entries with programs that were not looked up, because there were too many."""

    def found(self, entry: PersistenceEntry) -> PersistenceEntry:
        """The entry with its programs, and with its user's home where cron would start it."""
        if entry.kind in _FROM_RUNTIMES:
            return entry
        directory = self._at_home(entry.directory, entry.user)
        if directory is None and entry.kind == "cron":
            directory = self._homes.get(entry.user or "")
        programs: dict[tuple[str, str | None], StartedProgram] = {}
        owner = entry.owner_uid or 0
        limit = USER_LOOK_UPS_LIMIT if owner else ROOT_LOOK_UPS_LIMIT
        for start, name, is_script in _named(entry):
            self._look_ups[owner] += 1
            if len(programs) >= PROGRAMS_LIMIT or self._look_ups[owner] > limit:
                self.left_out += 1
                break
            program = self._program(entry, start, name, is_script, directory)
            programs[program.name, program.path] = program
        return msgspec.structs.replace(
            entry, directory=directory, programs=tuple(programs.values())
        )

    def _program(
        self,
        entry: PersistenceEntry,
        start: Start,
        name: str,
        is_script: bool,
        directory: str | None,
    ) -> StartedProgram:
        if _UNSETTLED & set(name):
            return _unread(name, "what its variables or wildcards stand for is not known")
        written = self._at_home(name, entry.user) or name
        if written.startswith("/"):
            return self._along("", posixpath.normpath(written), name)
        # Only a bare program is searched for; an interpreter takes its script as it stands.
        if "/" in written or is_script:
            here = self._at_home(start.directory, entry.user) or directory
            if here is None or not here.startswith("/"):
                return _unread(name, "the directory that it is started in is not known")
            return self._along("", posixpath.normpath(f"{here}/{written}"), name)
        default = entry.search_path or _SEARCH_PATHS.get(entry.kind, _SYSTEM)
        search = start.search_path or default
        for variable in ("${PATH}", "$PATH"):
            search = search.replace(variable, _SEARCH_PATHS.get(entry.kind, _SYSTEM))
        return self._along(search[:_NAME_LIMIT], name, name)

    def _along(self, search: str, name: str, written: str) -> StartedProgram:
        key = (search, name)
        if key not in self._known:
            self._known[key] = self._look(search, name)
        return msgspec.structs.replace(self._known[key], name=written[:_NAME_LIMIT])

    def _look(self, search: str, name: str) -> StartedProgram:
        reason = ""
        for path in _candidates(search, name):
            try:
                if self._is_remote(path):
                    reason = reason or "on a network or FUSE file system, not looked up"
                    continue
                status = self._host.status(path)
                # A script that an interpreter is given need not be executable.
                if not status.is_regular or (search and not status.mode & 0o111):
                    continue
                leads_to = self._host.resolved(path)
                too_long = len(leads_to) > PATH_LIMIT
                return StartedProgram(
                    name=name,
                    path=None if too_long else leads_to,
                    unread={"path": "longer than is kept"} if too_long else {},
                    device=f"{status.device[0]}:{status.device[1]}",
                    inode=status.inode,
                )
            except Unavailable:
                continue
            except (GpuwardenError, ValueError) as error:
                reason = reason or str(error)
        return _unread(name, reason) if reason else StartedProgram(name=name)

    def _at_home(self, path: str | None, user: str | None) -> str | None:
        if path is None or not path.startswith("~"):
            return path
        who, slash, rest = path[1:].partition("/")
        home = self._homes.get(who or user or "")
        return None if home is None else home + slash + rest


def _named(entry: PersistenceEntry) -> Iterator[tuple[Start, str, bool]]:
    """(start, name, whether it is an interpreter's script) of each file that commands name."""
    for command in entry.commands:
        for start in starts_of(command):
            yield start, start.program, False
            runs = given(start.program, start.arguments)
            if runs is not None and runs.kind == "script":
                yield start, runs.text, True


def _candidates(search: str, name: str) -> Iterator[str]:
    if not search:
        yield name
        return
    for directory in search.split(":", _DIRECTORIES_LIMIT)[:_DIRECTORIES_LIMIT]:
        if directory.startswith("/") and not _UNSETTLED & set(directory):
            yield f"{directory}/{name}"


def _unread(name: str, reason: str) -> StartedProgram:
    return StartedProgram(name=name[:_NAME_LIMIT], unread={"path": reason[:200]})
