"""Persistence: what starts a process again, and how far that is odd."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuwarden.finding import Evidence
from gpuwarden.model import PersistenceEntry, Process
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.rules.masquerade import (
    HOME_DOT_DIRECTORIES,
    SYSTEM_DIRECTORIES,
    TEMP_DIRECTORIES,
    basename,
)
from gpuwarden.rules.miner_signs import line_signs

INTERPRETERS = pattern(r"(?:python|pypy|perl|ruby|node|java|php|lua)[\d.]*|(?:ba|da|z|k)?sh|env")
PRELOAD_KINDS = frozenset({"preload"})
CONTAINER_KINDS = frozenset({"container-restart", "pod-controller"})
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


def _stands_in(word: str, text: str, before: str) -> bool:
    """Whether a word stands in a text by itself: after a blank or ``before``, before an end."""
    start = text.find(word)
    while start >= 0:
        end = start + len(word)
        opened = start == 0 or text[start - 1].isspace() or text[start - 1] in before
        closed = end == len(text) or text[end].isspace() or text[end] in "'\";&|"
        if opened and closed:
            return True
        start = text.find(word, start + 1)
    return False


def starts(entry: PersistenceEntry, process: Process) -> str | None:
    """How an entry is tied to a process: by its path, its name or its unit; None if it is not."""
    placement = process.cgroup
    if entry.unit and placement and placement.unit == entry.unit:
        return "unit"
    text = "\n".join((entry.text, *entry.commands))
    candidates: list[str] = []
    if process.exe is not None and not process.exe.memfd:
        candidates.append(process.exe.path)
    if process.argv:
        candidates.append(process.argv[0])
        if INTERPRETERS.fullmatch(basename(process.argv[0])):
            candidates.extend(
                a for a in process.argv[1:4] if "/" in a or a.endswith((".py", ".sh"))
            )
    for candidate in candidates:
        # An interpreter says nothing, unless it is a file of that name in a place of its own.
        ordinary = "/" not in candidate or "/bin/" in candidate or candidate.startswith("/usr/")
        if ordinary and INTERPRETERS.fullmatch(basename(candidate)):
            continue
        if len(candidate) > 3 and _stands_in(candidate, text, "\"'="):
            return "path" if "/" in candidate else "name"
    name = basename(process.exe.path) if process.exe else process.comm
    if len(name) > 3 and not INTERPRETERS.fullmatch(name) and _stands_in(name, text, "\"'=/"):
        return "name"
    return None


def observe(node: Node, process: Process) -> Iterator[Evidence]:
    """What would start this process again; odd ways are strong, ordinary ones explain."""
    family = [process, *node.ancestors(process.pid)]
    for entry in node.persistence:
        if entry.kind in PRELOAD_KINDS:
            continue
        tie: str | None = None
        for member in family[:4]:
            tie = starts(entry, member)
            if tie is not None:
                break
        if tie is None:
            continue
        odd = oddities(entry)
        if odd:
            yield Evidence(
                kind="persistence",
                strength="strong",
                source=entry.path,
                text=f"started again by {_where(entry)}, which {'; '.join(odd)}",
            )
            continue
        exe = process.exe
        from_system = exe is not None and exe.path.startswith(SYSTEM_DIRECTORIES)
        own_unit = tie == "unit" or entry.kind in CONTAINER_KINDS
        yield Evidence(
            kind=None if own_unit else "persistence",
            strength="fact" if own_unit else ("weak" if from_system or tie == "name" else "strong"),
            source=entry.path,
            text=f"started again by {_where(entry)}: {entry.text.strip()[:160]}",
        )
