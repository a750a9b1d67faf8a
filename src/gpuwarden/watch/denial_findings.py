"""What enforcement did, as findings: who is denied, who is not although the policy names him."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuwarden.control import Denied
from gpuwarden.enforcement import Decision
from gpuwarden.finding import Advisory, Evidence, Finding, about_source
from gpuwarden.outputs.words import moment

SHOWN = 8

CONTAINER_DENIED = Advisory(
    id="container_denied",
    title="A container is denied accelerators, as the policy asks",
    severity="info",
    explanation="An enforce entry of the policy names this container, so its opens of accelerators "
    "fail. What it had open before stays open.",
    steps=(
        "To end it: take the entry out of the policy, then kill -HUP gpuwarden.",
        "With --pin it outlives gpuwarden: gpuwarden watch --unpin.",
    ),
)
WOULD_BE_DENIED = CONTAINER_DENIED._replace(
    title="A container would be denied accelerators (dry run)",
    explanation="An enforce entry of the policy names this container. This is a dry run: nothing "
    "is refused.",
    steps=("If that is what you want: gpuwarden watch --enforce without --dry-run.",),
)
NOT_AS_ASKED = CONTAINER_DENIED._replace(
    title="Enforcement is not as the policy asks",
    severity="warning",
    explanation="A container that the policy names, or may name, can open accelerators; or one is "
    "denied them and nobody can tell whether it still should be.",
    steps=(
        "Read why in the evidence.",
        "A container is denied only once its runtime answers: gpuwarden doctor.",
    ),
)
DENIED_ON_REQUEST = Advisory(
    id="denied_on_request",
    title="A control group is denied accelerators, as somebody asked",
    severity="info",
    explanation="Root asked for it with gpuwarden respond, so opens of accelerators in this group "
    "fail. What it had open before stays open. It lasts until it is taken back, the group ends or "
    "the machine restarts.",
    steps=(
        "To see all of them: gpuwarden respond --denied.",
        "To end it: gpuwarden respond --allow with the group's number, as the evidence has it.",
    ),
)
DENYING_ADVISORIES = (CONTAINER_DENIED, DENIED_ON_REQUEST)
DENYING_RULES = frozenset(advisory.id for advisory in DENYING_ADVISORIES)


def of_decisions(decisions: Iterable[Decision]) -> Iterator[Finding]:
    """One for each container that the policy names."""
    for decision in decisions:
        advisory = NOT_AS_ASKED
        if decision.state == "denied":
            advisory = CONTAINER_DENIED
        elif decision.state == "would deny":
            advisory = WOULD_BE_DENIED
        yield _finding(advisory, f"container {decision.container.id}", [decision.text])


def of_requests(denied: Iterable[Denied]) -> Iterator[Finding]:
    """One for each name under which groups are denied on request."""
    by_name: dict[str, list[Denied]] = {}
    for one in denied:
        by_name.setdefault(one.name, []).append(one)
    for name, same in by_name.items():
        texts = [
            f"group {one.group.hierarchy}:{one.group.id} since {moment(one.since_ns)}"
            + (f": {one.reason}" if one.reason else "")
            for one in same[:SHOWN]
        ]
        yield _finding(DENIED_ON_REQUEST, name, texts)


def trouble(name: str, lines: Iterable[str]) -> Finding:
    """Something about enforcement as a whole that is not as asked."""
    texts = list(lines)
    more = len(texts) - SHOWN
    return _finding(NOT_AS_ASKED, name, texts[:SHOWN] + ([f"and {more} more"] if more > 0 else []))


def _finding(advisory: Advisory, name: str, texts: Iterable[str]) -> Finding:
    evidence = (Evidence(source="enforcement", text=text) for text in texts)
    return about_source(advisory, name, evidence)
