"""Driver libraries found in real processes and containers, and where they are attached to."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from gpuwarden.cuda import file_child, mapped_files
from gpuwarden.cuda.side_band import Heard, SideBand
from gpuwarden.probes.cuda.functions import SLOTS, WATCHED
from tests.support.containers import run
from tests.support.cuda_bed import BUILD_ID, SONAME, Program, Variant, bed, running
from tests.support.cuda_containers import CudaContainers
from tests.support.cuda_finder import Finder, finder, key_of
from tests.support.fakenvml import library_directory
from tests.support.idle import PATIENCE_SECONDS, wait_for
from tests.support.packages import require_root
from tests.support.stopping import state

pytestmark = pytest.mark.real

COMPARE_BYTES = 10


@pytest.fixture
def finding() -> Iterator[Finder]:
    require_root()
    with finder() as made:
        yield made


@pytest.fixture
def on_a_local_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tests are looked at at once, though this be a container with layers."""
    monkeypatch.setattr(mapped_files, "LOCAL", mapped_files.LOCAL | {mapped_files.LAYERED})


@pytest.fixture
def roots_own() -> Iterator[Path]:
    """A folder that is root's alone, with every folder above it."""
    made = Path(tempfile.mkdtemp(prefix="cuda-", dir=library_directory()))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def symbols(library: Path) -> dict[str, int]:
    """Where in the file each function is that it exports, as another reader of ELF has it."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        return {
            symbol.name: next(iter(elf.address_offsets(symbol["st_value"])))
            for symbol in table.iter_symbols()
            if symbol.name in WATCHED and symbol["st_shndx"] != "SHN_UNDEF"
        }


def test_a_library_is_found_when_it_is_mapped(finding: Finder) -> None:
    library = bed().copied("libcuda.so.1")
    with running(library=library) as program:
        found = finding.library_of(program.pid)
        assert found.key == key_of(library)
        assert (found.path, found.build_id, found.soname) == (str(library), BUILD_ID, SONAME)
        status = os.fstat(found.descriptor)
        assert (status.st_ino, status.st_size) == (found.key[2], library.stat().st_size)
        begins = symbols(library)
        assert begins.keys() == {name for name in found.points if name not in SLOTS}
        for name, at in begins.items():
            assert found.points[name].file_offset == at + COMPARE_BYTES
            assert not found.points[name].at_start


def test_a_file_of_a_file_system_that_may_hang_is_read_by_a_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_root()
    monkeypatch.setattr(mapped_files, "LOCAL", frozenset())
    monkeypatch.setattr(file_child, "ANSWER_SECONDS", PATIENCE_SECONDS)
    gc.collect()  # what others have left to it would be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    library = bed().copied("libaccelerate.so")
    with finder() as finding:
        with running(library=library) as program:
            found = finding.library_of(program.pid)
            assert found.key == key_of(library)
            assert os.fstat(found.descriptor).st_ino == found.key[2]
            holder = (program.pid, start_ticks(program))
            assert finding.libraries.without_library([holder]) == []
        finding.until(lambda: found.key in finding.gone, "the library gone")
        finding.look()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("on_a_local_file_system")
def test_one_that_was_mapped_before_is_found_at_once() -> None:
    require_root()
    library = bed().copied("libcuda.so.1")
    with running(library=library) as program, finder() as finding:
        assert finding.mapped_by(program.pid) == (key_of(library),)
        assert key_of(library) in [found.key for found in finding.found]


@pytest.mark.parametrize("variant", ["push", "endbr"])
def test_another_prologue_is_attached_to_where_its_bytes_allow(
    finding: Finder, variant: Variant
) -> None:
    library = bed().copied("libcuda.so.1", variant)
    with running(library=library) as program:
        found = finding.library_of(program.pid)
        for name, at in symbols(library).items():
            code = library.read_bytes()[at : at + COMPARE_BYTES]
            known = code[:2] == b"\x81\x3d" and code[6:] == b"\x00\xba\x1c\x32"
            point = found.points[name]
            assert point.at_start == (point.file_offset == at)
            assert known == (point.file_offset == at + COMPARE_BYTES) or code[:1] == b"\xf3"
        assert any(point.at_start for point in found.points.values()) or variant == "endbr"


@pytest.mark.parametrize(
    ("name", "variant", "said"),
    [
        ("libaccelerate.so", "plain", ""),
        ("weights.bin", "no soname", "a wrapper around the library, or a copy of it"),
        ("libcuda.so.1", "no build-id", ""),
    ],
)
def test_whatever_it_is_called(finding: Finder, name: str, variant: Variant, said: str) -> None:
    library = bed().copied(name, variant)
    with running(library=library) as program:
        found = finding.library_of(program.pid)
        assert found.key == key_of(library)
        assert found.points.keys() >= {"cuModuleLoadData", "cuLaunchKernel", "cuCtxCreate_v2"}
        assert said in "; ".join(found.problems)


def test_a_file_that_is_deleted_or_was_never_one_is_found(finding: Finder) -> None:
    library = bed().copied("libcuda.so.1")
    with running(library=library) as program:
        library.unlink()
        assert finding.library_of(program.pid).path.startswith(str(library))
    in_memory = os.memfd_create("weights")
    os.write(in_memory, bed().library().read_bytes())
    with running(library=f"/proc/{os.getpid()}/fd/{in_memory}") as program:
        found = finding.library_of(program.pid)
        assert found.key[2] == os.fstat(in_memory).st_ino
        assert "memfd:weights" in found.path
    os.close(in_memory)


def test_it_is_gone_after_the_last_process(finding: Finder) -> None:
    library = bed().copied("libcuda.so.1")
    with running(library=library) as first, running(library=library) as second:
        finding.library_of(first.pid)
        finding.library_of(second.pid)
        assert [found.key for found in finding.found].count(key_of(library)) == 1
        first.end()
        finding.until(lambda: not finding.mapped_by(first.pid), "the first process gone")
        assert finding.mapped_by(second.pid) == (key_of(library),)
        assert key_of(library) not in finding.gone
    finding.until(lambda: key_of(library) in finding.gone, "the library gone")


def test_a_fork_maps_it_too_and_an_exec_no_more(finding: Finder) -> None:
    library = bed().copied("libcuda.so.1")
    with running(library=library) as program:
        finding.library_of(program.pid)
        child = program.do("fork sleep 60000000")
        finding.until(lambda: bool(finding.mapped_by(child)), "the fork seen")
        os.kill(child, signal.SIGKILL)
    script = "import ctypes, os; ctypes.CDLL({!r}); input(); os.execvp('sleep', ['sleep', '60'])"
    process = subprocess.Popen(
        [sys.executable, "-c", script.format(str(library))], stdin=subprocess.PIPE, text=True
    )
    try:
        finding.library_of(process.pid)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        finding.until(lambda: not finding.mapped_by(process.pid), "the exec seen")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_process_whose_first_thread_has_ended(finding: Finder) -> None:
    library = bed().copied("libcuda.so.1")
    script = f"""
import ctypes, threading, time
ctypes.CDLL({str(library)!r})
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for(lambda: state(process.pid) == "Z", "the first thread's end")
        with finder() as late:
            assert late.library_of(process.pid).key == key_of(library)
    finally:
        process.kill()
        process.communicate()


def test_an_upgrade_is_another_library(finding: Finder, tmp_path: Path) -> None:
    installed = tmp_path / "libcuda.so.1"
    shutil.copy(bed().library(), installed)
    old = key_of(installed)
    with running(library=installed) as before:
        finding.library_of(before.pid)
        fresh = tmp_path / "libcuda.so.1.new"
        shutil.copy(bed().library("other build-id"), fresh)
        fresh.rename(installed)
        with running(library=installed) as after:
            found = finding.library_of(after.pid)
            assert found.key == key_of(installed) != old
            assert found.build_id != BUILD_ID
            assert finding.mapped_by(before.pid) == (old,)


def test_a_file_that_is_written_over_is_looked_at_again(finding: Finder, tmp_path: Path) -> None:
    file = tmp_path / "plugin.so"
    shutil.copy(next(Path("/usr/lib").glob("*-linux-gnu/libz.so.1")), file)
    opened = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); input()"
    argv = [sys.executable, "-c", opened, str(file)]
    harmless = subprocess.Popen(argv, stdin=subprocess.PIPE)
    finding.until(lambda: _is_known(finding, file), "the harmless file looked at")
    harmless.kill()
    harmless.communicate()
    inode = file.stat().st_ino
    file.write_bytes(bed().library().read_bytes())
    assert file.stat().st_ino == inode
    with running(library=file) as program:
        assert finding.library_of(program.pid).key == key_of(file)


def _is_known(finding: Finder, file: Path) -> bool:
    return key_of(file) in finding.libraries._files.book.files


def test_what_found_no_room_in_a_ring_is_told_as_lost() -> None:
    require_root()
    with SideBand(ring_bytes=2 * mmap.PAGESIZE) as side_band:
        side_band.hear()
        # On one CPU: each has a ring of its own.
        cpu = str(min(os.sched_getaffinity(0)))
        for _ in range(60):
            run("taskset", "--cpu-list", cpu, "true")
        assert side_band.hear().lost
    with finder() as finding:
        library = bed().copied("libcuda.so.1")
        band = finding.libraries._side_band
        assert band is not None
        with running(library=library) as program:
            # What it would have told is gone; that something is, is told.
            heard = band.hear()
            assert heard.lost or program.pid in [mapped.pid for mapped in heard.mapped]
            band.hear = lambda: Heard([], [], [], True)  # type: ignore[method-assign]
            assert finding.library_of(program.pid).key == key_of(library)


def test_without_the_kernels_telling_it_is_found_by_rescans() -> None:
    require_root()
    library = bed().copied("libcuda.so.1")
    with finder(side_band=False) as finding, running(library=library) as program:
        assert finding.library_of(program.pid).key == key_of(library)


# -------------------------------------------------------------------- layers and containers


@pytest.mark.usefixtures("on_a_local_file_system")
def test_a_process_that_is_asked_for_is_looked_at_at_once() -> None:
    require_root()
    library = bed().copied("libcuda.so.1")
    with finder(side_band=False) as finding, running(library=library) as program:
        finding.look([program.pid])
        assert finding.mapped_by(program.pid) == (key_of(library),)
        finding.libraries.ended(program.pid)
        assert (program.pid, start_ticks(program)) not in finding.libraries._mapped()


@contextmanager
def overlays(folder: Path, lower: Path, count: int) -> Iterator[list[Path]]:
    """Mounts of their own that share what is beneath, as those of containers of one image do."""
    mounted: list[Path] = []
    try:
        for number in range(count):
            place = folder / str(number)
            upper, work, merged = (place / name for name in ("upper", "work", "merged"))
            for each in (upper, work, merged):
                each.mkdir(parents=True)
            options = f"lowerdir={lower},upperdir={upper},workdir={work}"
            run("mount", "-t", "overlay", "overlay", "-o", options, str(merged))
            mounted.append(merged)
        yield mounted
    finally:
        for merged in mounted:
            run("umount", "--lazy", str(merged))


def test_layers_that_share_a_file_are_one_library(finding: Finder, tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    lower.mkdir()
    shutil.copy(bed().library(), lower / "libcuda.so.1")
    with overlays(tmp_path, lower, 2) as (one, two), ExitStack() as stack:
        first = stack.enter_context(running(library=one / "libcuda.so.1"))
        library = finding.library_of(first.pid)
        second = stack.enter_context(running(library=two / "libcuda.so.1"))
        assert finding.library_of(second.pid).key == library.key
        ours = [key_of(place / "libcuda.so.1") for place in (one, two)]
        assert library.key == ours[0] != ours[1]
        assert [found.key for found in finding.found if found.key in ours] == [library.key]
        # The mount that it was found by is not kept in use when nobody is there any more.
        first.close()
        finding.until(
            lambda: finding.mapped_by(second.pid) == (ours[1],), "it told by the other mount"
        )
        assert library.key in finding.gone
        second.close()
        (two / "libcuda.so.1").write_bytes((lower / "libcuda.so.1").read_bytes())
        copied, shared = two / "libcuda.so.1", one / "libcuda.so.1"
        pair = [stack.enter_context(running(library=each)) for each in (copied, shared)]
        assert len({finding.library_of(each.pid).key for each in pair}) == 2


def test_a_renamed_copy_in_a_container(finding: Finder, cuda_engine: CudaContainers) -> None:
    with cuda_engine.running(private_as="/opt/model/libaccelerate.so") as inside:
        found = finding.library_of(inside.pid)
        assert found.path == "/opt/model/libaccelerate.so"
        assert found.key != key_of(bed().library())
        assert "cuModuleLoadData" in found.points


def test_containers_that_share_the_hosts_file_are_told_apart(
    finding: Finder, cuda_engine: CudaContainers
) -> None:
    with cuda_engine.running() as one, cuda_engine.running() as two:
        keys = {finding.library_of(each.pid).key for each in (one, two)}
        assert keys == {key_of(bed().library())}
        assert one.pid != two.pid


# -------------------------------------------------------------------- export tables


def test_slots_of_a_library_that_is_roots_own(finding: Finder, roots_own: Path) -> None:
    library = Path(shutil.copy(bed().library(), roots_own / "libcuda.so.1"))
    copy = bed().copied("libaccelerate.so")
    with running(library=library) as program:
        found = finding.library_of(program.pid)
        assert found.points.keys() >= set(SLOTS)
        assert found.problems == ()
        # What is known of its build-id holds for a copy that is never loaded.
        with running(library=copy) as other:
            copied = finding.library_of(other.pid)
            assert copied.points == found.points


PLANTED = """
#include <fcntl.h>
__attribute__((constructor)) static void run(void) { open("%s", O_CREAT | O_WRONLY, 0644); }
int cuInit(int a) { return a; }
int cuModuleLoadData(int a) { return a + 1; }
int cuLaunchKernel(int a) { return a + 2; }
int cuCtxCreate_v2(int a) { return a + 3; }
int cuGetExportTable(void **a, void *b) { *a = 0; return 1; }
"""


@pytest.mark.parametrize("owner", [0, 1000])
def test_only_what_is_roots_own_is_loaded(
    finding: Finder, roots_own: Path, tmp_path: Path, owner: int
) -> None:
    library = roots_own / "libcuda.so.1"
    marks = Path(tempfile.mkdtemp(prefix="gpuwarden-mark-"))
    marks.chmod(0o777)
    try:
        mark = marks / "loaded"
        source = tmp_path / "planted.c"
        source.write_text(PLANTED % mark)
        run("gcc", "-shared", "-fPIC", "-o", str(library), str(source))
        os.chown(library, owner, owner)
        library.chmod(0o755)
        # It is mapped without being loaded: nobody but the finder could run it.
        mapped = (
            "import mmap, sys; file = open(sys.argv[1], 'rb'); "
            "held = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC);"
            "input()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", mapped, str(library)], stdin=subprocess.PIPE
        )
        try:
            found = finding.library_of(process.pid)
        finally:
            process.kill()
            process.communicate()
        assert mark.exists() == (owner == 0)
        assert ("belongs to uid 1000" in "; ".join(found.problems)) == (owner != 0)
    finally:
        shutil.rmtree(marks)


def test_a_library_that_ends_who_loads_it_is_attached_to_without_slots(
    finding: Finder, roots_own: Path, tmp_path: Path
) -> None:
    source = tmp_path / "ending.c"
    source.write_text((PLANTED % "/dev/null").replace("*a = 0; return 1;", "__builtin_trap();"))
    library = roots_own / "libcuda.so.1"
    run("gcc", "-shared", "-fPIC", "-o", str(library), str(source))
    library.chmod(0o755)
    with running(library=library) as program:
        found = finding.library_of(program.pid)
        assert "cuModuleLoadData" in found.points
        assert "ended the process that asked it" in "; ".join(found.problems)


# -------------------------------------------------------------------- who has none


def start_ticks(program: Program) -> int:
    return int(Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_holder_without_a_library(finding: Finder) -> None:
    with running(library="-") as without, running() as with_one:
        finding.library_of(with_one.pid)
        holders = [(program.pid, start_ticks(program)) for program in (without, with_one)]
        stale = (without.pid, 1)
        told = finding.libraries.without_library([*holders, stale])
        assert [(one.pid, one.start_time_ticks, one.libraries) for one in told] == [
            (*holders[0], ())
        ]


def test_what_it_has_instead_goes_by_what_files_call_themselves(
    finding: Finder, tmp_path: Path
) -> None:
    library = tmp_path / "plain-name.so"
    run(
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnvidia-opencl.so.1",
        "-xc",
        "/dev/null",
        "-o",
        str(library),
    )
    with running(library=library) as program:
        holder = (program.pid, start_ticks(program))
        finding.until(lambda: bool(finding.libraries.without_library([holder])), "it is judged")
        (told,) = finding.libraries.without_library([holder])
        assert told.libraries == ("libnvidia-opencl.so.1",)
