"""Real parts for tests, installed by the test command itself.

``require("podman", "runc")`` installs what is missing with apt when it runs as root on Debian or
Ubuntu, without letting any service start by itself. Where that cannot be done (not root, another
distribution) the test is skipped with the reason; where it could be done and did not work, it is
skipped too, but fails with ``CI=true``: nothing that can be installed may be missing there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

_POLICY = Path("/usr/sbin/policy-rc.d")
_DENY_SERVICES = "#!/bin/sh\nexit 101\n"
_LOCK = Path("/tmp/gpuwarden-test-packages.lock")
_INDEX = Path("/var/lib/apt/lists")
_APT_SECONDS = 600


def require(*packages: str) -> None:
    """Makes sure that the distribution's ``packages`` are installed, else skips or fails."""
    missing = [package for package in packages if not _installed(package)]
    if not missing:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        pytest.skip(f"needs {', '.join(missing)}, and this is neither Debian nor Ubuntu")
    if os.geteuid() != 0:
        pytest.skip(f"needs {', '.join(missing)}, and only root can install them")
    with _one_at_a_time():
        missing = [package for package in missing if not _installed(package)]
        if missing:
            _install(missing)


def require_root() -> None:
    """Skips unless root."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def unavailable(reason: str) -> NoReturn:
    """Skips with ``reason`` what could have worked here; with ``CI=true`` fails instead."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _installed(package: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    done = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0 and done.stdout.startswith("ii")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Holds off other test runs on this machine while apt works."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """A policy-rc.d that refuses every start; one that is there already is left alone."""
    made = False
    try:
        descriptor = os.open(_POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
        made = True
        with os.fdopen(descriptor, "w") as script:
            script.write(_DENY_SERVICES)
        _POLICY.chmod(0o755)
    except FileExistsError:
        pass
    try:
        yield
    finally:
        if made:
            _POLICY.unlink(missing_ok=True)


def _install(packages: list[str]) -> None:
    if not _candidates(packages):
        _apt("update")
    install = ["install", "--yes", "--no-install-recommends", *packages]
    with _services_stay_down():
        failure = _apt(*install)
        if failure:
            _apt("update")
            failure = _apt(*install)
    if failure:
        unavailable(f"apt could not install {', '.join(packages)}: {failure}")


def _candidates(packages: list[str]) -> bool:
    """Whether the package index that is here already knows all of them."""
    if not any(_INDEX.glob("*_Packages*")):
        return False
    done = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", *packages], capture_output=True, check=False
    )
    return done.returncode == 0


@cache
def _apt_environment() -> dict[str, str]:
    return {
        **os.environ,
        "DEBIAN_FRONTEND": "noninteractive",
        "NEEDRESTART_MODE": "l",
        "LC_ALL": "C",
    }


def _apt(*arguments: str) -> str:
    """Runs apt-get; the last lines of what it complained about, or nothing when it went well."""
    try:
        done = subprocess.run(
            [
                "apt-get",
                "-qq",
                "-o",
                "DPkg::Lock::Timeout=300",
                "-o",
                "Dpkg::Options::=--force-confold",
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_apt_environment(),
            timeout=_APT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_APT_SECONDS} s"
    return "" if done.returncode == 0 else " / ".join(done.stdout.strip().splitlines()[-3:])
