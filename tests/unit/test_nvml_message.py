"""What a child may say to its parent, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.model import Gap, Gpu, GpuClient, UtilisationSample
from gpuwarden.sensors.nvml.kernel import identify, parse_information
from gpuwarden.sensors.nvml.message import Message, encode, parse_message
from gpuwarden.sensors.pci import normalise_pci


def test_a_message_passes_unchanged() -> None:
    message = Message(
        driver_version="550",
        gpus=(Gpu(id="GPU-x", unread={"uuid": "why"}),),
        clients=(GpuClient(gpu_id="GPU-x", pid=5, kinds=("C",)),),
        done=True,
    )
    line = encode(message)
    assert line.count(b"\n") == 1
    assert parse_message(line) == message


@pytest.mark.parametrize(
    "message",
    [
        Message(gpus=(Gpu(id="x" * 10_000),)),
        Message(gpus=tuple(Gpu(id=str(n)) for n in range(1000))),
        Message(gpus=(Gpu(id="x", unread={"a": "x" * 10_000}),)),
        Message(gpus=(Gpu(id="x", unread={str(n): "" for n in range(1000)}),)),
        Message(clients=(GpuClient(gpu_id="x", pid=1),) * 20_000),
        Message(gaps=(Gap(sensor="s", what="w", reason="r"),) * 1000),
        Message(
            clients=(
                GpuClient(
                    gpu_id="x", pid=1, samples=(UtilisationSample(at_ns=1, sm_percent=1),) * 9000
                ),
            )
        ),
    ],
)
def test_more_than_a_driver_can_say_is_refused(message: Message) -> None:
    with pytest.raises(Malformed):
        parse_message(encode(message))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"gpus":[{"id":5}]}',
        b'{"clients":[{"gpu_id":"x","pid":"1"}]}',
        b'{"clients":[{"gpu_id":"x","pid":1,"kinds":["Z"]}]}',
        b"[" * 100_000,
        b'{"driver_version":"\xff"}',
        b'{"driver_version":"\\ud800"}',
    ],
)
def test_what_is_no_message_is_malformed(line: bytes) -> None:
    with pytest.raises(Malformed):
        parse_message(line)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for line in (data, b'{"gpus":[{"id":"' + data + b'"}]}'):
        try:
            parse_message(line)
        except Malformed:
            pass


@given(st.text(max_size=300))
def test_any_text_is_driver_information(text: str) -> None:
    found = parse_information("00000000:01:00.0", text)
    assert found.minor is None or found.minor >= 0
    normalise_pci(text)


def test_a_uuid_that_the_driver_could_not_read_is_none() -> None:
    text = "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 3\n"
    found = parse_information("00000000:01:00.0", text)
    assert (found.uuid, found.minor, found.name) == (None, 3, None)


def test_identities_are_not_guessed_when_the_counts_differ() -> None:
    lost = [Gpu(id="nvidia-index-0", error="lost"), Gpu(id="nvidia-index-1", error="lost")]
    known = [parse_information("00000000:01:00.0", "GPU UUID: GPU-x\n")]
    assert identify(lost, known) == (lost, [])


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        ("00000000:3B:00.0", "00000000:3b:00.0"),
        ("0000:3b:00.0", "00000000:3b:00.0"),
        ("PCI:3b", None),
        ("3b:00", "00000000:3b:00.0"),
        ("10000:e1:00.1", "00010000:e1:00.1"),
    ],
)
def test_pci_addresses_have_one_spelling(spelled: str, expected: str | None) -> None:
    assert normalise_pci(spelled) == expected
