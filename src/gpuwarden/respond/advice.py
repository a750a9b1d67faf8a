"""What this program does not do and a person should: in words, with the facts of the case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuwarden.evidence.masks import mask_text
from gpuwarden.finding import Verdict
from gpuwarden.model import LOGINUID_UNSET, Container, Fact, PersistenceEntry
from gpuwarden.node import Node
from gpuwarden.respond.affected import Other
from gpuwarden.respond.target import Found

SHOWN = 6
ENTRY_SHOWN = 160
NEVER_RESET = "gpuwarden never resets a GPU: whoever else is on it loses everything."


class Advice(Fact, frozen=True, kw_only=True):
    """A heading and its sentences."""

    title: str
    lines: tuple[str, ...]


def of(found: Found, others: Sequence[Other]) -> tuple[Advice, ...]:
    """The advice for a verdict, in the order in which it is to be followed."""
    verdict = found.target.verdict
    parts = _PARTS.get(verdict, ()) if verdict is not None else ()
    pairs = [(title, tuple(part(found, others))) for title, part in parts]
    return tuple(Advice(title=title, lines=lines) for title, lines in pairs if lines)


# ---------------------------------------------------------------- the parts


def _whom_to_ask(found: Found, others: Sequence[Other]) -> Iterator[str]:
    target = found.target
    workload = target.workload
    owner = target.owner or (workload.owner if workload is not None else None)
    contact = target.contact or (workload.contact if workload is not None else None)
    process = target.process
    login = process.login_user if process is not None else None
    user = process.user if process is not None and process.uid not in (None, 0) else None
    who = owner or login or user
    if who is None:
        yield "No owner is known: look at its parents and its place above."
    else:
        yield f"{who}{f', {contact}' if contact else ''}."
        if contact is None:
            yield "The policy names no contact: a workloads entry with one saves this search."
    if workload is not None:
        job = f", job {workload.job_id}" if workload.job_id else ""
        yield f"It says it belongs to {workload.name} (by {workload.source}{job})."


def _other_team(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "Ask before anything else. Another team's work is never stopped from here."
    yield from _whom_to_ask(found, others)
    yield "If it may stay: add it to the policy with its owner and contact."
    yield "If nobody answers: their team's lead decides, or whoever answers for this node."


def _wrong_gpu(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "Tell the owner: usually CUDA_VISIBLE_DEVICES was set by hand."
    yield from _whom_to_ask(found, others)
    yield "Constrain devices, so that it cannot recur (Slurm: ConstrainDevices=yes)."


def _persistence(found: Found, others: Sequence[Other]) -> Iterator[str]:
    target = found.target
    process = target.process
    entries = autostarts(found)
    for entry in entries[:SHOWN]:
        text = mask_text(entry.text or " ".join(entry.commands))[:ENTRY_SHOWN]
        yield f"{named(entry)}{f': {text}' if text else ''}"
    if len(entries) > SHOWN:
        yield f"and {len(entries) - SHOWN} more places (gpuwarden scan --format json)"
    container = target.container
    if container is not None:
        if container.restart_policy not in (None, "", "no"):
            yield f"The container is restarted by its runtime: {container.restart_policy}."
        if container.pod_owner:
            yield f"The pod is made anew by {container.pod_owner}: that is what to delete."
    for respawn in target.snapshot.respawns:
        if process is not None and process.pid in respawn.pids:
            yield f"It was started {len(respawn.pids)} times: something brings it back."
    unit = process.cgroup.unit if process is not None and process.cgroup is not None else None
    if unit is not None and unit.endswith((".service", ".timer")):
        yield f"It runs in the unit {unit}: systemctl cat {unit}"
    if not Node(target.snapshot).sees("persistence"):
        yield "Autostarts could not be looked at in this scan: look by hand."
    elif not entries:
        yield "No autostart that names it was found in cron, systemd, shell profiles and preload."
    yield "Disable it before the kill, after a copy was kept; else it comes back."


def named(entry: PersistenceEntry) -> str:
    """``cron /etc/crontab:3``."""
    at = f":{entry.line}" if entry.line is not None else ""
    return f"{entry.kind} {entry.path}{at}"


def autostarts(found: Found) -> list[PersistenceEntry]:
    """Autostarts that name the process's binary or run its unit; told of by rules or not."""
    process = found.target.process
    if process is None:
        return []
    words = set()
    if process.exe is not None and not process.exe.memfd:
        words.add(process.exe.path)
    if process.argv and process.argv[0].startswith("/"):
        words.add(process.argv[0])
    unit = process.cgroup.unit if process.cgroup is not None else None
    accused = {
        one.subject.name.rpartition(":")[0] or one.subject.name
        for one in found.report.findings
        if one.subject.kind == "persistence"
    }
    return [
        entry
        for entry in found.target.snapshot.persistence
        if any(word in command for word in words for command in (*entry.commands, entry.text))
        or (unit is not None and entry.unit == unit)
        or entry.path in accused
    ]


def _way_in(found: Found, others: Sequence[Other]) -> Iterator[str]:
    target = found.target
    process = target.process
    if process is None:
        return
    node = Node(target.snapshot)
    parents = [f"{one.comm} ({one.pid})" for one in node.ancestors(process.pid)][:SHOWN]
    if parents:
        yield f"Started by {' ← '.join(parents)}."
    if process.loginuid is None:
        yield "Who logged in for it could not be read."
    elif process.loginuid == LOGINUID_UNSET:
        yield "No login stands behind it: a service, a container or a scheduler started it."
    else:
        name = process.login_user or f"uid {process.loginuid}"
        yield f"The kernel keeps {name} as the login that it came from: look at that one's logins."
    exe = process.exe
    if exe is not None and exe.owner_uid is not None and not exe.memfd:
        yield f"Its binary {exe.path} is uid {exe.owner_uid}'s: see who put it there, and when."
    yield from _container_way_in(target.container)


def _container_way_in(container: Container | None) -> Iterator[str]:
    if container is None:
        return
    image = container.image or "unknown"
    digest = f" ({container.image_digest})" if container.image_digest else ""
    yield f"Its image is {image}{digest}: compare with what was meant to be deployed."
    ways = []
    if container.privileged:
        ways.append("it is privileged")
    if container.devices:
        ways.append(f"devices were passed in ({', '.join(container.devices[:3])})")
    if container.visible_devices:
        ways.append(f"it asks for NVIDIA_VISIBLE_DEVICES={container.visible_devices[:40]}")
    if container.device_requests:
        ways.append(f"it requests {', '.join(container.device_requests[:3])}")
    if ways:
        yield f"It got the GPU because {'; '.join(ways)}."
        yield "Close that way: gpuwarden harden kubernetes, gpuwarden harden host."


def _credentials(found: Found, others: Sequence[Other]) -> Iterator[str]:
    target = found.target
    process, container = target.process, target.container
    if container is not None:
        yield "Everything in its container: mounted secrets, those in its environment, keys."
        if container.pod_name:
            yield "The token of its pod's service account, and all that its role may do."
        if container.host_mounts:
            mounts = ", ".join(one.partition(":")[0] for one in container.host_mounts[:SHOWN])
            yield f"What is below the host's {mounts}, which is mounted in."
        if container.privileged or container.host_pid:
            yield "Everything on this node: it is privileged or sees the host's processes."
    elif process is not None:
        if process.uid == 0 or process.effective_uid == 0:
            yield "Everything on this node: it runs as root."
        else:
            user = process.user or f"uid {process.uid}"
            yield f"What {user} can read: SSH keys, cloud and cluster credentials, tokens."
    yield "What a cloud machine's metadata service hands out, where processes may ask it."
    yield "Other jobs' data on file systems that it could read."


def _rebuild(found: Found, others: Sequence[Other]) -> Iterator[str]:
    container = found.target.container
    if container is not None and not (container.privileged or container.host_pid):
        yield "Deploy the workload anew from a known-good image, by digest."
        yield "The node too, if anything of it was mounted in or a way out of the container shows."
    else:
        yield "Rebuild the node from a known-good image: what was cleaned is not known to be clean."
    yield "Look for the same binary, autostarts and peers on the other nodes first."


def _rogue(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "Ask the owner of the namespace or image; kill only with --owner-confirmed."
    yield from _container_way_in(found.target.container)


def _suspicious(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "One kind of evidence is no proof. Freeze or deny buys time to ask the owner."
    yield from _whom_to_ask(found, others)
    yield from _way_in(found, others)


def _orphan(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "Tell the job's owner what is ended and why."
    yield from _whom_to_ask(found, others)
    yield "See that the epilog looks: gpuwarden harden slurm."


def _unattributed(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "Find whose it is first; kill only with --owner-confirmed."
    yield from _way_in(found, others)
    yield "If it belongs here: gpuwarden expect --learn drafts a policy entry."


def _unreadable(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "Not enough was seen: this is not a clean result, and nothing is done on it."
    yield "gpuwarden doctor names what is missing and how to get it; then run this again."


def _zombie(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield "Killing what is dead does nothing: ask who inherited its descriptors, and end that."
    state = found.target.process.state if found.target.process is not None else ""
    if state == "D":
        yield "It waits in the kernel (state D): a signal is taken only when that wait ends."


def _reset(found: Found, others: Sequence[Other]) -> Iterator[str]:
    yield NEVER_RESET
    here = [one for one in others if "gpu" in one.where]
    labels = ", ".join(Node(found.target.snapshot).gpu_label(g.id) for g in found.target.gpus)
    if not labels:
        return
    if here:
        names = "; ".join(one.text for one in here[:SHOWN])
        more = f"; and {len(here) - SHOWN} more" if len(here) > SHOWN else ""
        yield f"Not now: also on GPU {labels}: {names}{more}."
    else:
        yield f"Nobody else was seen on GPU {labels} in this scan."
    yield "Drain the node, see that nobody is on the GPU, then its maker's tool resets it."
    addresses = {gpu.pci_address for gpu in found.target.gpus if gpu.pci_address is not None}
    xids = [one for one in found.target.snapshot.xids if one.trusted]
    codes = ", ".join(dict.fromkeys(str(x.code) for x in xids if x.pci_address in addresses))
    if codes:
        yield f"The kernel logged Xid {codes} of it: look at those first."


Part = Callable[[Found, Sequence[Other]], Iterator[str]]
_WAY: tuple[tuple[str, Part], ...] = (
    ("Find what brings it back", _persistence),
    ("Find the way in", _way_in),
    ("Rotate what it could read", _credentials),
    ("Rebuild", _rebuild),
)
_PARTS: dict[Verdict, tuple[tuple[str, Part], ...]] = {
    "cryptominer": (*_WAY, ("If memory stays taken", _reset)),
    "rogue-container": (("Before a kill", _rogue), ("Whom to ask", _whom_to_ask)),
    "suspicious": (("Before a kill", _suspicious),),
    "other-team": (("Whom to ask", _other_team),),
    "wrong-gpu": (("Whom to ask", _wrong_gpu),),
    "orphaned-job": (("After the kill", _orphan), ("If memory stays taken", _reset)),
    "zombie-context": (("Who holds it", _zombie), ("If memory stays taken", _reset)),
    "leaked-memory": (("A reset", _reset),),
    "unattributed": (("Whose it is", _unattributed),),
    "unreadable": (("See more first", _unreadable),),
}
"""Verdict → headings with what is said below each; those of who belongs here have none."""
