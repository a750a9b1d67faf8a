"""Device opens by process: who it is, whether it is in a container, what nobody gave it."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gpuwarden.finding import Evidence, Subject
from gpuwarden.model import LOGINUID_UNSET, Container, DeviceOpen, Holder, Process, ToolRun
from gpuwarden.node import GPU_NODE_KINDS, Node
from gpuwarden.pattern import pattern
from gpuwarden.policy import Policy
from gpuwarden.rules import system_programs
from gpuwarden.rules.hit import process_subject
from gpuwarden.rules.masking import MAX_SHOWN, shown
from gpuwarden.rules.membership import Claim, claims, gives, policy_references
from gpuwarden.rules.placement import binary_name, place_name

COMPUTE_KINDS = GPU_NODE_KINDS | {"kfd"}
"""Kinds of nodes through which a device computes; the others control it."""
USES = frozenset({"open", "held", "other"})
"""Ways in which a node is used, not only made or asked about."""
MACHINES = ("lxc:", "nspawn:")
"""System containers, as a cgroup path names them; virtual machines are none."""
SHELTERS = pattern(
    r"(?:cron|crond|cronie|anacron|atd|ssh|sshd|getty|serial-getty|user|session)[@.\-].*"
)
"""Units in which other people's programs run: being in one says nothing of who wants them."""
LINKS = pattern(
    r"/dev/char/(?P<number>[0-9]+:[0-9]+)|/dev/dri/by-path/[^/]+|/dev/fd/[0-9]+"
    r"|/proc/(?:self|thread-self|[0-9]+)/(?:task/[0-9]+/)?fd/[0-9]+"
)
"""Links to a device's own node that udev and the kernel keep."""
LINES_SHOWN = 12
LABELS_SHOWN = 8
DIGEST_SHOWN = 200


class Opener(NamedTuple):
    """One process with all that it did with accelerators' nodes, and the tools it was."""

    pid: int
    start_time_ticks: int
    process: Process | None
    """None when nothing was read of it, or when its pid has gone to another process since."""
    opens: tuple[DeviceOpen, ...]
    tools: tuple[ToolRun, ...]


class Inside(NamedTuple):
    """The container that a process is in, as far as it is known."""

    name: str
    container: Container | None
    answered: bool
    """Its runtime told of it."""


def openers(node: Node) -> Iterator[Opener]:
    """Every process that an open or a tool's run names, in the order in which they came."""
    opens: dict[tuple[int, int], list[DeviceOpen]] = {}
    tools: dict[tuple[int, int], list[ToolRun]] = {}
    for one in node.snapshot.opens:
        opens.setdefault((one.pid, one.start_time_ticks), []).append(one)
    for run in node.snapshot.tool_runs:
        tools.setdefault((run.pid, run.start_time_ticks), []).append(run)
    for pid, ticks in dict.fromkeys((*opens, *tools)):
        process = node.processes.get(pid)
        if process is not None and process.start_time_ticks != ticks:
            process = None
        yield Opener(
            pid,
            ticks,
            process,
            tuple(opens.get((pid, ticks), ())),
            tuple(tools.get((pid, ticks), ())),
        )


def inside(node: Node, opener: Opener) -> Inside | None:
    """Its container by cgroup, pod, mounts or what was known when it happened; None on the host."""
    process = opener.process
    states = {one.container_state for one in opener.opens}
    told = "unknown" not in states
    if process is None:
        if states <= {"none"}:
            return None
        return Inside("a container that is not known", None, answered=False)
    placement = process.cgroup
    # The runtime's own helper of a container lives on the host. A group of that name can also be
    # made inside a container, whose mounts are its own.
    if (
        placement is not None
        and placement.container_helper
        and node.shares_host_namespace(process, "mnt") is True
    ):
        return None
    container = node.container_of(process)
    by_path = placement is not None and (
        placement.container_id is not None
        or placement.pod_uid is not None
        or (placement.machine or "").startswith(MACHINES)
    )
    if container is None and not by_path:
        if states <= {"none"}:
            return None
        # A unit's sandbox has mounts of its own, and nothing else of a container.
        if unit_of(process) is not None and node.shares_host_namespace(process, "pid") is True:
            return None
    name = place_name(node, process) or "a container that is not known"
    return Inside(name, container, answered=told and container is not None and container.confirmed)


def unit_of(process: Process) -> str | None:
    """The unit of the system that a process is in, unless it is one that runs others' programs."""
    placement = process.cgroup
    if placement is None or placement.unit is None or placement.user_slice_uid is not None:
        return None
    if placement.unit_transient or SHELTERS.fullmatch(placement.unit):
        return None
    return placement.unit


def is_link(one: DeviceOpen) -> bool:
    """Whether the path that a process gave is one of the links that lead to the node itself."""
    if not one.path_is_claimed or one.path is None:
        return False
    link = LINKS.fullmatch(one.path)
    return link is not None and link["number"] in (None, f"{one.major}:{one.minor}")


# ------------------------------------------------------------------ what it was given


def gpus_of(node: Node, one: DeviceOpen) -> tuple[str, ...]:
    """Ids of the GPUs that a device node stands for; none for control nodes."""
    holder = Holder(
        pid=one.pid, major=one.major, minor=one.minor, kind=one.kind, path=one.path or ""
    )
    return tuple(gpu.id for gpu in node.gpus_of_holder(holder))


def references(claim: Claim) -> tuple[str, ...]:
    """What the claim's workload was given, as references."""
    if claim.entry is not None:
        return policy_references(claim.entry)
    return claim.workload.gpus if claim.workload is not None else ()


def gives_device(node: Node, claim: Claim, one: DeviceOpen) -> bool:
    """Whether a claim covers the node: its GPU, or any GPU at all for a control node."""
    return bool(references(claim)) and all(gives(node, claim, i) for i in gpus_of(node, one))


def proven(node: Node, policy: Policy, process: Process, place: Inside | None) -> tuple[Claim, ...]:
    """The proven ties of a process to something that is expected."""
    found = [
        claim
        for claim in claims(node, policy, process)
        if claim.proof == "proven" and (claim.workload is not None or claim.entry is not None)
    ]
    if place is not None and place.container is None:
        # Units, accounts and paths were compared as if they were the host's own.
        found = [claim for claim in found if claim.source == "slurm"]
    return tuple(found)


def not_given(
    node: Node,
    policy: Policy,
    opener: Opener,
    place: Inside | None,
    opens: Sequence[DeviceOpen],
) -> tuple[DeviceOpen, ...]:
    """Those of the opens that no proven claim covers; none for a proven system program."""
    if opener.process is None:
        return tuple(opens)
    if is_system(node, opener.process, place):
        return ()
    ties = proven(node, policy, opener.process, place)
    return tuple(one for one in opens if not any(gives_device(node, c, one) for c in ties))


def is_system(node: Node, process: Process, place: Inside | None) -> bool:
    """Whether it is a proven system program of the host or a proven add-on of the cluster."""
    # The driver's tools are mounted into containers: there the host's own file proves nothing.
    if place is not None and place.container is None:
        return False
    match = system_programs.matches(node, process)
    return match is not None and match.proof == "proven"


# ------------------------------------------------------------------ evidence


def subject_of(node: Node, opener: Opener, opens: Iterable[DeviceOpen]) -> Subject:
    """The process as it was when it happened: by its own start time, also if it is gone."""
    ids = dict.fromkeys(i for one in opens for i in gpus_of(node, one))
    subject = process_subject(node, opener.pid, opener.process, tuple(ids))
    return replace(subject, start_time_ticks=opener.start_time_ticks)


def since(opens: Iterable[DeviceOpen]) -> int | None:
    """When the first of them was."""
    return min((one.first_ns for one in opens), default=None)


def was_opened(opens: Iterable[DeviceOpen]) -> bool:
    """Whether any of them got the device itself."""
    return any(one.state == "opened" and one.how in USES for one in opens)


def device_name(one: DeviceOpen) -> str:
    """``/dev/nvidia0 (195:0)``, or its kind where the path is not known."""
    return f"{one.path[:MAX_SHOWN] if one.path else one.kind} ({one.major}:{one.minor})"


def _manner(one: DeviceOpen) -> str:
    """How far it came, in words."""
    if one.how == "mknod":
        words = {"opened": "the node was made", "denied": "making the node was denied"}.get(
            one.state, "asked to make the node; whether it was made is not known"
        )
    elif one.how == "access":
        words = "asked whether it may, did not open it"
    elif one.how == "held":
        words = "holds a descriptor of it"
        words += ", already when watching began" if one.at_start else ""
    else:
        words = {
            "opened": "opened",
            "denied": "tried to open, was denied",
            "attempted": "tried to open; nothing shows that it got it",
            "unknown": "tried to open; how it ended was not seen",
        }[one.state]
        words += " through io_uring" if one.io_uring else ""
    if one.denial == "denied":
        words += ", denied by the policy's enforce"
    elif one.denial == "would deny":
        words += "; enforcement would have denied it"
    if one.error is not None and one.state != "opened":
        words += f" ({errno.errorcode.get(one.error, f'error {one.error}')})"
    return words


def device_lines(opens: Sequence[DeviceOpen]) -> Iterator[Evidence]:
    """What was done with each device, the furthest first."""
    order = {"opened": 0, "unknown": 1, "attempted": 2, "denied": 3}
    ordered = sorted(opens, key=lambda o: (order[o.state], o.major, o.minor, o.how))
    for one in ordered[:LINES_SHOWN]:
        times = f", {one.count} times" if one.count > 1 else ""
        yield Evidence(source=one.source, text=f"{device_name(one)}: {_manner(one)}{times}")
    if len(ordered) > LINES_SHOWN:
        yield Evidence(source="probe", text=f"and {len(ordered) - LINES_SHOWN} more devices")
    unread = dict.fromkeys(f"{k}: {why}" for one in opens for k, why in sorted(one.unread.items()))
    for text in list(unread)[:LINES_SHOWN]:
        yield Evidence(source="probe", text=f"not read: {text[:MAX_SHOWN]}")


def process_lines(process: Process | None) -> Iterator[Evidence]:
    """Binary, command line, account: what the kernel keeps of it and what it says of itself."""
    if process is None:
        yield Evidence(source="/proc", text="what the process is could not be read in time")
        return
    binary = binary_name(process, None)
    if binary is None:
        binary = f"not read: {process.unread.get('exe', 'no reason given')[:MAX_SHOWN]}"
    yield Evidence(source="/proc/<pid>/exe", text=f"binary {binary}")
    if process.argv:
        text = " ".join(process.argv)
        yield Evidence(source="/proc/<pid>/cmdline", text=f"command line {shown(text)}")
    account = process.user or (f"uid {process.uid}" if process.uid is not None else "not read")
    login = process.loginuid
    if login == LOGINUID_UNSET:
        who = "nobody logged in for it"
    elif login is None:
        who = "who logged in is not known"
    else:
        who = f"logged in as {process.login_user or f'uid {login}'}"
    yield Evidence(source="/proc/<pid>/status", text=f"user {account}, {who}")


def container_lines(container: Container | None) -> Iterator[Evidence]:
    """What the runtime says of a container."""
    if container is None:
        return
    name = container.name or container.id[:12]
    facts = [f"container {name[:MAX_SHOWN]}"]
    if container.image:
        facts.append(f"image {container.image[:DIGEST_SHOWN]}")
    if container.image_digest:
        facts.append(f"digest {container.image_digest[:DIGEST_SHOWN]}")
    if container.pod_name or container.pod_namespace:
        pod = f"{container.pod_namespace or '?'}/{container.pod_name or '?'}"
        facts.append(f"pod {pod[:DIGEST_SHOWN]}")
    labels = {**container.labels, **container.pod_labels}
    if labels:
        some = sorted(labels.items())[:LABELS_SHOWN]
        facts.append("labels " + ", ".join(f"{k[:MAX_SHOWN]}={shown(v)}" for k, v in some))
    if container.privileged:
        facts.append("it is privileged")
    for text in facts:
        yield Evidence(source=container.runtime, text=text)


def notes(texts: Iterable[str], source: str = "attribution") -> tuple[Evidence, ...]:
    """Reasons as evidence."""
    return tuple(Evidence(source=source, text=text) for text in texts)
