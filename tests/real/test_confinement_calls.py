"""The numbers of system calls, against the kernel's own headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuwarden.confinement import calls
from tests.support.packages import require

pytestmark = pytest.mark.real

HEADERS = {
    "x86_64": ("x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+) (\d+)$"),
    "aarch64": ("asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+) (\d+)$"),
}


@pytest.mark.parametrize("machine", calls.MACHINES)
def test_numbers_are_the_kernel_s(machine: str) -> None:
    require("linux-libc-dev")
    path, shape = HEADERS[machine]
    header = Path("/usr/include") / path
    if not header.exists():
        pytest.skip(f"{header} is on {machine} only")
    numbers = {name: int(number) for name, number in re.findall(shape, header.read_text(), re.M)}
    which = calls.MACHINES.index(machine)
    named = {**calls.ALLOWED, **calls.MAPPING}
    named |= {"clone": calls.CLONE, "clone3": calls.CLONE3, "fcntl": calls.FCNTL}
    for name, pair in named.items():
        assert pair[which] == numbers.get(name), name
