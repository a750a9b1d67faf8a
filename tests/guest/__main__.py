"""Builds the guest, boots it without and with systemd, and ends as its checks did.

    python -m tests.guest [small|systemd …]

Needs root on Debian or Ubuntu, x86-64: what is missing comes by apt. Nothing runs outside the
emulator, which has no network. Everything that is made lies in build/guest.
"""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.guest import image, kernel, machine
from tests.support.packages import require, require_root

PACKAGES = "qemu-system-x86 busybox-static systemd gcc libc6-dev clang llvm libbpf-dev libbpf1 zstd"


def main(guests: list[str]) -> int:
    begun = time.monotonic()
    if os.uname().machine != "x86_64":
        print("The guest is for x86-64.", file=sys.stderr)
        return 2
    try:
        require_root()
        require(*PACKAGES.split())
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        print(error.msg, file=sys.stderr)
        return 2
    work = image.ROOT / "build/guest"
    work.mkdir(parents=True, exist_ok=True)
    used = kernel.fetched(work)
    archive = image.build(used, work)
    size = archive.stat().st_size / 1e6
    print(f"# {used.name}, {size:.0f} MB, made in {time.monotonic() - begun:.1f} s")
    results = [machine.boot(guest, used.image, archive, work) for guest in guests]
    for result in results:
        print(f"# {result}")
    print(f"# {time.monotonic() - begun:.1f} s in all")
    return 0 if all(result.is_good for result in results) else 1


sys.exit(main(sys.argv[1:] or list(machine.GUESTS)))
