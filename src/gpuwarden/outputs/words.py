"""Words for a person: control characters escaped, sizes, times and ages short."""

from __future__ import annotations

import datetime
import unicodedata

MIB = 1 << 20
GIB = 1 << 30


def escape(text: str) -> str:
    """Control, format and bidirectional characters as visible escapes; nothing else changed."""
    out: list[str] = []
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            code = ord(character)
            named = {9: "\\t", 10: "\\n", 13: "\\r", 27: "\\e"}.get(code)
            out.append(named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"))
        else:
            out.append(character)
    return "".join(out)


def memory(size: int | None) -> str:
    """``12 MiB``, ``3.4 GiB``, or ``?`` when it is not known."""
    if size is None:
        return "?"
    if size < 10 * GIB // 10:
        return f"{size // MIB} MiB"
    return f"{size / GIB:.1f} GiB"


def percent(value: int | None) -> str:
    """``98%`` or ``?``."""
    return "?" if value is None else f"{value}%"


def moment(at_ns: int | None) -> str:
    """UTC to the second, ``2026-01-02 03:04:05Z``; ``unknown`` when it is not known."""
    if at_ns is None:
        return "unknown"
    try:
        at = datetime.datetime.fromtimestamp(at_ns / 1e9, tz=datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "unknown"
    return at.strftime("%Y-%m-%d %H:%M:%SZ")


def age(from_ns: int | None, to_ns: int) -> str:
    """``3 d 4 h``, ``12 min``, ``40 s``: two units at most."""
    if from_ns is None or from_ns > to_ns:
        return "unknown"
    seconds = (to_ns - from_ns) // 1_000_000_000
    days, rest = divmod(seconds, 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min"
    return f"{seconds} s"
