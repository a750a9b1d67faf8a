"""The fields of a container fact, taken from any runtime's JSON with every length bounded.

Environment variables are secrets until shown otherwise: only names that tell a user, a team or a
job are kept, and never those that also sound like a credential or belong to a database.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

TEXT_LIMIT: Final = 1024
LIST_LIMIT: Final = 128
MAP_LIMIT: Final = 128
REDACTED: Final = "[redacted]"

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
_SECRET = pattern(r"TOKEN|SECRET|PASS|PWD|CRED|AUTH|API_?KEY|PRIVATE|SIGNATURE", re.IGNORECASE)
_HINT = pattern(
    r"(?:\A|_)(?:USER|USER_?NAME|USER_?ID|LOGNAME|OWNER|TEAM|GROUP_NAME|PROJECT|ACCOUNT|JOB_?ID|"
    r"JOB_?NAME|TASK_?ID|TASK_?NAME|TASK_ROLE|EXPERIMENT_ID|EXPERIMENT_NAME|WORKSPACE|"
    r"CLUSTER_NAME|NOTEBOOK_NAME|SERVER_NAME|CONTAINER_ID)\Z"
)
_NOT_A_HINT = pattern(
    r"DB_|DATABASE|SQL|POSTGRES|\APG|MONGO|REDIS|RABBIT|SMTP|MAIL|PROXY|LDAP|RUN_USER|S3_|AWS_|AZURE_|GOOGLE_"
)
# dockershim and cri-dockerd: k8s_<container>_<pod>_<namespace>_<pod uid>_<attempt>.
_DOCKERSHIM = pattern(
    r"k8s_(?P<container>[^_]+)_(?P<pod>[^_]+)_(?P<namespace>[^_]+)_"
    r"(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})_\d+(?:_[0-9a-f]+)?\Z"
)
_POD_DIRECTORY = pattern(r"[/-]pod(?P<uid>[0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})")
_INSTANT = pattern(
    r"(?P<second>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(?P<fraction>\d{1,18}))?"
    r"(?P<zone>Z|[+-]\d\d:\d\d)\Z",
    re.ASCII,
)
_REPLICA_SUFFIX = pattern(r"-[a-z0-9]{5}\Z")
_ORDINAL = pattern(r"-\d+\Z", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Labels that a controller puts on the pods it makes, and what they say of it.
_JOB_LABELS: Final = (
    ("training.kubeflow.org/job-name", "TrainingJob"),
    ("ray.io/cluster", "RayCluster"),
    ("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),
    ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
    ("volcano.sh/job-name", "VolcanoJob"),
    ("notebook-name", "Notebook"),
    ("batch.kubernetes.io/job-name", "Job"),
    ("job-name", "Job"),
)


def decode(data: bytes | str, what: str) -> object:
    """The JSON value in ``data``. Errors: Malformed, for any bytes that are not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Malformed(f"{what}: not JSON ({error})") from error


def mapping(value: object) -> Mapping[str, object]:
    """``value`` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[object]:
    """The first elements of ``value`` if it is a JSON array, else none."""
    return value[:LIST_LIMIT] if isinstance(value, list) else []


def text(value: object, limit: int = TEXT_LIMIT) -> str | None:
    """``value`` if it is a string with something in it, cut at ``limit``."""
    return value[:limit] if isinstance(value, str) and value else None


def texts(value: object, limit: int = TEXT_LIMIT) -> tuple[str, ...]:
    """The strings of a JSON array."""
    return tuple(found for item in items(value) if (found := text(item, limit)) is not None)


def number(value: object) -> int | None:
    """``value`` if it is a positive integer that fits 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 63:
        return None
    return value


def truth(value: object) -> bool | None:
    """``value`` if it is a JSON boolean."""
    return value if isinstance(value, bool) else None


def labels(value: object) -> dict[str, str]:
    """Labels as text to text; a value whose name sounds like a credential is not kept."""
    kept: dict[str, str] = {}
    if isinstance(value, Mapping):
        for key, entry in list(value.items())[:MAP_LIMIT]:
            if isinstance(key, str) and isinstance(entry, str):
                name = key[:TEXT_LIMIT]
                kept[name] = REDACTED if _SECRET.search(name) else entry[:TEXT_LIMIT]
    return kept


def environment(pairs: Iterable[str]) -> tuple[dict[str, str], str | None]:
    """(hints of user and job, NVIDIA_VISIBLE_DEVICES or None) out of ``NAME=value`` strings."""
    hints: dict[str, str] = {}
    visible: str | None = None
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            continue
        if name == VISIBLE_DEVICES:
            visible = value[:TEXT_LIMIT]
        elif (
            len(hints) < MAP_LIMIT
            and len(name) <= 128
            and value
            and _HINT.search(name)
            and not _SECRET.search(name)
            and not _NOT_A_HINT.search(name)
        ):
            hints[name] = value[:TEXT_LIMIT]
    return hints, visible


def instant_ns(value: object) -> int | None:
    """Unix nanoseconds of an RFC 3339 time; None for none, nonsense and Go's zero time."""
    found = _INSTANT.match(value) if isinstance(value, str) else None
    if found is None:
        return None
    zone = "+00:00" if found["zone"] == "Z" else found["zone"]
    try:
        elapsed = datetime.fromisoformat(found["second"] + zone) - _EPOCH
    except (ValueError, OverflowError):
        return None
    seconds = elapsed // timedelta(seconds=1)
    if seconds <= 0:
        return None
    return seconds * 1_000_000_000 + int((found["fraction"] or "0").ljust(9, "0")[:9])


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as the labels, the name or the cgroup of one of its containers tell it."""

    uid: str | None = None
    name: str | None = None
    namespace: str | None = None
    container: str | None = None


def pod_of(
    tags: Mapping[str, str], *, name: str | None = None, cgroup_parent: str | None = None
) -> Pod:
    """The pod: from Kubernetes' own labels, else from the dockershim name, else the cgroup."""
    uid = tags.get("io.kubernetes.pod.uid") or tags.get("io.kubernetes.cri.sandbox-uid")
    if uid or tags.get("io.kubernetes.pod.name"):
        return Pod(
            uid=uid,
            name=tags.get("io.kubernetes.pod.name") or tags.get("io.kubernetes.cri.sandbox-name"),
            namespace=tags.get("io.kubernetes.pod.namespace")
            or tags.get("io.kubernetes.cri.sandbox-namespace"),
            container=tags.get("io.kubernetes.container.name")
            or tags.get("io.kubernetes.cri.container-name"),
        )
    named = _DOCKERSHIM.match(name) if name else None
    if named is not None:
        return Pod(
            uid=named["uid"],
            name=named["pod"],
            namespace=named["namespace"],
            container=named["container"],
        )
    placed = _POD_DIRECTORY.search(cgroup_parent) if cgroup_parent else None
    return Pod(uid=placed["uid"].replace("_", "-")) if placed else Pod()


def pod_owner(
    tags: Mapping[str, str], pod_name: str | None, annotations: Mapping[str, str] = {}
) -> str | None:
    """``Kind/name`` of the controller that made the pod, as its labels tell; a claim."""
    source = annotations.get("kubernetes.io/config.source")
    if source in {"file", "http"}:
        return f"Node/static-{source}"
    for label, kind in _JOB_LABELS:
        if tags.get(label):
            return f"{kind}/{tags[label]}"
    if not pod_name:
        return None
    if "statefulset.kubernetes.io/pod-name" in tags:
        return f"StatefulSet/{_ORDINAL.sub('', pod_name)}"
    if "pod-template-hash" in tags:
        return f"ReplicaSet/{_REPLICA_SUFFIX.sub('', pod_name)}"
    if "controller-revision-hash" in tags and "pod-template-generation" in tags:
        return f"DaemonSet/{_REPLICA_SUFFIX.sub('', pod_name)}"
    return None


def image_and_digest(reference: str | None, identity: str | None) -> tuple[str | None, str | None]:
    """(name, digest): the repository's digest if the reference holds one, else the image's id."""
    name: str | None = reference
    digest: str | None = None
    for candidate in (reference, identity):
        if candidate and "sha256:" in candidate:
            digest = candidate[candidate.rindex("sha256:") :][:71]
            break
    if name and (name.startswith("sha256:") or re.fullmatch(r"[0-9a-f]{64}", name)):
        digest = digest or f"sha256:{name}"
        name = None
    elif name and "@sha256:" in name:
        name = name.partition("@")[0]
    if digest is None and identity and re.fullmatch(r"[0-9a-f]{64}", identity):
        digest = f"sha256:{identity}"
    return name or None, digest
