"""What a comparison found, as a person says it."""

from __future__ import annotations

from collections.abc import Sequence

NAME_TOLD = 80
DIGEST_TOLD = 12
NAMES_TOLD = 4


def kernel_name(name: str, digest: str = "") -> str:
    """A kernel by its name, cut to what a line holds, and the module that it is from."""
    cut = f"{name[:NAME_TOLD]}…" if len(name) > NAME_TOLD else name
    return f"{cut} (from module {digest[:DIGEST_TOLD]}…)" if digest else cut


def names(all_names: Sequence[str]) -> str:
    """The first few, and how many more."""
    told = ", ".join(kernel_name(name) for name in all_names[:NAMES_TOLD])
    more = len(all_names) - NAMES_TOLD
    return f"{told} and {more} more" if more > 0 else told


def percent(share: float) -> str:
    """``31%``; below one, with a digit more: ``0.3%``, ``under 0.1%``."""
    if share < 0.001:
        return "under 0.1%"
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def duration(seconds: float) -> str:
    """``0.35 ms``, ``40 ms``, ``1.3 s``, two digits of it."""
    if seconds < 0.9995:
        return f"{float(f'{seconds * 1e3:.2g}'):g} ms"
    return f"{float(f'{seconds:.2g}'):g} s"


def rate(hz: float) -> str:
    """``25 times a second``; slower, ``every 3 s``."""
    if hz < 1:
        return f"every {duration(1 / hz)}" if hz > 0 else "seldom"
    return f"{float(f'{hz:.2g}'):g} times a second"
