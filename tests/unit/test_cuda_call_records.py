"""Records of calls: any bytes give a record or Malformed; layouts, points, frames of the probes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.probes import btf, layouts
from gpuwarden.probes.cuda import call_points, call_records
from gpuwarden.probes.cuda.call_points import CALLS, CONTEXT, NAME, cookie, points
from gpuwarden.probes.cuda.call_records import (
    HEAD_BYTES,
    LAYOUTS,
    CallDecoder,
    ContextTold,
    Copied,
    LoadBegun,
    NameTold,
    Piece,
    Returned,
)
from gpuwarden.probes.cuda.calls import OBJECT
from gpuwarden.probes.cuda.functions import CONTEXTS, LOADS, NAMES_GIVEN, SLOTS
from gpuwarden.probes.cuda.launches import OBJECT as LAUNCHES
from gpuwarden.probes.cuda.library import EntryPoint
from tests.support.bpf_frames import FRAME_LIMIT_BYTES, frames
from tests.support.probes import build
from tests.support.records import identity, record

KINDS = {
    "cuda_load": call_records.LOAD,
    "cuda_piece": call_records.PIECE,
    "cuda_copied": call_records.COPIED,
    "cuda_return": call_records.RETURN,
    "cuda_context": call_records.CONTEXT,
    "cuda_name": call_records.NAME,
}


def call(name: str, **values: int) -> dict[str, int]:
    told = {"time_ns": 9, "begun_ns": 7, "start_ns": 5, "tgid": 100, "pid": 101, "function": 1}
    return {**told, "record": KINDS[name], **values}


def made(kind: str, /, **values: Any) -> bytes:
    return record(kind, among=LAYOUTS, **{"call": call(kind), **values})


def decoded(data: bytes) -> call_records.Record:
    return CallDecoder().decode(data[:HEAD_BYTES], len(data))


# -------------------------------------------------------------------- decoding


def test_every_record_in_full() -> None:
    load = decoded(
        made("cuda_load", image=64, image_bytes=12, within_ns=3, process=identity(comm=b"python3"))
    )
    assert isinstance(load, LoadBegun)
    assert (load.image, load.image_bytes, load.within_ns) == (64, 12, 3)
    assert (load.process.pid, load.process.comm, load.call.load) == (100, "python3", (101, 7))
    assert load.call.name == CALLS[1].function
    piece = decoded(made("cuda_piece", offset=4096, length=3) + b"abc12345")
    assert isinstance(piece, Piece) and (piece.offset, piece.length) == (4096, 3)
    copied = decoded(made("cuda_copied", sent_bytes=12, missing=1, stop_asked=1, stop_outcome=2))
    assert isinstance(copied, Copied)
    assert (copied.sent_bytes, copied.missing, copied.stop_outcome) == (12, 1, 2)
    returned = decoded(made("cuda_return", handle=1 << 63, result=-1))
    assert isinstance(returned, Returned) and (returned.handle, returned.result) == (1 << 63, -1)
    context = decoded(made("cuda_context", device=-1, result=101, process=identity()))
    assert isinstance(context, ContextTold) and (context.device, context.result) == (-1, 101)


@pytest.mark.parametrize(
    ("length", "name"),
    [(4, b"ger"), (0, b""), (1, b""), (256, b"gemm"), (-14, None), (257, None), (5, b"gemm")],
)
def test_names_as_long_as_they_are_said_to_be(length: int, name: bytes | None) -> None:
    text = b"gerade" if name == b"ger" else b"gemm"
    told = decoded(made("cuda_name", name_length=length, name=text))
    assert isinstance(told, NameTold) and told.name == name


@pytest.mark.parametrize(
    "data",
    [
        b"",
        made("cuda_return")[:-1],
        made("cuda_return") + bytes(8),
        made("cuda_return", call=call("cuda_return", record=7)),
        made("cuda_return", call=call("cuda_return", function=len(CALLS))),
        made("cuda_name", call=call("cuda_name", record=call_records.RETURN)),
        made("cuda_piece", length=1),
        made("cuda_piece", length=9) + bytes(8),
        made("cuda_load", process=identity(argv_read=513)),
    ],
)
def test_what_is_no_record(data: bytes) -> None:
    with pytest.raises(Malformed):
        decoded(data)


@given(st.binary(max_size=4096))
def test_any_bytes(data: bytes) -> None:
    try:
        decoded(data)
    except Malformed:
        pass


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_bytes_of_a_record_s_size(name: str, data: st.DataObject) -> None:
    size = layouts.size(name, among=LAYOUTS) - call_records.CALL.size
    head = data.draw(st.binary(min_size=call_records.CALL.size, max_size=call_records.CALL.size))
    at = layouts.offset("cuda_call", "record", among=LAYOUTS)
    fixed = head[:at] + struct.pack("<II", KINDS[name], data.draw(st.integers(0, 60)))
    try:
        decoded(fixed + data.draw(st.binary(min_size=size, max_size=size)))
    except Malformed:
        pass


# -------------------------------------------------------------------- what goes where


def test_every_function_that_is_watched_has_a_call() -> None:
    names = [each.function for each in CALLS]
    assert len(names) == len(set(names)) <= 256
    assert set(names) == {*CONTEXTS, *LOADS, *NAMES_GIVEN, *SLOTS}
    assert {each.function for each in CALLS if each.task == NAME} == set(NAMES_GIVEN)
    contexts = {each.function for each in CALLS if each.task == CONTEXT}
    assert contexts == {*CONTEXTS, "CUDART_INTERFACE[2]", "CTX_CREATE_BYPASS[1]"}
    assert all((each.context is not None) == (each.task == CONTEXT) for each in CALLS)


def test_cookies_have_every_position() -> None:
    for number, each in enumerate(CALLS):
        value = cookie(number)
        assert (value & 0xFF, value >> 8 & 0xFF) == (number, each.task)
        positions = [value >> bit & 7 for bit in (16, 20, 24, 28, 32)]
        assert positions == [each.out, each.subject, each.extra, each.device, each.input_kind]
        assert value < 1 << 36


def test_points_of_a_library() -> None:
    entries = {
        each.function: EntryPoint(100 + number, at_start=False) for number, each in enumerate(CALLS)
    }
    entries["cuCtxCreate"] = entries["cuCtxCreate_v2"]  # two names of one place
    entries["cuLaunchKernel"] = EntryPoint(1, at_start=False)
    by_program = {one.program: one for one in points(entries, sleeping=True, returns=True)}
    assert set(by_program) == {"loading", "calling", "linked", "returned"}
    begins = [*by_program["loading"].functions, *by_program["calling"].functions]
    assert len(begins) == len(set(begins)) == len(CALLS) - 1
    assert by_program["linked"].functions == ["cuLinkComplete"]
    assert sorted([*by_program["returned"].functions, "cuLinkComplete"]) == sorted(begins)
    assert all(
        one.returns == (one.program in ("linked", "returned")) for one in by_program.values()
    )
    without = points(entries, sleeping=False, returns=False)
    assert [one.program for one in without] == ["loading_told", "calling"]
    assert points({}, sleeping=True, returns=True) == []


# -------------------------------------------------------------------- the object


@pytest.fixture(scope="module")
def built() -> bytes:
    path = Path(OBJECT)
    if not path.exists():
        build()
    return path.read_bytes()


def test_the_object_has_the_same_layouts(built: bytes) -> None:
    layouts.check(btf.structures(built), among=LAYOUTS)


def test_a_difference_of_layouts_is_told(built: bytes) -> None:
    other = {**LAYOUTS, "cuda_return": LAYOUTS["cuda_return"][:-1]}
    with pytest.raises(Malformed, match="cuda_return"):
        layouts.check(btf.structures(built), among=other)


def test_no_function_has_much_on_its_stack(built: bytes) -> None:
    """Where one had, kernels from 6.13 on would let threads have each other's variables."""
    found = frames(Path(OBJECT))
    assert {"loading", "linked", "calling", "returned", "copy_image", "measure"} <= set(found)
    assert max(found.values()) > 8
    assert {name: size for name, size in found.items() if size > FRAME_LIMIT_BYTES} == {}


def test_no_function_that_counts_launches_has_either(built: bytes) -> None:
    found = frames(Path(LAUNCHES))
    assert {"launch_kernel", "launch_by_config", "launch_graph", "count_first"} <= set(found)
    assert {name: size for name, size in found.items() if size > FRAME_LIMIT_BYTES} == {}


def test_programs_are_those_that_the_object_has(built: bytes) -> None:
    programs = {"loading", "loading_told", "linked", "linked_told", "calling", "returned"}
    assert programs <= set(frames(Path(OBJECT)))
    used = {
        one.program
        for sleeping in (True, False)
        for one in call_points.points(
            {each.function: EntryPoint(n, at_start=False) for n, each in enumerate(CALLS)},
            sleeping=sleeping,
            returns=True,
        )
    }
    assert used == programs
