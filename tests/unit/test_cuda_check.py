"""The comparison of what CUDA programs did with what was seen of them notices what is missing."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import cuda_check
from bench.cuda_driver import text
from tests.support.code_scans import scanned

PID = 4242


@pytest.fixture
def done(tmp_path: Path) -> list[dict[str, Any]]:
    image = tmp_path / "image"
    image.write_bytes(text("add"))
    load = {"did": "load", "function": "cuModuleLoadData", "image": str(image), "kernel": "add"}
    return [
        {"did": "context", "function": "cuCtxCreate_v2", "result": 0, "handle": 0xABC0},
        load,
        {"did": "launch", "function": "cuLaunchKernel", "kernel": "add", "times": 70},
        {"did": "graph", "function": "cuGraphLaunch", "times": 3},
        {"did": "context", "function": "cuCtxCreate_v4", "missing": True},
    ]


@pytest.fixture
def told(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    [found] = scanned(done[1]["image"]).modules
    module = {"digest": found.module.digest, "kernels": ["add"]}
    load = {"function": "cuModuleLoadData", "captured_bytes": 900, "missed": ""}
    context = {"function": "cuCtxCreate_v2", "handle": "0xabc0"}
    kernels = [{"name": "add", "launches": 35}]
    whose = {"process": {"pid": PID}}
    return [
        {"kind": "cuda_library", "library": {}},
        {"kind": "cuda_context", "context": context, **whose},
        {"kind": "module_load", "load": load, "modules": [module], **whose},
        *(
            {"kind": "launches", "window": {"graph_launches": n, "kernels": kernels}, **whose}
            for n in (1, 2)
        ),
    ]


def missing(done: list[dict[str, Any]], told: list[dict[str, Any]]) -> int:
    table = cuda_check.Table(stub=True)
    worker = SimpleNamespace(process=SimpleNamespace(pid=PID), told=done)
    cuda_check.compare(table, cast(cuda_check.Lines, worker), told)
    return table.missing


def test_all_that_was_seen(done: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    assert missing(done, told) == 0


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_line_that_is_not_there_is_noticed(
    done: list[dict[str, Any]], told: list[dict[str, Any]], number: int
) -> None:
    assert missing(done, [*told[:number], *told[number + 1 :]])


@pytest.mark.parametrize(
    "path",
    [
        (1, "context", "handle", "0x1"),
        (2, "load", "missed", "the ring was full"),
        (2, "load", "function", "cuModuleLoad"),
        (3, "window", "graph_launches", 2),
    ],
)
def test_a_line_that_says_another_thing_is_noticed(
    done: list[dict[str, Any]], told: list[dict[str, Any]], path: tuple[int, str, str, Any]
) -> None:
    number, part, key, value = path
    changed = copy.deepcopy(told)
    changed[number][part][key] = value
    assert missing(done, changed)


def test_another_process_and_another_module_do_not_count(
    done: list[dict[str, Any]], told: list[dict[str, Any]]
) -> None:
    others = copy.deepcopy(told)
    others[1]["process"] = {"pid": 1}
    assert missing(done, others) == 1
    others = copy.deepcopy(told)
    others[2]["modules"][0]["digest"] = "0" * 64
    assert missing(done, others) == 1
