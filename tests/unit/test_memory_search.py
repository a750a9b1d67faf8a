"""The search for magics in large buffers, against ``bytes.find``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.memory_search import Haystack

_letters = st.text(alphabet="ab", max_size=60).map(str.encode)


@given(_letters, st.text(alphabet="ab", min_size=1, max_size=4).map(str.encode), st.data())
def test_it_finds_what_bytes_find(data: bytes, needle: bytes, draw: st.DataObject) -> None:
    haystack = Haystack(memoryview(data))
    start, end = draw.draw(st.integers(0, 70)), draw.draw(st.integers(0, 70))
    expected = data.find(needle, start, end)
    assert haystack.find(needle, start, end) == expected
    limit = draw.draw(st.integers(0, 70))
    places = [at for at in range(len(data)) if data.startswith(needle, at)]
    assert haystack.find_all(needle, limit) == places[:limit]
    assert haystack.find(needle, start, end) == expected, "known or not, it is the same"
