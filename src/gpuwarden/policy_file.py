"""The policy file: YAML in, a Policy or one error that names its place out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import yaml

from gpuwarden.errors import UsageError
from gpuwarden.pattern import pattern
from gpuwarden.policy import (
    CONTAINER_CONDITIONS,
    NARROWING_CONDITIONS,
    STARTER,
    Capture,
    EnforceRule,
    Evidence,
    JitRules,
    KnownGpuWorkload,
    Match,
    Namespaces,
    Policy,
    PolicyException,
    PolicyProfile,
    PolicyWorkload,
    Thresholds,
    parse_peer,
    set_conditions,
)

POLICY_LIMIT_BYTES = 1 << 20
NODE_LIMIT = 50_000
DEPTH_LIMIT = 40

Place = tuple[int, int]

# What PyYAML lets through for values that do not fit their tag, such as ``!!int ""``.
CONSTRUCTION_ERRORS = (ValueError, OverflowError, LookupError, AttributeError, TypeError)


def _scalar(node: yaml.ScalarNode) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    finally:
        loader.dispose()


class _Builder:
    """Turns composed YAML nodes into plain values and remembers each value's line and column."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[str, Place] = {}
        self.count = 0

    def error(self, node: yaml.Node, message: str) -> UsageError:
        mark = node.start_mark
        return UsageError(f"{self.file}:{mark.line + 1}:{mark.column + 1}: {message}")

    def build(self, node: yaml.Node, path: str, depth: int) -> Any:
        self.count += 1
        if self.count > NODE_LIMIT or depth > DEPTH_LIMIT:
            raise self.error(node, "the policy is too large or nested too deeply")
        self.places[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    raise self.error(key_node, "expected a plain word as the key")
                key = str(key_node.value)
                if key in result:
                    raise self.error(key_node, f"the key '{key}' stands here twice")
                self.places[f"{path}.{key}#key"] = (
                    key_node.start_mark.line + 1,
                    key_node.start_mark.column + 1,
                )
                result[key] = self.build(value_node, f"{path}.{key}", depth + 1)
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self.build(n, f"{path}[{i}]", depth + 1) for i, n in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            try:
                value = _scalar(node)
            except (yaml.YAMLError, *CONSTRUCTION_ERRORS) as error:
                reason = (str(error).splitlines() or [""])[0]
                raise self.error(node, f"cannot be read as {node.tag}: {reason}") from error
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise self.error(node, "expected a number of at most 64 bits")
            return value
        raise self.error(node, "unexpected YAML construct")


_AT = pattern(r" - at `(?:key in )?`?(?P<path>\$[^`]*)`")
_UNKNOWN_FIELD = pattern(r"unknown field `(?P<field>[^`]*)`")


def _place_of(places: dict[str, Place], path: str) -> Place:
    while path not in places and path not in ("$", ""):
        cut = max(path.rfind("."), path.rfind("["))
        path = path[:cut] if cut > 0 else "$"
    return places.get(path, (1, 1))


def _fields_of(path: str) -> str:
    kinds: tuple[tuple[str, type[msgspec.Struct]], ...] = (
        (r"\$", Policy),
        (r"\$\.workloads\[[^\]]*\]", PolicyWorkload),
        (r"\$\.profiles\[[^\]]*\]", PolicyProfile),
        (r"\$\.profiles\[[^\]]*\]\.jit", JitRules),
        (r"\$\.exceptions\[[^\]]*\]", PolicyException),
        (r"\$\.user_known_gpu_workloads\[[^\]]*\]", KnownGpuWorkload),
        (r"\$\.enforce\[[^\]]*\]", EnforceRule),
        (r"\$\.thresholds", Thresholds),
        (r"\$\.capture", Capture),
        (r"\$\.evidence", Evidence),
        (r"\$\.namespaces", Namespaces),
        (
            r"\$\.(?:workloads|exceptions|user_known_gpu_workloads|enforce)\[[^\]]*\]\.match",
            Match,
        ),
    )
    for shape, kind in kinds:
        if re.fullmatch(shape, path):
            return ", ".join(kind.__struct_encode_fields__)
    return ""


def _explain(error: msgspec.ValidationError, file: str, places: dict[str, Place]) -> UsageError:
    text = str(error)
    at = _AT.search(text)
    path = at["path"] if at else "$"
    message = text[: at.start()] if at else text
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        key = f"{path}.{unknown['field']}#key"
        line, column = places.get(key) or _place_of(places, path)
        known = _fields_of(path)
        message = f"unknown key '{unknown['field']}'" + (
            f"; expected one of: {known}" if known else ""
        )
    else:
        # msgspec counts list elements as [...] without the number in some messages.
        line, column = _place_of(places, path)
        message = message.replace("Object missing required field", "missing key").replace("`", "'")
        message = message[0].lower() + message[1:]
    return UsageError(f"{file}:{line}:{column}: {message} (at {path.removeprefix('$.') or 'top'})")


def _check_containers(policy: Policy) -> Iterator[tuple[str, str]]:
    """Mistakes of the keys that name containers, as path and message."""
    container = ", ".join(CONTAINER_CONDITIONS)
    kinds: tuple[tuple[str, Sequence[KnownGpuWorkload | EnforceRule], tuple[str, ...]], ...] = (
        ("user_known_gpu_workloads", policy.user_known_gpu_workloads, NARROWING_CONDITIONS),
        ("enforce", policy.enforce, ()),
    )
    for key, entries, narrowing in kinds:
        for i, entry in enumerate(entries):
            path = f"$.{key}[{i}]"
            names = [name for name, _ in set_conditions(entry.match)]
            if not entry.reason.strip():
                yield f"{path}.reason", "expected a reason that is not empty"
            for name in names:
                if name not in (*CONTAINER_CONDITIONS, *narrowing):
                    allowed = ", ".join((*CONTAINER_CONDITIONS, *narrowing))
                    yield (
                        f"{path}.match.{name}#key",
                        f"'{name}' says nothing of a container; expected one of: {allowed}",
                    )
            if not any(name in CONTAINER_CONDITIONS for name in names):
                yield (
                    f"{path}.match",
                    f"expected at least one condition of a container: {container}",
                )
    for i, sink in enumerate(policy.sinks):
        if not sink.strip():
            yield f"$.sinks[{i}]", "expected a sink, such as syslog: or webhook:URL"


_NAMESPACE = pattern(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _check_responses(policy: Policy) -> Iterator[tuple[str, str]]:
    """Mistakes of the keys about evidence, hardening and signing, as path and message."""
    if not _is_path(policy.evidence.directory):
        yield "$.evidence.directory", "expected the absolute path of a directory"
    if policy.signing_key is not None and not _is_path(policy.signing_key):
        yield "$.signing_key", "expected the absolute path of a private key"
    for key in ("exempt", "gpu"):
        for i, name in enumerate(getattr(policy.namespaces, key)):
            if not _NAMESPACE.fullmatch(name):
                yield f"$.namespaces.{key}[{i}]", "expected the name of a namespace"
    for i, name in enumerate(policy.namespaces.gpu):
        if name in policy.namespaces.exempt:
            yield f"$.namespaces.gpu[{i}]", f"'{name[:63]}' is exempt as well"


def _is_path(text: str) -> bool:
    return text.startswith("/") and "\0" not in text


def _check_profiles(policy: Policy) -> Iterator[tuple[str, str]]:
    """Mistakes of profiles and of the workloads that name them, as path and message."""
    names: set[str] = set()
    for i, profile in enumerate(policy.profiles):
        path = f"$.profiles[{i}]"
        if not profile.name.strip():
            yield f"{path}.name", "expected a name that is not empty"
        if profile.name in names:
            yield f"{path}.name", f"a profile called '{profile.name}' stands above already"
        names.add(profile.name)
        if not profile.baselines:
            yield f"{path}.baselines", "expected at least one baseline: nothing would be known"
        for j, baseline in enumerate(profile.baselines):
            if baseline != STARTER and (not baseline.startswith("/") or "\0" in baseline):
                yield (
                    f"{path}.baselines[{j}]",
                    f"expected the absolute path of a baseline file, or the word {STARTER}",
                )
        if profile.launches is not None and not profile.launches.startswith("/"):
            yield f"{path}.launches", "expected the absolute path of a launch profile"
    for i, workload in enumerate(policy.workloads):
        if workload.profile is not None and workload.profile not in names:
            known = f"expected one of: {', '.join(sorted(names))}" if names else "there are none"
            yield (
                f"$.workloads[{i}].profile",
                f"no profile is called '{workload.profile}'; {known}",
            )


def _check(policy: Policy, file: str, places: dict[str, Place], rules: frozenset[str]) -> None:
    def fail(path: str, message: str) -> UsageError:
        line, column = _place_of(places, path)
        shown = path.removeprefix("$.").removesuffix("#key")
        return UsageError(f"{file}:{line}:{column}: {message} (at {shown})")

    names: set[str] = set()
    for i, workload in enumerate(policy.workloads):
        path = f"$.workloads[{i}]"
        if not workload.name.strip():
            raise fail(f"{path}.name", "expected a name that is not empty")
        if workload.name in names:
            raise fail(f"{path}.name", f"a workload called '{workload.name}' stands above already")
        names.add(workload.name)
        if workload.match.is_empty:
            raise fail(
                f"{path}.match", "expected at least one condition: an empty match fits everything"
            )
        for j, peer in enumerate(workload.egress or ()):
            try:
                parse_peer(peer)
            except ValueError as error:
                raise fail(
                    f"{path}.egress[{j}]",
                    "expected an address, address:port or network/prefix; names are never "
                    f"resolved ({str(error)[:120]})",
                ) from error
    for i, exception in enumerate(policy.exceptions):
        path = f"$.exceptions[{i}]"
        if not exception.reason.strip():
            raise fail(f"{path}.reason", "expected the reason for this exception")
        if rules and exception.rule not in rules:
            raise fail(
                f"{path}.rule",
                f"no rule is called '{exception.rule}'; expected one of: "
                + ", ".join(sorted(rules)),
            )
        if exception.match.is_empty and exception.path is None and exception.gpu is None:
            raise fail(
                path, "expected a narrow match, a path or a gpu: this would silence the rule"
            )
    checks = (_check_containers, _check_profiles, _check_responses)
    for path, message in (mistake for check in checks for mistake in check(policy)):
        raise fail(path, message)


def parse_policy(data: bytes, file: str, rules: frozenset[str] = frozenset()) -> Policy:
    """The policy in ``data``; ``rules`` are the ids that exceptions may name.

    Errors: UsageError ``FILE:LINE:COLUMN: what is wrong and what was expected`` for any bytes.
    """
    if len(data) > POLICY_LIMIT_BYTES:
        raise UsageError(f"{file}: larger than {POLICY_LIMIT_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{file}:{line}:1: not UTF-8 text") from error
    builder = _Builder(file)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        value = None if root is None else builder.build(root, "$", 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        raise UsageError(f"{file}:{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{file}:1:1: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UsageError(f"{file}:1:1: nested too deeply") from error
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise UsageError(f"{file}:1:1: expected keys such as 'workloads:' at the top")
    try:
        policy = msgspec.convert(value, Policy)
    except msgspec.ValidationError as error:
        raise _explain(error, file, builder.places) from error
    _check(policy, file, builder.places, rules)
    return policy
