"""What starts with the machine, a login or any program: rc.local, preload, profiles, autostart.

Formats: ld.so(8) for /etc/ld.so.preload; the Desktop Entry and Autostart specifications; sh(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from gpuwarden.model import PersistenceEntry
from gpuwarden.pattern import pattern
from gpuwarden.sensors.autostarts.entry_selection import Selection
from gpuwarden.sensors.autostarts.place_reader import (
    COMMAND_LIMIT,
    ENTRIES_LIMIT,
    TEXT_LIMIT,
    Home,
    PlaceFile,
    PlaceReader,
)

PRELOAD = "/etc/ld.so.preload"
RC_LOCAL = ("/etc/rc.local", "/etc/rc.d/rc.local")
INIT_SCRIPTS = ("/etc/init.d", "/etc/rc.d/init.d")
PROFILES = (
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/bashrc",
    "/etc/environment",
    "/etc/zsh/zshrc",
    "/etc/zsh/zshenv",
    "/etc/zsh/zprofile",
)
PROFILE_DIRECTORIES = ("/etc/profile.d",)
HOME_PROFILES = (
    ".bashrc",
    ".profile",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".zshrc",
    ".zshenv",
    ".zprofile",
)
AUTOSTART = "/etc/xdg/autostart"
HOME_AUTOSTART = ".config/autostart"
MOTD_SCRIPTS = "/etc/update-motd.d"
UDEV_RULES = ("/etc/udev/rules.d", "/run/udev/rules.d")
SSH_RC = "/etc/ssh/sshrc"
HOME_SSH_RC = ".ssh/rc"

_UDEV_RUN = pattern(
    r"\b(?:RUN|PROGRAM|IMPORT\{program\})(?:\{[a-z]+\})?\s*[+:]?==?\s*\"([^\"]{1,2000})\""
)
_SEARCH_PATH = pattern(
    r"^[ \t]{0,80}(?:export[ \t]{1,80})?PATH=(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^\s;&|]*))",
    re.MULTILINE,
)
_LINES_LIMIT = 500
_STARTS_NOTHING = pattern(r"exit(?: \d{1,3})?|set [-+]\w{1,10}|fi|done|esac|\}|then|else")


def parse_preload(text: str) -> list[PersistenceEntry]:
    """One entry a library of ld.so.preload: names apart by white space or colons, # to line end."""
    entries: list[PersistenceEntry] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.partition("#")[0]
        for library in line.replace(":", " ").split():
            entries.append(
                PersistenceEntry(
                    kind="preload",
                    path=PRELOAD,
                    line=number,
                    text=raw.strip()[:TEXT_LIMIT],
                    commands=(library[:COMMAND_LIMIT],),
                )
            )
            if len(entries) >= ENTRIES_LIMIT:
                return entries
    return entries


def parse_shell_profile(
    text: str, path: str, kind: str = "shell-profile"
) -> list[PersistenceEntry]:
    """One entry a line that can start something; continued lines are joined."""
    entries: list[PersistenceEntry] = []
    joined, start = "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        bare = raw.strip()
        if not joined:
            if not bare or bare[0] == "#":
                continue
            start = number
        line = joined + bare
        if line.endswith("\\") and len(line) < COMMAND_LIMIT:
            joined = line[:-1]
            continue
        joined = ""
        if line.strip() and not _STARTS_NOTHING.fullmatch(line):
            entries.append(_line_entry(kind, path, start, line))
        if len(entries) >= ENTRIES_LIMIT:
            return entries
    if joined.strip():
        entries.append(_line_entry(kind, path, start, joined))
    return entries


def parse_autostart(text: str, path: str) -> list[PersistenceEntry]:
    """The Exec line of a desktop entry, or nothing."""
    for number, raw in enumerate(text.split("\n"), 1):
        key, equals, value = raw.partition("=")
        if equals and key.strip() == "Exec" and value.strip():
            return [_line_entry("autostart", path, number, value.strip(), raw.strip())]
    return []


def parse_udev_rules(text: str, path: str) -> list[PersistenceEntry]:
    """One entry a rule line that runs programs."""
    entries: list[PersistenceEntry] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()[: TEXT_LIMIT * 2]
        commands = () if line[:1] in ("", "#") else tuple(_UDEV_RUN.findall(line))
        if commands:
            entry = _line_entry("udev-rule", path, number, line)
            entries.append(msgspec.structs.replace(entry, commands=commands[:32]))
        if len(entries) >= ENTRIES_LIMIT:
            break
    return entries


def _line_entry(
    kind: str, path: str, number: int, line: str, text: str | None = None
) -> PersistenceEntry:
    return PersistenceEntry(
        kind=kind,
        path=path,
        line=number,
        text=(line if text is None else text)[:TEXT_LIMIT],
        commands=(line[:COMMAND_LIMIT],),
    )


def read(
    reader: PlaceReader, selection: Selection, homes: Sequence[Home] = ()
) -> Iterator[PersistenceEntry]:
    """Every preload and rc.local line; of scripts and profiles the lines that are selected.

    ``homes`` are those that can be read without waiting for a server.
    """
    if file := reader.file(PRELOAD):
        yield from _owned(parse_preload(file.text), file, None)
    for path in RC_LOCAL:
        if file := reader.file(path):
            entries = parse_shell_profile(file.text, path, "rc-local")
            search = search_path(file.text)
            yield from _owned(entries[:_LINES_LIMIT], file, "root", search)
    scripts = _Scripts(reader, selection)
    for directory in INIT_SCRIPTS:
        yield from scripts.directory(directory, "init-script")
    for path in PROFILES:
        yield from scripts.file(path, "shell-profile", None)
    for directory in PROFILE_DIRECTORIES:
        yield from scripts.directory(directory, "shell-profile")
    yield from scripts.directory(MOTD_SCRIPTS, "motd-script")
    yield from scripts.file(SSH_RC, "ssh-rc", None)
    for directory in UDEV_RULES:
        for name in reader.names(directory):
            if name.endswith(".rules") and (file := reader.file(f"{directory}/{name}")):
                yield from _owned(parse_udev_rules(file.text, file.path), file, "root")
    for name in reader.names(AUTOSTART):
        if name.endswith(".desktop") and (file := reader.file(f"{AUTOSTART}/{name}")):
            entries = [e for e in parse_autostart(file.text, file.path) if selection.wants(e)]
            yield from _owned(entries, file, None)
    for home in homes:
        user = home.user
        for profile in HOME_PROFILES:
            if found := home.below(profile):
                yield from scripts.file(found, "shell-profile", user)
        rc = home.below(HOME_SSH_RC)
        if rc and (file := reader.file(rc)):
            yield from _owned(parse_shell_profile(file.text, file.path, "ssh-rc"), file, user)
        autostart = home.below(HOME_AUTOSTART)
        for name in reader.names(autostart) if autostart else ():
            if name.endswith(".desktop") and (file := reader.file(f"{autostart}/{name}")):
                yield from _owned(parse_autostart(file.text, file.path), file, user)


class _Scripts:
    """Selected lines of scripts; equal files (home directories share a skeleton) are read once."""

    def __init__(self, reader: PlaceReader, selection: Selection) -> None:
        self._reader = reader
        self._selection = selection
        self._plain: set[str] = set()
        """Texts of which nothing is kept."""

    def directory(self, directory: str, kind: str) -> Iterator[PersistenceEntry]:
        for name in self._reader.names(directory):
            yield from self.file(f"{directory}/{name}", kind, None)

    def file(self, path: str, kind: str, user: str | None) -> Iterator[PersistenceEntry]:
        file = self._reader.file(path)
        if file is None:
            return
        if self._selection.wants_text(path):
            # Its own path names what runs or stands out: the file as such is an entry.
            whole = PersistenceEntry(kind=kind, path=path, commands=(path,))
            yield from _owned([whole], file, user)
        if file.text in self._plain:
            return
        kept = 0
        search: str | None = None
        for number, line in self._selection.lines(file.text):
            if kept >= _LINES_LIMIT:
                self._reader.gap(path, f"only the first {_LINES_LIMIT} selected lines were kept")
                break
            if not kept:
                search = search_path(file.text)
            kept += 1
            yield from _owned([_line_entry(kind, path, number, line)], file, user, search)
        if not kept:
            self._plain.add(file.text)


def search_path(script: str) -> str | None:
    """The first PATH that a shell script sets, as written; None if it sets none."""
    found = _SEARCH_PATH.search(script)
    return next((v[:TEXT_LIMIT] for v in found.groups() if v), None) if found else None


def _owned(
    entries: Sequence[PersistenceEntry],
    file: PlaceFile,
    user: str | None,
    search: str | None = None,
) -> Iterator[PersistenceEntry]:
    for entry in entries:
        yield msgspec.structs.replace(
            entry, owner_uid=file.owner_uid, user=entry.user or user, search_path=search
        )
