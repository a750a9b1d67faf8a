"""How GPUs are used over time: what rounds add up to, what they never are taken for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.model import Gpu, GpuClient, Usage, UtilisationSample
from gpuwarden.usage import MAX_SERIES, UsageTracker
from gpuwarden.usage.departures import MAX_KEPT

S = 10**9
START = 1_767_225_600 * S
GIB = 1 << 30
GPU = "GPU-0"
BINARY = ("/opt/x", "8:1", 7, 1000)


class Rounds:
    """Feeds a tracker one round a second."""

    def __init__(self, tracker: UsageTracker | None = None, at_ns: int = START) -> None:
        self.tracker = tracker or UsageTracker(boot_id="b")
        self.at_ns = at_ns
        self.login: bool | None = None
        self.gpu: dict[str, Any] = {"sm_percent": None, "memory_used_bytes": 10 * GIB}

    def round(
        self,
        clients: Sequence[GpuClient] = (),
        *,
        starts: Mapping[int, int] | None = None,
        binaries: Mapping[int, tuple[str, str | None, int | None, int | None]] | None = None,
        gpus: Sequence[Gpu] | None = None,
        unread_lists: Sequence[str] = (),
    ) -> None:
        self.at_ns += S
        self.tracker.sample(
            self.at_ns,
            [Gpu(id=GPU, **self.gpu)] if gpus is None else gpus,
            clients,
            {c.pid: 5 for c in clients} if starts is None else starts,
            binaries or {},
            self.login,
            unread_lists=unread_lists,
        )

    def busy(self, seconds: int, percent: int, *pids: int, memory: int | None = 3 * GIB) -> None:
        """Each process has two samples a second, as the driver tells them."""
        for _ in range(seconds):
            at = self.at_ns + S
            samples = tuple(
                UtilisationSample(at_ns=t, sm_percent=percent) for t in (at - S // 2, at)
            )
            self.round([client(pid, samples=samples, memory_bytes=memory) for pid in pids or (1,)])

    def usage(self, pid: int | None = 1, window: int = 0) -> Usage:
        found = [u for u in self.tracker.usage(self.at_ns) if (u.gpu_id, u.pid) == (GPU, pid)]
        return found[window]


def client(pid: int = 1, gpu_id: str = GPU, **fields: Any) -> GpuClient:
    return GpuClient(gpu_id=gpu_id, pid=pid, kinds=("C",), **{"memory_bytes": 3 * GIB, **fields})


def deciles(usage: Usage) -> dict[int, float]:
    return {10 * place: s for place, s in enumerate(usage.seconds_by_decile) if s}


# ------------------------------------------------------------------ what utilisation is known


def test_samples_count_by_their_own_time() -> None:
    rounds = Rounds()
    rounds.busy(60, 95)
    usage = rounds.usage()
    assert 45 <= usage.covered_seconds <= 60
    assert deciles(usage) == {90: usage.covered_seconds}
    assert (usage.pid, usage.start_time_ticks) == (1, 5)


def test_a_sample_that_is_told_again_is_not_used_again() -> None:
    rounds = Rounds()
    rounds.gpu["sm_percent"] = 50
    kept: tuple[UtilisationSample, ...] = ()
    for second in range(60):
        if second < 20:
            kept += (UtilisationSample(at_ns=rounds.at_ns + S, sm_percent=95),)
        rounds.round([client(1, samples=kept, sm_percent=95), client(2)])
    assert 15 <= rounds.usage(1).covered_seconds <= 20


def test_without_a_sample_it_is_unknown_not_idle() -> None:
    rounds = Rounds()
    rounds.gpu["sm_percent"] = 90
    for _ in range(40):
        rounds.round([client(1), client(2)])
    usage = rounds.usage(1)
    assert usage.seconds_by_decile == ()
    # It was listed all the time, and that is all that is known.
    assert usage.covered_seconds > 20


def test_the_only_client_is_as_busy_as_its_gpu() -> None:
    rounds = Rounds()
    rounds.gpu["sm_percent"] = 90
    for _ in range(40):
        rounds.round([client(1)])
    assert deciles(rounds.usage(1)).keys() == {90}


def test_an_only_client_whose_samples_ceased_is_as_idle_as_its_gpu() -> None:
    """The driver repeats the last sample of a process that stopped for up to two minutes."""
    rounds = Rounds()
    last = (UtilisationSample(at_ns=rounds.at_ns + S, sm_percent=95),)
    rounds.gpu["sm_percent"] = 0
    for _ in range(60):
        rounds.round([client(1, samples=last, sm_percent=95)])
    assert deciles(rounds.usage()).keys() == {0}
    assert rounds.usage().covered_seconds > 40


def test_on_an_idle_gpu_every_client_is_idle() -> None:
    rounds = Rounds()
    rounds.gpu["sm_percent"] = 4
    for _ in range(40):
        rounds.round([client(1), client(2)])
    assert deciles(rounds.usage(2)).keys() == {0}


def test_time_between_two_rounds_is_not_covered_by_the_later() -> None:
    rounds = Rounds()
    rounds.busy(30, 95)
    rounds.at_ns += 300 * S
    rounds.busy(31, 95)
    assert rounds.usage().covered_seconds <= 64


def test_a_sample_from_the_future_is_not_believed() -> None:
    rounds = Rounds()
    far = UtilisationSample(at_ns=rounds.at_ns + 10**15, sm_percent=1)
    rounds.round([client(1, samples=(far,)), client(2)])
    rounds.busy(40, 95)
    assert deciles(rounds.usage(1)).keys() == {90}


def test_what_is_older_than_the_window_is_forgotten() -> None:
    rounds = Rounds()
    rounds.busy(400, 95, memory=9 * GIB)
    rounds.busy(800, 5, memory=1 * GIB)
    short, long = rounds.usage(), rounds.usage(window=1)
    assert deciles(short).keys() == {0}
    assert (short.memory_min_bytes, short.memory_max_bytes) == (GIB, GIB)
    assert deciles(long).keys() == {0, 90}
    assert (long.memory_min_bytes, long.memory_max_bytes) == (GIB, 9 * GIB)
    assert 740 <= short.covered_seconds <= 760
    assert short.until_ns - short.from_ns <= 760 * S


def test_the_window_grows_with_the_threshold() -> None:
    rounds = Rounds(UsageTracker(sustained_minutes=90))
    for _ in range(100 * 60):
        rounds.round([client(1, sm_percent=95)])
    assert rounds.usage(window=0).covered_seconds >= 90 * 60


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), max_size=40), st.integers(1, 9))
def test_rings_give_what_adding_every_figure_gives(
    runs: list[tuple[int, int]], minutes: int
) -> None:
    """The sums that are kept as time goes by, against all figures added up anew."""
    rounds = Rounds(UsageTracker(sustained_minutes=minutes))
    figures: list[tuple[int, int, int]] = []
    for percent, seconds in runs:
        for _ in range(seconds):
            first = not rounds.tracker.usage(rounds.at_ns) and not figures
            rounds.round([client(10, sm_percent=percent, memory_bytes=percent * GIB)])
            figures.append((rounds.at_ns // S, percent, 0 if first else 1))
    found = [u for u in rounds.tracker.usage(rounds.at_ns) if u.pid == 10]
    open_slot = rounds.at_ns // S // 10
    closed = [f for f in figures if f[0] // 10 < open_slot]
    if not closed:
        assert found == []
        return
    for usage, window in zip(found, rounds.tracker.windows_seconds, strict=True):
        width = 10 if window <= 900 else 60
        last = closed[-1][0] // width
        mine = [f for f in closed if f[0] // width > last - -(-window // width)]
        expected = [0.0] * 10
        for _, percent, span in mine:
            expected[min(percent // 10, 9)] += span
        assert list(usage.seconds_by_decile or [0.0] * 10) == expected
        assert usage.memory_min_bytes == min(p for _, p, _ in mine) * GIB
        assert usage.memory_max_bytes == max(p for _, p, _ in mine) * GIB


# ------------------------------------------------------------------ bursts and logins


def test_bursts_are_counted_when_they_are_over() -> None:
    rounds = Rounds()
    for _ in range(4):
        rounds.busy(15, 2)
        rounds.busy(8, 97)
    rounds.busy(25, 2)
    assert rounds.usage().bursts == 4


def test_flicker_between_two_batches_is_no_burst() -> None:
    rounds = Rounds()
    for _ in range(30):
        rounds.busy(2, 2)
        rounds.busy(3, 97)
    rounds.busy(20, 97)
    assert rounds.usage().bursts == 0


def test_a_stray_figure_is_no_burst() -> None:
    rounds = Rounds()
    for _ in range(5):
        rounds.busy(10, 2)
        rounds.busy(1, 97)
    rounds.busy(25, 2)
    assert rounds.usage().bursts == 0


def test_busy_from_the_first_look_is_no_burst() -> None:
    rounds = Rounds()
    rounds.busy(20, 97)
    rounds.busy(30, 2)
    assert rounds.usage().bursts == 0


def test_who_lets_go_of_the_gpu_between_its_bursts_is_seen_to_burst() -> None:
    rounds = Rounds()
    for _ in range(3):
        rounds.busy(12, 97)
        for _ in range(20):
            rounds.round()
    rounds.busy(25, 97)
    # The first was under way when it was first seen.
    assert rounds.usage().bursts == 2


def test_logins_are_told_apart() -> None:
    rounds = Rounds()
    rounds.login = True
    rounds.busy(100, 3)
    rounds.busy(50, 95)
    rounds.login = False
    rounds.busy(200, 95)
    rounds.login = None
    rounds.busy(100, 95)
    usage = rounds.usage()
    assert 145 <= usage.logged_in_seconds <= 150
    assert usage.busy_logged_in_seconds == 50
    assert 195 <= usage.busy_nobody_seconds <= 201


def test_where_logins_cannot_be_told_it_says_so() -> None:
    rounds = Rounds()
    rounds.busy(40, 95)
    usage = rounds.usage()
    assert usage.logged_in_seconds == -1
    assert usage.busy_nobody_seconds == usage.busy_logged_in_seconds == 0


# ------------------------------------------------------------------ a GPU as a whole


def test_load_without_a_client_is_told_of_the_gpu() -> None:
    rounds = Rounds()
    rounds.gpu["sm_percent"] = 80
    for _ in range(120):
        rounds.round()
    usage = rounds.usage(None)
    assert usage.clients_seen == 0
    assert usage.busy_without_client_seconds == usage.covered_without_client_seconds > 90


def test_a_client_that_ended_a_moment_ago_explains_the_load() -> None:
    rounds = Rounds()
    rounds.gpu["sm_percent"] = 80
    for turn in range(120):
        rounds.round([client(1)] if turn % 2 else [])
    usage = rounds.usage(None)
    assert usage.clients_seen == 1
    assert usage.covered_without_client_seconds == 0


def test_a_list_that_was_not_read_is_not_an_empty_one() -> None:
    rounds = Rounds()
    rounds.gpu["sm_percent"] = 80
    for turn in range(120):
        if turn % 3 == 0:
            rounds.round(unread_lists=[GPU])
        elif turn % 3 == 1:
            unread = Gpu(id=GPU, sm_percent=80, unread={"processes": "no permission"})
            rounds.round(gpus=[unread])
        else:
            rounds.round(gpus=[Gpu(id=GPU, sm_percent=80, error="GPU is lost")])
    assert rounds.usage(None).covered_without_client_seconds == 0


def test_clients_of_a_part_are_clients_of_the_whole() -> None:
    rounds = Rounds()
    gpus = [
        Gpu(id=GPU, sm_percent=80, memory_used_bytes=9 * GIB),
        Gpu(id="MIG-1", parent_id=GPU, memory_used_bytes=3 * GIB),
    ]
    for _ in range(40):
        rounds.round([client(1, "MIG-1")], gpus=gpus)
    assert rounds.usage(None).covered_without_client_seconds == 0


# ------------------------------------------------------------------ who ended


def test_memory_after_an_exit_is_the_least_since() -> None:
    rounds = Rounds()
    rounds.gpu["memory_used_bytes"] = 24 * GIB
    learned = {1: BINARY}
    for _ in range(5):
        rounds.round([client(1, memory_bytes=20 * GIB), client(2)], binaries=learned)
    for used in (23, 20, 22):
        rounds.gpu["memory_used_bytes"] = used * GIB
        rounds.round([client(2)])
    (exited,) = rounds.tracker.exited()
    assert (exited.pid, exited.binary) == (1, "/opt/x")
    assert exited.memory_bytes == 20 * GIB
    assert exited.gpu_memory_before_bytes == 24 * GIB
    assert exited.gpu_memory_now_bytes == 20 * GIB
    assert exited.unexplained_before_bytes == 1 * GIB
    assert exited.unexplained_bytes == 17 * GIB


def test_what_another_client_took_is_explained() -> None:
    rounds = Rounds()
    rounds.gpu["memory_used_bytes"] = 23 * GIB
    rounds.round([client(1, memory_bytes=20 * GIB), client(2)])
    rounds.round([client(2, memory_bytes=23 * GIB)])
    (exited,) = rounds.tracker.exited()
    assert exited.unexplained_bytes == 0


def test_a_client_whose_memory_is_not_told_makes_it_unknown() -> None:
    rounds = Rounds()
    rounds.round([client(1), client(2, memory_bytes=None)])
    rounds.round([client(2, memory_bytes=None)])
    (exited,) = rounds.tracker.exited()
    assert exited.unexplained_bytes is None
    assert exited.unexplained_before_bytes is None


def test_who_is_listed_again_had_not_ended() -> None:
    rounds = Rounds()
    rounds.busy(30, 95)
    rounds.round()
    assert len(rounds.tracker.exited()) == 1
    rounds.busy(30, 95)
    assert rounds.tracker.exited() == ()
    assert rounds.usage().covered_seconds > 45


def test_nobody_ends_on_a_list_that_was_not_read() -> None:
    rounds = Rounds()
    rounds.round([client(1)])
    rounds.round(unread_lists=[GPU])
    rounds.round(gpus=[])
    rounds.round(gpus=[Gpu(id=GPU, error="GPU is lost")])
    rounds.round(gpus=[Gpu(id=GPU, unread={"processes": "no permission"})])
    assert rounds.tracker.exited() == ()


def test_who_only_let_go_of_the_gpu_has_not_ended() -> None:
    rounds = Rounds()
    rounds.round([client(1)])
    rounds.round(starts={1: 5})
    assert rounds.tracker.exited() == ()


def test_another_process_of_that_number_is_another() -> None:
    rounds = Rounds()
    rounds.busy(30, 95)
    for _ in range(30):
        rounds.round([client(1, sm_percent=3)], starts={1: 6})
    assert rounds.usage().start_time_ticks == 6
    assert deciles(rounds.usage()).keys() == {0}
    assert [e.start_time_ticks for e in rounds.tracker.exited()] == [5]


def test_a_start_that_cannot_be_read_any_more_is_remembered() -> None:
    """The driver lists a process whose threads are gone until its last descriptor is closed."""
    rounds = Rounds()
    rounds.busy(30, 95)
    for _ in range(30):
        rounds.round([client(1)], starts={})
    assert rounds.tracker.exited() == ()
    assert rounds.usage().start_time_ticks == 5


# ------------------------------------------------------------------ one after the other


def test_a_binary_that_comes_again_and_again() -> None:
    rounds = Rounds()
    for pid in range(100, 106):
        for second in range(20):
            # What it runs is known only after a judgement.
            rounds.round([client(pid)], binaries={pid: BINARY} if second > 4 else {})
        rounds.round()
        rounds.round()
    (line,) = rounds.tracker.respawns()
    assert (line.gpu_id, line.binary, line.device, line.inode, line.uid) == (GPU, *BINARY)
    assert line.pids == tuple(range(100, 106))
    assert [b - a for a, b in zip(line.starts_ns, line.starts_ns[1:], strict=False)] == [22 * S] * 5
    assert line.lifetimes_seconds == (19.0,) * 6


def test_one_that_lives_last_has_no_lifetime_yet() -> None:
    rounds = Rounds()
    for pid in (100, 101, 102):
        rounds.round()
        for _ in range(10):
            rounds.round([client(pid)], binaries={pid: BINARY})
    (line,) = rounds.tracker.respawns()
    assert (len(line.starts_ns), len(line.lifetimes_seconds)) == (3, 2)


def test_two_users_of_one_binary_are_two_lines() -> None:
    rounds = Rounds()
    for pid in range(100, 105):
        for _ in range(3):
            rounds.round([client(pid)], binaries={pid: (*BINARY[:3], pid % 2)})
    assert {line.uid: len(line.pids) for line in rounds.tracker.respawns()} == {0: 3}


def test_a_line_that_is_over_is_forgotten_after_an_hour() -> None:
    rounds = Rounds()
    for pid in range(100, 105):
        rounds.round([client(pid)], binaries={pid: BINARY})
    assert rounds.tracker.respawns()
    for _ in range(62):
        rounds.at_ns += 60 * S
        rounds.round()
    assert rounds.tracker.respawns() == ()


# ------------------------------------------------------------------ bounds


def test_a_flood_of_processes_costs_no_more_than_a_bounded_number() -> None:
    rounds = Rounds()
    for number in range(6):
        pids = range(1000 * number + 1, 1000 * number + 1001)
        rounds.round([client(pid) for pid in pids], binaries=dict.fromkeys(pids, BINARY))
    tracker = rounds.tracker
    assert len(tracker._live) + len(tracker._ended) == MAX_SERIES
    assert len(tracker._binaries) <= MAX_SERIES
    assert len(tracker.exited()) == MAX_KEPT
    assert [len(line.starts_ns) for line in tracker.respawns()] == [64]
    assert tracker.refused == 0


def test_more_living_processes_than_can_be_followed_are_counted() -> None:
    rounds = Rounds()
    rounds.round([client(pid) for pid in range(1, MAX_SERIES + 11)])
    # The GPU itself found no place either.
    assert rounds.tracker.refused == 11


def test_memory_that_stays_is_remembered_longer_than_memory_that_is_free() -> None:
    rounds = Rounds()
    rounds.gpu["memory_used_bytes"] = 3 * GIB
    rounds.round([client(1)])
    rounds.round()
    for pid in range(2, MAX_KEPT + 50):
        rounds.gpu["memory_used_bytes"] = 6 * GIB
        rounds.round([client(pid)])
        rounds.gpu["memory_used_bytes"] = 3 * GIB
        rounds.round()
    assert 1 in {exited.pid for exited in rounds.tracker.exited()}


# ------------------------------------------------------------------ restarts, clocks, bytes


def _busy_day() -> Rounds:
    rounds = Rounds()
    rounds.login = False
    for pid in range(100, 104):
        for _ in range(10):
            rounds.round([client(pid, sm_percent=90)], binaries={pid: BINARY})
    rounds.busy(100, 95)
    return rounds


def test_a_restarted_daemon_goes_on_where_it_was() -> None:
    rounds = _busy_day()
    again = Rounds(UsageTracker(boot_id="b"), rounds.at_ns)
    again.login = False
    assert again.tracker.restore(rounds.tracker.export())
    assert again.tracker.exited() == rounds.tracker.exited()
    assert again.tracker.respawns() == rounds.tracker.respawns()
    for each in (rounds, again):
        each.busy(60, 2)
    assert again.usage() == rounds.usage()
    assert again.usage().covered_seconds > 140


def test_another_boots_processes_are_nobody() -> None:
    encoded = _busy_day().tracker.export()
    tracker = UsageTracker(boot_id="c")
    assert not tracker.restore(encoded)
    assert tracker.usage(START) == ()


def test_what_ended_while_nobody_watched_is_not_blamed() -> None:
    rounds = Rounds()
    rounds.busy(30, 95)
    again = Rounds(UsageTracker(boot_id="b"), rounds.at_ns + 600 * S)
    again.tracker.restore(rounds.tracker.export())
    again.round()
    (exited,) = again.tracker.exited()
    assert exited.unexplained_before_bytes is None


def test_a_clock_that_was_set_back_makes_it_start_anew() -> None:
    rounds = Rounds()
    rounds.busy(60, 95)
    rounds.at_ns -= 3600 * S
    rounds.busy(60, 5)
    assert deciles(rounds.usage()).keys() == {0}


def test_a_little_step_back_counts_no_time_twice() -> None:
    rounds = Rounds()
    rounds.busy(60, 95)
    rounds.at_ns -= 20 * S
    rounds.busy(61, 95)
    assert rounds.usage().covered_seconds <= 101


@given(st.binary(max_size=200))
def test_any_bytes_are_malformed_or_a_state(encoded: bytes) -> None:
    tracker = UsageTracker()
    try:
        tracker.restore(encoded)
    except Malformed:
        assert tracker.usage(START) == ()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_state_is_malformed_or_lives_on(data: st.DataObject) -> None:
    encoded = bytearray(DAY)
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    tracker = UsageTracker(boot_id="b")
    try:
        tracker.restore(bytes(encoded))
    except Malformed:
        return
    rounds = Rounds(tracker, START + 300 * S)
    rounds.busy(15, 50)
    rounds.round()
    told = (*tracker.usage(rounds.at_ns), *tracker.exited(), *tracker.respawns())
    msgspec.json.encode(told)
    msgspec.msgpack.decode(tracker.export())


DAY = _busy_day().tracker.export()

PERCENTS = st.one_of(st.none(), st.integers(-5, 300))
AMOUNTS = st.one_of(st.none(), st.integers(0, 1 << 60))
STEPS = st.sampled_from([-100 * S, 0, 1, S // 2, S, S, S, 9 * S, 4000 * S])
SAMPLES_AT = st.one_of(st.integers(-3 * S, 3 * S), st.integers(-(1 << 62), 1 << 62))
GPUS = st.lists(
    st.builds(
        Gpu,
        id=st.sampled_from([GPU, "GPU-1"]),
        parent_id=st.sampled_from([None, None, GPU, "GPU-1"]),
        sm_percent=PERCENTS,
        memory_used_bytes=AMOUNTS,
        error=st.sampled_from([None, None, "lost"]),
    ),
    max_size=2,
)
CLIENTS = st.lists(
    st.builds(
        GpuClient,
        gpu_id=st.sampled_from([GPU, "GPU-1", "GPU-2"]),
        pid=st.integers(1, 3),
        sm_percent=PERCENTS,
        memory_bytes=AMOUNTS,
        samples=st.lists(
            st.builds(UtilisationSample, at_ns=SAMPLES_AT, sm_percent=st.integers(-5, 300)),
            max_size=3,
        ).map(tuple),
    ),
    max_size=3,
)
STARTS = st.sampled_from([{}, {1: 5, 2: 5}, {1: 6, 3: 1}])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(STEPS, GPUS, CLIENTS, STARTS, st.sampled_from([None, True, False])), max_size=12
    )
)
def test_whatever_a_round_says_nothing_is_raised_and_no_time_is_made_up(
    seen: list[tuple[int, list[Gpu], list[GpuClient], dict[int, int], bool | None]],
) -> None:
    tracker = UsageTracker(boot_id="b")
    at_ns = START
    for step, gpus, relative, starts, login in seen * 3:
        at_ns += step
        clients = [
            msgspec.structs.replace(
                c,
                samples=tuple(
                    msgspec.structs.replace(s, at_ns=max(min(at_ns + s.at_ns, 1 << 62), 0))
                    for s in c.samples
                ),
            )
            for c in relative
        ]
        tracker.sample(at_ns, gpus, clients, starts, {1: BINARY, 2: BINARY}, login)
        told = tracker.usage(at_ns)
        msgspec.json.encode((*told, *tracker.exited(), *tracker.respawns()))
        for usage in told:
            assert sum(usage.seconds_by_decile) <= (usage.until_ns - usage.from_ns) / S + 20
    copy = UsageTracker(boot_id="b")
    assert copy.restore(tracker.export())


@pytest.mark.parametrize("memory", [None, 0])
def test_memory_that_is_not_told_is_not_zero(memory: int | None) -> None:
    rounds = Rounds()
    rounds.busy(30, 95, memory=memory)
    assert rounds.usage().memory_max_bytes == memory
    assert rounds.usage().memory_min_bytes == memory
