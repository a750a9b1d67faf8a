"""Flags → calls: the only place that prints or exits."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from gpuwarden import __version__
from gpuwarden.codescan import baseline_flags, flags
from gpuwarden.errors import GpuwardenError, Unavailable, UsageError
from gpuwarden.watch import trace_flags
from gpuwarden.watch.flags import add_flags, check_flags

if TYPE_CHECKING:
    from gpuwarden.codescan.command import Tell, Told
    from gpuwarden.model import Snapshot
    from gpuwarden.policy import Policy

EXIT_CLEAR, EXIT_FINDING, EXIT_BLIND, EXIT_USAGE = 0, 1, 2, 64
DEFAULT_POLICY = "/etc/gpuwarden/policy.yaml"
WIDTH_WITHOUT_TERMINAL = 140


class _Parser(argparse.ArgumentParser):
    """argparse with sysexits' 64 for a usage error."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def _host_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", default="/", metavar="DIR", help="read the host mounted at DIR (needs hostPID)"
    )
    parser.add_argument(
        "--nvml-library", metavar="PATH", help="this libnvidia-ml.so.1, checked before it is opened"
    )
    parser.add_argument(
        "--deep", action="store_true", help="sweep every pid for processes hidden from /proc"
    )


def _policy_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", metavar="FILE", help=f"policy file (default: {DEFAULT_POLICY} if it is there)"
    )


def _format_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("table", "json"), default="table")


def _recording_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording",
        nargs="?",
        metavar="FILE",
        help="a recorded node: a gpuwarden snapshot, or nvidia-smi output (-q -x, "
        "--query-compute-apps, pmon); without it, this node",
    )


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="gpuwarden",
        description="Who is on the GPUs of this node, and do they belong?",
        epilog="exit codes: 0 clear; 1 a finding at or above --fail-on; 2 something could not be "
        "evaluated; 64 usage",
    )
    parser.add_argument("--version", action="version", version=f"gpuwarden {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    scan = commands.add_parser("scan", help="one verdict for every process on every GPU")
    _recording_argument(scan)
    _host_flags(scan)
    _policy_flag(scan)
    _format_flag(scan)
    scan.add_argument(
        "--fail-on",
        choices=("info", "warning", "error", "critical"),
        default="error",
        help="exit 1 from this severity on (default: error)",
    )
    scan.add_argument("--sensors", metavar="A,B", help="only these sensors (see doctor)")

    snapshot = commands.add_parser("snapshot", help="record this node to a file")
    snapshot.add_argument("file", metavar="FILE")
    _host_flags(snapshot)
    _policy_flag(snapshot)

    expect = commands.add_parser("expect", help="print the expected set, or draft a policy")
    _recording_argument(expect)
    _host_flags(expect)
    _policy_flag(expect)
    _format_flag(expect)
    expect.add_argument(
        "--learn", action="store_true", help="write a policy from what runs now, to be edited"
    )

    doctor = commands.add_parser("doctor", help="which sensors work here, and what to do if not")
    _host_flags(doctor)
    _format_flag(doctor)

    history = commands.add_parser("history", help="since when: a process's or a GPU's past")
    history.add_argument("pid", nargs="?", type=int, metavar="PID")
    history.add_argument("--gpu", metavar="N", help="a GPU by number or UUID")
    history.add_argument(
        "--module", metavar="DIGEST", help="when a GPU module was first loaded here, and by whom"
    )
    history.add_argument("--from", dest="recording", metavar="FILE", help="a recorded node")
    history.add_argument(
        "--since", metavar="AGO", help="what is remembered since 30m, 2h or 7d ago"
    )
    history.add_argument(
        "--state",
        metavar="DIR",
        help="watch's memory (default, without --from: /var/lib/gpuwarden)",
    )
    _format_flag(history)
    _host_flags(history)
    _policy_flag(history)

    watch = commands.add_parser("watch", help="a daemon: every device open as it happens")
    _host_flags(watch)
    _policy_flag(watch)
    add_flags(watch)

    trace = commands.add_parser("trace", help="contexts, module loads and launches as they happen")
    _host_flags(trace)
    _policy_flag(trace)
    trace_flags.add_flags(trace)

    code = commands.add_parser("code", help="every GPU module in files, images and processes")
    flags.add_flags(code)

    baseline = commands.add_parser("baseline", help="known-good GPU code: build, sign, learn")
    baseline_flags.add_flags(baseline)
    return parser


def _load_policy(path: str | None) -> tuple[Policy, str | None]:
    from gpuwarden.policy import Policy

    if path is None and not os.path.lexists(DEFAULT_POLICY):
        return Policy(), None
    from gpuwarden.host import Host
    from gpuwarden.policy_file import POLICY_LIMIT_BYTES, parse_policy
    from gpuwarden.rules.registry import RULE_IDS

    wanted = path or DEFAULT_POLICY
    try:
        data = Host().read_bytes(os.path.abspath(wanted), POLICY_LIMIT_BYTES + 1)
    except Unavailable as error:
        raise UsageError(f"{wanted}: cannot be read: no such file") from error
    except GpuwardenError as error:
        raise UsageError(f"{wanted}: cannot be read: {error}") from error
    return parse_policy(data, wanted, RULE_IDS), wanted


def _snapshot(arguments: argparse.Namespace, policy: Policy | None = None) -> Snapshot:
    """A recorded node if one was named, else this one with the GPU code that a policy asks for."""
    recording = getattr(arguments, "recording", None)
    if recording is not None:
        from gpuwarden.snapshot import open_recording

        try:
            return open_recording(recording)
        except GpuwardenError as error:
            raise UsageError(str(error), remedy=error.remedy) from error
    from gpuwarden.host import Host
    from gpuwarden.scan import ScanOptions, take_snapshot
    from gpuwarden.sensors.registry import SENSOR_NAMES

    if not os.path.isdir(arguments.root):
        raise UsageError(f"--root {arguments.root}: not a directory")
    library = arguments.nvml_library
    if library is not None and not os.path.lexists(library):
        raise UsageError(f"--nvml-library {library}: no such file")
    chosen: frozenset[str] | None = None
    if getattr(arguments, "sensors", None):
        chosen = frozenset(arguments.sensors.split(","))
        unknown = sorted(chosen - set(SENSOR_NAMES))
        if unknown:
            raise UsageError(
                f"--sensors: no sensor is called '{unknown[0]}'; "
                f"there are: {', '.join(SENSOR_NAMES)}"
            )
    options = ScanOptions(sensors=chosen, nvml_library=arguments.nvml_library, deep=arguments.deep)
    if policy is not None and policy.profiles and chosen is None:
        from gpuwarden.codescan.live import LiveCode

        options = options._replace(code=LiveCode(policy))
    return take_snapshot(Host(arguments.root), options, meanwhile=_load_judgement)


def _load_judgement() -> None:
    """Imports what comes after looking, in the time in which the driver's child is at work."""
    import gpuwarden.judge
    import gpuwarden.outputs.table  # noqa: F401


def _width() -> int:
    return shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 40)).columns


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _scan(arguments: argparse.Namespace) -> int:
    policy, policy_path = _load_policy(arguments.policy)
    snapshot = _snapshot(arguments, policy)
    from gpuwarden.judge import exit_code, judge

    report = judge(snapshot, policy, policy_path)
    code = exit_code(report, arguments.fail_on)
    if arguments.format == "json":
        from gpuwarden.outputs import json_output

        _write(json_output.render(report))
    else:
        from gpuwarden.outputs import table

        _write(table.render(report, width=_width(), colour=_colour(), exit_code=code))
    return code


def _record(arguments: argparse.Namespace) -> int:
    from gpuwarden.outputs.words import escape
    from gpuwarden.snapshot import write

    snapshot = _snapshot(arguments, _load_policy(arguments.policy)[0])
    try:
        write(arguments.file, snapshot)
    except GpuwardenError as error:
        raise UsageError(str(error)) from error
    unseen = [s for s in snapshot.sensors if s.state in ("failed", "partial")]
    _write(
        f"{arguments.file}: {len(snapshot.gpus)} GPUs, {len(snapshot.clients)} GPU clients, "
        f"{len(snapshot.processes)} processes recorded\n"
    )
    for run in unseen:
        _write(escape(f"  not all was seen: {run.name} ({run.state}): {run.reason}") + "\n")
    return EXIT_BLIND if any(s.state == "failed" for s in unseen) else EXIT_CLEAR


def _expect(arguments: argparse.Namespace) -> int:
    from gpuwarden import expectation

    policy, policy_path = _load_policy(arguments.policy)
    snapshot = _snapshot(arguments)
    if arguments.learn:
        _write(expectation.learn(snapshot, policy))
        return EXIT_CLEAR
    text, complete = expectation.render(
        snapshot, policy, policy_path, as_json=arguments.format == "json"
    )
    _write(text)
    return EXIT_CLEAR if complete else EXIT_BLIND


def _doctor(arguments: argparse.Namespace) -> int:
    from gpuwarden import doctor
    from gpuwarden.host import Host

    snapshot = _snapshot(arguments)
    opens = doctor.device_opens(Host(arguments.root))
    text, sound = doctor.examine(
        snapshot, as_json=arguments.format == "json", width=_width(), opens=opens
    )
    _write(text)
    return EXIT_CLEAR if sound else EXIT_BLIND


def _history(arguments: argparse.Namespace) -> int:
    from gpuwarden import history

    if arguments.module is not None:
        from gpuwarden.history import sightings

        told = sightings.asked(vars(arguments), width=_width())
    else:
        asked = history.asked(vars(arguments))
        policy, _ = _load_policy(arguments.policy)
        told = history.tell(_snapshot(arguments), policy, asked, width=_width())
    _write(told.text)
    sys.stderr.write(told.complaint)
    return EXIT_CLEAR if told.found and not told.complaint else EXIT_BLIND


def _watch(arguments: argparse.Namespace) -> int:
    if arguments.unpin:
        from gpuwarden.probes.pinning import unpin

        removed = unpin()
        _write("".join(f"removed {one}\n" for one in removed) or "nothing was pinned\n")
        return EXIT_CLEAR
    check_flags(arguments)
    policy, policy_path = _load_policy(arguments.policy)
    if arguments.enforce and not policy.enforce:
        raise UsageError("--enforce: the policy names no container under 'enforce'")
    from gpuwarden.watch.agent import Agent
    from gpuwarden.watch.flags import options_of

    options = options_of(arguments, policy_path)
    agent = Agent(options, policy, reload_policy=lambda: _load_policy(arguments.policy)[0])
    return agent.run(agent.say)


def _trace(arguments: argparse.Namespace) -> int:
    trace_flags.check_flags(arguments)
    policy, policy_path = _load_policy(arguments.policy)
    from gpuwarden.watch import trace

    return trace.run(arguments, policy, policy_path, width=_width(), colour=_colour(), write=_write)


def _code(arguments: argparse.Namespace) -> int:
    from gpuwarden.codescan import command
    from gpuwarden.policy import Policy

    policy = Policy()
    if arguments.action == "verify" and arguments.profile is not None:
        policy, _ = _load_policy(arguments.policy)
    return _look(
        arguments,
        lambda tell: command.run(arguments, policy, tell, width=_width(), colour=_colour()),
    )


def _baseline(arguments: argparse.Namespace) -> int:
    baseline_flags.check_flags(arguments)
    from gpuwarden.codescan import baseline_commands

    return _look(arguments, lambda tell: baseline_commands.run(arguments, tell))


def _look(arguments: argparse.Namespace, run: Callable[[Tell], Told]) -> int:
    """One command that looks at GPU code, with its progress; what cannot be read is 2."""
    from gpuwarden.codescan.progress import progress_on

    quiet = getattr(arguments, "quiet", False)
    with progress_on(sys.stderr, width=_width(), quiet=quiet) as tell:
        try:
            told = run(tell)
        except UsageError:
            raise
        except GpuwardenError as error:
            _complain(error)
            return EXIT_BLIND
    _write(told.text)
    sys.stderr.write(told.complaint)
    return told.code


def _complain(error: GpuwardenError) -> None:
    from gpuwarden.outputs.words import escape

    remedy = f"\n  {escape(error.remedy)}" if error.remedy else ""
    message = escape(f"gpuwarden: {error}") + remedy + "\n"
    sys.stderr.buffer.write(message.encode(sys.stderr.encoding or "utf-8", "backslashreplace"))


def _write(text: str) -> None:
    # A terminal that is not UTF-8 still gets every line.
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()


COMMANDS = {
    "scan": _scan,
    "snapshot": _record,
    "expect": _expect,
    "doctor": _doctor,
    "history": _history,
    "watch": _watch,
    "trace": _trace,
    "code": _code,
    "baseline": _baseline,
}


def _open_what_is_closed() -> None:
    """/dev/null for standard descriptors that are closed: else the next file gets their number,
    and what is told."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _open_what_is_closed()
    arguments = build_parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except UsageError as error:
        _complain(error)
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader went away (a pager, head): nothing is wrong with the scan.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_CLEAR
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
