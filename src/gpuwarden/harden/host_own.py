"""gpuwarden's own files: who else than root can read or change what it knows and goes by."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator

from gpuwarden.control import SOCKET
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.harden.access import changers, who
from gpuwarden.harden.setting import About, Setting
from gpuwarden.host import Host
from gpuwarden.policy import Policy

STATE_DIRECTORY = "/var/lib/gpuwarden"
JOURNAL = f"{STATE_DIRECTORY}/journal"

PROGRAM = About(
    "own-program",
    "who can change gpuwarden itself",
    "It runs as root: who can change it is root.",
)
POLICY = About(
    "own-policy",
    "who can change the policy",
    "The policy says what belongs here: who can change it excuses himself.",
)
POLICY_SINKS = About(
    "own-policy-sinks",
    "who can read the addresses of the sinks",
    "A webhook's address is often also its password.",
    may_break="checks of the policy by other users",
)
KEY = About(
    "own-key",
    "who can read the key that signs evidence and the journal",
    "Who can read it can sign a journal of his own.",
)
STATE = About(
    "own-state",
    "who can read or change what gpuwarden remembers",
    "It holds other users' command lines and addresses; who can change it changes the past.",
    may_break="commands of gpuwarden that other users run on it",
)
CONTROL = About(
    "own-socket",
    "who can ask the daemon to deny or allow",
    "An order over that socket takes GPUs away from a container, or gives them back.",
)


def read(host: Host, policy: Policy, policy_path: str | None) -> Iterator[Setting]:
    """Every path that it goes by, its own program first."""
    if host.is_local:
        for path in dict.fromkeys((sys.executable, os.path.dirname(os.path.dirname(__file__)))):
            yield _changed(PROGRAM, host, path)
    if policy_path is not None:
        path = os.path.abspath(policy_path)
        yield _changed(POLICY, host, path)
        if any(sink.startswith(("webhook:", "alertmanager:", "falco:")) for sink in policy.sinks):
            yield _closed(POLICY_SINKS, host, path)
    if policy.signing_key is not None:
        yield _closed(KEY, host, policy.signing_key)
    for path in dict.fromkeys((STATE_DIRECTORY, JOURNAL, policy.evidence.directory)):
        yield _closed(STATE, host, path)
    yield _closed(CONTROL, host, SOCKET)


def _changed(about: About, host: Host, path: str) -> Setting:
    """Open when others than root can change it."""
    try:
        others = changers(host, path)
    except Unavailable as error:
        return about.said("absent", str(error), path)
    except GpuwardenError as error:
        return about.said("unknown", str(error), path)
    return _said(about, path, others, "chmod go-w")


def _closed(about: About, host: Host, path: str) -> Setting:
    """Open when others than root can read or change it, or reach it at all.

    A directory above that lets nobody through closes what is in it.
    """
    try:
        others = changers(host, path)
        readers = tuple(f"{one} may read" for one in who(host.status(path), write=False))
        if readers and not _reachable(host, path):
            readers = ()
    except Unavailable as error:
        return about.said("absent", str(error), path)
    except GpuwardenError as error:
        return about.said("unknown", str(error), path)
    return _said(about, path, (*others, *readers), "chmod go-rwx")


def _reachable(host: Host, path: str) -> bool:
    """Whether anybody but root passes every directory above."""
    here = os.path.dirname(host.resolved(path))
    while True:
        status = host.status(here)
        if status.uid == 0 and not status.mode & 0o011:
            return False
        if here == "/":
            return True
        here = os.path.dirname(here)


def _said(about: About, path: str, others: tuple[str, ...], command: str) -> Setting:
    if not others:
        return about.said("sound", "root alone", path)
    quoted = shlex.quote(path)
    commands = (f"chown root:root {quoted}", f"{command} {quoted}")
    return about.said("open", ", ".join(others), path, commands=commands)
