"""Reads the files of places that start programs: bounded, devices never opened, gaps counted."""

from __future__ import annotations

from msgspec import Struct

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap

SENSOR = "persistence"
PLACE_LIMIT_BYTES = 1 << 20
NAMES_LIMIT = 4000
_LISTING_LIMIT_BYTES = 1 << 18
"""A directory larger than this holds thousands of names: asking for a few of them is cheaper."""
ENTRIES_LIMIT = 1000
"""Entries kept of one place; a place with more says so in a gap."""
COMMAND_LIMIT = 2000
COMMANDS_LIMIT = 32
TEXT_LIMIT = 2000
_REMEDY = "run as root"


class PlaceFile(Struct, frozen=True):
    """A file as far as it was read, and who owns it."""

    path: str
    text: str
    owner_uid: int


class Home(Struct, frozen=True):
    """A user's home directory, as the password file or /home names it, and the names in it."""

    user: str
    path: str
    names: frozenset[str] | None = None
    """None when it was not listed: then any name may be there."""

    def below(self, relative: str) -> str | None:
        """The full path of something in it, or None when that cannot be there."""
        if self.names is not None and relative.partition("/")[0] not in self.names:
            return None
        return f"{self.path}/{relative}"


class PlaceReader:
    """Reads files and lists directories of one host and remembers what it could not see."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._gaps: dict[tuple[str, str], tuple[str, int]] = {}

    def file(self, path: str) -> PlaceFile | None:
        """The head of a regular file; None when it is absent or, with a gap, unreadable."""
        try:
            status = self.host.status(path)
            if not status.is_regular:
                if not status.is_character_device or self._target(path) != "/dev/null":
                    self.gap(path, "not a regular file")
                return None
            # One byte more than is used tells that there was more.
            text = self.host.read_bytes(path, PLACE_LIMIT_BYTES + 1)
        except Denied:
            self.denied(path)
            return None
        except Malformed as error:
            self.gap(path, str(error).removeprefix(f"{path}: "))
            return None
        except Unavailable:
            return None
        if len(text) > PLACE_LIMIT_BYTES:
            self.gap(path, f"only the first {PLACE_LIMIT_BYTES >> 20} MiB were read")
            text = text[:PLACE_LIMIT_BYTES].rpartition(b"\n")[0]
        return PlaceFile(path, text.decode("utf-8", "backslashreplace"), status.uid)

    def names(self, directory: str) -> list[str]:
        """The names in a directory, sorted; empty when it is absent or, with a gap, unreadable."""
        try:
            names = self.host.names(directory)
        except Denied:
            self.denied(directory)
            return []
        except Malformed as error:
            self.gap(directory, str(error).removeprefix(f"{directory}: "))
            return []
        except GpuwardenError:
            return []
        if len(names) > NAMES_LIMIT:
            self.gap(directory, f"only {NAMES_LIMIT} of {len(names)} names were looked at")
        text = sorted(name for name in names[:NAMES_LIMIT] if _is_utf8(name))
        if unreadable := min(len(names), NAMES_LIMIT) - len(text):
            self.gap(directory, f"{unreadable} names that are not UTF-8 were not looked at")
        return text

    def small_listing(self, directory: str) -> frozenset[str] | None:
        """The names in a directory, or None when it is too large or closed to list."""
        try:
            if self.host.status(directory).size_bytes > _LISTING_LIMIT_BYTES:
                return None
            return frozenset(self.host.names(directory))
        except Denied:
            return None
        except GpuwardenError:
            return frozenset()

    def gap(self, what: str, reason: str, remedy: str = "") -> None:
        """Remembers something unseen; equal ones are counted."""
        _, count = self._gaps.get((what, reason), ("", 0))
        self._gaps[what, reason] = (remedy, count + 1)

    def denied(self, path: str) -> None:
        """Remembers a refusal; home directories count as one place."""
        what = path
        if path.startswith(("/home/", "/root/")):
            what = "files in home directories"
        self.gap(what, "permission denied", _REMEDY)

    def gaps(self) -> list[Gap]:
        """What could not be seen, once each."""
        return [
            Gap(sensor=SENSOR, what=what, reason=reason, remedy=remedy, count=count)
            for (what, reason), (remedy, count) in self._gaps.items()
        ]

    def _target(self, path: str) -> str | None:
        try:
            return self.host.read_link(path)
        except GpuwardenError:
            return None


def _is_utf8(name: str) -> bool:
    # os.listdir gives undecodable bytes as lone surrogates, which no JSON encoder takes.
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
