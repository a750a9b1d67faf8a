"""The few fields of an open that tell whether it is one more of a kind: without copying the rest.

A flood is tens of thousands of records a second, of two kilobytes each and nearly all alike. Who
reads them may look at these fields first and leave the rest where it is; tests hold that to what
decoding every record gives.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from gpuwarden.probes import layouts
from gpuwarden.probes.events import Denial

OVERLAY_ROOT = 1
DENIALS: tuple[Denial, ...] = ("", "denied", "would deny")

Skim = Callable[[tuple[int, ...], bytes], bool]
"""Takes the values of ``FIELDS`` and the path's bytes; True when there was no more to know."""

_PROCESS = layouts.offset("open_record", "process")
_CODES = {"Q": 8, "I": 4, "i": 4}
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
                    ("path_length", "i"),
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
"""Name, code of the struct module, offset in the record; in the order in which they lie there."""


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
PATH_AT = layouts.offset("open_record", "path")


def path_of(path: bytes, length: int) -> str | None:
    """The path as its event has it; None where the record has none."""
    if length <= 0:
        return None
    return path.partition(b"\0")[0].decode("utf-8", "backslashreplace")
