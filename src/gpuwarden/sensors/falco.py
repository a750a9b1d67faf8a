"""Falco's events: its JSON as http_output posts it, its lines of text, and its own losses.

Everything in an event is a claim: of whoever sent it, and in a line of text also of the process
that it quotes. A pid is joined with /proc by the caller, never here. Names are not resolved, and an
event accuses nobody. Formats: falco.org, "Alert formatting" and "Supported fields";
falcosecurity/falco userspace/falco/event_drops.cpp for what Falco says of its losses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

from msgspec.structs import replace

from gpuwarden.errors import Malformed
from gpuwarden.model import Fact
from gpuwarden.pattern import pattern
from gpuwarden.sensors.falco_fields import TEXT_LIMIT, Fields, pairs, whole_number
from gpuwarden.sensors.runtimes.fields import decode, instant_ns, pod_of

BODY_LIMIT_BYTES: Final = 1 << 20
EVENTS_LIMIT: Final = 1024
"""Events in one body."""
LINE_LIMIT: Final = 64 << 10
MESSAGE_LIMIT: Final = 2048
_TAGS_LIMIT: Final = 32
_HOSTNAME_LIMIT: Final = 253

GPU_RULE: Final = "Container Accessing GPU Device"
"""Falco's own rule for accelerators; it only matches opens that succeeded."""
_SYSCALL_DROP: Final = "Falco internal: syscall event drop"
_METRICS: Final = "Falco internal: metrics snapshot"
_INTERNAL: Final = "Falco internal: "

Priority = Literal[
    "Emergency", "Alert", "Critical", "Error", "Warning", "Notice", "Informational", "Debug"
]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
_PRIORITIES: Mapping[str, Priority] = {
    **{priority.lower(): priority for priority in PRIORITIES},
    "info": "Informational",
}
_SYSCALL_SOURCES: Final = frozenset({"syscall", "syscalls"})

_CLOCK = r"\d\d:\d\d:\d\d\.\d{9}"
_LINE = pattern(
    rf"(?:^|\s)(?P<time>{_CLOCK}|\d{{4}}-\d\d-\d\dT{_CLOCK}(?:Z|[+-]\d\d:?\d\d)):"
    r" (?P<priority>[A-Za-z]{4,13}) (?P<message>\S.*)",
    re.ASCII,
)
_HEAD_LIMIT: Final = 512
"""Where in a line the time must stand: syslog and container logs put things before it."""
_ZONE = pattern(r"([+-]\d\d)(\d\d)\Z", re.ASCII)
_DROPPED = pattern(r"(\d{1,20}) system calls dropped", re.ASCII)
_CONTAINER_ID = pattern(r"[0-9a-f]{12,64}")
ID_LENGTH: Final = 12
"""How much of a container's id Falco tells."""


class FalcoProcess(Fact, frozen=True, kw_only=True):
    """What Falco says of the process an event is about: claims until /proc confirms them.

    The GPU rule of Falco's catalogue tells no pid unless falco.yaml asks for it. ``container_id``
    is the first 12 hex digits of the full one.
    """

    pid: int | None = None
    tid: int | None = None
    ppid: int | None = None
    parent_comm: str | None = None
    comm: str | None = None
    exe_path: str | None = None
    """In the process's own mount namespace."""
    command_line: str | None = None
    """argv joined by blanks, so that its words cannot be told apart."""
    user: str | None = None
    uid: int | None = None
    loginuid: int | None = None
    """-1 when nobody logged in."""
    tty: int | None = None
    """Its device number; None without a reason for no terminal."""
    container_id: str | None = None
    on_host: bool | None = None
    """Falco says that it is in no container, which it also says of some that are."""


class FalcoEvent(Fact, frozen=True, kw_only=True):
    """One event of Falco's, bounded; reasons for what is missing stand in ``unread``."""

    at_ns: int | None = None
    """Unix nanoseconds, as Falco says."""
    rule: str | None = None
    """None for a line of text, which does not name it."""
    priority: Priority | None = None
    source: str | None = None
    hostname: str | None = None
    tags: tuple[str, ...] = ()
    message: str = ""
    from_text: bool = False
    """Read from words in a row: what a process calls itself can forge every field."""
    process: FalcoProcess | None = None
    """None for events that are about none: of the Kubernetes audit log, of plugins, of Falco."""
    container_name: str | None = None
    image: str | None = None
    image_tag: str | None = None
    image_digest: str | None = None
    pod_name: str | None = None
    pod_namespace: str | None = None
    pod_uid: str | None = None
    event_type: str | None = None
    file: str | None = None
    """``fd.name``: a path, or the two ends of a connection."""
    descriptor: int | None = None
    """``fd.num``; negative when the call failed."""
    result: str | None = None
    """``evt.res``: SUCCESS or the name of an errno."""
    unread: dict[str, str] = {}


class FalcoDrop(Fact, frozen=True, kw_only=True):
    """Falco says that it was blind: system calls that it never saw, alerts that it never sent."""

    at_ns: int | None = None
    drops: int | None = None
    """System calls lost since its last word about them; None when it does not say how many."""
    of: int | None = None
    """System calls in all, the lost ones included."""
    alerts_dropped: int | None = None
    """Alerts that its own output queue lost since it began."""
    hostname: str | None = None


class Body(NamedTuple):
    """What one body held; each entry of ``malformed`` is a line for a person."""

    taken: list[FalcoEvent | FalcoDrop]
    malformed: list[str]


# ------------------------------------------------------------------ JSON


def parse_event(data: bytes) -> FalcoEvent | FalcoDrop:
    """One event from its JSON object. Errors: Malformed, for any bytes that are none of Falco's."""
    return _event(decode(data, "a Falco event"))


def parse_body(data: bytes, *, text: bool = False) -> Body:
    """The events of one body: an object, an array, or one a line; ``text`` for lines of text.

    Errors: Malformed when it is neither, is empty, or holds more than EVENTS_LIMIT.
    """
    if len(data) > BODY_LIMIT_BYTES:
        raise Malformed(f"{len(data)} bytes, and a body may have {BODY_LIMIT_BYTES}")
    body = Body([], [])
    values: list[object]
    lines: list[bytes] = []
    if not text:
        try:
            whole = decode(data, "the body")
        except Malformed:
            lines = [line for line in data.split(b"\n") if line.strip()]
            if len(lines) < 2:
                raise
            values = []
        else:
            values = whole if isinstance(whole, list) else [whole]
    else:
        values, lines = [], [line for line in data.split(b"\n") if line.strip()]
    if not values and not lines:
        raise Malformed("the body holds no event")
    if max(len(values), len(lines)) > EVENTS_LIMIT:
        raise Malformed(f"more than {EVENTS_LIMIT} events in one body")
    for number, one in enumerate([*values, *lines], 1):
        try:
            if not isinstance(one, bytes):
                found = _event(one)
            elif text:
                found = parse_line(one.decode("utf-8", "backslashreplace"))
            else:
                found = parse_event(one)
        except Malformed as error:
            body.malformed.append(f"event {number}: {error}")
        else:
            body.taken.append(found)
    return body


def _event(value: object) -> FalcoEvent | FalcoDrop:
    if not isinstance(value, dict):
        raise Malformed("a Falco event: not a JSON object")
    rule = value.get("rule")
    if not isinstance(rule, str) or not rule:
        raise Malformed("a Falco event: it names no rule")
    rule = rule[:TEXT_LIMIT]
    message = value.get("output")
    message = message[:MESSAGE_LIMIT] if isinstance(message, str) else ""
    given = value.get("output_fields")
    values: Mapping[str, object] = given if isinstance(given, dict) else {}
    fields = Fields(values)
    hostname = _known_text(value.get("hostname"), _HOSTNAME_LIMIT)
    at_ns = _time_ns(value, fields)
    if rule == _SYSCALL_DROP:
        return _drop(fields, message, at_ns, hostname)
    if rule == _METRICS and (lost := _lost_by_metrics(values, at_ns, hostname)):
        return lost
    if not isinstance(given, dict):
        fields.unread["output_fields"] = "the event has none"
    tags = value.get("tags")
    head = FalcoEvent(
        at_ns=at_ns,
        rule=rule,
        priority=_priority(value.get("priority"), fields),
        source=_known_text(value.get("source"), TEXT_LIMIT),
        hostname=hostname,
        tags=tuple(
            tag[:TEXT_LIMIT]
            for tag in (tags[:_TAGS_LIMIT] if isinstance(tags, list) else ())
            if isinstance(tag, str)
        ),
        message=message,
    )
    return _told(fields, head)


def _known_text(value: object, limit: int) -> str | None:
    return value[:limit] if isinstance(value, str) and value not in ("", "<NA>") else None


def _priority(value: object, fields: Fields) -> Priority | None:
    found = _PRIORITIES.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        fields.unread["priority"] = "not one of Falco's priorities"
    return found


def _time_ns(event: Mapping[str, object], fields: Fields) -> int | None:
    """From the event's own nanoseconds, else the time that Falco puts on the whole."""
    for value in (fields.value("at_ns", "evt.time", "evt.rawtime"), event.get("time")):
        number = whole_number(value)
        found = number if number is not None and number > 0 else _instant_ns(value)
        if found is not None:
            fields.unread.pop("at_ns", None)
            return found
    fields.unread["at_ns"] = "no time with a date and a zone"
    return None


def _instant_ns(value: object) -> int | None:
    return instant_ns(_ZONE.sub(r"\1:\2", value)) if isinstance(value, str) else None


# ------------------------------------------------------------------ text


def parse_line(text: str) -> FalcoEvent | FalcoDrop:
    """One line of stdout_output or file_output: text, or JSON with json_output.

    Errors: Malformed, for any line that is none of Falco's.
    """
    text = text[: LINE_LIMIT + 1].encode("utf-8", "backslashreplace").decode()
    if len(text) > LINE_LIMIT:
        raise Malformed(f"a line of over {LINE_LIMIT} characters")
    if text.lstrip()[:1] == "{":
        return parse_event(text.encode())
    found = _LINE.search(text.rstrip())
    if found is None or found.start() > _HEAD_LIMIT:
        raise Malformed("not a line of Falco's: no time, priority and message")
    message = found["message"]
    fields = Fields(pairs(message))
    at_ns = _instant_ns(found["time"])
    if at_ns is None:
        fields.unread["at_ns"] = f"{found['time']} is a time of day, without a date and a zone"
    if message.startswith(_SYSCALL_DROP):
        return _drop(fields, message, at_ns, None)
    fields.unread["rule"] = "a line of text does not name it"
    head = FalcoEvent(
        at_ns=at_ns,
        priority=_priority(found["priority"], fields),
        message=message[:MESSAGE_LIMIT],
        from_text=True,
    )
    return _told(fields, head)


# ------------------------------------------------------------------ what both tell


def _told(fields: Fields, head: FalcoEvent) -> FalcoEvent:
    """The fields by their names in JSON, and by the labels that Falco's rules print."""
    container_name = fields.text("container_name", "container.name", "container_name")
    if container_name == "host":
        container_name = None
    named = pod_of({}, name=container_name)
    pod_name = fields.text("pod_name", "k8s.pod.name", "k8s_pod_name", "k8s_pod")
    namespace = fields.text("pod_namespace", "k8s.ns.name", "k8s_ns_name", "k8s_ns")
    uid = fields.text("pod_uid", "k8s.pod.uid", "k8s_pod_uid")
    if named.name is not None and pod_name in (None, named.name):
        # Docker's name of a pod's container tells what the fields do not (yet).
        pod_name, namespace, uid = named.name, namespace or named.namespace, uid or named.uid
        for told in ("pod_name", "pod_namespace", "pod_uid"):
            fields.unread.pop(told, None)
    return replace(
        head,
        process=_process(fields) if _is_about_a_process(fields, head) else None,
        container_name=container_name,
        image=fields.text(
            "image", "container.image.repository", "container_image_repository", "container_image",
            "image",
        ),
        image_tag=fields.text("image_tag", "container.image.tag", "container_image_tag"),
        image_digest=fields.text("image_digest", "container.image.digest"),
        pod_name=pod_name,
        pod_namespace=namespace,
        pod_uid=uid,
        event_type=fields.text("event_type", "evt.type", "evt_type", "syscall"),
        file=fields.text("file", "fd.name", "device", "file", "connection"),
        descriptor=fields.number("descriptor", "fd.num"),
        result=fields.text("result", "evt.res"),
        unread=fields.unread,
    )  # fmt: skip


def _is_about_a_process(fields: Fields, head: FalcoEvent) -> bool:
    if (head.rule or "").startswith(_INTERNAL) or fields.has("ka.", "jevt."):
        return False
    return head.source is None or head.source in _SYSCALL_SOURCES


def _process(fields: Fields) -> FalcoProcess | None:
    container_id = fields.text("container_id", "container.id", "container_id", "id")
    on_host = None if container_id is None else container_id == "host"
    if on_host:
        container_id = None
    elif container_id is not None and not _CONTAINER_ID.fullmatch(container_id):
        fields.unread["container_id"] = f"{container_id[:64]!r} is not a container's id"
        container_id, on_host = None, None
    tty = fields.number("tty", "proc.tty", "terminal")
    found = FalcoProcess(
        pid=fields.pid("pid", "proc.pid", "pid"),
        tid=fields.pid("tid", "thread.tid", "tid"),
        ppid=fields.pid("ppid", "proc.ppid", "ppid"),
        parent_comm=fields.text("parent_comm", "proc.pname", "parent"),
        comm=fields.text("comm", "proc.name", "process"),
        exe_path=fields.text("exe_path", "proc.exepath", "proc_exepath"),
        command_line=fields.text("command_line", "proc.cmdline", "command"),
        user=fields.text("user", "user.name", "user"),
        uid=fields.uid("uid", "user.uid", "user_uid", "uid"),
        loginuid=fields.uid("loginuid", "user.loginuid", "user_loginuid"),
        tty=tty or None,
        container_id=None if container_id is None else container_id[:ID_LENGTH],
        on_host=on_host,
    )
    if found.uid == -1:
        fields.unread["uid"] = "user.uid is -1, which no user has"
        found = replace(found, uid=None)
    return None if found == FalcoProcess() else found


def _drop(fields: Fields, message: str, at_ns: int | None, hostname: str | None) -> FalcoDrop:
    """Of every second in which Falco lost something, it says so once."""
    drops = fields.number("drops", "n_drops")
    if drops is None and (said := _DROPPED.search(message)):
        drops = whole_number(said[1])
    of = fields.number("of", "n_evts")
    return FalcoDrop(
        at_ns=at_ns,
        drops=drops if drops is None or drops >= 0 else None,
        of=of if of is None or of >= 0 else None,
        hostname=hostname,
    )


def _lost_by_metrics(
    counters: Mapping[str, object], at_ns: int | None, hostname: str | None
) -> FalcoDrop | None:
    """What a snapshot of Falco's counters says of losses since the one before; None for none."""
    now, before, of, of_before, alerts = (
        whole_number(counters.get(name))
        for name in (
            "scap.n_drops", "scap.n_drops_prev", "scap.n_evts", "scap.n_evts_prev",
            "falco.outputs_queue_num_drops",
        )
    )  # fmt: skip
    percent = counters.get("scap.n_drops_perc")
    drops: int | None = 0
    if now is not None and before is not None:
        # They begin anew with Falco.
        drops = now - before if now >= before else max(now, 0)
    elif isinstance(percent, (int, float)):
        drops = None if percent > 0 else 0
    elif now:
        drops = None
    alerts = alerts if alerts is not None and alerts > 0 else None
    if drops == 0 and alerts is None:
        return None
    of = of - of_before if of is not None and of_before is not None and of >= of_before else None
    return FalcoDrop(at_ns=at_ns, drops=drops, of=of, alerts_dropped=alerts, hostname=hostname)
