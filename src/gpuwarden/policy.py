"""What a policy says: workloads that belong, narrow exceptions, thresholds."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    Network = IPv4Network | IPv6Network

Activity = Literal["hash-cracking", "volunteer-computing", "plotting"]
JitRule = Literal["allow", "review"]
STARTER = "starter"
"""The word for the baseline that is installed with gpuwarden, among a profile's paths."""
Words = str | list[str]
Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
CONTAINER_CONDITIONS = ("pod_namespace", "pod_name", "pod_labels", "image", "image_digest")
"""Conditions that a container's runtime confirms."""
NARROWING_CONDITIONS = ("user", "binary")
"""Inside a container both are what its root says: they narrow a match, they prove none."""


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions that must all hold; a list means any of its values; values match whole.

    ``pod_name``, ``unit`` and ``binary`` may end in ``*``. ``image`` without a tag matches any tag.
    """

    pod_namespace: Words | None = None
    pod_name: Words | None = None
    pod_labels: dict[str, str] | None = None
    image: Words | None = None
    image_digest: Words | None = None
    slurm_account: Words | None = None
    slurm_partition: Words | None = None
    slurm_user: Words | None = None
    unit: Words | None = None
    user: Words | None = None
    binary: Words | None = None

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) in (None, [], {}) for name in self.__struct_fields__)


class PolicyWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that is supposed to run here, whom to ask about it, and which GPUs it may use."""

    name: str
    match: Match
    owner: str | None = None
    contact: str | None = None
    gpus: Literal["all"] | list[int | str] = "all"
    egress: list[str] | None = None
    """``address``, ``address:port`` or ``network/prefix`` it may talk to; None: not restricted."""
    profile: str | None = None
    """The code profile of its processes; None: its GPU code is not compared."""
    contexts: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """CUDA contexts that one of its processes has on one GPU."""
    single_process: bool = False
    """One process in each of its containers uses the GPU; a second one is told of."""


class JitRules(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"cudnn_jit": "cudnn-jit"},
):
    """What to say of code that is made while a workload runs; None: it is unknown code.

    A class is what a module looks like, which anyone can imitate: a claim, never a proof.
    """

    triton: JitRule | None = None
    nvrtc: JitRule | None = None
    nvjitlink: JitRule | None = None
    cudnn_jit: JitRule | None = None

    def of(self, name: str) -> JitRule | None:
        """The rule of a class by the name that the file uses; None for any other name."""
        index = JIT_CLASSES.index(name) if name in JIT_CLASSES else None
        return None if index is None else getattr(self, JitRules.__struct_fields__[index])


JIT_CLASSES: tuple[str, ...] = JitRules.__struct_encode_fields__


class PolicyProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The GPU code that a workload may load: known modules, and classes made while it runs."""

    name: str
    baselines: list[str]
    """Absolute paths of baseline files, or ``starter``; asked in this order."""
    jit: JitRules = JitRules()
    launches: str | None = None
    """Absolute path of a launch profile (``gpuwarden trace --learn``); None: not compared."""


class Capture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How `watch` and `trace` get the bytes of GPU modules that processes load."""

    may_stop: bool = False
    """A process may be stopped for a moment when its module did not fit into the ring buffer.

    A stopped rank stalls its whole job, so this is off unless it is asked for.
    """
    ring_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    """Kernel memory that modules are copied through; rounded up to a power of two."""
    module_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 512
    """Larger modules are told of and not copied."""
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 20
    """How long the thread that loads a module may be delayed, in all, while there is no room."""


class PolicyException(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A narrow, reasoned, possibly expiring silence for one rule."""

    rule: str
    reason: str
    match: Match = Match()
    path: str | None = None
    """For findings about a file (persistence, preload): that file."""
    gpu: int | str | None = None
    expires: datetime.date | None = None


class KnownGpuWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A container workload that may use accelerators although nobody allocated it one.

    Named after the macro of Falco's catalogue that it replaces. ``match`` names a container; a
    ``binary`` and a ``user`` narrow it.
    """

    match: Match
    reason: str
    expires: datetime.date | None = None


class EnforceRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Containers that `watch --enforce` denies every accelerator; ``match`` names them alone."""

    match: Match
    reason: str


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where numbers become signs."""

    busy_sm_percent: Percent = 80
    small_memory_percent: Percent = 25
    leaked_memory_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 512
    suspicious_idle_sm_percent: Percent = 20
    sustained_minutes: Annotated[int, msgspec.Meta(ge=1, le=1440)] = 10
    """How long compute must be saturated to be a sign of its own."""
    bursts: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 4
    """How many bursts in an hour are no accident."""
    respawns: Annotated[int, msgspec.Meta(ge=3, le=64)] = 5
    """How many processes of one binary in a row, one after the other, are a respawn."""
    memory_after_exit_seconds: Annotated[int, msgspec.Meta(ge=5, le=86400)] = 60


class Evidence(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"when": "on"},
):
    """Archives that `watch` writes by itself, and the bounds of all archives."""

    when: Literal["never", "critical"] = "never"
    """``critical``: once for each finding that opens as critical and is about a process."""
    directory: str = "/var/lib/gpuwarden/evidence"
    archive_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024
    """The most that one archive holds; what had no room is named in it."""
    keep_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 8192
    """While the directory holds more, `watch` writes no further archive, and says so."""


class Namespaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Kubernetes namespaces, by what `harden kubernetes` does about them."""

    exempt: list[str] = []
    """Not held to the admission policy: where device plugins, drivers and agents run."""
    gpu: list[str] = []
    """Whose pods compute: they get the egress policy."""


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole file."""

    version: Literal[1] = 1
    workloads: list[PolicyWorkload] = []
    profiles: list[PolicyProfile] = []
    exceptions: list[PolicyException] = []
    thresholds: Thresholds = Thresholds()
    allow_activities: list[Activity] = []
    user_known_gpu_workloads: list[KnownGpuWorkload] = []
    enforce: list[EnforceRule] = []
    capture: Capture = Capture()
    evidence: Evidence = Evidence()
    namespaces: Namespaces = Namespaces()
    signing_key: str | None = None
    """Absolute path of the private key that signs evidence and the journal; None: unsigned."""
    sinks: list[str] = []

    def profile(self, name: str) -> PolicyProfile | None:
        """The profile of that name, None when there is none."""
        return next((profile for profile in self.profiles if profile.name == name), None)


def parse_peer(text: str) -> tuple[Network, int | None]:
    """An egress entry as network and port: ``address``, ``address:port``, ``network/prefix``.

    An IPv6 address before a port stands in brackets. Errors: ValueError.
    """
    host, port = text, None
    if text.count(":") == 1 or text.startswith("["):
        host, _, port_text = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        host = host.removeprefix("[").removesuffix("]")
        if port_text:
            if not re.fullmatch(r"[0-9]{1,5}", port_text) or int(port_text) > 65535:
                raise ValueError(f"'{port_text[:20]}' is no port")
            port = int(port_text)
    # Imported here: few policies name peers.
    import ipaddress

    return ipaddress.ip_network(host, strict=False), port


def words(value: Words | None) -> tuple[str, ...]:
    """A condition's values as a tuple; empty when the condition is not set."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def set_conditions(match: Match) -> Iterator[tuple[str, Any]]:
    """The conditions that a match sets, in the order of the documentation."""
    for name in match.__struct_fields__:
        value = getattr(match, name)
        if value not in (None, [], {}):
            yield name, value
