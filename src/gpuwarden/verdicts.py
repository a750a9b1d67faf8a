"""The decision tree: one (process, GPU) → one verdict, with the path of questions that led there.

Pure: a joined snapshot and a policy in, rows out. The order of the questions is the design: what a
process *does* (a miner inside an expected job is still a miner) comes before where it belongs, and
where it belongs comes before how it looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpuwarden.finding import Evidence, Proof, Verdict
from gpuwarden.model import LOGINUID_UNSET, GpuClient, Holder, Process
from gpuwarden.node import GPU_NODE_KINDS, Node
from gpuwarden.policy import Policy
from gpuwarden.rules import ingress, system_programs
from gpuwarden.rules import signs as sign_rules
from gpuwarden.rules.container_allocation import container_allocation, container_owner
from gpuwarden.rules.membership import Claim, claims, gives, is_resolvable
from gpuwarden.rules.signs import Signs

FIRST_HUMAN_UID = 1000
NOBODY_UIDS = frozenset({65534, 65535})
DRIVER_PID_SOURCES = frozenset({"nvml", "kfd"})
"""Sources that name pids as the driver counts them: those of the host's pid namespace."""


class Answer(NamedTuple):
    """A verdict with everything that explains it."""

    verdict: Verdict
    path: tuple[str, ...]
    claim: Claim | None = None
    proof: Proof = "none"
    owner: str | None = None
    contact: str | None = None
    evidence: tuple[Evidence, ...] = ()


class Subject(NamedTuple):
    """One process on one GPU, before it is judged."""

    pid: int
    gpu_id: str | None
    process: Process | None
    clients: tuple[GpuClient, ...]
    """Its contexts on this GPU; empty for a holder only."""
    holders: tuple[Holder, ...]


# ------------------------------------------------------------------ subjects


def _process_of(node: Node, clients: Sequence[GpuClient]) -> Process | None:
    """The process behind a client; None where the driver counts pids in another namespace."""
    pid = clients[0].pid
    foreign = node.snapshot.node.host_pid_namespace is False and any(
        c.source in DRIVER_PID_SOURCES for c in clients
    )
    # A stranger may have that number here; holding a device makes it the same process.
    if foreign and pid not in node.holders_by_pid:
        return None
    return node.processes.get(pid)


def subjects(node: Node) -> Iterator[Subject]:
    """Every (process, GPU): the driver's clients first, then holders that it does not list."""
    by_key: dict[tuple[int, str], list[GpuClient]] = {}
    for client in node.snapshot.clients:
        by_key.setdefault((client.pid, client.gpu_id), []).append(client)
    for (pid, gpu_id), clients in by_key.items():
        yield Subject(
            pid,
            gpu_id,
            _process_of(node, clients),
            tuple(clients),
            tuple(node.holders_by_pid.get(pid, ())),
        )
    for pid, holders in node.holders_by_pid.items():
        if pid in node.clients_by_pid:
            continue
        held: dict[str | None, list[Holder]] = {}
        for holder in holders:
            if holder.kind not in GPU_NODE_KINDS and holder.kind != "kfd":
                continue
            found = list(node.gpus_of_holder(holder))
            for gpu in found:
                held.setdefault(gpu.id, []).append(holder)
            if not found:
                held.setdefault(None, []).append(holder)
        if len(held) > 1:
            held.pop(None, None)
        for held_id, nodes in held.items():
            yield Subject(pid, held_id, node.processes.get(pid), (), tuple(nodes))


# ------------------------------------------------------------------ branches of the tree


def _absent(node: Node, subject: Subject, policy: Policy) -> Answer:
    """The driver lists a pid of which /proc knows nothing."""
    client = subject.clients[0] if subject.clients else None
    hidden = node.hidden_pids.get(subject.pid)
    if hidden is not None:
        evidence = Evidence(
            kind="hiding",
            strength="strong",
            source=" and ".join(hidden.seen_by),
            text=f"pid {subject.pid} lives, but /proc does not show it",
        )
        found = (
            evidence,
            *(sign_rules.of_reported(node, client, policy).evidence if client else ()),
        )
        weight, why = sign_rules.weigh(found, "none")
        verdict: Verdict = "cryptominer" if weight == "cryptominer" else "suspicious"
        return Answer(verdict, ("in /proc? no, but it answers: hidden", why), evidence=found)
    if node.is_dump and client is not None:
        return _reported(node, client, policy)
    if not node.sees("processes") or node.snapshot.node.host_pid_namespace is False:
        return Answer(
            "unreadable",
            (
                "in /proc? not seen: this scan runs in another pid namespace than the driver's pids"
                if node.snapshot.node.host_pid_namespace is False
                else "in /proc? /proc could not be read",
            ),
        )
    if client is None:
        return Answer(
            "unreadable",
            ("in /proc? no: it held the device when descriptors were read, and was gone after",),
        )
    inheritors = _inheritors_of_dead(node, subject)
    if inheritors:
        names = ", ".join(f"pid {p.pid} ({p.comm})" for p in inheritors[:6])
        return Answer(
            "zombie-context",
            ("in /proc? no: the process is dead", "who holds its descriptors? " + names),
            owner=inheritors[0].user,
            evidence=(
                Evidence(
                    source="/proc/*/fd",
                    text=f"the creator of the context is gone; its descriptors live on in {names}",
                ),
            ),
        )
    held = "nobody" if node.sees("holders") else "not seen: the holders sensor did not work"
    return Answer("zombie-context", ("in /proc? no: the process is dead", f"who holds it? {held}"))


def _inheritors_of_dead(node: Node, subject: Subject) -> list[Process]:
    """Holders of that GPU which the driver does not list, as a dead client's children are."""
    found: list[Process] = []
    for pid, holders in node.holders_by_pid.items():
        if pid in node.clients_by_pid:
            continue
        ids = {g.id for h in holders for g in node.gpus_of_holder(h)}
        gpu = node.gpus.get(subject.gpu_id or "")
        wanted = {subject.gpu_id, gpu.parent_id if gpu else None}
        process = node.processes.get(pid)
        if process is None or not ids & wanted:
            continue
        if system_programs.matches(node, process) is None:
            found.append(process)
    # Children of the dead process keep its process group or session when it led one.
    kin = [p for p in found if subject.pid in (p.process_group, p.session_id, p.ppid)]
    return kin or found


def _reported(node: Node, client: GpuClient, policy: Policy) -> Answer:
    """Only a dump's printed name is known."""
    signs = sign_rules.of_reported(node, client, policy)
    question = "in /proc? a dump holds no /proc: only the printed name is known"
    if signs.weight != "none":
        verdict: Verdict = "cryptominer" if signs.weight == "cryptominer" else "suspicious"
        return Answer(verdict, (question, f"signs? {signs.why}"), evidence=signs.evidence)
    name = client.reported_name
    if name is None or "process_name" in client.unread or "reported_name" in client.unread:
        reason = client.unread.get("reported_name") or client.unread.get("process_name") or ""
        return Answer(
            "unreadable",
            (question, f"a name? no{': ' + reason if reason else ''}"),
            evidence=signs.evidence,
        )
    system = system_programs.reported(name)
    if system is not None:
        return Answer(
            "system",
            (question, f"a system program? {system.why}"),
            proof=system.proof,
            evidence=signs.evidence,
        )
    return Answer(
        "unattributed",
        (question, "signs? none", "who owns it? a dump names no owner, job or container"),
        evidence=signs.evidence,
    )


def _dead_or_hung(node: Node, subject: Subject, process: Process) -> Answer | None:
    if process.state in ("Z", "X", "x"):
        return Answer(
            "zombie-context",
            (f"alive? no: state {process.state} (defunct), its context is still there",),
            owner=process.user,
        )
    if process.state != "D":
        return None
    gpu = node.gpus.get(subject.gpu_id or "")
    parent = node.gpus.get(gpu.parent_id) if gpu and gpu.parent_id else gpu
    for event in node.snapshot.xids:
        # Anybody can write a line into the log; only the driver's own counts.
        if not event.trusted or event.pci_address is None:
            continue
        after_start = (
            event.at_ns is not None
            and process.started_at_ns is not None
            and event.at_ns >= process.started_at_ns
        )
        if parent and event.pci_address == parent.pci_address and after_start:
            return Answer(
                "zombie-context",
                (
                    "alive? hung: uninterruptible (state D), and its GPU logged "
                    f"Xid {event.code} after it started",
                ),
                owner=process.user,
            )
    return None


def _system(node: Node, subject: Subject, process: Process, signs: Signs) -> Answer | None:
    system = system_programs.matches(node, process)
    if system is None or (system.proof != "proven" and signs.weight != "none"):
        return None
    # The file is proven, not what was loaded into it: one strong sign and it is looked at.
    if any(e.kind is not None and e.strength in ("strong", "complete") for e in signs.evidence):
        return None
    if system.proof != "proven" and process.exe is not None:
        return None
    return Answer(
        "system",
        (f"a system program? yes, a {system.kind}: {system.why}",),
        proof=system.proof,
        evidence=signs.evidence,
    )


def _expected(node: Node, subject: Subject, ties: Sequence[Claim], signs: Signs) -> Answer | None:
    proven = [c for c in ties if c.proof == "proven" and (c.workload or c.entry)]
    for claim in proven:
        if gives(node, claim, subject.gpu_id):
            return Answer(
                "expected",
                (f"in the expected set? yes, {claim.name}: {claim.why}", "its own GPU? yes"),
                claim,
                "proven",
                claim.owner,
                claim.contact,
                signs.evidence,
            )
    if proven and signs.weight == "none":
        claim = proven[0]
        given = ", ".join((claim.workload.gpus if claim.workload else ()) or ("none",))
        if not any(is_resolvable(node, c) for c in proven):
            return Answer(
                "unreadable",
                (
                    f"in the expected set? yes, {claim.name}: {claim.why}",
                    f"its own GPU? cannot tell: {given} is no GPU that this scan knows",
                ),
                claim,
                "proven",
                claim.owner,
                claim.contact,
                signs.evidence,
            )
        others = _given_to(node, subject.gpu_id, claim)
        return Answer(
            "wrong-gpu",
            (
                f"in the expected set? yes, {claim.name}: {claim.why}",
                f"its own GPU? no: it was given {given}; this one {others}",
            ),
            claim,
            "proven",
            claim.owner,
            claim.contact,
            signs.evidence,
        )
    return None


def _given_to(node: Node, gpu_id: str | None, claim: Claim) -> str:
    names = [
        w.name
        for w in node.snapshot.workloads
        if gpu_id is not None and w is not claim.workload and node.gives(w, gpu_id)
    ]
    return f"was given to {', '.join(names[:3])}" if names else "was given to nobody"


def _ended(process: Process, ties: Sequence[Claim], signs: Signs) -> Answer | None:
    claim = next((c for c in ties if c.ended), None)
    if claim is None or signs.weight != "none":
        return None
    return Answer(
        "orphaned-job",
        (f"in the expected set? no: {claim.name} has ended, says the controller",),
        claim,
        "claimed",
        process.user,
        None,
        signs.evidence,
    )


def _unanswered(ties: Sequence[Claim], signs: Signs) -> Answer | None:
    claim = next((c for c in ties if c.unanswered), None)
    if claim is None or signs.weight != "none":
        return None
    return Answer(
        "unreadable",
        (
            f"in the expected set? cannot tell: it claims {claim.name}, "
            f"and {claim.source} gave no answer ({claim.unanswered})",
        ),
        claim,
        "claimed",
        claim.owner,
        None,
        signs.evidence,
    )


def _container(node: Node, process: Process, ties: Sequence[Claim], signs: Signs) -> Answer | None:
    """In a container: allocated by nobody, or by somebody whom no scheduler knows."""
    allocation = container_allocation(node, process, ties)
    if allocation is None:
        return None
    if allocation.verdict != "rogue-container" and signs.weight != "none":
        return None
    claim = allocation.claim
    return Answer(
        allocation.verdict,
        allocation.notes,
        claim,
        "claimed" if claim else "none",
        container_owner(node, process),
        None,
        signs.evidence + allocation.requests,
    )


def _human(process: Process) -> str | None:
    """The account behind a process, by what the kernel keeps: loginuid first, then uid."""
    login = process.loginuid
    if login is not None and login not in (LOGINUID_UNSET, *NOBODY_UIDS):
        name = process.login_user or f"uid {login}"
        return (
            name
            if login == process.uid
            else f"{name} (logged in; runs as {process.user or process.uid})"
        )
    if (
        process.uid is not None
        and process.uid >= FIRST_HUMAN_UID
        and process.uid not in NOBODY_UIDS
    ):
        return process.user or f"uid {process.uid}"
    return None


def decide(node: Node, policy: Policy, subject: Subject) -> Answer:
    """One subject's verdict; unless it is clear, with how the process came to be here."""
    process = subject.process
    if process is None:
        return _absent(node, subject, policy)
    answer = _decide(node, policy, subject, process)
    if answer.verdict in ("expected", "system"):
        return answer
    return answer._replace(evidence=answer.evidence + tuple(ingress.observe(node, process)))


def _decide(node: Node, policy: Policy, subject: Subject, process: Process) -> Answer:
    """Asks the questions in order and stops at the first that decides."""
    ties = claims(node, policy, process)
    declared = next((c.entry.egress for c in ties if c.entry and c.entry.egress is not None), None)
    signs = sign_rules.of_process(
        node, process, policy, clients=subject.clients, declared_egress=declared
    )
    if signs.weight == "cryptominer":
        inside = next((c for c in ties if c.proof == "proven" and (c.workload or c.entry)), None)
        where = f", inside {inside.name}" if inside else ""
        return Answer(
            "cryptominer",
            (f"signs? {signs.why}{where}",),
            inside,
            inside.proof if inside else "none",
            (inside.owner if inside else None) or _human(process) or container_owner(node, process),
            inside.contact if inside else None,
            signs.evidence,
        )
    for answer in (
        _dead_or_hung(node, subject, process),
        _system(node, subject, process, signs),
        _expected(node, subject, ties, signs),
        _ended(process, ties, signs),
        _unanswered(ties, signs),
        _container(node, process, ties, signs),
    ):
        if answer is not None:
            return answer
    claimed = next((c for c in ties if c.proof == "claimed" and (c.workload or c.entry)), None)
    asked = (
        f"in the expected set? only claims to be {claimed.name}: {claimed.why}"
        if claimed
        else "in the expected set? no"
    )
    owner = _human(process)
    if signs.weight == "suspicious":
        return Answer(
            "suspicious",
            (asked, f"signs? {signs.why}"),
            claimed,
            "claimed" if claimed else "none",
            owner,
            None,
            signs.evidence,
        )
    if owner is not None:
        return Answer(
            "other-team",
            (asked, "signs? none", f"a proven owner? yes: {owner}"),
            claimed,
            "proven",
            owner,
            None,
            signs.evidence,
        )
    if process.exe is None and not process.kernel_thread:
        reason = process.unread.get("exe", "not read")
        return Answer(
            "unreadable",
            (asked, f"its binary? {reason}"),
            claimed,
            "claimed" if claimed else "none",
            process.user,
            None,
            signs.evidence,
        )
    unit = next((c for c in ties if c.source == "systemd"), None)
    where = "nobody"
    if unit is not None:
        how = "confirmed by systemd" if unit.proof == "proven" else "by cgroup name only"
        where = f"{unit.name}, {how}; not in the policy"
    return Answer(
        "unattributed",
        (asked, "signs? none", f"a proven owner? no person or team: {where}"),
        claimed,
        "none",
        None,
        None,
        signs.evidence,
    )
