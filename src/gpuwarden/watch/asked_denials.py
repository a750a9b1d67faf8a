"""Denials that somebody asked the daemon for: kept in its state directory, for this boot only.

A control group's number means nothing after a restart of the machine, so the file names the boot it
was written in. What is in it is checked like a request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import msgspec

from gpuwarden.control import Denied, GroupName
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.probes.cgroup2 import ROOT_INODE, GroupKey
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.watch import group_ids

FILE = "asked-denials.json"
FILE_LIMIT_BYTES = 4 << 20
LIMIT = 1024
"""Groups that are denied on request at a time."""
TEXT_LIMIT = 512


class _File(msgspec.Struct, frozen=True):
    boot_id: str
    denied: tuple[Denied, ...] = ()


class AskedDenials:
    """The denials that were asked for, in force and in a file; one thread.

    ``also`` tells which groups the policy denies as well: those stay denied.
    """

    def __init__(
        self,
        directory: str,
        boot_id: str | None,
        *,
        also: Callable[[], Iterable[GroupKey]] = tuple,
    ) -> None:
        self._path = os.path.join(directory, FILE)
        self._boot_id = boot_id
        self._also = also
        self._probe: DeviceOpenProbe | None = None
        self._denied: dict[GroupKey, Denied] = {}
        self.trouble = ""
        """Why they cannot be kept, or some of them are not in force."""

    def __contains__(self, group: GroupKey) -> bool:
        return group in self._denied

    def denied(self) -> tuple[Denied, ...]:
        """In the order in which they were asked for."""
        return tuple(self._denied.values())

    def begin(self, probe: DeviceOpenProbe | None) -> None:
        """Puts into force what an earlier run was asked for. No errors; see ``trouble``."""
        self._probe = probe
        try:
            kept = self._read()
        except GpuwardenError as error:
            self.trouble = f"denials asked for before are not known: {error}"
            return
        alive = group_ids.existing(_key(one) for one in kept)
        failed = []
        for one in kept:
            if _key(one) not in alive:
                continue
            try:
                self._enforce(_key(one))
            except (GpuwardenError, OSError) as error:
                failed.append(f"{one.name or _shown(one.group)}: {error}")
                continue
            self._denied[_key(one)] = one
        if failed:
            self.trouble = f"asked for before and not denied now: {'; '.join(failed)[:TEXT_LIMIT]}"
        elif len(self._denied) != len(kept):
            self._write()

    def deny(self, groups: Iterable[GroupName], *, name: str, reason: str, since_ns: int) -> None:
        """Denies all of the groups or none, and keeps that. Errors: GpuwardenError, OSError."""
        wanted = [GroupKey(one.hierarchy, one.id) for one in groups]
        fresh = [one for one in dict.fromkeys(wanted) if one not in self._denied]
        if len(self._denied) + len(fresh) > LIMIT:
            raise Unavailable(f"{LIMIT} control groups are denied on request already")
        missing = set(wanted) - group_ids.existing(wanted)
        if missing or not wanted:
            raise Unavailable("the control group is not there" if wanted else "no control group")
        done: list[GroupKey] = []
        try:
            for group in fresh:
                self._enforce(group)
                done.append(group)
                self._denied[group] = Denied(
                    group=GroupName(group.hierarchy, group.id),
                    name=name[:TEXT_LIMIT],
                    reason=reason[:TEXT_LIMIT],
                    since_ns=since_ns,
                )
            self._write()
        except BaseException:
            for group in done:
                self._denied.pop(group, None)
                self._lift(group)
            raise

    def allow(self, groups: Iterable[GroupName]) -> list[str]:
        """Takes denials back; what stays as it is, and why. Errors: GpuwardenError, OSError."""
        also = set(self._also())
        told = []
        for one in groups:
            group = GroupKey(one.hierarchy, one.id)
            if self._denied.pop(group, None) is None:
                told.append(f"group {_shown(one)} was not denied on request")
            elif group in also:
                told.append(f"group {_shown(one)} stays denied: the policy's enforce key names it")
            else:
                self._lift(group)
        self._write()
        return told

    def forget_ended(self) -> None:
        """Forgets groups that are no more. No errors."""
        if not self._denied:
            return
        gone = set(self._denied) - group_ids.existing(self._denied)
        for group in gone:
            del self._denied[group]
            self._lift(group)
        if gone:
            with contextlib.suppress(GpuwardenError, OSError):
                self._write()

    def _enforce(self, group: GroupKey) -> None:
        if group.id <= ROOT_INODE or group.hierarchy < 0:
            raise Unavailable("that is no control group that can be denied")
        if group in own_groups():
            raise Unavailable("gpuwarden is in that control group itself")
        if self._probe is None:
            raise Unavailable("this daemon's way of seeing opens cannot deny")
        self._probe.deny_group(group)

    def _lift(self, group: GroupKey) -> None:
        if self._probe is None or group in set(self._also()):
            return
        # A probe that is gone took its denials with it.
        with contextlib.suppress(GpuwardenError, OSError):
            self._probe.allow(group)

    # ---------------------------------------------------------------- the file

    def _read(self) -> tuple[Denied, ...]:
        try:
            with open(self._path, "rb") as file:
                data = file.read(FILE_LIMIT_BYTES + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror}") from error
        try:
            kept = msgspec.json.decode(data[:FILE_LIMIT_BYTES], type=_File)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise Unavailable(f"{self._path}: damaged") from error
        return kept.denied[:LIMIT] if kept.boot_id == self._boot_id else ()

    def _write(self) -> None:
        """Errors: Unavailable; the old file stays then."""
        if self._boot_id is None:
            raise Unavailable("which start of the machine this is cannot be told")
        fresh = f"{self._path}.new"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(fresh, flags, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(_File(self._boot_id, self.denied())))
                file.flush()
                os.fsync(descriptor)
            os.replace(fresh, self._path)
        except OSError as error:
            raise Unavailable(f"{self._path}: not written: {error.strerror}") from error
        self.trouble = ""


def own_groups() -> set[GroupKey]:
    """The groups that this process is in, with those above them. No errors: unseen ones lack."""
    from gpuwarden.probes.groups import groups_of

    return {one.key for one in groups_of("self", with_parents=True)}


def _key(denied: Denied) -> GroupKey:
    return GroupKey(denied.group.hierarchy, denied.group.id)


def _shown(group: GroupName) -> str:
    return f"{group.hierarchy}:{group.id}"
