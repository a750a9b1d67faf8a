"""docs/respond.md says what the program does: the table, the steps, the flags."""

from __future__ import annotations

import re
from pathlib import Path

from gpuwarden.finding import VERDICTS
from gpuwarden.respond import denial, hung, judged, pinned_denials
from gpuwarden.respond.allowed import GRANTS
from gpuwarden.respond.order import NEEDS, STEPS, UNDOING

PAGE = (Path(__file__).parents[2] / "docs/respond.md").read_text()
CONDITIONS = {
    "always": "",
    "owner-confirmed": " with `--owner-confirmed`",
    "hung-confirmed": " when shown to be dead or hung",
}


def cells(row: str) -> list[str]:
    return [cell.strip().strip("`") for cell in row.strip("|").split("|")]


def rows(after: str) -> list[list[str]]:
    text = PAGE[PAGE.index(after) :]
    table = re.search(r"\n\|---.*?\n((?:\|.*\n)+)", text)
    assert table is not None
    return [cells(line) for line in table[1].splitlines()]


def test_the_table_is_the_programs() -> None:
    shown = {row[0]: row[1] for row in rows("## What each verdict allows")}
    said = {
        verdict: ", ".join(one.power + CONDITIONS[one.condition] for one in grants)
        for verdict, grants in GRANTS.items()
    }
    assert {name: text.replace("`", "") for name, text in shown.items()} == {
        name: text.replace("`", "") for name, text in said.items()
    }
    assert list(shown) == list(VERDICTS)


def test_the_steps_are_the_programs() -> None:
    shown = {row[0]: row[1] for row in rows("## The steps")}
    assert tuple(shown) == STEPS
    for step, needs in shown.items():
        assert needs == ("–" if step in UNDOING else NEEDS[step])  # type: ignore[index]


def test_its_figures_are_the_programs() -> None:
    assert hung.HUNG_SECONDS == 10 and "ten seconds apart" in " ".join(PAGE.split())
    assert judged.STALE_NS == 15 * 60 * 10**9 and "quarter of an hour" in " ".join(PAGE.split())
    assert f"{pinned_denials.LIMIT} are kept" in PAGE and pinned_denials.DIRECTORY in PAGE
    assert denial.OPEN_STAYS.startswith("descriptors and mappings that are open already")
