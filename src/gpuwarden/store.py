"""The agent's memory: findings with their spool, samples, GPU modules; an SQLite file each.

They differ in worth: findings are synced before anything is told, and must not suffer from the
bulk, the damage or the limits of the others.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType

from gpuwarden.errors import GpuwardenError
from gpuwarden.model import Gap
from gpuwarden.store_database import IN_MEMORY, hold_directory
from gpuwarden.store_findings import Ledger
from gpuwarden.store_modules import ModuleLimits, ModuleStore, Sighting
from gpuwarden.store_samples import Point, Sample, SampleLimits, SampleStore, Series
from gpuwarden.store_spool import FindingState, LedgerLimits, News, SinkCursor

__all__ = [
    "FindingState",
    "Ledger",
    "LedgerLimits",
    "ModuleLimits",
    "ModuleStore",
    "News",
    "Point",
    "Sample",
    "SampleLimits",
    "SampleStore",
    "Series",
    "Sighting",
    "SinkCursor",
    "Store",
]

FINDINGS_FILE = "findings.sqlite"
SAMPLES_FILE = "samples.sqlite"
MODULES_FILE = "modules.sqlite"
VOLATILE_BYTES = 16 << 20


class Store:
    """Opened by one agent at a time for writing, and by any number of readers."""

    def __init__(
        self,
        directory: str,
        *,
        read_only: bool = False,
        ledger_limits: LedgerLimits | None = None,
        sample_limits: SampleLimits | None = None,
        module_limits: ModuleLimits | None = None,
    ) -> None:
        """Errors: Unavailable (another agent has it, a newer version wrote it), Denied."""
        self.directory = directory
        self._held = None if read_only else hold_directory(directory)
        findings, samples, modules = (
            os.path.join(directory, name) for name in (FINDINGS_FILE, SAMPLES_FILE, MODULES_FILE)
        )
        with ExitStack() as opened:
            opened.callback(self._release)
            self.findings = Ledger(findings, ledger_limits, read_only=read_only)
            opened.callback(self.findings.close)
            self.samples = SampleStore(samples, sample_limits, read_only=read_only)
            opened.callback(self.samples.close)
            if read_only and not os.path.exists(modules):
                # An agent before this one did not keep it.
                self.modules = ModuleStore(IN_MEMORY)
            else:
                self.modules = ModuleStore(modules, module_limits, read_only=read_only)
            opened.pop_all()

    @classmethod
    def volatile(cls, directory: str, error: GpuwardenError) -> Store:
        """A store in memory, for when the one on disk cannot be opened: alarms go on.

        ``error`` is why; it stays among ``troubles``.
        """
        store = cls.__new__(cls)
        store.directory = directory
        store._held = None
        # Nobody reads what is resolved there, and nothing of it may grow.
        limits = LedgerLimits(spool_bytes=VOLATILE_BYTES, resolved_rows=0)
        store.findings = Ledger(IN_MEMORY, limits)
        store.samples = SampleStore(IN_MEMORY, SampleLimits(size_bytes=VOLATILE_BYTES))
        store.modules = ModuleStore(IN_MEMORY, ModuleLimits(size_bytes=VOLATILE_BYTES))
        store.findings.set_aside = Gap(
            sensor="store",
            what=directory,
            reason=f"{error}; nothing is remembered over a restart",
            remedy="; ".join(filter(None, (error.remedy, "then restart gpuwarden"))),
        )
        return store

    @property
    def troubles(self) -> list[Gap]:
        """What is wrong with the memory now, and what was set aside when it was opened."""
        return [
            gap
            for part in (self.findings, self.samples, self.modules)
            for gap in (part.set_aside, part.trouble)
            if gap is not None
        ]

    def trim(self, now_ns: int) -> int:
        """One bounded step towards the limits; the number of rows removed."""
        return self.findings.trim(now_ns) + self.samples.trim(now_ns) + self.modules.trim()

    def series(
        self, *, pid: int | None = None, gpu_id: str | None = None, since_ns: int = 0
    ) -> list[Series]:
        """What is remembered of a pid or a GPU; see ``SampleStore.series``."""
        return self.samples.series(pid=pid, gpu_id=gpu_id, since_ns=since_ns)

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def close(self) -> None:
        self.findings.close()
        self.samples.close()
        self.modules.close()
        self._release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()
