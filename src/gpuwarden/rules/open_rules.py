"""Rules over device opens as they happen: who used an accelerator that nobody gave it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuwarden.finding import Evidence, Row, Severity
from gpuwarden.model import LOGINUID_UNSET, DeviceOpen, Process
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import device_opens as opened
from gpuwarden.rules import host_programs, open_allocation
from gpuwarden.rules.container_allocation import container_owner
from gpuwarden.rules.device_opens import Inside, Opener
from gpuwarden.rules.hit import Hit
from gpuwarden.rules.membership import Claim, claims
from gpuwarden.rules.placement import binary_name, place_name


def _hit(
    node: Node,
    opener: Opener,
    opens: Sequence[DeviceOpen],
    evidence: tuple[Evidence, ...],
    *,
    severity: Severity,
    place: Inside | None = None,
) -> Hit:
    """One hit: the devices first, then the reasons, then who it is and where."""
    process = opener.process
    owner = process.login_user if process is not None else None
    if process is not None and place is None:
        owner = owner or process.user
    elif process is not None and place is not None and place.container is not None:
        owner = container_owner(node, process) or owner
    return Hit(
        opened.subject_of(node, opener, opens),
        (
            *opened.device_lines(opens),
            *evidence,
            *opened.process_lines(process),
            *opened.container_lines(place.container if place is not None else None),
        ),
        owner=owner,
        since_ns=opened.since(opens),
        severity=severity,
    )


# ------------------------------------------------------------------ in a container


def container_opens_accelerator(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Containers that use an accelerator which no proven claim gives them."""
    for opener in opened.openers(node):
        place = opened.inside(node, opener)
        if place is None or not opener.opens:
            continue
        process = opener.process
        if process is not None and host_programs.is_runtime(node, process):
            continue
        opens = opener.opens
        if process is not None and host_programs.may_be_runtime(node, process):
            # What a runtime does before it runs an image; the nodes have a rule of their own.
            opens = tuple(one for one in opens if one.how != "mknod")
        opens = opened.not_given(node, policy, opener, place, opens)
        if not opens:
            continue
        judged = open_allocation.judged(node, policy, opener, place, opens)
        severity, why = judged.severity, judged.why
        if not opened.was_opened(opens):
            severity, why = "warning", (*why, "an open that succeeded was not seen")
        hit = _hit(node, opener, opens, opened.notes(why), severity=severity, place=place)
        hit = hit._replace(evidence=tuple(dict.fromkeys(hit.evidence + judged.requests)))
        if severity == "critical":
            hit = hit._replace(verdict="rogue-container")
        yield hit


def gpu_tool_in_container(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """GPU management tools in containers that were given no GPU at all."""
    for opener in opened.openers(node):
        process = opener.process
        by_file = host_programs.tool_of(process) if process is not None else None
        names = dict.fromkeys([run.tool for run in opener.tools] + ([by_file] if by_file else []))
        place = opened.inside(node, opener) if names else None
        if place is None:
            continue
        if process is not None and (
            opened.is_system(node, process, place)
            or any(opened.references(c) for c in opened.proven(node, policy, process, place))
        ):
            continue
        times = sum(run.count for run in opener.tools)
        ran = f"runs {', '.join(name[:64] for name in list(names)[:4])}"
        ran += f", {times} times" if times > 1 else ""
        why = [f"in a container? yes, {place.name}"]
        if not place.answered:
            why.append("its runtime could not be asked, so what it was given is not known")
        evidence = (Evidence(source="exec", text=ran), *opened.notes(why))
        hit = _hit(node, opener, opener.opens, evidence, severity="warning", place=place)
        began = [run.at_ns for run in opener.tools] + [one.first_ns for one in opener.opens]
        yield hit._replace(since_ns=min(began))


# ------------------------------------------------------------------ on the host


def _is_tool_of_an_administrator(node: Node, process: Process) -> bool:
    """A management tool of the host's own, or a script of that name that root runs by hand.

    A name alone is none: the binary, or the script's interpreter, is a file that only root writes.
    """
    if host_programs.tool_of(process) is None:
        return False
    if host_programs.is_hosts_own(node, process, host_programs.TOOLS):
        return True
    session = process.cgroup is not None and process.cgroup.session is not None
    logged_in = session or process.loginuid not in (None, LOGINUID_UNSET)
    by_hand = process.uid == 0 and process.tty is not None and logged_in
    return by_hand and host_programs.is_hosts_own(node, process, host_programs.INTERPRETERS)


def _may_be(node: Node, process: Process, claim: Claim) -> bool:
    """Whether a tie that nobody confirmed leaves a doubt: not where only its environment says so.

    Where the controller answers, a job that it does not know is one that anybody can write there.
    """
    source = node.source(claim.source)
    if source is None or source.state != "ok":
        return True
    return process.cgroup is not None and process.cgroup.slurm_job is not None


def accelerator_opened_outside_jobs(
    node: Node, policy: Policy, rows: Sequence[Row]
) -> Iterator[Hit]:
    """Opens by the host's processes where jobs and pods are what accelerators are for."""
    sources = [
        s for s in node.snapshot.sources if s.name in open_allocation.HANDING_OUT and s.scheduled
    ]
    by = [s.name for s in sources if s.state in ("ok", "failed")]
    unheard = [s for s in sources if s.state == "failed"]
    if not by:
        return
    for opener in opened.openers(node):
        # Whether one may is asked by many a login script; it is no open.
        opens = [one for one in opener.opens if one.how in opened.USES]
        if not opens or opened.inside(node, opener) is not None:
            continue
        process = opener.process
        severity: Severity = "error" if opened.was_opened(opens) else "warning"
        why = [f"in a job or unit? no; {' and '.join(by)} hands out the accelerators of this node"]
        if process is None:
            severity = "warning"
            why = ["in a job or unit? cannot tell: nothing is known of the process"]
        else:
            if (
                host_programs.is_host_program(node, process)
                or opened.is_system(node, process, None)
                or _is_tool_of_an_administrator(node, process)
                or opened.proven(node, policy, process, None)
            ):
                continue
            ties = claims(node, policy, process)
            unit = opened.unit_of(process)
            if unit is not None:
                if any(c.source == "systemd" and c.proof == "proven" for c in ties):
                    continue
                severity = "warning"
                why.append(f"systemd did not confirm {unit}")
            silent = next((c for c in ties if c.unanswered and _may_be(node, process, c)), None)
            if silent is not None:
                severity = "warning"
                why = [
                    f"in a job or unit? cannot tell: it claims {silent.name}, "
                    f"and {silent.source} gave no answer ({silent.unanswered})"
                ]
            elif process.cgroup is None:
                severity = "warning"
                why.append("its cgroup could not be read")
            if unheard and silent is None:
                severity = "warning"
                why += [f"cannot be sure: {s.name} gave no answer ({s.reason})" for s in unheard]
            why += [f"{c.name} has ended, says the controller" for c in ties if c.ended]
            place = place_name(node, process)
            if place is not None:
                why.append(f"it runs in {place}")
        yield _hit(node, opener, opens, opened.notes(why), severity=severity)


# ------------------------------------------------------------------ nodes and names


def accelerator_node_made(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """mknod of an accelerator's number by others than those who make nodes for a living."""
    for opener in opened.openers(node):
        made = [one for one in opener.opens if one.how == "mknod"]
        if not made:
            continue
        process, place = opener.process, opened.inside(node, opener)
        if place is None:
            if process is not None and (
                host_programs.is_host_program(node, process)
                or opened.is_system(node, process, None)
            ):
                continue
            yield _hit(node, opener, made, (), severity="warning")
            continue
        opens = opened.not_given(node, policy, opener, place, made)
        why = [f"in a container? yes, {place.name}"]
        severity: Severity = "error"
        if process is None:
            severity = "warning"
        elif host_programs.is_runtime(node, process):
            container = place.container
            if place.answered and container is not None:
                opens = tuple(
                    one
                    for one in opens
                    if not container.privileged
                    and not host_programs.is_listed(node, container, one)
                )
                why.append("made by the runtime, but its configuration does not list the device")
            else:
                severity = "warning"
                why.append("made by the runtime; what its configuration lists is not known")
        elif host_programs.may_be_runtime(node, process):
            container = place.container
            if place.answered and container is not None:
                opens = tuple(
                    one for one in opens if not host_programs.is_listed(node, container, one)
                )
            why.append("its parent had ended: whether it was the runtime is not known")
        if opens and all(one.state == "denied" for one in opens):
            severity = "warning"
        if opens:
            yield _hit(node, opener, opens, opened.notes(why), severity=severity, place=place)


def accelerator_opened_by_other_name(
    node: Node, policy: Policy, rows: Sequence[Row]
) -> Iterator[Hit]:
    """Opens through a node whose name is none of the device's own."""
    for opener in opened.openers(node):
        renamed = [
            one
            for one in opener.opens
            if one.renamed and one.how in opened.USES and not opened.is_link(one)
        ]
        place = opened.inside(node, opener)
        process = opener.process
        if process is not None and (
            host_programs.is_runtime(node, process)
            or (place is None and host_programs.is_host_program(node, process))
        ):
            continue
        # Whoever was given the device may call it as its runtime did.
        opens = opened.not_given(node, policy, opener, place, renamed)
        if not opens:
            continue
        container = place.container if place is not None else None
        passed = container is not None and all(
            host_programs.is_listed(node, container, one) for one in opens
        )
        severity: Severity = "warning"
        why = []
        if place is not None:
            why.append(f"in a container? yes, {place.name}")
            if passed:
                why.append("its runtime was told to pass this device in, perhaps by that name")
            elif opened.was_opened(opens):
                severity = "error"
        names = sorted(
            {
                n.path
                for n in node.snapshot.device_nodes
                for one in opens
                if (n.major, n.minor) == (one.major, one.minor)
            }
        )
        if names:
            why.append(f"its own name is {', '.join(names[:4])}")
        yield _hit(node, opener, opens, opened.notes(why, "/dev"), severity=severity, place=place)


# ------------------------------------------------------------------ held, not opened


def _group(node: Node, process: Process) -> tuple[str | None, ...]:
    """The container, pod, job and machine that a process is in."""
    container, place = node.container_of(process), process.cgroup
    identity = container.id if container is not None else None
    if place is None:
        return (identity, None, None, None)
    return (identity or place.container_id, place.pod_uid, place.slurm_job, place.machine)


def _differences(node: Node, process: Process, opener: Process) -> list[str]:
    """In what a holder is not what the one that opened the device is."""
    found: list[str] = []
    mine, theirs = process.exe, opener.exe
    if mine is not None and theirs is not None:
        same = mine.path == theirs.path
        if mine.inode is not None and theirs.inode is not None:
            same = (mine.device, mine.inode) == (theirs.device, theirs.inode)
        if not same:
            found.append(f"another program: {binary_name(opener, None)}")
    if None not in (process.uid, opener.uid) and process.uid != opener.uid:
        found.append(f"another account: {opener.user or f'uid {opener.uid}'}")
    known = process.cgroup is not None and opener.cgroup is not None
    if known and _group(node, process) != _group(node, opener):
        where = place_name(node, opener) or "the host"
        found.append(f"another container or job: {where}")
    return found


def holder_without_open(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Holders that came to a device otherwise than by opening it or as a child of who did."""
    for holder in opened.openers(node):
        process, place = holder.process, opened.inside(node, holder)
        own = {(o.major, o.minor) for o in holder.opens if o.how in ("open", "other")}
        held = [
            one
            for one in holder.opens
            if one.how == "held"
            and not one.at_start
            # A poll sees holders only, never how they came to it.
            and one.source != "proc poll"
            and one.kind in opened.COMPUTE_KINDS
            and (one.major, one.minor) not in own
        ]
        if process is not None and host_programs.is_host_program(node, process):
            continue
        # Who was given the device gains nothing by the way in which it came.
        held = list(opened.not_given(node, policy, holder, place, held))
        alone = [one for one in held if one.opened_by is None]
        if alone:
            text = "no open of its own and none of a forebear: passed over a socket, or taken"
            # On a desktop the display server opens render nodes for its programs (DRI3).
            drawn = place is None and all(one.kind.startswith("drm-") for one in alone)
            if drawn:
                text += "; a display server hands such nodes to its programs"
            sign = Evidence(kind="hiding", strength="weak", source="descriptors", text=text)
            yield _hit(
                node, holder, alone, (sign,), severity="warning" if drawn else "error", place=place
            )
            continue
        for one in held:
            opener = node.processes.get(one.opened_by or -1)
            if process is None or opener is None:
                continue
            if opener.start_time_ticks > process.start_time_ticks:
                # The forebear is gone; a younger process has its number.
                continue
            found = _differences(node, process, opener)
            if found:
                text = f"opened by pid {opener.pid} ({opener.comm}), {'; '.join(found)}"
                sign = Evidence(kind="hiding", strength="weak", source="descriptors", text=text)
                yield _hit(node, holder, held, (sign,), severity="warning", place=place)
                break
