"""Every image of public libraries is what cuobjdump extracts, and what it misses is accounted for.

Wheels come by pip to ``build/corpus``; a library lies unpacked only while it is compared. Where the
cuobjdump of the test environment gives up, an older one takes its place: the one inside a wheel of
Triton. The table goes to ``build/corpus/report.txt``.
"""

from __future__ import annotations

import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gpuwarden.code.examine import examine
from gpuwarden.code.module import Module, Place, Problem
from tests.support.cuobjdump import CUOBJDUMP, Extracted, extracted, plain_count
from tests.support.public_wheels import CORPUS, programs, wheel_of

REPORT = CORPUS / "report.txt"
LIBRARIES = [
    line
    for line in Path(__file__).with_name("libraries.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
OLDER_CUOBJDUMP = ("triton==3.1.0", "triton/backends/nvidia/bin/cuobjdump")
COLUMNS = "{:33} {:43} {:>8} {:>8} {:>8} {:>8} {:>9}  {}"
HEADINGS = ("package", "file", "modules", "equal", "missed", "unlike", "problems", "cuobjdump")


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[list[str]]:
    """The table's lines."""
    lines = [COLUMNS.format(*HEADINGS)]
    yield lines
    REPORT.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_image_is_what_cuobjdump_extracts(library: str, report: list[str]) -> None:
    assert sum([_compare(library, file, report) for file in programs(library)])


def _compare(library: str, file: Path, report: list[str]) -> bool:
    """Whether there were modules to compare."""
    data = file.read_bytes()
    modules, problems = _ours(data)
    theirs, by = _theirs(file)
    if not modules and not problems and not theirs.modules:
        return False
    ours: Counter[tuple[str, str]] = Counter((each.kind, each.digest) for each in modules)
    in_sections: Counter[tuple[str, str]] = Counter(
        (each.kind, each.digest)
        for each in modules
        if each.place.found_by == "section" and each.kind in ("cubin", "ptx")
    )
    extracts: Counter[tuple[str, str]] = Counter(
        {("cubin", digest): count for digest, count in theirs.cubins.items()}
    )
    extracts += Counter({("ptx", digest): count for digest, count in theirs.ptx.items()})
    unlike = extracts - ours
    missed = ours - extracts
    counts = (len(modules), (ours & extracts).total(), missed.total(), unlike.total())
    report.append(COLUMNS.format(library, file.name, *counts, len(problems), by))
    assert problems == [], file.name
    assert not unlike, f"{file.name}: {unlike.total()} images are not as cuobjdump extracts them"
    if not theirs.failure:
        assert in_sections == extracts, file.name
    # What it missed: as many as a plain count finds, and each readable to its end.
    kinds = Counter(each.kind for each in modules)
    plain = plain_count(data)
    texts = ("ptx", "amdgpu")
    assert {kind: n for kind, n in kinds.items() if kind not in texts} == {
        kind: n for kind, n in plain.items() if kind not in texts
    }, file.name
    assert kinds["ptx"] >= plain["ptx"], file.name
    assert [each for each in modules if each.broken] == [], file.name
    return True


def _ours(data: bytes) -> tuple[list[Module], list[Problem]]:
    modules, problems = [], []
    for each in examine(data, Place(target="library")):
        if isinstance(each, Problem):
            problems.append(each)
        else:
            modules.append(each.module)
    return modules, problems


def _theirs(file: Path) -> tuple[Extracted, str]:
    """By the cuobjdump that gets furthest, and which one that is."""
    newest = extracted(file, scratch=CORPUS)
    if not newest.failure:
        return newest, _version(CUOBJDUMP)
    older = extracted(file, _older_cuobjdump(), scratch=CORPUS)
    tools = f"{_version(CUOBJDUMP)}: {newest.failure}"
    if older.failure:
        tools = f"{tools}; {_version(_older_cuobjdump())}: {older.failure}"
        return max(newest, older, key=lambda each: each.modules), tools
    return older, f"{_version(_older_cuobjdump())}, for {tools}"


@cache
def _version(tool: Path) -> str:
    told = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return told.partition(", V")[2].split()[0]


@cache
def _older_cuobjdump() -> Path:
    requirement, member = OLDER_CUOBJDUMP
    with zipfile.ZipFile(wheel_of(requirement)) as wheel:
        tool = Path(wheel.extract(member, CORPUS / "tools"))
    tool.chmod(0o755)
    return tool
