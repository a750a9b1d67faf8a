"""The distribution's Prometheus, run on a port of its own, and what it answers."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.receivers import Receiver, wait_until

PROMETHEUS = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=prometheus"]


def answers(url: str, **query: str) -> Any:
    if query:
        url += f"?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            body = answer.read()
            return json.loads(body) if body[:1] in b"[{" else body
    except (urllib.error.URLError, OSError):
        return None


@contextmanager
def running(command: list[str], port_option: str, folder: Path) -> Iterator[str]:
    """A server on a port of its own; its URL once it is ready."""
    name = command[0]
    with (folder / f"{name}.log").open("wb") as log:
        reserved = Receiver()
        url = reserved.url
        process = subprocess.Popen(
            [*command, f"{port_option}={url.removeprefix('http://')}"],
            stdout=log,
            stderr=log,
            cwd=folder,
        )
        try:
            wait_until(lambda: process.poll() is not None or bool(answers(f"{url}/-/ready")), 30)
            assert process.poll() is None, (folder / f"{name}.log").read_text()
            yield url
        finally:
            process.kill()
            process.wait()
