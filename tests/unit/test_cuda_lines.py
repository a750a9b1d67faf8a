"""CUDA calls as JSON lines: all that is known of each, bounded; handles as text."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.model import CudaLibrary, KernelUse, LaunchFit, LaunchWindow, ProfileStanding
from gpuwarden.outputs.cuda_lines import (
    CUDA_SCHEMA,
    CUDA_VERSION,
    KERNELS_TOLD,
    MODULES_TOLD,
    Caller,
    context_line,
    launches_line,
    library_line,
    load_line,
)
from gpuwarden.watch.identity import of_kernel
from tests.support.cuda_facts import DIGEST, FIT, LIBRARY, WINDOW, call, caller, load, module
from tests.support.open_watching import BOOT_TIME_NS, container
from tests.support.opening import contained, identity

AT_NS = 1_767_225_600_000_000_007


def read(data: bytes, kind: str) -> dict[str, Any]:
    assert b"\n" not in data
    found = json.loads(data)
    assert isinstance(found, dict)
    head = ("schema", "version", "kind", "node", "time", "at_ns")
    assert [found[key] for key in head] == [
        CUDA_SCHEMA,
        CUDA_VERSION,
        kind,
        "node1",
        "2026-01-01T00:00:00.000000007Z",
        AT_NS,
    ]
    return found


def loaded(*parts: Any, who: Caller | None = None, **fields: Any) -> dict[str, Any]:
    line = load_line(load(*parts, **fields), who or caller(), node="node1", at_ns=AT_NS)
    return read(line, "module_load")


def test_a_context_says_what_was_called_and_by_whom() -> None:
    parent = of_kernel(identity(40, exe_path="/usr/bin/bash", comm="bash"), BOOT_TIME_NS)
    who = caller()._replace(parent=parent)
    told = read(context_line(call(result=2), who, node="node1", at_ns=AT_NS), "cuda_context")
    assert told["context"] == {
        "call": "retained",
        "function": "cuDevicePrimaryCtxRetain",
        "handle": "0x550000000010",
        "device": 0,
        "result": 2,
        "thread_id": 200,
    }
    assert (told["process"]["pid"], told["process"]["comm"]) == (200, "python3")
    assert told["parent"] == {"pid": who.process.ppid, "comm": "bash", "exe": "/usr/bin/bash"}
    assert (told["container"]["state"], told["container"]["name"]) == ("known", "c1")


def test_a_load_has_each_module_with_its_digests_and_where_it_stands() -> None:
    known = module(
        "known",
        answer="",
        digest="b4" * 32,
        code_digest="c5" * 32,
        standings=(
            ProfileStanding(profile="", standing="unknown"),
            ProfileStanding(profile="torch", standing="known", known_as="torch 2.9.1"),
        ),
    )
    told = loaded(known, module(), handle=0x7F00_0000_0000_0001, result=0)
    assert told["profile"] == "torch"
    assert told["load"] == {
        "number": 7,
        "function": "cuModuleLoadData",
        "path": None,
        "image_bytes": 14_336,
        "captured_bytes": 14_336,
        "missed": "",
        "stopped": False,
        "handle": "0x7f00000000000001",
        "result": 0,
        "thread_id": 201,
        "problems": [],
    }
    first, second = told["modules"]
    assert (first["digest"], first["code_digest"]) == ("b4" * 32, "c5" * 32)
    assert (first["standing"], first["known_as"]) == ("known", "torch 2.9.1")
    assert (second["digest"], second["standing"], second["answer"]) == (
        DIGEST,
        "unknown",
        "hash-like",
    )
    assert second["kernels"] == ["sha256d_search"]
    assert second["not_compared"] == ""


def test_where_a_module_stands_is_said_of_the_profile_of_its_process_only() -> None:
    (one,) = loaded(module("known"), who=caller(""))["modules"]
    assert (one["standing"], one["known_as"], one["not_compared"]) == (None, "", None)
    assert loaded(module("known"), who=caller(""))["profile"] is None
    torn = module(
        standings=(ProfileStanding(profile="torch", standing="unknown", not_compared="no file"),)
    )
    assert loaded(torn)["modules"][0]["not_compared"] == "no file"


def test_a_load_whose_bytes_are_missing_says_why() -> None:
    told = loaded(missed="the ring was full", captured_bytes=4096, image_bytes=None)
    assert told["load"]["missed"] == "the ring was full"
    assert (told["load"]["image_bytes"], told["load"]["handle"]) == (None, None)
    assert (told["modules"], told["module_count"]) == ([], 0)
    named = loaded(path="/opt/x.cubin", function="cuModuleLoad")
    assert named["load"]["path"] == "/opt/x.cubin"


def test_a_library_says_how_much_of_it_is_seen() -> None:
    told = read(library_line(LIBRARY, "found", node="node1", at_ns=AT_NS), "cuda_library")
    assert told["library"] == {
        "state": "found",
        "path": "/usr/lib/x86_64-linux-gnu/libcuda.so.550.54",
        "device": "8:1",
        "inode": 4711,
        "build_id": None,
        "soname": None,
        "probed": ["cuModuleLoadData", "cuLaunchKernel"],
        "at_start": ["cuLaunchKernel"],
        "problems": ["2 export table slots were not resolved"],
    }
    assert "process" not in told


def test_launches_are_summed_and_the_most_launched_are_named_first() -> None:
    line = launches_line(WINDOW, caller(), FIT, node="node1", at_ns=AT_NS)
    told = read(line, "launches")
    assert told["window"] == {
        "seconds": 1.0,
        "launches": 1204,
        "graph_launches": 2,
        "kernel_count": 3,
        "kernels": [
            {"name": "gemm", "digest": "aa", "launches": 800},
            {"name": "elementwise", "digest": "aa", "launches": 400},
            {"name": "", "digest": "", "launches": 4},
        ],
        "sampled": 0,
        "dropped": 0,
    }
    assert told["fit"]["explained_share"] == 0.6
    assert "sha256d_search" in told["fit"]["words"][0]
    alone = read(launches_line(WINDOW, caller(), node="node1", at_ns=AT_NS), "launches")
    assert alone["fit"] is None


def test_a_line_is_bounded_whatever_a_process_loads_or_launches() -> None:
    many = [module(digest=f"{n:064x}", kernels=("k" * 9999,) * 99) for n in range(2000)]
    told = loaded(*many, path="/" + "p" * 99_999, problems=("x" * 9999,) * 99)
    assert (told["module_count"], len(told["modules"])) == (2000, MODULES_TOLD)
    assert len(json.dumps(told)) < 4 << 20
    uses = tuple(KernelUse(name=f"k{n}", launches=n) for n in range(5000))
    window = LaunchWindow(pid=1, start_time_ticks=1, from_ns=0, until_ns=1, kernels=uses)
    fit = LaunchFit(
        pid=1, start_time_ticks=1, profile="p", launches=1, explained_share=0.0, outside=uses
    )
    line = read(launches_line(window, caller(), fit, node="node1", at_ns=AT_NS), "launches")
    assert len(line["window"]["kernels"]) == len(line["fit"]["outside"]) == KERNELS_TOLD
    assert line["window"]["kernels"][0]["name"] == "k4999"
    assert line["window"]["launches"] == sum(range(5000))


def test_a_path_that_is_no_text_is_written_with_escapes() -> None:
    path = os.fsdecode(b"/tmp/\xff\n.cubin")
    assert loaded(path=path)["load"]["path"] == "/tmp/\\udcff\n.cubin"


HOSTILE = st.text(max_size=40)


@given(HOSTILE, HOSTILE, HOSTILE, st.none() | HOSTILE)
def test_one_line_of_json_whatever_names_hold(
    comm: str, kernel: str, missed: str, path: str | None
) -> None:
    who = Caller(of_kernel(contained(comm=comm), BOOT_TIME_NS), None, container(name=kernel))
    told = loaded(module(kernels=(kernel,)), who=who, path=path, missed=missed)
    assert told["process"]["comm"] == comm
    assert told["modules"][0]["kernels"] == [kernel]
    assert (told["load"]["path"], told["load"]["missed"]) == (path, missed)
    assert told["container"]["name"] == kernel
    library = CudaLibrary(device="0:1", inode=1, path=comm, problems=(missed,))
    line = library_line(library, "gone", node="node1", at_ns=AT_NS)
    assert read(line, "cuda_library")["library"]["path"] == comm
