"""The report's schema in docs/ is the one that its types give, and real reports keep to it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from gpuwarden.judge import judge
from gpuwarden.outputs import json_output
from gpuwarden.policy import Policy
from gpuwarden.snapshot import open_recording

REPOSITORY = Path(__file__).parents[2]


def test_the_schema_in_docs_is_current() -> None:
    documented = (REPOSITORY / "docs" / "report.schema.json").read_text(encoding="utf-8")
    assert documented == json_output.schema(), "run: make schema"


def test_the_report_of_the_example_keeps_to_it_and_renders_again() -> None:
    snapshot = open_recording(str(REPOSITORY / "examples" / "compromised-node.json.gz"))
    report = judge(snapshot, Policy())
    text = json_output.render(report)
    jsonschema.validate(json.loads(text), json.loads(json_output.schema()))
    assert json_output.parse(text.encode()) == report
    assert {row.verdict for row in report.rows} >= {
        "expected",
        "system",
        "other-team",
        "orphaned-job",
        "zombie-context",
        "leaked-memory",
        "rogue-container",
        "cryptominer",
    }
