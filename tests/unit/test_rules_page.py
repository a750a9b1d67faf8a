"""docs/rules.md lists every rule there is; ``pytest --update-golden`` writes it anew."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator

import gpuwarden
from gpuwarden.finding import Advisory
from gpuwarden.rules.registry import CUDA_RULES, OPEN_RULES, RULES, TIME_RULES
from gpuwarden.sinks.own_trouble import OWN_ADVISORIES
from gpuwarden.watch.cuda_sight import CUDA_SIGHT_ADVISORIES
from gpuwarden.watch.denial_findings import DENYING_ADVISORIES
from gpuwarden.watch.evidence_findings import EVIDENCE_ADVISORIES
from gpuwarden.watch.falco_unmatched import FALCO_ADVISORIES
from gpuwarden.watch.journal_head import JOURNAL_ADVISORIES
from gpuwarden.watch.own_sight import SIGHT_ADVISORIES
from tests.conftest import Golden

PAGE = "../../docs/rules.md"
HEAD = """# Every rule

Written by `pytest tests/unit/test_rules_page.py --update-golden` from the advisories themselves.
The severity is the usual one: a rule may tell a graver or a milder case. `gpuwarden scan` prints
the explanation and the steps with each finding. A rule whose sensors failed says "not evaluated".
Any id here can stand in an `exceptions` entry of [the policy](policy.md), but for those of the last
table.
"""
GROUPS: tuple[tuple[str, tuple[Advisory, ...]], ...] = (
    ("Of one moment: `scan` and `watch`", tuple(rule.advisory for rule in RULES)),
    ("Of device opens as they happen: `watch`", tuple(rule.advisory for rule in OPEN_RULES)),
    ("Of CUDA calls as they happen: `watch`", tuple(rule.advisory for rule in CUDA_RULES)),
    ("Of use over minutes and hours: `watch`", tuple(rule.advisory for rule in TIME_RULES)),
    (
        "Of gpuwarden itself: what it could not see, tell, keep or deny",
        (
            *SIGHT_ADVISORIES,
            *CUDA_SIGHT_ADVISORIES,
            *OWN_ADVISORIES,
            *FALCO_ADVISORIES,
            *DENYING_ADVISORIES,
            *JOURNAL_ADVISORIES,
            *EVIDENCE_ADVISORIES,
        ),
    ),
)


def lines(group: Iterable[Advisory]) -> Iterator[str]:
    yield "| rule | severity | a finding says | needs |"
    yield "|---|---|---|---|"
    for one in group:
        needs = ", ".join((*one.needs, *one.needs_sources)) or "–"
        title = one.title.format(gpu="GPU 0").replace("|", "\\|")
        yield f"| `{one.id}` | {one.severity} | {title} | {needs} |"


def page() -> str:
    parts = [HEAD]
    for title, group in GROUPS:
        parts.append(f"## {title}\n\n" + "\n".join(lines(group)) + "\n")
    return "\n".join(parts)


def advisories() -> dict[str, str]:
    """Every advisory of the package by its id, with the module that has it."""
    found: dict[str, str] = {}
    for module in pkgutil.walk_packages(gpuwarden.__path__, "gpuwarden."):
        if module.name.endswith(("_pb2", "__main__")):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Advisory):
                found.setdefault(value.id, module.name)
    return found


def test_the_page_says_what_the_rules_say(golden: Golden) -> None:
    golden.check(PAGE, page())


def test_no_advisory_is_missing_from_the_page() -> None:
    listed = {one.id for _, group in GROUPS for one in group}
    assert advisories().keys() == listed
