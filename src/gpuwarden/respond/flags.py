"""The command line of `gpuwarden respond`."""

from __future__ import annotations

import argparse

from gpuwarden.errors import UsageError
from gpuwarden.respond.step_names import STEPS

LONGEST_SECONDS = 600.0
REASON_LIMIT = 500


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes beside the host and the policy."""
    parser.add_argument("what", nargs="?", metavar="FINDING|PID", help="a finding's id, or a pid")
    parser.add_argument(
        "--do", choices=STEPS, metavar="STEP", help=f"do one step: {', '.join(STEPS)}"
    )
    parser.add_argument("--yes", action="store_true", help="do it without asking at the terminal")
    parser.add_argument(
        "--owner-confirmed",
        action="store_true",
        help="the owner was asked and knows nothing of it, or wants it ended",
    )
    parser.add_argument(
        "--evidence-dir",
        metavar="DIR",
        help="where evidence is kept (default: evidence.directory of the policy)",
    )
    parser.add_argument(
        "--state",
        metavar="DIR",
        help="watch's memory, journal and socket (default: %(default)s)",
        default="/var/lib/gpuwarden",
    )
    parser.add_argument(
        "--within",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long after a kill is looked whether it came back (default: 30)",
    )
    parser.add_argument("--reason", metavar="TEXT", default="", help="why, for the journal")
    parser.add_argument(
        "--denied", action="store_true", help="list the control groups that are denied on request"
    )
    parser.add_argument(
        "--allow",
        metavar="GROUP,…",
        help="take denials back by the groups' numbers, as --denied and each deny print them",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuses a command line that does not say one thing. Errors: UsageError."""
    asked = [
        name
        for name, given in (
            ("FINDING|PID", arguments.what is not None),
            ("--denied", arguments.denied),
            ("--allow", arguments.allow is not None),
        )
        if given
    ]
    if len(asked) != 1:
        raise UsageError(
            "respond: one of FINDING|PID, --denied and --allow GROUP is expected",
            remedy="gpuwarden respond 4711",
        )
    if arguments.do is not None and arguments.what is None:
        raise UsageError(f"--do goes with a finding's id or a pid, not with {asked[0]}")
    if arguments.yes and arguments.do is None and arguments.allow is None:
        raise UsageError("--yes goes with --do or --allow")
    if len(arguments.reason) > REASON_LIMIT:
        raise UsageError(f"--reason: longer than {REASON_LIMIT} characters")


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"expected 1 to {LONGEST_SECONDS:g} seconds")
    return value
