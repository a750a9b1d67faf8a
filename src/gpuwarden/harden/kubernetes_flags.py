"""The command line of `gpuwarden harden kubernetes`."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the site takes beside the host and the policy."""
    parser.add_argument(
        "--audit",
        action="store_true",
        help="warn and write to the audit log instead of refusing: apply this first",
    )
    today = parser.add_mutually_exclusive_group()
    today.add_argument(
        "--pods",
        metavar="FILE",
        help="who would be refused of these: kubectl get pods,services -A -o json; - for stdin",
    )
    today.add_argument(
        "--cluster",
        action="store_true",
        help="ask the API server for today's pods and services (list, nothing else)",
    )
    parser.add_argument(
        "--from",
        dest="recordings",
        nargs="+",
        metavar="FILE",
        help="recorded nodes (gpuwarden snapshot) whose egress is learned; without it, this node's",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="write the files there instead of printing them"
    )
    parser.add_argument(
        "--gpu-resource",
        action="append",
        default=[],
        metavar="NAME",
        help="another resource that is a GPU; may hold * (example.com/gpu-*); may be repeated",
    )
    parser.add_argument(
        "--runtime-class",
        action="append",
        default=[],
        metavar="NAME",
        help="another runtime class that passes GPUs in; may hold *; may be repeated",
    )
