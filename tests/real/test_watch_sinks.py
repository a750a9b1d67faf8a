"""A real `gpuwarden watch` whose sinks, disk, memory, policy or terminal fail under it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuwarden.life import decode
from gpuwarden.store import Store
from tests.support.packages import require_root
from tests.support.probes import build, node
from tests.support.receivers import Receiver, Request, wait_until
from tests.support.watching import GPU, Watching, watching

pytestmark = pytest.mark.real

RULE = "accelerator_opened_by_other_name"
SILENT = "sink_not_answering"
NOT_KEPT = "memory_not_kept"
QUICK = ("tests.support.quick_watch", "0.5", "2")
ROUNDS = ("--interval", "0.2")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require_root()
    build()


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """A node of the GPU under a name that is not its own."""
    return node(tmp_path / "cat.jpg", GPU)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def use(opener: Path, gpu: Path, times: int = 1) -> int:
    """A process that opens the node and ends; its pid."""
    process = subprocess.Popen(
        [str(opener), "open", str(gpu), str(times)], stdout=subprocess.DEVNULL
    )
    process.wait()
    return process.pid


@contextmanager
def holding(gpu: Path) -> Iterator[int]:
    """A process that has the node open; its pid."""
    argv = ["/bin/sh", "-c", 'exec 3<"$0"; echo open; exec cat', str(gpu)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process.pid


def is_told(agent: Watching, pid: int, status: str = "opened") -> bool:
    return any(one["status"] == status for one in agent.findings(RULE, pid))


def own_name(opener: Path, tmp_path: Path, number: int) -> Path:
    """A program under a name of its own: a crowd of one name is told of together."""
    return Path(shutil.copy2(opener, tmp_path / f"opener{number}"))


def use_and_see(agent: Watching, opener: Path, gpu: Path) -> int:
    """A use of the GPU, told on standard output."""
    pid = use(opener, gpu)
    agent.wait(lambda: is_told(agent, pid), "the finding of an open")
    return pid


def named(agent: Watching, rule: str, name: str, status: str) -> list[dict[str, Any]]:
    """Findings about a part of the agent."""
    return [
        one
        for one in agent.findings(rule)
        if name in one["subject"]["name"] and one["status"] == status
    ]


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def cpu_ticks(pid: int) -> dict[str, int]:
    """CPU time of each thread but the first, which takes the events of every test."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        if path.name != str(pid):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            found[path.name] = int(fields[11]) + int(fields[12])
    return found


def full_pipe() -> tuple[int, int]:
    """The ends of a pipe that takes nothing more: its reader does not read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer


# -------------------------------------------------------------------------- sinks that are down


def alert_sequences(requests: list[Request]) -> list[int]:
    """The sequences of the alerts, in the order in which they first came."""
    alerts = [alert for request in requests for alert in request.json()]
    return list(dict.fromkeys(int(alert["annotations"]["sequence"]) for alert in alerts))


def wait_for_silence(agent: Watching, status: str) -> None:
    """Until both receivers are told as silent, or as back."""

    def told() -> bool:
        return all(named(agent, SILENT, name, status) for name in ("webhook", "alertmanager"))

    agent.wait(told, f"both silences {status}")


def asked_anew(receiver: Receiver, behaviour: int | str) -> None:
    """Changes how it answers, and waits for a request that it answers so."""
    # Whoever hangs would be waited for: it hangs up, and the next connection is another one.
    receiver.down()
    receiver.behaviour = behaviour
    seen = len(receiver.requests)
    receiver.up()
    wait_until(lambda: len(receiver.requests) > seen)


def test_receivers_that_were_down_get_everything_in_order(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    webhook, alertmanager = Receiver(), Receiver()
    both = (webhook, alertmanager)
    sinks = ("stdout", f"webhook:{webhook.url}", f"alertmanager:{alertmanager.url}")
    with watching(tmp_path, *ROUNDS, sinks=sinks, program=QUICK) as agent:
        pids = [use_and_see(agent, opener, gpu)]
        with holding(gpu) as holder:
            wait_for_silence(agent, "opened")
            for behaviour in ("hang", 500):
                for one in both:
                    asked_anew(one, behaviour)
                # Who hears is told at once meanwhile, and things end as they do.
                pids.append(use_and_see(agent, opener, gpu))
                agent.wait(lambda: is_told(agent, pids[-1], "resolved"), "the end of it")
        assert not webhook.accepted
        assert not alertmanager.accepted
        for one in both:
            one.behaviour = 200
        wait_for_silence(agent, "resolved")
        agent.wait(lambda: is_told(agent, holder, "resolved"), "the end of the holder")
        last = max(one["sequence"] for one in agent.findings())
        wait_until(lambda: {decode(r.body).sequence for r in webhook.accepted} >= {last})
        wait_until(lambda: last in alert_sequences(list(alertmanager.accepted)))
        assert agent.stop() == 0
    told = agent.findings()
    got = [decode(request.body) for request in webhook.accepted]
    assert [one.sequence for one in got] == [one["sequence"] for one in told]
    assert [one["sequence"] for one in told] == list(range(1, len(told) + 1))
    assert [(one.id, one.status) for one in got] == [(one["id"], one["status"]) for one in told]
    # While it was down, some of a repeated alert may be the same as what waits.
    alerts = alert_sequences(alertmanager.accepted)
    assert alerts == sorted(alerts)
    assert set(alerts) == {one["sequence"] for one in told}
    for pid in (*pids, holder):
        assert is_told(agent, pid, "resolved")


# -------------------------------------------------------------------------- standard output


def test_without_a_reader_it_ends_and_says_so(tmp_path: Path, opener: Path, gpu: Path) -> None:
    reader, writer = os.pipe()
    with watching(tmp_path, *ROUNDS, sinks=(), stdout=writer) as agent:
        os.close(writer)
        pid = use(opener, gpu)
        text = b""
        while f"pid {pid}".encode() not in text:
            text += os.read(reader, 1 << 16)
        os.close(reader)
        # As after `| head -1`: no finding has to come for it to see that.
        assert agent.process.wait(20) == 64
    assert "nobody reads standard output" in agent.errors
    assert "--sink" in agent.errors
    assert "Traceback" not in agent.errors
    with Store(str(agent.state)) as store:
        assert store.troubles == []


def test_what_nobody_read_is_told_at_the_next_start(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    reader, writer = full_pipe()
    with watching(tmp_path, stdout=writer) as agent:
        os.close(writer)
        pid = use(opener, gpu)

        def is_kept() -> bool:
            with Store(str(agent.state), read_only=True) as store:
                return any(f'"pid":{pid}'.encode() in s.state for s in store.findings.states())

        agent.wait(is_kept, "the finding in the memory")
        os.close(reader)
        assert agent.process.wait(20) == 64
    with watching(tmp_path) as agent:
        agent.wait(lambda: is_told(agent, pid), "what the first one could not tell")


def test_with_another_sink_it_goes_on_without_a_reader_and_at_rest(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    reader, writer = os.pipe()
    lines = tmp_path / "findings.jsonl"
    with watching(
        tmp_path, sinks=("stdout", f"file:{lines}"), stdout=writer, program=QUICK
    ) as agent:
        os.close(writer)
        os.close(reader)
        agent.wait(lambda: "nobody reads standard output" in agent.errors, "saying so")
        pid = use(opener, gpu)

        def in_file(rule: str) -> list[dict[str, Any]]:
            text = lines.read_bytes() if lines.exists() else b""
            whole = text[: text.rfind(b"\n") + 1].splitlines()
            return [one for one in map(msgspec.json.decode, whole) if one["rule"] == rule]

        agent.wait(lambda: any(f["subject"]["pid"] == pid for f in in_file(RULE)), "the finding")
        agent.wait(
            lambda: any(f["subject"]["name"] == "stdout" for f in in_file(SILENT)), "the silence"
        )
        before, begun = cpu_ticks(agent.pid), time.monotonic()
        time.sleep(1)
        taken, ticks = time.monotonic() - begun, os.sysconf("SC_CLK_TCK")
        # A thread that spins has all of a core; one that tells of other tests' opens has not.
        for thread, after in cpu_ticks(agent.pid).items():
            assert (after - before.get(thread, after)) / ticks < 0.8 * taken
        assert agent.errors.count("nobody reads standard output") == 1
        assert agent.stop() == 0


def test_a_reader_that_does_not_read_is_told_of_and_keeps_it_from_nothing(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    reader, writer = full_pipe()
    lines = tmp_path / "findings.jsonl"
    with watching(
        tmp_path, *ROUNDS, sinks=("stdout", f"file:{lines}"), stdout=writer, program=QUICK
    ) as agent:
        os.close(writer)
        pid = use(opener, gpu)
        agent.wait(lambda: lines.exists() and f'"pid":{pid}' in lines.read_text(), "the finding")
        agent.wait(lambda: f'"{SILENT}"' in lines.read_text(), "the silence of the reader")
        assert agent.stop() == 0
    os.close(reader)


def test_a_reader_of_events_that_does_not_read_holds_up_nothing(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    reader, writer = os.pipe()
    lines = tmp_path / "findings.jsonl"
    with watching(
        tmp_path, "--events", "--limit", "0", sinks=("stdout", f"file:{lines}"), stdout=writer
    ) as agent:
        os.close(writer)
        use(opener, gpu, 3000)
        pid = use(opener, gpu)
        agent.wait(lambda: lines.exists() and f'"pid":{pid}' in lines.read_text(), "the finding")
        assert agent.stop() == 0
    os.close(reader)


def test_without_any_reader_it_goes_on_for_its_other_sinks(tmp_path: Path) -> None:
    lines = tmp_path / "findings.jsonl"
    argv = [
        sys.executable, "-m", "tests.support.quick_watch", "0.5", "2", "watch", "--way", "poll",
        "--state", str(tmp_path / "state"), "--sink", "stdout", "--sink", f"file:{lines}",
    ]  # fmt: skip
    reader, writer = os.pipe()
    with subprocess.Popen(
        argv, stdout=writer, stderr=writer, env={**os.environ, "PYTHONPATH": "src"}
    ) as agent:
        os.close(writer)
        try:
            told = b""
            while b"device opens" not in told:
                more = os.read(reader, 4096)
                assert more, "it ended"
                told += more
            os.close(reader)
            agent.send_signal(signal.SIGHUP)
            wait_until(lambda: lines.exists() and f'"{SILENT}"' in lines.read_text(), 60)
            agent.terminate()
            assert agent.wait(20) == 0
        finally:
            agent.kill()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_descriptor_that_is_closed_is_no_other_file(tmp_path: Path, closed: str) -> None:
    lines, state = tmp_path / "findings.jsonl", tmp_path / "state"
    script = f'exec "$@" {closed}'
    argv = [
        "sh", "-c", script, "sh", sys.executable, "-m", "tests.support.quick_watch", "0.5", "2",
        "watch", "--state", str(state), "--sink", "stdout", "--sink", f"file:{lines}",
        "--way", "poll",
    ]  # fmt: skip
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": "src"}) as agent:
        try:
            # That opens are polled is a finding.
            wait_until(lambda: lines.exists() and '"device_opens_polled"' in lines.read_text(), 60)
            files = [os.readlink(f"/proc/{agent.pid}/fd/{number}") for number in range(3)]
            agent.terminate()
            assert agent.wait(20) == 0
        finally:
            agent.kill()
    wanted = {"<&-": [0], ">&-": [1], "2>&-": [2]}.get(closed, [0, 1, 2])
    assert [files[number] for number in wanted] == [os.devnull] * len(wanted)
    assert (state / "lock").read_text().strip() == str(agent.pid)


# -------------------------------------------------------------------------- disk and memory


def fill(path: Path) -> None:
    """Takes what is free on a small disk, to the last byte."""
    with open(path / "ballast", "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def sequences(told: list[dict[str, Any]]) -> list[int]:
    return [one["sequence"] for one in told]


def test_a_disk_that_fills_up_silences_nothing_and_is_told(
    tmp_path: Path, small_disk: Path, opener: Path, gpu: Path
) -> None:
    state = small_disk / "state"
    with watching(tmp_path, *ROUNDS, state=state, program=QUICK) as agent:
        use_and_see(agent, opener, gpu)
        rounds = 0
        while not agent.findings(NOT_KEPT):
            rounds += 1
            assert rounds < 200, "the disk never was full"
            fill(small_disk)
            use_and_see(agent, own_name(opener, tmp_path, rounds), gpu)
        assert "full" in str(agent.findings(NOT_KEPT)[0]["evidence"])
        before = resident_mib(agent.pid)
        for number in range(rounds + 1, rounds + 151):
            last = use(own_name(opener, tmp_path, number), gpu)
        agent.wait(lambda: is_told(agent, last, "resolved"), "opens and ends on a full disk")
        assert resident_mib(agent.pid) - before < 16
        (small_disk / "ballast").unlink()
        agent.wait(
            lambda: any(one["status"] == "resolved" for one in agent.findings(NOT_KEPT)),
            "the end of the trouble",
        )
        with holding(gpu) as holder:
            agent.wait(lambda: is_told(agent, holder), "the finding after it")
            agent.kill()
            told = agent.findings()
            assert sequences(told) == list(range(1, len(told) + 1))
            assert len({one["stream"] for one in told}) == 1
            with watching(tmp_path, *ROUNDS, state=state, program=QUICK) as second:
                use_and_see(second, opener, gpu)
        # What came while the disk was full was written when there was room: it is known.
        told = list({one["sequence"]: one for one in agent.findings()}.values())
        assert sequences(told) == list(range(1, len(told) + 1))
        assert len({one["stream"] for one in told}) == 1
        opened = [one["id"] for one in told if one["status"] == "opened"]
        mine = [one["id"] for one in agent.findings(RULE, holder) if one["status"] == "opened"]
        assert mine
        assert opened.count(mine[0]) == 1


def test_a_start_on_a_full_disk_watches_and_says_what_it_cannot(
    tmp_path: Path, small_disk: Path, opener: Path, gpu: Path
) -> None:
    fill(small_disk)
    with watching(tmp_path, *ROUNDS, state=small_disk / "state", program=QUICK) as agent:
        agent.wait(lambda: named(agent, NOT_KEPT, str(small_disk), "opened"), "saying so")
        pid = use_and_see(agent, opener, gpu)
        agent.wait(lambda: is_told(agent, pid, "resolved"), "the end of it")
        assert agent.stop() == 0
    assert "nothing is remembered" in str(agent.findings(NOT_KEPT)[0]["evidence"])


def test_a_read_only_state_directory_is_told_and_survived(
    tmp_path: Path, small_disk: Path, opener: Path, gpu: Path
) -> None:
    state = small_disk / "state"
    with watching(tmp_path, state=state, program=QUICK):
        pass
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with watching(tmp_path, *ROUNDS, state=state, program=QUICK) as agent:
        agent.wait(lambda: named(agent, NOT_KEPT, str(state), "opened"), "saying so")
        use_and_see(agent, opener, gpu)
        assert agent.stop() == 0
    assert "ead-only" in str(agent.findings(NOT_KEPT)[0]["evidence"])


@pytest.mark.parametrize("name", ["findings.sqlite", "samples.sqlite"])
@pytest.mark.parametrize("damage", ["text", "pages"])
def test_a_damaged_memory_is_set_aside_and_told(
    tmp_path: Path, opener: Path, gpu: Path, name: str, damage: str
) -> None:
    with watching(tmp_path, *ROUNDS, program=QUICK) as agent:
        use_and_see(agent, opener, gpu)
        assert agent.stop() == 0
    file = agent.state / name
    whole = file.read_bytes()
    broken = b"no database" * 1000 if damage == "text" else whole[:100] + b"\xff" * 20_000
    file.write_bytes(broken)
    with watching(tmp_path, *ROUNDS, program=QUICK) as agent:
        agent.wait(lambda: named(agent, NOT_KEPT, name, "opened"), "saying so")
        pid = use_and_see(agent, opener, gpu)
        agent.wait(lambda: is_told(agent, pid, "resolved"), "the end of it")
        assert agent.stop() == 0
    assert "set aside" in str(named(agent, NOT_KEPT, name, "opened")[0]["evidence"])
    (aside,) = (
        path
        for path in agent.state.glob(f"{name}.damaged-*")
        if not path.name.endswith(("-wal", "-shm"))
    )
    assert aside.read_bytes() == broken
    with Store(str(agent.state)) as store:
        assert store.troubles == []


@pytest.mark.parametrize("damage", [b"", b"\x93\xc1", b"\xff" * 10_000], ids=["empty", "cut", "ff"])
def test_a_damaged_sum_of_usage_is_told_and_begun_anew(
    tmp_path: Path, opener: Path, gpu: Path, damage: bytes
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    file = state / "usage.msgpack"
    file.write_bytes(damage)
    with watching(tmp_path, *ROUNDS, program=QUICK) as agent:
        use_and_see(agent, opener, gpu)
        assert agent.stop() == 0
    assert "usage.msgpack" in agent.errors
    assert "Traceback" not in agent.errors
    assert file.read_bytes() != damage
    with watching(tmp_path, program=QUICK) as agent:
        assert agent.stop() == 0
    assert agent.errors.count("usage.msgpack") == 1


def test_a_state_directory_of_another_agent_is_left_to_it(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    state = tmp_path / "state"
    with (
        watching(tmp_path / "first", *ROUNDS, state=state, program=QUICK) as first,
        watching(tmp_path / "second", *ROUNDS, state=state, program=QUICK) as second,
    ):
        second.wait(lambda: named(second, NOT_KEPT, str(state), "opened"), "saying so")
        assert f"pid {first.pid}" in str(second.findings(NOT_KEPT)[0]["evidence"])
        pid = use(opener, gpu)
        first.wait(lambda: is_told(first, pid), "the finding")
        second.wait(lambda: is_told(second, pid), "the finding")
        assert not first.findings(NOT_KEPT)
        assert first.findings()[0]["stream"] != second.findings()[0]["stream"]
        assert second.stop() == 0
        assert first.stop() == 0
    with Store(str(state)) as store:
        assert store.troubles == []
        assert store.findings.stream == first.findings()[0]["stream"]


# -------------------------------------------------------------------------- signals


def test_a_stop_during_a_flood_is_quick_and_tells_what_was_seen(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    flood = None
    try:
        with watching(tmp_path, "--limit", "0") as agent:
            flood = subprocess.Popen(
                [str(opener), "storm", "8", "50000000", str(gpu)], stdout=subprocess.DEVNULL
            )
            time.sleep(1.5)
            with holding(gpu) as holder:
                time.sleep(1)
                agent.process.send_signal(signal.SIGTERM)
                assert agent.process.wait(15) == 0
        assert is_told(agent, holder)
        told = agent.findings()
        assert sequences(told) == list(range(1, len(told) + 1))
        assert "Traceback" not in agent.errors
    finally:
        if flood is not None:
            end_with_children(flood)
    with Store(str(agent.state)) as store:
        assert store.findings.last_sequence == len(told)
        assert not store.findings.undelivered("stdout")


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = [int(pid) for pid in path.read_text().split()]
    process.kill()
    process.wait()
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def test_a_policy_is_read_again_when_it_is_good_and_kept_when_it_is_not(
    tmp_path: Path, opener: Path, gpu: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\n")
    with watching(tmp_path, *ROUNDS, "--policy", str(policy), program=QUICK) as agent:
        use_and_see(agent, opener, gpu)

        policy.write_text("version: 1\nexceptions: [{rule: no_such_rule, reason: x}]\n")
        agent.process.send_signal(signal.SIGHUP)
        agent.wait(lambda: "the policy stays as it was" in agent.errors, "refusing the policy")
        assert "no_such_rule" in agent.errors
        use_and_see(agent, opener, gpu)

        policy.write_text(
            "version: 1\nexceptions:\n"
            f"- {{rule: {RULE}, reason: a test, match: {{binary: {opener}}}}}\n"
        )
        agent.process.send_signal(signal.SIGHUP)
        agent.wait(lambda: "the policy was read again" in agent.errors, "taking the policy")
        excepted = use(opener, gpu)
        with holding(gpu) as other:
            agent.wait(lambda: is_told(agent, other), "what is not excepted")
        assert not is_told(agent, excepted)
        assert agent.stop() == 0
