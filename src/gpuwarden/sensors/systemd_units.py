"""What systemd starts: services with their commands, timers with their schedule, generators.

Formats: systemd.syntax(7), systemd.service(5), systemd.timer(5); directories and their order of
precedence: systemd.unit(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.model import PersistenceEntry
from gpuwarden.sensors.entry_selection import Selection
from gpuwarden.sensors.place_reader import (
    COMMAND_LIMIT,
    COMMANDS_LIMIT,
    TEXT_LIMIT,
    PlaceReader,
)

SYSTEM_DIRECTORIES = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
)
USER_DIRECTORIES = (
    "/etc/systemd/user",
    "/run/systemd/user",
    "/usr/local/lib/systemd/user",
    "/usr/lib/systemd/user",
    "/lib/systemd/user",
)
HOME_DIRECTORIES = (".config/systemd/user", ".local/share/systemd/user")
GENERATOR_DIRECTORIES = (
    "/etc/systemd/system-generators",
    "/run/systemd/system-generators",
    "/usr/local/lib/systemd/system-generators",
    "/etc/systemd/user-generators",
    "/run/systemd/user-generators",
    "/usr/local/lib/systemd/user-generators",
)
# Packages install into the other directories: of these, every unit is kept.
_LOCAL_DIRECTORIES = (
    "/etc/systemd/system",
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/etc/systemd/user",
    "/usr/local/lib/systemd/system",
    "/usr/local/lib/systemd/user",
)
_PACKAGED_TARGETS = ("/usr/lib/systemd/", "/lib/systemd/", "../../../usr/lib/systemd/", "/dev/null")

_SUFFIXES = (".service", ".timer")
_DROP_INS = (".service.d", ".timer.d")
_LINKS = (".wants", ".requires", ".upholds")
_COMMANDS = (
    "ExecStart",
    "ExecStartPre",
    "ExecStartPost",
    "ExecReload",
    "ExecStop",
    "ExecStopPost",
    "ExecCondition",
)
_DETAILS = (
    "Type",
    "Restart",
    "RestartSec",
    "KillMode",
    "WorkingDirectory",
    "RootDirectory",
    "RefuseManualStop",
)
_PRELOAD = re.compile(r"\bLD_(?:PRELOAD|AUDIT)=\S{1,300}")
_COMMAND_PREFIXES = "-@:+!|"
_LINE_LIMIT = 8192


def parse_unit(text: str, path: str) -> list[PersistenceEntry]:
    """The service or timer in a unit file or a drop-in: one entry, or none if it starts nothing.

    ``enabled`` is False for a unit with an [Install] section and None for one without: only the
    links beside it tell whether it is wanted.
    """
    unit = _unit_name(path)
    if unit.endswith(".timer"):
        return _parse_timer(text, path, unit)
    commands: dict[str, list[str]] = {}
    details: list[str] = []
    user: str | None = None
    first: int | None = None
    installable = False
    for number, section, key, value in _settings(text):
        if section == "Install":
            installable = True
        elif section != "Service":
            continue
        elif key in _COMMANDS:
            if not value:  # an empty setting takes back those before it
                commands.pop(key, None)
                continue
            lines = commands.setdefault(key, [])
            if len(lines) < COMMANDS_LIMIT:
                lines.append(value.lstrip(_COMMAND_PREFIXES)[:COMMAND_LIMIT])
            first = first or number
        elif key in _DETAILS:
            details.append(f"{key}={value}")
        elif key == "User":
            user = value[:256] or None
        elif key == "Environment" and (found := _PRELOAD.search(value)):
            details.append(found[0])
            first = first or number
    flat = [command for key in _COMMANDS for command in commands.get(key, ())]
    if not flat and not any(_PRELOAD.match(detail) for detail in details):
        return []
    return [
        PersistenceEntry(
            kind="systemd-service",
            path=path,
            line=first,
            text="; ".join(details)[:TEXT_LIMIT],
            commands=tuple(flat[:COMMANDS_LIMIT]),
            user=user,
            unit=unit,
            enabled=False if installable else None,
        )
    ]


def _parse_timer(text: str, path: str, unit: str) -> list[PersistenceEntry]:
    schedule: list[str] = []
    started = unit.removesuffix(".timer") + ".service"
    first: int | None = None
    installable = False
    for number, section, key, value in _settings(text):
        if section == "Install":
            installable = True
        elif section != "Timer":
            continue
        elif key.startswith("On"):
            if not value:
                schedule.clear()
                continue
            schedule.append(f"{key}={value}")
            first = first or number
        elif key == "Unit" and value:
            started = value[:256]
    if not schedule:
        return []
    return [
        PersistenceEntry(
            kind="systemd-timer",
            path=path,
            line=first,
            text=f"{unit} starts {started}"[:TEXT_LIMIT],
            unit=started,
            schedule="; ".join(schedule)[:TEXT_LIMIT],
            enabled=False if installable else None,
        )
    ]


def _settings(text: str) -> Iterator[tuple[int, str, str, str]]:
    """(line number, section, key, value) of each setting; continued lines are joined."""
    section, joined, start = "", "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line and not joined:
            continue
        if line[:1] in ("#", ";"):  # a comment does not end a continued line
            continue
        if joined:
            line = joined + line
        else:
            start = number
        if line.endswith("\\") and len(line) < _LINE_LIMIT:
            joined = line[:-1].rstrip() + " "
            continue
        joined = ""
        if line.startswith("["):
            section = line[1:].partition("]")[0]
            if section == "Install":
                yield start, section, "", ""
            continue
        key, equals, value = line.partition("=")
        if equals:
            yield start, section, key.rstrip(), value.strip()[:_LINE_LIMIT]


def _unit_name(path: str) -> str:
    parts = path.split("/")
    if len(parts) > 1 and parts[-2].endswith(_DROP_INS):
        return parts[-2][:-2]
    return parts[-1]


class _Listing:
    """The unit files of one manager, the first directory's of each name, and what is wanted."""

    def __init__(self, reader: PlaceReader, directories: Sequence[str]) -> None:
        self.paths: dict[str, str] = {}
        self.drop_ins: list[str] = []
        self.wanted: set[str] = set()
        seen: set[str] = set()
        for directory in directories:
            try:
                # /lib is often a link to /usr/lib: the same directory is listed once.
                status = reader.host.status(directory)
            except Denied:
                reader.denied(directory)
                continue
            except GpuwardenError:
                continue
            identity = f"{status.device}:{status.inode}"
            if identity in seen:
                continue
            seen.add(identity)
            for name in reader.names(directory):
                path = f"{directory}/{name}"
                if name.endswith(_SUFFIXES):
                    self.paths.setdefault(name, path)
                elif name.endswith(_DROP_INS):
                    self.drop_ins += [
                        f"{path}/{part}" for part in reader.names(path) if part.endswith(".conf")
                    ]
                elif name.endswith(_LINKS):
                    self.wanted.update(reader.names(path))


def read(
    reader: PlaceReader, selection: Selection, homes: Sequence[str] = ()
) -> Iterator[PersistenceEntry]:
    """Units that somebody added here, and of the packaged ones those that name what runs."""
    yield from _units(reader, selection, SYSTEM_DIRECTORIES, ())
    yield from _units(reader, selection, USER_DIRECTORIES, ())
    for home in homes:
        local = [f"{home}/{directory}" for directory in HOME_DIRECTORIES]
        yield from _units(reader, selection, local, local)
    for directory in GENERATOR_DIRECTORIES:
        for name in reader.names(directory):
            path = f"{directory}/{name}"
            if _target(reader, path) != "/dev/null":
                yield PersistenceEntry(
                    kind="systemd-generator", path=path, commands=(path,), user="root"
                )


def _units(
    reader: PlaceReader, selection: Selection, directories: Sequence[str], local: Sequence[str]
) -> Iterator[PersistenceEntry]:
    listing = _Listing(reader, directories)
    if not listing.paths and not listing.drop_ins:
        return
    services: dict[str, PersistenceEntry] = {}
    timers: list[PersistenceEntry] = []
    kept: set[str] = set()
    for path in (*listing.paths.values(), *listing.drop_ins):
        file = reader.file(path)
        if file is None:
            continue
        for parsed in parse_unit(file.text, path):
            name = _unit_name(path)
            enabled = True if _wanted(name, listing.wanted) else parsed.enabled
            entry = msgspec.structs.replace(parsed, owner_uid=file.owner_uid, enabled=enabled)
            if entry.kind == "systemd-timer":
                timers.append(entry)
                if _is_local(reader, path, local):
                    kept.add(entry.unit or "")
                continue
            services[path] = entry
            if name in kept or _is_local(reader, path, local) or selection.wants(entry):
                kept.add(name)
    schedules: dict[str, str] = {}
    for timer in timers:
        if timer.unit in kept or selection.wants(timer):
            commands = services.get(listing.paths.get(timer.unit or "", ""))
            schedules[timer.unit or ""] = timer.schedule or ""
            kept.add(timer.unit or "")
            yield (
                timer
                if commands is None
                else msgspec.structs.replace(timer, commands=commands.commands, user=commands.user)
            )
    for entry in services.values():
        if entry.unit in kept:
            schedule = schedules.get(entry.unit or "")
            yield msgspec.structs.replace(entry, schedule=schedule) if schedule else entry


def _wanted(name: str, wanted: set[str]) -> bool:
    if name in wanted:
        return True
    stem, at, suffix = name.partition("@")
    # A template is wanted through its instances: getty@.service by getty@tty1.service.
    return bool(at) and any(
        link.startswith(stem + "@") and link.endswith(suffix.lstrip("@")) for link in wanted
    )


def _is_local(reader: PlaceReader, path: str, local: Sequence[str]) -> bool:
    directory = path.rpartition("/")[0]
    if directory.endswith(_DROP_INS):
        directory = directory.rpartition("/")[0]
    if directory in local:
        return True
    if directory not in _LOCAL_DIRECTORIES:
        return False
    target = _target(reader, path)
    return target is None or not target.startswith(_PACKAGED_TARGETS)


def _target(reader: PlaceReader, path: str) -> str | None:
    try:
        return reader.host.read_link(path)
    except GpuwardenError:
        return None
