"""The lines that pass from the child to its parent: JSON, bounded, and not believed.

The child holds a library that may be hostile, so the parent takes each line for a claim of the
right shape or refuses it.
"""

from __future__ import annotations

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
    """One line from the child: the greeting, one GPU's answer, or the end."""

    driver_version: str | None = None
    cuda_version: str | None = None
    gpu_count: int | None = None
    failed_code: int | None = None
    """NVML's code when it could not be used at all."""
    failed_load: str | None = None
    privileges_would_help: bool = False
    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    accounted: tuple[AccountedProcess, ...] = ()
    gaps: tuple[Gap, ...] = ()
    done: bool = False


_DECODER = msgspec.json.Decoder(Message)
_ENCODER = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """A message as one line."""
    return _ENCODER.encode(message) + b"\n"


def parse_message(line: bytes) -> Message:
    """The message in one line from the child. Errors: Malformed."""
    if len(line) > LINE_LIMIT_BYTES:
        raise Malformed("the NVML child's answer is longer than any real one")
    try:
        message = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"the NVML child's answer is damaged: {str(error)[:200]}") from error
    bounds = (
        (message.gpus, DEVICES_LIMIT),
        (message.clients, CLIENTS_LIMIT),
        (message.accounted, ACCOUNTED_LIMIT),
        (message.gaps, GAPS_LIMIT),
    )
    if any(len(facts) > limit for facts, limit in bounds):
        raise Malformed("the NVML child's answer lists more than any GPU can have")
    if any(len(client.samples) > SAMPLES_LIMIT for client in message.clients):
        raise Malformed("the NVML child's answer has more samples than a driver keeps")
    if any(len(text) > TEXT_LIMIT for text in _texts(message)):
        raise Malformed("the NVML child's answer has a text that is too long")
    return message


def _texts(message: Message) -> list[str]:
    structs: tuple[msgspec.Struct, ...] = (
        message,
        *message.gpus,
        *message.clients,
        *message.accounted,
        *message.gaps,
    )
    found: list[str] = []
    for struct in structs:
        for field in struct.__struct_fields__:
            value = getattr(struct, field)
            if isinstance(value, str):
                found.append(value)
            elif isinstance(value, dict):
                if len(value) > 64:
                    raise Malformed("the NVML child's answer has too many reasons")
                found += [text for item in value.items() for text in item if isinstance(text, str)]
    return found
