"""The wheel: what is in it, and that it runs with nothing but its plain dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support import packages

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
NEEDED_FILES = (
    "gpuwarden/py.typed",
    "gpuwarden/wire/cri_pb2.py",
    "gpuwarden/wire/podresources_pb2.py",
)
SMALL_DUMP = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <timestamp>Mon Jun  2 10:00:00 2025</timestamp>
  <driver_version>550.54.15</driver_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:01:00.0">
    <product_name>NVIDIA A100-SXM4-40GB</product_name>
    <uuid>GPU-00000000-0000-0000-0000-000000000001</uuid>
    <minor_number>0</minor_number>
    <processes>
      <process_info>
        <pid>4711</pid>
        <type>C</type>
        <process_name>/tmp/.hidden/trainer</process_name>
        <used_memory>900 MiB</used_memory>
      </process_info>
    </processes>
  </gpu>
</nvidia_smi_log>
"""


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        packages.unavailable(f"pip {arguments[0]} failed: {done.stderr.strip()[-600:]}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and what it depends on, at the locked versions, and no extra."""
    folder = tmp_path_factory.mktemp("installed")
    pins = folder / "pins.txt"
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    pins.write_text("\n".join(line.removesuffix(" \\") for line in locked if "==" in line))
    target = folder / "site"
    # Bytecode is made of what is imported only.
    where = ("--target", str(target), "--constraint", str(pins))
    _pip("install", "--no-compile", *where, str(wheel))
    return target


def _run(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Without this venv's packages (-I -S), so that only what the wheel brought is found."""
    bootstrap = f"import sys; sys.path.insert(0, {str(installed)!r}); "
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", bootstrap + command[0], *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
    )


RUN = "from gpuwarden.cli import main; sys.exit(main())"


def test_it_holds_types_licence_and_wire_modules_and_nothing_of_the_tests(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert [name for name in NEEDED_FILES if name not in names] == []
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    strays = [name for name in names if not name.startswith(("gpuwarden/", "gpuwarden-"))]
    assert strays == []
    assert [name for name in names if name.endswith((".pyc", ".so"))] == []


def test_it_holds_every_module_of_the_source(wheel: Path) -> None:
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert source - set(ZipFile(wheel).namelist()) == set()


def test_it_installs_its_command(installed: Path) -> None:
    command = (installed / "bin" / "gpuwarden").read_text()
    assert "from gpuwarden.cli import main" in command
    done = _run(installed, RUN, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpuwarden ")


def test_it_judges_a_dump_without_the_kubernetes_extra(installed: Path, tmp_path: Path) -> None:
    assert _run(installed, "import grpc").returncode == 1, "the extra must not be there"
    dump = tmp_path / "dump.xml"
    dump.write_text(SMALL_DUMP)
    done = _run(installed, RUN, "scan", "--format", "json", str(dump))
    # 2: a dump holds no owners or holders, so most rules could not be evaluated.
    assert (done.returncode, done.stderr) == (2, "")
    assert '"/tmp/.hidden/trainer"' in done.stdout
    assert "gpu_process_unattributed" in done.stdout
