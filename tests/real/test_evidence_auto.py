"""A real `gpuwarden watch` that writes evidence by itself when a finding opens as critical."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.evidence.verify import verify
from gpuwarden.snapshot import open_recording
from gpuwarden.watch import evidence_side
from tests.support.archives import key_pair
from tests.support.packages import require_root
from tests.support.probes import build, node
from tests.support.watching import GPU, Watching, watching

pytestmark = pytest.mark.real

SIGNS = ("-a", "kawpow", "-o", "stratum+tcp://pool.example.net:3333", "-u", "WALLET_X.rig")
"""A miner's command line in full, which nothing listens to."""
HOLDER = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print('open', flush=True); input()"
WRITTEN, FAILED = "evidence_written", "evidence_failed"
ARCHIVE_SECONDS = evidence_side.DEADLINE_SECONDS + evidence_side.GRACE_SECONDS
"""As long as the agent itself waits for the child that writes one, which lets all others first."""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require_root()
    build()


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return policy_file(tmp_path)


def policy_file(directory: Path, **bounds: int) -> Path:
    """A policy that asks for evidence below ``directory``, signed."""
    key, _, _ = key_pair(directory)
    private = directory / "private.pem"
    from cryptography.hazmat.primitives import serialization as forms

    private.touch(mode=0o600)
    private.write_bytes(
        key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    )
    evidence = {"on": "critical", "directory": str(directory / "evidence"), **bounds}
    path = directory / "policy.yaml"
    # JSON is YAML.
    path.write_text(json.dumps({"version": 1, "signing_key": str(private), "evidence": evidence}))
    return path


@contextmanager
def accused(directory: Path, name: str = "cat.jpg") -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a miner's command line and holds a GPU."""
    gpu = node(directory / name, GPU)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(gpu), *SIGNS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "API_TOKEN": "not-to-be-told-7d1f"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process
    finally:
        process.communicate(b"\n")


def outcomes(agent: Watching, rule: str) -> list[dict[str, Any]]:
    return [one for one in agent.findings(rule) if one["status"] == "opened"]


def archives(directory: Path) -> list[Path]:
    return sorted((directory / "evidence").glob("*.tar"))


def test_a_critical_finding_is_followed_by_one_archive(
    tmp_path: Path, policy: Path, record_property: Any
) -> None:
    arguments = ("--policy", str(policy))
    with watching(tmp_path, *arguments) as agent, accused(tmp_path) as process:
        agent.wait(lambda: outcomes(agent, WRITTEN), "the archive", ARCHIVE_SECONDS)
        critical = [one for one in agent.findings(pid=process.pid) if one["severity"] == "critical"]
        (written,) = outcomes(agent, WRITTEN)
        assert critical[0]["id"] in written["subject"]["name"]
        (path,) = archives(tmp_path)
        assert str(path) in json.dumps(written["evidence"])
        told = verify(str(path), trusted=[public_of(tmp_path)])
        assert (told.state, told.signature, told.problems) == ("intact", "trusted", ())
        assert told.manifest is not None
        begun, ended = (
            (clock.realtime_ns - critical[0]["at_ns"]) / 1e9
            for clock in (told.manifest.begun, told.manifest.ended)
        )
        record_property("seconds from the finding to the archive", round(ended, 3))
        print(f"archive: begun {begun:.3f} s, complete {ended:.3f} s after the finding")
        account = told.manifest.account
        assert account.finding == critical[0]["id"]
        assert account.subject.pid == process.pid
        assert account.subject.start_time_ticks == critical[0]["subject"]["start_time_ticks"]
        assert account.why == f"finding {critical[0]['id']} opened as critical"
        assert b"not-to-be-told-7d1f" not in path.read_bytes()
        recorded = open_recording(str(path))
        assert process.pid in {one.pid for one in recorded.processes}
        # What the agent starts to look is none of those that it watches.
        assert {one["subject"].get("pid") for one in critical} == {process.pid}
    journal = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "journal", "--journal", str(agent.state / "journal")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "evidence: done" in journal.stdout and critical[0]["id"] in journal.stdout

    # Told again after a restart, it is no reason for another archive.
    with watching(tmp_path, *arguments) as agent, accused(tmp_path, "dog.jpg") as other:
        agent.wait(lambda: len(outcomes(agent, WRITTEN)) == 2, "the other archive", ARCHIVE_SECONDS)
        assert len(archives(tmp_path)) == 2
        first = verify(str(path)).manifest
        pids = {first.account.subject.pid if first else None, other.pid}
        assert pids == {process.pid, other.pid}


def test_a_full_directory_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    policy = policy_file(tmp_path, keep_mib=1)
    (tmp_path / "evidence").mkdir(mode=0o700)
    old = tmp_path / "evidence" / "old.tar"
    old.write_bytes(os.urandom(1 << 20))
    with watching(tmp_path, "--policy", str(policy)) as agent, accused(tmp_path):
        agent.wait(lambda: outcomes(agent, FAILED), "the failure")
        (told,) = outcomes(agent, FAILED)
        assert told["severity"] == "warning"
        assert "keep_mib is 1" in json.dumps(told["evidence"])
    assert archives(tmp_path) == [old]


def test_a_pid_that_is_another_process_by_now_gets_no_archive(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        told = subprocess.run(
            [
                *(sys.executable, "-m", "gpuwarden", "evidence", str(sleeper.pid)),
                *("--start-time", "1", "-o", str(tmp_path / "evidence")),
                *("--state", str(tmp_path / "state")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        sleeper.kill()
        sleeper.wait()
    assert told.returncode == 2 and str(sleeper.pid) in told.stderr
    assert list((tmp_path / "evidence").iterdir()) == []
    assert '"stage":"failed"' in (tmp_path / "state/journal").read_text()


def public_of(directory: Path) -> bytes:
    from gpuwarden.journal.signing import public_key

    return public_key(str(directory / "public.pem"))
