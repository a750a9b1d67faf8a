"""A probe object of the CUDA layer, whose programs become uprobes."""

from __future__ import annotations

import os

from gpuwarden.errors import Unavailable
from gpuwarden.probes import uprobes
from gpuwarden.probes.layouts import Layouts
from gpuwarden.probes.probe_object import ProbeObject

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UPROBES = "/sys/bus/event_source/devices/uprobe"
_REMEDY = "a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_UPROBE_EVENTS, 5.15 or later"


class UprobeObject(ProbeObject):
    """An object whose programs ``uprobes.attach`` takes. Errors: as ``ProbeObject``."""

    def _check(self, path: str, among: Layouts) -> None:
        if not os.path.exists(UPROBES):
            raise Unavailable(
                "this kernel has no uprobes: calls of the CUDA driver library cannot be seen",
                remedy=_REMEDY,
            )
        super()._check(path, among)

    def _prepare(self, program: int) -> None:
        uprobes.prepare(self.bpf, program)
