"""What the steps need to know of how the command was asked to run."""

from __future__ import annotations

import os

from msgspec import Struct

from gpuwarden import control
from gpuwarden.host import Host

STATE_DIRECTORY = control.STATE_DIRECTORY
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

    @property
    def journal(self) -> str:
        """Where what is done is written down."""
        return os.path.join(self.state_directory, "journal")
