"""The baseline that is installed with gpuwarden: what public wheels hold.

It needs no signature: who could change it could change gpuwarden. The hash of its head stands here,
so that another file in its place, or a damaged one, is not taken for it.
"""

from __future__ import annotations

import os

from gpuwarden.code.baseline.layout import HEAD, sha256
from gpuwarden.code.baseline.reader import Baseline, open_baseline

PATH = os.path.join(os.path.dirname(__file__), "data", "starter.baseline")
HEAD_SHA256 = "c1d00dfe47ad3ffef3ae904e614a8ee16c5f3299c07ecc3da85c90e4eb6a5eb8"
"""Written by scripts/build_baselines."""


def head_hash(data: bytes) -> str:
    """The hash by which a baseline's file is told to be the installed one."""
    return sha256(data[: HEAD.size]).hex()


def open_starter(path: str = PATH) -> Baseline:
    """The installed baseline. Errors: Unavailable, Denied when it is another file, Malformed."""
    return open_baseline(path, installed_hash=bytes.fromhex(HEAD_SHA256))
