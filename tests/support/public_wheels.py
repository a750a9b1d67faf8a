"""Wheels of public libraries, downloaded once to ``build/corpus``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.nvcc import ROOT

CORPUS = ROOT / "build/corpus"


def wheel_of(requirement: str) -> Path:
    """The wheel of ``name==version``, downloaded unless it is there."""
    wheels = CORPUS / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        pip = (sys.executable, "-m", "pip", "--quiet", "download", "--no-deps")
        only = ("--only-binary", ":all:", "--dest", str(wheels))
        subprocess.run(
            [*pip, *only, requirement], check=True, env=os.environ | {"PIP_NO_INPUT": "1"}
        )
    (wheel,) = wheels.glob(pattern)
    return wheel


def programs(requirement: str) -> Iterator[Path]:
    """The ELF files of a wheel, each there until the next is asked for."""
    with (
        zipfile.ZipFile(wheel_of(requirement)) as wheel,
        tempfile.TemporaryDirectory(dir=CORPUS) as folder,
    ):
        for member in wheel.namelist():
            with wheel.open(member) as opened:
                if opened.read(4) != b"\x7fELF":
                    continue
            file = Path(wheel.extract(member, folder))
            file.chmod(0o600)
            yield file
            file.unlink()
