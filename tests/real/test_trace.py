"""`gpuwarden trace` on real processes and containers; the driver library is the stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import cuda_modules
from tests.support.cuda_bed import running
from tests.support.cuda_containers import CudaContainers
from tests.support.tracing import tracing

pytestmark = pytest.mark.real

BLIND, USAGE, FINDING, CLEAR = 2, 64, 1, 0


def loading(path: Path, name: str) -> tuple[str, str]:
    return f"image {name} heap {path}", f"load cuModuleLoadData m{name} {name}"


def training() -> tuple[str, ...]:
    gemm, _ = cuda_modules.training()
    return (
        "retain c 0",
        *loading(gemm, "g"),
        "function f mg gemm_tile",
        "sequence 200 1000 f",
    )


def miner() -> tuple[str, ...]:
    return (
        *loading(cuda_modules.miner(), "x"),
        f"function z mx {cuda_modules.MINER_KERNEL}",
        "launch cuLaunchKernel z 50",
    )


def attached(text: str) -> bool:
    return '"kind":"cuda_library"' in text and '"probed":["' in text


def test_what_a_process_does_is_told_and_summed_up(tmp_path: Path) -> None:
    arguments = ("--launches",)
    with (
        running() as program,
        tracing(tmp_path, str(program.pid), *arguments, columns=400) as trace,
    ):
        trace.wait(lambda text: "entry points of" in text, "its library")
        program.do(*training())
        program.do(*miner())
        trace.wait(lambda text: "module_loaded_hash_like" in text, "the finding")
        trace.wait(lambda text: f"{cuda_modules.MINER_KERNEL} 50" in text, "its launches")
        program.close()
        assert trace.process.wait(30) == FINDING
    text = trace.text
    assert "primary retained on device 0" in text
    assert f"HASH-LIKE: {cuda_modules.MINER_KERNEL}" in text
    closing = text[text.rindex(f"pid {program.pid}") :]
    assert "contexts  primary on device 0" in closing
    assert "not seen  calls that do not go through a driver library" in closing
    assert f"{cuda_modules.MINER_KERNEL} 50" in closing


def test_a_container_is_told_apart_from_others(cuda_engine: CudaContainers, tmp_path: Path) -> None:
    (tmp_path / "gemm").write_bytes(cuda_modules.training()[0].read_bytes())
    tmp_path.chmod(0o755)
    options = ("--volume", f"{tmp_path}:/code:ro")
    with (
        cuda_engine.running(options=options) as wanted,
        cuda_engine.running(options=options) as other,
        tracing(tmp_path, "--container", wanted.identity[:12], "--events") as trace,
    ):
        trace.wait(attached, "their library")
        for one in (other, wanted):
            one.do(*loading(Path("/code/gemm"), "g"))
        trace.wait(lambda text: '"kind":"module_load"' in text, "a load")
        assert trace.stop() == CLEAR
    events = [json.loads(line) for line in trace.text.splitlines()]
    events = [event for event in events if event["kind"] != "cuda_library"]
    assert {event["process"]["pid"] for event in events} == {wanted.pid}
    assert {event["container"]["id"] for event in events} == {wanted.identity}
    assert other.pid != wanted.pid


def test_all_names_each_library(tmp_path: Path) -> None:
    with running() as program, tracing(tmp_path, "--all", "--events") as trace:
        trace.wait(attached, "the library")
        program.do(*training())
        trace.wait(lambda text: '"kind":"module_load"' in text, "a load")
        trace.stop()
    kinds = [json.loads(line)["kind"] for line in trace.text.splitlines()]
    assert {"cuda_library", "cuda_context", "module_load"} <= set(kinds)


def test_a_process_without_the_library_is_said_to_be_unseen(tmp_path: Path) -> None:
    with running(library="-") as program:
        with tracing(tmp_path, str(program.pid), "--for", "4") as trace:
            assert trace.process.wait(60) == BLIND
        assert "not seen" in trace.text


def test_bad_subjects_are_one_clear_error(tmp_path: Path) -> None:
    for arguments in ((), ("1", "--all"), (str((1 << 22) - 1),), ("5", "--merge")):
        with tracing(tmp_path, *arguments) as trace:
            assert trace.process.wait(60) == USAGE
        assert trace.errors.count("\n") <= 2
        assert "Traceback" not in trace.errors


def test_nothing_is_learned_without_a_profile(tmp_path: Path) -> None:
    with running() as program:
        arguments = (str(program.pid), "--learn", str(tmp_path / "run.launches"))
        with tracing(tmp_path, *arguments) as trace:
            trace.wait(lambda text: "entry points of" in text, "its library")
            program.do(*training())
            program.close()
            assert trace.process.wait(60) == USAGE
    assert "declares no code profile" in trace.errors
    assert not (tmp_path / "run.launches").exists()
