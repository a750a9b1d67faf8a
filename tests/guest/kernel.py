"""The distribution's own kernel, from its package, for a machine that runs another one."""

from __future__ import annotations

import lzma
import re
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

# What the distribution calls "the newest kernel"; Debian's, then Ubuntu's smallest.
META_PACKAGES = ("linux-image-amd64", "linux-image-virtual")
MODULES = ("fuse", "cuse")
"""In the order in which they are loaded; one that is missing is built into the kernel."""
_KERNEL = re.compile(r"linux-(image|modules)-\d[\w.+~-]*")
_WANTED = re.compile(r"/boot/vmlinuz-|/kernel/fs/fuse/")
_MODULE_NAME = re.compile(r"/(\w+)\.ko(?:\.(?:xz|zst))?$")


class Kernel(NamedTuple):
    """Its image and the modules that the tests need, by name, decompressed."""

    name: str
    image: Path
    modules: dict[str, bytes]


def fetched(folder: Path) -> Kernel:
    """The kernel that this distribution installs today, downloaded once.

    Errors: SystemExit with the reason.
    """
    wanted = _package_names()
    unpacked = folder / wanted[0]
    if not unpacked.is_dir():
        being = folder / "being-unpacked"
        _run("rm", "-rf", str(being))
        being.mkdir(parents=True)
        # apt's own user cannot write here.
        _run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *wanted, cwd=being)
        for package in sorted(being.glob("*.deb")):
            _unpack(package, being)
            package.unlink()
        being.rename(unpacked)
    images = sorted(unpacked.glob("boot/vmlinuz-*"))
    if not images:
        raise SystemExit(f"{wanted[0]} holds no kernel image")
    return Kernel(wanted[0], images[-1], _modules(unpacked))


def _package_names() -> list[str]:
    for meta in META_PACKAGES:
        done = subprocess.run(
            ["apt-cache", "depends", "--recurse", "--important", meta],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = (line.strip().removeprefix("Depends: ") for line in done.stdout.splitlines())
        names = sorted({line for line in lines if _KERNEL.fullmatch(line)})
        if names:
            return names
    raise SystemExit(f"apt knows none of {', '.join(META_PACKAGES)}: run apt-get update")


def _unpack(package: Path, folder: Path) -> None:
    """The kernel's image and the wanted modules' folder; the rest is hundreds of megabytes."""
    words = ["dpkg-deb", "--fsys-tarfile", str(package)]
    reader = subprocess.Popen(words, stdout=subprocess.PIPE)
    with reader, tarfile.open(fileobj=reader.stdout, mode="r|") as files:
        for member in files:
            if member.isfile() and _WANTED.search(member.name):
                files.extract(member, folder, filter="data")
    if reader.returncode != 0:
        raise SystemExit(f"{package.name}: dpkg-deb ended with {reader.returncode}")


def _modules(unpacked: Path) -> dict[str, bytes]:
    found = {}
    for path in unpacked.glob("**/kernel/fs/fuse/*.ko*"):
        name = _MODULE_NAME.search(str(path))
        if name is None:
            continue
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        elif path.suffix == ".zst":
            content = subprocess.run(
                ["zstd", "--decompress", "--stdout", str(path)], capture_output=True, check=True
            ).stdout
        found[name[1]] = content
    return {name: found[name] for name in MODULES if name in found}


def _run(*words: str, cwd: Path | None = None) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
