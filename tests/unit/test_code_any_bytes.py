"""Any bytes, and mutants of every format, give modules and problems; the work grows as they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code import ptx
from gpuwarden.code.examine import examine
from gpuwarden.code.memory_search import Haystack
from gpuwarden.code.module import Module
from tests.support import gpu_images as build
from tests.support.gpu_modules import PLACE, SAMPLES, found, modules, mutants

MUTANTS = 150


@pytest.mark.parametrize("sample", SAMPLES)
def test_mutants_give_modules_and_problems(sample: str) -> None:
    for mutant in mutants(SAMPLES[sample], MUTANTS, seed=4):
        for one in modules(mutant):
            assert len(one.digest) == 64
            assert 0 <= (one.place.offset or 0) <= len(mutant)


@given(st.binary(max_size=1000))
def test_any_bytes(data: bytes) -> None:
    _read(data)


@given(st.lists(st.sampled_from([*SAMPLES.values(), b"\0", b"text ", b"\x7fELF"]), max_size=5))
def test_any_row_of_images(row: list[bytes]) -> None:
    """An image alone is found again among others, whatever they are."""
    data = b"\0".join(row)
    if not data.startswith((b"!<arch>", b"\x7fTileIR")):
        told = {one.digest for one in _read(data)}
        for image in row:
            if image[:4] in (b"\x50\xed\x55\xba", b"CCOB"):
                assert {one.digest for one in modules(image)} <= told


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_any_change_to_a_sample(sample: str, data: st.DataObject) -> None:
    image = bytearray(SAMPLES[sample])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(image) - 1))
        image[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    _read(bytes(image))


def _read(data: bytes) -> list[Module]:
    told = modules(data)
    assert len(list(examine(data, PLACE, threads=1))) >= len(told)
    return told


class _Work:
    """Bytes that were searched, and regular expressions tried, while something was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searched = 0
        plain = Haystack.find

        def find(haystack: Haystack, needle: bytes, start: int, end: int) -> int:
            at = plain(haystack, needle, start, end)
            self.searched += (at if at >= 0 else min(end, haystack.size)) - start
            return at

        monkeypatch.setattr(Haystack, "find", find)

    def of(self, data: bytes) -> int:
        before = self.searched
        found(data)
        return self.searched - before


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "nothing": bytes,
    "fatbin headers": lambda size: build.fatbin([]) * (size // 16),
    "ELF headers": lambda size: build.cubin()[:64] * (size // 64),
    "cubins": lambda size: build.cubin() * (size // len(build.cubin())),
    "the words of PTX": lambda size: b".version 8.0 " * (size // 13),
    "heads of PTX": lambda size: b".version 8.0\n.target sm_80\n" * (size // 27),
    "comments that do not end": lambda size: b"/* .version 8.0\n.target sm_80 /*" * (size // 32),
    "bundles": lambda size: SAMPLES["bundle"][:200] * (size // 200),
    "compressed bundles": lambda size: SAMPLES["CCOB 2"] * (size // len(SAMPLES["CCOB 2"])),
    "compressed heads": lambda size: b"CCOB\1\0\1\0\0\0\0\1" * (size // 12),
    "Tile IR": lambda size: build.tile_ir() * (size // len(build.tile_ir())),
    "fatbins": lambda size: SAMPLES["fatbin"] * (size // len(SAMPLES["fatbin"])),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_twice_the_bytes_are_twice_the_search(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, size = _Work(monkeypatch), 200_000
    once, twice = work.of(b"x" + HOSTILE[kind](size)), work.of(b"x" + HOSTILE[kind](2 * size))
    assert twice <= 2.2 * once + 10_000
    assert twice <= 40 * 2 * size


@pytest.mark.parametrize(
    "unit",
    [
        b"/* ",
        b"// ",
        b'"',
        b'.file 1 "',
        b".section .debug_x {",
        b".section",
        b".loc 1 2 3",
        b"\n \t",
        b".entry ",
        b"_INTERNAL_",
        b"*/",
        b"/*/",
    ],
)
def test_hostile_text_is_digested_in_one_pass(unit: bytes) -> None:
    """Half a megabyte that would take minutes where an expression looks back."""
    text = b".version 8.0\n.target sm_80\n" + unit * (500_000 // len(unit)) + b" .file "
    assert len(ptx.code_digest(text)) == 64
    ptx.kernels(text)
    ptx.toolkit(text)
    ptx.head_of(unit * (500_000 // len(unit)))
