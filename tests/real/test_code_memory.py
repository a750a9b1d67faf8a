"""GPU code in running processes: found where it is, and the process never stopped for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from gpuwarden.cli import main
from gpuwarden.code.module import Place
from gpuwarden.code.report import CodeReport, FoundModule, ScannedProcess
from gpuwarden.codescan import memory_parts
from gpuwarden.codescan import processes as processes_module
from gpuwarden.codescan.process_memory import ProcessMemory
from gpuwarden.codescan.processes import FREED, Processes, target_name
from gpuwarden.codescan.scan import scan_code
from gpuwarden.codescan.tasks import Span
from gpuwarden.errors import Denied, UsageError
from gpuwarden.host import Host
from gpuwarden.sensors.process.opened_folder import OpenedFolder
from tests.support import nvcc
from tests.support.code_holder import CodeHolder, holding
from tests.support.containers import wait_until

pytestmark = pytest.mark.real

MEMORY_MAPPED_FROM = 128 << 10
"""malloc gives larger blocks back to the kernel when they are freed (mallopt(3))."""


def look(*pids: int) -> CodeReport:
    """Every module of these processes, as `code scan --pid` finds them."""
    numbers = itertools.count()
    processes = Processes(Host(), numbers, shares=2)
    targets = [processes.target(pid) for pid in pids]
    return processes.finished(scan_code(targets, numbers))


def about(report: CodeReport, pid: int) -> ScannedProcess:
    (found,) = (t.process for t in report.targets if t.name == target_name(pid))
    assert found is not None
    return found


def places(report: CodeReport, *, kind: str = "") -> set[str]:
    return {
        s.place.mapping or "/".join(s.place.members)
        for found in report.modules
        if kind in ("", found.module.kind)
        for s in found.sightings
    }


def at(report: CodeReport, holder: CodeHolder, way: str) -> list[FoundModule]:
    """The modules whose place is within what the process holds in that way."""
    start, size = holder.held[way]
    return [
        found
        for found in report.modules
        if any(
            not s.place.members and start <= (s.place.offset or 0) < start + size
            for s in found.sightings
        )
    ]


def digests(path: Path) -> set[str]:
    """Of the modules in a file, by reading the file."""
    from gpuwarden.code.describe import describe
    from gpuwarden.code.extract import modules_in
    from gpuwarden.code.located import Located

    found = modules_in(memoryview(path.read_bytes()), Place(target=str(path)))
    return {describe(one, one.image()).digest for one in found if isinstance(one, Located)}


@pytest.fixture(scope="module")
def cubin() -> Path:
    return nvcc.cubin("gemm")


@pytest.fixture(scope="module")
def fatbin() -> Path:
    return nvcc.fatbin("sha256", ["sm_80", "sm_90", "compute_90"], "-compress-mode=size")


@pytest.fixture(scope="module")
def ptx() -> Path:
    return nvcc.ptx("reduction")


def test_a_cubin_a_fatbin_and_ptx_on_the_heap(cubin: Path, fatbin: Path, ptx: Path) -> None:
    with holding(f"heap:{cubin}") as one, holding(f"heap:{fatbin}") as two:
        with holding(f"heap:{ptx}") as three:
            report = look(one.pid, two.pid, three.pid)
        assert {f.module.digest for f in at(report, one, "heap")} == digests(cubin)
        assert {f.module.digest for f in at(report, two, "heap")} == digests(fatbin)
        assert {f.module.digest for f in at(report, three, "heap")} == digests(ptx)
        assert places(report) == {"[heap]"}
        assert all(s.in_no_mapped_file for f in report.modules for s in f.sightings)
        assert report.problems == ()


@pytest.mark.parametrize("way", ["mmap", "hidden", "seam", "holes", "memfd", "shm"])
def test_memory_of_every_kind_is_looked_through(way: str, cubin: Path, tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    # Zeros inside that the process never touches, and a module behind them.
    padded.write_bytes(cubin.read_bytes() + bytes(300_000) + cubin.read_bytes())
    with holding(f"{way}:{padded}") as holder:
        report = look(holder.pid)
        (found,) = report.modules
        assert {found.module.digest} == digests(cubin)
        assert len(found.sightings) == 2
        assert all(s.in_no_mapped_file for s in found.sightings)
        names = {"memfd": "/memfd:held (deleted)", "shm": "(deleted)"}
        assert all(names.get(way, "") in s.place.mapping for s in found.sightings)


def test_a_mapped_file_is_read_as_the_file_that_it_is(cubin: Path, tmp_path: Path) -> None:
    mapped = tmp_path / "lib.so"
    mapped.write_bytes(cubin.read_bytes())
    with holding(f"file:{mapped}") as holder:
        mapped.unlink()
        mapped.write_bytes(b"another file of that name")
        report = look(holder.pid)
    (found,) = report.modules
    assert {found.module.digest} == digests(cubin)
    (sighting,) = found.sightings
    assert sighting.place.members == (f"{mapped} (deleted)",)
    assert not sighting.in_no_mapped_file


def test_a_copy_of_a_mapped_module_is_explained_by_the_file(cubin: Path) -> None:
    with holding(f"file:{cubin}", f"heap:{cubin}") as holder:
        (found,) = look(holder.pid).modules
    assert len(found.sightings) == 2
    assert not any(s.in_no_mapped_file for s in found.sightings)


def test_what_was_patched_in_a_private_mapping_is_another_module(
    cubin: Path, tmp_path: Path
) -> None:
    original = bytearray(cubin.read_bytes())
    patched, clean = tmp_path / "patched", tmp_path / "clean"
    clean.write_bytes(original)
    with holding(f"written:{clean}") as holder:
        assert {f.module.digest for f in at(look(holder.pid), holder, "written")} == digests(clean)
        start, _ = holder.held["written"]
        offset = original.index(b".text.")
        with open(f"/proc/{holder.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(start + offset)
            memory.write(b".tEXt.")
        report = look(holder.pid)
        original[offset : offset + 6] = b".tEXt."
        patched.write_bytes(original)
        found = at(report, holder, "written")
        assert {f.module.digest for f in found} == digests(patched)
        assert all(s.in_no_mapped_file for f in found for s in f.sightings)


def test_a_file_that_two_have_mapped_is_read_once(cubin: Path) -> None:
    with holding(f"file:{cubin}") as one, holding(f"file:{cubin}", f"heap:{cubin}") as two:
        report = look(one.pid, two.pid)
        (found,) = report.modules
        in_files = [s.place.target for s in found.sightings if s.place.members]
        assert in_files == [target_name(one.pid)]
        assert not any(s.in_no_mapped_file for s in found.sightings)
        assert about(report, two.pid).files == about(report, one.pid).files


def test_memory_that_two_share_is_read_once_and_in_both(cubin: Path) -> None:
    shared = os.memfd_create("shared")
    os.write(shared, cubin.read_bytes())
    word = f"file:/proc/self/fd/{shared}"
    with holding(word, pass_fds=(shared,)) as one, holding(word, pass_fds=(shared,)) as two:
        os.close(shared)
        numbers = itertools.count()
        processes = Processes(Host(), numbers)
        pids = (one.pid, two.pid, os.getpid())
        report = scan_code([processes.target(pid) for pid in pids[:2]], numbers)
        (found,) = processes.finished(report).modules
    assert [s.place.mapping for s in found.sightings] == ["/memfd:shared (deleted)"]
    assert [processes.holds(target_name(pid), found) for pid in pids] == [True, True, False]


def test_a_freed_image_is_gone_and_the_report_says_that_it_would_be(
    cubin: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.write_bytes(cubin.read_bytes() + bytes(MEMORY_MAPPED_FROM))
    with holding(f"freed:{large}") as holder:
        report = look(holder.pid)
        assert report.modules == ()
        assert FREED in about(report, holder.pid).limits


def _resident_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def test_the_process_is_never_stopped_and_grows_by_nothing(cubin: Path, tmp_path: Path) -> None:
    """A stop would be told to us as its parent; a tracer would show in its status."""
    filler = tmp_path / "filler"
    filler.write_bytes(os.urandom(1 << 20) * 64)
    words = (f"mmap:{filler}", f"heap:{cubin}", "sparse:0x40000000000", f"holes:{cubin}")
    with holding(*words) as holder:
        ended = threading.Event()
        seen: list[str] = []

        def watch() -> None:
            while not ended.wait(0.001):
                status = Path(f"/proc/{holder.pid}/status").read_text()
                fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
                if fields["State"][0] in "Tt" or fields["TracerPid"] != "0":
                    seen.append(fields["State"])

        before, pages = holder.counted(), _resident_pages(holder.pid)
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            report = look(holder.pid)
        finally:
            ended.set()
            watcher.join()
        assert holder.counted() > before
        assert _resident_pages(holder.pid) <= pages + 64
        assert seen == []
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        assert os.waitid(os.P_PID, holder.pid, flags) is None
        assert "[heap]" in places(report)
        assert about(report, holder.pid).memory_bytes < 128 << 20


def test_a_process_whose_first_thread_has_ended_is_read_all_the_same(cubin: Path) -> None:
    with holding(f"heap:{cubin}", f"file:{cubin}", "leave:first") as holder:
        status = Path(f"/proc/{holder.pid}/status")
        wait_until(lambda: "(zombie)" in status.read_text(), "the first thread's end")
        report = look(holder.pid)
        assert {f.module.digest for f in at(report, holder, "heap")} == digests(cubin)
        assert any(s.place.members for f in report.modules for s in f.sightings)
        assert about(report, holder.pid).incomplete == ""


def test_without_the_right_to_follow_links_files_are_found_by_their_paths(
    monkeypatch: pytest.MonkeyPatch, cubin: Path, tmp_path: Path
) -> None:
    """As for another user than root; a path that leads elsewhere by now is not followed."""
    opened = OpenedFolder.open

    def refused(folder: OpenedFolder, name: str | bytes, flags: int) -> int:
        if os.fsdecode(name).startswith("map_files/"):
            raise Denied("no right to")
        return opened(folder, name, flags)

    monkeypatch.setattr(OpenedFolder, "open", refused)
    replaced = tmp_path / "replaced"
    replaced.write_bytes(cubin.read_bytes())
    with holding(f"file:{cubin}", f"heap:{cubin}") as one, holding(f"file:{replaced}") as two:
        (tmp_path / "other").write_bytes(nvcc.ptx("reduction").read_bytes())
        (tmp_path / "other").rename(replaced)
        report = look(one.pid, two.pid)
    (found,) = report.modules
    assert {found.module.digest} == digests(cubin)
    assert {s.place.target for s in found.sightings} == {target_name(one.pid)}
    assert about(report, one.pid).incomplete == ""
    assert "CAP_CHECKPOINT_RESTORE" in about(report, two.pid).incomplete


def test_what_is_no_file_and_no_memory_is_never_read(cubin: Path) -> None:
    with holding("ring:65536", f"heap:{cubin}") as holder:
        start, size = holder.held["ring"]
        with ProcessMemory(Host(), holder.pid) as process:
            present = process.pages.presence(process.memory_regions())
        told = about(look(holder.pid), holder.pid)
    assert not any(start <= span.start < start + size for span in present.spans)
    assert told.device_mappings == 1
    assert any("mappings of devices" in limit for limit in told.limits)


def test_who_it_is_stands_beside_it(cubin: Path) -> None:
    with holding(f"heap:{cubin}", user=1234, group=1234) as holder:
        told = about(look(holder.pid), holder.pid)
        fields = Path(f"/proc/{holder.pid}/stat").read_text().rsplit(")", 1)[1].split()
    assert (told.pid, told.start_time_ticks) == (holder.pid, int(fields[19]))
    assert told.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (told.comm, told.user) == ("code_holder", "1234")
    assert told.exe.endswith("/code_holder")
    assert told.incomplete == ""


@contextlib.contextmanager
def ended_before_it_is_read(monkeypatch: pytest.MonkeyPatch, holder: CodeHolder) -> Iterator[None]:
    """Ends the process once it is planned what to read of it."""

    def parts(spans: Sequence[Span]) -> Iterator[memory_parts.Part]:
        holder.process.kill()
        holder.process.wait()
        yield from memory_parts.parts(spans)

    with monkeypatch.context() as patch:
        patch.setattr(processes_module, "parts", parts)
        yield


def test_a_process_that_ends_meanwhile_is_not_called_seen(
    monkeypatch: pytest.MonkeyPatch, cubin: Path
) -> None:
    with holding(f"heap:{cubin}") as holder, ended_before_it_is_read(monkeypatch, holder):
        report = look(holder.pid)
    assert "ended" in about(report, holder.pid).incomplete
    assert any("ended" in problem.reason for problem in report.problems)


def test_a_pid_that_is_none_is_a_wrong_word() -> None:
    with pytest.raises(UsageError, match="no such process"):
        look(2**22 - 1)


def test_a_kernel_thread_has_nothing_to_read() -> None:
    report = look(2)
    assert report.modules == ()
    assert "kernel thread" in about(report, 2).incomplete


def test_the_command_tells_of_a_process(
    cubin: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with holding(f"heap:{cubin}") as holder:
        words = ["code", "scan", "--no-judge", "--no-starter", "--list", "--pid", str(holder.pid)]
        assert main([*words, "--format", "json"]) == 0
        report = msgspec.json.decode(capfdbinary.readouterr().out, type=CodeReport)
        assert main(words) == 0
        text = capfdbinary.readouterr().out.decode()
    (found,) = report.modules
    assert {found.module.digest} == digests(cubin)
    assert found.sightings[0].in_no_mapped_file
    assert about(report, holder.pid).memory_bytes > 0
    for part in (f"pid {holder.pid}", "[heap]", FREED):
        assert part in text
