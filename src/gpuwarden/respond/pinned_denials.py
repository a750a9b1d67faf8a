"""Denials without a daemon: the probe is loaded here, denies, and stays in the kernel by its pins.

Each denial has a directory of its own below ``DIRECTORY``, called after its first group's number,
so that one can be ended and the others stay. They end with it or with the machine's restart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from msgspec import Struct

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.pattern import pattern
from gpuwarden.probes import pinning
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.choose import chosen, watched_numbers
from gpuwarden.probes.settings import Settings
from gpuwarden.sensors.device_nodes import Majors, assigned_majors, read_majors

DIRECTORY = "/sys/fs/bpf/gpuwarden-respond"
LIMIT = 64
"""Each costs every device open on the machine one more look-up."""
_NAME = pattern(r"([0-9]{1,9})-([0-9]{1,20})")


class PinnedGroup(Struct, frozen=True):
    """A control group that one of these directories denies."""

    group: GroupKey
    directory: str


def deny(host: Host, groups: Sequence[GroupKey], directory: str = DIRECTORY) -> str:
    """Denies the groups by a probe of their own, which stays; its directory.

    Errors: Unavailable, Denied, UsageError; nothing is denied then.
    """
    if not groups:
        raise Unavailable("no control group")
    here = os.path.join(directory, f"{groups[0].hierarchy}-{groups[0].id}")
    pinning.prepare(here)
    if len(os.listdir(directory)) > LIMIT:
        _remove_empty(here)
        raise Unavailable(f"{LIMIT} denials are pinned already", remedy="run gpuwarden watch")
    numbers = watched_numbers(_majors(host))
    try:
        with chosen(numbers, Settings(limit_events=1), host=host) as choice:
            if choice.probe is None or not choice.can_deny:
                raise Unavailable(
                    f"nothing can be denied here: {choice}",
                    remedy="root, and a kernel with cgroup and BPF support",
                )
            for group in groups:
                choice.probe.deny_group(group)
            choice.probe.pin(here)
        pinning.check_it_is_the_hosts(here)
    except BaseException:
        pinning.unpin(here)
        _remove_empty(here)
        raise
    return here


def denied(directory: str = DIRECTORY) -> list[PinnedGroup]:
    """The groups that are denied so. Errors: Unavailable, Denied when that cannot be read."""
    found = []
    for here in _directories(directory):
        pinned = pinning.pinned(here)
        if pinned is None:
            continue
        if pinned.unread:
            raise Unavailable(f"{here}: {pinned.unread}")
        found += [PinnedGroup(one.group, here) for one in pinned.denials if not one.dry_run]
    return found


def allow(groups: Sequence[GroupKey], directory: str = DIRECTORY) -> list[GroupKey]:
    """Ends the denials that hold any of the groups; the groups that are allowed by that.

    Errors: Unavailable, Denied.
    """
    wanted = set(groups)
    ending = {one.directory for one in denied(directory) if one.group in wanted}
    ended = [one.group for one in denied(directory) if one.directory in ending]
    for here in ending:
        pinning.unpin(here)
    _remove_empty(directory)
    return ended


def _directories(directory: str) -> Iterator[str]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    except OSError as error:
        raise Unavailable(f"{directory}: {error.strerror}") from error
    for name in names[: 4 * LIMIT]:
        if _NAME.fullmatch(name):
            yield os.path.join(directory, name)


def _remove_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        return


def _majors(host: Host) -> Majors:
    """Those of /proc/devices and those that are assigned for good."""
    try:
        listed = read_majors(host)
    except GpuwardenError:
        return assigned_majors()
    return Majors({**assigned_majors().names, **listed.names}, listed.misc)
