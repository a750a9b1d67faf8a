"""The node as it is now, what is judged of it, and by which policy: three members of an archive."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from gpuwarden import snapshot as recordings
from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.masks import (
    mask_arguments,
    mask_json,
    mask_policy,
    mask_sink,
    mask_text,
    mask_variable,
)
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.finding import Report
from gpuwarden.host import Host
from gpuwarden.judge import judge
from gpuwarden.model import Container, PersistenceEntry, Process, Snapshot
from gpuwarden.outputs.words import escape
from gpuwarden.policy import Policy
from gpuwarden.policy_file import POLICY_LIMIT_BYTES

RELEASE = "/etc/os-release"
RELEASE_LIMIT_BYTES = 64 << 10
NAME_LIMIT = 200


def mask_snapshot(snapshot: Snapshot) -> Snapshot:
    """A snapshot whose arguments, environments and autostarts are masked; it judges as before."""
    return replace(
        snapshot,
        processes=tuple(map(_process, snapshot.processes)),
        containers=tuple(map(mask_container, snapshot.containers)),
        persistence=tuple(map(mask_autostart, snapshot.persistence)),
    )


def _process(process: Process) -> Process:
    return replace(
        process,
        argv=None if process.argv is None else mask_arguments(process.argv),
        environment=_environment(process.environment),
    )


def _environment(variables: dict[str, str]) -> dict[str, str]:
    return {name: mask_variable(name, value) for name, value in variables.items()}


def mask_container(container: Container) -> Container:
    """A container whose entry point, labels and environment are masked."""
    return replace(
        container,
        entrypoint=mask_arguments(container.entrypoint),
        labels=mask_json(container.labels, mask_text),
        pod_labels=mask_json(container.pod_labels, mask_text),
        environment=_environment(container.environment),
    )


def mask_autostart(entry: PersistenceEntry) -> PersistenceEntry:
    """An autostart whose text and commands are masked."""
    return replace(
        entry, text=mask_text(entry.text), commands=tuple(map(mask_text, entry.commands))
    )


def collect(
    shelf: Shelf, host: Host, snapshot: Snapshot, policy: Policy, policy_path: str | None
) -> Report:
    """``snapshot.json.gz``, which `gpuwarden scan` replays, ``report.json`` and the policy.

    ``snapshot`` is masked already. The report is what it comes to.
    """
    report = judge(snapshot, policy, policy_path)
    with shelf.trying("snapshot"):
        shelf.writer.add(
            recordings.IN_ARCHIVE, recordings.encode(snapshot), what="the node, for gpuwarden scan"
        )
    document = mask_json(msgspec.to_builtins(report), mask_text)
    shelf.put_json("report.json", document, "what is judged of the node now")
    _policy(shelf, policy, policy_path)
    with shelf.trying(RELEASE):
        data = host.read_bytes(RELEASE, RELEASE_LIMIT_BYTES)
        shelf.put_text("os-release", data, RELEASE, RELEASE_LIMIT_BYTES)
    return report


def _policy(shelf: Shelf, policy: Policy, path: str | None) -> None:
    sinks = [mask_sink(one) for one in policy.sinks]
    in_force = msgspec.to_builtins(replace(policy, sinks=sinks))
    shelf.put_json("policy.json", in_force, "the policy in force, with its defaults")
    if path is None:
        return
    try:
        data = Host().read_bytes(path, POLICY_LIMIT_BYTES)
    except GpuwardenError as error:
        shelf.unread(f"policy file {path}", str(error))
        return
    text = mask_policy(data.decode("utf-8", "backslashreplace"))
    shelf.put("policy.yaml", text.encode(), f"policy file {path}, secrets in sinks masked")


def system_name(host: Host) -> str | None:
    """PRETTY_NAME of os-release; None if that cannot be told."""
    try:
        text = host.read_text(RELEASE, RELEASE_LIMIT_BYTES)
    except GpuwardenError:
        return None
    for line in text.split("\n"):
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return escape(value.strip().strip("\"'"))[:NAME_LIMIT]
    return None
