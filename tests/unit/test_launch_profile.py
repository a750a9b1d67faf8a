"""The file of a launch profile: what was written is read, and any bytes are a profile or none."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.cuda.launches.comparison import Comparison
from gpuwarden.cuda.launches.merging import merge
from gpuwarden.cuda.launches.profile import (
    FILE_LIMIT_BYTES,
    LaunchProfile,
    Period,
    Phase,
    ProfiledKernel,
    encode_profile,
    parse_profile,
    read_profile,
    write_profile,
)
from gpuwarden.errors import Denied, Malformed, Unavailable, UsageError
from gpuwarden.model import KernelUse, LaunchSample
from tests.support.launch_learning import profile, training, window_of

SMALL = LaunchProfile(
    name="small",
    workload="training",
    kernels=(
        ProfiledKernel(name="gemm", digests=("ab" * 32,), launches=90, usual=0.9, most=0.95),
        ProfiledKernel(name="triton_add_#", jit=True, launches=10, usual=0.1, most=0.2),
    ),
    transitions=((0, 0, 80), (0, 1, 10), (1, 0, 10)),
    phases=(Phase(shares=((0, 0.9), (1, 0.1))),),
    periods=(Period(seconds=0.13, strength=0.8),),
    launches=100,
    windows=10,
)
DOCUMENT: dict[str, Any] = json.loads(encode_profile(SMALL))


def test_what_was_learned_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "train.launches")
    write_profile(path, profile())
    assert read_profile(path) == profile()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644
    assert os.listdir(tmp_path) == ["train.launches"]
    assert encode_profile(parse_profile(encode_profile(profile()))) == encode_profile(profile())


def test_names_that_processes_make_up_are_kept_readable() -> None:
    kernel = ProfiledKernel(name='x"\n\x00\x1b[2J🦀', usual=0.0)
    hostile = replace(SMALL, kernels=(kernel,), transitions=(), phases=())
    assert parse_profile(encode_profile(hostile)) == hostile


def test_how_often_one_follows_another() -> None:
    assert SMALL.probability(0, 1) == pytest.approx(10 / 90)
    assert SMALL.probability(1, 0) == 1.0
    assert SMALL.probability(1, 1) == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "other"}, "$.schema"),
        ({"version": 2}, "$.version 2"),
        ({"kernels": [{"name": ""}]}, "$.kernels[0].name"),
        ({"kernels": [{"name": "a"}, {"name": "a"}]}, "$.kernels[1] is there twice"),
        ({"kernels": [{"name": "a", "usual": 0.5}], "transitions": [], "phases": []}, "in order"),
        ({"transitions": [[0, 2, 1]]}, "$.transitions[0]"),
        ({"transitions": [[0, 1, 1], [0, 0, 1]]}, "$.transitions[1]"),
        ({"phases": [{"shares": [[7, 0.5]]}]}, "$.phases[0]"),
        ({"phases": [{"shares": [[0, 0.5], [0, 0.5]]}]}, "one twice"),
        ({"phases": [{"shares": [[0, 1.5]]}]}, "$.phases[0].shares[0]"),
        ({"span_seconds": 0}, "$.span_seconds"),
        ({"more": 1}, "more"),
        ({"kernels": [{"name": "a", "digests": ["zz"]}]}, "$.kernels[0].digests[0]"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Malformed) as raised:
        parse_profile(json.dumps({**DOCUMENT, **change}).encode())
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'{"name":"\\ud800"}']
)
def test_no_profile(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_profile(data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        read_profile(str(tmp_path / "none"))
    with pytest.raises(Malformed):
        read_profile(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Malformed):
        read_profile(str(tmp_path / "pipe"))
    long = tmp_path / "long"
    with open(long, "wb") as file:
        file.truncate(FILE_LIMIT_BYTES + 1)
    with pytest.raises(Malformed, match="at most"):
        read_profile(str(long))
    with pytest.raises(Denied):
        write_profile(str(tmp_path / "nowhere" / "file"), SMALL)


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_profile(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.data())
def test_any_damage_gives_a_profile_that_compares_or_none(data: st.DataObject) -> None:
    document = json.loads(encode_profile(SMALL))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(JSON | st.sampled_from([0, 1, -1, 1e308, 1 << 60, 0.5, "a", []]))
            break
    try:
        found = parse_profile(json.dumps(document).encode())
    except Malformed:
        return
    comparison = Comparison(found)
    uses = (KernelUse(name="gemm", launches=70), KernelUse(name="triton_add_3", launches=50))
    samples = tuple(LaunchSample(n * 1000, n % 2, 1, 1) for n in range(20))
    for second in range(8):
        comparison.add(window_of(uses, second, samples=samples), frozenset())
    assert merge([found, found]).kernels is not None


def test_merging_has_what_any_has() -> None:
    other = replace(
        SMALL,
        kernels=(
            ProfiledKernel(name="softmax", digests=("cd" * 32,), launches=50, usual=0.5, most=0.5),
            ProfiledKernel(name="gemm", digests=("ef" * 32,), launches=50, usual=0.5, most=0.6),
        ),
        transitions=((0, 1, 50), (1, 0, 50)),
        phases=(Phase(shares=((0, 0.5), (1, 0.5))),),
        periods=(Period(seconds=0.131, strength=0.5), Period(seconds=2.0, strength=0.4)),
        phase_distance=0.04,
        created=7,
    )
    both = merge([SMALL, other])
    assert [(k.name, k.jit, k.launches) for k in both.kernels] == [
        ("gemm", False, 140), ("softmax", False, 50), ("triton_add_#", True, 10),
    ]  # fmt: skip
    assert both.kernels[0].digests == ("ab" * 32, "ef" * 32)
    assert (both.kernels[0].most, both.kernels[1].least) == (0.95, 0.0)
    assert both.transitions == ((0, 0, 80), (0, 1, 50), (0, 2, 10), (1, 0, 50), (2, 0, 10))
    assert len(both.phases) == 2
    assert [period.seconds for period in both.periods] == [0.13, 2.0]
    assert (both.runs, both.launches, both.created, both.phase_distance) == (2, 200, 7, 0.04)
    assert parse_profile(encode_profile(both)) == both
    assert merge([SMALL]) is SMALL
    for wrong in ([], [SMALL, replace(SMALL, workload="serving")]):
        with pytest.raises(UsageError):
            merge(wrong)


def test_a_merged_profile_of_one_workload_explains_each_of_its_runs() -> None:
    merged = merge([profile(), profile()])
    assert {k.name for k in merged.kernels} == {k.name for k in profile().kernels}
    assert len(merged.transitions) == len(profile().transitions)
    assert training().digests >= {d for k in merged.kernels for d in k.digests}
