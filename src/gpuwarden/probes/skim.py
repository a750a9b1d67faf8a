"""The few fields of an open that tell whether it is one more of a kind: without copying the rest.

A flood is tens of thousands of records a second, of two kilobytes each and nearly all alike. Who
reads them may look at these fields first and leave the rest where it is; tests hold that to what
decoding every record gives.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from gpuwarden.probes import layouts
from gpuwarden.probes.events import HOWS, Denial, How

OVERLAY_ROOT = 1
DENIALS: tuple[Denial, ...] = ("", "denied", "would deny")

Skim = Callable[[int, int, int, int, int, int, int, int, int, int], bool]
"""Takes the values of ``FIELDS``; True when that is all there was to know of the record."""

_PROCESS = layouts.offset("open_record", "process")
_CODES = {"Q": 8, "I": 4}
FIELDS: tuple[tuple[str, str, int], ...] = tuple(
    sorted(
        (
            *(
                (name, code, layouts.offset("open_record", name))
                for name, code in (
                    ("time_ns", "Q"),
                    ("hits", "Q"),
                    ("major", "I"),
                    ("minor", "I"),
                    ("how", "I"),
                    ("denial", "I"),
                )
            ),
            *(
                (name, code, _PROCESS + layouts.offset("identity", name))
                for name, code in (
                    ("start_ns", "Q"),
                    ("exe_inode", "Q"),
                    ("tgid", "I"),
                    ("traits", "I"),
                )
            ),
        ),
        key=lambda field: field[2],
    )
)
"""Name, code of the struct module, offset in the record; in the order of ``Skim``'s parameters."""


def _format() -> str:
    parts, at = ["<"], 0
    for _, code, offset in FIELDS:
        if offset > at:
            parts.append(f"{offset - at}x")
        parts.append(code)
        at = offset + _CODES[code]
    return "".join(parts)


HEAD = struct.Struct(_format())
RECORD_BYTES = layouts.size("open_record")


def how_of(number: int) -> How:
    """A record's ``how`` as its event has it; ``other`` for a number that none has."""
    return HOWS[number] if number < len(HOWS) else "other"
