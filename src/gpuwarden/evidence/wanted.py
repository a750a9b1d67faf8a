"""What an archive is to be about, and what goes into it: the words between asker and collector."""

from __future__ import annotations

import argparse

from msgspec import Struct


class Wanted(Struct, frozen=True, kw_only=True):
    """One process, one container or one GPU; exactly one of the three is named."""

    pid: int | None = None
    container: str | None = None
    gpu: str | None = None
    start_time_ticks: int | None = None
    """If given: only the process that began then, not another one that has its pid by now."""
    boot_id: str | None = None
    finding: str | None = None
    """Id of the finding that it is for."""
    memory: bool = True
    """Whether memory of the processes is taken."""
    root: str = "/"
    nvml_library: str | None = None
    deep: bool = False
    state: str | None = None
    """watch's directory, for samples, findings and the journal; None: the default one."""

    @property
    def name(self) -> str:
        """Of plain characters, for the archive's file."""
        if self.pid is not None:
            return f"pid-{self.pid}"
        kind, text = (
            ("container", self.container) if self.container is not None else ("gpu", self.gpu)
        )
        plain = "".join(one for one in (text or "") if one.isascii() and one.isalnum())
        return f"{kind}-{plain[:12] or 'x'}"


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    """As the command line has it, which ``check_flags`` has passed."""
    return Wanted(
        pid=int(arguments.what[0]) if arguments.what else None,
        container=arguments.container,
        gpu=arguments.gpu,
        start_time_ticks=arguments.start_time,
        boot_id=arguments.boot_id,
        finding=arguments.finding,
        memory=not arguments.no_memory,
        root=arguments.root,
        nvml_library=arguments.nvml_library,
        deep=arguments.deep,
        state=arguments.state,
    )
