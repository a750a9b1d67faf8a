"""`gpuwarden harden host`: settings of this host that leave its GPUs open, each with its command.

Nothing is changed. A setting that could not be read is unknown, never sound.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.harden import host_containers, host_devices, host_kernel, host_own
from gpuwarden.harden.setting import Setting, State
from gpuwarden.host import Host
from gpuwarden.model import Fact
from gpuwarden.outputs.told import BLIND, CLEAR, FINDING, Call, Told
from gpuwarden.outputs.words import escape, json_text
from gpuwarden.policy import Policy

HARDENING_SCHEMA = "gpuwarden.hardening"
ORDER: tuple[State, ...] = ("open", "unknown", "sound", "absent")
_LEAST_WIDTH = 60
_INDENT = " " * 10


class Hardening(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """All settings of a host."""

    schema: str = HARDENING_SCHEMA
    version: int = 1
    settings: tuple[Setting, ...]


def run(call: Call) -> Told:
    """The report; 1 when something is open, else 2 when something could not be read.

    Errors: UsageError.
    """
    arguments = call.arguments
    host = Host(arguments.root)
    try:
        host.names("/")
    except GpuwardenError as error:
        raise UsageError(f"--root {arguments.root}: not a directory") from error
    settings = examine(host, call.policy, call.policy_path)
    states = {setting.state for setting in settings}
    code = FINDING if "open" in states else BLIND if "unknown" in states else CLEAR
    if arguments.format == "json":
        return Told(json_text(Hardening(settings=settings)), code)
    return Told(render(settings, width=call.width), code)


def examine(host: Host, policy: Policy, policy_path: str | None) -> tuple[Setting, ...]:
    """Every setting, the open ones first."""
    found: list[Setting] = []
    parts: tuple[tuple[str, Callable[[], Iterable[Setting]]], ...] = (
        ("devices", lambda: host_devices.read(host)),
        ("containers", lambda: host_containers.read(host)),
        ("kernel", lambda: host_kernel.read(host)),
        ("own files", lambda: host_own.read(host, policy, policy_path)),
    )
    for name, read in parts:
        try:
            found.extend(read())
        except GpuwardenError as error:
            found.append(
                Setting(
                    id=name.replace(" ", "-"),
                    title=name,
                    state="unknown",
                    now=str(error),
                    source=name,
                    why="What could not be looked at may be open.",
                )
            )
    return tuple(sorted(found, key=lambda setting: ORDER.index(setting.state)))


def render(settings: Sequence[Setting], *, width: int) -> str:
    """The settings for a person: what is open in full, the rest a line each."""
    wide = max(width, _LEAST_WIDTH)
    lines: list[str] = []
    for setting in settings:
        lines += _in_full(setting, wide) if setting.state == "open" else _in_short(setting, wide)
    counts = [
        f"{sum(setting.state == state for setting in settings)} {word}"
        for state, word in zip(
            ORDER, ("open", "not known", "as it should be", "not there"), strict=True
        )
    ]
    return "\n".join([*lines, "", ", ".join(counts) + ". Nothing was changed."]) + "\n"


def _in_full(setting: Setting, width: int) -> Iterator[str]:
    head = f"{setting.state:<10}{setting.id}: {setting.title}: {setting.now} [{setting.source}]"
    yield from _wrapped(head, width)
    yield from _wrapped(f"{_INDENT}{setting.why}", width)
    for command in setting.commands:
        # A command is never broken: it is to be copied.
        yield escape(f"{_INDENT}$ {command}")
    if setting.may_break:
        yield from _wrapped(f"{_INDENT}may break: {setting.may_break}", width)


def _in_short(setting: Setting, width: int) -> Iterator[str]:
    yield from _wrapped(f"{setting.state:<10}{setting.id}: {setting.now} [{setting.source}]", width)


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(
        escape(line),
        width,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
