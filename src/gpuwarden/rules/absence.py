"""Processes that are not there to be asked: hidden, dead, hung, foreign, or only a dump's name."""

from __future__ import annotations

from gpuwarden.finding import Evidence, Verdict
from gpuwarden.model import GpuClient, Process
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import signs as sign_rules
from gpuwarden.rules import system_programs
from gpuwarden.rules.subjects import Answer, Subject


def absent(node: Node, subject: Subject, policy: Policy) -> Answer:
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
    if node.snapshot.node.is_dump and client is not None:
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


def dead_or_hung(node: Node, subject: Subject, process: Process) -> Answer | None:
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
