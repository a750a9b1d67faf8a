"""NVIDIA's real driver library, from the non-free component of the machine's own Debian mirror.

It is unpacked to ``build/libcuda`` and kept; it is not installed, and it loads without a GPU.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build/libcuda"
PACKAGE = "libcuda1"
_KEYRINGS = Path("/usr/share/keyrings")
_SECONDS = 300


class NotToBeHadError(Exception):
    """Why the library cannot be had here."""


def driver_library() -> Path:
    """The library's file. Errors: NotToBeHadError."""
    if (found := _unpacked()) is None:
        _fetch()
        found = _unpacked()
    if found is None:
        raise NotToBeHadError(f"the package {PACKAGE} has no libcuda.so.1")
    return found


def _unpacked() -> Path | None:
    for link in sorted(PLACE.glob("root/usr/lib/**/libcuda.so.1")):
        return link.resolve()
    return None


def _fetch() -> None:
    if platform.machine() != "x86_64":
        raise NotToBeHadError(f"Debian has {PACKAGE} for amd64, and this is {platform.machine()}")
    system = platform.freedesktop_os_release().get("ID", "another system")
    if system != "debian" or shutil.which("apt-get") is None:
        raise NotToBeHadError(f"it is taken from Debian's archive, and this is {system}")
    shutil.rmtree(PLACE, ignore_errors=True)
    for folder in ("lists/partial", "archives/partial", "sources"):
        (PLACE / folder).mkdir(parents=True)
    sources = PLACE / "sources/non-free.list"
    sources.write_text(_non_free_sources())
    _apt("update")
    _apt("download", PACKAGE)
    for package in PLACE.glob(f"{PACKAGE}_*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, PLACE / "root"], check=True)


def _non_free_sources() -> str:
    """apt's lines for the non-free component of what this machine takes ``main`` from."""
    done = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(CREATED_BY)|$(COMPONENT)|$(RELEASE)|$(REPO_URI)",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    keys = sorted(_KEYRINGS.glob("debian-archive-keyring.[gp]*"))
    signed = f"[signed-by={keys[0]}] " if keys else ""
    lines = set()
    for line in done.stdout.splitlines():
        kind, component, release, place = line.split("|", 3)
        if kind == "Packages" and component == "main" and not release.endswith("-security"):
            lines.add(f"deb {signed}{place} {release} non-free\n")
    if not lines:
        raise NotToBeHadError("apt has no Debian archive among its sources")
    return "".join(sorted(lines))


def _apt(*arguments: str) -> None:
    """Runs apt-get upon lists of its own. Errors: NotToBeHadError with its complaint."""
    where = {
        "Dir::Etc::sourcelist": PLACE / "sources/non-free.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": PLACE / "lists",
        "Dir::Cache::archives": PLACE / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    options = [word for key, value in where.items() for word in ("-o", f"{key}={value}")]
    try:
        done = subprocess.run(
            ["apt-get", "-qq", *options, *arguments],
            cwd=PLACE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotToBeHadError(f"apt-get {arguments[0]} took over {_SECONDS} s") from None
    if done.returncode:
        last = " / ".join(done.stdout.strip().splitlines()[-3:])
        raise NotToBeHadError(f"apt-get {' '.join(arguments)}: {last}")
