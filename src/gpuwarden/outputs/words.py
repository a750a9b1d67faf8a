"""Words for a person: control characters escaped, sizes, times and ages short."""

from __future__ import annotations

import datetime
import re
import unicodedata
from typing import Any

import msgspec

from gpuwarden.pattern import pattern

MIB = 1 << 20
GIB = 1 << 30


UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Categories of characters that act on a terminal or do not show; Unicode's own names."""
_NOT_ASCII = pattern(r"[^\n\x20-\x7e]")


def escape(text: str) -> str:
    """Control, format and bidirectional characters as visible escapes; nothing else changed."""
    if text.isprintable():
        return text
    out: list[str] = []
    for character in text:
        if unicodedata.category(character) in UNSEEN:
            code = ord(character)
            named = {9: "\\t", 10: "\\n", 13: "\\r", 27: "\\e"}.get(code)
            out.append(named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"))
        else:
            out.append(character)
    return "".join(out)


def json_text(document: Any) -> str:
    """Indented JSON, ending in a newline; what acts on a terminal stands in it as JSON escapes."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    return _NOT_ASCII.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    character = found[0]
    if unicodedata.category(character) not in UNSEEN:
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


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
