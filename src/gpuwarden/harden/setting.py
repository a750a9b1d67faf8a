"""One setting of a host, as it is now: open, sound, not there, or not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Fact

State = Literal["open", "unknown", "sound", "absent"]
TEXT_LIMIT_BYTES = 1 << 20


class Setting(Fact, frozen=True, kw_only=True, omit_defaults=False):
    """What one setting is, why it matters, what would change it and what that may break."""

    id: str
    title: str
    state: State
    now: str
    """As read; for ``unknown`` why it could not be."""
    source: str
    """The file that says so."""
    why: str
    commands: tuple[str, ...] = ()
    """To be run as root; never run from here."""
    may_break: str = ""


class About:
    """A setting's constant words, and one ``Setting`` from what was found."""

    def __init__(
        self,
        name: str,
        title: str,
        why: str,
        *,
        commands: tuple[str, ...] = (),
        may_break: str = "",
    ) -> None:
        self.id, self.title, self.why = name, title, why
        self.commands, self.may_break = commands, may_break

    def said(
        self, state: State, now: str, source: str, *, commands: tuple[str, ...] | None = None
    ) -> Setting:
        """The setting; what changes it is told only where it is open."""
        is_open = state == "open"
        return Setting(
            id=self.id,
            title=self.title,
            state=state,
            now=now,
            source=source,
            why=self.why,
            commands=(self.commands if commands is None else commands) if is_open else (),
            may_break=self.may_break if is_open else "",
        )

    def of_file(
        self,
        host: Host,
        path: str,
        judged: Callable[[str], tuple[State, str]],
        *,
        absent: tuple[State, str],
    ) -> Setting:
        """The setting by the text of one file; without the file ``absent`` is what that means."""
        try:
            state, now = judged(host.read_text(path, TEXT_LIMIT_BYTES))
        except Unavailable as error:
            try:
                host.status(path)
            except Unavailable:
                return self.said(*absent, path)
            except GpuwardenError:
                pass
            return self.said("unknown", str(error), path)
        except GpuwardenError as error:
            return self.said("unknown", str(error), path)
        return self.said(state, now, path)
