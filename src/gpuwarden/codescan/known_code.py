"""Which baselines a command asks, and whose signatures on them hold here."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Sequence

from msgspec import Struct

from gpuwarden.code.baseline.reader import Baseline, open_baseline
from gpuwarden.code.baseline.starter import open_starter
from gpuwarden.code.standing import JitRule
from gpuwarden.errors import Denied, GpuwardenError, UsageError
from gpuwarden.keys import PEM_LIMIT_BYTES, read_public
from gpuwarden.outputs.words import escape
from gpuwarden.policy import JIT_CLASSES, STARTER, PolicyProfile

KEY_DIRECTORY = "/etc/gpuwarden/keys"
KEYS_LIMIT = 1000
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Trust(Struct, frozen=True):
    """Whose signatures hold: the keys in the directory, and those named."""

    keys: frozenset[bytes]
    """Raw ed25519 public keys."""
    allow_unsigned: bool = False


def trust(
    key_files: Sequence[str] = (), *, allow_unsigned: bool = False, directory: str | None = None
) -> Trust:
    """The trusted keys: every ``*.pem`` of the directory (KEY_DIRECTORY), and the files named.

    Errors: UsageError when a named file holds no key; Denied when others than root may change the
    directory or a key in it.
    """
    keys = {read_public(_read(path, path), path) for path in key_files}
    keys.update(read_public(raw, path) for path, raw in _installed_keys(directory or KEY_DIRECTORY))
    return Trust(frozenset(keys), allow_unsigned)


def _installed_keys(directory: str) -> list[tuple[str, bytes]]:
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".pem"))
        _refuse_others(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Denied(f"{directory}: {error.strerror}") from error
    found = []
    for name in names[:KEYS_LIMIT]:
        path = f"{directory}/{name}"
        _refuse_others(path)
        found.append((path, _read(path, path)))
    return found


def _refuse_others(path: str) -> None:
    status = os.stat(path)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & _WRITABLE_BY_OTHERS:
        raise Denied(
            f"{path}: others than root may change whose signatures hold",
            remedy=f"chown root: {path} && chmod go-w {path}",
        )


def _read(path: str, where: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(descriptor, PEM_LIMIT_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error


def open_named(paths: Sequence[str], trusted: Trust) -> list[Baseline]:
    """The baselines at ``paths`` in order; the word ``starter`` is the installed one.

    Errors: Unavailable, Denied or Malformed with the file's name.
    """
    return [
        open_starter()
        if path == STARTER
        else open_baseline(path, trusted=trusted.keys, allow_unsigned=trusted.allow_unsigned)
        for path in paths
    ]


def baselines_of(arguments: argparse.Namespace) -> list[Baseline]:
    """The baselines that a command line names, the installed one first unless it is left out.

    Errors: as ``open_named``, UsageError for a key that is none.
    """
    names = [*([] if arguments.no_starter else [STARTER]), *arguments.baseline]
    return open_named(names, trust(arguments.key, allow_unsigned=arguments.allow_unsigned))


def open_profile(profile: PolicyProfile, trusted: Trust) -> list[Baseline]:
    """The baselines of a profile. Errors: as ``open_named``, told with the profile's name."""
    try:
        return open_named(profile.baselines, trusted)
    except GpuwardenError as error:
        raise type(error)(f"profile {profile.name}: {error}", remedy=error.remedy) from error


def jit_rules(profile: PolicyProfile) -> dict[str, JitRule]:
    """JIT class → what the profile says of it, without classes that it does not name."""
    rules = {name: profile.jit.of(name) for name in JIT_CLASSES}
    return {name: rule for name, rule in rules.items() if rule is not None}


def described(baseline: Baseline) -> str:
    """A baseline in one line, with what its signature is worth."""
    head, signer = baseline.head, baseline.signer
    name = " ".join(part for part in (head.name or baseline.path, head.version) if part)
    sealed = {
        "trusted": f"signed by key {signer.key}",
        "installed": "installed with gpuwarden",
        "unsigned": "NOT SIGNED",
        "unknown key": f"SIGNED BY AN UNKNOWN KEY, {signer.key}",
        "wrong signature": "ITS SIGNATURE DOES NOT FIT IT",
    }[signer.trust]
    return f"{name}: {head.digests} digests, {sealed}"


def warnings_of(baselines: Sequence[Baseline]) -> str:
    """Lines about baselines that are used although nobody who is trusted signed them."""
    return "".join(f"note: {escape(described(one))}\n" for one in baselines if not one.signer.holds)
