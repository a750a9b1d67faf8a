"""The child that reads files for the finder: it answers, hangs, ends, and is made anew."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.cuda import file_child
from gpuwarden.cuda.driver_elf import examine
from gpuwarden.cuda.file_child import Answer, FileChild, Request
from tests.support.containers import wait_until
from tests.support.cuda_bed import bed, running
from tests.support.idle import PATIENCE_SECONDS
from tests.support.packages import require_root

pytestmark = pytest.mark.real


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileChild]:
    """One that is waited for longer than the product does, however busy the machine is."""
    require_root()
    monkeypatch.setattr(file_child, "ANSWER_SECONDS", PATIENCE_SECONDS)
    made = FileChild(os.uname().machine)
    yield made

    def are_gone() -> bool:
        made.close()
        return not made.pids

    wait_until(are_gone, "the end of its processes")


def handle(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def answers(child: FileChild, count: int) -> list[Answer]:
    found: list[Answer] = []

    def taken() -> bool:
        for answer, given in child.take():
            assert given is None
            found.append(answer)
        return len(found) >= count

    wait_until(taken, f"{count} answers")
    return found


def test_it_says_the_same_as_a_look_here(child: FileChild, tmp_path: Path) -> None:
    library = bed().library()
    unreadable = tmp_path / "mine"
    shutil.copy(library, unreadable)
    unreadable.chmod(0)
    os.chown(unreadable, 1000, 1000)
    data = library.read_bytes()
    here = examine(lambda at, size: data[at : at + size], len(data), os.uname().machine, {})
    for number, path in enumerate((library, unreadable), 1):
        child.submit(Request(number), [handle(path)])
    assert [answer.elf for answer in answers(child, 2)] == [here, here]


def test_a_file_by_the_link_to_its_mapping(child: FileChild) -> None:
    library = bed().copied("libcuda.so.1")
    with running(library=library) as program:
        maps = Path(f"/proc/{program.pid}/maps").read_text()
        line = next(line for line in maps.splitlines() if line.endswith(str(library)))
        link = f"/proc/{program.pid}/map_files/{line.split()[0]}"
        library.unlink()
        child.submit(Request(1, link), [])
        given: list[tuple[Answer, int | None]] = []

        def taken() -> bool:
            given.extend(child.take())
            return bool(given)

        wait_until(taken, "its answer")
        [(answer, descriptor)] = given
        assert answer.elf is not None
        assert answer.elf.kind == "driver"
        assert answer.status is not None
        assert descriptor is not None
        assert os.fstat(descriptor).st_ino == answer.status.key[2]
        os.close(descriptor)
    child.submit(Request(2, link), [])
    assert answers(child, 1) == [Answer(2, gone=True)]


def test_the_same_file_by_its_pages(child: FileChild, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for copy in (one, other):
        shutil.copy(bed().library(), copy)
    (tmp_path / "link").hardlink_to(one)
    handles = [handle(path) for path in (one, other, tmp_path / "link")]
    child.submit(Request(1, compare=True), handles)
    child.submit(Request(2, compare=True), handles[:2])
    assert [answer.same for answer in answers(child, 2)] == [1, None]
    empty = tmp_path / "empty"
    empty.touch()
    child.submit(Request(3, compare=True), [handle(empty), handles[0]])
    assert answers(child, 1) == [Answer(3)]


def test_one_that_hangs_costs_the_files_of_its_file_system(
    child: FileChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = bed().library()
    child.submit(Request(1), [handle(library)])
    answers(child, 1)
    (pid,) = child.pids
    os.kill(pid, signal.SIGSTOP)
    for number, device in ((2, (0, 40)), (3, (0, 41)), (4, (0, 40))):
        child.submit(Request(number, device=device), [handle(library)])
    with monkeypatch.context() as impatient:
        impatient.setattr(file_child, "ANSWER_SECONDS", 0.0)
        hung = answers(child, 2)
    [read] = answers(child, 1)
    assert [(one.number, one.elf, one.hung) for one in hung] == [(2, None, True), (4, None, True)]
    assert "did not answer" in hung[0].problem
    assert read.number == 3
    assert read.elf is not None
    assert read.elf.kind == "driver"


def test_one_that_ends_costs_one_file(child: FileChild) -> None:
    library = bed().library()
    child.submit(Request(1), [handle(library)])
    answers(child, 1)
    (pid,) = child.pids
    os.kill(pid, signal.SIGSTOP)
    for number in (2, 3):
        child.submit(Request(number), [handle(library)])
    os.kill(pid, signal.SIGKILL)
    lost, read = answers(child, 2)
    assert "ended" in lost.problem
    assert read.elf is not None


def test_it_has_no_rights_but_to_reach_files_and_read_them(child: FileChild) -> None:
    library = bed().library()
    child.submit(Request(1), [handle(library)])
    answers(child, 1)
    (pid,) = child.pids
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    kept = sum(1 << number for number in file_child.CAPABILITIES)
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == kept
    assert status["NoNewPrivs"] == "1"
    assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    # It answers before it closes the file.
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 5, "no descriptor of a file is left")
