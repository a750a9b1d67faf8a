"""The table of ways against the C sources it names; what the sources and this program share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gpuwarden.probes import choose, loader, loading, tables, ways
from gpuwarden.probes.choose import Choice, Refusal
from gpuwarden.probes.events import HOWS, TOOLS, Source
from gpuwarden.probes.settings import Counters
from gpuwarden.probes.ways import Way

FOLDER = Path(loader.FOLDER)
SHARED = "".join(path.read_text() for path in sorted(FOLDER.glob("*.h")))
EVERY_WAY = [ways.BY_NAME[name] for name in loader.WAYS]


def source(way: Way) -> str:
    return (FOLDER / way.object_name).with_suffix(".c").read_text()


def sections(text: str) -> dict[str, str]:
    """Program → the section that says what it is attached to."""
    return {name: where for where, name in re.findall(r'SEC\("\?(\S+?)"\)\nint (\w+)\(', text)}


def test_the_order_is_the_one_promised() -> None:
    assert loader.WAYS == ("cgroup/dev", "lsm", "fmod_ret", "fentry", "kprobe", "tracepoint")
    assert set(loader.WAYS) < set(get_args(Source))


@pytest.mark.parametrize("way", EVERY_WAY, ids=loader.WAYS)
def test_each_hook_is_a_program_of_that_kind(way: Way) -> None:
    programs = sections(source(way))
    for hook in {name for hooks in way.hooks for name in hooks}:
        assert programs[hook].startswith(way.name)
    made = any("mknod" in programs[name] for name in way.hooks[0])
    assert way.sees_mknod == (made or way.name == "cgroup/dev")


def test_every_program_of_the_objects_is_used() -> None:
    used = {name for way in EVERY_WAY for hooks in way.hooks for name in hooks}
    used |= {*loading._LIFE, loading._RETURNS, loading._GROUPS, loading._HOLDERS}
    objects = {way.object_name: source(way) for way in EVERY_WAY}
    assert set(sections(SHARED + "".join(objects.values()))) == used


@pytest.mark.parametrize("way", EVERY_WAY, ids=loader.WAYS)
def test_a_way_says_what_it_cannot_do(way: Way) -> None:
    assert way.can_deny != ("cannot deny" in way.limits)
    assert way.sees_mknod != ("no mknod" in way.limits)
    assert bool(way.limits) != (way.name == "cgroup/dev")


def test_the_tools_are_the_same_in_both_languages() -> None:
    assert sorted(re.findall(r'BEGINS\(name, "(\S+)"\)', SHARED)) == sorted(TOOLS)


def test_the_counters_are_the_same_in_both_languages() -> None:
    records = (FOLDER / "records.h").read_text()
    (listed,) = re.findall(r"enum counter \{([^}]*)\}", records)
    names = [name.removeprefix("COUNT_").lower() for name in re.findall(r"COUNT_\w+", listed)]
    assert tuple(names) == tables.COUNTERS
    assert {*names, "malformed"} == set(Counters.__struct_fields__)


def test_the_kinds_of_use_are_the_same_in_both_languages() -> None:
    (listed,) = re.findall(r"enum how \{([^}]*)\}", SHARED)
    names = [name.removeprefix("HOW_").lower() for name in re.findall(r"HOW_\w+", listed)]
    assert [*names[:-1], "open"] == list(HOWS) and names[-1] == "io_uring"


def test_null_is_refused_by_the_program_itself() -> None:
    (body,) = re.findall(r"bool is_watched\(.*?\n\}", SHARED, re.DOTALL)
    assert "if (major == 1 && minor == 3)\n\t\treturn false;" in body


def test_a_choice_in_words_tells_its_limits_and_every_refusal() -> None:
    choice = Choice(
        way="eBPF (tracepoint)",
        source="tracepoint",
        limits="sees little",
        refused=(Refusal("eBPF (lsm)", "not active"), Refusal("eBPF (kprobe)", "no kprobes")),
    )
    assert str(choice) == (
        "device opens are seen by eBPF (tracepoint) (sees little); not by eBPF (lsm): not active; "
        "not by eBPF (kprobe): no kprobes"
    )
    assert not choice.can_deny and choose.POLL == "proc poll"
