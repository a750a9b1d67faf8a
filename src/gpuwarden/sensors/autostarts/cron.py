"""What cron, anacron and at start: all the places where their tables and jobs lie.

Formats: crontab(5) of Debian's cron and of cronie, anacrontab(5), and the shell scripts that at(1)
writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from gpuwarden.model import PersistenceEntry
from gpuwarden.pattern import pattern
from gpuwarden.sensors.autostarts.entry_selection import Selection
from gpuwarden.sensors.autostarts.place_reader import (
    COMMAND_LIMIT,
    COMMANDS_LIMIT,
    ENTRIES_LIMIT,
    TEXT_LIMIT,
    PlaceReader,
)

SYSTEM_TABLE = "/etc/crontab"
SYSTEM_TABLES = "/etc/cron.d"
ANACRON_TABLE = "/etc/anacrontab"
USER_TABLES = ("/var/spool/cron/crontabs", "/var/spool/cron", "/etc/crontabs")
SCRIPT_DIRECTORIES = {
    "/etc/cron.hourly": "@hourly",
    "/etc/cron.daily": "@daily",
    "/etc/cron.weekly": "@weekly",
    "/etc/cron.monthly": "@monthly",
    "/etc/cron.yearly": "@yearly",
}
AT_DIRECTORIES = ("/var/spool/cron/atjobs", "/var/spool/at")
_SPOOL_SUBDIRECTORIES = ("crontabs", "atjobs", "atspool", "lastrun", "tabs")

_ENVIRONMENT = pattern(r"[\"']?[A-Za-z_][A-Za-z0-9_]*[\"']?\s*=")
_SEARCH_PATH = pattern(r"[\"']?PATH[\"']?\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|(.*))")
_PRELOAD_VARIABLE = pattern(r"[\"']?LD_(?:PRELOAD|AUDIT|LIBRARY_PATH)\b")
_FIELD = r"[0-9A-Za-z*/,~\-?#]{1,200}"
_SCHEDULE = pattern(rf"-?(@[a-z]{{4,10}}|{_FIELD}(?:[ \t]+{_FIELD}){{4}})[ \t]+(\S.*)")
_ANACRON = pattern(r"(@[a-z]{4,10}|\d{1,6})[ \t]+(\d{1,6})[ \t]+(\S{1,200})[ \t]+(\S.*)")
_AT_ENVIRONMENT = pattern(r"[A-Za-z_][A-Za-z0-9_]*=.*; export [A-Za-z_][A-Za-z0-9_]*\s*\Z")
_AT_PATH = pattern(r"^PATH=([^;\n]{1,2000})", re.MULTILINE)
_AT_OWNER = pattern(r"^# mail +(\S{1,64})", re.MULTILINE)
_AT_UID = pattern(r"^# atrun uid=(\d{1,10})", re.MULTILINE)
# at's own lines, which every job has.
_AT_OWN = pattern(
    r"umask [0-7]+|cd \S.* \|\| \{|echo 'Execution directory inaccessible' >&2|exit 1|\}"
)


def parse_crontab(text: str, path: str, system: bool) -> list[PersistenceEntry]:
    """One entry a job line of a crontab; ``system`` tables have a user field.

    A line that sets LD_PRELOAD or its like for the jobs is an entry without a command. Lines that
    are no job are skipped, as cron itself does.
    """
    entries: list[PersistenceEntry] = []
    table_user = None if system else path.rpartition("/")[2] or None
    search: str | None = None
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()[: TEXT_LIMIT + COMMAND_LIMIT]
        if not line or line[0] == "#":
            continue
        if _ENVIRONMENT.match(line):
            search = _search_path(line) or search
            if _PRELOAD_VARIABLE.match(line):
                entries.append(
                    _entry(path, number, line, commands=(), user=table_user, schedule=None)
                )
        elif found := _SCHEDULE.fullmatch(line):
            schedule, command = found.groups()
            user = table_user
            if system:
                user, _, command = command.replace("\t", " ").partition(" ")
            command = command.strip()
            if command:
                entries.append(
                    _entry(
                        path,
                        number,
                        line,
                        commands=(command,),
                        user=user,
                        schedule=schedule,
                        search=search,
                    )
                )
        if len(entries) > ENTRIES_LIMIT:
            break
    return entries


def parse_anacrontab(text: str, path: str) -> list[PersistenceEntry]:
    """One entry a job line of an anacrontab."""
    entries: list[PersistenceEntry] = []
    search: str | None = None
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()[: TEXT_LIMIT + COMMAND_LIMIT]
        if line[:1] in ("", "#") or _ENVIRONMENT.match(line):
            search = _search_path(line) or search
            continue
        if found := _ANACRON.fullmatch(line):
            period, _, _, command = found.groups()
            schedule = period if period.startswith("@") else f"every {period} days"
            entries.append(
                _entry(
                    path,
                    number,
                    line,
                    commands=(command,),
                    user="root",
                    schedule=schedule,
                    search=search,
                )
            )
        if len(entries) > ENTRIES_LIMIT:
            break
    return entries


def parse_at_job(text: str, path: str) -> PersistenceEntry | None:
    """The commands of an at job, without the environment that at wrote above them."""
    if not text.startswith("#!"):
        return None
    commands: list[str] = []
    first: int | None = None
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if line[:1] in ("", "#") or _AT_ENVIRONMENT.match(line) or _AT_OWN.fullmatch(line):
            continue
        commands.append(line[:COMMAND_LIMIT])
        first = first or number
        if len(commands) >= COMMANDS_LIMIT:
            break
    if not commands:
        return None
    owner, uid = _AT_OWNER.search(text), _AT_UID.search(text)
    search = _AT_PATH.search(text)
    return PersistenceEntry(
        kind="at",
        path=path,
        line=first,
        text=commands[0][:TEXT_LIMIT],
        commands=tuple(commands),
        user=owner[1] if owner else None,
        owner_uid=int(uid[1]) if uid else None,
        schedule="once",
        search_path=search[1].replace("\\", "") if search else None,
    )


def _search_path(line: str) -> str | None:
    found = _SEARCH_PATH.fullmatch(line)
    return next((value[:TEXT_LIMIT] for value in found.groups() if value), None) if found else None


def _entry(
    path: str,
    number: int,
    line: str,
    *,
    commands: tuple[str, ...],
    user: str | None,
    schedule: str | None,
    search: str | None = None,
) -> PersistenceEntry:
    return PersistenceEntry(
        kind="cron",
        path=path,
        line=number,
        text=line[:TEXT_LIMIT],
        commands=tuple(command[:COMMAND_LIMIT] for command in commands),
        user=user,
        schedule=schedule,
        search_path=search,
    )


def read(reader: PlaceReader, selection: Selection) -> Iterator[PersistenceEntry]:
    """Every job of every table; of the scripts in cron.daily and the like, the telling lines."""
    yield from _tables(reader)
    yield from _at_jobs(reader)
    for directory, schedule in SCRIPT_DIRECTORIES.items():
        for name in reader.names(directory):
            path = f"{directory}/{name}"
            script = reader.file(path)
            if script is None:
                continue
            kept = list(selection.lines(script.text))[:COMMANDS_LIMIT]
            if kept or selection.wants_text(path):
                yield PersistenceEntry(
                    kind="cron",
                    path=path,
                    line=kept[0][0] if kept else None,
                    text=kept[0][1][:TEXT_LIMIT] if kept else "",
                    commands=(path, *(line[:COMMAND_LIMIT] for _, line in kept)),
                    user="root",
                    owner_uid=script.owner_uid,
                    schedule=schedule,
                )


def _tables(reader: PlaceReader) -> Iterator[PersistenceEntry]:
    tables = [(SYSTEM_TABLE, True)]
    tables += [(f"{SYSTEM_TABLES}/{name}", True) for name in reader.names(SYSTEM_TABLES)]
    for directory in USER_TABLES:
        tables += [
            (f"{directory}/{name}", False)
            for name in reader.names(directory)
            if name not in _SPOOL_SUBDIRECTORIES
        ]
    kept = 0
    for path, system in tables:
        table = reader.file(path)
        if table is None:
            continue
        for entry in parse_crontab(table.text, path, system):
            if kept >= ENTRIES_LIMIT:
                reader.gap("crontabs", f"only the first {ENTRIES_LIMIT} jobs were kept")
                return
            kept += 1
            yield _owned(entry, table.owner_uid)
    table = reader.file(ANACRON_TABLE)
    if table is not None:
        for entry in parse_anacrontab(table.text, ANACRON_TABLE):
            yield _owned(entry, table.owner_uid)


def _at_jobs(reader: PlaceReader) -> Iterator[PersistenceEntry]:
    for directory in AT_DIRECTORIES:
        for name in reader.names(directory)[:ENTRIES_LIMIT]:
            if name.startswith(".SEQ") or name == "spool":
                continue
            job = reader.file(f"{directory}/{name}")
            entry = parse_at_job(job.text, job.path) if job else None
            if job and entry:
                yield entry if entry.owner_uid is not None else _owned(entry, job.owner_uid)


def _owned(entry: PersistenceEntry, owner_uid: int) -> PersistenceEntry:
    return msgspec.structs.replace(entry, owner_uid=owner_uid)
