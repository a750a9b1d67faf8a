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
from gpuwarden.pattern import pattern
from gpuwarden.sensors.autostarts.entry_selection import Selection
from gpuwarden.sensors.autostarts.place_reader import (
    COMMAND_LIMIT,
    COMMANDS_LIMIT,
    TEXT_LIMIT,
    Home,
    PlaceFile,
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
_PRELOAD = pattern(r"\bLD_(?:PRELOAD|AUDIT)=\S{1,300}")
_SEARCH_PATH = pattern(r"(?:^|[\s\"'])PATH=([^\s\"']{1,2000})")
_TELLING = pattern(r"^\s*((?:Exec|Environment|WorkingDirectory|RootDirectory)[^\n]*)", re.MULTILINE)
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
    search: str | None = None
    directory: str | None = None
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
            if key == "WorkingDirectory":
                directory = value.lstrip("-")[:TEXT_LIMIT] or None
        elif key == "User":
            user = value[:256] or None
        elif key == "ExecSearchPath":
            search = value[:TEXT_LIMIT] or None
        elif key == "Environment":
            if found := _SEARCH_PATH.search(value):
                search = search or found[1]
            if found := _PRELOAD.search(value):
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
            search_path=search,
            directory=directory,
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
    reader: PlaceReader, selection: Selection, homes: Sequence[Home] = ()
) -> Iterator[PersistenceEntry]:
    """Units that somebody added here, and of the packaged ones those that name what runs."""
    yield from _units(reader, selection, SYSTEM_DIRECTORIES, ())
    yield from _units(reader, selection, USER_DIRECTORIES, ())
    for home in homes:
        local = [path for name in HOME_DIRECTORIES if (path := home.below(name))]
        if local:
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
    files: dict[str, PlaceFile] = {}
    kept: set[str] = set()
    timers: list[PersistenceEntry] = []
    for path in (*listing.paths.values(), *listing.drop_ins):
        file = reader.file(path)
        if file is None:
            continue
        files[path] = file
        name = _unit_name(path)
        if name.endswith(".timer"):
            timers += _entries(file, listing)
            if timers and timers[-1].path == path and _is_local(reader, path, local):
                kept.add(timers[-1].unit or "")
        elif name not in kept and (
            _is_local(reader, path, local)
            or (may_be_wanted(file, selection) and any(map(selection.wants, parse_file(file))))
        ):
            kept.add(name)
    schedules: dict[str, str] = {}
    for timer in timers:
        if timer.unit not in kept and not selection.wants(timer):
            continue
        started = timer.unit or ""
        kept.add(started)
        schedules[started] = timer.schedule or ""
        service = files.get(listing.paths.get(started, ""))
        runs = parse_file(service) if service else []
        yield (
            msgspec.structs.replace(
                timer,
                commands=runs[0].commands,
                user=runs[0].user,
                search_path=runs[0].search_path,
                directory=runs[0].directory,
            )
            if runs
            else timer
        )
    for path, file in files.items():
        name = _unit_name(path)
        if name not in kept or name.endswith(".timer"):
            continue
        for entry in _entries(file, listing):
            schedule = schedules.get(name)
            yield msgspec.structs.replace(entry, schedule=schedule) if schedule else entry


def parse_file(file: PlaceFile) -> list[PersistenceEntry]:
    """``parse_unit`` of a file that was read."""
    return parse_unit(file.text, file.path)


def may_be_wanted(file: PlaceFile, selection: Selection) -> bool:
    """Whether any entry of a unit file can be selected: a quick look without parsing."""
    # A continued line may go on behind comments: only the parser knows where.
    if "\\\n" in file.text or selection.wants_unit(_unit_name(file.path)):
        return True
    telling = _TELLING.findall(file.text)
    return bool(telling) and selection.wants_text("\n".join((file.path, *telling)))


def _entries(file: PlaceFile, listing: _Listing) -> list[PersistenceEntry]:
    enabled = _wanted(_unit_name(file.path), listing.wanted)
    return [
        msgspec.structs.replace(
            entry, owner_uid=file.owner_uid, enabled=True if enabled else entry.enabled
        )
        for entry in parse_file(file)
    ]


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
