"""Slurm's GRES strings, host lists and gres.conf, and how an IDX becomes a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.expected.slurm.gres import (
    HOSTLIST_LIMIT,
    Gres,
    GresDevice,
    GresLayout,
    expand_hostlist,
    gpu_references,
    host_position,
    parse_gres,
    parse_gres_conf,
    parse_indices,
)
from gpuwarden.model import Gpu

FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
CASES = Path(__file__).parents[3] / "shared" / "cases"
SHAPES = [
    tuple(part.strip() for part in line.split("=>"))
    for line in (FIXTURES / "gres-shapes.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
# e12, line by line: the GPU indices that are written, () for "none", None for "not written".
E12: list[tuple[tuple[int, ...] | None, ...]] = [
    ((), (5,), (0, 1)),
    ((0, 1),),
    ((0,),),
    ((0,), (0, 1)),
    (None,),
    (None,),
    ((1, 3),),
    ((),),
    ((),),
    ((0, 1, 2, 3, 4, 6, 7),),
    ((3, 5),),
    ((0,),),
    ((0,),),
    ((),),
    ((0,), ()),
    (None,),
    (None,),
    ((0,),),
    (None,),
    (None,),
]
WHOLE = (Gpu(id="GPU-a", uuid="GPU-a", index=0), Gpu(id="GPU-b", uuid="GPU-b", index=1))
MIG = (
    *WHOLE,
    Gpu(id="MIG-1", uuid="MIG-1", parent_id="GPU-a"),
    Gpu(id="MIG-2", uuid="MIG-2", parent_id="GPU-a"),
)


@pytest.mark.parametrize(("text", "meaning"), SHAPES)
def test_a_gres_entry_says_which_gpus(text: str, meaning: str) -> None:
    items = [item for item in parse_gres(text) if item.is_gpu]
    kind, _, numbers = meaning.partition(" ")
    if not kind:
        assert items == []
        return
    assert all(item.is_shared == (kind == "shared") for item in items)
    assert all(item.is_mig == (kind == "mig") for item in items)
    if numbers == "unwritten":
        assert [item.indices for item in items] == [None]
        return
    written = [number for item in items for number in item.indices or ()]
    assert written == [int(number) for number in numbers.split(",") if number]
    assert None not in [item.indices for item in items]


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not here")
def test_the_collected_spellings_of_gres() -> None:
    lines = (CASES / "e" / "e12-gres-shapes.txt").read_text().splitlines()
    assert len(lines) == len(E12)
    for line, expected in zip(lines, E12, strict=True):
        found = tuple(item.indices for item in parse_gres(line) if item.is_gpu)
        assert found == expected, line


def test_types_and_counts() -> None:
    assert parse_gres("gpu:1080ti:2(IDX:0-1)") == (
        Gres(name="gpu", type="1080ti", count=2, indices=(0, 1)),
    )
    assert parse_gres("gpu:tesla") == (Gres(name="gpu", type="tesla"),)
    assert parse_gres("scratch:2K")[0].count == 2048
    assert parse_gres("(null)") == ()


@pytest.mark.parametrize(
    "text",
    ["gpu:1(IDX:0", "gpu:1)IDX:0(", "gpu:1(IDX:3-1)", "gpu:1(IDX:0-9999999)", "gpu:1(IDX:x)"],
)
def test_a_broken_gres_entry_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        parse_gres(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu-[001-003,7]", ["gpu-001", "gpu-002", "gpu-003", "gpu-7"]),
        ("x[1-2]-y[3-4]", ["x1-y3", "x1-y4", "x2-y3", "x2-y4"]),
        ("a,b[9-11]c", ["a", "b9c", "b10c", "b11c"]),
        ("cn-001", ["cn-001"]),
        ("", []),
    ],
)
def test_host_lists_expand_in_order(text: str, names: list[str]) -> None:
    assert list(expand_hostlist(text)) == names
    for place, name in enumerate(names):
        assert host_position(text, name) == place
    assert host_position(text, "elsewhere") is None


@pytest.mark.parametrize(
    "text",
    [
        "n[1-99999999]",
        "n[0-999]m[0-999]",
        "n[2-1]",
        "n[a-b]",
        "n[1",
        "n]1[",
        "n[1[2]]",
        "a" * 2**21,
    ],
)
def test_host_lists_are_bounded(text: str) -> None:
    with pytest.raises(Malformed):
        list(expand_hostlist(text))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n", "gpu-", "rack-a-"]),
            st.integers(0, 999),
            st.integers(0, 20),
            st.integers(1, 4),
        ),
        max_size=5,
    )
)
def test_a_written_host_list_reads_back(parts: list[tuple[str, int, int, int]]) -> None:
    text, names = [], []
    for prefix, first, more, width in parts:
        numbers = [str(n).zfill(width) for n in range(first, first + more + 1)]
        text.append(f"{prefix}[{numbers[0]}-{numbers[-1]}]")
        names += [prefix + number for number in numbers]
    assert list(expand_hostlist(",".join(text))) == names


@given(st.text(max_size=200) | st.text("gpu:[](),-0123456789IDX/=", max_size=200))
def test_any_text_is_read_or_malformed(text: str) -> None:
    try:
        for item in parse_gres(text):
            assert item.name
    except Malformed:
        pass
    try:
        assert len(list(expand_hostlist(text))) <= HOSTLIST_LIMIT
    except Malformed:
        pass
    try:
        assert len(parse_indices(text)) <= 4096
    except Malformed:
        pass
    try:
        parse_gres_conf(text, "n1")
    except Malformed:
        pass


def test_gres_conf_gives_this_nodes_files_in_their_order() -> None:
    text = """
    # GPUs
    Include more.conf
    NodeName=gpu-[001-004] Name=gpu Type=a100 File=/dev/nvidia[0-1]
    nodename=gpu-005 name=gpu type=h100 file=/dev/nvidia3,/dev/nvidia2 \\
        Cores=0-7
    Name=scratch Count=4
    NodeName=gpu-005 Name=gpu Type=mig \
        MultipleFiles=/dev/nvidia7,/dev/nvidia-caps/nvidia-cap21,/dev/nvidia-caps/nvidia-cap22
    """
    layout = parse_gres_conf(text, "gpu-005")
    assert layout.devices == (
        GresDevice("h100", 3),
        GresDevice("h100", 2),
        GresDevice("mig", 7),
    )
    assert layout.includes == ("more.conf",)
    assert layout.autodetect is None
    assert parse_gres_conf("AutoDetect=nvml\n", "x").autodetect == "nvml"
    assert parse_gres_conf("NodeName=y AutoDetect=nvml\n", "x").autodetect is None


def references(
    text: str, layout: GresLayout, node: str = "", gpus: tuple[Gpu, ...] = ()
) -> tuple[tuple[str, ...], bool, str]:
    return gpu_references(parse_gres(text), layout, parse_gres(node), gpus)


def test_an_index_is_a_minor_number_with_files_and_nvml_order_with_autodetect() -> None:
    files = GresLayout(devices=tuple(GresDevice("a100", minor) for minor in range(8)))
    assert references("gpu:a100:2(IDX:0,3)", files)[0] == ("minor:0", "minor:3")
    assert references("gpu:a100:2(IDX:0,3)", GresLayout())[0] == ("minor:0", "minor:3")
    detected = GresLayout(autodetect="nvml")
    assert references("gpu:a100:2(IDX:0,1)", detected, gpus=WHOLE)[0] == ("index:0", "index:1")
    assert references("gpu:2(IDX:0,1)", GresLayout(autodetect="off"))[0] == ("minor:0", "minor:1")


def test_an_index_counts_files_in_the_order_of_the_nodes_gres() -> None:
    # Observed on a real 22.05: Gres=gpu:aa:1,gpu:zz:1 counts aa first, whatever gres.conf's order.
    layout = GresLayout(devices=(GresDevice("zz", 1), GresDevice("aa", 0)))
    assert references("gpu:zz:1(IDX:1)", layout, "gpu:aa:1,gpu:zz:1")[0] == ("minor:1",)
    assert references("gpu:aa:1(IDX:0)", layout, "gpu:aa:1,gpu:zz:1")[0] == ("minor:0",)
    assert references("gpu:zz:1(IDX:0)", layout, "gpu:zz:1,gpu:aa:1")[0] == ("minor:1",)


def test_an_index_of_a_mig_type_counts_mig_devices() -> None:
    detected = GresLayout(autodetect="nvml")
    assert references("gpu:a100_1g.5gb:2(IDX:0-1)", detected, gpus=MIG)[0] == (
        "uuid:MIG-1",
        "uuid:MIG-2",
    )
    # The whole GPU behind them comes third.
    assert references("gpu:a100:1(IDX:2)", detected, gpus=MIG)[0] == ("uuid:GPU-b",)
    unknown, _, why = references("gpu:a100_1g.5gb:1(IDX:9)", detected, gpus=MIG)
    assert unknown == ("all",)
    assert why


def test_shared_gpus_are_shared_and_unwritten_ones_are_unsure() -> None:
    assert references("shard:2(IDX:0)", GresLayout()) == (("minor:0",), True, "")
    assert references("gpu:1(IDX:0),mps:50(IDX:1)", GresLayout()) == (
        ("minor:0", "minor:1"),
        True,
        "",
    )
    assert references("gpu:1(IDX:0)", GresLayout())[1] is False
    assert references("gpu:2", GresLayout())[0] == ("all",)
    assert references("gpu:0", GresLayout())[0] == ()
    assert references("scratch:2", GresLayout()) == ((), False, "")
