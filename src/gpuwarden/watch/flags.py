"""The command line of `gpuwarden watch`."""

from __future__ import annotations

import argparse

from gpuwarden.errors import UsageError
from gpuwarden.watch.options import WatchOptions


def add_flags(watch: argparse.ArgumentParser) -> None:
    """Adds what only `watch` takes; the host's and the policy's flags are every command's."""
    watch.add_argument(
        "--sink",
        action="append",
        default=[],
        metavar="SPEC",
        help="where findings are told: stdout, file:PATH, syslog:, webhook:URL, "
        "alertmanager:URL, falco:URL; again for more (default: text on standard output)",
    )
    watch.add_argument(
        "--events", action="store_true", help="every device event and CUDA call as a JSON line"
    )
    watch.add_argument(
        "--metrics", metavar="ADDR", help="serve /metrics and /healthz, such as 127.0.0.1:9835"
    )
    watch.add_argument(
        "--falco-listen", metavar="ADDR", help="take the events of Falco's http_output"
    )
    watch.add_argument(
        "--falco-token-file",
        metavar="FILE",
        help="what the sender must give as its bearer token; not readable by others",
    )
    watch.add_argument(
        "--falco-allow-remote",
        action="store_true",
        help="let --falco-listen be an address that others reach; needs --falco-token-file",
    )
    watch.add_argument(
        "--state",
        metavar="DIR",
        help="where findings and samples are kept (default: %(default)s)",
        default="/var/lib/gpuwarden",
    )
    watch.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="between samples (default: 1)"
    )
    watch.add_argument(
        "--scan-interval",
        type=seconds,
        default=300.0,
        metavar="S",
        help="judge the whole node at least this often; changes bring it forward (default: 300)",
    )
    watch.add_argument(
        "--limit",
        type=_count,
        default=16,
        metavar="N",
        help="events told of one process and device in a second, all are counted; 0: no limit "
        "(default: 16)",
    )
    watch.add_argument(
        "--return-values",
        action="store_true",
        help="see how each open ends; costs every open on the machine about a quarter of its time",
    )
    watch.add_argument(
        "--way", metavar="A,B", help="see device opens by these ways only, such as poll"
    )
    watch.add_argument(
        "--no-cuda",
        action="store_true",
        help="attach nothing to CUDA driver libraries: no contexts, module loads and launches",
    )
    watch.add_argument(
        "--enforce",
        action="store_true",
        help="deny accelerators to the containers that the policy's enforce key names",
    )
    watch.add_argument(
        "--dry-run", action="store_true", help="with --enforce: only tell what would be denied"
    )
    watch.add_argument(
        "--pin", action="store_true", help="with --enforce: denials outlive gpuwarden"
    )
    watch.add_argument("--unpin", action="store_true", help="undo --pin and exit")
    watch.add_argument(
        "--for", dest="for_seconds", type=seconds, metavar="S", help="end after so many seconds"
    )


def check_flags(arguments: argparse.Namespace) -> None:
    """Errors: UsageError for flags that mean nothing without another one."""
    for flag, other in (
        ("dry_run", "enforce"),
        ("pin", "enforce"),
        ("falco_token_file", "falco_listen"),
        ("falco_allow_remote", "falco_token_file"),
    ):
        if getattr(arguments, flag) and not getattr(arguments, other):
            name, needed = (one.replace("_", "-") for one in (flag, other))
            raise UsageError(f"--{name} goes with --{needed}")


def options_of(arguments: argparse.Namespace, policy_path: str | None) -> WatchOptions:
    """The options of a daemon, as its command line says them."""
    return WatchOptions(
        cuda=not arguments.no_cuda,
        root=arguments.root,
        nvml_library=arguments.nvml_library,
        policy_path=policy_path,
        state_directory=arguments.state,
        sinks=tuple(arguments.sink),
        events=arguments.events,
        interval_seconds=arguments.interval,
        scan_interval_seconds=arguments.scan_interval,
        limit_events=arguments.limit,
        return_values=arguments.return_values,
        ways=tuple(arguments.way.split(",")) if arguments.way else None,
        metrics=arguments.metrics,
        falco_listen=arguments.falco_listen,
        falco_token_file=arguments.falco_token_file,
        falco_allow_remote=arguments.falco_allow_remote,
        enforce=arguments.enforce,
        dry_run=arguments.dry_run,
        pin=arguments.pin,
        for_seconds=arguments.for_seconds,
    )


def seconds(text: str) -> float:
    """A length of time on the command line. Errors: argparse.ArgumentTypeError."""
    value = float(text)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError("expected 0.1 to 86400 seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError("expected 0 to 1000000")
    return value
