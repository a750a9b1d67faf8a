"""One line a check on the console, and the line at the end that says that all were run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

_WIDTH = 400


class Report:
    """``check`` runs a check and prints how it went; a check fails by raising."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def check(self, name: str, run: Callable[[], str]) -> bool:
        """Whether ``run`` came through; what it returns is printed beside the name."""
        begun = time.monotonic()
        try:
            said = run()
        except Exception as error:
            self.failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__} in {where.name}:{where.lineno}: {error}"
            _line("FAILED", name, said or repr(error))
            for note in getattr(error, "__notes__", [])[-6:]:
                _line("#", name, note)
            return False
        self.passed += 1
        _line("ok", name, f"{said} ({time.monotonic() - begun:.1f} s)".strip())
        return True

    def note(self, name: str, said: str) -> None:
        """Something worth knowing that is no check."""
        _line("#", name, said)

    def end(self) -> None:
        """Says that no check is missing, for the machine outside."""
        print(f"DONE {self.passed} {self.failed}", flush=True)


def _line(word: str, name: str, said: str) -> None:
    print(f"{word} {name} {' '.join(said.split())[:_WIDTH]}", flush=True)
