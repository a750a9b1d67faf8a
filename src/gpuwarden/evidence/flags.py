"""The command line of `gpuwarden evidence`."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes beside the host and the policy."""
    parser.add_argument("what", nargs="*", metavar="PID", help="a process; or: verify FILE")
