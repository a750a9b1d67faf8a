"""What the guest is made of: this checkout, the Python of its .venv, busybox and systemd."""

from __future__ import annotations

import compileall
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution, requires
from pathlib import Path

from tests.guest.archive import Archive
from tests.guest.kernel import Kernel
from tests.support import cuda_bed

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SITE = "/opt/site"
CHECKS = "/opt/checks"
LIBBPF = "libbpf.so.1"
SYSTEMD = ("/lib/systemd/systemd", "/bin/systemctl", "/bin/systemd-analyze")
SYSTEMD_IF_THERE = ("/lib/systemd/systemd-executor", "/lib/systemd/systemd-shutdown")
APPLETS = ("sh", "cat", "echo", "mount", "mkdir", "sleep", "insmod", "ls", "poweroff")

_FOLDERS = ("proc", "sys", "dev", "tmp", "run", "root", "var/tmp")
# Large, and nothing here imports them.
_LEFT_OUT = frozenset(
    "test idlelib tkinter turtledemo lib2to3 ensurepip pydoc_data site-packages dist-packages "
    "distutils unittest".split()
)
_LEFT_OUT_PREFIXES = ("config-", "_test", "_tkinter")
_REQUIREMENT = re.compile(r"^[\w.-]+")
_LIBRARY = re.compile(r"(?:=>\s+|^\s*)(/\S+)", re.M)


def build(kernel: Kernel, work: Path) -> Path:
    """The guest's root file system; gives its path. ``work`` is a folder for what is compiled."""
    work.mkdir(parents=True, exist_ok=True)
    archive = Archive()
    for folder in _FOLDERS:
        archive.folder(f"/{folder}")
    archive.node("/dev/console", 5, 1)
    archive.node("/dev/null", 1, 3)
    _base(archive)
    _python(archive)
    _program(archive, work)
    _checks(archive, kernel, work)
    image = work / "guest.cpio"
    archive.write(image)
    return image


def _base(archive: Archive) -> None:
    archive.file(Path("/bin/busybox"))
    for applet in APPLETS:
        archive.link(f"/bin/{applet}", "busybox")
    archive.text("/etc/passwd", "root:x:0:0::/root:/bin/sh\nalice:x:1234:1234::/tmp:/bin/sh\n")
    archive.text("/etc/group", "root:x:0:\nalice:x:1234:\n")
    archive.text("/etc/machine-id", "0123456789abcdef0123456789abcdef\n", 0o444)
    archive.text("/init", (HERE / "init.sh").read_text(), 0o755)
    programs = [Path(path) for path in SYSTEMD]
    programs += [Path(path) for path in SYSTEMD_IF_THERE if Path(path).exists()]
    _with_libraries(archive, programs)
    for unit in sorted((HERE / "units").iterdir()):
        archive.file(unit, f"/etc/systemd/system/{unit.name}")


def _python(archive: Archive) -> None:
    """The interpreter where it is here, so that it finds its library as it does here."""
    interpreter = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    extensions = []
    for path in _below(library):
        archive.file(path)
        if ".so" in path.suffixes:
            extensions.append(path)
    _with_libraries(archive, [interpreter, *extensions])
    archive.link("/usr/bin/python3", str(interpreter))


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT or path.name.startswith(_LEFT_OUT_PREFIXES):
            continue
        if path.is_dir():
            yield from _below(path)
        elif path.is_file() and ".opt-" not in path.name and path.suffix != ".a":
            yield path


def _program(archive: Archive, work: Path) -> None:
    """gpuwarden with probes compiled just now, and the wheels that it requires."""
    package = ROOT / "src/gpuwarden"
    compileall.compile_dir(package, quiet=1)
    for path in _below(package):
        if not path.name.endswith(".bpf.o"):
            archive.file(path, f"{SITE}/{path.relative_to(package.parent)}")
    _run(str(ROOT / "scripts/build_probes"), "x86_64", str(work))
    for path in sorted(work.glob("*.bpf.o")):
        archive.file(path, f"{SITE}/gpuwarden/probes/{path.name}")
    extensions = []
    for source, name in _wheels():
        archive.file(source, f"{SITE}/{name}")
        if ".so" in source.suffixes:
            extensions.append(source)
    _with_libraries(archive, extensions, copied=False)
    cache = _run("/sbin/ldconfig", "-p")
    found = re.search(rf"{re.escape(LIBBPF)} \(libc6,x86-64\) => (\S+)", cache)
    if found is None:
        raise SystemExit(f"{LIBBPF} is not installed")
    _with_libraries(archive, [Path(found[1])])


def _wheels() -> Iterator[tuple[Path, str]]:
    """(file here, path in site-packages) of what gpuwarden requires without extras."""
    for line in requires("gpuwarden") or ():
        name = _REQUIREMENT.match(line)
        if name is None or "extra ==" in line:
            continue
        for file in distribution(name[0]).files or ():
            source = Path(str(file.locate()))
            if not str(file).startswith("..") and source.is_file():
                yield source, str(file)


def _checks(archive: Archive, kernel: Kernel, work: Path) -> None:
    for name, source in (
        ("opener", ROOT / "tests/support/openers.c"),
        ("cuse_node", HERE / "cuse_node.c"),
    ):
        # Static: a process that is to live shortly does not look for libraries.
        _run("gcc", "-O2", "-static", "-o", str(work / name), str(source))
        archive.file(work / name, f"{CHECKS}/{name}")
    shutil.rmtree(work / "cuda", ignore_errors=True)  # the bed keeps what it has built
    (work / "cuda").mkdir()
    bed = cuda_bed.Bed(work / "cuda")
    archive.file(bed.library(), f"{CHECKS}/cuda/libcuda.so.1")
    archive.file(bed.program(), f"{CHECKS}/cuda/program")
    _with_libraries(archive, [bed.library(), bed.program()], copied=False)
    for unit in ("gpuwarden.service", "gpuwarden.socket"):
        archive.file(ROOT / "deploy/systemd" / unit, f"{CHECKS}/deploy/{unit}")
    outside = (ROOT / "tests/__init__.py", HERE / "__init__.py", HERE / "unit_text.py")
    for path in (*outside, *(HERE / "inside").glob("*.py")):
        archive.file(path, f"{CHECKS}/{path.relative_to(ROOT)}")
    for number, (name, content) in enumerate(kernel.modules.items()):
        module = work / f"{name}.ko"
        module.write_bytes(content)
        archive.file(module, f"{CHECKS}/modules/{number}-{name}.ko")


def _with_libraries(archive: Archive, files: Iterable[Path], *, copied: bool = True) -> None:
    """ELF files, if they are to be copied, and what they are linked to."""
    for path in files:
        if copied:
            archive.file(path)
        for library in _LIBRARY.findall(_run("ldd", str(path), check=False)):
            archive.file(Path(library))


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
