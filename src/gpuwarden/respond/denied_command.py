"""`gpuwarden respond --denied` and `--allow`: denials by the numbers of their groups."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.model import Fact
from gpuwarden.outputs.told import BLIND, CLEAR, FINDING, Told
from gpuwarden.outputs.words import escape, json_text, moment
from gpuwarden.pattern import pattern
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.respond.denial import DeniedNow, allow_command, denied_now, lift, shown
from gpuwarden.respond.doing import Confirmations
from gpuwarden.respond.means import RealMeans
from gpuwarden.respond.settings import Settings

DENIED_SCHEMA = "gpuwarden.denied"
DENIED_VERSION = 1
GROUPS_LIMIT = 64
_GROUP = pattern(r"([0-9]{1,9}):([0-9]{1,19})")


class DeniedGroup(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """One group that is denied on request."""

    group: str
    by: str
    name: str
    reason: str
    since_ns: int | None
    allow: str


class DeniedList(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What `--denied --format json` prints."""

    schema: str = DENIED_SCHEMA
    version: int = DENIED_VERSION
    denied: tuple[DeniedGroup, ...]
    troubles: tuple[str, ...]


def listed(settings: Settings, *, as_json: bool) -> Told:
    """Every group that is denied on request, by the daemon or by pins. No errors: see the code."""
    found, troubles = denied_now(settings.control_socket)
    groups = tuple(_described(one, settings) for one in found)
    complaint = "".join(f"gpuwarden: {escape(one)}\n" for one in troubles)
    code = BLIND if troubles else CLEAR
    if as_json:
        return Told(json_text(DeniedList(denied=groups, troubles=tuple(troubles))), code, complaint)
    lines = []
    for one in groups:
        since = f", since {moment(one.since_ns)}" if one.since_ns is not None else ""
        name = f" {one.name}" if one.name else ""
        lines.append(f"group {one.group}{name}, by {one.by}{since}")
        lines += [f"  {one.reason}"] if one.reason else []
        lines.append(f"  to end it: {one.allow}")
    if not lines and not troubles:
        lines = ["nothing is denied on request"]
    return Told("".join(f"{escape(line)}\n" for line in lines), code, complaint)


def allowed(
    text: str,
    settings: Settings,
    means: RealMeans,
    given: Confirmations,
    *,
    ask: Callable[[str], bool],
) -> Told:
    """Takes denials back by number. Errors: UsageError for what is no number of a group."""
    groups = parse_groups(text)
    question = f"Allow group {', '.join(map(shown, groups))} to open accelerators again?"
    if not given.yes and not ask(question):
        return Told("REFUSED allow: nobody said yes at a terminal; --yes says it\n", FINDING)
    lines, stays = lift(groups, settings.control_socket)
    complaint = "".join(f"gpuwarden: {escape(one)}\n" for one in stays)
    try:
        means.lifted(text, "; ".join((*lines, *stays)), done=not stays)
    except GpuwardenError as error:
        complaint += f"gpuwarden: not in the journal: {escape(str(error))}\n"
    return Told(
        "".join(f"{escape(line)}\n" for line in lines), BLIND if stays else CLEAR, complaint
    )


def parse_groups(text: str) -> list[GroupKey]:
    """``HIERARCHY:NUMBER`` once or more, with commas between. Errors: UsageError."""
    found: list[GroupKey] = []
    for word in text.split(",")[: GROUPS_LIMIT + 1]:
        match = _GROUP.fullmatch(word.strip())
        if match is None or len(found) >= GROUPS_LIMIT:
            raise UsageError(
                f"--allow {text[:60]}: expected HIERARCHY:NUMBER",
                remedy="gpuwarden respond --denied",
            )
        found.append(GroupKey(int(match[1]), int(match[2])))
    return found


def _described(one: DeniedNow, settings: Settings) -> DeniedGroup:
    return DeniedGroup(
        group=shown(one.group),
        by=one.by,
        name=one.name,
        reason=one.reason,
        since_ns=one.since_ns,
        allow=allow_command([one.group], settings.state_directory),
    )
