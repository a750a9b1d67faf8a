"""docs/harden.md and docs/slurm.md say what the code says: settings, flags, seconds."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from gpuwarden.harden import (
    host_containers,
    host_devices,
    host_kernel,
    host_own,
    slurm,
    slurm_check,
)
from gpuwarden.harden.flags import add_flags
from gpuwarden.harden.setting import About
from gpuwarden.harden.slurm_script import KILL_AFTER_SECONDS, OVERHEAD_SECONDS

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text().split())


def flags(site: str) -> set[str]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    (sites,) = (one.choices for one in parser._actions if one.dest == "site")
    assert isinstance(sites, dict)
    return set(sites[site]._option_string_actions)


def test_every_setting_is_in_the_table_and_nothing_else() -> None:
    modules = (host_containers, host_devices, host_kernel, host_own)
    known = {
        one.id for module in modules for one in vars(module).values() if isinstance(one, About)
    }
    rows = [line for line in (DOCS / "harden.md").read_text().splitlines() if line[:3] == "| `"]
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert named - {"open", "unknown", "sound", "absent"} == known


def test_every_flag_that_the_pages_name_is_there() -> None:
    of_others = {"--user"}
    for name, site in (("slurm.md", "slurm"), ("harden.md", "host")):
        named = set(re.findall(r"--[a-z][a-z-]+", page(name))) - of_others
        assert named <= flags(site), name


def test_the_seconds_of_the_page_are_those_of_the_code() -> None:
    text = page("slurm.md")
    longest, whole = slurm.LONGEST_SECONDS, slurm.LONGEST_SECONDS + OVERHEAD_SECONDS
    assert f"the deadline ({longest} s)" in text
    assert f"{KILL_AFTER_SECONDS} s later" in text
    assert f"| {whole} s | the longest" in text
    least = slurm.SHORTEST_SECONDS + OVERHEAD_SECONDS + slurm.MARGIN_SECONDS
    assert f"less than {least} s is refused" in text
    settle = slurm_check.SETTLE_SECONDS
    assert f"{settle['prolog']:g} s in a prolog and {settle['epilog']:g} s in an epilog" in text
