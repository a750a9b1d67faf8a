"""Several needles in one pass: the same places as each by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.memory_search import Haystack
from gpuwarden.codescan.windows import MARKS

LIMIT = 1000
PIECES = st.one_of(
    st.sampled_from(MARKS),
    st.sampled_from([mark[:3] for mark in MARKS] + [mark[1:] for mark in MARKS]),
    st.binary(max_size=5),
)


def plainly(data: bytes, needle: bytes) -> list[int]:
    return [at for at in range(len(data)) if data.startswith(needle, at)]


@given(st.lists(PIECES, max_size=40).map(b"".join))
def test_what_is_learned_is_what_is_there(data: bytes) -> None:
    haystack = Haystack(memoryview(data))
    haystack.learn(MARKS)
    for mark in MARKS:
        assert haystack.find_all(mark, LIMIT) == plainly(data, mark)


def test_data_full_of_beginnings_is_searched_as_before() -> None:
    data = b"CO" * 400_000 + MARKS[1] + b"x"
    haystack = Haystack(memoryview(data))
    haystack.learn(MARKS)
    assert not haystack._known
    assert haystack.find_all(MARKS[1], LIMIT) == [800_000]


def test_across_blocks_at_any_alignment() -> None:
    for at in range((1 << 18) - 9, (1 << 18) + 3):
        data = bytes(at) + b"".join(MARKS) + b"\0"
        haystack = Haystack(memoryview(data))
        haystack.learn(MARKS)
        for mark in MARKS:
            assert haystack.find_all(mark, LIMIT) == [data.index(mark)]
