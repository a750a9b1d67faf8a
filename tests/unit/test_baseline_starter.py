"""The baseline that is installed with gpuwarden: whole, what its hash says, of public wheels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuwarden.code.baseline import starter
from gpuwarden.code.baseline.entries import Entries
from gpuwarden.code.baseline.file_writer import write_baseline
from gpuwarden.errors import Denied, Malformed
from tests.support.baselines import collected, numbered

LARGEST_BYTES = 10_000_000


def test_the_starter_is_whole_and_known_by_its_hash() -> None:
    baseline = starter.open_starter()
    assert baseline.signer.trust == "installed"
    baseline.verify()
    assert Path(starter.PATH).stat().st_size < LARGEST_BYTES
    assert baseline.head.digest_bytes == 16


def test_it_knows_what_frameworks_load() -> None:
    packages = {origin.package for origin in starter.open_starter().origins()}
    assert {"torch", "nvidia-cublas", "nvidia-cublas-cu12"} <= packages


def test_its_origins_are_wheels_and_nothing_of_where_it_was_built() -> None:
    for origin in starter.open_starter().origins():
        assert origin.source == "library"
        assert origin.container.endswith(".whl")
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", origin.container_digest)
        assert not origin.file.startswith("/")
        assert (origin.when, origin.note) == (0, "")


def test_another_file_in_its_place_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.baseline"
    write_baseline(str(other), collected(numbered(3)), name="starter")
    with pytest.raises(Denied, match="nobody signed it"):
        starter.open_starter(str(other))
    write_baseline(str(other), Entries(16))
    with pytest.raises(Denied):
        starter.open_starter(str(other))
    data = bytearray(Path(starter.PATH).read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    baseline = starter.open_starter(str(other))
    with pytest.raises(Malformed, match="damaged"):
        baseline.verify()
