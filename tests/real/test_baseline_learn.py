"""Learning from a running process: what it compiled becomes known, unless it holds a hash."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuwarden.cli import main
from gpuwarden.code.baseline.reader import open_baseline
from gpuwarden.code.digest import sha256
from tests.support import nvcc
from tests.support.code_holder import holding
from tests.support.jit_compilers import nvrtc

ARCH = "-arch=sm_80"


@pytest.fixture
def harmless(tmp_path: Path) -> Path:
    """What NVRTC makes of a kernel that anybody might write."""
    path = tmp_path / "harmless.cubin"
    path.write_bytes(nvrtc(nvcc.kernel("gemm").read_bytes(), "CUBIN", ARCH))
    return path


def learnt_of(pid: int, out: Path, *arguments: str) -> tuple[int, list[str]]:
    words: Sequence[str] = ("baseline", "learn", "-o", str(out), "--pid", str(pid), *arguments)
    code = main([*words, "--no-starter"])
    baseline = open_baseline(str(out), allow_unsigned=True)
    return code, [entry.digest.hex() for entry in baseline.entries()]


def test_what_a_process_compiled_becomes_known(
    harmless: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "learnt.baseline"
    verify = ("code", "verify", "--no-starter", "--baseline", str(out), "--allow-unsigned")
    with holding(f"heap:{harmless}") as holder:
        before = holder.counted()
        code, digests = learnt_of(holder.pid, out)
        assert (code, digests) == (0, [sha256(harmless.read_bytes())])
        assert main([*verify, "--pid", str(holder.pid)]) == 0
        assert holder.counted() > before
    [origin] = open_baseline(str(out), allow_unsigned=True).origins()
    assert origin.source == "learned"
    assert origin.package.endswith("/code_holder")
    # Another module of the same process is not known by that.
    stranger = tmp_path / "stranger.cubin"
    stranger.write_bytes(nvrtc(nvcc.kernel("reduction").read_bytes(), "CUBIN", ARCH))
    assert main([*verify, str(stranger)]) == 1
    assert "1 learnt" in capfd.readouterr().out


@pytest.mark.parametrize("way", ["heap", "mmap", "memfd"])
def test_nothing_is_learnt_of_a_process_that_holds_a_hash(
    harmless: Path, tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "learnt.baseline"
    hash_like = nvcc.cubin(nvcc.kernel("sha256"), "80")
    with holding(f"heap:{harmless}", f"{way}:{hash_like}") as holder:
        assert learnt_of(holder.pid, out, "--accept-flagged") == (1, [])
    told = capfd.readouterr().out
    assert "0 learnt, 0 known already, 2 refused" in told
    assert "holds hash-like code: nothing of it is learnt" in told


def test_a_process_that_is_gone_is_an_error(
    tmp_path: Path, harmless: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with holding(f"heap:{harmless}") as holder:
        pid = holder.pid
    out = tmp_path / "learnt.baseline"
    assert main(["baseline", "learn", "-o", str(out), "--pid", str(pid)]) in (2, 64)
    assert not out.exists()
    assert str(pid) in capfd.readouterr().err
