"""The installed driver's libraries, whose files they are, and what mapped ones are held against."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.errors import Unavailable
from gpuwarden.finding import Finding
from gpuwarden.host import Host
from gpuwarden.judge import judge
from gpuwarden.model import AnyFact, DriverFile, DriverLibrary
from gpuwarden.policy import Policy
from gpuwarden.rules.driver_libraries import library_of
from gpuwarden.sensors import driver_files
from gpuwarden.sensors.driver_files import parse_loader_configuration
from gpuwarden.sensors.process.executables import EVERYBODY
from gpuwarden.sensors.process.mapped_libraries import LibraryIdentities, read_driver_libraries
from gpuwarden.sensors.seen import Seen
from tests.support.fakenvml import build_library
from tests.support.nodes import HOST_NAMESPACES, NodeBuilder

LIBRARIES = f"/usr/lib/{os.uname().machine}-linux-gnu"
ELF = b"\x7fELF"


def put(root: Path, path: str, content: bytes = ELF, mode: int = 0o644) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    file.chmod(mode)
    return file


def link(root: Path, path: str, target: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(target)


def read(root: Path) -> dict[str, DriverFile]:
    facts: list[AnyFact] = list(driver_files.read(Host(str(root)), Seen()))
    return {fact.path: fact for fact in facts if isinstance(fact, DriverFile)}


# -------------------------------------------------------------------- the loader's configuration


def test_directories_and_includes_are_told_apart() -> None:
    said = parse_loader_configuration(
        b"# comment\n"
        b"include /etc/ld.so.conf.d/*.conf more/*.conf\n"
        b"  /usr/local/cuda/lib64/ # beside\n"
        b"/a:/b,/c /d=libc6\n"
        b"hwcap 0 nosegneg\n"
        b"relative/lib\n"
        b"/a\n"
    )
    assert said.directories == ("/usr/local/cuda/lib64", "/a", "/b", "/c", "/d")
    assert said.includes == ("/etc/ld.so.conf.d/*.conf", "more/*.conf")


@given(st.binary(max_size=400))
def test_any_bytes_give_directories(data: bytes) -> None:
    said = parse_loader_configuration(data)
    assert all(path.startswith("/") and "\0" not in path for path in said.directories)
    assert len(set(said.directories)) == len(said.directories)


@given(st.binary(max_size=60))
def test_any_configuration_is_survived_by_the_sensor(data: bytes) -> None:
    class Configured(Host):
        def read_bytes(self, path: str, limit: int = 0) -> bytes:
            if path == "/etc/ld.so.conf":
                return b"/x" + data + b"\ninclude " + data
            raise Unavailable(path)

        def names(self, path: str) -> list[str]:
            raise Unavailable(path)

    with pytest.raises(Unavailable):
        list(driver_files.read(Configured("/nonexistent"), Seen()))


# -------------------------------------------------------------------- what is installed


def test_links_are_followed_and_each_file_is_told_once(tmp_path: Path) -> None:
    real = put(tmp_path, f"{LIBRARIES}/nvidia/current/libcuda.so.570.00")
    link(tmp_path, f"{LIBRARIES}/libcuda.so.1", "/etc/alternatives/libcuda")
    link(tmp_path, "/etc/alternatives/libcuda", f"{LIBRARIES}/nvidia/current/libcuda.so.570.00")
    put(tmp_path, f"{LIBRARIES}/nvidia/current/libcuda.so.565.00")
    put(tmp_path, f"{LIBRARIES}/libcudart.so.12")
    found = read(tmp_path)
    assert set(found) == {
        f"{LIBRARIES}/nvidia/current/libcuda.so.570.00",
        f"{LIBRARIES}/nvidia/current/libcuda.so.565.00",
    }
    current = found[f"{LIBRARIES}/nvidia/current/libcuda.so.570.00"]
    status = real.stat()
    assert (current.library, current.inode, current.writable_by) == ("libcuda", status.st_ino, ())
    assert current.device == f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"


def test_the_loaders_directories_and_the_families_are_looked_at(tmp_path: Path) -> None:
    put(tmp_path, "/etc/ld.so.conf", b"include ld.so.conf.d/*.conf\n")
    put(tmp_path, "/etc/ld.so.conf.d/site.conf", b"/apps/driver/lib\ninclude /etc/ld.so.conf\n")
    put(tmp_path, "/etc/ld.so.conf.d/ignored.txt", b"/elsewhere\n")
    paths = {
        "/apps/driver/lib/libnvidia-ml.so.1",
        "/usr/local/cuda-12.8/compat/libcuda.so.1",
        "/opt/rocm-6.3.0/lib/libhsa-runtime64.so.1",
        "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_01/libcuda.so.1",
    }
    for path in (*paths, "/elsewhere/libcuda.so.1", "/apps/driver/lib/deep/libcuda.so.1"):
        put(tmp_path, path)
    assert set(read(tmp_path)) == paths


def test_who_can_change_a_file_is_told(tmp_path: Path) -> None:
    put(tmp_path, "/etc/passwd", b"carol:x:1003:50::/:\n")
    put(tmp_path, "/etc/group", b"staff:x:60:carol\n")
    mine = put(tmp_path, f"{LIBRARIES}/libcuda.so.1", mode=0o444)
    open_to_all = put(tmp_path, f"{LIBRARIES}/libnvidia-ml.so.1", mode=0o666)
    of_a_group = put(tmp_path, f"{LIBRARIES}/libhsa-runtime64.so.1", mode=0o664)
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    os.chown(mine, 1001, 0)
    os.chown(open_to_all, 0, 0)
    os.chown(of_a_group, 0, 60)
    found = read(tmp_path)
    assert {file.library: file.writable_by for file in found.values()} == {
        "libcuda": (1001,),
        "libnvidia-ml": (EVERYBODY,),
        "libhsa-runtime64": (1003,),
    }


def test_a_machine_without_a_driver_is_not_one_that_was_looked_at(tmp_path: Path) -> None:
    put(tmp_path, f"{LIBRARIES}/libc.so.6")
    (tmp_path / LIBRARIES.lstrip("/") / "libcuda.so.1").mkdir()
    with pytest.raises(Unavailable, match="no library of a GPU driver"):
        read(tmp_path)


def test_a_container_is_not_taken_for_its_host() -> None:
    class InContainer(Host):
        def read_link(self, path: str) -> str:
            return "mnt:[1]" if path.startswith("/proc/1/") else "mnt:[2]"

    with pytest.raises(Unavailable, match="another"):
        list(driver_files.read(InContainer(), Seen()))


# -------------------------------------------------------------------- what is mapped

HOLD = """
import mmap, os, sys
files = [open(path, "rb") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
memory = os.memfd_create("libcuda.so.1")
os.write(memory, b"x" * 4096)
maps.append(mmap.mmap(memory, 0, prot=mmap.PROT_READ))
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A process that has a library of its own mapped, the same deleted, and one in memory."""
    library = Path(shutil.copy(build_library(), tmp_path / "libnvidia-ml.so.1"))
    gone = Path(shutil.copy(build_library(), tmp_path / "libcuda.so.565.00"))
    if os.geteuid() == 0:
        os.chown(library, 1001, 0)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(library), str(gone)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"mapped\n"
    gone.unlink()
    yield process.pid, library
    process.communicate()


def test_a_mapped_librarys_file_is_told_with_who_can_write_it(holder: tuple[int, Path]) -> None:
    pid, library = holder
    status = library.stat()
    found = read_driver_libraries(Host(), pid, LibraryIdentities())
    by_path = {one.path: one for one in found}
    mine = by_path[str(library)]
    assert (mine.inode, mine.deleted) == (status.st_ino, False)
    assert mine.file_device == f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    assert mine.writable_by == ((1001,) if os.geteuid() == 0 else (os.geteuid(),))
    assert mine.soname == "libnvidia-ml.so.1"
    assert by_path[str(library.parent / "libcuda.so.565.00")].deleted
    assert by_path["/memfd:libcuda.so.1"].deleted


def test_the_same_file_is_known_by_its_number_whatever_its_path(
    holder: tuple[int, Path], tmp_path: Path
) -> None:
    pid, library = holder
    root = tmp_path / "root"
    (root / LIBRARIES.lstrip("/")).mkdir(parents=True)
    os.link(library, root / LIBRARIES.lstrip("/") / "libnvidia-ml.so.1")
    (installed,) = read(root).values()
    mapped = read_driver_libraries(Host(), pid, LibraryIdentities())
    assert (installed.device, installed.inode) in {(m.file_device, m.inode) for m in mapped}


# -------------------------------------------------------------------- what is said of it


def installed(**fields: object) -> DriverFile:
    values = {"library": "libcuda", "path": f"{LIBRARIES}/libcuda.so.570.00", "device": "8:1"}
    return DriverFile(**{**values, "inode": 500, **fields})  # type: ignore[arg-type]


def mapped(path: str, **fields: object) -> DriverLibrary:
    values = {"device": "8:1", "inode": 900, "file_device": "8:1", "writable_by": (), **fields}
    return DriverLibrary(path=path, **values)  # type: ignore[arg-type]


def findings(
    library: DriverLibrary,
    files: tuple[DriverFile, ...] = (installed(),),
    *,
    container: dict[str, Any] | None = None,
    **process: Any,
) -> list[Finding]:
    node = NodeBuilder()
    node.gpu(0)
    node.init()
    if container is not None:
        node.container("train", **container)
    inside = "train" if container is not None else None
    node.process(10, container=inside, driver_libraries=(library,), **process)
    node.client(10)
    report = judge(replace(node.snapshot(), driver_files=files), Policy())
    return [found for found in report.findings if found.rule == "driver_library_unexpected"]


@pytest.mark.parametrize(
    ("library", "text"),
    [
        (mapped("/tmp/libcuda.so.1"), "in a temporary directory"),
        (mapped("/dev/shm/x/libcuda.so.1", deleted=True), "in a temporary directory"),
        (mapped("/usr/share/.x/libcuda.so.1"), "in a hidden directory"),
        (mapped("/home/bob/lib/libcuda.so.1"), "in a home directory"),
        (mapped("/memfd:libcuda.so.1", deleted=True), "in memory only"),
        (mapped("/data/libcuda.so.1", writable_by=(1001,)), "uid 1001 can write"),
        (mapped("/data/libcuda.so.1", writable_by=(-1,)), "everybody can write"),
        (mapped("/tmp/libhsa-runtime64.so.1"), "in a temporary directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_where_nobodys_driver_lies_is_an_error(library: DriverLibrary, text: str) -> None:
    for files in ((installed(),), ()):
        (found,) = findings(library, files)
        assert found.severity == "error"
        assert text in found.evidence[0].text
        assert (found.evidence[0].kind, found.evidence[0].strength) == ("hiding", "strong")


def test_one_that_is_loaded_before_all_others_is_an_error() -> None:
    library = mapped("/opt/x/libcuda.so.1")
    (found,) = findings(library, environment={"LD_PRELOAD": "/lib/a.so:/opt/x/libcuda.so.1"})
    assert found.severity == "error" and "LD_PRELOAD" in found.evidence[0].text
    own = mapped(f"{LIBRARIES}/libcuda.so.570.00", inode=500)
    assert findings(own, environment={"LD_PRELOAD": own.path}) == []


def test_another_file_of_roots_is_a_warning_only_beside_the_hosts_own() -> None:
    library = mapped("/opt/x/libcuda.so.1")
    (found,) = findings(library)
    assert (found.severity, found.evidence[0].strength) == ("warning", "weak")
    assert "inode 900 on 8:1" in found.evidence[0].text
    assert findings(library, ()) == []
    assert findings(library, (installed(library="libnvidia-ml"),)) == []


def test_a_driver_file_that_others_can_write_vouches_for_nothing() -> None:
    library = mapped("/data/libcuda.so.1", inode=500, writable_by=(1001,))
    (found,) = findings(library, (installed(writable_by=(1001,)),))
    assert found.severity == "error"


def test_the_file_counts_and_not_the_number_that_maps_shows() -> None:
    assert findings(mapped("/x/libcuda.so.1", device="0:55", inode=500)) == []
    assert findings(mapped("/x/libcuda.so.1", device="8:1", file_device=None, inode=500)) == []
    assert len(findings(mapped("/x/libcuda.so.1", device="0:55", file_device="0:55", inode=500)))


def test_what_could_not_be_read_is_said() -> None:
    (found,) = findings(mapped("/opt/x/libcuda.so.1", writable_by=None, file_device=None))
    assert found.severity == "warning" and "could not be read" in found.evidence[0].text


def test_an_images_own_library_is_told_and_one_of_an_unconfirmed_container_warned_of() -> None:
    library = mapped("/usr/lib64/libcuda.so.1", device="0:61", file_device="0:61")
    assert [f.severity for f in findings(library, container={})] == ["info"]
    assert [f.severity for f in findings(library, container={"confirmed": False})] == ["warning"]


def test_forward_compatibility_holds_no_management_library() -> None:
    for name, expected in (("libcuda", []), ("libnvidia-ml", ["info"])):
        library = mapped(f"/usr/local/cuda-12.8/compat/{name}.so.1", file_device="0:61")
        files = (installed(), installed(library="libnvidia-ml", inode=501))
        assert [f.severity for f in findings(library, files, container={})] == expected


def test_in_another_user_namespace_an_owners_number_accuses_nobody() -> None:
    spaces = {**HOST_NAMESPACES, "user": 4_026_541_000}
    library = mapped("/usr/lib64/libcuda.so.1", writable_by=(100_000,))
    assert [f.severity for f in findings(library, namespaces=spaces)] == ["warning"]


def test_libraries_that_programs_bring_along_are_not_the_drivers() -> None:
    wheel = mapped("/home/bob/venv/lib/python3.11/site-packages/torch/lib/libhsa-runtime64.so")
    files = (installed(library="libhsa-runtime64", path="/opt/rocm/lib/libhsa-runtime64.so.1"),)
    assert findings(replace(wheel, writable_by=(1001,)), files) == []
    assert findings(mapped("/home/bob/lib/libcudart.so.12", writable_by=(1001,))) == []


def test_without_the_sensor_the_rule_says_that_it_could_not_judge() -> None:
    node = NodeBuilder()
    node.gpu(0)
    node.sensor("driver_files", "failed")
    report = node.judge()
    (run,) = [run for run in report.rules if run.rule == "driver_library_unexpected"]
    assert run.state == "not-evaluated" and "driver_files" in run.reason


@given(st.text(max_size=40))
def test_a_library_is_known_by_its_whole_name(text: str) -> None:
    assert library_of(f"/x/libcudart.so.{text}") != "libcuda"
    whole = "/" not in text and (text == "" or text.startswith("."))
    if "/" not in text and ".so" not in text:
        assert library_of(f"/x/libcuda.so{text}") == ("libcuda" if whole else None)
        assert library_of(f"/memfd:libcuda.so{text}") == ("libcuda" if whole else None)
