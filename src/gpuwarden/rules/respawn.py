"""Persistence: what starts a process again, and how far that is odd."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gpuwarden.finding import Evidence
from gpuwarden.model import PersistenceEntry, Process
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.rules.autostart_index import COMPARED_LIMIT, AutostartIndex
from gpuwarden.rules.autostart_ties import Tie, runner_of, tie_of
from gpuwarden.rules.masquerade import (
    HOME_DOT_DIRECTORIES,
    SYSTEM_DIRECTORIES,
    TEMP_DIRECTORIES,
    basename,
)
from gpuwarden.rules.miner_signs import line_signs

PRELOAD_KINDS = frozenset({"preload"})
FAMILY = 4
"""The process and the nearest of its parents."""
SHOWN_LIMIT = 16
# Programs that start things for everybody, as asked.
_LAUNCHERS = pattern(
    r"systemd|init|supervisord|circusd|sshd(?:-session|-auth)?|login|crond?|cronie|anacron|atd|inetd|xinetd|tmux.*"
    r"|screen|containerd|containerd-shim.*|dockerd|conmon|crio|kubelet|k3s.*|slurmd|slurmstepd"
    r"|runc|crun|systemd-udevd|gdm.*|lightdm|sddm.*"
)
# Audit, accounting and monitoring libraries that clusters load into every process on purpose.
KNOWN_PRELOADS = pattern(
    r"(?:.*/)?(?:libxalt_init|libsnoopy|libtcmalloc\w*|libjemalloc|libmimalloc|libnss_wrapper"
    r"|libfakeroot|libeatmydata|libdarshan|libmap-sampler|libsegfault|libgtk3-nocsd"
    r"|liboneagentproc|launcher\.preload|libarmmem|libAppProtection)"
    r"(?:-[\w${}]+)*\.so(?:\.\d+)*"
)
# Root's own places; $LIB and $PLATFORM are the loader's words (ld.so(8)).
_PRELOAD_PLACE = pattern(
    r"/(?:usr|opt|nix|sw|apps|software|shared|cvmfs)/.*|/(?:lib(?:64)?|\$LIB|\$\{LIB\})/.*|[^/]+"
)
# A path where a program or an interpreter's script stands. Hidden ones among the arguments (a lock,
# a stamp, a key) are what honest jobs are full of.
_HIDDEN = pattern(
    r"(?:^|[;&|(`{\n]|(?:^|[;&|(`])\s{0,8}\.\s|(?:\b(?:then|do|else|nohup|setsid|exec|sudo|env|nice"
    r"|source|(?:ba|da|z|k)?sh|python[\d.]{0,6}|perl|ruby|node|php|chmod|timeout\s\S{1,20}"
    r"|flock\s(?:-\S{1,20}\s){0,4}\S{1,200})|\s-c)\s)[\s'\"@:+!-]{0,8}"
    r"(?:(?:-[\w-]{1,20}|[\w.]{1,40}=[^\s'\"]{0,200}|\+x|[0-7]{3,4})\s{1,8}){0,4}"
    r"['\"]?(?P<path>[~$/][^\s'\";&|)]{0,400})",
    re.MULTILINE,
)
_ANY_PATH = pattern(r"(?:^|[\s'\"=:])(?P<path>[~$/][^\s'\";&|):]{0,400})", re.MULTILINE)
_HIDDEN_PART = pattern(r"/\.(?!\.?/)[^/]+")
# Expressions with a gap cost minutes on a text made to hurt them: what comes first is looked for,
# then, once, what comes behind it.
_FETCH_PROGRAM = pattern(r"\b(?:curl|wget)\b")
_INTO_SHELL = pattern(r"\|\s{0,80}(?:sudo\s{1,80})?(?:/?\w{1,40}/){0,8}/?(?:ba|da|z)?sh\b")
_COPY = pattern(r"\bcp\b")
_DELETE = pattern(r"\brm\b\s{1,80}-\w{0,20}[rf]")
_PRELOAD_WRITE = pattern(r">+\s*/etc/ld\.so\.preload")
_BASE64 = pattern(r"\bbase64\b\s+(?:-d|--decode|-D)\b")
_LOOK_ALIKE = pattern(r"(?:^|[\s'\"])/s?bin/(?:httpss|sshdd|systemmd|crondd)\b")
_HOME_TOOLS = pattern(
    r"/\.(?:bashrc|profile|bash_profile|bash_aliases|zshrc|condarc|dotfiles|acme\.sh|pm2|dockerenv)"
)


def _fetches_into_shell(text: str) -> bool:
    """Whether what curl or wget fetches goes into a shell, no other command between them."""
    for shell in _INTO_SHELL.finditer(text):
        begin = max(text.rfind(mark, 0, shell.start()) for mark in "|;&") + 1
        if _FETCH_PROGRAM.search(text, begin, shell.start()):
            return True
    return False


def _copies_runs_deletes(text: str) -> bool:
    """Whether a copy is followed by another command and that by a deletion."""
    copy = _COPY.search(text)
    then = text.find("&&", copy.end()) if copy is not None else -1
    return then >= 0 and _DELETE.search(text, then) is not None


def _hidden_programs(entry: PersistenceEntry) -> Iterator[str]:
    """Paths that an entry starts or loads and with a hidden part no tool of honest users has."""
    # Without a command it is a line that sets something, such as LD_PRELOAD: each path counts.
    shape, texts = (_HIDDEN, entry.commands) if entry.commands else (_ANY_PATH, (entry.text,))
    for text in texts:
        for found in shape.finditer(text):
            parts = _HIDDEN_PART.findall(found["path"])
            odd = [p for p in parts if p[1:] not in HOME_DOT_DIRECTORIES]
            if any(not _HOME_TOOLS.fullmatch(part) for part in odd):
                yield found["path"]


def oddities(entry: PersistenceEntry) -> tuple[str, ...]:
    """What is structurally odd about an entry, in words; empty for an ordinary one."""
    text = "\n".join((entry.text, *entry.commands))
    found: list[str] = []
    signs = line_signs(text)
    if signs.activity == "mining" and signs.strength in ("complete", "strong", "name"):
        found.append("runs a miner: " + "; ".join(signs.reasons))
    if _copies_runs_deletes(text):
        found.append("copies a program, runs it and deletes it")
    if _fetches_into_shell(text):
        found.append("downloads a script straight into a shell")
    if _PRELOAD_WRITE.search(text):
        found.append("rewrites /etc/ld.so.preload")
    if _BASE64.search(text):
        found.append("decodes base64 and runs it")
    if any(command.lstrip("-@:+! ").startswith(TEMP_DIRECTORIES) for command in entry.commands):
        found.append("starts a program from a temporary directory")
    if entry.kind not in PRELOAD_KINDS:
        hidden = next(_hidden_programs(entry), None)
        if hidden is not None:
            found.append(f"starts a hidden file ({hidden})")
        if _LOOK_ALIKE.search(text):
            found.append("starts a program whose name imitates a system daemon")
        odd_place = re.search(r"/etc/\.[^/]+/", entry.path)
        if odd_place:
            found.append(f"its configuration is hidden in {odd_place.group()}")
    return tuple(dict.fromkeys(found))


def preload_is_known(entry: PersistenceEntry) -> bool:
    """Whether every library of a preload line is a common audit or allocator library.

    A common name in a place where others than root may write, or a hidden one, is not known.
    """
    return bool(entry.commands) and all(
        KNOWN_PRELOADS.fullmatch(c) and _PRELOAD_PLACE.fullmatch(c) and "/." not in c
        for c in entry.commands
    )


def _where(entry: PersistenceEntry) -> str:
    line = f":{entry.line}" if entry.line else ""
    when = f" ({entry.schedule})" if entry.schedule else ""
    return f"{entry.kind} {entry.path}{line}{when}"


# -------------------------------------------------------------------- whom they start


def tied(node: Node, process: Process) -> Iterator[tuple[PersistenceEntry, Tie, Process]]:
    """(entry, tie, whom it starts) of each that starts a process, or one of its near parents.

    Parents count up to what starts things for everybody: sshd, cron or systemd being started by
    something says nothing of what they start.
    """
    index = _autostarts(node).index
    members, launcher = _family(node, process)
    own_unit = process.cgroup.unit if process.cgroup is not None else None
    # A unit that starts things for others, cron's, is not what starts those.
    of_launcher = (
        launcher is not None
        and launcher.cgroup is not None
        and own_unit is not None
        and launcher.cgroup.unit == own_unit
    )
    found: dict[int, tuple[PersistenceEntry, Tie, Process]] = {}
    for member in members:
        runner = runner_of(node, member)
        for autostart in index.candidates(runner):
            entry = autostart.entry
            tie = tie_of(autostart, runner)
            if tie is None or (tie.kind == "unit" and of_launcher):
                continue
            known = found.get(id(entry))
            if known is None or tie.weight > known[1].weight:
                found[id(entry)] = (entry, tie, member)
    yield from found.values()


def _family(node: Node, process: Process) -> tuple[list[Process], Process | None]:
    """A process with its near parents, and the launcher that those end at."""
    members = [process]
    for parent in node.ancestors(process.pid):
        if parent.pid == 1 or _starts_for_everybody(node, parent):
            return members, parent
        if len(members) < FAMILY:
            members.append(parent)
    return members, None


def _starts_for_everybody(node: Node, process: Process) -> bool:
    runner = runner_of(node, process)
    path = runner.script
    if process.exe is not None and not runner.is_general:
        path = process.exe.path
    return (
        path is not None
        and _LAUNCHERS.fullmatch(basename(path)) is not None
        and path.startswith(SYSTEM_DIRECTORIES)
    )


class _Autostarts:
    """The entries of one node with what is worked out once for all of its processes."""

    def __init__(self, entries: tuple[PersistenceEntry, ...]) -> None:
        self.index = AutostartIndex(entries)
        self._odd: dict[int, tuple[str, ...]] = {}

    def oddities(self, entry: PersistenceEntry) -> tuple[str, ...]:
        """``oddities`` of one of the entries."""
        if id(entry) not in self._odd:
            self._odd[id(entry)] = oddities(entry)
        return self._odd[id(entry)]


# Those of the latest node: they are asked for by process after process.
_latest: list[_Autostarts] = []


def _autostarts(node: Node) -> _Autostarts:
    kept = _latest[0] if _latest else None
    if kept is None or kept.index.entries is not node.persistence:
        kept = _Autostarts(node.persistence)
        _latest[:] = [kept]
    return kept


def observe(node: Node, process: Process) -> Iterator[Evidence]:
    """What would start this process again; odd ways are strong, ordinary ones explain."""
    autostarts = _autostarts(node)
    told = [
        _evidence(autostarts.oddities(entry), entry, tie, process, member)
        for entry, tie, member in tied(node, process)
        if entry.kind not in PRELOAD_KINDS
    ]
    if len(told) > SHOWN_LIMIT:
        told.sort(key=lambda one: (_RANKS.index(one.strength), one.source, one.text))
    yield from told[:SHOWN_LIMIT]
    if len(told) > SHOWN_LIMIT:
        more = f"{len(told) - SHOWN_LIMIT} more autostarts would start it again"
        yield Evidence(source="autostarts", text=more)
    if autostarts.index.is_cut(runner_of(node, process)):
        yield Evidence(
            source="autostarts",
            text=f"more than {COMPARED_LIMIT} autostarts of one user name what it runs; "
            "the others were not compared",
        )


_RANKS = ("complete", "strong", "weak", "fact")


def _shown(entry: PersistenceEntry) -> str:
    """What it runs, with the settings of a unit behind it."""
    said = entry.text.strip()
    if not entry.commands or entry.commands[0] in said:
        return said
    return f"{entry.commands[0]} ({said})" if said else entry.commands[0]


def _evidence(
    odd: Sequence[str], entry: PersistenceEntry, tie: Tie, process: Process, member: Process
) -> Evidence:
    whose = f"its {tie.noun}" if member is process else f"the {tie.noun} of a process above it"
    # What is odd by itself and names a file of its own is no chance.
    sure = tie.sure or (bool(odd) and tie.kind != "words" and not tie.as_other_user)
    how = "started" if sure else "perhaps started"
    told = f"{how} again by {_where(entry)}, tied by {whose}"
    if odd:
        return Evidence(
            kind="persistence",
            strength="strong" if sure else "weak",
            source=entry.path,
            text=f"{told}; the entry {'; '.join(odd)}",
        )
    exe = process.exe
    from_system = exe is not None and exe.path.startswith(SYSTEM_DIRECTORIES)
    own_unit = tie.kind in ("unit", "container")
    return Evidence(
        kind=None if own_unit else "persistence",
        strength="fact" if own_unit else ("strong" if sure and not from_system else "weak"),
        source=entry.path,
        text=f"{told}: {_shown(entry)[:160]}",
    )
