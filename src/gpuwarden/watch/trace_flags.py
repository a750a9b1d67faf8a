"""The command line of `gpuwarden trace`."""

from __future__ import annotations

import argparse

from gpuwarden.errors import UsageError
from gpuwarden.watch.flags import seconds


def add_flags(trace: argparse.ArgumentParser) -> None:
    """Adds what only `trace` takes."""
    trace.add_argument(
        "pid", nargs="?", type=int, metavar="PID", help="a process, with those that it starts"
    )
    trace.add_argument(
        "--container", metavar="ID", help="a container, by the beginning of its id or by its name"
    )
    trace.add_argument("--all", action="store_true", help="every process that uses CUDA")
    trace.add_argument(
        "--for", dest="for_seconds", type=seconds, metavar="S", help="end after so many seconds"
    )
    trace.add_argument(
        "--events", action="store_true", help="each event as a JSON line, as watch tells them"
    )
    trace.add_argument(
        "--launches", action="store_true", help="launches as well, a line for each second"
    )
    trace.add_argument(
        "--learn",
        metavar="FILE",
        help="write the launch profile of this run, which must be without signs, to FILE",
    )
    trace.add_argument(
        "--merge",
        action="store_true",
        help="with --learn: add this run to the profile that FILE already is",
    )


def check_flags(arguments: argparse.Namespace) -> None:
    """Errors: UsageError unless exactly one kind of subject is named."""
    subjects = (arguments.pid is not None, arguments.container is not None, arguments.all)
    if sum(subjects) != 1:
        raise UsageError("trace: name a PID, --container ID or --all")
    if arguments.pid is not None and not 0 < arguments.pid < 1 << 31:
        raise UsageError(f"trace: {arguments.pid} is no process id")
    if arguments.merge and arguments.learn is None:
        raise UsageError("--merge goes with --learn")
    if arguments.learn is not None and arguments.all:
        raise UsageError("--learn: a launch profile is that of one workload: a PID or a container")
