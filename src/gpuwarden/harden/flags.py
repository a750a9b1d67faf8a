"""The command line of `gpuwarden harden`: one site a word, each with its own flags."""

from __future__ import annotations

import argparse

from gpuwarden.harden.kubernetes_flags import add_flags as kubernetes_flags

SECONDS = (2, 3600)
"""Bounds of ``--deadline``."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sites; flags of the host and the policy may stand before or behind the site."""
    sites = parser.add_subparsers(dest="site", required=True, metavar="kubernetes|slurm|host")

    kubernetes = sites.add_parser(
        "kubernetes", help="admission and egress policies, and who would be refused today"
    )
    _policy(kubernetes)
    _looking(kubernetes)
    kubernetes_flags(kubernetes)

    slurm = sites.add_parser("slurm", help="a prolog and an epilog that look for what is left")
    _policy(slurm)
    _looking(slurm)
    _slurm(slurm)

    host = sites.add_parser("host", help="settings of this host, each with its command")
    _policy(host)
    _looking(host)
    host.add_argument("--format", choices=("table", "json"), default="table")


def _policy(parser: argparse.ArgumentParser) -> None:
    # Without a default of its own, a flag that stands before the site keeps its value.
    parser.add_argument("--policy", metavar="FILE", default=argparse.SUPPRESS, help="policy file")


def _looking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", metavar="DIR", default=argparse.SUPPRESS, help="read the host mounted at DIR"
    )
    parser.add_argument(
        "--nvml-library",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="this libnvidia-ml.so.1, checked before it is opened",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        default=argparse.SUPPRESS,
        help="sweep every pid for processes hidden from /proc",
    )


def _slurm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write the scripts there (made if need be), not to stdout",
    )
    parser.add_argument(
        "--drain",
        action="store_true",
        help="what is left drains the node, and a job whose prolog finds it does not start",
    )
    parser.add_argument(
        "--program", metavar="PATH", help="gpuwarden as the scripts call it (default: this one)"
    )
    parser.add_argument(
        "--log", metavar="FILE", help="the scripts append there too what they send to syslog"
    )
    parser.add_argument(
        "--deadline",
        type=_seconds,
        metavar="SECONDS",
        help="at most that long a script runs (default: what slurm.conf leaves, 25 s at most)",
    )
    parser.add_argument(
        "--check",
        choices=("prolog", "epilog"),
        help="what the scripts call: look at this job's GPUs now",
    )
    parser.add_argument("--job", metavar="ID", help="with --check: the job")
    parser.add_argument("--gpus", metavar="LIST", help="with --check: SLURM_JOB_GPUS, a hint")


def _seconds(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not SECONDS[0] <= value <= SECONDS[1]:
        raise argparse.ArgumentTypeError(f"a number from {SECONDS[0]} to {SECONDS[1]}")
    return value
