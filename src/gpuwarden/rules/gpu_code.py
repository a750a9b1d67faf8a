"""GPU code in the processes of workloads that declare what they may load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpuwarden.finding import Evidence, Row
from gpuwarden.model import GpuModule, Process
from gpuwarden.node import Node
from gpuwarden.outputs.words import moment
from gpuwarden.policy import Policy
from gpuwarden.rules.hit import Hit, process_subject
from gpuwarden.rules.membership import claims

SHOWN = 8
"""Modules that one finding names; how many there are it says as well."""
KERNELS_SHOWN = 3
TEXT_SHOWN = 160
DIGEST_SHOWN = 16
HASH_LIKE = "hash-like"
BY_ITSELF = "hash-like by itself, among so many unknown modules that one may look so by chance"
ACCUSED = frozenset({"cryptominer", "suspicious"})
"""Verdicts whose own finding carries what speaks against a process, its code too."""
SOURCE = "its GPU code"


def profile_of(node: Node, policy: Policy, process: Process) -> str | None:
    """The code profile of the first policy entry with one that fits a process, proven or not."""
    if not policy.profiles:
        return None
    entries = (claim.entry for claim in claims(node, policy, process))
    return next((entry.profile for entry in entries if entry and entry.profile), None)


def is_hash_like(module: GpuModule) -> bool:
    """Whether it is nobody's known code and computes as hash functions do; a JIT class is a claim
    and no excuse."""
    return module.answer == HASH_LIKE and module.standing in ("unknown", "jit")


def observe(node: Node, process: Process) -> Iterator[Evidence]:
    """One strong sign for a process with unknown, hash-like code, however many modules have it.

    A module that was seen being loaded and found in memory as well is one.
    """
    found = _hash_like(_told_once(node.modules_of(process)))
    if found:
        more = f"; {len(found) - 1} more like it" if len(found) > 1 else ""
        yield Evidence(
            kind="code", strength="strong", source=SOURCE, text=f"{described(found[0])}{more}"
        )


def loaded_in_words(node: Node, process: Process) -> str:
    """The hash-like code that a process was seen loading, in a line; empty where there is none."""
    loads = [m for m in _told_once(node.modules_of(process)) if m.loaded_at_ns is not None]
    found = _hash_like(loads)
    return brief(found) if found else ""


def gpu_module_hash_like(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes with unknown, hash-like code that no verdict accuses.

    Code that was seen being loaded is module_loaded_hash_like's to tell.
    """
    for process, own in _processes(node, rows):
        found = _hash_like(_only_in_memory(node.modules_of(process)))
        if found and not any(row.verdict in ACCUSED for row in own):
            yield _hit(node, process, own, (_evidence(one, kind=True) for one in found), found)


def gpu_module_unknown(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes with modules that their profile neither knows nor allows, hash-like ones aside.

    Those that were seen being loaded are module_loaded_unknown's to tell.
    """
    for process, own in _processes(node, rows):
        scan = node.code_scan_of(process)
        profile = scan.profile if scan is not None else ""
        found = [
            (module, why)
            for module in _only_in_memory(node.modules_of(process))
            if not is_hash_like(module) and (why := objection(module, profile))
        ]
        if found:
            found.sort(key=lambda one: (not one[0].in_no_mapped_file, -(one[0].score or 0)))
            evidence = (_evidence(module, why=why) for module, why in found)
            yield _hit(node, process, own, evidence, [module for module, _ in found])


def unseen(node: Node, policy: Policy, rows: Sequence[Row]) -> str:
    """Of which declared process the code was not, or not wholly, seen; empty for none."""
    reasons: list[str] = []
    seen_loading = _seen_loading(node)
    for process, _ in _processes(node, rows):
        profile = profile_of(node, policy, process)
        if profile is None or (process.pid, process.start_time_ticks) in seen_loading:
            continue
        scan = node.code_scan_of(process)
        if scan is None:
            run = node.sensor("code")
            why = run.reason if run is not None and run.reason else "was not looked for"
            reasons.append(f"the GPU code of pid {process.pid}: {why}")
        elif scan.state != "ok":
            reasons.append(f"the GPU code of pid {process.pid}: {scan.reason}")
        elif scan.profile != profile:
            reasons.append(
                f"the GPU code of pid {process.pid} was compared with profile {scan.profile}, "
                f"and the policy now names {profile}"
            )
    more = f"; and of {len(reasons) - 3} more processes" if len(reasons) > 3 else ""
    return "; ".join(reasons[:3]) + more


def _processes(node: Node, rows: Sequence[Row]) -> Iterator[tuple[Process, list[Row]]]:
    mine: dict[int, list[Row]] = {}
    for row in rows:
        if row.pid is not None:
            mine.setdefault(row.pid, []).append(row)
    for pid, own in mine.items():
        process = node.processes.get(pid)
        if process is not None:
            yield process, own


def _seen_loading(node: Node) -> set[tuple[int, int]]:
    """Processes of which every load was seen with its bytes, from their first moment on."""
    return {
        (one.pid, one.start_time_ticks)
        for one in node.snapshot.cuda
        if one.libraries and one.seen_since_ns is not None and not (one.before or one.missed_loads)
    }


def _hash_like(modules: Iterable[GpuModule]) -> list[GpuModule]:
    """Those that are nobody's and compute like a hash, the surest first."""
    found = [module for module in modules if is_hash_like(module)]
    return sorted(found, key=lambda module: -(module.score or 0))


def _told_once(modules: Sequence[GpuModule]) -> list[GpuModule]:
    """Each digest once: the load that was seen, or else what was found in memory."""
    found: dict[str, GpuModule] = {}
    for module in modules:
        known = found.get(module.digest)
        if known is None or (known.loaded_at_ns is None and module.loaded_at_ns is not None):
            found[module.digest] = module
    return list(found.values())


def _only_in_memory(modules: Sequence[GpuModule]) -> list[GpuModule]:
    """Those that were found by looking and by nothing else."""
    return [module for module in _told_once(modules) if module.loaded_at_ns is None]


def objection(module: GpuModule, profile: str) -> str:
    """Why a module is not simply accepted; empty when the profile knows it or allows its class."""
    if module.standing != "unknown":
        return ""
    if module.broken:
        return f"could not be read to its end ({module.broken})"
    looks = f", {module.known_as}" if module.known_as else ""
    return f"in no baseline of profile {profile}{looks}"


def brief(modules: Sequence[GpuModule]) -> str:
    """Loaded modules in a line: the first by kind, digest and kernels, and since when they are."""
    first = modules[0]
    names = ", ".join(name[:TEXT_SHOWN] for name in first.kernels[:KERNELS_SHOWN])
    text = " ".join(word for word in (first.kind, first.arch, first.digest[:DIGEST_SHOWN]) if word)
    text += f" with kernel {names}" if names else " (its kernels have no names)"
    if len(modules) > 1:
        text += f" and {len(modules) - 1} more like it"
    began = min(module.loaded_at_ns or 0 for module in modules)
    return f"{text}, since {moment(began)}"


def described(module: GpuModule) -> str:
    """A module in one line: what and where it is, and what it computes, as far as that was told."""
    kernels = ", ".join(name[:TEXT_SHOWN] for name in module.kernels[:KERNELS_SHOWN])
    more = module.kernel_count - min(len(module.kernels), KERNELS_SHOWN)
    parts = [
        " ".join(word for word in (module.kind, module.arch, module.digest) if word),
        (f"with {kernels}" + (f" and {more} more" if more > 0 else "")) if kernels else "",
        _place(module),
    ]
    text = " ".join(part for part in parts if part)
    if module.answer == HASH_LIKE:
        # The first reason says it in the same words.
        said = "; ".join(module.reasons) or "hash-like"
        if any(name not in said for name in module.consistent_with):
            said += f"; constants consistent with {', '.join(module.consistent_with)}"
        score = "" if module.score is None else f" (score {module.score:.1f})"
        text += f": {said}{score}"
    elif module.answer:
        text += f": {module.answer}"
    return text


def _place(module: GpuModule) -> str:
    if module.loaded_at_ns is not None:
        by = f" by {module.loaded_by[:TEXT_SHOWN]}" if module.loaded_by else ""
        source = f" from {module.mapping[:TEXT_SHOWN]}" if module.mapping else ""
        return f"loaded {moment(module.loaded_at_ns)}{by}{source}"
    at = "" if module.offset is None else f" at {module.offset:#x}"
    where = f"in {module.mapping or 'anonymous memory'}{at}"
    return f"{where}, in no mapped file" if module.in_no_mapped_file else where


def _evidence(module: GpuModule, *, why: str = "", kind: bool = False) -> Evidence:
    text = described(module) + (f"; {why}" if why else "")
    if kind:
        return Evidence(kind="code", strength="strong", source=SOURCE, text=text)
    return Evidence(source=SOURCE, text=text)


def _hit(
    node: Node,
    process: Process,
    own: Sequence[Row],
    evidence: Iterable[Evidence],
    modules: Sequence[GpuModule],
) -> Hit:
    told = list(evidence)[:SHOWN]
    if len(modules) > SHOWN:
        counted = f"{len(modules)} such modules in all; the snapshot lists them"
        told.append(Evidence(source=SOURCE, text=counted))
    scan = node.code_scan_of(process)
    for limit in scan.limits if scan is not None else ():
        told.append(Evidence(source="how memory is read", text=limit))
    return Hit(
        process_subject(
            node, process.pid, process, [row.gpu_id for row in own if row.gpu_id is not None]
        ),
        tuple(told),
        owner=own[0].owner,
        since_ns=process.started_at_ns,
    )
