"""The command line of `gpuwarden journal`."""

from __future__ import annotations

import argparse

ACTIONS = ("show", "verify", "head")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes beside the policy."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        default="show",
        help="show the entries (default); verify every byte; print the head, to keep it elsewhere",
    )
    parser.add_argument(
        "--journal", metavar="FILE", help="this file (default: /var/lib/gpuwarden/journal)"
    )
    parser.add_argument("--since", metavar="AGO", help="show: entries since 30m, 2h or 7d ago")
    parser.add_argument(
        "--head", metavar="NUMBER:HASH", help="verify: against a head that was kept elsewhere"
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="PUBLIC.pem",
        help="verify: trust this key (default: the public half of the policy's signing_key)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
