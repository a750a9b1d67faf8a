"""Children that answer requests: what they answer, how they fail, and that they leave nothing."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuwarden.errors import Denied, TimedOut, Unavailable
from gpuwarden.watch import workers
from gpuwarden.watch.workers import Worker

LONG = 60.0
"""Seconds: a deadline that no test reaches."""
BOUND = 20.0
"""Seconds until a test says that what it waits for does not happen."""

Make = Callable[..., Worker]


@pytest.fixture
def make() -> Iterator[Make]:
    """Workers that are stopped at the end; nothing of them may be left then."""
    descriptors, children = _descriptors(), _children()
    made: list[Worker] = []

    def worker(job: Callable[[bytes], bytes], deadline_seconds: float = LONG) -> Worker:
        made.append(Worker("test worker", job, deadline_seconds=deadline_seconds))
        return made[-1]

    yield worker
    until = time.monotonic() + BOUND
    while True:
        for one in made:
            one.stop()
        if _children() == children or time.monotonic() > until:
            break
    assert _descriptors() == descriptors
    assert _children() == children


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _children() -> set[int]:
    """Every child of this process, those that nobody waited for included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def answer(worker: Worker) -> bytes:
    """The answer of the request under way; waits as the agent does."""
    until = time.monotonic() + BOUND
    while time.monotonic() < until:
        taken = worker.take()
        if taken is not None:
            return taken
        descriptor = worker.fileno()
        assert descriptor is not None
        # A short nap: what does not fit into the socket is sent on at the next ``take``.
        select.select([descriptor], [], [], 0.02)
    raise AssertionError("no answer")


def gone(pid: int) -> bool:
    """Whether that process ends within the bound; one that nobody waited for counts as ended."""
    until = time.monotonic() + BOUND
    while time.monotonic() < until:
        try:
            if b") Z " in Path(f"/proc/{pid}/stat").read_bytes():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def echo(body: bytes) -> bytes:
    return body


def hang(body: bytes) -> bytes:
    time.sleep(LONG)
    return body


def where(body: bytes) -> bytes:
    return str(os.getpid()).encode()


# ------------------------------------------------------------------ answers


def test_one_child_answers_one_request_after_the_other(make: Make) -> None:
    worker = make(where)
    assert not worker.busy
    pids: set[int] = set()
    for _ in range(5):
        assert worker.request(b"who")
        assert worker.busy
        pids.add(int(answer(worker)))
        assert not worker.busy
    assert pids == {worker.pid}
    assert os.getpid() not in pids
    assert worker.starts == 1


def test_without_a_request_there_is_nothing_to_take(make: Make) -> None:
    worker = make(echo)
    assert worker.take() is None
    assert worker.fileno() is None
    assert worker.seconds_left() is None
    worker.start()
    assert worker.take() is None
    assert worker.fileno() is not None
    assert worker.seconds_left() is None


def test_a_second_request_is_refused_while_one_is_under_way(make: Make) -> None:
    worker = make(echo)
    assert worker.request(b"first")
    assert not worker.request(b"second")
    assert answer(worker) == b"first"
    assert worker.request(b"third")
    assert answer(worker) == b"third"


@pytest.mark.parametrize("size", [0, 1, (1 << 18) + 1, 16 << 20])
def test_messages_of_any_size_go_both_ways(make: Make, size: int) -> None:
    body = os.urandom(min(size, 4096)) * (size // 4096 + 1)
    worker = make(echo)
    assert worker.request(body[:size])
    assert answer(worker) == body[:size]
    assert worker.request(b"and again")
    assert answer(worker) == b"and again"


def test_a_request_never_waits_for_a_child_that_does_not_read(make: Make) -> None:
    worker = make(hang)
    worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    # This returns although nobody reads 16 MiB.
    assert worker.request(bytes(16 << 20))
    assert worker.take() is None
    assert worker.busy


def test_an_answer_beyond_the_limit_is_none(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MESSAGE_LIMIT_BYTES", 1 << 16)
    worker = make(lambda body: bytes(1 << 16) if body == b"all" else bytes((1 << 16) + 1))
    assert worker.request(b"")
    with pytest.raises(Unavailable, match="more than may be taken"):
        answer(worker)
    assert not worker.busy
    assert worker.request(b"all")
    assert answer(worker) == bytes(1 << 16)


def test_a_child_that_never_stops_sending_is_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(body: bytes) -> bytes:
        with socket.socket(fileno=3) as connection:
            while True:
                connection.sendall(workers.HEAD.pack(4, 0) + b"more" * 1000)

    monkeypatch.setattr(workers, "MESSAGE_LIMIT_BYTES", 1 << 16)
    worker = make(job)
    assert worker.request(b"")
    pid = worker.pid
    assert pid is not None
    with pytest.raises(Unavailable, match="more than may be taken"):
        answer(worker)
    assert gone(pid)


# ------------------------------------------------------------------ failures


def test_what_a_job_raises_is_that_requests_error_and_no_more(make: Make) -> None:
    def job(body: bytes) -> bytes:
        if body == b"ours":
            raise Denied("/proc/1/root may not be read")
        if body == b"defect":
            raise ZeroDivisionError("by \udcff")
        return body

    worker = make(job)
    for body, words in ((b"ours", "may not be read"), (b"defect", "ZeroDivisionError: by")):
        assert worker.request(body)
        with pytest.raises(Unavailable, match=words):
            answer(worker)
        assert not worker.busy
    assert worker.request(b"fine")
    assert answer(worker) == b"fine"
    assert worker.starts == 1


def test_an_error_is_cut_to_a_readable_length(make: Make) -> None:
    def job(body: bytes) -> bytes:
        raise Denied("x" * 1_000_000)

    worker = make(job)
    assert worker.request(b"")
    with pytest.raises(Unavailable) as caught:
        answer(worker)
    assert len(str(caught.value)) <= 4096


def test_a_child_that_misses_its_deadline_is_ended_and_another_answers(make: Make) -> None:
    def job(body: bytes) -> bytes:
        if body == b"hang":
            hang(body)
        return where(b"")

    worker = make(job, 0.2)
    assert worker.request(b"hang")
    left = worker.seconds_left()
    assert left is not None
    assert left <= 0.2
    first = worker.pid
    assert first is not None
    with pytest.raises(TimedOut, match=r"did not answer in 0\.2 s"):
        answer(worker)
    assert worker.pid is None
    assert gone(first)
    worker._deadline_seconds = LONG  # the machine may be slow; the job is not
    assert worker.request(b"who")
    assert int(answer(worker)) != first
    assert worker.starts == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_dies_while_it_works_is_told_at_once(
    make: Make, number: signal.Signals
) -> None:
    def job(body: bytes) -> bytes:
        if body == b"die":
            os.kill(os.getpid(), number)
        return body

    worker = make(job)
    assert worker.request(b"die")
    with pytest.raises(Unavailable, match="ended before it answered"):
        answer(worker)
    assert worker.request(b"alive")
    assert answer(worker) == b"alive"


def test_a_child_that_died_between_two_requests_costs_one_of_them(make: Make) -> None:
    worker = make(echo)
    worker.start()
    assert worker.pid is not None
    first = worker.pid
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    assert worker.request(b"lost")
    with pytest.raises(Unavailable):
        answer(worker)
    assert worker.request(b"kept")
    assert answer(worker) == b"kept"


def test_one_that_fails_again_and_again_is_let_alone_for_a_while(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its own clock: what it waits for is not waited for here.
    clock = [1000.0]
    own = SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    monkeypatch.setattr(workers, "time", own)

    def job(body: bytes) -> bytes:
        if body == b"die":
            os._exit(1)
        return body

    worker = make(job)

    def ask() -> None:
        assert worker.request(b"die")
        with pytest.raises(Unavailable):
            while worker.take() is None:
                pass

    for _ in range(workers.FAILURES_BEFORE_WAITING):
        ask()
    assert not worker.request(b"now")
    assert worker.starts == workers.FAILURES_BEFORE_WAITING
    clock[0] += workers.WAIT_SECONDS + 0.1
    ask()  # one more failure, and it is let alone again
    assert not worker.request(b"now")
    clock[0] += workers.WAIT_SECONDS + 0.1
    assert worker.request(b"works")
    while (told := worker.take()) is None:
        pass
    assert told == b"works"
    ask()  # an answer is a new beginning: this is the first failure, not the fifth
    assert worker.request(b"die")


def test_another_job_is_served_from_the_next_start_on(make: Make) -> None:
    worker = make(lambda body: b"old")
    assert worker.request(b"")
    assert answer(worker) == b"old"
    worker.job = lambda body: b"new"
    worker.stop()
    assert worker.request(b"")
    assert answer(worker) == b"new"


def test_stop_while_a_request_is_under_way_forgets_it(make: Make) -> None:
    worker = make(lambda body: bytes(1 << 20))
    assert worker.request(b"first")
    descriptor = worker.fileno()
    assert descriptor is not None
    select.select([descriptor], [], [], BOUND)
    worker.take()  # a part of the answer is here by now
    worker.stop()
    assert not worker.busy
    assert worker.take() is None
    assert worker.pid is None
    worker.job = echo
    assert worker.request(b"second")
    assert answer(worker) == b"second"


def test_no_process_to_be_had_is_an_error_and_no_descriptor_is_left(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    worker = make(echo)
    before = _descriptors()
    monkeypatch.setattr(os, "fork", no_fork)
    with pytest.raises(Unavailable, match="temporarily unavailable"):
        worker.request(b"")
    assert _descriptors() == before
    assert not worker.busy
    monkeypatch.undo()
    assert worker.request(b"again")
    assert answer(worker) == b"again"


# ------------------------------------------------------------------ what the child has


def test_the_job_sees_no_descriptor_of_the_parent(make: Make) -> None:
    def job(body: bytes) -> bytes:
        found = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(f"{number}={os.readlink(f'/proc/self/fd/{number}')}")
        return "\n".join(sorted(found)).encode()

    ours, theirs = socket.socketpair()
    with ours, theirs, open("/etc/passwd", "rb") as secret:
        high = os.dup2(secret.fileno(), 5000)
        try:
            worker = make(job)
            assert worker.request(b"")
            lines = answer(worker).decode().splitlines()
        finally:
            os.close(high)
    seen = dict(line.split("=", 1) for line in lines)
    assert set(seen) == {"0", "1", "2", "3"}
    assert seen["0"] == seen["1"] == "/dev/null"
    assert seen["3"].startswith("socket:")


def test_the_agents_signal_handlers_are_not_the_childs(make: Make) -> None:
    def job(body: bytes) -> bytes:
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        return ",".join(str(signal.getsignal(one)) for one in names).encode()

    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        worker = make(job)
        assert worker.request(b"")
        told = answer(worker).decode()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ",".join(map(str, (signal.SIG_IGN, signal.SIG_DFL, signal.SIG_DFL)))


def test_nothing_of_the_parent_runs_when_the_child_ends(make: Make, tmp_path: Path) -> None:
    parent, marker = os.getpid(), tmp_path / "the child ran on"
    try:
        worker = make(echo)
        assert worker.request(b"x")
        assert answer(worker) == b"x"
        descriptor, pid = worker.fileno(), worker.pid
        assert descriptor is not None
        assert pid is not None
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)  # it ends by itself, as when we are gone
        assert gone(pid)
    finally:
        if os.getpid() != parent:
            marker.touch()
            os._exit(1)
    assert not marker.exists()


def test_a_child_ends_when_its_parent_stops_it(make: Make) -> None:
    worker = make(hang)
    assert worker.request(b"")
    pid = worker.pid
    assert pid is not None
    worker.stop()
    assert worker.pid is None
    assert gone(pid)


def test_a_child_that_does_not_go_at_once_is_not_waited_for_but_not_left_defunct(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one that hangs in a driver: for now no wait tells that it has ended.
    worker = make(echo)
    worker.start()
    first = worker.pid
    assert first is not None
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (0, 0))
    worker.stop()
    monkeypatch.undo()
    assert gone(first)
    assert first in _children()
    assert worker.request(b"x")
    assert answer(worker) == b"x"
    assert first not in _children()


@pytest.mark.parametrize("works", [True, False], ids=["at work", "at rest"])
def test_the_parents_death_ends_its_child(works: bool) -> None:
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            # The second one is forked while our end of the first one's socket is open.
            every = [Worker(name, hang, deadline_seconds=LONG) for name in ("first", "second")]
            for one in every:
                one.start()
            if works:
                every[0].request(b"x")
            os.write(writing, b" ".join(str(one.pid).encode() for one in every) + b"\n")
            time.sleep(LONG)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            pids = [int(word) for word in pipe.readline().split()]
        assert len(pids) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert all(gone(pid) for pid in pids)


def test_a_worker_can_be_started_beside_a_thread(make: Make) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(BOUND,))
    thread.start()
    try:
        worker = make(echo)
        assert worker.request(b"x")
        assert answer(worker) == b"x"
    finally:
        stop.set()
        thread.join()
