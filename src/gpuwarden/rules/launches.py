"""Launches of declared workloads beside their launch profiles: what does not fit.

One process has one finding: kernels of foreign modules first, else a second stream, else launches
that are not explained. Where hash-like code was loaded, that finding names its launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuwarden.finding import Evidence, Row
from gpuwarden.model import KernelUse, LaunchFit
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import cuda_processes as watching
from gpuwarden.rules.cuda_processes import Watched
from gpuwarden.rules.gpu_code import is_hash_like
from gpuwarden.rules.hit import Hit
from gpuwarden.rules.launched_kernels import SOURCE

JUDGED_HARMLESS = "not hash-like"


def kernels_outside_profile(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes that launch kernels of modules that their profile does not have.

    Of modules that were judged, and compute unlike a hash, module_loaded_unknown tells, with their
    launches, as long as these are in step with the workload's own.
    """
    for one, fit in _compared(node):
        if fit.outside and (fit.second_stream or not _are_harmless(node, one, fit.outside)):
            yield _hit(node, policy, one, fit)


def second_kernel_stream(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes with kernels that come in a rhythm of their own, beside the workload's."""
    for one, fit in _compared(node):
        if fit.second_stream and not fit.outside:
            yield _hit(node, policy, one, fit)


def launches_unexplained(node: Node, policy: Policy, rows: Sequence[Row]) -> Iterator[Hit]:
    """Processes with launches that the profile does not explain, while all others are as usual."""
    for one, fit in _compared(node):
        if fit.unexplained and not (fit.outside or fit.second_stream):
            yield _hit(node, policy, one, fit)


def _compared(node: Node) -> Iterator[tuple[Watched, LaunchFit]]:
    """Processes with a launch profile and without hash-like loads, which are told of as such."""
    for one in watching.watched(node):
        fit = one.cuda.fit if one.cuda is not None else None
        if fit is not None and not _has_hash_like_load(node, one):
            yield one, fit


def _has_hash_like_load(node: Node, one: Watched) -> bool:
    return any(
        module.loaded_at_ns is not None and is_hash_like(module)
        for module in node.snapshot.modules
        if (module.pid, module.start_time_ticks) == (one.pid, one.start_time_ticks)
    )


def _are_harmless(node: Node, one: Watched, uses: Sequence[KernelUse]) -> bool:
    """Whether every module that the kernels are from was judged, and computes unlike a hash."""
    answers = {
        module.digest: module.answer
        for module in node.snapshot.modules
        if (module.pid, module.start_time_ticks) == (one.pid, one.start_time_ticks)
    }
    return all(answers.get(use.digest) == JUDGED_HARMLESS for use in uses)


def _hit(
    node: Node,
    policy: Policy,
    one: Watched,
    fit: LaunchFit,
) -> Hit:
    claim = watching.declared(node, policy, one.process) if one.process is not None else None
    compared = (
        f"compared with launch profile {fit.profile or 'without a name'}: "
        f"{fit.explained_share:.0%} of the last launches are explained, of {fit.launches} seen"
    )
    return Hit(
        watching.subject_of(node, one),
        (
            *(Evidence(source=SOURCE, text=text) for text in fit.words),
            Evidence(source=SOURCE, text=compared),
            *watching.workload_lines(claim),
            *watching.place_lines(node, one),
            *watching.limit_lines(one),
        ),
        owner=watching.owner_of(node, one, claim),
        since_ns=fit.since_ns,
    )
