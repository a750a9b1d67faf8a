"""What a process had of the GPUs before an action and has after it, as the driver tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import Gpu, GpuClient, Snapshot
from gpuwarden.outputs.words import memory
from gpuwarden.sensors import nvml
from gpuwarden.sensors.seen import Seen

FALLEN_SHARE = 0.5
"""Of what the driver said a process had: others come and go meanwhile."""
BUSY_PERCENT = 10


class GpuUse(Struct, frozen=True):
    """GPUs and clients at one moment; ``unseen`` says why the driver did not tell, or not all."""

    gpus: tuple[Gpu, ...] = ()
    clients: tuple[GpuClient, ...] = ()
    unseen: str = ""


Look = Callable[[], GpuUse]


def look(host: Host, library: str | None = None) -> GpuUse:
    """Asks the driver now, in a child with a deadline."""
    gpus: list[Gpu] = []
    clients: list[GpuClient] = []
    unseen = ""
    try:
        for fact in nvml.start(host, library=library).read(Seen()):
            if isinstance(fact, Gpu):
                gpus.append(fact)
            elif isinstance(fact, GpuClient):
                clients.append(fact)
    except GpuwardenError as error:
        unseen = str(error)
    return GpuUse(tuple(gpus), tuple(clients), unseen)


def of_snapshot(snapshot: Snapshot) -> GpuUse:
    """What a scan has seen."""
    return GpuUse(snapshot.gpus, snapshot.clients)


class Fall(Struct, frozen=True):
    """Whether what a process had is given back; ``lines`` say it GPU by GPU."""

    seen: bool
    """The driver told enough, before and after, to say either."""
    given_back: bool
    lines: tuple[str, ...]


def compare(pid: int, gpu_ids: Sequence[str], before: GpuUse, after: GpuUse) -> Fall:
    """How memory and utilisation of those GPUs fell between two moments."""
    mine = {one.gpu_id: one for one in before.clients if one.pid == pid}
    ids = list(dict.fromkeys([*mine, *gpu_ids]))
    if not ids and before.unseen:
        line = f"GPUs: not seen: {before.unseen}"
        return Fall(seen=False, given_back=False, lines=(line,))
    if not ids:
        return Fall(seen=True, given_back=True, lines=("the driver listed it on no GPU",))
    lines = []
    seen, given_back = True, True
    for identity in ids:
        then = next((one for one in before.gpus if one.id == identity), None)
        now = next((one for one in after.gpus if one.id == identity), None)
        if then is None or now is None or now.error is not None or "processes" in now.unread:
            why = after.unseen or (now.error if now is not None else None)
            lines.append(f"{_label(now or then, identity)}: not seen: {why or 'not told of'}")
            seen = given_back = False
            continue
        had = mine[identity].memory_bytes if identity in mine else None
        still = [one for one in after.clients if (one.gpu_id, one.pid) == (identity, pid)]
        troubles = ["the driver lists it still"] if still else []
        if not _memory_fell(then.memory_used_bytes, now.memory_used_bytes, had):
            troubles.append("its memory did not come back")
        if not _work_fell(then.sm_percent, now.sm_percent):
            troubles.append("it is as busy as before")
        if now.memory_used_bytes is None or now.sm_percent is None:
            seen = False
            troubles.append("what of memory and utilisation has no figure was not seen")
        given_back = given_back and not troubles
        lines.append(
            f"{_label(now, identity)}: memory {memory(then.memory_used_bytes)} to "
            f"{memory(now.memory_used_bytes)}, utilisation {_percent(then.sm_percent)} to "
            f"{_percent(now.sm_percent)}" + "".join(f"; {one}" for one in troubles)
        )
    return Fall(seen=seen, given_back=given_back, lines=tuple(lines))


def _memory_fell(then: int | None, now: int | None, had: int | None) -> bool:
    if then is None or now is None or not had:
        return True
    return then - now >= had * FALLEN_SHARE


def _work_fell(then: int | None, now: int | None) -> bool:
    if then is None or now is None or then < BUSY_PERCENT:
        return True
    return now < max(BUSY_PERCENT, then - BUSY_PERCENT)


def _label(gpu: Gpu | None, identity: str) -> str:
    return f"GPU {gpu.index}" if gpu is not None and gpu.index is not None else f"GPU {identity}"


def _percent(value: int | None) -> str:
    return "?" if value is None else f"{value} %"
