"""What `gpuwarden journal` does; it returns what is to be printed."""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from contextlib import suppress

from gpuwarden.errors import Unavailable, UsageError
from gpuwarden.history import seconds_ago
from gpuwarden.journal import page
from gpuwarden.journal.book import head_of
from gpuwarden.journal.entry import Entry, parse_head
from gpuwarden.journal.place import JOURNAL
from gpuwarden.journal.signing import public_key, signing_key
from gpuwarden.journal.verification import Verification, verify
from gpuwarden.model import Fact
from gpuwarden.outputs.told import BLIND, CLEAR, FINDING, Call, Told
from gpuwarden.outputs.words import escape, json_text
from gpuwarden.policy import Policy

SHOWN = 10_000
SECOND_NS = 10**9


class JournalPage(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What `gpuwarden journal --format json` prints."""

    schema: str = "gpuwarden.journal"
    version: int = 1
    verification: Verification
    left_out: int
    """How many older entries are not among these."""
    entries: tuple[Entry, ...]


def run(call: Call) -> Told:
    """The command.

    Errors: GpuwardenError.
    """
    arguments = call.arguments
    if arguments.action != "show" and arguments.since:
        raise UsageError("--since: only with `gpuwarden journal show`")
    if arguments.action != "verify" and (arguments.head or arguments.key):
        raise UsageError("--head and --key: only with `gpuwarden journal verify`")
    path = os.path.abspath(arguments.journal or JOURNAL)
    as_json = arguments.format == "json"
    if arguments.action == "verify":
        return _verify(path, arguments, call.policy, width=call.width, colour=call.colour)
    if arguments.action == "head":
        head = head_of(path)
        if head is None:
            return Told("", BLIND, escape(f"gpuwarden: {path}: there is no entry yet") + "\n")
        return Told(json_text(head) if as_json else f"{head}\n")
    return _show(path, arguments.since, as_json=as_json, width=call.width, colour=call.colour)


def _verify(
    path: str, arguments: argparse.Namespace, policy: Policy, *, width: int, colour: bool
) -> Told:
    head = None if arguments.head is None else parse_head(arguments.head)
    keys = [public_key(one) for one in arguments.key]
    complaint = ""
    if not keys and policy.signing_key is not None:
        try:
            key = signing_key(policy.signing_key)
        except UsageError as error:
            complaint = escape(f"gpuwarden: {error}") + "\n"
        else:
            keys = [] if key is None else [key.public_key().public_bytes_raw()]
    try:
        told = verify(path, keys=keys, head=head)
    except Unavailable as error:
        if head is None or _is_there(path):
            raise
        return Told("", FINDING, escape(f"gpuwarden: {error}, though a head of it was kept") + "\n")
    if arguments.format == "json":
        text = json_text(told)
    else:
        text = page.verification_text(told, width=width, colour=colour)
    return Told(text, CLEAR if told.is_sound else FINDING, complaint)


def _is_there(path: str) -> bool:
    """Errors: OSError when that is not to be seen by us."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _show(path: str, since: str | None, *, as_json: bool, width: int, colour: bool) -> Told:
    from_ns = 0 if since is None else time.time_ns() - seconds_ago(since) * SECOND_NS
    kept: deque[Entry] = deque(maxlen=SHOWN)
    wanted = 0

    def show(entry: Entry) -> None:
        nonlocal wanted
        if entry.time_ns >= from_ns:
            wanted += 1
            kept.append(entry)

    with suppress(OSError):
        if not _is_there(path):
            return Told(escape(f"{path}: no journal: nothing was written down here") + "\n")
    told = verify(path, show=show)
    left_out = wanted - len(kept)
    if as_json:
        text = json_text(JournalPage(verification=told, left_out=left_out, entries=tuple(kept)))
    else:
        text = page.entries_text(tuple(kept), told, left_out=left_out, width=width, colour=colour)
    if told.is_sound:
        return Told(text)
    lines = [f"gpuwarden: {path} does not verify: {told.problems[0]}", "  gpuwarden journal verify"]
    return Told(text, FINDING, escape(lines[0]) + f"\n{lines[1]}\n")
