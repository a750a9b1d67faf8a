"""Each rule with its hits and misses, and what every rule's text must keep to.

A fixture is a recorded node as plain JSON: ``fixtures/<rule>/{hit,miss}_<what>.json``, with a
policy beside it in ``<the same>.policy.yaml`` where one matters. A hit must give a finding of that
rule, a miss none.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden import rules as rules_package
from gpuwarden.finding import VERDICTS, Advisory, Verdict
from gpuwarden.judge import judge
from gpuwarden.policy import Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.rules import advisories, cuda_advisories, open_advisories
from gpuwarden.rules.advisories import VERDICT_ADVISORIES
from gpuwarden.rules.registry import (
    CUDA_RULES,
    OPEN_RULES,
    RULE_IDS,
    RULES,
    TIME_RULES,
    Rule,
)
from gpuwarden.sensors.registry import SENSOR_NAMES
from gpuwarden.snapshot import decode
from tests.conftest import Golden

ALL_RULES = (*RULES, *OPEN_RULES, *CUDA_RULES, *TIME_RULES)
WATCH_ONLY = {rule.advisory.id for rule in (*OPEN_RULES, *CUDA_RULES, *TIME_RULES)}
FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(FIXTURES.glob("*/*.json"))
CLEAR: frozenset[Verdict] = frozenset({"expected", "system"})
KILL = re.compile(r"\bkill\b(?! -STOP)|\bstop it\b|\bend it\b", re.IGNORECASE)
NEVER_KILLED = ("other-team", "wrong-gpu")


def _policy(case: Path) -> Policy:
    path = case.with_name(f"{case.stem}.policy.yaml")
    return parse_policy(path.read_bytes(), path.name, RULE_IDS) if path.exists() else Policy()


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_hits_hit_and_misses_miss(case: Path) -> None:
    report = judge(decode(case.read_bytes()), _policy(case), rules=ALL_RULES)
    assert not [run for run in report.rules if run.state == "failed"]
    mine = [f for f in report.findings if f.rule == case.parent.name and f.silenced_by is None]
    if case.stem.startswith("hit_"):
        assert len(mine) == 1, [f.rule for f in report.findings]
        assert mine[0].evidence
    else:
        assert mine == []


@pytest.mark.parametrize("rule", sorted(RULE_IDS))
def test_every_rule_ships_a_hit_and_two_misses(rule: str) -> None:
    stems = [case.stem for case in CASES if case.parent.name == rule]
    # What only watch sees is seldom seen by a person before it alarms: it has to be shown more.
    hits, misses = (2, 4) if rule in WATCH_ONLY else (1, 2)
    assert sum(stem.startswith("hit_") for stem in stems) >= hits
    assert sum(stem.startswith("miss_") for stem in stems) >= misses
    assert all(stem.startswith(("hit_", "miss_")) for stem in stems)


def test_no_fixture_is_of_a_rule_that_is_not_there() -> None:
    assert {folder.name for folder in FIXTURES.iterdir()} == RULE_IDS
    stray = {p.name.removesuffix(".policy.yaml") for p in FIXTURES.glob("*/*.policy.yaml")}
    assert stray <= {case.stem for case in CASES}


def _advisories() -> Iterator[tuple[str, Advisory]]:
    """Every advisory that is written, with its name, from the modules that hold them."""
    for module in pkgutil.iter_modules(rules_package.__path__, "gpuwarden.rules."):
        if module.name.endswith("advisories"):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, Advisory):
                    yield name, value


def test_a_rule_its_function_and_its_advisory_share_one_name() -> None:
    assert len(ALL_RULES) == len(RULE_IDS)
    written = dict(_advisories())
    for rule in ALL_RULES:
        name = rule.advisory.id
        assert getattr(sys.modules[rule.hits.__module__], name) is rule.hits
        assert written[name.upper()] is rule.advisory


def test_every_advisory_is_registered() -> None:
    written = [advisory.id for _, advisory in _advisories()]
    assert sorted(written) == sorted(RULE_IDS)


def test_every_verdict_that_is_not_clear_has_an_advisory() -> None:
    assert set(VERDICT_ADVISORIES) == set(VERDICTS) - CLEAR
    assert {a.id for a in VERDICT_ADVISORIES.values()} <= RULE_IDS


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.advisory.id)
def test_a_rule_needs_sensors_that_exist(rule: Rule) -> None:
    advisory = rule.advisory
    assert set(advisory.needs) <= set(SENSOR_NAMES)
    assert set(advisory.needs_sources) <= {"slurm", "kubernetes", "systemd"}
    assert advisory.steps
    assert all(step.endswith((".", ").")) for step in advisory.steps)


@pytest.mark.parametrize("verdict", NEVER_KILLED)
def test_nobody_is_told_to_stop_what_belongs_to_somebody(verdict: Verdict) -> None:
    for step in VERDICT_ADVISORIES[verdict].steps:
        assert not KILL.search(step) or step.startswith("Do not")


def test_nobody_is_told_to_stop_what_runs_on_the_host_outside_a_job() -> None:
    rule = next(r for r in OPEN_RULES if r.advisory.id == "accelerator_opened_outside_jobs")
    assert not any(KILL.search(step) for step in rule.advisory.steps)


@pytest.mark.parametrize("rule", CUDA_RULES, ids=lambda rule: rule.advisory.id)
def test_nobody_is_told_to_stop_a_job_for_its_code_or_contexts(rule: Rule) -> None:
    assert not any(KILL.search(step) for step in rule.advisory.steps)


def test_one_sign_on_an_expected_workload_stops_nothing() -> None:
    steps = advisories.EXPECTED_PROCESS_WITH_SIGNS.steps
    assert not any(KILL.search(step) for step in steps)


def test_kill_9_is_for_a_confirmed_hung_context_only() -> None:
    for rule in ALL_RULES:
        for step in rule.advisory.steps:
            if "kill -9" in step or "SIGKILL" in step:
                assert rule.advisory.id == "gpu_zombie_context"
                assert "confirmed hung context" in step


def test_a_reset_asks_for_an_empty_gpu() -> None:
    for rule in ALL_RULES:
        for step in rule.advisory.steps:
            if re.search(r"\breset (?:\{gpu\}|the GPU)", step, re.IGNORECASE):
                assert "only when nobody else is on it" in step


def test_evidence_is_kept_before_anything_is_stopped() -> None:
    for advisory in (
        advisories.GPU_CRYPTOMINER,
        advisories.GPU_PROCESS_SUSPICIOUS,
        advisories.GPU_CONTAINER_WITHOUT_ALLOCATION,
        open_advisories.CONTAINER_OPENS_ACCELERATOR,
        open_advisories.ACCELERATOR_OPENED_OUTSIDE_JOBS,
        open_advisories.HOLDER_WITHOUT_OPEN,
        cuda_advisories.MODULE_LOADED_HASH_LIKE,
        cuda_advisories.GPU_PROCESS_WITHOUT_DRIVER_LIBRARY,
    ):
        assert advisory.steps[0].startswith("Keep the evidence first")


@pytest.mark.parametrize("verdict", sorted(VERDICT_ADVISORIES))
def test_the_steps_of_a_verdict_read_as_they_were_read_last(
    verdict: Verdict, golden: Golden
) -> None:
    advisory = VERDICT_ADVISORIES[verdict]
    steps = [f"{number}. {step}" for number, step in enumerate(advisory.steps, start=1)]
    golden.check(
        f"steps/{verdict}.txt",
        "\n".join([advisory.title, advisory.severity, advisory.explanation, *steps]) + "\n",
    )
