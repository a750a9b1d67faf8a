"""A scan of declared workloads: the GPU code in their processes against what they may load.

Processes, memory, baselines and the children that parse are real; NVML is the stand-in library.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuwarden.code import standing
from gpuwarden.code.baseline.entries import Entry
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.codescan import live
from gpuwarden.codescan.gpu_processes import gpu_processes
from gpuwarden.codescan.known_code import Trust
from gpuwarden.codescan.live import LiveCode
from gpuwarden.finding import Report
from gpuwarden.judge import exit_code, judge
from gpuwarden.model import Snapshot
from gpuwarden.outputs import table
from gpuwarden.policy import JitRules, Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.rules.registry import RULE_IDS
from gpuwarden.scan import ScanOptions, take_snapshot
from gpuwarden.snapshot import decode, encode
from gpuwarden.watch import judgement
from tests.support import nvcc
from tests.support.baselines import KEY, TRUSTED, collected, packed
from tests.support.code_holder import CodeHolder, build, holding
from tests.support.fakenvml import FakeNvml
from tests.support.packages import require_root
from tests.support.stand_in import StandInHost

pytestmark = pytest.mark.real

RULES = ("gpu_module_unknown", "gpu_module_hash_like")


@dataclass
class Node:
    """A machine with one GPU, one declared process on it, and a baseline that knows little."""

    folder: Path
    node: Path
    monkeypatch: pytest.MonkeyPatch

    def known(self, *digests: str) -> None:
        """The profile's baseline holds these digests."""
        origin = Provenance(package="torch", version="2.9.1", file="libtorch_cuda.so")
        entries = collected(Entry(bytes.fromhex(one), b"", origin) for one in digests)
        (self.folder / "known.baseline").write_bytes(packed(entries, KEY))

    def answers(self, reason: str) -> None:
        """What is said of unknown code from now on; until then it is judged."""
        judged = ModuleJudgement(answer="not hash-like", reasons=(reason,))
        self.monkeypatch.setattr(standing, "_judge", lambda: lambda kind, image: judged)

    @property
    def policy(self) -> Policy:
        text = f"""
workloads:
  - name: serving
    match: {{binary: {build()}}}
    profile: known code
profiles:
  - name: known code
    baselines: [{self.folder}/known.baseline]
"""
        return parse_policy(text.encode(), "policy.yaml", RULE_IDS)

    @contextmanager
    def running(self, *words: str) -> Iterator[CodeHolder]:
        """A process of the workload that has the GPU's device node open."""
        held = os.open(self.node, os.O_RDONLY)
        try:
            with holding(*words, pass_fds=(held,)) as holder:
                yield holder
        finally:
            os.close(held)

    def host(self) -> StandInHost:
        return StandInHost(nodes={str(self.node): (195, 0)})

    @contextmanager
    def driver(self, holder: CodeHolder) -> Iterator[str]:
        """A driver that lists the process."""
        nvml = FakeNvml(driver="570.0.0")
        nvml.gpu(uuid="GPU-0", minor=0, total=80 << 30, used=20 << 30)
        nvml.process(holder.pid, memory=1 << 30, kinds="C")
        with nvml.in_place() as library:
            yield library

    def snapshot(self, holder: CodeHolder, look: LiveCode | None = None) -> Snapshot:
        look = look or LiveCode(self.policy, trusted=Trust(TRUSTED))
        with self.driver(holder) as library:
            taken = take_snapshot(self.host(), ScanOptions(nvml_library=library, code=look))
        return replace(taken, node=replace(taken.node, host_pid_namespace=True))

    def scan(self, holder: CodeHolder) -> Report:
        return judge(self.snapshot(holder), self.policy)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    require_root()
    device = tmp_path / "nvidia0"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    made = Node(tmp_path, device, monkeypatch)
    made.known("00" * 32)
    return made


@pytest.fixture(scope="module")
def cubin() -> Path:
    return nvcc.cubin("gemm")


@pytest.fixture(scope="module")
def hashing() -> Path:
    """SHA-256 as a library has it."""
    return nvcc.cubin("sha256")


def about_code(report: Report) -> dict[str, str]:
    """What the two rules found, as text."""
    return {
        f.rule: "\n".join([f.title, *(e.text for e in f.evidence)])
        for f in report.findings
        if f.rule in RULES
    }


def test_an_unknown_module_on_the_heap_is_a_finding_that_names_it(node: Node, cubin: Path) -> None:
    with node.running(f"heap:{cubin}") as holder:
        taken = node.snapshot(holder)
        report = judge(taken, node.policy)
        start, _ = holder.held["heap"]
    (module,) = taken.modules
    assert (module.pid, module.kind, module.arch) == (holder.pid, "cubin", "sm_80")
    assert module.in_no_mapped_file
    (told,) = about_code(report).values()
    for part in (module.digest, module.kernels[0], f"[heap] at {start:#x}", "in no mapped file"):
        assert part in told
    text = table.render(report, width=200, colour=False, exit_code=0)
    assert module.digest in "".join(text.split())
    assert [r.state for r in report.rules if r.rule in RULES] == ["ok", "ok"]
    assert {f.severity for f in report.findings if f.rule in RULES} == {"warning"}


def test_what_the_baseline_knows_is_no_finding(node: Node, cubin: Path) -> None:
    with node.running(f"heap:{cubin}") as holder:
        (module,) = node.snapshot(holder).modules
        node.known(module.digest)
        taken = node.snapshot(holder)
    assert taken.modules == ()
    (scan,) = taken.code_scans
    assert (scan.state, scan.known, scan.unknown, scan.modules) == ("ok", 1, 0, 1)
    report = judge(taken, node.policy)
    assert about_code(report) == {}
    assert [r.state for r in report.rules if r.rule in RULES] == ["ok", "ok"]


def test_hash_like_code_is_an_error_in_an_expected_workload(node: Node, hashing: Path) -> None:
    with node.running(f"heap:{hashing}") as holder:
        taken = node.snapshot(holder)
    report = judge(taken, node.policy)
    (module,) = taken.modules
    (told,) = about_code(report).values()
    assert set(about_code(report)) == {"gpu_module_hash_like"}
    for part in (module.digest, module.reasons[0], "SHA-256", "in no mapped file"):
        assert part in told
    assert {row.verdict for row in report.rows if row.pid == holder.pid} == {"expected"}
    assert {f.severity for f in report.findings if f.rule in RULES} == {"error"}


def test_hash_like_code_that_the_baseline_knows_is_no_finding(node: Node, hashing: Path) -> None:
    with node.running(f"heap:{hashing}") as holder:
        (module,) = node.snapshot(holder).modules
        node.known(module.digest)
        assert about_code(node.scan(holder)) == {}


def test_a_recorded_scan_says_the_same(node: Node, cubin: Path) -> None:
    with node.running(f"heap:{cubin}") as holder:
        taken = node.snapshot(holder)
    again = judge(decode(encode(taken)), node.policy)
    assert about_code(again) == about_code(judge(taken, node.policy)) != {}


def test_a_baseline_that_is_not_trusted_leaves_the_code_not_evaluated(
    node: Node, cubin: Path
) -> None:
    with node.running(f"heap:{cubin}") as holder:
        look = LiveCode(node.policy, trusted=Trust(frozenset()))
        taken = node.snapshot(holder, look)
    (scan,) = taken.code_scans
    assert scan.state == "failed"
    report = judge(taken, node.policy)
    states = {(r.state, "known code" in r.reason) for r in report.rules if r.rule in RULES}
    assert states == {("not-evaluated", True)}
    assert exit_code(report, "critical") == 2
    assert any(gap.sensor == "code" for gap in report.gaps)


def test_without_time_nothing_is_called_clean(node: Node, cubin: Path) -> None:
    with node.running(f"heap:{cubin}") as holder:
        look = LiveCode(node.policy, trusted=Trust(TRUSTED), seconds=-1.0, again_after_seconds=600)
        report = judge(node.snapshot(holder, look), node.policy)
    assert look.remembered() == (), "it is looked at again"
    states = {(r.state, "no time" in r.reason) for r in report.rules if r.rule in RULES}
    assert states == {("not-evaluated", True)}


def test_what_was_seen_is_remembered_until_the_profile_changes(node: Node, cubin: Path) -> None:
    """As between the judgements of watch, each by a child of its own."""

    def looking(policy: Policy) -> LiveCode:
        return LiveCode(policy, trusted=Trust(TRUSTED), again_after_seconds=600)

    with node.running(f"heap:{cubin}") as holder:
        look = looking(node.policy)
        first = node.snapshot(holder, look)
        asked = judgement.encode(judgement.Memory(code=look.remembered()))
        kept = msgspec.msgpack.decode(asked, type=judgement.Memory).code
        node.answers("looked at again")
        again = looking(node.policy)
        again.recall(kept)
        assert node.snapshot(holder, again).modules == first.modules != ()
        (profile,) = node.policy.profiles
        other = replace(node.policy, profiles=[replace(profile, jit=JitRules(nvrtc="allow"))])
        changed = looking(other)
        changed.recall(kept)
        (module,) = node.snapshot(holder, changed).modules
        assert module.reasons == ("looked at again",)
    assert node.snapshot(holder, again).modules == ()
    assert again.remembered() == ()


def test_all_processes_on_a_gpu_are_found(node: Node, cubin: Path) -> None:
    with node.running(f"heap:{cubin}") as holder:
        pids, problems = gpu_processes(node.host())
    assert holder.pid in pids
    assert not any("sensor holders" in problem.what for problem in problems)


def test_watch_judges_code_and_looks_at_a_process_once(
    node: Node, hashing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "trust", lambda: Trust(TRUSTED))

    def judged(memory: judgement.Memory) -> judgement.Judged:
        job = judgement.Judgement("/", ScanOptions(nvml_library=library), node.policy, None)
        vars(job)["host"] = node.host()
        return judgement.decode(job(judgement.encode(memory)))

    with node.running(f"heap:{hashing}") as holder, node.driver(holder) as library:
        first = judged(judgement.Memory())
        node.answers("looked at again")
        second = judged(judgement.Memory(code=first.code))
    assert set(about_code(first.report)) == {"gpu_module_hash_like"}
    assert about_code(second.report) == about_code(first.report)
    assert [seen.scan.pid for seen in second.code] == [holder.pid]
