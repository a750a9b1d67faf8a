"""docs/cuda.md says what the code says: keys of events, rules, flags, figures, files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuwarden.cli import build_parser
from gpuwarden.cuda.guardian import LATE_NS
from gpuwarden.cuda.options import TracerOptions
from gpuwarden.outputs import cuda_lines
from gpuwarden.policy import Capture, PolicyWorkload
from gpuwarden.probes.return_probes import DANGEROUS
from gpuwarden.rules.registry import RULE_IDS
from gpuwarden.watch.cuda_sight import CUDA_SIGHT_RULES
from tests.support.cuda_facts import FIT, LIBRARY, WINDOW, call, caller, load, module

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cuda.md").read_text()
FLAT = " ".join(PAGE.split())
AT: dict[str, Any] = {"node": "n", "at_ns": 0}


def keys(document: object) -> set[str]:
    if isinstance(document, list):
        return set().union(*map(keys, document))
    if not isinstance(document, dict):
        return set()
    return set(document).union(*map(keys, document.values()))


def own(line: bytes, part: str) -> set[str]:
    """The keys of that part of a line which is its kind's own."""
    return keys(msgspec.json.decode(line)[part])


def test_the_example_of_a_load_has_every_key() -> None:
    line = msgspec.json.decode(cuda_lines.load_line(load(module()), caller(), **AT))
    wanted = set(line) | keys(line["load"]) | keys(line["modules"])
    assert {key for key in wanted if f'"{key}":' not in PAGE} == set()


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("cuda_context", own(cuda_lines.context_line(call(), caller(), **AT), "context")),
        ("cuda_library", own(cuda_lines.library_line(LIBRARY, "found", **AT), "library")),
        ("launches", own(cuda_lines.launches_line(WINDOW, caller(), **AT), "window")),
        ("launches", own(cuda_lines.launches_line(WINDOW, caller(), FIT, **AT), "fit")),
    ],
)
def test_the_row_of_a_kind_names_its_own_keys(kind: str, wanted: set[str]) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind}`")]
    assert {key for key in wanted if f"`{key}`" not in row} == set()


def test_the_flags_of_the_page_are_there() -> None:
    parser = build_parser()
    (choices,) = (one.choices for one in parser._actions if one.dest == "command")
    assert isinstance(choices, dict)
    known = {
        flag
        for name in ("trace", "watch", "history")
        for flag in choices[name]._option_string_actions
    }
    known |= {"--pid", "--seeds", "--seconds", "--nice", "--wait-ms"}  # of `code scan`, of bench/
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= known


def test_every_rule_that_the_page_names_is_one() -> None:
    beginnings = "module|contexts_beyond|second_gpu|second_kernel|kernels|gpu_process|cuda"
    rule = rf"`((?:{beginnings})_[a-z_]+)`"
    named = set(re.findall(rule, PAGE))
    events = {"module_load", "cuda_context", "cuda_library"}
    assert named - events <= RULE_IDS | CUDA_SIGHT_RULES
    assert {"module_loaded_hash_like", "module_bytes_missed"} <= named


def test_every_program_that_a_page_names_is_there() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name in re.findall(r"\bbench/[a-z_/]+\.py", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize(
    "text",
    [
        f"of one window in {['', '', '', '', '', 'five'][TracerOptions().sample_every]}",
        f"at the latest after {['', 'half a second'][LATE_NS == 500_000_000]}",
        f"At most {cuda_lines.MODULES_TOLD} modules and {cuda_lines.TEXTS_TOLD} kernels of each",
        f"the {cuda_lines.KERNELS_TOLD} most launched",
        f"ring_mib: {Capture().ring_mib} module_mib: {Capture().module_mib} "
        f"wait_ms: {Capture().wait_ms}",
        f"{PolicyWorkload.__struct_defaults__[-2]} is the default",
        "from Linux {}.{} on, and until {}.{}".format(*DANGEROUS[0], *DANGEROUS[1]),
        f'"schema": "{cuda_lines.CUDA_SCHEMA}", "version": {cuda_lines.CUDA_VERSION}',
    ],
)
def test_the_page_has_the_figures_of_the_code(text: str) -> None:
    assert text in FLAT
