"""Rules over the node: libraries, lists that disagree, hidden processes, faults, autostarts."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuwarden.finding import Evidence, Row, Severity, Subject
from gpuwarden.model import PersistenceEntry, XidEvent
from gpuwarden.node import GPU_NODE_KINDS, Node
from gpuwarden.policy import Policy
from gpuwarden.rules import respawn, system_programs
from gpuwarden.rules.autostart_programs import CONTAINER_KINDS
from gpuwarden.rules.hit import Hit, gpu_subject, process_subject

LINES_SHOWN = 6
# Codes after which a GPU needs a reset, a reboot or a replacement (NVIDIA's Xid catalogue).
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 144, 145,
                           146, 147, 148, 149, 150, 151, 154, 155, 156, 157, 158})  # fmt: skip


def nvml_library_refused(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """A library that was looked at and not opened."""
    for check in node.snapshot.libraries:
        if check.accepted:
            continue
        subject = Subject(kind="node", name=check.path, boot_id=node.snapshot.node.boot_id)
        yield Hit(subject, (Evidence(source=check.path, text=check.reason),))


def holder_not_listed(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Holders of a GPU that NVML does not list, inheritors and system programs aside."""
    run = node.sensor("nvml")
    if run is None or run.state != "ok":
        return
    for row in rows:
        if row.listed or row.pid is None or row.inherited_from is not None:
            continue
        process = node.processes.get(row.pid)
        kinds = {h.kind for h in node.holders_by_pid.get(row.pid, ())}
        # A context needs the GPU's node and the control or memory node; one alone is a tool's look.
        if process is None or "nvidia-gpu" not in kinds or not kinds & {"nvidia-uvm", "nvidia-ctl"}:
            continue
        match = system_programs.matches(node, process)
        if match is not None and match.proof == "proven":
            continue
        held = ", ".join(sorted({h.path for h in node.holders_by_pid[row.pid]})[:LINES_SHOWN])
        evidence = Evidence(
            kind="hiding", strength="weak", source="/proc/<pid>/fd", text=f"holds {held}"
        )
        yield Hit(
            process_subject(node, row.pid, process, [row.gpu_id] if row.gpu_id else []),
            (evidence,),
            owner=row.owner,
            since_ns=row.started_at_ns,
        )


def client_without_device(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes that NVML lists although all descriptors were seen and none is a GPU's."""
    lister, looker = node.sensor("nvml"), node.sensor("holders")
    if lister is None or looker is None or (lister.state, looker.state) != ("ok", "ok"):
        return
    # When nobody at all holds a device, it is our own sight that is in doubt, not the list.
    if node.snapshot.node.host_pid_namespace is False or not node.snapshot.holders:
        return
    for pid, clients in node.clients_by_pid.items():
        process = node.processes.get(pid)
        # An MPS client reaches the GPU through its server.
        listed = [c for c in clients if c.source == "nvml" and set(c.kinds) != {"M"}]
        if not listed or process is None or pid in node.holders_by_pid:
            continue
        if process.state in ("Z", "X", "x") or "descriptors" in process.unread:
            continue
        evidence = Evidence(
            kind="hiding",
            strength="weak",
            source="driver and /proc/<pid>/fd",
            text="listed by the driver, but it has no accelerator open or mapped",
        )
        row = next((r for r in rows if r.pid == pid), None)
        yield Hit(
            process_subject(node, pid, process, [c.gpu_id for c in listed]),
            (evidence,),
            owner=row.owner if row is not None else None,
            since_ns=process.started_at_ns,
        )


def process_hidden(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Pids that live and are not listed."""
    for hidden in node.snapshot.hidden:
        subject = process_subject(node, hidden.pid, node.processes.get(hidden.pid), [])
        text = f"known to {' and '.join(hidden.seen_by)}, not shown by a listing of /proc"
        yield Hit(subject, (Evidence(kind="hiding", strength="strong", source="/proc", text=text),))


def _entry_subject(node: Node, entry: PersistenceEntry) -> Subject:
    place = f"{entry.path}:{entry.line}" if entry.line else entry.path
    return Subject(kind="persistence", name=place)


def preload_library_unknown(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Lines of ld.so.preload that are no common audit or allocator library."""
    for entry in node.persistence:
        if entry.kind == "preload" and not respawn.preload_is_known(entry):
            text = f"loads {', '.join(entry.commands) or entry.text.strip()}"
            evidence = Evidence(kind="hiding", strength="strong", source=entry.path, text=text)
            yield Hit(_entry_subject(node, entry), (evidence,))


def autostart_suspicious(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Entries whose structure honest software does not have."""
    for entry in node.persistence:
        if entry.kind in ("preload", *CONTAINER_KINDS):
            continue
        odd = respawn.oddities(entry)
        if not odd:
            continue
        shown = (entry.text or " ".join(entry.commands)).strip()[:300]
        evidence = [
            Evidence(kind="persistence", strength="strong", source=entry.path, text=reason)
            for reason in odd
        ]
        evidence.append(Evidence(source=entry.path, text=f"{entry.kind}: {shown}"))
        yield Hit(_entry_subject(node, entry), tuple(evidence))


def gpu_fault_logged(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Xid events, one hit a GPU; codes that take it down weigh more than a program's faults."""
    by_address: dict[str | None, list[XidEvent]] = defaultdict(list)
    for event in node.snapshot.xids:
        if event.trusted:
            by_address[event.pci_address].append(event)
    for address, events in by_address.items():
        gpu = next(
            (g for g in node.snapshot.gpus if g.pci_address == address and g.parent_id is None),
            None,
        )
        counts: dict[int, int] = defaultdict(int)
        for event in events:
            counts[event.code] += 1
        summary = ", ".join(
            f"Xid {code}" + (f" ({n} lines)" if n > 1 else "") for code, n in sorted(counts.items())
        )
        subject = gpu_subject(node, gpu.id if gpu else None)
        if gpu is None:
            place = address or "an unknown address"
            subject = Subject(
                kind="gpu", name=place, gpu=f"GPU at {place}", boot_id=node.snapshot.node.boot_id
            )
        lines = tuple(
            Evidence(source="kernel log", text=f"Xid {e.code}: {e.message[:160]}")
            for e in events[-LINES_SHOWN:]
        )
        severity: Severity = "warning" if HARDWARE_XIDS & set(counts) else "info"
        yield Hit(
            subject,
            (Evidence(source="kernel log", text=summary), *lines),
            severity=severity,
            since_ns=events[0].at_ns,
        )


def gpu_busy_without_process(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Utilisation of a GPU on which nothing was seen."""
    judged = {row.gpu_id for row in rows if row.pid is not None}
    for gpu in node.snapshot.gpus:
        if gpu.parent_id is not None or gpu.sm_percent is None or "processes" in gpu.unread:
            continue
        if any(one.pid is None and one.gpu_id == gpu.id for one in node.snapshot.usage):
            continue  # what was seen over time is judged by gpu_busy_without_process_sustained
        parts = {g.id for g in node.migs_by_parent.get(gpu.id, ())}
        if gpu.sm_percent >= policy.thresholds.suspicious_idle_sm_percent and not judged & {
            gpu.id,
            *parts,
        }:
            text = f"{gpu.sm_percent}% busy, no client and no holder"
            evidence = Evidence(kind="hiding", strength="weak", source="driver", text=text)
            yield Hit(gpu_subject(node, gpu.id), (evidence,))


def device_node_renamed(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Descriptors on an accelerator through a node that is not one of /dev's own."""
    for holder in node.snapshot.holders:
        if not holder.renamed:
            continue
        gpu = next(iter(node.gpus_of_holder(holder)), None)
        process = node.processes.get(holder.pid)
        # Inside a container /dev is its own, and the runtime may name nodes as it likes.
        in_container = process is not None and node.container_of(process) is not None
        number = f"{holder.major}:{holder.minor}"
        text = f"holds {number} ({holder.kind}) as {holder.path}"
        severity: Severity | None = None
        if in_container or holder.kind not in GPU_NODE_KINDS:
            severity = "warning"
        yield Hit(
            process_subject(node, holder.pid, process, [gpu.id] if gpu else []),
            (Evidence(kind="hiding", strength="weak", source="/proc/<pid>/fd", text=text),),
            severity=severity,
        )


def exception_expired(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Exceptions and known GPU workloads whose date has passed at the time of the snapshot."""
    today = datetime.datetime.fromtimestamp(node.snapshot.taken_at_ns / 1e9, tz=datetime.UTC).date()
    dated = [(f"rule {e.rule}", e.rule, e.reason, e.expires) for e in policy.exceptions]
    known = "user_known_gpu_workloads"
    dated += [(known, known, w.reason, w.expires) for w in policy.user_known_gpu_workloads]
    for what, name, reason, expires in dated:
        if expires is not None and expires < today:
            text = f"{what}, expired {expires}: {reason}"
            yield Hit(
                Subject(kind="source", name=f"{name}: {reason}"),
                (Evidence(source="policy", text=text),),
            )
