"""The children that read: confined as they are used, replaced when they end, never believed."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.bounds import Bounds
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Module, Place
from gpuwarden.code.report import Standing
from gpuwarden.codescan import inside, worker
from gpuwarden.codescan.board import Board
from gpuwarden.codescan.crew import Crew
from gpuwarden.codescan.scan import Options
from gpuwarden.codescan.targets import closing
from gpuwarden.codescan.tasks import (
    LENGTH,
    Buffer,
    Done,
    FileTask,
    MemoryTask,
    Ready,
    Settings,
    Span,
    Trouble,
)
from gpuwarden.codescan.worker import Job
from gpuwarden.errors import Unavailable
from tests.support.code_scans import code, module_of, names, scanned, write_tree
from tests.support.departed import children

Said = tuple[Standing, str, ModuleJudgement | None]


def kernel_of(module: Module) -> str:
    return module.kernels[0].name if module.kernels else ""


def tried(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except BaseException as error:
        return type(error).__name__
    return "worked"


def test_a_child_that_reads_can_do_nothing_else(tmp_path: Path) -> None:
    write_tree(tmp_path, {"x.cubin": code("x")})
    written = tmp_path / "written"

    def assess(module: Module, image: Buffer) -> Said:
        attempts = {
            "read": lambda: Path("/etc/passwd").read_bytes(),
            "write": lambda: written.write_bytes(b"x"),
            "connect": lambda: socket.create_connection(("127.0.0.1", 22)),
            "run": lambda: os.execv("/bin/true", ["true"]),
            "fork": os.fork,
            "import": lambda: __import__("xmlrpc.client"),
        }
        status = {
            "uid": os.getuid(),
            "gid": os.getgid(),
            **{name: tried(attempt) for name, attempt in attempts.items()},
        }
        return "unknown", json.dumps(status), None

    told = json.loads(module_of(scanned(tmp_path, assess=assess), "x").known_as)
    assert "worked" not in told.values()
    if os.geteuid() == 0:
        assert (told["uid"], told["gid"]) == (65534, 65534)
    assert not written.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_who_is_not_root_is_confined_as_well(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_tree(tmp_path, {"x.cubin": code("x")})
    descriptor = os.open(tmp_path / "x.cubin", os.O_RDONLY)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)

            def assess(module: Module, image: Buffer) -> Said:
                return "unknown", tried(lambda: Path("/etc/passwd").read_bytes()), None

            with Crew(Settings(), assess) as crew:
                task = FileTask(number=0, place=Place(target="x"), size=len(code("x")))
                answers = [a for _, a in crew.answers(iter([Job(task, descriptor, lambda: "")]))]
                told = [repr(crew.unconfined), *map(repr, answers)]
            os.write(writer, "\n".join(told).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.close(descriptor)
    with os.fdopen(reader) as answer:
        unconfined, found, done = answer.read().splitlines()
    os.waitpid(pid, 0)
    assert unconfined == "()"
    assert "known_as='PermissionError'" in found
    assert done.startswith("Done(")


@pytest.mark.parametrize(
    ("calls", "paths", "said"),
    [
        ("no seccomp", "", "system calls: all are allowed (no seccomp)"),
        ("no seccomp", "no Landlock", "system calls: all are allowed (no seccomp)"),
    ],
)
def test_what_could_not_be_left_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str, paths: str, said: str
) -> None:
    write_tree(tmp_path, {"x.cubin": code("x")})
    monkeypatch.setattr(inside, "refuse_calls", lambda: calls)
    monkeypatch.setattr(inside, "leave_paths", lambda: paths)
    monkeypatch.setattr(inside, "leave_root", lambda: "no mount")
    report = scanned(tmp_path)
    assert names(report) == ["x"]
    assert report.unconfined[0] == said
    files = [one for one in report.unconfined if one.startswith("files: ")]
    assert bool(files) == bool(paths)


# ------------------------------------------------------------------------------ children that end


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(7)


@pytest.mark.parametrize(
    ("end", "reason"), [(crash, "it ended by SIGSEGV"), (leave, "it ended with status 7")]
)
def test_a_child_that_ends_costs_one_problem_and_is_replaced(
    tmp_path: Path, end: Callable[[], None], reason: str
) -> None:
    files = {f"{n:02}.cubin": code(f"k{n:02}") for n in range(20)} | {"05.cubin": code("bad")}
    write_tree(tmp_path, files)

    def assess(module: Module, image: Buffer) -> Said:
        if kernel_of(module) == "bad":
            end()
        return "unknown", "", None

    report = scanned(tmp_path, assess=assess)
    [problem] = report.problems
    assert problem.place.members == ("05.cubin",)
    assert problem.reason == f"{reason}, and nothing after it in this file was read"
    assert names(report) == [f"k{n:02}" for n in range(20) if n != 5]
    assert not children()


def test_a_child_that_computes_without_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "STALL_CPU_SECONDS", 0.3)
    write_tree(tmp_path, {"a.cubin": code("a"), "b.cubin": code("endless"), "c.cubin": code("c")})

    def assess(module: Module, image: Buffer) -> Said:
        while kernel_of(module) == "endless":
            pass
        return "unknown", "", None

    report = scanned(tmp_path, assess=assess)
    [problem] = report.problems
    assert problem.place.members == ("b.cubin",)
    assert problem.reason == "it did not come to an end and was stopped"
    assert names(report) == ["a", "c"]


def test_a_stream_that_never_goes_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STALL_SECONDS", 0.3)
    reader, writer = os.pipe()
    os.write(writer, b"half of a header")
    with Crew(Settings()) as crew:
        task = FileTask(number=0, place=Place(target="docker:x"))
        answers = [a for _, a in crew.answers(iter([Job(task, reader, closing(reader))]))]
    os.close(writer)
    assert [type(answer) for answer in answers] == [Trouble, Done]


def test_what_needs_too_much_memory_is_a_problem(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.cubin": code("a"), "b.cubin": code("greedy")})

    def assess(module: Module, image: Buffer) -> Said:
        if kernel_of(module) == "greedy":
            bytearray(4 << 30)
        return "unknown", "", None

    report = scanned(tmp_path, assess=assess, options=Options(bounds=Bounds(image_bytes=1 << 28)))
    [problem] = report.problems
    assert (problem.place.members, problem.reason) == (
        ("b.cubin",),
        "more memory is needed than is allowed",
    )
    assert names(report) == ["a", "greedy"]


def test_a_mistake_in_judging_is_a_problem_and_the_module_is_told(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.cubin": code("a"), "b.cubin": code("b")})

    def assess(module: Module, image: Buffer) -> Said:
        if kernel_of(module) == "a":
            raise LookupError("nothing there")
        return "known", "the second", None

    report = scanned(tmp_path, assess=assess)
    assert [p.reason for p in report.problems] == ["LookupError: nothing there"]
    assert module_of(report, "b").known_as == "the second"
    judgement = module_of(report, "a").judgement
    assert judgement is not None
    assert judgement.answer == "unreadable"


def test_children_that_do_not_come_up_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path, {"a.cubin": code("a")})

    def confine(settings: Settings) -> tuple[str, ...]:
        raise PermissionError("capset")

    monkeypatch.setattr(inside, "confine", confine)
    with pytest.raises(Unavailable, match="did not come up: it ended with status 1"):
        scanned(tmp_path)
    assert not children()


def test_a_file_that_shrinks_while_it_is_read_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(8 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    # As if it had been cut between the look at it and the reading: pages past its end.
    path.write_bytes(bytes(4096))
    with Crew(Settings()) as crew:
        task = FileTask(number=0, place=Place(target="x"), size=8 << 20)
        answers = [a for _, a in crew.answers(iter([Job(task, descriptor, closing(descriptor))]))]
    [trouble, done] = answers
    assert isinstance(trouble, Trouble)
    assert isinstance(done, Done)
    assert trouble.problem.place.target == "x"


# ------------------------------------------------------------------------------ memory


def test_memory_is_read_through_its_descriptor(tmp_path: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    image = code("in memory")
    (tmp_path / "mem").write_bytes(bytes(page) + image + bytes(3 * page - len(image)))
    descriptor = os.open(tmp_path / "mem", os.O_RDONLY)
    task = MemoryTask(
        number=4,
        place=Place(target="pid 1"),
        spans=(Span(start=page, size=2 * page, mapping="[heap]"),),
    )
    with Crew(Settings()) as crew:
        jobs = iter([Job(task, descriptor, closing(descriptor))])
        answers = [answer for _, answer in crew.answers(jobs)]
    [found, done] = answers
    place = found.module.place  # type: ignore[union-attr]
    assert (place.target, place.offset, place.mapping) == ("pid 1", page, "[heap]")
    assert isinstance(done, Done)
    assert (done.what, done.read_bytes) == ("process", 2 * page)


# ------------------------------------------------------------------------------ what they say


def put_in_place(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """Children that say what they like instead of reading."""

    def serve(channel: socket.socket, board: Board, *rest: object) -> None:
        ready = msgspec.msgpack.encode(Ready(unconfined=()))
        channel.sendall(LENGTH.pack(len(ready)) + ready)
        channel.recv(1)
        channel.sendall(said)
        channel.close()
        os._exit(0)

    monkeypatch.setattr(worker, "serve", serve)


def frame(raw: bytes) -> bytes:
    return LENGTH.pack(len(raw)) + raw


@pytest.mark.parametrize(
    "said",
    [
        frame(b""),
        frame(b"\xff\xff"),
        LENGTH.pack(0xFFFFFFFF),
        frame(msgspec.msgpack.encode({"type": "done", "number": 9999, "what": "file"})),
        frame(msgspec.msgpack.encode({"type": "found", "module": 3})),
        frame(msgspec.msgpack.encode(["done"])),
    ],
)
def test_what_is_no_answer_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    put_in_place(monkeypatch, said)
    write_tree(tmp_path, {"a.cubin": code("a")})
    report = scanned(tmp_path)
    [problem] = report.problems
    assert problem.place.members == ("a.cubin",)
    assert names(report) == []
    assert not children()


@given(page=st.binary(max_size=400))
def test_any_bytes_on_the_board_are_a_place_or_none(page: bytes) -> None:
    board = Board()
    board._page[: len(page)] = page
    assert board.place() is None or isinstance(board.place(), Place)
    board.close()
