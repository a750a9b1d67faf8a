"""The baseline that is installed with gpuwarden: what public wheels hold.

It needs no signature: who could change it could change gpuwarden. The hash of its head stands here,
so that another file in its place, or a damaged one, is not taken for it.
"""

from __future__ import annotations

import os

from gpuwarden.code.baseline.layout import HEAD, sha256
from gpuwarden.code.baseline.reader import Baseline, open_baseline

PATH = os.path.join(os.path.dirname(__file__), "data", "starter.baseline")
HEAD_SHA256 = "5d359bd7a04967bc07a2cb1a5ed67d2857ddbfee1ec40616a13d06ab8873027e"
"""Written by scripts/build_baselines."""


def head_hash(data: bytes) -> str:
    """The hash by which a baseline's file is told to be the installed one."""
    return sha256(data[: HEAD.size]).hex()


def open_starter(path: str = PATH) -> Baseline:
    """The installed baseline. Errors: Unavailable, Denied when it is another file, Malformed."""
    return open_baseline(path, installed_hash=bytes.fromhex(HEAD_SHA256))
