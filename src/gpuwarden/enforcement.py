"""Denying accelerators to the containers that a policy names, by their control groups.

A container is denied only when its runtime confirmed it and an ``enforce`` entry of the policy fits
it as proven; what only a control group's name or a user's own runtime claims is never acted on.
Only a group whose name ends in the container's own id is denied: never a pod's, a service's or a
root group, and never one that this program itself is in. For one thread.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError, Unavailable, UsageError
from gpuwarden.host import Host
from gpuwarden.model import CgroupPlacement, Container, NodeFacts, Process, Snapshot
from gpuwarden.node import Node
from gpuwarden.policy import EnforceRule, Policy
from gpuwarden.probes import cgroup2
from gpuwarden.probes.cgroup2 import DENIABLE_CONTROLLERS, GroupKey
from gpuwarden.probes.events import GroupEvent
from gpuwarden.rules.policy_match import fit
from gpuwarden.sensors.cgroup import LINE_LIMIT, containers_in, place

CONTAINERS_LIMIT: Final = 4096
GROUPS_LIMIT: Final = 64
"""Of one container: one in each hierarchy, and those it left behind when it was restarted."""
_PROC_CGROUP_LIMIT_BYTES: Final = 64 << 10
_SCOPE: Final = ".scope"

State = Literal["denied", "would deny", "not denied", "failed"]
Deny = Callable[[GroupKey, bool], None]
"""(group, dry run); errors: GpuwardenError, OSError."""
Allow = Callable[[GroupKey], None]


class Located(Struct, frozen=True):
    """A container as control groups name it, with the groups that are its own: a claim so far."""

    container_id: str
    runtime: str | None
    pod_uid: str | None
    user_uid: int | None
    """Whose user slice it is in: that user's own runtime is to be asked."""
    groups: tuple[GroupKey, ...]


class Decision(Struct, frozen=True):
    """What was done, or would have been done, about one container that the policy names."""

    container: Container
    state: State
    entry: int
    """Which of the policy's ``enforce`` entries, from 0."""
    reason: str
    """That entry's reason."""
    groups: tuple[GroupKey, ...] = ()
    why: str = ""
    """Why it is not denied although the policy names it."""

    @property
    def text(self) -> str:
        """One line for a person; names in it are as the runtime gave them."""
        c = self.container
        pod = f"pod {c.pod_namespace}/{c.pod_name}, " if c.pod_name else ""
        name = f"{c.name} " if c.name else ""
        groups = ", ".join(f"{g.hierarchy}:{g.id}" for g in self.groups)
        return (
            f"{self.state}: {pod}container {name}({c.id[:12]}, image {c.image or 'unknown'}) by "
            f"enforce[{self.entry}]: {self.reason}"
            + (f"; {self.why}" if self.why else "")
            + (f"; groups {groups}" if groups else "")
        )


class _Known(Struct):
    """A container that was shown to us; ``denied`` are the groups that are denied for it now."""

    container: Container
    groups: tuple[GroupKey, ...] = ()
    overflow: bool = False
    denied: tuple[GroupKey, ...] = ()
    decision: Decision | None = None


class Enforcer:
    """Keeps the denials in step with the policy and with the containers that there are.

    ``deny`` and ``allow`` are the probe's: denials end with it.
    """

    def __init__(self, policy: Policy, deny: Deny, allow: Allow, *, dry_run: bool) -> None:
        self._rules: tuple[EnforceRule, ...] = tuple(policy.enforce)
        self._deny = deny
        self._allow = allow
        self._dry_run = dry_run
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def container(self, container: Container, groups: Sequence[GroupKey]) -> Decision | None:
        """Denies the container's groups if the policy names it; None if it does not.

        To be called again when more of its groups or more of its description become known. No
        errors: what could not be denied is a Decision that says so.
        """
        known = self._known.get(container.id) or _Known(container)
        if container.confirmed or not known.container.confirmed:
            known.container = container
        merged = tuple(dict.fromkeys((*known.groups, *groups)))
        # The first ones stay: whoever makes many must not get the container's own out of here.
        known.groups, known.overflow = merged[:GROUPS_LIMIT], len(merged) > GROUPS_LIMIT
        if container.id in self._known or self._makes_room():
            self._known[container.id] = known
            self._decide(known)
            return known.decision
        return _too_many(self._rules, known.container)

    def gone(self, container_id: str) -> None:
        """The container has ended: its groups are allowed again, and it is forgotten."""
        known = self._known.pop(container_id, None)
        if known is not None:
            self._release(known, keep=())

    def groups_gone(self, container_id: str, groups: Collection[GroupKey]) -> None:
        """Groups that the container has left behind were removed: they make room for others."""
        known = self._known.get(container_id)
        if known is None:
            return
        self._release(known, keep=[one for one in known.denied if one not in groups])
        known.groups = tuple(one for one in known.groups if one not in groups)
        known.overflow = False
        self._decide(known)

    def decisions(self) -> tuple[Decision, ...]:
        """What stands at the moment, in the order in which the containers were met."""
        return tuple(k.decision for k in self._known.values() if k.decision is not None)

    def reload(self, policy: Policy) -> None:
        """Takes another policy: who is no longer named is allowed again, who is now is denied."""
        self._rules = tuple(policy.enforce)
        for known in self._known.values():
            self._decide(known)

    def _makes_room(self) -> bool:
        """Whether there is room for one more: the oldest that nothing is denied to is forgotten."""
        if len(self._known) >= CONTAINERS_LIMIT:
            oldest = next((i for i, k in self._known.items() if not k.denied), None)
            if oldest is None:
                return False
            del self._known[oldest]
        return True

    def _decide(self, known: _Known) -> None:
        container = known.container
        named = _named(self._rules, container)
        if named is None:
            self._release(known, keep=())
            known.decision = None
            return
        entry, proven = named
        decision = Decision(container, "not denied", entry, self._rules[entry].reason)
        if not proven:
            self._release(known, keep=())
            why = "only claimed: no runtime of root's confirmed this container"
            known.decision = replace(decision, why=why)
            return
        if not known.groups:
            known.decision = replace(decision, why="its control group is not known yet")
            return
        self._release(known, keep=known.groups)
        failures = [f"more than {GROUPS_LIMIT} groups of its own"] if known.overflow else []
        for group in known.groups:
            if group in known.denied:
                continue
            try:
                self._deny(group, self._dry_run)
            except (GpuwardenError, OSError) as error:
                failures.append(f"group {group.hierarchy}:{group.id}: {error}")
                continue
            known.denied = (*known.denied, group)
        state: State = "would deny" if self._dry_run else "denied"
        known.decision = replace(
            decision,
            state="failed" if failures else state,
            groups=known.denied,
            why="; ".join(failures),
        )

    def _release(self, known: _Known, keep: Sequence[GroupKey]) -> None:
        leaving = [group for group in known.denied if group not in keep]
        if not leaving:
            return
        others = {g for k in self._known.values() if k is not known for g in k.denied}
        for group in leaving:
            if group not in others:
                # A probe that is gone took its denials with it.
                with suppress(GpuwardenError, OSError):
                    self._allow(group)
        known.denied = tuple(group for group in known.denied if group in keep)


def _too_many(rules: Sequence[EnforceRule], container: Container) -> Decision | None:
    named = _named(rules, container)
    if named is None:
        return None
    why = f"{CONTAINERS_LIMIT} containers are denied already"
    return Decision(container, "failed", named[0], rules[named[0]].reason, why=why)


def _named(rules: Sequence[EnforceRule], container: Container) -> tuple[int, bool] | None:
    """(the entry that names a container, whether that is proven): a proven one before a claim.

    Conditions other than a container's (user, unit, binary, a job) never fit one here.
    """
    node = Node(Snapshot(taken_at_ns=0, node=NodeFacts(hostname=""), containers=(container,)))
    inside = Process(pid=0, start_time_ticks=0, cgroup=CgroupPlacement(container_id=container.id))
    claimed: int | None = None
    for entry, rule in enumerate(rules):
        result = fit(node, rule.match, inside, None)
        if result.fits and result.proof == "proven" and container.confirmed:
            return entry, True
        if result.fits and claimed is None:
            claimed = entry
    return None if claimed is None else (claimed, False)


# ---------------------------------------------------------------- whose group it is


def located_by_event(host: Host, event: GroupEvent) -> Located | None:
    """The container whose own group was just made; None for any other group.

    Errors: Unavailable, Denied if our own groups cannot be read.
    """
    own = _here(host)
    path = "/" + event.path.lstrip("/")
    placement = place((_line(event.hierarchy, path),))
    identity = placement.container_id
    if identity is None or _own_group(path, identity) != path:
        return None
    if event.hierarchy not in _hierarchies(own) or _is_ours(own, event.hierarchy, path):
        return None
    return Located(
        identity,
        placement.runtime,
        placement.pod_uid,
        placement.user_slice_uid,
        (GroupKey(event.hierarchy, event.cgroup_id),),
    )


def located_by_process(host: Host, pid: int) -> list[Located]:
    """The containers that a process is in, from the outside in, each with its own groups.

    Errors: Unavailable, Denied; a container none of whose groups is in sight has none.
    """
    raw = host.read_bytes(f"/proc/{pid}/cgroup", _PROC_CGROUP_LIMIT_BYTES)
    lines = raw.decode("utf-8", "surrogateescape").splitlines()[:LINE_LIMIT]
    placement = place(lines)
    if placement.container_helper:
        return []
    found = []
    for runtime, identity in containers_in(placement):
        innermost = identity == placement.container_id
        found.append(
            Located(
                identity,
                runtime,
                placement.pod_uid if innermost else None,
                placement.user_slice_uid,
                tuple(dict.fromkeys(_groups(_here(host), lines, identity))),
            )
        )
    return found


def _here(host: Host) -> Host:
    """Our own files: where groups are mounted, and which are ours, is told for us and by us."""
    return host if host.is_local else Host()


def _line(hierarchy: int, path: str) -> str:
    """A line of /proc/<pid>/cgroup for a group that is known by its hierarchy's number."""
    return f"{hierarchy}:{'devices' if hierarchy else ''}:{path}"


def _own_group(path: str, identity: str) -> str | None:
    """The part of a path that ends in the container's own directory; None if it has none.

    The directory is called as the id, or ``<runtime>-<id>.scope``; ``place`` knows the helpers
    (conmon) that are called nearly so.
    """
    parts = path.split("/")
    for at, part in enumerate(parts):
        name = part.removesuffix(_SCOPE)
        if name != identity and not name.endswith((f"-{identity}", f":{identity}")):
            continue
        own = "/".join(parts[: at + 1])
        placement = place((_line(0, own),))
        if placement.container_id == identity and not placement.container_helper:
            return own
    return None


def _hierarchies(host: Host) -> dict[int, tuple[str, ...]]:
    """Those in which the probe looks a process up: number → controllers; 0 is version 2."""
    lines = host.read_text("/proc/self/cgroup").splitlines()
    version_1 = {
        number: controllers
        for number, controllers, _ in _fields(lines)
        if set(controllers) & set(DENIABLE_CONTROLLERS)
    }
    return {0: (), **version_1}


def _fields(lines: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """(hierarchy, controllers, path) of each well-formed line of a /proc/<pid>/cgroup."""
    for line in lines[:LINE_LIMIT]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number.isascii() and number.isdigit() and len(number) < 10 and path.startswith("/"):
            yield int(number), tuple(controllers.split(",")) if controllers else (), path


def _is_ours(host: Host, hierarchy: int, path: str) -> bool:
    """Whether this program is in that group: it must not lock itself out."""
    own = host.read_text("/proc/self/cgroup").splitlines()
    return any(
        number == hierarchy and f"{mine}/".startswith(f"{path}/")
        for number, _, mine in _fields(own)
    )


def _groups(host: Host, lines: Sequence[str], identity: str) -> Iterator[GroupKey]:
    hierarchies = _hierarchies(host)
    mounts = cgroup2.parse_mounts(host.read_text("/proc/self/mountinfo"))
    for number, controllers, path in _fields(lines):
        own = _own_group(path, identity)
        if number not in hierarchies or own is None or ".." in own.split("/"):
            continue
        if _is_ours(host, number, own):
            continue
        for mount in mounts:
            fits = (
                mount.kind == "cgroup2"
                if number == 0
                else mount.kind == "cgroup" and set(controllers) <= set(mount.options)
            )
            if not fits:
                continue
            try:
                key = cgroup2.group_key(host, os.path.normpath(mount.where + own))
            except (Unavailable, UsageError):
                # Another part of the hierarchy is mounted there, or the container has ended.
                continue
            if key.hierarchy == number:
                yield key
                break
