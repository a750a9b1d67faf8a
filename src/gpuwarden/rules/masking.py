"""Accounts and other long tokens as they may be shown: never whole."""

from __future__ import annotations

from gpuwarden.pattern import pattern

MAX_SHOWN = 120

_RUN = pattern(r"[0-9A-Za-z]{20,}")


def masked(text: str) -> str:
    """An account or password as it may be shown: the first 6 and last 4 characters."""
    if len(text) > 12:
        return f"{shown(text[:6])}…{shown(text[-4:])}"
    return text if len(text) <= 4 else f"{text[:2]}…"


def shown(text: str) -> str:
    """Text for a reason: at most 120 characters, runs of 20 letters and digits masked."""
    return _RUN.sub(lambda run: f"{run[0][:6]}…{run[0][-4:]}", text[:MAX_SHOWN])
