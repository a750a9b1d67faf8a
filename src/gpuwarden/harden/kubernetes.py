"""`gpuwarden harden kubernetes`: admission and egress policies, and who would be refused today.

Everything is printed, nothing is applied. What is printed without ``-o`` is one stream of YAML that
kubectl takes; all words in it are comments.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from gpuwarden.cluster import Cluster
from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.harden import kubernetes_admission, kubernetes_egress, kubernetes_words
from gpuwarden.harden.kubernetes_peers import Peers
from gpuwarden.harden.kubernetes_pods import Judged, Today, judge, read_cluster, read_file
from gpuwarden.harden.kubernetes_rules import RuleSet, rule_set
from gpuwarden.harden.kubernetes_yaml import comment, stream
from gpuwarden.inputs import node_of
from gpuwarden.model import Snapshot
from gpuwarden.outputs.told import BLIND, CLEAR, FINDING, Call, Told
from gpuwarden.outputs.words import escape
from gpuwarden.policy import Policy
from gpuwarden.snapshot import open_recording

ADMISSION, EGRESS, TODAY, UNSEEN = "admission.yaml", "egress.yaml", "today.txt", "unseen.txt"
_MODE: Final = 0o644


class Seen(Struct):
    """What was looked at, and what could not be."""

    today: Today | None = None
    judged: Judged | None = None
    not_looked: str = ""
    trouble: list[str] = []


def run(call: Call) -> Told:
    """The policies and the report; exit code 1 when a pod of today would be refused.

    Errors: UsageError, and what a scan raises.
    """
    arguments = call.arguments
    rules = rule_set(arguments.gpu_resource, arguments.runtime_class)
    seen = _look(arguments, call.policy, rules, call.tell)
    exempt = call.policy.namespaces.exempt
    admission = kubernetes_admission.objects(rules, exempt=exempt, audit=arguments.audit)
    egress_words, egress = _egress(arguments, call.policy, call.policy_path, seen, call.tell)
    words = {
        ADMISSION: [*kubernetes_words.first(audit=arguments.audit, exempt=exempt)],
        EGRESS: egress_words,
        TODAY: [*kubernetes_words.today(seen.judged, seen.today, seen.not_looked)],
        UNSEEN: [*kubernetes_words.unseen()],
    }
    objects = {ADMISSION: admission, EGRESS: egress}
    code = CLEAR
    if seen.trouble:
        code = BLIND
    if seen.judged is not None and seen.judged.refused:
        code = FINDING
    complaint = "".join(escape(line) + "\n" for line in seen.trouble)
    if arguments.output is None:
        text = "".join(
            comment(lines) + stream(objects.get(name, ())) for name, lines in words.items()
        )
        return Told(text, code, complaint)
    _write(arguments.output, words, objects)
    text = "".join(f"{os.path.join(arguments.output, name)}\n" for name in words)
    text += "".join(escape(line) + "\n" for line in words[TODAY])
    return Told(text, code, complaint)


def _look(
    arguments: argparse.Namespace, policy: Policy, rules: RuleSet, tell: Callable[[str], None]
) -> Seen:
    seen = Seen(trouble=[])
    if arguments.pods is not None:
        seen.today = read_file(arguments.pods)
    elif arguments.cluster:
        tell("asking the API server for pods and services")
        try:
            seen.today = read_cluster(Cluster())
        except GpuwardenError as error:
            remedy = f" ({error.remedy})" if error.remedy else ""
            seen.not_looked = f"{error}{remedy}"
            seen.trouble.append(f"today's pods were not seen: {seen.not_looked}")
    else:
        seen.not_looked = "not asked for: --cluster, or --pods FILE"
    if seen.today is not None:
        seen.judged = judge(seen.today.pods, rules, policy.namespaces.exempt)
    return seen


def _egress(
    arguments: argparse.Namespace,
    policy: Policy,
    policy_path: str | None,
    seen: Seen,
    tell: Callable[[str], None],
) -> tuple[list[str], list[dict[str, Any]]]:
    """(words, NetworkPolicies)."""
    if not policy.namespaces.gpu:
        return [*kubernetes_words.no_gpu_namespaces()], []
    snapshots = list(_snapshots(arguments, policy, tell))
    today = seen.today or Today("")
    learned = kubernetes_egress.learn(
        snapshots, policy, policy_path, Peers(today.pods, today.services)
    )
    lines = [*kubernetes_words.before_egress([one.taken_at_ns for one in snapshots])]
    found = []
    for one in learned.values():
        lines += kubernetes_egress.words(one)
        made = kubernetes_egress.network_policy(one)
        if made is not None:
            found.append(made)
    return lines, found


def _snapshots(
    arguments: argparse.Namespace, policy: Policy, tell: Callable[[str], None]
) -> Iterator[Snapshot]:
    if arguments.recordings is None:
        tell("looking at this node for the egress of its expected processes")
        yield node_of(arguments, policy)
        return
    for path in arguments.recordings:
        try:
            yield open_recording(path)
        except GpuwardenError as error:
            raise UsageError(f"--from {path}: {error}", remedy=error.remedy) from error


def _write(
    directory: str,
    words: Mapping[str, Sequence[str]],
    objects: Mapping[str, Sequence[dict[str, Any]]],
) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        for name, lines in words.items():
            _write_file(os.path.join(directory, name), _content(name, lines, objects.get(name, ())))
    except OSError as error:
        raise UsageError(f"-o {directory}: {error.strerror or error}") from error


def _content(name: str, lines: Iterable[str], objects: Sequence[dict[str, Any]]) -> str:
    if name.endswith(".yaml"):
        return comment(lines) + stream(objects)
    return "".join(escape(line) + "\n" for line in lines)


def _write_file(path: str, text: str) -> None:
    # Not through a link: the directory may be one that others can write to.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, _MODE), "w", encoding="utf-8", errors="backslashreplace") as f:
        f.write(text)
