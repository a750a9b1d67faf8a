"""The pages of docs/ say what the code says: flags, ways, figures, floors, links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from gpuwarden import life
from gpuwarden.cli import build_parser
from gpuwarden.model import DeviceOpen, Process
from gpuwarden.outputs.event_lines import event_line
from gpuwarden.probes.ways import BY_NAME
from gpuwarden.sinks import alertmanager, dispatcher, http_post, lines, specs
from gpuwarden.store import FINDINGS_FILE, SAMPLES_FILE, LedgerLimits, SampleLimits
from gpuwarden.watch import agent, alarms, judging, options, waiting

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
OTHERS = {"--cgroupns", "--update-golden"}
"""Flags of other programs that the pages name."""
DAY_NS = 86_400 * 10**9


def flat(name: str) -> str:
    """A page as one line."""
    return " ".join((DOCS / name).read_text().split())


def watch_page() -> str:
    return flat("watch.md")


def flags_of(command: str) -> set[str]:
    parser = build_parser()
    (choices,) = (one.choices for one in parser._actions if one.dest == "command")
    assert isinstance(choices, dict)
    return set(choices[command]._option_string_actions)


def test_every_flag_that_the_daemons_page_names_is_there() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", watch_page())) - OTHERS
    assert named <= flags_of("watch") | flags_of("history")
    assert {"--state", "--sink", "--enforce", "--way"} <= named


@pytest.mark.parametrize("way", BY_NAME.values(), ids=lambda way: way.name)
def test_the_table_of_ways_names_each_and_whether_it_can_deny(way: object) -> None:
    name, can_deny = getattr(way, "name"), getattr(way, "can_deny")  # noqa: B009
    rows = [line for line in (DOCS / "watch.md").read_text().splitlines() if line.startswith("| `")]
    (row,) = [line for line in rows if f"`{name}`" in line.split("|")[1]]
    assert row.rstrip(" |").endswith("yes" if can_deny else "no")


def test_every_kind_of_sink_is_in_its_table() -> None:
    page = watch_page()
    assert all(f"| `{kind}` |" in page for kind in specs.KINDS)


def test_the_example_of_an_event_has_every_key() -> None:
    event = DeviceOpen(
        pid=1, start_time_ticks=1, major=195, minor=0, kind="nvidia-gpu", how="open",
        state="opened", first_ns=0, last_ns=0,
    )  # fmt: skip
    process = Process(pid=1, start_time_ticks=1, ppid=0, comm="x")
    body = event_line(event, process, None, None, node="n", at_ns=0)

    def keys(document: object) -> set[str]:
        if not isinstance(document, dict):
            return set()
        return set(document).union(*map(keys, document.values()))

    page = watch_page()
    missing = {key for key in keys(msgspec.json.decode(body)) if f'"{key}":' not in page}
    assert missing == set()


@pytest.mark.parametrize(
    "text",
    [
        f"evaluated {['', 'once', 'twice', 'three times'][life.ROUNDS_TO_RESOLVE]} in a row",
        f"At most {life.MAX_OPEN:,} are open at a time, and findings of {alarms.LIMIT:,} processes",
        f"{alarms.QUIET_NS // 60_000_000_000} minutes after its last use",
        f"{alarms.ENDED_NS // 10**9} seconds after its end",
        f"held up to {waiting.HELD_SECONDS:g} seconds",
        f"at {lines.ROTATE_BYTES >> 20} MiB it becomes PATH.1, up to PATH.{lines.KEPT_FILES}",
        f"ends by itself {alertmanager.LIFETIME.seconds // 60} minutes after",
        f"waits double from {dispatcher.Backoff().first_seconds:g} to "
        f"{dispatcher.Backoff().most_seconds:g} s",
        f"{LedgerLimits().spool_rows:,} news or {LedgerLimits().spool_bytes >> 20} MiB",
        f"resolved ones for {LedgerLimits().resolved_age_ns // DAY_NS} days",
        f"{SampleLimits().size_bytes >> 20} MiB, {SampleLimits().age_ns // DAY_NS} days",
        f"answered {['', '', '', 'three'][dispatcher.REFUSALS]} times with 400, 413, 415 or 422",
        f"at least {judging.SHARE:g} without one",
        f"(default {options.STATE_DIRECTORY};",
        FINDINGS_FILE,
        SAMPLES_FILE,
        agent.USAGE_FILE,
    ],
)
def test_the_daemons_page_has_the_figures_of_the_code(text: str) -> None:
    assert text in watch_page()


def test_the_refusals_of_the_page_are_those_of_the_code() -> None:
    assert {400, 413, 415, 422} == http_post.REFUSED


def test_the_floors_of_the_page_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (floors,) = (one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    wanted = [re.findall(r"gpuwarden\.(\w+)", floor) for floor in floors]
    page = (DOCS / "architecture.md").read_text()
    block = page.split("import-linter says so")[1].split("\n\n")[1]
    shown = [re.findall(r"\w+", line.split("(")[0]) for line in block.splitlines()]
    assert shown == wanted


def test_every_part_of_the_package_is_in_the_table_of_parts() -> None:
    page = (DOCS / "architecture.md").read_text()
    table = page.split("| part |")[1].split("\n\n")[0]
    source = ROOT / "src" / "gpuwarden"
    parts = {path.stem for path in source.glob("*.py")} - {"__init__", "__main__"}
    parts |= {path.parent.name for path in source.glob("*/__init__.py")} - {"wire"}
    parts = {"store" if part.startswith("store") else part for part in parts}
    missing = {part for part in parts if not re.search(rf"`{part}(\.py|/|\*\.py|`)", table)}
    assert missing <= {"host_calls"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
