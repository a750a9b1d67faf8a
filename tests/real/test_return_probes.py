"""A probe at a function's end must not end a program that may make few system calls."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuwarden.probes import return_probes
from tests.support import cuda_bed
from tests.support.idle import PATIENCE_SECONDS
from tests.support.packages import require, require_root
from tests.support.probes import ROOT
from tests.support.stopping import file_offset

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="no such system call there"),
]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    require_root()
    return_probes.danger.cache_clear()
    yield
    return_probes.danger.cache_clear()


STRICT = """
import ctypes, os, struct, sys
from gpuwarden.confinement import calls
driver = ctypes.CDLL(sys.argv[1])
default = int(sys.argv[2], 16)
allowed = [pair[0] for pair in calls.ALLOWED.values()] + [9, 10]
lines = [(0x20, 0, 0, 0)]
for number in allowed:
    lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("=HBBI", *line) for line in [*lines, (0x06, 0, 0, default)])
libc = ctypes.CDLL(None)
print("ready", flush=True)
sys.stdin.readline()
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.byref(calls._Program(len(code) // 8, code)), 0, 0) == 0
for _ in range(100):
    assert driver.cuInit(0) == 0
os.write(1, b"done")
os._exit(0)
"""


FIVE_BYTES_OF_NOTHING = """
.globl cuInit
.type cuInit, @function
cuInit: .byte 0x0f, 0x1f, 0x44, 0x00, 0x00
xor %eax, %eax
ret
.section .note.GNU-stack, "", @progbits
"""
"""From Linux 6.18 on a probe of such an instruction is a system call too."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose cuInit begins with an instruction that does nothing."""
    require("gcc")
    folder = tmp_path_factory.mktemp("quick")
    (folder / "quick.S").write_text(FIVE_BYTES_OF_NOTHING)
    argv = ["gcc", "-shared", "-o", str(folder / "quick.so"), str(folder / "quick.S")]
    subprocess.run(argv, check=True)
    return folder / "quick.so"


@pytest.mark.parametrize("default", ["80000000", "00050001", "00050026"])
@pytest.mark.parametrize("place", ["start", "after the prologue", "nothing", "nothing, entry"])
def test_programs_with_a_strict_filter_survive_probes(
    quick: Path, default: str, place: str
) -> None:
    if return_probes.danger():
        pytest.skip("this kernel's return probes are dangerous, and known to be")
    file = quick if place.startswith("nothing") else cuda_bed.bed().library()
    offset = file_offset(file, "cuInit") + 10 * (place == "after the prologue")
    argv = [sys.executable, "-c", STRICT, str(file), default]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        libc = ctypes.CDLL(None, use_errno=True)
        returns = not place.endswith("entry")
        event = return_probes._attached(libc, program.pid, str(file), offset, returns=returns)
        said, _ = program.communicate("go\n", timeout=20)
        hits = int.from_bytes(os.read(event, 8), "little")
        os.close(event)
    assert (said, program.returncode, hits) == ("done", 0, 100)


def test_the_trial_tells_a_program_that_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(return_probes, "_SECONDS", PATIENCE_SECONDS)
    assert return_probes._tried() is not None
    exit_group = (231).to_bytes(4, "little")
    deadly = return_probes._FILTER.replace((335).to_bytes(4, "little"), exit_group)
    monkeypatch.setattr(return_probes, "_FILTER", deadly)
    assert return_probes._tried() is True
    assert "seccomp" in return_probes.danger()


@pytest.mark.parametrize(
    ("release", "machine", "dangerous"),
    [
        ("6.10.14-generic", "x86_64", False),
        ("6.11.0-29-generic", "x86_64", True),
        ("6.13.2", "x86_64", True),
        ("6.14.0", "x86_64", False),
        ("5.15.0", "x86_64", False),
        ("6.12.9", "aarch64", False),
        ("unheard of", "x86_64", False),
    ],
)
def test_where_nothing_can_be_tried_the_version_says(
    monkeypatch: pytest.MonkeyPatch, release: str, machine: str, dangerous: bool
) -> None:
    monkeypatch.setattr(return_probes, "_PMU", "/nowhere")
    assert return_probes._tried() is None
    named = SimpleNamespace(release=release, machine=machine)
    monkeypatch.setattr(return_probes, "_tried", lambda: None)
    monkeypatch.setattr(os, "uname", lambda: named)
    assert bool(return_probes.danger()) == dangerous
