"""Masquerade: a process that says one thing and is another, or hides where its binary lives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from gpuwarden.finding import Evidence
from gpuwarden.model import Executable, Process
from gpuwarden.node import Node
from gpuwarden.pattern import pattern

TEMP_DIRECTORIES = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/shm/", "/dev/mqueue/")
SYSTEM_DIRECTORIES = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/opt/", "/snap/", "/nix/")
HIDING_PLACES = ("/etc/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/usr/", "/boot/", "/dev/")
"""Where packages put programs, and never under a hidden directory."""
PADDING_BLANKS = 8

# Dot directories in which interpreters and tools of honest users live.
HOME_DOT_DIRECTORIES = frozenset(
    ".local .venv .virtualenvs .conda .condax .cache .pyenv .rye .rustup .cargo .nvm .npm .deno "
    ".bun .volta .asdf .sdkman .julia .juliaup .vscode .vscode-server .cursor .cursor-server "
    ".windsurf-server .jetbrains .mamba .micromamba .miniconda .miniconda3 .anaconda3 "
    ".mambaforge .miniforge3 .singularity .apptainer .docker .pixi .poetry .pipx .uv .tox .nox "
    ".ollama .lmstudio .steam .var .wine .gradle .m2 .go .dotnet .bazel .build .linuxbrew "
    ".theia .config .nix-profile .guix-profile .spack .triton .nv .keras .env .jupyter "
    ".platformio .espressif .fly .nuget .vs-kubernetes .mozilla .snapshots .git".split()
)
SECRET_DOT_DIRECTORIES = frozenset({".ssh", ".gnupg", ".aws", ".kube", ".X11-unix", ".ICE-unix"})

# Daemons and kernel threads whose names malware borrows; a real one runs from a system directory.
SYSTEM_NAMES = (
    "sshd",
    "systemd",
    "systemd-journald",
    "systemd-logind",
    "systemd-udevd",
    "systemd-networkd",
    "systemd-resolved",
    "cron",
    "crond",
    "dbus-daemon",
    "rsyslogd",
    "agetty",
    "httpd",
    "apache2",
    "nginx",
    "mysqld",
    "udevd",
    "init",
    "polkitd",
    "containerd",
    "dockerd",
    "kubelet",
    "chronyd",
    "ntpd",
    "auditd",
    "snapd",
    "irqbalance",
    "Xorg",
    "nvidia-persistenced",
    "nvidia-smi",
)
KERNEL_THREAD_NAME = pattern(
    r"\[?(?:kworker|ksoftirqd|kthreadd|kdevtmpfs|kswapd|khugepaged|ksmd|kcompactd|kauditd|kblockd"
    r"|kintegrityd|rcu_\w+|oom_reaper|kthrotld|jbd2|scsi_eh)"
    r"(?:[/:_\[\]\d].*|i|s|x)?\]?"
)
# A program that never computes on a GPU itself; as a *client* it was overwritten or injected.
NEVER_GPU_CLIENTS = frozenset(
    "sh bash dash ash zsh ksh fish busybox su sudo pwd ls cat cp mv rm echo sleep true false env "
    "cron crond sshd login agetty systemd init dbus-daemon rsyslogd id ps top kill grep sed awk "
    "mawk gawk find xargs tail head mkdir chmod chown date uname hostname mount "
    "nvidia-smi nvidia-persistenced nvidia-modprobe nvidia-powerd nv-fabricmanager "
    "nvidia-fabricmanager nvidia-gridd nvidia-topologyd".split()
)
CLAIMED_FAMILIES = (
    ("python", pattern(r"python[\d.]*(?:-dbg)?|pypy[\d.]*|conda|ipython\d*|uv")),
    ("sshd", pattern(r"sshd(?:-session|-auth)?")),
    ("nginx", pattern(r"nginx|openresty|angie")),
    ("apache2", pattern(r"apache2|httpd")),
    ("httpd", pattern(r"apache2|httpd")),
    ("java", pattern(r"java|jre")),
    ("node", pattern(r"node(?:js)?|bun|deno")),
    ("systemd", pattern(r"systemd.*|\(sd-.*|init")),
    ("dockerd", pattern(r"dockerd")),
    ("containerd", pattern(r"containerd.*")),
    ("mysqld", pattern(r"mysqld|mariadbd")),
    ("postgres", pattern(r"postgres|postmaster")),
)


def basename(path: str) -> str:
    """The last part of a path, blanks around it removed."""
    return path.strip().rsplit("/", 1)[-1].strip()


def _is_root_owned_system_file(exe: Executable) -> bool:
    return (
        exe.path.startswith(SYSTEM_DIRECTORIES)
        and exe.owner_uid == 0
        and (exe.mode is None or not exe.mode & 0o022)
    )


def _edit_distance_is_one(a: str, b: str) -> bool:
    if a == b or abs(len(a) - len(b)) > 1:
        return False
    if len(a) > len(b):
        a, b = b, a
    i = 0
    while i < len(a) and a[i] == b[i]:
        i += 1
    return a[i + (len(a) == len(b)) :] == b[i + 1 :]


@lru_cache(maxsize=1024)
def look_alike_of(name: str) -> str | None:
    """The system name that ``name`` imitates: one edit away, or that name with a suffix."""
    lowered = name.lower()
    for system_name in SYSTEM_NAMES:
        known = system_name.lower()
        if lowered == known:
            continue
        if len(known) >= 4 and _edit_distance_is_one(lowered, known):
            return system_name
        if known in (
            "sshd",
            "systemd",
            "crond",
            "httpd",
            "dbus-daemon",
            "kubelet",
        ) and re.fullmatch(
            re.escape(known) + r"[-_.](?:update\w*|upgrade\w*|service|helper|worker|d|bin|\d+|x)",
            lowered,
        ):
            return system_name
    return None


def _place(exe: Executable) -> Iterator[Evidence]:
    source = "/proc/<pid>/exe"
    folders = exe.path.split("/")[1:-1]
    name = basename(exe.path)
    if exe.memfd:
        if not exe.path.startswith("/memfd:runc"):
            yield Evidence(
                kind="masquerade",
                strength="strong",
                source=source,
                text=f"runs from memory only: its binary is {exe.path}, no file on disk",
            )
        return
    in_temp = exe.path.startswith(TEMP_DIRECTORIES)
    hidden = [f for f in folders if f.startswith(".") and f not in HOME_DOT_DIRECTORIES]
    hidden_file = name.startswith(".")
    secret = [f for f in folders if f in SECRET_DOT_DIRECTORIES]
    if exe.deleted and exe.replaced:
        yield Evidence(
            source=source,
            text=f"its binary {exe.path} was replaced on disk since it started (as upgrades do)",
        )
    elif exe.deleted:
        yield Evidence(
            kind="masquerade",
            strength="strong",
            source=source,
            text=f"its binary {exe.path} was deleted after it started",
        )
    if secret or hidden_file or (hidden and (in_temp or exe.path.startswith(HIDING_PLACES))):
        yield Evidence(
            kind="masquerade",
            strength="strong",
            source=source,
            text=f"its binary lies in a hidden place: {exe.path}",
        )
    elif hidden:
        yield Evidence(
            kind="masquerade",
            strength="weak",
            source=source,
            text=f"its binary lies under a hidden directory: {exe.path}",
        )
    if in_temp and not exe.deleted:
        yield Evidence(
            kind="masquerade",
            strength="weak",
            source=source,
            text=f"its binary lies in a temporary directory: {exe.path}",
        )
    if exe.path_is_genuine is False and not exe.deleted:
        yield Evidence(
            kind="masquerade",
            strength="strong",
            source=source,
            text=f"the file that the host has at {exe.path} is not the one that runs",
        )


def _names(process: Process, exe: Executable) -> Iterator[Evidence]:
    name = basename(exe.path)
    genuine = _is_root_owned_system_file(exe)
    for said, where in ((name, "the binary's name"), (process.comm, "comm")):
        if genuine and said == name:
            continue
        imitated = look_alike_of(said)
        if imitated and not genuine:
            yield Evidence(
                kind="masquerade",
                strength="strong",
                source=where,
                text=f"named '{said}' after {imitated}, but runs {exe.path}",
            )
            break
    first = process.argv[0].strip() if process.argv else ""
    for said, where in ((process.comm, "comm"), (name, "the binary's name"), (first, "argv[0]")):
        # A kernel thread has no binary: whoever owns this file, it is none.
        if KERNEL_THREAD_NAME.fullmatch(said):
            yield Evidence(
                kind="masquerade",
                strength="strong",
                source=where,
                text=f"named '{said}' like a kernel thread, but is a program: {exe.path}",
            )
            break
    if exe.links_python is False and re.fullmatch(r"python[\d.]*", name):
        yield Evidence(
            kind="masquerade",
            strength="strong",
            source=exe.path,
            text=f"{exe.path} is called {name} and is not a Python interpreter",
        )


def _claims(process: Process, exe: Executable) -> Iterator[Evidence]:
    if not process.argv:
        return
    first = process.argv[0]
    blanks = len(first) - len(first.rstrip())
    inner = re.search(rf"[ \t\r\n]{{{PADDING_BLANKS},}}", first)
    if blanks >= PADDING_BLANKS or inner:
        yield Evidence(
            kind="masquerade",
            strength="strong",
            source="argv[0]",
            text="pads its name with blanks, so that lists of processes cut the rest off",
        )
    said = basename(first.split()[0]) if first.split() else ""
    name = basename(exe.path)
    if not said or said == name or exe.memfd:
        return
    for family, members in CLAIMED_FAMILIES:
        if re.fullmatch(re.escape(family) + r"[\d.]*:?", said) and not members.fullmatch(name):
            # A script's interpreter is another program than the script's name says.
            if said in {basename(a) for a in process.argv[1:3]}:
                return
            yield Evidence(
                kind="masquerade",
                strength="strong",
                source="argv[0]",
                text=f"calls itself '{said}', but its binary is {exe.path}",
            )
            return


def observe(node: Node, process: Process, *, is_client: bool) -> Iterator[Evidence]:
    """Evidence of masquerade of one process; weak, strong, and explaining facts."""
    exe = process.exe
    if exe is not None:
        yield from _place(exe)
        yield from _names(process, exe)
        yield from _claims(process, exe)
        name = basename(exe.path)
        if is_client and name in NEVER_GPU_CLIENTS:
            yield Evidence(
                kind="masquerade",
                strength="strong",
                source="driver",
                text=f"{name} never computes on a GPU: {exe.path} was overwritten or taken over",
            )
    if process.cwd_deleted:
        yield Evidence(
            kind="masquerade",
            strength="weak",
            source="/proc/<pid>/cwd",
            text=f"its working directory {process.cwd or ''} was deleted",
        )
    container = node.container_of(process)
    if container is not None and container.confirmed and node.is_outside(process, container):
        yield Evidence(
            kind="masquerade",
            strength="strong",
            source="/proc/<pid>/ns/mnt",
            text=f"sits in the cgroup of container {container.name or container.id[:12]}, "
            "but in the host's namespaces",
        )
