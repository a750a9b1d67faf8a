"""A machine where one single look fails, as it does when a process ends between two reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuwarden.host import Host

LOOKS = (
    "read_bytes",
    "read_short",
    "read_text",
    "read_at",
    "read_link",
    "names",
    "pids",
    "kernel_pids",
    "open_files",
    "shared_mappings",
    "status",
    "link_target_status",
)


def failing(
    host: Host, error: Exception, at: int, *, under: str = "/"
) -> tuple[Host, Callable[[], int]]:
    """``host`` itself, whose ``at``-th look (from 0) at a path under ``under`` raises ``error``.

    Also a function that tells how many such looks there were.
    """
    looks = [0]

    def wrap(name: str) -> None:
        real: Callable[..., Any] = getattr(host, name)

        def look(*args: Any, **kwargs: Any) -> Any:
            path = args[0] if args else "/proc"
            if isinstance(path, int):
                path = f"/proc/{path}/maps"
            if f"{path}/".startswith(under):
                looks[0] += 1
                if looks[0] == at + 1:
                    raise error
            return real(*args, **kwargs)

        setattr(host, name, look)

    for name in LOOKS:
        wrap(name)
    return host, lambda: looks[0]
