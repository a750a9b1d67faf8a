"""What `trace` prints: one line an event whatever names hold, and what it all was at the end."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.model import (
    CudaContext,
    CudaLibrary,
    CudaProcess,
    GpuModule,
    KernelUse,
    LaunchWindow,
    Process,
)
from gpuwarden.outputs.cuda_event_text import (
    context_text,
    launches_text,
    library_text,
    load_text,
)
from gpuwarden.outputs.cuda_text import Traced, closing_table
from gpuwarden.outputs.sheet import cells
from gpuwarden.outputs.words import UNSEEN
from tests.conftest import Golden
from tests.support.cuda_facts import (
    AT_NS,
    DIGEST,
    FIT,
    LIBRARY,
    WINDOW,
    call,
    caller,
    load,
    module,
)

WIDTHS = (80, 140)


@pytest.mark.parametrize("width", WIDTHS)
def test_events_read_as_they_were_read_last(width: int, golden: Golden) -> None:
    at: dict[str, Any] = {"at_ns": AT_NS, "width": width}
    on: dict[str, Any] = {**at, "place": "docker:c1"}
    parts = (module("known", answer=""), module())
    lines = [
        library_text(LIBRARY, found=True, **at),
        context_text(call(), caller(), **on),
        context_text(call(call="created", function="cuCtxCreate_v2", result=2), caller(), **on),
        load_text(load(module("known", answer="")), caller(), **on),
        load_text(load(*parts), caller(), **on),
        load_text(load(module(answer="not hash-like")), caller(), **on),
        load_text(load(module("jit", answer="not enough code")), caller(), **on),
        load_text(load(module(standings=())), caller(), **on),
        load_text(load(missed="the ring was full", image_bytes=70 << 20), caller(), **on),
        load_text(load(problems=("no GPU code in it",), path="/opt/x.fatbin"), caller(), **on),
        launches_text(WINDOW, caller(), **on),
        launches_text(WINDOW, caller(), FIT, **on),
        library_text(LIBRARY, found=False, **at),
    ]
    assert all(line.count("\n") == 1 and cells(line[:-1]) <= width for line in lines)
    golden.check(f"cuda-events-{width}.txt", "".join(lines))


def traced(**fields: Any) -> Traced:
    cuda: dict[str, Any] = {
        "pid": 200,
        "start_time_ticks": 900,
        "libraries": (LIBRARY,),
        "contexts": (
            CudaContext(pid=200, start_time_ticks=900, kind="primary", handle=16, device=0,
                        made_ns=AT_NS),
            CudaContext(pid=200, start_time_ticks=900, kind="created", handle=32, made_ns=AT_NS,
                        ended_ns=AT_NS + 5),
        ),
        "loads": 14,
        "known_loads": 120,
        "missed_loads": 1,
        "missed": ("the ring was full",),
        "kernels": WINDOW.kernels,
        "launches": 1204,
        "graph_launches": 2,
        "fit": FIT,
        "limits": ("kernels inside CUDA graphs: a graph is launched as one",),
        **fields,
    }  # fmt: skip
    found = GpuModule(
        pid=200, start_time_ticks=900, digest=DIGEST, kind="cubin", arch="sm_90",
        kernels=("sha256d_search",), answer="hash-like", loaded_at_ns=AT_NS,
    )  # fmt: skip
    return Traced(CudaProcess(**cuda), caller().process, "docker:c1", "torch", (found,))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_end_reads_as_it_was_read_last(width: int, golden: Golden) -> None:
    bare = Traced(
        CudaProcess(pid=300, start_time_ticks=1, before=True),
        Process(pid=300, start_time_ticks=1, comm="solve"),
    )
    gone = Traced(CudaProcess(pid=301, start_time_ticks=1))
    text = closing_table((gone, bare, traced()), width=width, colour=False)
    text += closing_table((), width=width, colour=False)
    assert all(cells(line) <= width for line in text.splitlines())
    golden.check(f"cuda-summary-{width}.txt", text)


def test_colour_marks_what_speaks_against_a_process_and_nothing_else() -> None:
    at: dict[str, Any] = {"at_ns": AT_NS, "width": 80, "colour": True}
    assert "\x1b[1;31m" in load_text(load(module()), caller(), **at)
    assert "\x1b" not in load_text(load(module("known")), caller(), **at)
    assert "\x1b[31m" in launches_text(WINDOW, caller(), FIT, **at)
    assert "\x1b" not in launches_text(WINDOW, caller(), **at)
    assert "\x1b[1;31m" in closing_table((traced(),), width=80, colour=True)


def test_a_hash_like_module_of_many_is_the_one_that_is_named() -> None:
    many = [module("known", answer="", digest=f"{n:064x}", kernels=()) for n in range(50)]
    text = load_text(load(*many, module(), *many), caller(), at_ns=AT_NS, width=140)
    assert "HASH-LIKE: sha256d_search, cubin sm_90 3abf9d47547fcfcc; 100 more in it" in text


def test_known_code_that_hashes_is_known() -> None:
    text = load_text(load(module("known")), caller(), at_ns=AT_NS, width=140)
    assert "HASH-LIKE" not in text


HOSTILE = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\n\r\t\x1b\x9b\u202e\u200b\x00"), max_size=80
)


@given(HOSTILE, HOSTILE, HOSTILE, st.integers(-(1 << 63), 1 << 63), st.integers(0, 300))
def test_whatever_names_hold_a_line_is_one_and_nothing_acts_on_the_terminal(
    comm: str, name: str, path: str, at_ns: int, width: int
) -> None:
    at: dict[str, Any] = {"at_ns": at_ns, "width": width}
    who = caller(comm=comm)
    uses = (KernelUse(name=name, launches=1),)
    window = LaunchWindow(
        pid=1, start_time_ticks=1, from_ns=at_ns, until_ns=0, kernels=uses, graph_launches=1
    )
    library = CudaLibrary(device="0:1", inode=1, path=path, problems=(name,))
    lines = [
        context_text(call(function=name), who, **at),
        load_text(load(module(kernels=(name,)), path=path), who, **at),
        load_text(load(missed=name), who, **at),
        launches_text(window, who, **at),
        library_text(library, found=True, **at),
    ]
    for line in lines:
        assert line.endswith("\n")
        assert not UNSEEN.intersection(map(unicodedata.category, line[:-1]))
        assert cells(line[:-1]) <= max(width, 60)
    one = traced(libraries=(library,), limits=(name,), kernels=uses, missed=(name,))
    one = one._replace(profile=name, place=path)
    text = closing_table((one,), width=width, colour=False)
    assert not UNSEEN.intersection(map(unicodedata.category, text.replace("\n", "")))
