"""The words of a comparison: what does not fit and why, kernels named; then what is only new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpuwarden.cuda.launches.candidates import Second
from gpuwarden.cuda.launches.profile import LaunchProfile
from gpuwarden.cuda.launches.spans import REST_LAUNCHES, SpanFit
from gpuwarden.cuda.launches.words import (
    duration,
    kernel_name,
    names,
    percent,
    rate,
)
from gpuwarden.model import KernelUse
from gpuwarden.outputs.words import moment

LINES = 4
"""Kernels of one kind that have a line of their own."""
UNNAMED_TOLD = 0.1
NEW_TOLD = 0.01


class Told(NamedTuple):
    """A kernel outside the profile."""

    use: KernelUse
    launches: int
    first_ns: int


class Facts(NamedTuple):
    """What a comparison found so far."""

    profile: LaunchProfile
    outside: tuple[Told, ...]
    more_outside: int
    """Launches of those that are not listed."""
    second: tuple[Second, ...]
    unexplained: tuple[KernelUse, ...]
    unexplained_since_ns: int | None
    spans: tuple[SpanFit, ...]
    launches: int
    named: int
    graph_launches: int
    offset_ns: int | None


def explain(facts: Facts) -> tuple[str, ...]:
    """The lines, gravest first."""
    return tuple(line for part in (_outside, _second, _unexplained, _mild) for line in part(facts))


def _since(facts: Facts, at_ns: int) -> str:
    if facts.offset_ns is None:
        return ""
    return f", since {moment(at_ns + facts.offset_ns)}"


def _step(facts: Facts) -> str:
    periods = facts.profile.periods
    return f"the workload's step of {duration(periods[0].seconds)}" if periods else "the workload"


def _rhythm(second: Second) -> str:
    period = second.period_seconds
    how = f"every {duration(period)}" if period else rate(second.candidate.hz)
    where = ", on a thread or stream of its own" if second.candidate.apart else ""
    return how + where


def _profile_name(facts: Facts) -> str:
    origins = facts.profile.origins
    return (origins[0].policy_profile if origins else "") or facts.profile.name


def _outside(facts: Facts) -> Iterator[str]:
    rhythms = {(one.candidate.use.name, one.candidate.use.digest): one for one in facts.second}
    for told in facts.outside[:LINES]:
        use = told.use
        digest = f"{use.digest[:12]}…" if len(use.digest) > 12 else use.digest
        line = (
            f"kernel {kernel_name(use.name)} (from module {digest}, in no baseline of profile "
            f"{_profile_name(facts)}) is {percent(told.launches / max(1, facts.named))} of launches"
        )
        second = rhythms.get((use.name, use.digest))
        if second is not None:
            line += f", {_rhythm(second)}, out of step with {_step(facts)}"
        yield line + _since(facts, told.first_ns)
    more = sum(told.launches for told in facts.outside[LINES:]) + facts.more_outside
    if more:
        yield f"more kernels of such modules are {percent(more / max(1, facts.named))} of launches"


def _second(facts: Facts) -> Iterator[str]:
    outside = {(told.use.name, told.use.digest) for told in facts.outside}
    others = [
        one
        for one in facts.second
        if (one.candidate.use.name, one.candidate.use.digest) not in outside
    ]
    for one in others[:LINES]:
        candidate = one.candidate
        if candidate.number >= 0:
            what = "a name that the profile has, here in other places or shapes than learned"
        elif candidate.use.digest:
            what = "of an allowed class of modules, a name that the profile does not have"
        else:
            what = "its module was not seen, a name that the profile does not have"
        yield (
            f"kernel {kernel_name(candidate.use.name, candidate.use.digest)}, {what}, comes "
            f"{_rhythm(one)}, out of step with {_step(facts)}" + _since(facts, candidate.first_ns)
        )
    if len(others) > LINES:
        yield f"{len(others) - LINES} more kernels come out of step"


def _unexplained(facts: Facts) -> Iterator[str]:
    if facts.unexplained_since_ns is None:
        return
    launches = sum(span.launches - span.outside for span in facts.spans)
    share = sum(span.unexplained for span in facts.spans) / max(1, launches)
    yield (
        f"{percent(share)} of launches are not explained by the profile (of the learned ones at "
        f"most {percent(facts.profile.unexplained)}), while all others are as learned: "
        f"{names([use.name for use in facts.unexplained])}"
        + _since(facts, facts.unexplained_since_ns)
    )


def _mild(facts: Facts) -> Iterator[str]:
    """What is new and accuses nobody."""
    if facts.launches and facts.launches - facts.named > UNNAMED_TOLD * facts.launches:
        share = (facts.launches - facts.named) / facts.launches
        yield (
            f"of {percent(share)} of launches the kernel is not known: it was asked for before "
            "this process was watched"
        )
    if facts.graph_launches and not facts.profile.graph_launches:
        yield "it launches graphs, which the learned runs did not; kernels in them are not seen"
    yield from _of_last_span(facts.profile, facts.spans)


def _of_last_span(profile: LaunchProfile, spans: Sequence[SpanFit]) -> Iterator[str]:
    if not spans:
        return
    last = spans[-1]
    if last.launches and last.new_known > NEW_TOLD * last.launches:
        yield (
            f"{percent(last.new_known / last.launches)} of launches are of kernels that the "
            "learned runs did not have, of modules that are known"
        )
    if last.is_usual or last.launches < REST_LAUNCHES:
        return
    more = [profile.kernels[number].name for number, _ in last.more_than_learned]
    which = f"; more than ever learned: {names(more)}" if more else ""
    yield f"known kernels come in other shares than in any phase that was learned{which}"
