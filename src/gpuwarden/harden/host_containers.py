"""What lets a container have GPUs that nobody gave it: the container toolkit, CDI, the engines.

Sources: NVIDIA Container Toolkit's documentation of config.toml, the Container Device Interface's
specification, dockerd(8), containerd's configuration.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec

from gpuwarden.errors import GpuwardenError, Malformed, Unavailable
from gpuwarden.harden.access import changers, who
from gpuwarden.harden.host_devices import GROUPS, parse_groups
from gpuwarden.harden.setting import TEXT_LIMIT_BYTES, About, Setting, State
from gpuwarden.host import Host

TOOLKIT = "/etc/nvidia-container-runtime/config.toml"
_TOOLKIT_PROGRAMS = (
    "/usr/bin/nvidia-container-runtime",
    "/usr/bin/nvidia-container-runtime-hook",
    "/usr/bin/nvidia-container-toolkit",
    "/usr/local/nvidia/toolkit/nvidia-container-runtime",
)
CDI_DIRECTORIES = ("/etc/cdi", "/run/cdi")
DOCKER = "/etc/docker/daemon.json"
CONTAINERD = "/etc/containerd/config.toml"
_SOCKETS = ("/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock")
_SPECS_LIMIT = 256
_DEPTH_LIMIT = 32
_ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
_SET = "nvidia-ctk config --in-place --set"

ENVVAR = About(
    "toolkit-envvar",
    "whether a container without privileges can ask for GPUs by its environment",
    "NVIDIA_VISIBLE_DEVICES=all, in a pod's or an image's own environment, is given every GPU of "
    "the node, without a scheduler ever knowing.",
    commands=(f"{_SET} {_ENVVAR}=false",),
    may_break="containers that are started with NVIDIA_VISIBLE_DEVICES alone (use --gpus, CDI or a "
    "device plugin with volume-mounts), and a device plugin with the strategy envvar",
)
VOLUME_MOUNTS = About(
    "toolkit-volume-mounts",
    "whether a container can ask for GPUs by a mount",
    "A mount below /var/run/nvidia-container-devices asks for GPUs. Only who may mount host paths "
    "can make it, so it is safe where admission refuses hostPath to tenants, and not elsewhere.",
)
LDCONFIG = About(
    "toolkit-ldconfig",
    "whose ldconfig the toolkit runs in a new container",
    "Without the leading @ it runs the image's own program, with the toolkit's rights.",
    commands=(f"{_SET} nvidia-container-cli.ldconfig=@/sbin/ldconfig",),
    may_break="nothing that is known; on Debian and Ubuntu the path is @/sbin/ldconfig.real",
)
LDCONFIG_ALLOWED = About(
    "toolkit-container-ldconfig",
    "whether the toolkit may run a container's own ldconfig",
    "The feature takes back the check that keeps an image's program from running there.",
    commands=(f"{_SET} features.allow-ldconfig-from-container=false",),
    may_break="images that need their own ldconfig",
)
WRITERS = About(
    "toolkit-files",
    "who can change what the container engines read as root",
    "Whoever can change these files decides which devices, mounts and hooks a container gets.",
    may_break="tools that write there without being root",
)
DEFAULT_RUNTIME = About(
    "default-runtime",
    "whether every container runs under NVIDIA's runtime",
    "Images built on CUDA's carry NVIDIA_VISIBLE_DEVICES=all: with that runtime as the default "
    "each of them has every GPU, asked for or not.",
    may_break="containers that rely on it: they have to name the runtime, or a runtime class",
)
ENGINE_SOCKETS = About(
    "engine-sockets",
    "who can ask the container engine for anything",
    "Who may write the socket can start a privileged container, which has every GPU and is root.",
    commands=("gpasswd --delete USER docker   # for each who need not be root here",),
    may_break="starting containers for those users; a rootless engine serves them",
)


def read(host: Host) -> Iterator[Setting]:
    """The container side of a host, one setting after the other."""
    yield from toolkit(host)
    yield from specs(host)
    yield from default_runtime(host)
    yield from sockets(host)


# ------------------------------------------------------------------ the toolkit


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML file. Errors: Malformed, whatever is in it."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise Malformed(f"not TOML: {str(error)[:120]}") from error


def toolkit(host: Host) -> Iterator[Setting]:
    """config.toml, or the toolkit's defaults where it is installed without one."""
    try:
        settings = parse_toml(host.read_text(TOOLKIT, TEXT_LIMIT_BYTES))
    except Unavailable:
        if not any(_is_there(host, path) for path in _TOOLKIT_PROGRAMS):
            for about in (ENVVAR, VOLUME_MOUNTS, LDCONFIG):
                yield about.said("absent", "the toolkit is not installed here", TOOLKIT)
            return
        settings = {}
    except GpuwardenError as error:
        for about in (ENVVAR, VOLUME_MOUNTS, LDCONFIG):
            yield about.said("unknown", str(error), TOOLKIT)
        return
    else:
        yield _writers(host, TOOLKIT)
    yield _boolean(ENVVAR, settings, _ENVVAR, default=True)
    mounts = settings.get(_MOUNTS, False)
    yield VOLUME_MOUNTS.said(
        "sound" if isinstance(mounts, bool) else "unknown", f"{_MOUNTS} = {_shown(mounts)}", TOOLKIT
    )
    cli = settings.get("nvidia-container-cli", {})
    ldconfig = cli.get("ldconfig", "@/sbin/ldconfig") if isinstance(cli, dict) else None
    known = isinstance(ldconfig, str)
    state: State = "unknown" if not known else "sound" if str(ldconfig).startswith("@") else "open"
    yield LDCONFIG.said(state, f"ldconfig = {_shown(ldconfig)}", TOOLKIT)
    features = settings.get("features", {})
    if isinstance(features, dict) and "allow-ldconfig-from-container" in features:
        yield _boolean(LDCONFIG_ALLOWED, features, "allow-ldconfig-from-container", default=False)


def _boolean(about: About, settings: dict[str, Any], key: str, *, default: bool) -> Setting:
    value = settings.get(key, default)
    said = "" if key in settings else " (not set: the default)"
    if not isinstance(value, bool):
        return about.said("unknown", f"{key} = {_shown(value)}, which is neither", TOOLKIT)
    return about.said("open" if value else "sound", f"{key} = {_shown(value)}{said}", TOOLKIT)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)[:80]


def _is_there(host: Host, path: str) -> bool:
    try:
        host.status(path)
    except Unavailable:
        return False
    except GpuwardenError:
        return True
    return True


def _writers(host: Host, path: str) -> Setting:
    try:
        others = changers(host, path)
    except GpuwardenError as error:
        return WRITERS.said("unknown", str(error), path)
    if not others:
        return WRITERS.said("sound", "root alone", path)
    # The path is a file's name on that host: it is quoted like any other.
    from shlex import quote

    commands = (f"chown root:root {quote(path)}", f"chmod go-w {quote(path)}")
    return WRITERS.said("open", ", ".join(others), path, commands=commands)


# ------------------------------------------------------------------ CDI, engines


def specs(host: Host) -> Iterator[Setting]:
    """The directories of CDI specifications and what is in them, by who can write."""
    for folder in CDI_DIRECTORIES:
        try:
            names = sorted(host.names(folder))
        except Unavailable:
            continue
        except GpuwardenError as error:
            yield WRITERS.said("unknown", str(error), folder)
            continue
        yield _writers(host, folder)
        for name in names[:_SPECS_LIMIT]:
            if name.endswith((".yaml", ".json")):
                setting = _writers(host, os.path.join(folder, name))
                if setting.state != "sound":
                    yield setting
        if len(names) > _SPECS_LIMIT:
            now = f"{len(names)} files: the first {_SPECS_LIMIT} were looked at"
            yield WRITERS.said("unknown", now, folder)


def default_runtime(host: Host) -> Iterator[Setting]:
    """Docker's and containerd's default runtime."""
    new, docker = f"{DOCKER}.new", "systemctl restart docker"
    undocker = f"jq 'del(.\"default-runtime\")' {DOCKER} > {new} && mv {new} {DOCKER}"
    setting = DEFAULT_RUNTIME.of_file(host, DOCKER, _docker, absent=("absent", "no daemon.json"))
    if setting.state == "open":
        setting = DEFAULT_RUNTIME.said("open", setting.now, DOCKER, commands=(undocker, docker))
    yield setting
    setting = DEFAULT_RUNTIME.of_file(
        host, CONTAINERD, _containerd, absent=("absent", "no config.toml")
    )
    if setting.state == "open":
        command = "nvidia-ctk runtime configure --runtime=containerd --set-as-default=false"
        commands = (command, "systemctl restart containerd")
        setting = DEFAULT_RUNTIME.said("open", setting.now, CONTAINERD, commands=commands)
    yield setting


def _docker(text: str) -> tuple[State, str]:
    try:
        settings = msgspec.json.decode(text.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Malformed(f"{DOCKER}: not JSON: {str(error)[:120]}") from error
    if not isinstance(settings, dict):
        raise Malformed(f"{DOCKER}: not an object")
    return _runtime(settings.get("default-runtime"))


def _runtime(name: object) -> tuple[State, str]:
    if name is None:
        return "sound", "no default runtime is named"
    if not isinstance(name, str):
        return "unknown", f"default runtime {_shown(name)}"
    return ("open" if "nvidia" in name.lower() else "sound"), f"default runtime {_shown(name)}"


def _containerd(text: str) -> tuple[State, str]:
    names: list[object] = []
    pending: list[tuple[object, int]] = [(parse_toml(text), 0)]
    while pending:
        table, depth = pending.pop()
        if isinstance(table, dict) and depth < _DEPTH_LIMIT:
            if "default_runtime_name" in table:
                names.append(table["default_runtime_name"])
            pending += [(value, depth + 1) for value in table.values()]
    answers = [_runtime(name) for name in names] or [_runtime(None)]
    return next((one for one in answers if one[0] != "sound"), answers[0])


def sockets(host: Host) -> Iterator[Setting]:
    """Who can talk to an engine: by the socket's mode, and the members of its group."""
    for path in _SOCKETS:
        try:
            status = host.status(path)
        except Unavailable:
            continue
        except GpuwardenError as error:
            yield ENGINE_SOCKETS.said("unknown", str(error), path)
            continue
        others = who(status, write=True)
        grouped = [one for one in others if one.startswith("group ")]
        if others and others == tuple(grouped):
            yield _members(host, path, status.gid)
        else:
            state: State = "open" if others else "sound"
            yield ENGINE_SOCKETS.said(state, ", ".join(others) or "root alone", path)


def _members(host: Host, path: str, gid: int) -> Setting:
    try:
        known = parse_groups(host.read_text(GROUPS, 4 << 20))
    except GpuwardenError as error:
        return ENGINE_SOCKETS.said("unknown", f"group {gid}: {error}", path)
    name, members = next(
        ((name, found[1]) for name, found in known.items() if found[0] == gid), ("?", [])
    )
    listed = ", ".join(members[:8]) or "nobody"
    more = f" and {len(members) - 8} more" if len(members) > 8 else ""
    state: State = "open" if members else "sound"
    return ENGINE_SOCKETS.said(state, f"group {name} ({gid}): {listed}{more}", path)
