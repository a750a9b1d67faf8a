"""The baseline that is installed with gpuwarden: what public wheels hold.

It needs no signature: who could change it could change gpuwarden. The hash of its head stands here,
so that another file in its place, or a damaged one, is not taken for it.
"""

from __future__ import annotations

import os

from gpuwarden.code.baseline.layout import HEAD, sha256
from gpuwarden.code.baseline.reader import Baseline, open_baseline

PATH = os.path.join(os.path.dirname(__file__), "data", "starter.baseline")
HEAD_SHA256 = "fe23585dc5ddaed51ce993dff5bca1e048c63816ff0da1b2aaf8f37af8a714f1"
"""Written by scripts/build_baselines."""


def head_hash(data: bytes) -> str:
    """The hash by which a baseline's file is told to be the installed one."""
    return sha256(data[: HEAD.size]).hex()


def open_starter(path: str = PATH) -> Baseline:
    """The installed baseline. Errors: Unavailable, Denied when it is another file, Malformed."""
    return open_baseline(path, installed_hash=bytes.fromhex(HEAD_SHA256))
