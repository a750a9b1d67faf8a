"""Modules examined by threads: as one by one, in order, within a bound of memory."""

from __future__ import annotations

import threading

import pytest

from gpuwarden.code import examine as examining
from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.examine import Examined, examine
from gpuwarden.code.located import Located
from gpuwarden.code.module import Problem
from tests.support import gpu_images as build
from tests.support.gpu_images import EntryImage
from tests.support.gpu_modules import FATBIN, PLACE, SAMPLES, modules

BROKEN = build.fatbin([EntryImage(2, b"not zstd")]).replace(
    b"\x11\0\0\0\0\0\0\0", b"\x11\x80\0\0\0\0\0\0"
)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sample", SAMPLES)
def test_it_gives_what_one_by_one_gives(sample: str, threads: int) -> None:
    data = SAMPLES[sample]
    given = list(examine(data, PLACE, threads=threads))
    assert [one.module for one in given if isinstance(one, Examined)] == modules(data)
    assert all(one.image is None for one in given if isinstance(one, Examined))


def test_images_are_kept_where_they_are_wanted() -> None:
    given = list(examine(FATBIN, PLACE, keep=lambda module: module.kind == "ptx"))
    kept = [one for one in given if isinstance(one, Examined) and one.image is not None]
    assert [one.module.kind for one in kept] == ["ptx"]
    assert bytes(kept[0].image or b"") == build.ptx()


def test_known_digests_get_no_code_digest() -> None:
    given = list(examine(FATBIN, PLACE, known=lambda _: True))
    assert not any(one.module.code_digest for one in given if isinstance(one, Examined))


def test_problems_come_in_their_place() -> None:
    data = FATBIN + b"\x7fTileIR\0\x0d\x01\0\0\x01" + b"\xff" * 12 + FATBIN
    kinds = [isinstance(one, Problem) for one in examine(data, PLACE)]
    assert sum(kinds) == 1
    assert kinds[len(kinds) // 2] is True


def test_images_in_flight_are_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [build.cubin([build.KernelImage(f"k{n}", bytes(20_000))]) for n in range(40)]
    bound, lock = 3 * len(images[0]), threading.Lock()
    held = highest = 0
    work = examining._examined

    def counted(found: Located, *rest: object) -> Examined:
        nonlocal held, highest
        with lock:
            held += found.image_bytes
            highest = max(highest, held)
        try:
            return work(found, *rest)  # type: ignore[arg-type]
        finally:
            with lock:
                held -= found.image_bytes

    monkeypatch.setattr(examining, "_examined", counted)
    data = build.fatbin([EntryImage("cubin", image, 90, "zstd") for image in images])
    given = list(examine(data, PLACE, threads=8, in_flight_bytes=bound))
    assert len(given) == 40
    assert 0 < highest <= bound


def test_an_image_over_the_bound_is_examined_alone() -> None:
    assert len(list(examine(FATBIN, PLACE, in_flight_bytes=1))) == len(modules(FATBIN))


def test_leaving_early_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    for _ in examine(FATBIN * 20, PLACE):
        break
    assert threading.active_count() == before


def test_what_does_not_decompress_is_broken() -> None:
    bounds = Bounds(image_bytes=100)
    given = list(examine(FATBIN, PLACE, bounds=bounds))
    broken = [one for one in given if isinstance(one, Examined) and one.module.broken]
    assert len(broken) >= 4
    assert DEFAULT.image_bytes > 100
