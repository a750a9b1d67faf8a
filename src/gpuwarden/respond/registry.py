"""Every step that there is, in the order of a plan, and what does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuwarden.finding import Row
from gpuwarden.respond.settings import Settings
from gpuwarden.respond.step import Actor, Target
from gpuwarden.respond.step_names import StepName

RowsOf = Callable[[Target], Sequence[Row]]
Maker = Callable[[Settings, RowsOf], Actor]


def _evidence(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.evidence_step import Evidence

    return Evidence(settings)


def _freeze(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.freezing import Freeze

    return Freeze(settings.host, rows_of)


def _thaw(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.freezing import Thaw

    return Thaw(settings.host)


def _deny(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.denial import Deny

    return Deny(
        settings.host,
        rows_of,
        control_socket=settings.control_socket,
        state_directory=settings.state_directory,
        reason=settings.reason,
    )


def _allow(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.denial import Allow

    return Allow(settings.host, control_socket=settings.control_socket)


def _hold_jobs(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.slurm import HoldJobs

    return HoldJobs(settings.host)


def _cordon(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.kubernetes import Cordon

    return Cordon()


def _delete_pod(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.kubernetes import DeletePod

    return DeletePod(settings.within_seconds)


def _kill(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.killing import Kill

    return Kill(
        settings.host,
        verify_seconds=settings.within_seconds,
        nvml_library=settings.nvml_library,
    )


def _drain_node(settings: Settings, rows_of: RowsOf) -> Actor:
    from gpuwarden.respond.slurm import DrainNode

    return DrainNode(settings.host)


ACTORS: tuple[tuple[StepName, Maker], ...] = (
    ("evidence", _evidence),
    ("freeze", _freeze),
    ("thaw", _thaw),
    ("deny", _deny),
    ("allow", _allow),
    ("hold-jobs", _hold_jobs),
    ("cordon", _cordon),
    ("kill", _kill),
    ("delete-pod", _delete_pod),
    ("drain-node", _drain_node),
)


def actors(settings: Settings, rows_of: RowsOf) -> Iterator[tuple[StepName, Actor]]:
    """Each step's name with what does it, in order."""
    for name, make in ACTORS:
        yield name, make(settings, rows_of)
