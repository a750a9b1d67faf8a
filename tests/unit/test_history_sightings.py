"""`history --module`: when and by whom a GPU module was first loaded on a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuwarden import cli
from gpuwarden.store import Store
from tests.unit.test_store_modules import digest, sighting


@pytest.fixture
def memory(tmp_path: Path) -> str:
    directory = str(tmp_path / "memory")
    with Store(directory) as store:
        store.modules.record(
            [
                sighting(
                    0xABCDEF01 << 224,
                    exe="/usr/bin/python3\x1b[31m",
                    container_id="c0ffee" * 10,
                    image="registry.example/train:1",
                    workload="llm",
                    profile="torch",
                    answer="hash-like",
                    function="cuModuleLoadData",
                    kernels=("one", "two", "three", "four", "five"),
                    kernel_count=7,
                ),
                sighting(2),
            ]
        )
        store.modules.record([sighting(0xABCDEF01 << 224, 5, pid=99)])
    return directory


def test_the_first_sighting_is_told(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["history", "--module", "abcdef01", "--state", memory]) == 0
    told = capsys.readouterr().out
    assert digest(0xABCDEF01 << 224) in told
    assert "pid 7 /usr/bin/python3" in told
    assert "\x1b" not in told
    assert "c0ffeec0ffee, registry.example/train:1" in told
    assert "llm, profile torch" in told
    assert "unknown, hash-like" in told
    assert "one, two, three, four and 3 more" in told
    assert "loads      2, the last" in told


def test_as_json(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["history", "--module", "abcdef01", "--state", memory, "--format", "json"]
    assert cli.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["state"]) == ("gpuwarden.sightings", "ok")
    assert [one["pid"] for one in document["sightings"]] == [7]


def test_a_module_that_nobody_loaded_is_said_to_be_that(
    memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["history", "--module", "1" * 64, "--state", memory]) == 2
    assert "No module" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["abc"], ["xyz12345"], ["A" * 64], ["0" * 65]])
def test_what_is_no_digest_is_one_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["history", "--module", *words]) == 64
    assert "hexadecimal digits" in capsys.readouterr().err


def test_a_module_is_asked_for_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["history", "5", "--module", "1" * 64]) == 64
