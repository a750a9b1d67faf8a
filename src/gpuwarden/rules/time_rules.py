"""Rules over minutes and hours: load that lasts, pauses or repeats, and memory that stays.

They judge ``usage``, ``exited`` and ``respawns`` of a snapshot, which only `watch` fills. What
belongs here, may belong here, or has a finding that already says the same, is left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuwarden.finding import Evidence, Row, Severity, Subject
from gpuwarden.model import ExitedClient, Gpu, Process, Respawn, Usage
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import behaviour, system_programs
from gpuwarden.rules.general_programs import is_interpreter
from gpuwarden.rules.hit import Hit, gpu_phrase, gpu_subject, process_subject
from gpuwarden.rules.membership import claims, policy_references

SECOND_NS = 10**9
MIB = 1 << 20
SHOWN = 4
SOURCE = "driver, over time"

SETTLED = frozenset(
    {"expected", "system", "wrong-gpu", "cryptominer", "orphaned-job", "zombie-context"}
)
"""Verdicts of what belongs here, or whose own finding says all that there is to do."""
WHILE_LOGGED_IN_SHARE = 0.02
"""Busy for less of the time with somebody logged in than this is a pause."""
NOBODY_LISTED_SHARE = 0.95
UNLISTED_SECONDS = 60.0
WORKERS = 3
"""So many processes that opened a GPU explain load that no listing in between has seen."""
LIFETIME_LIMIT_SECONDS = 600.0
LIFETIME_SHARE, LIFETIME_SECONDS = 0.25, 3.0
"""Lifetimes are alike within either of these; a round a second does not see them more exactly."""
OVERLAP_SECONDS = 2.0
PAUSE_SHARE, PAUSE_SECONDS = 0.25, 10.0
"""The next one begins at once within either of these; a timer's health check waits longer."""


def _unsettled(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[tuple[Row, Process]]:
    """Rows of listed processes that neither belong here, nor may, nor are told of in full."""
    belongs: set[int] = {r.pid for r in rows if r.pid is not None and r.verdict in SETTLED}
    for row in rows:
        if row.pid is None or row.pid in belongs or row.inherited_from is not None:
            continue
        process = node.processes.get(row.pid)
        if process is None or process.start_time_ticks != row.start_time_ticks:
            continue
        if not _may_belong(node, policy, process):
            yield row, process


def _may_belong(node: Node, policy: Policy, process: Process) -> bool:
    """Whether a proven tie says that it belongs, or one that nobody could answer for may say so."""
    return any(
        claim.unanswered or (claim.proof == "proven" and (claim.workload or claim.entry))
        for claim in claims(node, policy, process)
    )


def gpu_compute_sustained_small_memory(
    node: Node, policy: Policy, rows: Sequence[Row]
) -> Iterator[Hit]:
    """Saturated for minutes with small memory, where that is no sign against the process yet."""
    hits: dict[int, Hit] = {}
    for row, process in _unsettled(node, policy, rows):
        # With unchanged memory it is evidence in the verdict's finding: told once.
        if any(e.kind == "behaviour" and e.strength == "strong" for e in row.evidence):
            continue
        for client in node.clients_by_pid.get(process.pid, ()):
            if client.gpu_id != row.gpu_id:
                continue
            if client.kinds and not {"C", "M"} & set(client.kinds):
                continue
            lasting = behaviour.saturation(node, client, policy.thresholds)
            percent = lasting.memory_percent if lasting is not None else None
            if lasting is None or percent is None:
                continue
            if percent >= policy.thresholds.small_memory_percent:
                continue
            moves = "" if lasting.memory_is_static else ", which moves"
            text = (
                f"{policy.thresholds.busy_sm_percent}% busy or more for {lasting.minutes:.0f} min "
                f"with {percent:.0f}% of the GPU's memory at most{moves}"
            )
            _join(node, hits, row, process, text)
    yield from hits.values()


def _join(node: Node, hits: dict[int, Hit], row: Row, process: Process, text: str) -> None:
    """One hit a process: what another of its GPUs shows is added to it."""
    evidence = Evidence(kind="behaviour", strength="weak", source=SOURCE, text=text)
    known = hits.get(process.pid)
    gpu_ids = [row.gpu_id] if row.gpu_id is not None else []
    if known is not None:
        gpu_ids = list(dict.fromkeys((*known.subject.gpu_ids, *gpu_ids)))
    hits[process.pid] = Hit(
        process_subject(node, process.pid, process, gpu_ids),
        (*(known.evidence if known is not None else ()), evidence),
        owner=row.owner,
        since_ns=process.started_at_ns,
    )


# ------------------------------------------------------------------ bursts


def gpu_bursts_on_idle_node(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Bursts of a process that nobody expects, or only while nobody is logged in."""
    by_process = node.usage_by_client
    hits: dict[int, Hit] = {}
    for row, process in _unsettled(node, policy, rows):
        if row.gpu_id is None or row.verdict == "rogue-container":
            continue
        key = (row.gpu_id, process.pid, process.start_time_ticks)
        usages = sorted(by_process.get(key, ()), key=lambda u: u.from_ns)
        if not usages:
            continue
        usage = usages[0]
        hours = max(1.0, (usage.until_ns - usage.from_ns) / (3600 * SECOND_NS))
        # Somebody's interactive work comes in bursts: only where a scheduler says that nobody
        # should be on this GPU does that say more than that it is somebody's.
        unexpected = row.verdict in ("unattributed", "suspicious") or (
            row.verdict == "other-team" and _should_be_idle(node, policy, row.gpu_id)
        )
        if unexpected and usage.bursts >= policy.thresholds.bursts * hours:
            minutes = (usage.until_ns - usage.from_ns) / (60 * SECOND_NS)
            text = f"computed in {usage.bursts} bursts within {minutes:.0f} min, idle between them"
            _join(node, hits, row, process, text)
        if row.verdict != "unreadable" and _pauses_when_looked_at(usage, policy):
            text = (
                f"busy for {usage.busy_nobody_seconds / 60:.0f} min while nobody was logged in, "
                f"for {usage.busy_logged_in_seconds:.0f} s of the "
                f"{usage.logged_in_seconds / 60:.0f} min while somebody was"
            )
            _join(node, hits, row, process, text)
    yield from hits.values()


def _pauses_when_looked_at(usage: Usage, policy: Policy) -> bool:
    enough_seconds = 60 * policy.thresholds.sustained_minutes
    return (
        # Once is a person who starts a run and leaves, or one who comes when it is over.
        usage.bursts >= 2
        and usage.busy_nobody_seconds >= enough_seconds
        and usage.logged_in_seconds >= enough_seconds
        and usage.busy_logged_in_seconds <= WHILE_LOGGED_IN_SHARE * usage.logged_in_seconds
    )


def _should_be_idle(node: Node, policy: Policy, gpu_id: str) -> bool:
    """Whether somebody hands this node's GPUs out, and this one was given to nobody."""
    handing_out = {
        s.name
        for s in node.snapshot.sources
        if s.name in ("slurm", "kubernetes") and s.scheduled and s.state == "ok"
    }
    silent = any(s.scheduled and s.state == "failed" for s in node.snapshot.sources)
    if not handing_out or silent:
        return False
    if any(node.gives(workload, gpu_id) for workload in node.snapshot.workloads):
        return False
    for entry in policy.workloads:
        ids = node.resolve(policy_references(entry))
        if ids is None or gpu_id in ids:
            return False
    return True


# ------------------------------------------------------------------ memory that stays


def gpu_memory_kept_after_exit(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Memory that nobody has since a client ended, while others are still on the GPU."""
    if not node.sees("holders") or any(gap.sensor == "holders" for gap in node.snapshot.gaps):
        return
    # With nobody left on the GPU it is gpu_memory_leaked that tells of it.
    told = {row.gpu_id for row in rows if row.pid is None}
    by_gpu: dict[str, list[ExitedClient]] = defaultdict(list)
    for exited in node.snapshot.exited:
        by_gpu[exited.gpu_id].append(exited)
    for gpu_id, ended in by_gpu.items():
        gpu = node.gpus.get(gpu_id)
        if gpu is None or gpu_id in told or gpu.memory_is_numa or gpu.error is not None:
            continue
        if "processes" in gpu.unread or _held_by_others(node, gpu):
            continue
        kept = [e for e in ended if _kept_mib(node, policy, gpu, e) is not None]
        if not kept:
            continue
        lines = [
            Evidence(
                source=SOURCE,
                text=f"{_kept_mib(node, policy, gpu, e)} MiB without a process since pid {e.pid}"
                f"{' (' + e.binary + ')' if e.binary else ''} ended, which had "
                f"{_mib(e.memory_bytes)}",
            )
            for e in kept[-SHOWN:]
        ]
        yield Hit(
            gpu_subject(node, gpu_id), tuple(lines), since_ns=min(e.exited_at_ns for e in kept)
        )


def _mib(memory_bytes: int | None) -> str:
    return "an unknown amount" if memory_bytes is None else f"{memory_bytes // MIB} MiB"


def _kept_mib(node: Node, policy: Policy, gpu: Gpu, exited: ExitedClient) -> int | None:
    """What stayed since a client ended, in MiB; None when that is nothing, or cannot be told."""
    since_ns = node.snapshot.taken_at_ns - exited.exited_at_ns
    if since_ns < policy.thresholds.memory_after_exit_seconds * SECOND_NS:
        return None
    if exited.unexplained_bytes is None or exited.unexplained_before_bytes is None:
        return None
    if (exited.pid, exited.gpu_id) in {(c.pid, c.gpu_id) for c in node.snapshot.clients}:
        return None
    kept = exited.unexplained_bytes - exited.unexplained_before_bytes
    if exited.memory_bytes is not None:
        # More than it had is somebody else's.
        kept = min(kept, exited.memory_bytes)
    # As for leaked memory: without the reserve told apart, what is in use moves by itself.
    floor_mib = policy.thresholds.leaked_memory_mib
    if gpu.memory_reserved_bytes is None:
        floor_mib *= 2
    return kept // MIB if kept >= floor_mib * MIB else None


def _held_by_others(node: Node, gpu: Gpu) -> bool:
    """Whether a process that is not listed holds the GPU: it may have inherited the memory."""
    whole = gpu.parent_id or gpu.id
    mine = {whole, *(part.id for part in node.migs_by_parent.get(whole, ()))}
    for pid, holders in node.holders_by_pid.items():
        if any(client.gpu_id in mine for client in node.clients_by_pid.get(pid, ())):
            continue
        if not any(g.id == whole for h in holders for g in node.gpus_of_holder(h)):
            continue
        process = node.processes.get(pid)
        match = system_programs.matches(node, process) if process is not None else None
        if match is None or match.proof != "proven":
            return True
    return False


# ------------------------------------------------------------------ load without a process


def gpu_busy_without_process_sustained(
    node: Node, policy: Policy, rows: Sequence[Row]
) -> Iterator[Hit]:
    """A minute or more of load on a GPU on which hardly ever anybody was listed."""
    judged = {row.gpu_id for row in rows if row.pid is not None}
    # A container's GPUs are busy with the neighbours' processes.
    if node.snapshot.node.host_pid_namespace is False:
        return
    told: set[str] = set()
    for usage in node.snapshot.usage:
        gpu = node.gpus.get(usage.gpu_id)
        if usage.pid is not None or gpu is None or gpu.parent_id is not None or gpu.id in told:
            continue
        if gpu.error is not None or "processes" in gpu.unread:
            continue
        if judged & {gpu.id, *(g.id for g in node.migs_by_parent.get(gpu.id, ()))}:
            continue
        if (
            usage.busy_without_client_seconds < UNLISTED_SECONDS
            or usage.covered_without_client_seconds < NOBODY_LISTED_SHARE * usage.covered_seconds
            or _workers(node, gpu, usage) >= WORKERS
        ):
            continue
        told.add(gpu.id)
        text = (
            f"50% busy or more for {usage.busy_without_client_seconds / 60:.1f} min, nobody listed "
            f"for {usage.covered_without_client_seconds / 60:.0f} of "
            f"{usage.covered_seconds / 60:.0f} min"
        )
        evidence = Evidence(kind="hiding", strength="weak", source=SOURCE, text=text)
        yield Hit(gpu_subject(node, gpu.id), (evidence,), since_ns=usage.from_ns)


def _workers(node: Node, gpu: Gpu, usage: Usage) -> int:
    """How many processes opened the GPU in that time: short ones come between two listings."""
    return len(
        {
            (opened.pid, opened.start_time_ticks)
            for opened in node.snapshot.opens
            if opened.kind == "nvidia-gpu"
            and opened.minor == gpu.minor
            and opened.state == "opened"
            and opened.last_ns >= usage.from_ns
        }
    )


# ------------------------------------------------------------------ respawns


def gpu_process_respawns(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes of one binary one after the other, alike in life, and nobody's workload."""
    unsettled = {
        (row.gpu_id, row.pid): (row, process) for row, process in _unsettled(node, policy, rows)
    }
    for line in node.snapshot.respawns:
        count = _in_a_row(line)
        if count < policy.thresholds.respawns:
            continue
        # The one that is there now tells whose they all are; without one, nothing is known.
        now = next((unsettled[k] for p in line.pids if (k := (line.gpu_id, p)) in unsettled), None)
        if now is None or not _is_same_binary(line, now[1]):
            continue
        row, process = now
        name = line.binary.rsplit("/", 1)[-1]
        # Everything that a person runs in an interpreter is the same binary.
        if is_interpreter(name) and row.verdict == "other-team":
            continue
        lives = sorted(line.lifetimes_seconds[-count:])
        text = (
            f"{count} processes of {line.binary} one after the other, each for about "
            f"{lives[len(lives) // 2]:.0f} s; now pid {process.pid}"
        )
        severity: Severity | None = "info" if row.verdict == "other-team" else None
        yield Hit(
            Subject(
                kind="node",
                name=line.binary,
                boot_id=node.snapshot.node.boot_id,
                gpu_ids=(line.gpu_id,),
                gpu=gpu_phrase(node, (line.gpu_id,)),
            ),
            (Evidence(kind="persistence", strength="weak", source=SOURCE, text=text),),
            owner=row.owner,
            since_ns=line.starts_ns[-count],
            severity=severity,
        )


def _is_same_binary(line: Respawn, process: Process) -> bool:
    exe = process.exe
    return exe is None or (exe.device, exe.inode) == (line.device, line.inode)


def _in_a_row(line: Respawn) -> int:
    """How many of the newest processes followed one another at once and lived alike."""
    starts, lives = line.starts_ns, line.lifetimes_seconds
    # One that lives last has no lifetime yet; it counts by its beginning.
    ended = len(lives)
    if not ended or ended not in (len(starts), len(starts) - 1):
        return 0
    usual = sorted(lives[-8:])[len(lives[-8:]) // 2]
    if not 0 < usual <= LIFETIME_LIMIT_SECONDS:
        return 0
    alike = max(LIFETIME_SECONDS, LIFETIME_SHARE * usual)
    pause = max(PAUSE_SECONDS, PAUSE_SHARE * usual)
    count = len(starts) - ended
    for place in range(ended - 1, -1, -1):
        if abs(lives[place] - usual) > alike:
            break
        if place + 1 < len(starts):
            gap = (starts[place + 1] - starts[place]) / SECOND_NS - lives[place]
            if not -OVERLAP_SECONDS <= gap <= pause:
                break
        count += 1
    return count
