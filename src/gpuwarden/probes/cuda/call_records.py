"""The records of cuda_calls.bpf.c, decoded; any bytes give a record or Malformed."""

from __future__ import annotations

from typing import NamedTuple

from gpuwarden.errors import Malformed
from gpuwarden.probes import layouts
from gpuwarden.probes.cuda.call_points import CALLS
from gpuwarden.probes.cuda.stopped import LAYOUTS as STOPPED
from gpuwarden.probes.decoder import Decoder
from gpuwarden.probes.events import ProcessIdentity

NAME_BYTES = 256
LAYOUTS: layouts.Layouts = {
    **STOPPED,
    **{name: layouts.LAYOUTS[name] for name in ("path_buffer", "cgroup_buffer", "identity")},
    "cuda_call": (
        ("time_ns", "Q"),
        ("begun_ns", "Q"),
        ("start_ns", "Q"),
        ("tgid", "I"),
        ("pid", "I"),
        ("record", "I"),
        ("function", "I"),
    ),
    "cuda_load": (
        ("call", "cuda_call"),
        ("address", "Q"),
        ("image", "Q"),
        ("image_bytes", "Q"),
        ("within_ns", "Q"),
        ("parts", "I"),
        ("input_kind", "I"),
        ("process", "identity"),
    ),
    "cuda_piece": (("call", "cuda_call"), ("offset", "Q"), ("length", "I"), ("of", "I")),
    "cuda_copied": (
        ("call", "cuda_call"),
        ("image", "Q"),
        ("image_bytes", "Q"),
        ("sent_bytes", "Q"),
        ("parts", "I"),
        ("missing", "I"),
        ("stop_asked", "I"),
        ("stop_outcome", "I"),
    ),
    "cuda_return": (
        ("call", "cuda_call"),
        ("handle", "Q"),
        ("result", "i"),
        ("reserved", "I"),
    ),
    "cuda_context": (
        ("call", "cuda_call"),
        ("handle", "Q"),
        ("device", "i"),
        ("result", "i"),
        ("process", "identity"),
    ),
    "cuda_name": (
        ("call", "cuda_call"),
        ("handle", "Q"),
        ("of", "Q"),
        ("name_length", "i"),
        ("reserved", "I"),
        ("name", f"{NAME_BYTES}s"),
    ),
    "call_settings": (
        ("limit_bytes", "Q"),
        ("wait_ns", "Q"),
        ("window_ns", "Q"),
        ("names_limit", "I"),
        ("contexts_limit", "I"),
        ("loads_limit", "I"),
        ("may_stop", "I"),
        ("returns", "I"),
        ("reserved", "I"),
    ),
}

LOAD, PIECE, COPIED, RETURN, CONTEXT, NAME = range(1, 7)
"""By ``enum call_record`` of cuda_records.h."""
CALL = layouts.packed("cuda_call", among=LAYOUTS)
SETTINGS = layouts.packed("call_settings", among=LAYOUTS)
_LOAD = layouts.packed("cuda_load", until="process", among=LAYOUTS)
_PIECE = layouts.packed("cuda_piece", among=LAYOUTS)
_COPIED = layouts.packed("cuda_copied", among=LAYOUTS)
_RETURN = layouts.packed("cuda_return", among=LAYOUTS)
_CONTEXT = layouts.packed("cuda_context", until="process", among=LAYOUTS)
_NAME = layouts.packed("cuda_name", among=LAYOUTS)
_LOAD_BYTES = layouts.size("cuda_load", among=LAYOUTS)
_CONTEXT_BYTES = layouts.size("cuda_context", among=LAYOUTS)
PIECE_BYTES = _PIECE.size
HEAD_BYTES = max(_LOAD_BYTES, _PIECE.size, _COPIED.size, _RETURN.size, _CONTEXT_BYTES, _NAME.size)
"""As much of a record as ``decode`` looks at: all but a piece's bytes."""
COUNTERS = ("loads", "contexts", "names", "dropped", "limited")
"""By their numbers in the kernel."""


class Call(NamedTuple):
    """What every record begins with; times are of the boot clock."""

    time_ns: int
    begun_ns: int
    """The load of this thread that the record is about; 0: none."""
    start_ns: int
    tgid: int
    pid: int
    record: int
    function: int

    @property
    def load(self) -> tuple[int, int]:
        """What tells a load from every other: its thread and when it began."""
        return self.pid, self.begun_ns

    @property
    def name(self) -> str:
        return CALLS[self.function].function


class LoadBegun(NamedTuple):
    """A load, before its bytes."""

    call: Call
    address: int
    image: int
    image_bytes: int
    within_ns: int
    parts: int
    input_kind: int
    process: ProcessIdentity


class Piece(NamedTuple):
    """Some bytes of an image or of a path; they follow the head of the record."""

    call: Call
    offset: int
    length: int
    of: int


class Copied(NamedTuple):
    """No more bytes come of a load."""

    call: Call
    image: int
    image_bytes: int
    sent_bytes: int
    parts: int
    missing: int
    stop_asked: int
    stop_outcome: int


class Returned(NamedTuple):
    """A load returned."""

    call: Call
    handle: int
    result: int


class ContextTold(NamedTuple):
    """A call about a context returned."""

    call: Call
    handle: int
    device: int
    result: int
    process: ProcessIdentity


class NameTold(NamedTuple):
    """A handle was given; the name is what the process asked for."""

    call: Call
    handle: int
    of: int
    name: bytes | None
    """None: it could not be read."""


Record = LoadBegun | Piece | Copied | Returned | ContextTold | NameTold


class CallDecoder:
    """Turns the heads of records into what they tell."""

    def __init__(self) -> None:
        self._identities = Decoder()

    def decode(self, head: bytes, size: int) -> Record:
        """Of a record of ``size`` bytes its first ``HEAD_BYTES``, or all. Errors: Malformed."""
        if len(head) < CALL.size or size < len(head):
            raise Malformed(f"a call in {len(head)} of {size} bytes")
        call = Call._make(CALL.unpack_from(head))
        wanted = {LOAD: _LOAD_BYTES, CONTEXT: _CONTEXT_BYTES}.get(call.record)
        plain = {PIECE: _PIECE, COPIED: _COPIED, RETURN: _RETURN, NAME: _NAME}.get(call.record)
        length = wanted or (plain.size if plain else 0)
        if not length or len(head) < length or (size != length and call.record != PIECE):
            raise Malformed(f"a record of kind {call.record} in {size} bytes")
        if call.function >= len(CALLS):
            raise Malformed(f"a call of function {call.function}, which none is")
        if plain is None:
            return self._with_process(call, head)
        values = plain.unpack_from(head)[len(call) :]
        if call.record == PIECE:
            piece = Piece(call, *values)
            if piece.length > size - PIECE_BYTES:
                raise Malformed(f"{piece.length} bytes in a record of {size}")
            return piece
        if call.record == COPIED:
            return Copied(call, *values)
        if call.record == RETURN:
            return Returned(call, *values[:2])
        handle, of, name_length, _, name = values
        return NameTold(call, handle, of, _name(name, name_length))

    def _with_process(self, call: Call, head: bytes) -> LoadBegun | ContextTold:
        layout = _LOAD if call.record == LOAD else _CONTEXT
        values = layout.unpack_from(head)[len(call) :]
        process, _ = self._identities.identity(head, layout.size)
        if call.record == LOAD:
            return LoadBegun._make((call, *values, process))
        return ContextTold._make((call, *values, process))


def _name(raw: bytes, length: int) -> bytes | None:
    if length < 0 or length > NAME_BYTES:
        return None
    return raw[: max(length - 1, 0)].partition(b"\0")[0]
