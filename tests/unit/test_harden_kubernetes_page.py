"""docs/harden-kubernetes.md says what the code says: flags, rules, names, rights, figures."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml

from gpuwarden.harden import kubernetes, kubernetes_egress, kubernetes_paths, kubernetes_rules
from gpuwarden.harden.kubernetes_flags import add_flags
from gpuwarden.respond import kubernetes_pod, kubernetes_rights
from tests.support.admission import RULES, costs, large_pod

TEXT = (Path(__file__).parents[2] / "docs/harden-kubernetes.md").read_text()
PAGE = " ".join(TEXT.split())


def test_flags_and_files_are_those_there_are() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    known = set(parser._option_string_actions)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--dry-run"}
    assert named <= known
    assert {flag for flag in known if flag.startswith("--")} - {"--help", "--output"} <= named
    for name in (kubernetes.ADMISSION, kubernetes.EGRESS, kubernetes.TODAY, kubernetes.UNSEEN):
        assert f"`{name}`" in PAGE


def test_every_rule_is_in_the_table_and_no_other() -> None:
    table = TEXT.split("| rule |")[1].split("\n\n")[0]
    named = re.findall(r"^\| `?([\w ]+)`? \|", table, re.M)
    assert named == [*(rule.name for rule in RULES.rules), "resource claims"]


def test_names_are_those_that_count() -> None:
    for name in (*kubernetes_rules.GPU_RESOURCES, *kubernetes_rules.RUNTIME_CLASSES):
        assert f"`{name}`" in PAGE
    for name in kubernetes_rules.VISIBLE_DEVICES:
        assert f"`{name}`" in PAGE
    above = kubernetes_paths.parents(kubernetes_paths.SOCKETS)
    for path in above:
        assert f"`/{path}`" in PAGE or path.endswith(("k3s", "nvidia")), path


def test_rights_are_those_that_the_code_names() -> None:
    block = next(b for b in re.findall(r"```yaml\n(.*?)```", TEXT, re.S) if "ClusterRole" in b)
    assert yaml.safe_load(block) == kubernetes_rights.cluster_role()


def test_figures_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{kubernetes_egress.PEERS_LIMIT} peers a namespace" in PAGE
    assert f"It gets {kubernetes_pod.GRACE_SECONDS} s to end" in PAGE
    most = max(costs(large_pod(), monkeypatch).values())
    assert f"costs at most {most:,} in one expression" in PAGE
