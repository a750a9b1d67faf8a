"""The containers of the processes that were seen, as their runtimes describe them.

Only ids that a process's cgroup names are asked about. A runtime is believed when root made the
socket it listens on (or owns the state files it left on disk); what another user's runtime says of
its own containers is kept, unconfirmed. A container that nobody answers for is still reported:
``confirmed=False`` and a gap that says what could not be asked.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from msgspec import Struct, field

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Container, Gap, Process
from gpuwarden.pattern import pattern
from gpuwarden.sensors.cgroup import containers_in
from gpuwarden.sensors.runtimes import cri, docker_api, runc_state
from gpuwarden.sensors.seen import Seen
from gpuwarden.wire.unix_grpc import CRI_SOCKETS, NotInstalled

SENSOR: Final = "containers"
DEADLINE_SECONDS: Final = 2.0
CONTAINER_LIMIT: Final = 1024
_ANCESTOR_LIMIT: Final = 64

DOCKER_SOCKETS: Final = (
    ("docker", "/var/run/docker.sock"),
    ("podman", "/run/podman/podman.sock"),
)
USER_SOCKETS: Final = (
    ("podman", "/run/user/{uid}/podman/podman.sock"),
    ("docker", "/run/user/{uid}/docker.sock"),
)
_NAMESPACE = pattern(r"[a-z_]+:\[(\d{1,20})\]\Z", re.ASCII)
_OWN_RUNTIMES: Final = {"singularity", "ecs"}
"""No socket to ask: the cgroup's word is all there is."""

_Answers = tuple[int, dict[str, Container | GpuwardenError]]
_Ask = Callable[[str, list[str], str], _Answers]


class _Wanted(Struct):
    """A container id that a cgroup names."""

    id: str
    runtime: str | None
    pod_uid: str | None
    parent_id: str | None
    user_uid: int | None


class _Search(Struct):
    """What has been found so far, and what stood in the way."""

    host: Host
    wanted: dict[str, _Wanted]
    found: dict[str, Container] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Id → why the runtime that should know it did not tell."""
    failures: dict[str, GpuwardenError] = field(default_factory=dict)
    """Runtime → why its socket could not be asked."""

    def open_for(self, runtime: str, user_uid: int | None = None) -> list[str]:
        """Ids that this runtime may know and that nobody vouched for yet."""
        return [
            wanted.id
            for wanted in self.wanted.values()
            if wanted.runtime in (None, runtime)
            and (user_uid is None or wanted.user_uid == user_uid)
            and not (wanted.id in self.found and self.found[wanted.id].confirmed)
        ]


def read(host: Host, seen: Seen) -> Iterator[Container | Gap]:
    """One Container per id in the cgroups of ``seen.processes``, outer ones included.

    Sources: CRI v1, the Docker Engine API, and the state directories of runc, crun, podman and
    Docker. No errors: what could not be asked is a Gap.
    """
    search = _Search(host, _wanted(seen))
    if len(search.wanted) > CONTAINER_LIMIT:
        beyond = len(search.wanted) - CONTAINER_LIMIT
        search.wanted = dict(list(search.wanted.items())[:CONTAINER_LIMIT])
        yield Gap(
            sensor=SENSOR,
            what="containers beyond the first ones",
            reason=f"more than {CONTAINER_LIMIT} container ids are named by cgroups",
            count=beyond,
        )
    if search.wanted:
        _ask_sockets(search)
        _look_on_disk(search)
    yield from search.gaps
    unanswered: dict[tuple[str, str, str], int] = {}
    for wanted in search.wanted.values():
        container = search.found.get(wanted.id)
        if container is None:
            container = Container(
                id=wanted.id, runtime=wanted.runtime or "unknown", pod_uid=wanted.pod_uid
            )
            key = _why(search, wanted)
            unanswered[key] = unanswered.get(key, 0) + 1
        yield _completed(host, container, wanted.parent_id)
    for (what, reason, remedy), count in unanswered.items():
        yield Gap(sensor=SENSOR, what=what, reason=reason, remedy=remedy, count=count)
    yield from _without_an_id(host, seen, search)


def look_up(
    host: Host,
    identity: str,
    runtime: str | None,
    pod_uid: str | None = None,
    *,
    user_uid: int | None = None,
) -> Container | Gap:
    """One container, asked for by the id that a control group names; a Gap when nobody knows it.

    A runtime may come to know it a moment after its group was made. ``user_uid``: whose user slice
    the group is in. Takes up to ``DEADLINE_SECONDS`` for each socket that does not answer.
    """
    wanted = _Wanted(identity, runtime, pod_uid, None, user_uid)
    search = _Search(host, {identity: wanted})
    _ask_sockets(search)
    _look_on_disk(search)
    container = search.found.get(identity)
    if container is not None:
        return _completed(host, container, None)
    what, reason, remedy = _why(search, wanted)
    return Gap(sensor=SENSOR, what=what, reason=reason, remedy=remedy)


def _wanted(seen: Seen) -> dict[str, _Wanted]:
    wanted: dict[str, _Wanted] = {}
    placed = {id(process.cgroup): process.cgroup for process in seen.processes.values()}
    for placement in placed.values():
        if placement is None:
            continue
        parent: str | None = None
        for runtime, identity in containers_in(placement):
            innermost = identity == placement.container_id
            if identity not in wanted:
                wanted[identity] = _Wanted(
                    id=identity,
                    runtime=runtime,
                    pod_uid=placement.pod_uid if innermost else None,
                    parent_id=parent,
                    user_uid=placement.user_slice_uid,
                )
            parent = identity
    return wanted


def _ask_sockets(search: _Search) -> None:
    def cri_ask(path: str, identities: list[str], runtime: str) -> _Answers:
        return cri.ask(path, identities, runtime=runtime, deadline_seconds=DEADLINE_SECONDS)

    def docker_ask(path: str, identities: list[str], runtime: str) -> _Answers:
        return docker_api.ask(path, identities, runtime=runtime, deadline_seconds=DEADLINE_SECONDS)

    for runtime, path in CRI_SOCKETS:
        _ask_one(search, cri_ask, runtime, path)
    for runtime, path in DOCKER_SOCKETS:
        _ask_one(search, docker_ask, runtime, path)
    users = {wanted.user_uid for wanted in search.wanted.values()} - {None, 0}
    for uid in sorted(uid for uid in users if uid is not None):
        for runtime, template in USER_SOCKETS:
            _ask_one(search, docker_ask, runtime, template.format(uid=uid), user_uid=uid)


def _ask_one(
    search: _Search, ask: _Ask, runtime: str, path: str, *, user_uid: int | None = None
) -> None:
    identities = search.open_for(runtime, user_uid)
    if not identities:
        return
    try:
        status = search.host.status(path)
    except Unavailable:
        return
    except GpuwardenError as error:
        search.failures.setdefault(runtime, error)
        return
    if not stat.S_ISSOCK(status.mode):
        return
    try:
        uid, answers = ask(search.host.path(path), identities, runtime)
    except GpuwardenError as error:
        search.failures.setdefault(runtime, error)
        if isinstance(error, NotInstalled):
            search.gaps.append(
                Gap(
                    sensor=SENSOR,
                    what=f"{runtime} over {path}",
                    reason=str(error),
                    remedy=error.remedy,
                    count=len(identities),
                )
            )
        return
    believed = status.uid == 0 and uid == 0
    if not believed and any(isinstance(answer, Container) for answer in answers.values()):
        owner = uid if uid != 0 else status.uid
        search.gaps.append(
            Gap(
                sensor=SENSOR,
                what=f"what {path} says",
                reason=f"uid {owner}, not root, answers there: it may say anything of its own",
                count=len(answers),
            )
        )
    for identity, answer in answers.items():
        if isinstance(answer, Container):
            search.found[identity] = (
                answer if believed else msgspec.structs.replace(answer, confirmed=False)
            )
            search.refused.pop(identity, None)
        else:
            search.refused[identity] = str(answer)


def _look_on_disk(search: _Search) -> None:
    for identity in search.wanted:
        if identity in search.found:
            continue
        container = runc_state.look_up(search.host, identity)
        if container is not None:
            search.found[identity] = container


def _why(search: _Search, wanted: _Wanted) -> tuple[str, str, str]:
    """(what, reason, remedy) for a container that nobody answered for."""
    runtime = wanted.runtime or "unknown"
    if wanted.parent_id is not None and wanted.parent_id in search.wanted:
        return (
            f"containers inside container {wanted.parent_id[:12]}",
            "their runtime runs inside that container, where its word proves nothing",
            "",
        )
    if runtime in _OWN_RUNTIMES:
        return f"{runtime} containers", f"{runtime} has no service that could be asked", ""
    if wanted.id in search.refused:
        return f"{runtime} containers", search.refused[wanted.id], ""
    for name, failure in search.failures.items():
        if wanted.runtime in (None, name):
            return f"{runtime} containers", str(failure), failure.remedy
    return (
        f"{runtime} containers",
        "no runtime here answers for them and no state directory knows them",
        "mount the runtime's socket (or the host's /run) and run as root",
    )


def _completed(host: Host, container: Container, parent_id: str | None) -> Container:
    """The container with the namespaces of its first process, which tell moved-in processes."""
    spaces: dict[str, int | None] = {"pid": None, "mnt": None}
    if container.main_pid is not None:
        for kind in spaces:
            try:
                link = host.read_link(f"/proc/{container.main_pid}/ns/{kind}")
            except GpuwardenError:
                continue
            found = _NAMESPACE.match(link)
            spaces[kind] = int(found[1]) if found else None
    return msgspec.structs.replace(
        container,
        parent_id=parent_id,
        pid_namespace=spaces["pid"],
        mount_namespace=spaces["mnt"],
    )


def _without_an_id(host: Host, seen: Seen, search: _Search) -> Iterator[Container | Gap]:
    """Containers of bare runc and ``ctr``, whose cgroups name no id: known by their processes."""
    loose = [process for process in seen.processes.values() if _is_loose(process)]
    if not loose:
        return
    ancestors: set[int] = set()
    paths: set[str] = set()
    for process in loose:
        ancestors.update(_lineage(seen, process))
        if process.cgroup is not None:
            paths.update(process.cgroup.paths)
    for runtime, state in runc_state.every_state(host):
        by_path = any(
            own.endswith(path) for own in state.cgroup_paths for path in paths if len(path) > 1
        )
        if state.id in search.wanted or not (state.pid in ancestors or by_path):
            continue
        container = runc_state.look_up(host, state.id)
        if container is not None:
            yield _completed(host, msgspec.structs.replace(container, runtime=runtime), None)


def _is_loose(process: Process) -> bool:
    placement = process.cgroup
    if placement is None or process.kernel_thread:
        return False
    if placement.container_id or placement.slurm_job or placement.machine or placement.session:
        return False
    return placement.unit is None or placement.unit.endswith(".scope")


def _lineage(seen: Seen, process: Process) -> Iterator[int]:
    pid: int | None = process.pid
    for _ in range(_ANCESTOR_LIMIT):
        if pid is None or pid <= 1:
            return
        yield pid
        line = seen.table.get(pid)
        known = seen.processes.get(pid)
        pid = line.ppid if line is not None else known.ppid if known is not None else None
