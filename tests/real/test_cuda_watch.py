"""A miner inside a declared training workload, and the same workload without it, under `watch`.

Containers, uprobes, GPU code and baselines are real; the driver library is the stand-in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.store import Sighting, Store
from tests.support import cuda_modules
from tests.support.cuda_bed import running
from tests.support.cuda_containers import CudaContainers
from tests.support.declared_workload import PROFILE, WORKLOAD, DeclaredWorkload
from tests.support.learned_launches import write_training_loop
from tests.support.packages import require_root
from tests.support.patient_watch import HELD_SECONDS
from tests.support.probes import ROOT, build, node
from tests.support.watching import GPU, Watching, watching

pytestmark = pytest.mark.real

IMAGE = "localhost/gpuwarden-test/training:1"
JIT = ROOT / "tests/fixtures/jit/triton-sm_80.cubin"
BOUND_SECONDS = 3 * HELD_SECONDS
"""Far above the two seconds that it takes: what is told may wait behind a process that is held."""
OTHER_KERNEL = "block_sum"


@pytest.fixture(scope="module")
def workload(
    cuda_engine: CudaContainers, tmp_path_factory: pytest.TempPathFactory
) -> DeclaredWorkload:
    require_root()
    cuda_engine.image(IMAGE)
    folder = tmp_path_factory.mktemp("cuda")
    return DeclaredWorkload(folder, image=IMAGE, modules=cuda_modules.training())


@pytest.fixture
def agent(workload: DeclaredWorkload, tmp_path: Path) -> Iterator[Watching]:
    build()
    workload.write_policy()
    arguments = ("--events", "--policy", str(workload.policy))
    with watching(tmp_path, *arguments, program=workload.program) as agent:
        yield agent


@pytest.fixture
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the modules, for containers to read them from."""
    folder = tmp_path_factory.mktemp("modules")
    gemm, elementwise = cuda_modules.training()
    for name, path in {
        "gemm": gemm,
        "elementwise": elementwise,
        "miner": cuda_modules.miner(),
        "jit": JIT,
        "other": cuda_modules.made("reduction"),
    }.items():
        (folder / name).write_bytes(path.read_bytes())
    folder.chmod(0o755)
    yield folder


TRAINING = (
    "retain c 0",
    "image g heap /code/gemm",
    "load cuModuleLoadData m g",
    "function f m gemm_tile",
    "image e heap /code/elementwise",
    "load cuModuleLoadData n e",
    "function h n scale_and_add",
    "sequence 20 1000 f,h*2",
)
MINER = (
    "image x heap /code/miner",
    "load cuModuleLoadData y x",
    f"function z y {cuda_modules.MINER_KERNEL}",
    "launch cuLaunchKernel z 50",
)


def loads(agent: Watching, pid: int) -> list[dict[str, Any]]:
    return [
        line
        for line in agent.lines()
        if line["schema"] == "gpuwarden.cuda-event"
        and line["kind"] == "module_load"
        and line["process"]["pid"] == pid
    ]


def wait_for_loads(agent: Watching, pid: int, count: int) -> None:
    agent.wait(lambda: len(loads(agent, pid)) >= count, f"{count} loads of {pid}", BOUND_SECONDS)


def wait_for_library(agent: Watching, engine: CudaContainers) -> None:
    """Until the library of the containers is attached to."""
    inode = engine.of.library().stat().st_ino

    def attached() -> bool:
        return any(
            line.get("kind") == "cuda_library"
            and line["library"]["inode"] == inode
            and line["library"]["probed"]
            for line in agent.lines()
        )

    agent.wait(attached, "the driver library's probes", BOUND_SECONDS)


def sighting(agent: Watching, digest: str) -> Sighting:
    """The first sighting of a module, once it is remembered."""

    def read() -> Sighting | None:
        with Store(str(agent.state), read_only=True) as store:
            return store.modules.first_sighting(digest)

    agent.wait(read, "the first sighting", BOUND_SECONDS)
    found = read()
    assert found is not None
    return found


def test_a_miner_in_a_training_process_is_one_critical_finding(
    agent: Watching,
    workload: DeclaredWorkload,
    cuda_engine: CudaContainers,
    code: Path,
    record_property: Callable[[str, object], None],
) -> None:
    options = ("--volume", f"{code}:/code:ro")
    with cuda_engine.running(options=options, image=IMAGE) as program:
        wait_for_library(agent, cuda_engine)
        program.do(*TRAINING)
        wait_for_loads(agent, program.pid, 2)
        assert agent.findings(pid=program.pid) == []
        begun = time.time()
        program.do(*MINER)
        agent.wait(
            lambda: agent.findings("module_loaded_hash_like", program.pid), "the finding",
            BOUND_SECONDS,
        )  # fmt: skip
        finding, *_ = agent.findings(pid=program.pid)
        seconds = finding["at_ns"] / 1e9 - begun
        record_property("seconds until the finding", round(seconds, 3))
        print(f"module_loaded_hash_like: {seconds:.3f} s after the script was given")
        assert finding["severity"] == "critical"
        wait_for_loads(agent, program.pid, 3)
        said = json.dumps(finding)
        [miner] = [
            module
            for load in loads(agent, program.pid)
            for module in load["modules"]
            if cuda_modules.MINER_KERNEL in module["kernels"]
        ]
        assert miner["standing"] == "unknown"
        for expected in (miner["digest"], cuda_modules.MINER_KERNEL, WORKLOAD, IMAGE, PROFILE):
            assert expected in said, expected
        name = cuda_engine.engine("inspect", "--format", "{{.Name}}", program.identity)
        assert name in said
        first = sighting(agent, miner["digest"])
        assert (first.pid, first.workload, first.profile) == (program.pid, WORKLOAD, PROFILE)
        assert (first.container_id, first.image) == (program.identity, IMAGE)
        # It stays one while it is looked at again, by the judgement of the whole node as well.
        time.sleep(4.0)
        assert {one["id"] for one in agent.findings(pid=program.pid)} == {finding["id"]}


def test_the_same_workload_without_a_miner_is_none(
    agent: Watching, cuda_engine: CudaContainers, code: Path
) -> None:
    options = ("--volume", f"{code}:/code:ro")
    with cuda_engine.running(options=options, image=IMAGE) as program:
        wait_for_library(agent, cuda_engine)
        program.do(*TRAINING)
        program.do("image t heap /code/jit", "load cuModuleLoadData u t")
        program.do("sequence 20 1000 f,h*2")
        wait_for_loads(agent, program.pid, 3)
        known = {
            module["standing"] for load in loads(agent, program.pid) for module in load["modules"]
        }
        assert known == {"known", "jit"}
        time.sleep(4.0)
        assert agent.findings(pid=program.pid) == []


def library_lines(agent: Watching, name: str) -> list[dict[str, Any]]:
    return [
        line
        for line in agent.lines()
        if line.get("kind") == "cuda_library"
        and line["library"]["state"] == "found"
        and line["library"]["path"].endswith(name)
    ]


def test_a_renamed_copy_in_a_container_is_probed(
    agent: Watching,
    cuda_engine: CudaContainers,
    code: Path,
    record_property: Callable[[str, object], None],
) -> None:
    options = ("--volume", f"{code}:/code:ro")
    where = "/opt/lib/libaccelerate.so.7"
    # So that it is not the first one: then nothing has to be loaded any more.
    with cuda_engine.running(options=options, image=IMAGE):
        wait_for_library(agent, cuda_engine)
        with cuda_engine.running(private_as=where, options=options, image=IMAGE) as program:
            ready = time.time()
            agent.wait(lambda: library_lines(agent, where), "the copy", BOUND_SECONDS)
            [line] = library_lines(agent, where)
            assert "cuModuleLoadData" in line["library"]["probed"]
            # It was mapped before the program said that it is ready.
            seconds = line["at_ns"] / 1e9 - ready
            record_property("seconds until the copy is probed", round(seconds, 3))
            print(f"a renamed copy: probed {seconds:.3f} s after the program was ready")
            program.do(*MINER)
            agent.wait(
                lambda: agent.findings("module_loaded_hash_like", program.pid), "the finding",
                BOUND_SECONDS,
            )  # fmt: skip


def test_containers_with_one_library_are_told_apart(
    agent: Watching, cuda_engine: CudaContainers, code: Path
) -> None:
    options = ("--volume", f"{code}:/code:ro")
    with (
        cuda_engine.running(options=options, image=IMAGE) as honest,
        cuda_engine.running(options=options, image=IMAGE) as miner,
    ):
        wait_for_library(agent, cuda_engine)
        honest.do(*TRAINING)
        miner.do(*MINER)
        agent.wait(
            lambda: agent.findings("module_loaded_hash_like", miner.pid), "the finding",
            BOUND_SECONDS,
        )  # fmt: skip
        wait_for_loads(agent, honest.pid, 2)
        wait_for_loads(agent, miner.pid, 1)
        by_container = {
            line["container"]["id"]: {one["standing"] for one in line["modules"]}
            for line in (*loads(agent, honest.pid), *loads(agent, miner.pid))
        }
        assert by_container == {honest.identity: {"known"}, miner.identity: {"unknown"}}
        assert agent.findings(pid=honest.pid) == []


def test_kernels_beside_the_launch_profile_are_told(
    workload: DeclaredWorkload, cuda_engine: CudaContainers, code: Path, tmp_path: Path
) -> None:
    build()
    launches = tmp_path / "loop.launches"
    write_training_loop(launches, *cuda_modules.training(), workload=WORKLOAD)
    workload.write_policy(profile=f"    launches: {launches}")
    arguments = ("--events", "--policy", str(workload.policy))
    options = ("--volume", f"{code}:/code:ro")
    rule = "kernels_outside_profile"
    with (
        watching(tmp_path, *arguments, program=workload.program) as agent,
        cuda_engine.running(options=options, image=IMAGE) as honest,
        cuda_engine.running(options=options, image=IMAGE) as program,
    ):
        wait_for_library(agent, cuda_engine)
        for one in (honest, program):
            one.do(*TRAINING)
        program.do("image o heap /code/other", "load cuModuleLoadData p o")
        program.do(f"function q p {OTHER_KERNEL}")
        program.tell("sequence 3000 1000 f,h*2,q")
        honest.do("sequence 3000 1000 f,h*2")
        agent.wait(lambda: agent.findings(rule, program.pid), rule, BOUND_SECONDS)
        program.answer()
        finding = agent.findings(rule, program.pid)[0]
        assert OTHER_KERNEL in json.dumps(finding["evidence"])

        def told_launches() -> int:
            told = [line["window"] for line in agent.lines() if line.get("kind") == "launches"]
            return sum(window["launches"] for window in told)

        agent.wait(lambda: told_launches() > 3000, "their windows", BOUND_SECONDS)
        time.sleep(2.0)
        assert agent.findings(pid=honest.pid) == []


def told(agent: Watching, rule: str, pid: int) -> dict[str, Any]:
    """The first finding of a rule about a process, once there is one."""
    agent.wait(lambda: agent.findings(rule, pid), rule, BOUND_SECONDS)
    return agent.findings(rule, pid)[0]


def test_more_contexts_than_the_workload_declares_are_told(
    agent: Watching, cuda_engine: CudaContainers
) -> None:
    with cuda_engine.running(image=IMAGE) as program:
        wait_for_library(agent, cuda_engine)
        program.do("retain c 0", "retain d 0")
        program.do("create v2 e 0")
        finding = told(agent, "contexts_beyond_declared", program.pid)
        assert finding["severity"] == "warning"
        assert WORKLOAD in json.dumps(finding["evidence"])


def test_a_second_process_in_a_container_of_one_is_told(
    workload: DeclaredWorkload, cuda_engine: CudaContainers, tmp_path: Path
) -> None:
    build()
    workload.write_policy(workload="    single_process: true")
    arguments = ("--events", "--policy", str(workload.policy))
    with (
        watching(tmp_path, *arguments, program=workload.program) as agent,
        cuda_engine.running(image=IMAGE) as program,
    ):
        wait_for_library(agent, cuda_engine)
        program.do("retain c 0")
        program.do("fork retain d 0")
        rule = "second_gpu_process_in_container"
        agent.wait(lambda: agent.findings(rule), rule, BOUND_SECONDS)
        assert {one["subject"]["pid"] for one in agent.findings(rule)} != {program.pid}


def test_a_holder_without_a_driver_library_is_told(agent: Watching, tmp_path: Path) -> None:
    path = node(tmp_path / "nvidia0", GPU)
    with running(f"device {path}", library="-") as program:
        finding = told(agent, "gpu_process_without_driver_library", program.pid)
        assert "no CUDA driver library is mapped" in json.dumps(finding["evidence"])
