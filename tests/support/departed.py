"""Whether a child process has ended, and which children there are."""

from __future__ import annotations

import os
import time
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Waits until a process has gone or is a zombie that is not ours; False after 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z" and pid not in children():
            return True
        time.sleep(0.01)
    return False


def children() -> set[int]:
    """Our own children, zombies among them."""
    return {
        int(p) for p in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    }
