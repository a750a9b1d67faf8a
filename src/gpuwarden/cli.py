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
from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.evidence.flags import add_flags as evidence_flags
from gpuwarden.harden.flags import add_flags as harden_flags
from gpuwarden.inputs import DEFAULT_POLICY, load_policy, node_of
from gpuwarden.journal.flags import add_flags as journal_flags
from gpuwarden.respond.flags import add_flags as respond_flags
from gpuwarden.watch import trace_flags
from gpuwarden.watch.flags import add_flags, check_flags

if TYPE_CHECKING:
    from gpuwarden.codescan.command import Tell
from gpuwarden.outputs.told import Told

RESPONSES: tuple[tuple[str, str, tuple[Callable[[argparse.ArgumentParser], None], bool]], ...] = (
    ("evidence", "one archive of everything about a process; verify one", (evidence_flags, True)),
    ("respond", "what may be done about a finding, and doing one step", (respond_flags, True)),
    ("harden", "what makes the next hijack harder: printed, never applied", (harden_flags, True)),
    ("journal", "what gpuwarden did on this node, and whether it is whole", (journal_flags, False)),
)
"""Name, help, its own flags, and whether it looks at this node."""

EXIT_CLEAR, EXIT_FINDING, EXIT_BLIND, EXIT_USAGE = 0, 1, 2, 64
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
        help="a recorded node: a gpuwarden snapshot, an evidence archive, or nvidia-smi output "
        "(-q -x, --query-compute-apps, pmon); without it, this node",
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

    for name, text, (own_flags, looks) in RESPONSES:
        response = commands.add_parser(name, help=text)
        if looks:
            _host_flags(response)
        _policy_flag(response)
        own_flags(response)

    baseline = commands.add_parser("baseline", help="known-good GPU code: build, sign, learn")
    baseline_flags.add_flags(baseline)
    return parser


def _width() -> int:
    return shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 40)).columns


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _scan(arguments: argparse.Namespace) -> int:
    policy, policy_path = load_policy(arguments.policy)
    snapshot = node_of(arguments, policy)
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

    snapshot = node_of(arguments, load_policy(arguments.policy)[0])
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

    policy, policy_path = load_policy(arguments.policy)
    snapshot = node_of(arguments)
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

    snapshot = node_of(arguments)
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
        policy, _ = load_policy(arguments.policy)
        told = history.tell(node_of(arguments), policy, asked, width=_width())
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
    policy, policy_path = load_policy(arguments.policy)
    if arguments.enforce and not policy.enforce:
        raise UsageError("--enforce: the policy names no container under 'enforce'")
    from gpuwarden.watch.agent import Agent
    from gpuwarden.watch.flags import options_of

    options = options_of(arguments, policy_path)
    agent = Agent(options, policy, reload_policy=lambda: load_policy(arguments.policy)[0])
    return agent.run(agent.say)


def _trace(arguments: argparse.Namespace) -> int:
    trace_flags.check_flags(arguments)
    policy, policy_path = load_policy(arguments.policy)
    from gpuwarden.watch import trace

    return trace.run(arguments, policy, policy_path, width=_width(), colour=_colour(), write=_write)


def _code(arguments: argparse.Namespace) -> int:
    from gpuwarden.codescan import command
    from gpuwarden.policy import Policy

    policy = Policy()
    if arguments.action == "verify" and arguments.profile is not None:
        policy, _ = load_policy(arguments.policy)
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
    return _end(told)


def _respond(arguments: argparse.Namespace) -> int:
    """`evidence`, `respond`, `harden` and `journal`: what could not be done is 2."""
    from importlib import import_module

    from gpuwarden import prompt
    from gpuwarden.outputs.told import Call

    policy, policy_path = load_policy(arguments.policy)
    try:
        call = Call(arguments, policy, policy_path, prompt.tell, prompt.ask, _width(), _colour())
        told = import_module(f"gpuwarden.{arguments.command}.command").run(call)
    except UsageError:
        raise
    except GpuwardenError as error:
        _complain(error)
        return EXIT_BLIND
    return _end(told)


def _end(told: Told) -> int:
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
    "evidence": _respond,
    "respond": _respond,
    "harden": _respond,
    "journal": _respond,
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
