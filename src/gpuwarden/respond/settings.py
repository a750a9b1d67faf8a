"""What the steps need to know of how the command was asked to run."""

from __future__ import annotations

from msgspec import Struct

from gpuwarden import control
from gpuwarden.host import Host

STATE_DIRECTORY = "/var/lib/gpuwarden"
WITHIN_SECONDS = 30.0


class Settings(Struct, frozen=True, kw_only=True):
    """One run of `gpuwarden respond`."""

    host: Host
    state_directory: str = STATE_DIRECTORY
    control_socket: str = control.SOCKET
    evidence_directory: str | None = None
    """None: the policy's."""
    within_seconds: float = WITHIN_SECONDS
    """How long what a step should bring about is waited for."""
    reason: str = ""
    nvml_library: str | None = None
    policy_path: str | None = None
