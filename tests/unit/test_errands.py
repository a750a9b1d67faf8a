"""Short jobs in children: their answers, their failures, their deadlines, what they hold."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed, TimedOut, Unavailable
from gpuwarden.probes import errands
from gpuwarden.probes.cuda import copies, stopped
from gpuwarden.sensors.process.stat_lines import parse_stat


@pytest.fixture
def nothing_hangs() -> Iterator[None]:
    yield
    errands._reap()
    assert errands._killed == []


pytestmark = pytest.mark.usefixtures("nothing_hangs")


def fails(error: BaseException) -> errands.Job:
    def job(_: object) -> bytes:
        raise error

    return job


def test_a_job_answers_and_has_the_descriptors_that_it_was_given_and_no_others() -> None:
    copy = copies.empty("test")
    secret = os.open("/", os.O_RDONLY)
    try:

        def job(kept: object) -> bytes:
            assert isinstance(kept, list)
            os.write(kept[0], b"written by a child")
            return " ".join(os.listdir("/proc/self/fd")).encode()

        held = {int(name) for name in errands.run(job, (copy,), deadline_seconds=10).split()}
        # The standard ones, which lead nowhere, the pipe, the copy, the listing's own.
        assert len(held) == 6
        assert copies.seal(copy) == 18
        assert os.read(copy, 99) == b"written by a child"
        with pytest.raises(PermissionError):
            os.write(copy, b"x")
    finally:
        os.close(copy)
        os.close(secret)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Unavailable("not to be had"), "not to be had"),
        (Malformed("no such form"), "no such form"),
        (FileNotFoundError(2, "No such file"), "No such file"),
        (ValueError("a defect"), "ValueError: a defect"),
        (SystemExit(3), "the child that did it has ended"),
    ],
)
def test_what_a_job_raises_is_told(error: BaseException, words: str) -> None:
    with pytest.raises(Unavailable, match=words) as caught:
        errands.run(fails(error), (), deadline_seconds=10)
    assert not isinstance(caught.value, TimedOut)


def killed(_: object) -> bytes:
    signal.raise_signal(signal.SIGKILL)
    return b"never"


def test_a_job_that_does_not_end_is_ended() -> None:
    def job(_: object) -> bytes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return b""

    with pytest.raises(TimedOut, match=r"0\.1 s"):
        errands.run(job, (), deadline_seconds=0.1)
    with pytest.raises(Unavailable, match="has ended"):
        errands.run(killed, (), deadline_seconds=10)


def test_when_too_many_hang_none_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "HANGING_LIMIT", 0)
    with pytest.raises(Unavailable, match="hang in the kernel"):
        errands.run(lambda _: b"", (), deadline_seconds=10)


def test_a_long_answer_is_cut() -> None:
    answer = errands.run(lambda _: b"x" * 100_000, (), deadline_seconds=10)
    assert answer == b"x" * (errands.ANSWER_LIMIT_BYTES - 1)


def test_an_empty_copy_is_none() -> None:
    copy = copies.empty("test")
    assert copies.sealed(copy) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


# -------------------------------------------------------------------- what /proc says of signals


def test_pending_signals_of_the_thread_and_of_all_count() -> None:
    status = b"Name:\tx\nSigPnd:\t0000000000000001\nShdPnd:\t0000000000040000\nSigBlk:\t00ff\n"
    assert stopped.pending_signals(status) == 1 | 1 << 18
    assert stopped.pending_signals(status) & stopped._STOP_BITS


@given(st.binary(max_size=200).map(lambda rest: b"ShdPnd:" + rest) | st.binary(max_size=400))
@settings(deadline=None)
def test_any_status_gives_signals(status: bytes) -> None:
    assert stopped.pending_signals(status) >= 0


def test_our_own_process_runs_and_one_that_never_was_is_gone() -> None:
    with open("/proc/self/stat", "rb") as file:
        start = parse_stat(file.read()).start_time_ticks
    nanoseconds = start * 10**9 // os.sysconf("SC_CLK_TCK")
    assert stopped.holds(os.getpid(), nanoseconds) == "runs"
    assert stopped.holds(os.getpid(), nanoseconds + 10**9) == "gone"
    assert stopped.holds(2**22 + 1, nanoseconds) == "gone"
