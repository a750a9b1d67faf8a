"""Whatever stands in a recording, nothing of it acts on the terminal that shows it."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwarden.cli import main
from gpuwarden.outputs.words import UNSEEN, json_text

EXAMPLE = Path(__file__).parents[2] / "examples/compromised-node.json.gz"
# A title, a colour by a C1 code, a line of its own, and a turned reading direction.
HOSTILE = "\x1b]0;title\x07\x9b31m\nFORGED \u202e\u2066\U000e0041\x7f"
WORDS_OF_THE_FORMAT = {"schema", "state", "kind", "vendor", "protocol", "kinds"}


def poisoned(value: Any, key: str = "") -> Any:
    """The same document with every free text made hostile."""
    if isinstance(value, dict):
        return {k: poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    return value + HOSTILE if isinstance(value, str) and key not in WORDS_OF_THE_FORMAT else value


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, str):
        yield value


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> str:
    document = json.loads(gzip.decompress(EXAMPLE.read_bytes()))
    document["node"]["origin"] = "elsewhere"
    path = tmp_path_factory.mktemp("poisoned") / "node.json"
    path.write_text(json.dumps(poisoned(document)))
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["scan"],
        ["scan", "--format", "json"],
        ["expect"],
        ["expect", "--format", "json"],
        ["expect", "--learn"],
        ["history", "--gpu", "0", "--from"],
        ["history", "--gpu", HOSTILE, "--from"],
    ],
)
def test_no_text_of_a_recording_reaches_the_terminal_raw(
    arguments: list[str], recording: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    main([*arguments, recording])
    captured = capsysbinary.readouterr()
    shown = (captured.out + captured.err).decode()
    assert shown
    for line in shown.split("\n"):
        assert not [c for c in line if unicodedata.category(c) in UNSEEN], line
        assert not line.startswith("FORGED")
    if "json" in arguments:
        assert any(HOSTILE in text for text in texts_of(json.loads(captured.out)))
    if "--learn" in arguments:
        assert any(w["name"].endswith(HOSTILE) for w in yaml.safe_load(captured.out)["workloads"])


def test_json_keeps_its_meaning() -> None:
    document = {"a": HOSTILE, "b": "Zürich 漢字"}
    assert json.loads(json_text(document)) == document
    assert "Zürich 漢字" in json_text(document)
