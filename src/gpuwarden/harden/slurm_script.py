"""The prolog and the epilog as text: POSIX sh around ``gpuwarden harden slurm --check``.

Sources: slurm.conf(5) on Prolog, Epilog and PrologEpilogTimeout; timeout(1), logger(1).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import NamedTuple

from gpuwarden.harden.slurm_left import Phase

KILL_AFTER_SECONDS = 2
LOG_SECONDS = 2
"""For each of syslog and the log file: either can hang."""
OVERHEAD_SECONDS = KILL_AFTER_SECONDS + 2 * (LOG_SECONDS + 1) + 1
"""What a script takes at most beyond its deadline."""


class Settings(NamedTuple):
    """What is written into a script; every word is quoted there."""

    program: str
    deadline_seconds: int
    drain: bool = False
    policy: str | None = None
    nvml_library: str | None = None
    log: str | None = None


_PURPOSE = {
    "prolog": "Before a job begins: who is on its GPUs already?",
    "epilog": "After a job has ended: who is on its GPUs still?",
}
_REQUEUES = "a failing prolog drains the node and requeues the job"
_STAYS = "Exit code 1 when something is left: the node is drained"
_EXIT: Mapping[tuple[Phase, bool], str] = {
    ("prolog", False): f"The exit code is 0 whatever is found: {_REQUEUES}.",
    ("epilog", False): "The exit code is 0 whatever is found: a failing epilog drains the node.",
    ("prolog", True): f"{_STAYS}, and the job does not start on it.",
    ("epilog", True): f"{_STAYS}.",
}

_TEMPLATE = """\
#!/bin/sh
# Written by `gpuwarden harden slurm`. @PURPOSE@
# It kills nothing. What it cannot see it calls unknown, and unknown never drains a node.
# @EXIT@
# It takes at most @WHOLE@ s: keep PrologEpilogTimeout above that.

set -u
umask 077
# Nothing of the job's is trusted: neither its environment nor where we were started.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
unset IFS ENV BASH_ENV CDPATH LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT
cd / || exit 0

phase=@PHASE@
program=@PROGRAM@
log=@LOG@
job=${SLURM_JOB_ID:-0}
case $job in *[!0-9]*) job=0 ;; esac
gpus=${SLURM_JOB_GPUS:-}

# A file and no pipe: a child that hangs in the driver would keep a pipe open for ever.
report=$(mktemp /run/gpuwarden-slurm.XXXXXXXX 2>/dev/null) || report=
if [ -n "$report" ]; then
    trap 'rm -f "$report"' EXIT
else
    report=/dev/null
fi

timeout -k @KILL@ @DEADLINE@ \\
    env -i PATH="$PATH" HOME=/ LC_ALL=C.UTF-8 \\
    ${SLURM_CONF:+"SLURM_CONF=$SLURM_CONF"} \\
    "$program" harden slurm --check "$phase" "--job=$job" "--gpus=$gpus" @FLAGS@ \\
    </dev/null >"$report" 2>&1
code=$?

# A program that breaks down also ends with 1: only its own words say that something is left.
if [ "$code" -eq 1 ] && ! grep -q "^gpuwarden $phase: job [0-9]*: left: " "$report"; then
    code='1 and no finding'
fi
case $code in
0) level=info ;;
1) level=warning ;;
2) level=notice ;;
*)
    level=warning
    printf 'gpuwarden %s: job %s: unknown: the check ended with %s (124 or 137: out of time)\\n' \\
        "$phase" "$job" "$code" >>"$report"
    ;;
esac

if [ "$report" != /dev/null ]; then
    timeout -k 1 @LOGSECONDS@ logger -t "gpuwarden-$phase" -p "daemon.$level" \\
        -f "$report" 2>/dev/null
    if [ -n "$log" ]; then
        timeout -k 1 @LOGSECONDS@ tee -a "$log" <"$report" >/dev/null 2>&1
    fi
    # slurmd writes this to its own log when the exit code is not 0.
    cat "$report"
fi
@END@
"""
_END = """\
exit 0"""
_DRAINING_END = """\
# The check has drained the node by scontrol, with a reason, if the controller answered; the exit
# code drains it also where that failed, and leaves the reason that stands there.
[ "$code" != 1 ] || exit 1
exit 0"""


def whole_seconds(settings: Settings) -> int:
    """The longest that a script of these settings takes."""
    return settings.deadline_seconds + OVERHEAD_SECONDS


def script(phase: Phase, settings: Settings) -> str:
    """The text of one script."""
    flags = [f"--deadline={settings.deadline_seconds - 1}"]
    flags += ["--drain"] if settings.drain else []
    flags += [f"--policy={settings.policy}"] if settings.policy is not None else []
    if settings.nvml_library is not None:
        flags.append(f"--nvml-library={settings.nvml_library}")
    words = {
        "PURPOSE": _PURPOSE[phase],
        "EXIT": _EXIT[phase, settings.drain],
        "WHOLE": str(whole_seconds(settings)),
        "PHASE": phase,
        "PROGRAM": shlex.quote(settings.program),
        "LOG": shlex.quote(settings.log or ""),
        "KILL": str(KILL_AFTER_SECONDS),
        "DEADLINE": str(settings.deadline_seconds),
        "LOGSECONDS": str(LOG_SECONDS),
        "FLAGS": shlex.join(flags),
        "END": _DRAINING_END if settings.drain else _END,
    }
    parts = _TEMPLATE.split("@")
    # What stands between two marks is a word; a value is never looked at for marks again.
    return "".join(words[part] if at % 2 else part for at, part in enumerate(parts))
