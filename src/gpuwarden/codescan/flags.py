"""The command line of `gpuwarden code`."""

from __future__ import annotations

import argparse

from gpuwarden.codescan.baseline_flags import baseline_flags
from gpuwarden.errors import UsageError


def add_flags(code: argparse.ArgumentParser) -> None:
    """Adds the commands of `code` and what they take."""
    actions = code.add_subparsers(dest="action", required=True, metavar="COMMAND")
    scan = actions.add_parser(
        "scan",
        help="find every GPU module in files, archives, images and processes",
        epilog="exit codes: 0 clear; 1 hash-like code that is not known; 2 something could not be "
        "read; 64 usage",
    )
    target_flags(scan)
    baseline_flags(scan)
    scan.add_argument(
        "--no-judge", action="store_true", help="do not say what unknown modules compute"
    )
    listing_flags(scan)
    output_flags(scan)
    verify = actions.add_parser(
        "verify",
        help="where every module stands: known, rebuilt, the driver's, allowed JIT code, unknown",
        epilog="exit codes: 0 all known; 1 a module that is not known, or is hash-like; 2 "
        "something could not be read; 64 usage",
    )
    target_flags(verify)
    baseline_flags(verify)
    verify.add_argument(
        "--profile", metavar="NAME", help="the baselines and JIT classes of this profile"
    )
    verify.add_argument("--policy", metavar="FILE", help="the policy file that has the profile")
    listing_flags(verify)
    output_flags(verify)


def listing_flags(parser: argparse.ArgumentParser) -> None:
    """Adds how much of each module is told."""
    parser.add_argument("--list", action="store_true", help="tell of every module, known or not")
    parser.add_argument(
        "--kernels", action="store_true", help="and of each one's kernels, with what they use"
    )


def target_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what is looked at."""
    parser.add_argument(
        "target",
        nargs="*",
        metavar="TARGET",
        help="a file, folder, wheel, archive, image archive or layout; or the name of an image "
        "that podman, docker or containerd has here",
    )
    parser.add_argument(
        "--pid",
        action="append",
        type=_pid,
        default=[],
        metavar="PID",
        help="a running process, which is not stopped: its mapped files and its memory",
    )
    parser.add_argument(
        "--all-gpu-processes", action="store_true", help="every process that uses a GPU here"
    )
    parser.add_argument(
        "--nvml-library",
        metavar="PATH",
        help="this libnvidia-ml.so.1 tells who uses a GPU, checked before it is opened",
    )
    parser.add_argument(
        "--all-layers",
        action="store_true",
        help="of images also files that a later layer replaces or deletes",
    )


def output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds how it is told."""
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--quiet", action="store_true", help="no progress on a terminal")


def check_targets(arguments: argparse.Namespace) -> None:
    """Errors: UsageError when nothing is asked for."""
    if not (arguments.target or arguments.pid or arguments.all_gpu_processes):
        raise UsageError("nothing to look at: name a TARGET, --pid or --all-gpu-processes")


def _pid(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:10]) < 1 << 22 | 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no pid")
    return int(text)
