"""The command line of `gpuwarden journal`."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes beside the host and the policy."""
    parser.add_argument("--verify", action="store_true", help="check every entry and the chain")
