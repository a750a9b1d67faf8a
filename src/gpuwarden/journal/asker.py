"""Who asked: what the kernel keeps of the login, and what sudo says."""

from __future__ import annotations

import os
from typing import Literal

from gpuwarden.journal.entry import Who, bounded_text

NO_LOGIN = 0xFFFFFFFF
NAME_LIMIT = 64


def asker(by: Literal["command", "watch"] = "command") -> Who:
    """Who this process works for. SUDO_USER is set by whoever starts us: a claim."""
    return Who(
        by=by,
        uid=os.getuid(),
        loginuid=_loginuid(),
        sudo_user=bounded_text(os.environ.get("SUDO_USER", ""), NAME_LIMIT),
    )


def boot_id() -> str:
    """The kernel's name for this boot; empty when it cannot be read."""
    return _short("/proc/sys/kernel/random/boot_id")


def _loginuid() -> int | None:
    text = _short("/proc/self/loginuid")
    if not text.isascii() or not text.isdecimal() or int(text) == NO_LOGIN:
        return None
    return int(text)


def _short(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(64).decode("ascii", "replace").strip()
    except OSError:
        return ""
