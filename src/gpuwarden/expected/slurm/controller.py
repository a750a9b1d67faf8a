"""Slurm's commands on this host, asked within one budget of time, and this node's name in them."""

from __future__ import annotations

import os
import time

from msgspec import Struct

from gpuwarden.errors import GpuwardenError, TimedOut, Unavailable
from gpuwarden.expected.slurm import jobs
from gpuwarden.expected.slurm.site import (
    Site,
    find_site,
    host_name,
    is_node_name,
    step_sockets,
)
from gpuwarden.host import CommandOutput, Host
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen

_FILTERS = ("SQUEUE_", "SCONTROL_", "SLURM_CLUSTERS")
"""Variables by which a person narrows what Slurm's commands answer, or asks another cluster."""


def _unfiltered() -> list[str]:
    """What runs a command without such variables of ours; nothing where there are none."""
    names = sorted(name for name in os.environ if name.startswith(_FILTERS))
    return ["env", *(f"--unset={name}" for name in names)] if names else []


class Controller(Struct):
    """Slurm's commands on this host; each has its own bound, all of them end at ``ends_at``."""

    host: Host
    site: Site
    ends_at: float
    """On the monotonic clock, in seconds."""
    command_seconds: float

    def ask(self, program: str, *arguments: str) -> CommandOutput:
        """Runs one command. Errors: Unavailable, Denied, TimedOut."""
        left = min(self.command_seconds, self.ends_at - time.monotonic())
        if left <= 0:
            raise TimedOut("Slurm did not answer everything in time")
        return self.host.command(
            [*_unfiltered(), self.site.program(program), *arguments],
            deadline_seconds=left,
            environment=self.site.environment,
        )


class Reached(Struct):
    """A host's Slurm, and whether a controller of it answers; ``why`` says why not."""

    controller: Controller
    node: str | None = None
    answers: bool = False
    why: str = ""

    @property
    def site(self) -> Site:
        return self.controller.site


def locate(host: Host, *, command_seconds: float, total_seconds: float) -> Reached | None:
    """The Slurm of this host by what is on it; None when there is none, or no node of it is here.

    No controller is asked: ``answers`` is False. Never raises; ``why`` has what went wrong.
    """
    site = find_site(host, Seen(table=stat_lines.read(host)))
    if site is None:
        return None
    controller = Controller(host, site, time.monotonic() + total_seconds, command_seconds)
    found = Reached(controller)
    try:
        found.node = site.node = node_name(controller, step_sockets(host, site))
    except GpuwardenError as error:
        found.why = str(error)
        return found
    return found if found.node is not None else None


def reach(host: Host, *, command_seconds: float, total_seconds: float) -> Reached | None:
    """``locate``, and whether a controller answers."""
    found = locate(host, command_seconds=command_seconds, total_seconds=total_seconds)
    if found is None or found.why:
        return found
    try:
        found.answers = jobs.controller_is_up(found.controller.ask("scontrol", "ping"))
        found.why = "" if found.answers else "no controller of the Slurm cluster answers"
    except GpuwardenError as error:
        found.why = str(error)
    return found


def node_name(controller: Controller, sockets: list[tuple[str, str]]) -> str | None:
    """This node's name in the cluster, which need not be the host's; None if it has none.

    Errors: GpuwardenError when slurmd runs and nobody says.
    """
    site = controller.site
    if site.node is not None:
        return site.node
    try:
        printed = controller.ask("scontrol", "show", "aliases")
        aliases = [
            name for name in printed.stdout.decode("utf-8", "replace").split() if is_node_name(name)
        ]
    except GpuwardenError:
        if site.daemon_runs:
            raise
        return None
    if printed.code == 0 and aliases:
        site.other_nodes = tuple(aliases[1:])
        return aliases[0]
    of_steps = [name for name, _ in sockets if is_node_name(name)]
    if of_steps:
        return of_steps[0]
    return host_name(controller.host) if site.daemon_runs else None


def refusal_of(output: CommandOutput, command: str) -> str:
    """What a command that gives an order complained of; empty when it was taken."""
    try:
        jobs.refuse_failure(
            CommandOutput(code=output.code, stdout=output.stdout or b".", stderr=output.stderr),
            command,
        )
    except Unavailable as error:
        return str(error)
    return ""
