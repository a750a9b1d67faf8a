"""Ingress: the session, service or image that a process's ancestry leads to, told as facts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from gpuwarden.finding import Evidence
from gpuwarden.model import LOGINUID_UNSET, Process
from gpuwarden.node import Node
from gpuwarden.pattern import pattern
from gpuwarden.rules.masquerade import basename

CHAIN_SHOWN = 8
SOURCE = "ancestry"

# What a process high in the ancestry is, by its real binary's name.
ORIGINS = (
    (pattern(r"sshd(?:-session|-auth)?"), "an ssh login"),
    (pattern(r"login|agetty|getty"), "a console login"),
    (pattern(r"crond?|atd|anacron"), "a cron or at job"),
    (pattern(r"slurmstepd|slurmd"), "a Slurm job step"),
    (pattern(r"jupyter.*|ipykernel.*"), "a notebook server"),
    (
        pattern(r"nginx|apache2|httpd|caddy|php-fpm[\d.]*|gunicorn|uvicorn|node|java"),
        "a web service",
    ),
    (pattern(r"supervisord"), "supervisord"),
    (pattern(r"screen|SCREEN|tmux(?:: server)?"), "a detached terminal session"),
    (pattern(r"redis-server|mysqld|postgres|mongod"), "a database server"),
    (pattern(r"raylet|gcs_server"), "a Ray cluster"),
)  # fmt: skip
WEB_PROGRAMS = pattern(
    r"(?:^|/)(?:jupyter\S*|ipykernel_launcher|comfyui\S*|ComfyUI/main\.py|webui\.py|launch\.py"
    r"|gradio\S*|streamlit|text-generation-launcher|mlflow|airflow|code-server|rstudio-server)"
    r"(?:$|\.py$)"
)


def _name(process: Process) -> str:
    return basename(process.exe.path) if process.exe is not None else process.comm


@lru_cache(maxsize=1024)
def _origin_of_name(name: str, comm: str) -> str | None:
    for names, origin in ORIGINS:
        if names.fullmatch(name) or names.fullmatch(comm):
            return origin
    return None


def _origin(process: Process) -> str | None:
    origin = _origin_of_name(_name(process), process.comm)
    if origin is not None:
        return origin
    for word in (process.argv or ())[:6]:
        if WEB_PROGRAMS.search(word):
            return f"a web application ({basename(word)})"
    return None


def observe(node: Node, process: Process) -> Iterator[Evidence]:
    """Facts about how a process came to be here; none of them is a sign by itself."""
    chain = list(node.ancestors(process.pid))
    for ancestor in (process, *chain):
        origin = _origin(ancestor)
        if origin is None:
            continue
        who = "itself" if ancestor is process else f"pid {ancestor.pid} ({_name(ancestor)})"
        tty = f" on {ancestor.tty}" if ancestor.tty else ""
        user = f" of {ancestor.login_user or ancestor.user}" if "login" in origin else ""
        yield Evidence(source=SOURCE, text=f"came through {origin}{user}{tty}: {who}")
        break
    client = process.environment.get("SSH_CONNECTION", "").split()
    if client:
        yield Evidence(
            source="environment", text=f"its environment names an ssh client at {client[0]}"
        )
    if process.ppid == 1 and process.cgroup is not None and process.cgroup.unit != "init.scope":
        unit = process.cgroup.unit
        if unit is None or process.cgroup.slurm_job is not None or process.cgroup.session:
            yield Evidence(source=SOURCE, text="its starter is gone: it was handed over to pid 1")
    if chain and len(chain) > 1:
        names = " ← ".join(f"{_name(a)} {a.pid}" for a in chain[:CHAIN_SHOWN])
        yield Evidence(source=SOURCE, text=f"started by {names}")
    login = process.loginuid
    if login not in (None, LOGINUID_UNSET) and process.uid is not None and login != process.uid:
        yield Evidence(
            source="/proc/<pid>/loginuid",
            text=f"logged in as {process.login_user or login}, "
            f"runs as {process.user or process.uid}",
        )
