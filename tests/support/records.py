"""Records of the probe as the kernel writes them, for tests."""

from __future__ import annotations

import struct
from typing import Any

from gpuwarden.probes import layouts


def record(name: str, /, *, among: layouts.Layouts = layouts.LAYOUTS, **values: Any) -> bytes:
    """A record of a layout; members that are not given are zero."""
    parts = []
    for member, code in among[name]:
        if code in among:
            parts.append(record(code, among=among, **values.pop(member, {})))
        else:
            empty: Any = b"" if code.endswith("s") else 0
            parts.append(struct.pack("<" + code, values.pop(member, empty)))
    assert not values, values
    return b"".join(parts)


def identity(**values: Any) -> dict[str, Any]:
    return {"start_ns": 7_000_000_000, "tgid": 100, "pid": 101, "exe_inode": 5, **values}


def text(value: bytes) -> dict[str, Any]:
    return {"length": len(value), "text": value}
