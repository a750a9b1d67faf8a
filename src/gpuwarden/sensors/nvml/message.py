"""What passes from the child to its parent: bounded, and not believed.

A scan's child writes lines of JSON; a lasting one writes frames of MessagePack, each after its
length in four bytes, which costs less every second. The child holds a library that may be hostile,
so the parent takes each for a claim of the right shape or refuses it.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gpuwarden.errors import Malformed
from gpuwarden.model import AccountedProcess, Gap, Gpu, GpuClient

TEXT_LIMIT = 512
DEVICES_LIMIT = 64
"""GPUs of a node, and so MIG devices of one GPU with the GPU itself."""
CLIENTS_LIMIT = 3 * 4096
ACCOUNTED_LIMIT = 4096
GAPS_LIMIT = 256
SAMPLES_LIMIT = 4096
LINE_LIMIT_BYTES = 16 << 20


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line or frame from the child: the greeting, one GPU's answer, or the end."""

    driver_version: str | None = None
    cuda_version: str | None = None
    gpu_count: int | None = None
    failed_code: int | None = None
    """NVML's code when it could not be used at all."""
    failed_load: str | None = None
    privileges_would_help: bool = False
    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    unlisted: tuple[GpuClient, ...] = ()
    """Listed in the round before and not in this one, with their samples since."""
    accounted: tuple[AccountedProcess, ...] | None = ()
    """None: not asked for this time."""
    gaps: tuple[Gap, ...] = ()
    done: bool = False


_DECODER = msgspec.json.Decoder(Message)
_ENCODER = msgspec.json.Encoder()
_FRAME_DECODER = msgspec.msgpack.Decoder(Message)
_FRAME_ENCODER = msgspec.msgpack.Encoder()
FRAME_LENGTH = struct.Struct("=I")


def encode(message: Message) -> bytes:
    """A message as one line."""
    return _ENCODER.encode(message) + b"\n"


def encode_frame(message: Message) -> bytes:
    """A message as one frame: its length, then itself."""
    body = _FRAME_ENCODER.encode(message)
    return FRAME_LENGTH.pack(len(body)) + body


def parse_message(line: bytes) -> Message:
    """The message in one line from the child. Errors: Malformed."""
    if len(line) > LINE_LIMIT_BYTES:
        raise Malformed("the NVML child's answer is longer than any real one")
    try:
        message = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"the NVML child's answer is damaged: {str(error)[:200]}") from error
    return _bounded(message)


def take_frame(pending: bytearray) -> Message | None:
    """The message in the first whole frame of ``pending``, which it leaves; None if there is none.

    Errors: Malformed.
    """
    if len(pending) < FRAME_LENGTH.size:
        return None
    (length,) = FRAME_LENGTH.unpack_from(pending)
    if length > LINE_LIMIT_BYTES:
        raise Malformed("the NVML child's answer is longer than any real one")
    end = FRAME_LENGTH.size + length
    if len(pending) < end:
        return None
    body = bytes(memoryview(pending)[FRAME_LENGTH.size : end])
    del pending[:end]
    try:
        message = _FRAME_DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"the NVML child's answer is damaged: {str(error)[:200]}") from error
    return _bounded(message)


def _bounded(message: Message) -> Message:
    bounds = (
        (message.gpus, DEVICES_LIMIT),
        (message.clients, CLIENTS_LIMIT),
        (message.unlisted, CLIENTS_LIMIT),
        (message.accounted or (), ACCOUNTED_LIMIT),
        (message.gaps, GAPS_LIMIT),
    )
    if any(len(facts) > limit for facts, limit in bounds):
        raise Malformed("the NVML child's answer lists more than any GPU can have")
    if any(len(c.samples) > SAMPLES_LIMIT for c in (*message.clients, *message.unlisted)):
        raise Malformed("the NVML child's answer has more samples than a driver keeps")
    for facts in ((message,), message.gpus, message.clients, message.unlisted):
        _check_texts(facts)
    _check_texts(message.accounted or ())
    _check_texts(message.gaps)
    return message


def _check_texts(structs: Sequence[msgspec.Struct]) -> None:
    if not structs:
        return
    texts_of = _text_fields(type(structs[0]))
    checked: set[str] = set()
    for each in structs:
        for value in texts_of(each):
            if not value:
                continue
            if isinstance(value, dict):
                _check_reasons(value)
            elif isinstance(value, str) and value not in checked:
                # Most say the same: the GPU that they are on, the source.
                if len(value) > TEXT_LIMIT:
                    raise Malformed("the NVML child's answer has a text that is too long")
                checked.add(value)


def _check_reasons(reasons: Mapping[str, object]) -> None:
    if len(reasons) > 64:
        raise Malformed("the NVML child's answer has too many reasons")
    if any(len(t) > TEXT_LIMIT for item in reasons.items() for t in item if isinstance(t, str)):
        raise Malformed("the NVML child's answer has a text that is too long")


@functools.cache
def _text_fields(kind: type[msgspec.Struct]) -> Callable[[msgspec.Struct], tuple[object, ...]]:
    """Gives the fields that hold, or may hold, a text or a mapping."""
    numbers = (int, float, bool, int | None, float | None, bool | None)
    names = [f.name for f in msgspec.structs.fields(kind) if f.type not in numbers]
    # With one name alone it would give no tuple.
    return operator.attrgetter(*names, names[0]) if names else lambda each: ()
