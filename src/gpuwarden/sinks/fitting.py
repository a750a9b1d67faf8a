"""Findings that fit: shorter versions of one, for receivers with a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from gpuwarden.life import Transition

# Evidence items, and characters of a text, that each version keeps; advice goes first.
VERSIONS = ((64, 2000), (16, 500), (8, 200), (3, 120), (1, 80), (0, 80))


def cut(text: str, characters: int) -> str:
    """At most so many characters; an ellipsis marks what was cut."""
    return text if len(text) <= characters else text[: characters - 1] + "…"


def versions(finding: Transition) -> Iterator[Transition]:
    """The finding itself, then ever shorter ones; identity and verdict stay in all of them."""
    yield finding
    for items, characters in VERSIONS:
        subject = finding.subject
        yield msgspec.structs.replace(
            finding,
            title=cut(finding.title, characters),
            explanation=cut(finding.explanation, characters),
            owner=cut(finding.owner, characters) if finding.owner else finding.owner,
            advice=(),
            node=cut(finding.node, 253),
            subject=msgspec.structs.replace(
                subject,
                name=cut(subject.name, characters),
                gpu=cut(subject.gpu, characters) if subject.gpu else subject.gpu,
                gpu_ids=tuple(cut(gpu, 80) for gpu in subject.gpu_ids[: max(items, 4)]),
            ),
            evidence=tuple(
                msgspec.structs.replace(
                    item, text=cut(item.text, characters), source=cut(item.source, characters)
                )
                for item in finding.evidence[:items]
            ),
        )


def fitting(finding: Transition, render: Callable[[Transition], bytes], limit_bytes: int) -> bytes:
    """The longest rendering within the limit; the shortest one there is when none is."""
    rendered = b""
    for version in versions(finding):
        rendered = render(version)
        if len(rendered) <= limit_bytes:
            break
    return rendered
