"""GPU code that processes load while they are watched: unknown, or computing like a hash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from gpuwarden.finding import Evidence, Row, Severity
from gpuwarden.model import GpuModule
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import cuda_processes as watching
from gpuwarden.rules.cuda_processes import Watched
from gpuwarden.rules.gpu_code import (
    SHOWN,
    brief,
    described,
    is_hash_like,
    objection,
    profile_of,
)
from gpuwarden.rules.hit import Hit
from gpuwarden.rules.launched_kernels import kernel_lines
from gpuwarden.rules.membership import Claim, claims

SOURCE = "module load"
Wanted = Callable[[GpuModule], bool]


def module_loaded_hash_like(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes that loaded unknown, hash-like code: critical where a profile says what they may.

    A verdict that accuses the process carries the same code as evidence in its own finding.
    """
    for one, found in _loaders(node, is_hash_like):
        found.sort(key=lambda module: -(module.score or 0))
        profile, claim = _declared(node, policy, one)
        since = _since(found)
        evidence = [
            Evidence(source="attribution", text=_in_words(found, profile, claim)),
            *_module_lines(found, profile, strong=True),
        ]
        if one.process is not None:
            digests = frozenset(module.digest for module in found)
            evidence.extend(kernel_lines(node, one.process, digests))
        # Where the baselines could not be asked, the code may well be in one of them.
        compared = profile is not None and any(not module.not_compared for module in found)
        severity: Severity = "critical" if compared else "error"
        yield _hit(node, one, claim, evidence, since)._replace(severity=severity)


def module_loaded_unknown(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes that loaded what their profile neither knows nor allows, hash-like code aside."""
    for one, found in _loaders(node, lambda module: not is_hash_like(module)):
        profile, claim = _declared(node, policy, one)
        if profile is None:
            continue
        unknown = [module for module in found if objection(module, profile)]
        if unknown:
            unknown.sort(key=lambda module: (-(module.score or 0), module.loaded_at_ns or 0))
            evidence = list(_module_lines(unknown, profile))
            if one.process is not None:
                digests = frozenset(module.digest for module in unknown)
                evidence.extend(kernel_lines(node, one.process, digests))
            yield _hit(node, one, claim, evidence, _since(unknown))


def _is_load(module: GpuModule) -> bool:
    return module.loaded_at_ns is not None


def _loaders(node: Node, wanted: Wanted) -> Iterator[tuple[Watched, list[GpuModule]]]:
    """Processes with loads that are wanted; each digest of a process once, by its first load."""
    first: dict[watching.Key, dict[str, GpuModule]] = {}
    for module in node.snapshot.modules:
        if not _is_load(module):
            continue
        own = first.setdefault((module.pid, module.start_time_ticks), {})
        known = own.get(module.digest)
        if known is None or (module.loaded_at_ns or 0) < (known.loaded_at_ns or 0):
            own[module.digest] = module
    for one in watching.watched(node):
        modules = first.get((one.pid, one.start_time_ticks), {}).values()
        found = [module for module in modules if wanted(module)]
        if found:
            yield one, found


def _declared(node: Node, policy: Policy, one: Watched) -> tuple[str | None, Claim | None]:
    """The code profile of a process and the policy entry that names it, or the entry it fits."""
    if one.process is None:
        return None, None
    profile = profile_of(node, policy, one.process)
    if profile is None:
        return None, watching.declared(node, policy, one.process)
    ties = claims(node, policy, one.process)
    return profile, next(c for c in ties if c.entry is not None and c.entry.profile == profile)


def _since(modules: Iterable[GpuModule]) -> int | None:
    return min((m.loaded_at_ns for m in modules if m.loaded_at_ns is not None), default=None)


def _in_words(found: Sequence[GpuModule], profile: str | None, claim: Claim | None) -> str:
    """What it is in an operator's words: which module, which kernel, in which workload."""
    what = brief(found)
    if profile is None or claim is None:
        return (
            f"hash-like code in a process without a code profile: {what}. No baseline that is "
            "installed here knows it, and nobody declared what this process may load"
        )
    unasked = {module.not_compared for module in found}
    if "" not in unasked:
        return (
            f"hash-like code in workload {claim.name}: {what}. Whether its profile {profile} knows "
            f"it could not be asked: {min(unasked)}"
        )
    return (
        f"a miner inside a legitimate workload, until it is explained: {what}, in workload "
        f"{claim.name}, whose profile {profile} does not know it"
    )


def _module_lines(
    found: Sequence[GpuModule], profile: str | None, *, strong: bool = False
) -> Iterator[Evidence]:
    for module in found[:SHOWN]:
        text = described(module)
        if strong:
            yield Evidence(kind="code", strength="strong", source=SOURCE, text=text)
        else:
            yield Evidence(source=SOURCE, text=f"{text}; {objection(module, profile or '')}")
    if len(found) > SHOWN:
        counted = f"{len(found)} such modules in all; gpuwarden trace lists them as they come"
        yield Evidence(source=SOURCE, text=counted)


def _hit(
    node: Node, one: Watched, claim: Claim | None, evidence: list[Evidence], since: int | None
) -> Hit:
    return Hit(
        watching.subject_of(node, one),
        (
            *evidence,
            *watching.workload_lines(claim),
            *watching.place_lines(node, one),
            *watching.limit_lines(one),
        ),
        owner=watching.owner_of(node, one, claim),
        since_ns=since,
    )
