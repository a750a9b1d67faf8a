"""A workload that declares its GPU code: a signed baseline, a policy, and who may sign."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gpuwarden.code.baseline.entries import Entry
from gpuwarden.code.baseline.provenance import Provenance
from tests.support.baselines import KEY, collected, packed
from tests.support.code_scans import scanned

PROFILE = "training code"
WORKLOAD = "llm-training"


class DeclaredWorkload:
    """Files of one declared workload in a folder."""

    def __init__(self, folder: Path, *, image: str, modules: Iterable[Path]) -> None:
        """``image``: whose containers it is; ``modules``: files with the code that it may load."""
        self.folder = folder
        self.keys = folder / "keys"
        self.keys.mkdir()
        public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (self.keys / "tests.pem").write_bytes(public)
        origin = Provenance(package="torch", version="2.9.1", file="libtorch_cuda.so")
        known = collected(
            Entry(
                bytes.fromhex(found.module.digest), bytes.fromhex(found.module.code_digest), origin
            )
            for path in modules
            for found in scanned(path).modules
        )
        self.baseline = folder / "training.baseline"
        self.baseline.write_bytes(packed(known, KEY))
        self.policy = folder / "policy.yaml"
        self.image = image
        self.write_policy()

    def write_policy(self, *, workload: str = "", profile: str = "", more: str = "") -> None:
        """The policy, with further keys of the workload and of the profile."""
        self.policy.write_text(
            f"""
workloads:
  - name: {WORKLOAD}
    owner: ml-team
    match: {{image: "{self.image}"}}
    profile: {PROFILE}
{workload}
profiles:
  - name: {PROFILE}
    baselines: [{self.baseline}]
    jit: {{triton: allow}}
{profile}
{more}
"""
        )

    @property
    def program(self) -> tuple[str, ...]:
        """The gpuwarden that trusts who signed the baseline, for ``watching``."""
        return ("tests.support.trusting", str(self.keys))
