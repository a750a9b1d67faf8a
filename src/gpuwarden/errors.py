"""The errors that gpuwarden raises and expects.

    GpuwardenError
    ├── Unavailable      the thing is not there, went away, or did not answer in time
    │   └── TimedOut     it did not answer before its deadline
    ├── Denied           it is there and we may not read it
    ├── Malformed        it was read and is not what its format says
    └── UsageError       the command line or an argument cannot be used

Each carries one sentence for a person in ``str(error)`` and, where there is something to do about
it, the next step in ``remedy``.
"""

from __future__ import annotations


class GpuwardenError(Exception):
    """Something that a sensor, a source or a command reports instead of a fact."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class Unavailable(GpuwardenError):
    """The thing asked for is absent, has vanished, or does not answer."""


class TimedOut(Unavailable):
    """The thing asked for did not answer before its deadline."""


class Denied(GpuwardenError):
    """The thing asked for exists and this process may not read it."""


class Malformed(GpuwardenError):
    """Bytes were read that do not follow the format they are said to have."""


class UsageError(GpuwardenError):
    """The command line, or a file that a person wrote for us, cannot be used as given."""
