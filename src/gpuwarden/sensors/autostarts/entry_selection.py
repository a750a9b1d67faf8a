"""Which entries of large places a snapshot keeps: those that name what runs, or stand out in form.

A stock system has hundreds of units and start-up scripts. Keeping one says nothing against it:
rules judge. An entry is kept when its words name a subject process, or an ancestor of one, or when
its text has one of the forms below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuwarden.command_lines.program_places import is_packaged
from gpuwarden.model import PersistenceEntry, Process
from gpuwarden.pattern import pattern

# Dot names that start-up files of ordinary users are full of.
_ORDINARY_DOT_NAMES = (
    r"bash(?:rc|_profile|_login|_logout|_aliases|_completion|_history)|profile|z(?:shrc|shenv|profile"
    r"|login|sh_aliases)|oh-my-zsh|p10k\.zsh|fzf\.\w+|dircolors|inputrc|lesspipe|placeholder|d"
    r"|cargo|rustup|nvm|pyenv|rbenv|sdkman|bun|deno|ghcup|opam|local/bin|local/share|conda"
)
_STANDS_OUT = pattern(
    r"/\.(?!\.|/|(?:" + _ORDINARY_DOT_NAMES + r")\b)\w"  # hidden path component
    r"|/(?:var/)?tmp/|/dev/shm/|/run/shm/"
    r"|(?:\$\(|`|<\()\s*(?:curl|wget)\b"
    r"|\bbase64\b|\bopenssl\s+enc\b|\bxxd\s+-r"
    r"|ld\.so\.preload|\bLD_PRELOAD\b|\bLD_AUDIT\b"
    r"|stratum[0-9]?\+|--(?:pool|algo|wallet|donate-level|url|rig-id)\b"
    r"|\b(?:nohup|setsid|disown)\b|/dev/tcp/|\bexec\s+-a\b|\bcrontab\s"
    r"|\bchattr\b|\bmemfd_create\b",
)
# Copy, run, delete; and fetch something into something. Two words apart on one line: one pass over
# the words that matter, since an expression with gaps takes minutes for a line made to hurt it.
_COPY_STEPS = pattern(r"(?P<cp>\bcp\b)|(?P<then>&&|;|\|\|)|(?P<rm>\brm\b)|(?P<end>\n)")
_FETCH_STEPS = pattern(
    r"(?P<fetch>\b(?:curl|wget|aria2c|axel)\b)|(?P<use>\||&&|;|\$\(|-O|-o|`|https?:)|(?P<end>\n)"
)
_COPY_REACH, _FETCH_REACH = 400, 600
# Each form above holds at least one of these: looking for them first is ten times faster than the
# expression on every line.
_MARKS = (
    "/.",
    "tmp/",
    "/shm/",
    "cp",
    "curl",
    "wget",
    "aria2c",
    "axel",
    "base64",
    "openssl",
    "xxd",
    "ld.so.preload",
    "LD_PRELOAD",
    "LD_AUDIT",
    "stratum",
    "--pool",
    "--algo",
    "--wallet",
    "--donate-level",
    "--url",
    "--rig-id",
    "nohup",
    "setsid",
    "disown",
    "/dev/tcp/",
    "exec",
    "crontab",
    "chattr",
    "memfd_create",
)
_LINE_END = pattern("\n")
_WORD = pattern(r"[^\s;&|()<>\"'`=,{}]+")
# Interpreters and supervisors of everything: their name alone ties an entry to no process, unless
# the file of that name lies in a place of its own.
_GENERIC = pattern(
    r"(?:ba|da|z|k|c|tc|fi)?sh|busybox|env|sudo|su|nohup|setsid|timeout|systemd|init|tini|dumb-init|"
    r"(?:python|pypy|perl|ruby|node|nodejs|php|java|julia|lua)[\d.]*|supervisord|runc|conmon|"
    r"containerd-shim\S*|tmux\S*|screen|sshd\S*|login|cron|crond|"
    r"\(\S*|-?\Z"
)
_NAME_MINIMUM = 3
_NEEDLES_LIMIT = 20_000
_MARKS_LIMIT = 1000
_ARGUMENTS_LOOKED_AT = 8


class Selection:
    """The words that tie an entry to what runs, built once a scan from the processes found."""

    def __init__(self, processes: Iterable[Process] = ()) -> None:
        self._words: set[str] = set()
        self._names: set[str] = set()
        self._directories: tuple[str, ...] = ()
        self._units: set[str] = set()
        directories: set[str] = set()
        for process in processes:
            if len(self._words) > _NEEDLES_LIMIT:
                break
            self._learn(process, directories)
        self._directories = tuple(sorted(directories))
        marks = self._words | self._names | {path.rstrip("/") for path in directories}
        self._marks_complete = len(marks) <= _MARKS_LIMIT
        self._marks = tuple(marks) if self._marks_complete else ()
        """What a line that names a process must contain, unless there are too many."""

    def _learn(self, process: Process, directories: set[str]) -> None:
        exe = process.exe
        if exe is not None:
            # A program called python3 that is none, or perhaps none, is looked for by that name.
            own = not exe.links_python and not is_packaged(exe.path)
            self._program(exe.path, own_path=own, own_name=own)
        if process.argv:
            said = process.argv[0].split(" ", 1)[0]
            self._program(said, own_path=said.startswith("/") and not is_packaged(said))
            for argument in process.argv[1 : 1 + _ARGUMENTS_LOOKED_AT]:
                # A script or a module's path; options and plain words tie to nothing.
                if "/" in argument and not argument.startswith("-") and "://" not in argument:
                    self._words.add(argument)
        if process.cwd and process.cwd.count("/") >= 2 and process.role != "ancestor":
            directories.add(process.cwd.rstrip("/") + "/")
        if process.cgroup is not None and process.cgroup.unit:
            self._units.add(process.cgroup.unit)

    def _program(self, path: str, *, own_path: bool = False, own_name: bool = False) -> None:
        name = path.rpartition("/")[2]
        generic = _GENERIC.fullmatch(name) is not None
        if "/" in path and (own_path or not generic):
            self._words.add(path)
        if len(name) >= _NAME_MINIMUM and (own_name or not generic):
            self._names.add(name)

    def names_process(self, text: str) -> bool:
        """Whether a word of ``text`` is a path, a program name or a directory of a process."""
        if not self._words and not self._names and not self._directories:
            return False
        for word in _WORD.findall(text):
            if word in self._words or word.rpartition("/")[2] in self._names:
                return True
            if self._directories and word[0] == "/":
                directory = word + "/"
                if directory.startswith(self._directories):
                    return True
        return False

    def wants_text(self, text: str) -> bool:
        """Whether a line or command is kept."""
        return stands_out(text) or self.names_process(text)

    def wants_unit(self, unit: str | None) -> bool:
        """Whether a process runs in that unit."""
        return unit is not None and unit in self._units

    def wants(self, entry: PersistenceEntry) -> bool:
        """Whether an entry is kept: by its unit, its text, its commands or its own path."""
        if self.wants_unit(entry.unit):
            return True
        return self.wants_text("\n".join((entry.path, entry.text, *entry.commands)))

    def lines(self, text: str) -> Iterator[tuple[int, str]]:
        """The (number, line) pairs of a script that are kept; comments never are."""
        marks = (*_MARKS, *self._marks)
        if not self._marks_complete:
            starts = {0, *(found.end() for found in _LINE_END.finditer(text))}
        else:
            starts = _line_starts(text, marks)
        number, counted = 1, 0
        for start in sorted(starts):
            end = text.find("\n", start)
            bare = text[start : end if end >= 0 else len(text)].strip()
            number += text.count("\n", counted, start)
            counted = start
            if bare and bare[0] != "#" and self.wants_text(bare):
                yield number, bare


def stands_out(text: str) -> bool:
    """Whether ``text`` has one of the forms that are kept whatever they name."""
    if not any(mark in text for mark in _MARKS):
        return False
    return copies_and_deletes(text) or fetches(text) or _STANDS_OUT.search(text) is not None


def copies_and_deletes(text: str) -> bool:
    """Whether a line copies a file, goes on, and deletes one; in one pass, whatever the text."""
    copied = went_on = -1
    for step in _COPY_STEPS.finditer(text) if "cp" in text and "rm" in text else ():
        at = step.start()
        if step["end"]:
            copied = went_on = -1
        elif step["cp"]:
            copied = step.end()
        elif step["then"]:
            if 0 <= copied < at <= copied + _COPY_REACH:
                went_on = step.end()
        elif went_on >= 0 and at <= went_on + _COPY_REACH:
            return True
    return False


def fetches(text: str) -> bool:
    """Whether a line fetches from the network into something; in one pass, whatever the text."""
    fetched = -1
    for step in _FETCH_STEPS.finditer(text):
        if step["end"]:
            fetched = -1
        elif step["fetch"]:
            fetched = step.end()
        elif fetched >= 0 and step.start() <= fetched + _FETCH_REACH:
            return True
    return False


def _line_starts(text: str, marks: Iterable[str]) -> set[int]:
    """Where the lines begin that contain one of ``marks``."""
    starts: set[int] = set()
    for mark in marks:
        at = text.find(mark)
        while at >= 0:
            starts.add(text.rfind("\n", 0, at) + 1)
            end = text.find("\n", at)
            at = text.find(mark, end) if end >= 0 else -1
    return starts
