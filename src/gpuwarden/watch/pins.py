"""Denials that outlive the agent: what an earlier run pinned, and when that is replaced."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuwarden.errors import GpuwardenError
from gpuwarden.probes import pinning
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.loader import DeviceOpenProbe

PATIENCE_SECONDS = 15.0
"""How long denials that could not be taken over wait for the runtimes' answers."""


class Pins:
    """An older pin is replaced when everything that it denies is denied by the new probe.

    What is pinned are the probe's own maps: later denials are pinned with them. A dry run pins
    nothing and replaces no pin.
    """

    def __init__(
        self, probe: DeviceOpenProbe, tell: Callable[[str], None], *, dry_run: bool
    ) -> None:
        self._probe = probe
        self._tell = tell
        self._dry_run = dry_run
        self._pins = self._waits = False
        self._until = 0.0
        self.taken_over: set[GroupKey] = set()
        """Denied by the earlier run; whose they are is not known yet."""
        self.trouble = ""
        """Why denials are not pinned."""

    def take_over(self, *, pin: bool) -> None:
        """Denies at once what an earlier run pinned, if it is to be replaced.

        Errors: Denied, Unavailable, when that cannot be read.
        """
        self._pins = pin and not self._dry_run
        older = None
        try:
            older = pinning.pinned()
        except GpuwardenError:
            if self._pins:
                raise
        if pin and self._dry_run:
            self._tell("a dry run pins nothing")
        if older is None:
            return
        if self._pins:
            self._waits = not self._is_taken_over(older)
        else:
            self._tell("what an earlier run pinned stays denied: gpuwarden watch --unpin ends it")

    def _is_taken_over(self, older: pinning.Pinned) -> bool:
        if older.unread:
            self._tell(f"the pinned denials of an earlier run cannot be read: {older.unread}")
            return False
        failed = False
        for denial in older.denials:
            if denial.dry_run:
                continue
            try:
                self._probe.deny_group(denial.group)
            except (GpuwardenError, OSError) as error:
                self._tell(f"a pinned denial of an earlier run is not taken over: {error}")
                failed = True
                continue
            self.taken_over.add(denial.group)
        if self.taken_over:
            self._tell(f"{len(self.taken_over)} pinned denials of an earlier run are taken over")
        return not failed

    def begin(self) -> None:
        """Pins, if that is wanted and nothing older is lost by it. Errors: as the probe's pin."""
        if self._waits:
            # Until then the older pin stands.
            self._until = time.monotonic() + PATIENCE_SECONDS
        elif self._pins:
            self._pin()

    def later(self, *, settled: bool) -> None:
        """Pins what could not be pinned at once; ``settled``: every runtime has answered."""
        if not self._waits or not (settled or time.monotonic() >= self._until):
            return
        self._waits = False
        try:
            self._pin()
        except GpuwardenError as error:
            self.trouble = f"denials are not pinned: {error}"
            self._tell(self.trouble)

    def _pin(self) -> None:
        self._probe.pin()
        pinning.check_it_is_the_hosts()
        self._tell(
            f"denials are pinned in {pinning.DIRECTORY} and outlive gpuwarden: "
            "gpuwarden watch --unpin ends them"
        )
