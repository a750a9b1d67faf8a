"""The text of the systemd unit: its capabilities, less one of them, and its sandbox alone."""

from __future__ import annotations

INSTALLED = "/opt/gpuwarden/bin/gpuwarden"
_KEY = "CapabilityBoundingSet="
# How it is started, watched and ended: not of its sandbox.
_LIFE = (
    "Type NotifyAccess ExecStart ExecReload WatchdogSec Restart RestartSec TimeoutStopSec "
    "StateDirectory StateDirectoryMode RuntimeDirectory RuntimeDirectoryMode"
).split()


def capabilities(unit: str) -> list[str]:
    """Those that it keeps, in its order."""
    lines = [line for line in unit.splitlines() if line.startswith(_KEY)]
    return [word for line in lines for word in line.removeprefix(_KEY).split()]


def without(unit: str, capability: str) -> str:
    """The unit with one capability less."""
    lines = []
    for line in unit.splitlines():
        if line.startswith(_KEY):
            words = line.removeprefix(_KEY).split()
            lines.append(_KEY + " ".join(word for word in words if word != capability))
        else:
            lines.append(line)
    return "\n".join(lines)


def sandbox(unit: str) -> str:
    """The lines of the service that say what it may do."""
    service = unit.split("[Service]")[1].split("[Install]")[0]
    lines = (line for line in service.splitlines() if line and line[0] != "#")
    return "\n".join(line for line in lines if line.partition("=")[0] not in _LIFE)
