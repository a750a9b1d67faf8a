"""Rules over processes that use CUDA: contexts, second ones, those without a driver library."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.model import DriverLibrary
from tests.rules.cuda_node import DECLARED, POLICY, CudaNode
from tests.rules.open_node import texts
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS

CONTEXTS = "contexts_beyond_declared"
SECOND = "second_gpu_process_in_container"
NO_LIBRARY = "gpu_process_without_driver_library"


# ------------------------------------------------------------------ contexts


def test_each_context_is_named_and_the_one_too_many_gives_the_time(training: CudaNode) -> None:
    training.context(200, kind="created")
    training.context(200, kind="green")
    training.context(200, device=1)
    found = training.one(CONTEXTS, DECLARED)
    assert found.severity == "warning"
    assert found.since_ns == TAKEN_AT_NS - 499 * SECOND_NS
    said = texts(found)
    for words in ("2 contexts on CUDA device 0; the workload declares 1",
                  "context 0x55000000 on device 0: the primary one, retained 2025-12-31 23:51:40Z",
                  "context 0x55000001 on device 0: created 2025-12-31 23:51:41Z",
                  "1 green context beside them"):  # fmt: skip
        assert words in said
    assert "0x55000003" not in said, "device 1 has one, as declared"


def test_a_primary_context_is_one_however_often_it_is_told(training: CudaNode) -> None:
    training.context(200, handle=0x5500_0000)
    assert not training.found(CONTEXTS, DECLARED)


def test_a_context_on_no_known_device_is_not_put_to_one_of_several(training: CudaNode) -> None:
    training.context(200, device=1)
    training.context(200, device=None)
    assert not training.found(CONTEXTS, DECLARED)
    training.context(200, device=None)
    assert "a device that the calls do not name" in texts(training.one(CONTEXTS, DECLARED))


def test_a_proven_entry_counts_before_one_that_a_process_can_claim(training: CudaNode) -> None:
    loose = "  - {name: loose, match: {user: root}, contexts: 64}\n"
    policy = DECLARED.replace("workloads:\n", f"workloads:\n{loose}")
    training.context(200, kind="created")
    found = training.one(CONTEXTS, policy)
    assert "workload training" in texts(found)


# ------------------------------------------------------------------ a second process

SINGLE = POLICY.replace("MORE", "single_process: true")


def second(node: CudaNode, **fields: Any) -> None:
    node.process(201, container="train", user="root", **{"ppid": 150, **fields})
    node.watched(201)
    node.context(201, made_ns=TAKEN_AT_NS - 30 * SECOND_NS)


def test_the_later_one_is_the_subject_and_the_first_is_named(training: CudaNode) -> None:
    second(training, exe="/tmp/solve", argv=("/tmp/solve",))
    found = training.one(SECOND, SINGLE)
    assert (found.subject.pid, found.severity) == (201, "warning")
    assert found.since_ns == TAKEN_AT_NS - 30 * SECOND_NS
    assert "the first one: pid 200 (python3.11), /usr/bin/python3.11, 1 context" in texts(found)
    assert "/tmp/solve" in texts(found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ppid": 200}, "a fork of it, the same program"),
        ({"ppid": 200, "exe": "/tmp/solve"}, "started by it, another program"),
        ({"ppid": 1}, "both are children of pid 1"),
        ({"ppid": 77}, "this one: 1 context, since 2025-12-31 23:59:30Z"),
    ],
)
def test_how_they_are_related_is_said(
    training: CudaNode, fields: dict[str, Any], words: str
) -> None:
    second(training, **fields)
    found = training.one(SECOND, SINGLE)
    assert words in texts(found)


def test_who_was_there_before_it_was_watched_is_the_first(training: CudaNode) -> None:
    second(training)
    training.cuda[201] = replace(training.cuda[201], before=True, contexts=(), launches=9)
    found = training.one(SECOND, SINGLE)
    assert found.subject.pid == 200
    assert "9 launches" in texts(found)


def test_a_third_one_is_told_too_and_a_host_process_is_none(training: CudaNode) -> None:
    second(training)
    training.process(202, container="train", user="root")
    training.watched(202, graph_launches=1)
    training.process(300, user="root")
    training.watched(300)
    training.context(300)
    found = training.found(SECOND, SINGLE)
    assert {f.subject.pid for f in found} == {201, 202}


# ------------------------------------------------------------------ no driver library


def raw(**fields: Any) -> CudaNode:
    node = CudaNode()
    node.process(10, **{"exe": "/home/alice/solve", **fields})
    node.watched(10, libraries=())
    return node


def test_a_holder_of_the_compute_nodes_without_the_library_is_an_error() -> None:
    node = raw()
    node.uses_gpu(10)
    found = node.one(NO_LIBRARY)
    assert found.severity == "error"
    assert found.subject.gpu == "GPU 0"
    assert "holds nvidia-ctl, nvidia-gpu, nvidia-uvm; no CUDA driver library" in texts(found)


@pytest.mark.parametrize("part", ["driver_libraries", "exe", "environment"])
def test_what_could_not_be_read_makes_it_a_warning(part: str) -> None:
    node = raw(unread={part: "permission denied"})
    node.uses_gpu(10)
    found = node.one(NO_LIBRARY)
    assert found.severity == "warning"
    assert f"not sure: its {part.replace('_', ' ')} could not be read" in texts(found)
    node.processes.pop()
    assert node.one(NO_LIBRARY).severity == "warning"


def test_the_gpus_node_alone_is_a_warning_unless_it_only_asks_or_draws() -> None:
    node = raw()
    node.open(10)
    assert node.one(NO_LIBRARY).severity == "warning"
    node.open(10, kind="drm-render")
    assert not node.found(NO_LIBRARY)
    asks = raw(driver_libraries=(DriverLibrary(path="/usr/lib/libnvidia-ml.so.1"),))
    asks.open(10)
    assert not asks.found(NO_LIBRARY)


def test_a_copied_name_of_a_system_program_excuses_nothing() -> None:
    node = raw(exe="/tmp/nvidia-persistenced")
    node.uses_gpu(10)
    assert node.one(NO_LIBRARY).severity == "error"


def test_a_library_that_is_mapped_and_not_taken_up_yet_is_there() -> None:
    node = raw(driver_libraries=(DriverLibrary(path="/opt/x/libcuda.so.1"),))
    node.uses_gpu(10)
    assert not node.found(NO_LIBRARY)
