"""Programs that supervisord keeps running, from its usual files and from those it was started with.

Format: https://supervisord.org/configuration.html (INI; continuation lines are indented).
"""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Iterator

import msgspec

from gpuwarden.errors import GpuwardenError
from gpuwarden.model import PersistenceEntry
from gpuwarden.pattern import pattern
from gpuwarden.sensors.autostarts.place_reader import (
    COMMAND_LIMIT,
    ENTRIES_LIMIT,
    TEXT_LIMIT,
    PlaceReader,
)
from gpuwarden.sensors.seen import Seen

_ETC_NAME = pattern(r"\.?supervisor.*")
_CONFIG_SUFFIXES = (".conf", ".ini", ".cfg")
_SECTION = pattern(r"\[(program|eventlistener|fcgi-program):([^\]]{1,200})\]\s*(?:[;#].*)?")
_INLINE_COMMENT = pattern(r"\s;.*")
_DETAILS = ("directory", "autostart", "autorestart", "startretries", "process_name", "numprocs")
_PRELOAD = pattern(r"\bLD_(?:PRELOAD|AUDIT)=[^,\s]{1,300}")
_SEARCH_PATH = pattern(r"(?:^|,)\s*PATH=(?:\"([^\"]*)\"|'([^']*)'|([^,]*))")
_VALUE_LIMIT = 4096
_FILES_LIMIT = 200
_INCLUDE_DEPTH = 3
_DIRECTORY_DEPTH = 2
_CMDLINE_LIMIT_BYTES = 1 << 16


def parse_supervisord(text: str, path: str) -> list[PersistenceEntry]:
    """One entry a program section that has a command."""
    entries: list[PersistenceEntry] = []
    name, line_number = "", 0
    settings: dict[str, str] = {}
    for number, section, key, value in _settings(text):
        if section is not None:
            _finish(entries, path, name, line_number, settings)
            found = _SECTION.fullmatch(section)
            name, line_number, settings = (found[2].strip() if found else ""), number, {}
        elif name:
            settings[key] = value
        if len(entries) >= ENTRIES_LIMIT:
            return entries
    _finish(entries, path, name, line_number, settings)
    return entries


def parse_includes(text: str) -> list[str]:
    """The file patterns of the [include] section, as written."""
    patterns: list[str] = []
    current = ""
    for _, section, key, value in _settings(text):
        if section is not None:
            current = section
        elif current.startswith("[include]") and key == "files":
            patterns += value.split()
    return patterns[:_FILES_LIMIT]


def config_argument(arguments: list[str]) -> str | None:
    """The configuration file that a supervisord command line names, as written."""
    for position, argument in enumerate(arguments):
        if argument in ("-c", "--configuration"):
            return arguments[position + 1] if position + 1 < len(arguments) else None
        if argument.startswith("--configuration="):
            return argument.partition("=")[2]
        if argument.startswith("-c") and len(argument) > 2:
            return argument[2:]
    return None


def _settings(text: str) -> Iterator[tuple[int, str | None, str, str]]:
    """(line, section header, "", "") or (line, None, key, value), continued values joined."""
    key, value, start = "", "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.rstrip()
        bare = line.lstrip()
        if not bare or bare[0] in ";#":
            continue
        if line[0] in " \t" and key:
            if len(value) < _VALUE_LIMIT:
                value += " " + _INLINE_COMMENT.sub("", bare, 1)
            continue
        if key:
            yield start, None, key, value[:_VALUE_LIMIT]
            key = ""
        if bare[0] == "[":
            yield number, bare[:_VALUE_LIMIT], "", ""
            continue
        # configparser takes ":" as well, and so does supervisord.
        left, separator, right = _split(bare)
        if separator:
            key, start = left.strip().lower(), number
            value = _INLINE_COMMENT.sub("", right[:_VALUE_LIMIT], 1).strip()
    if key:
        yield start, None, key, value[:_VALUE_LIMIT]


def _split(line: str) -> tuple[str, str, str]:
    equals, colon = line.find("="), line.find(":")
    if colon >= 0 and (equals < 0 or colon < equals):
        return line.partition(":")
    return line.partition("=")


def _finish(
    entries: list[PersistenceEntry], path: str, name: str, line: int, settings: dict[str, str]
) -> None:
    command = settings.get("command")
    if not name or not command:
        return
    details = [f"{key}={settings[key]}" for key in _DETAILS if key in settings]
    if found := _PRELOAD.search(settings.get("environment", "")):
        details.append(found[0])
    search = _SEARCH_PATH.search(settings.get("environment", ""))
    entries.append(
        PersistenceEntry(
            kind="supervisord",
            path=path,
            line=line,
            text="; ".join(details)[:TEXT_LIMIT],
            commands=(command[:COMMAND_LIMIT],),
            user=settings.get("user"),
            unit=name,
            enabled=settings.get("autostart", "true").lower() in ("true", "yes", "1", "on"),
            search_path=next((v[:TEXT_LIMIT] for v in search.groups() if v), None)
            if search
            else None,
            directory=settings.get("directory", "")[:TEXT_LIMIT] or None,
        )
    )


def read(reader: PlaceReader, seen: Seen) -> Iterator[PersistenceEntry]:
    """Every program of every supervisord configuration that was found."""
    pending: list[tuple[str, int]] = []
    for name in reader.names("/etc"):
        if _ETC_NAME.fullmatch(name):
            pending += [(path, 0) for path in _files_below(reader, f"/etc/{name}", 0)]
    pending += [(path, 0) for path in _files_of_processes(reader, seen)]
    done: set[str] = set()
    kept = 0
    while pending:
        path, depth = pending.pop(0)
        if path in done:
            continue
        if len(done) >= _FILES_LIMIT:
            reader.gap("supervisord", f"only the first {_FILES_LIMIT} files were read")
            return
        done.add(path)
        file = reader.file(path)
        if file is None:
            continue
        for entry in parse_supervisord(file.text, path):
            if kept >= ENTRIES_LIMIT:
                reader.gap("supervisord", f"only the first {ENTRIES_LIMIT} programs were kept")
                return
            kept += 1
            yield msgspec.structs.replace(entry, owner_uid=file.owner_uid)
        if depth < _INCLUDE_DEPTH:
            for pattern in parse_includes(file.text):
                pending += [(found, depth + 1) for found in _expand(reader, path, pattern)]


def _files_below(reader: PlaceReader, path: str, depth: int) -> list[str]:
    try:
        status = reader.host.status(path)
    except GpuwardenError:
        return []
    if not status.is_directory:
        # A directory may hold anything; only configuration files are read from it.
        return [path] if depth == 0 or path.endswith(_CONFIG_SUFFIXES) else []
    if depth >= _DIRECTORY_DEPTH:
        return []
    files: list[str] = []
    for name in reader.names(path)[:_FILES_LIMIT]:
        files += _files_below(reader, f"{path}/{name}", depth + 1)
    return files


def _expand(reader: PlaceReader, path: str, pattern: str) -> list[str]:
    base = posixpath.dirname(path)
    pattern = posixpath.normpath(posixpath.join(base, pattern.replace("%(here)s", base)))
    directory, name = posixpath.split(pattern)
    if "*" not in pattern and "?" not in pattern and "[" not in pattern:
        return [pattern]
    if any(sign in directory for sign in "*?["):
        # One level of directories, as in conf.d/*/*.conf.
        above, middle = posixpath.split(directory)
        if any(sign in above for sign in "*?["):
            reader.gap(path, "an [include] with several patterns for directories was not followed")
            return []
        directories = [f"{above}/{found}" for found in fnmatch.filter(reader.names(above), middle)][
            :_FILES_LIMIT
        ]
    else:
        directories = [directory]
    return [
        f"{found}/{file}"
        for found in directories
        for file in fnmatch.filter(reader.names(found), name)[:_FILES_LIMIT]
    ]


def _files_of_processes(reader: PlaceReader, seen: Seen) -> Iterator[str]:
    """The -c arguments of running supervisord processes that share the host's mounts."""
    pids = {pid for pid, stat in seen.table.items() if stat.comm.startswith("supervisor")}
    pids |= {
        pid
        for pid, process in seen.processes.items()
        if any("supervisord" in argument for argument in (process.argv or ())[:3])
    }
    for pid in sorted(pids)[:_FILES_LIMIT]:
        process = seen.processes.get(pid)
        arguments = list(process.argv or ()) if process else []
        cwd = process.cwd if process else None
        try:
            if not arguments:
                raw = reader.host.read_bytes(f"/proc/{pid}/cmdline", _CMDLINE_LIMIT_BYTES)
                arguments = raw.decode("utf-8", "backslashreplace").split("\0")
            config = config_argument(arguments[1:])
            if config is None:
                continue
            if not _has_host_mounts(reader, pid):
                if process is not None:
                    reader.gap(
                        f"supervisord {pid}", "its files lie in a container and were not read"
                    )
                continue
            if not config.startswith("/"):
                cwd = cwd or reader.host.read_link(f"/proc/{pid}/cwd")
                config = posixpath.normpath(posixpath.join(cwd, config))
        except GpuwardenError:
            continue
        yield config


def _has_host_mounts(reader: PlaceReader, pid: int) -> bool:
    try:
        theirs = reader.host.read_link(f"/proc/{pid}/ns/mnt")
        return theirs == reader.host.read_link("/proc/1/ns/mnt")
    except GpuwardenError:
        # A recorded tree, or a caller without rights: the plain path is all there is.
        return True
