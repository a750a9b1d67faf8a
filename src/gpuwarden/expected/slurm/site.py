"""Where Slurm is on this host: its daemon, its files, this node's name and its running steps.

Sources: slurmd(8), slurm.conf(5), gres.conf(5), proc(5).
"""

from __future__ import annotations

import os
import re
from functools import cached_property

from msgspec import Struct, field

from gpuwarden.errors import GpuwardenError, Malformed
from gpuwarden.expected.slurm.gres import (
    GresDevice,
    GresLayout,
    configuration_lines,
    parse_gres_conf,
)
from gpuwarden.host import Host
from gpuwarden.pattern import pattern
from gpuwarden.sensors.seen import Seen

CONFIGURATION_PATHS = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/usr/local/etc/slurm.conf",
)
DEFAULT_SPOOL = "/var/spool/slurmd"
_DAEMONS = ("slurmd", "slurmstepd")
_INCLUDE_LIMIT = 16
_SETTING = pattern(r"(SlurmdSpoolDir|ProctrackType)\s*=\s*(\S+)", re.IGNORECASE)
_NODE_NAME = pattern(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,254}\Z")
_STEP_SOCKET = pattern(r"(?P<node>.+)_(?P<job>\d{1,10})\.(?P<step>\d{1,10})(?:\.\d+)?\Z")
_SOCKET_LIMIT = 4_096


class Site(Struct):
    """A host's Slurm: what its own files and processes tell before anybody is asked."""

    configuration: str | None = None
    node: str | None = None
    programs: str | None = None
    """The directory of the client programs that belong to the running slurmd."""
    daemon_runs: bool = False
    spool: str = DEFAULT_SPOOL
    proctrack: str | None = None
    other_nodes: tuple[str, ...] = ()
    """Names of further slurmd on this host, whose jobs are not asked for."""
    notes: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find the same cluster, with times as Unix seconds."""
        settings = {"SLURM_TIME_FORMAT": "%s"}
        if self.configuration is not None:
            settings["SLURM_CONF"] = self.configuration
        return settings

    def program(self, name: str) -> str:
        """The command to run: the running slurmd's own installation before the search path."""
        return f"{self.programs}/{name}" if self.programs else name


def is_node_name(text: str) -> bool:
    """Whether ``text`` can be a node's name, and cannot be taken for an option."""
    return _NODE_NAME.match(text) is not None


def find_site(host: Host, seen: Seen) -> Site | None:
    """The Slurm of this host, or None when neither a daemon of it nor a slurm.conf is here.

    Only root's processes count as daemons: anybody can call a process slurmd. Of several slurmd the
    one counts that our own SLURM_CONF names, as a prolog has it from the slurmd that runs it; else
    the first.
    """
    site = Site()
    names: list[str] = []
    lines = [
        line
        for line in seen.table.values()
        if line.comm in _DAEMONS and line.state != "Z" and _is_roots(host, line.pid)
    ]
    daemons = [_Daemon(host, line.pid) for line in lines if line.comm == "slurmd"]
    site.daemon_runs = bool(lines)
    for line in lines:
        site.programs = site.programs or _Daemon(host, line.pid).programs
    ours = os.environ.get("SLURM_CONF") if host.is_local else None
    if ours and any(daemon.configuration == ours for daemon in daemons):
        site.configuration = ours
    for daemon in daemons:
        named = daemon.configuration
        if None not in (named, site.configuration) and named != site.configuration:
            site.notes.append(f"a second slurmd, with {named}, was not asked")
            continue
        site.configuration = site.configuration or named
        if daemon.node is not None:
            names.append(daemon.node)
    if site.configuration is None:
        site.configuration = _configuration(host)
    if site.configuration is None and not site.daemon_runs:
        return None
    distinct = tuple(dict.fromkeys(names))
    site.node, site.other_nodes = (distinct[0] if distinct else None), distinct[1:]
    _read_settings(host, site)
    return site


def _is_roots(host: Host, pid: int) -> bool:
    try:
        return host.status(f"/proc/{pid}").uid == 0 or not host.is_live
    except GpuwardenError:
        return False


class _Daemon(Struct, dict=True):
    """A running slurmd: how it was started says which node and which cluster it serves."""

    host: Host
    pid: int

    def _words(self, name: str) -> list[str]:
        try:
            return self.host.read_text(f"/proc/{self.pid}/{name}", 1 << 18).split("\0")
        except GpuwardenError:
            return []

    @cached_property
    def _environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self._words("environ") if "=" in word)

    def _option(self, letter: str) -> str | None:
        words = self._words("cmdline")
        for place, word in enumerate(words[1:], start=1):
            if word == f"-{letter}" and place + 1 < len(words):
                return words[place + 1]
            if word.startswith(f"-{letter}") and len(word) > 2:
                return word[2:]
        return None

    @property
    def node(self) -> str | None:
        name = self._option("N") or self._environment.get("SLURMD_NODENAME")
        return name if name and is_node_name(name) else None

    @property
    def configuration(self) -> str | None:
        path = self._option("f") or self._environment.get("SLURM_CONF")
        return path if path and path.startswith("/") else None

    @property
    def programs(self) -> str | None:
        """``<prefix>/bin`` of the daemon's binary, if root alone can change what is in it."""
        try:
            binary = self.host.read_link(f"/proc/{self.pid}/exe")
            folder = f"{os.path.dirname(os.path.dirname(binary))}/bin"
            for path in (folder, f"{folder}/scontrol"):
                status = self.host.status(path)
                if status.uid != 0 or status.mode & 0o022:
                    return None
        except GpuwardenError:
            return None
        return folder


def _configuration(host: Host) -> str | None:
    named = os.environ.get("SLURM_CONF", "") if host.is_local else ""
    for path in (named, *CONFIGURATION_PATHS):
        if not path.startswith("/"):
            continue
        try:
            if host.status(path).is_regular:
                return path
        except GpuwardenError:
            continue
    return None


def _read_settings(host: Host, site: Site) -> None:
    if site.configuration is None:
        return
    pending, done = [site.configuration], 0
    while pending and done < _INCLUDE_LIMIT:
        done += 1
        try:
            text = host.read_text(pending.pop(0), 1 << 20)
        except GpuwardenError:
            continue
        for line in configuration_lines(text):
            if line[:8].lower() == "include ":
                pending.append(_beside(site.configuration, line[8:].strip()))
                continue
            match = _SETTING.match(line)
            if match is not None and match[1].lower() == "proctracktype":
                site.proctrack = match[2].removeprefix("proctrack/")
            elif match is not None:
                site.spool = match[2]


def _beside(configuration: str, name: str) -> str:
    return os.path.join(os.path.dirname(configuration), name)


def spool_directory(host: Host, site: Site) -> str:
    """SlurmdSpoolDir with ``%n`` (this node) and ``%h`` (the host) filled in."""
    hostname = host_name(host) or ""
    return site.spool.replace("%n", site.node or hostname).replace("%h", hostname)


def host_name(host: Host) -> str | None:
    """The short host name, as Slurm takes it for a node's name by default."""
    try:
        name = host.read_text("/proc/sys/kernel/hostname", 256).strip().split(".")[0]
    except GpuwardenError:
        return None
    return name if is_node_name(name) else None


def step_sockets(host: Host, site: Site) -> list[tuple[str, str]]:
    """(node, job id) of every step that slurmstepd runs here, by its socket; [] if unreadable."""
    try:
        names = host.names(spool_directory(host, site))
    except GpuwardenError:
        return []
    matches = (_STEP_SOCKET.match(name) for name in names[:_SOCKET_LIMIT])
    return sorted({(match["node"], match["job"]) for match in matches if match is not None})


def gres_layout(host: Host, site: Site, node: str) -> GresLayout:
    """This node's part of gres.conf and the files it includes; empty without one.

    Errors: Malformed when it is there and cannot be read as gres.conf.
    """
    folders = [os.path.dirname(site.configuration)] if site.configuration else []
    folders += [f"{spool_directory(host, site)}/conf-cache", "/run/slurm/conf"]
    for folder in folders:
        try:
            text = host.read_text(f"{folder}/gres.conf", 1 << 20)
        except Malformed:
            raise
        except GpuwardenError:
            continue
        return _layout(host, folder, text, node)
    return GresLayout()


def _layout(host: Host, folder: str, text: str, node: str) -> GresLayout:
    pending, done = [text], 0
    autodetect: str | None = None
    devices: list[GresDevice] = []
    while pending and done < _INCLUDE_LIMIT:
        done += 1
        part = parse_gres_conf(pending.pop(0), node)
        autodetect = part.autodetect or autodetect
        devices.extend(part.devices)
        for name in part.includes:
            try:
                pending.append(host.read_text(os.path.join(folder, name), 1 << 20))
            except GpuwardenError:
                continue
    return GresLayout(autodetect, tuple(devices))
