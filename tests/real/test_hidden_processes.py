"""Processes that hide on the real machine, and a machine on which they come and go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import HiddenProcess, Process
from gpuwarden.sensors import hidden
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from tests.support.failing_host import failing
from tests.support.idle import SLEEP, Idlers
from tests.support.process_sensors import look
from tests.support.stand_in import StandInHost

pytestmark = pytest.mark.real

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make nodes and users")


# -------------------------------------------------------------------- who hides


def test_nobody_hides_on_a_machine_without_a_rootkit(idle: Idlers) -> None:
    # Threads answer kill as processes do: they must not be taken for hidden ones.
    idle.python(
        """
        import threading, time
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        print("ready")
        """
    )
    facts = list(hidden.read(Host(), Seen(deep=True)))
    assert [fact for fact in facts if isinstance(fact, HiddenProcess)] == []


def test_a_preloaded_library_that_hides_a_process_is_seen_through(
    idle: Idlers, folder: Path
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    pid = idle.binary(SLEEP)
    source = folder / "hide.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <dirent.h>
        #include <dlfcn.h>
        #include <string.h>
        #include <stdlib.h>
        #define HOOK(NAME, TYPE) struct TYPE *NAME(DIR *d) { \\
            struct TYPE *(*next)(DIR *) = dlsym(RTLD_NEXT, #NAME); \\
            struct TYPE *e; \\
            while ((e = next(d)) && !strcmp(e->d_name, getenv("HIDE"))); \\
            return e; }
        HOOK(readdir, dirent)
        HOOK(readdir64, dirent64)
        """
    )
    library = folder / "hide.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    code = (
        "import os\n"
        "from gpuwarden.host import Host\n"
        "from gpuwarden.sensors import hidden\n"
        "from gpuwarden.sensors.process import stat_lines\n"
        "from gpuwarden.sensors.seen import Seen\n"
        "host = Host()\n"
        f"assert {pid} not in host.pids()\n"
        f"assert {pid} in stat_lines.read(host)\n"
        "print([(f.pid, f.seen_by) for f in hidden.read(host, Seen())])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": str(library), "HIDE": str(pid)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"[({pid}, ('kernel listing', 'kill', 'lookup'))]\n", done.stderr


@as_root
def test_a_mount_over_a_process_is_seen(idle: Idlers, folder: Path) -> None:
    pid = idle.binary(SLEEP)
    code = (
        "import subprocess\n"
        f"subprocess.run(['mount', '--bind', {str(folder)!r}, '/proc/{pid}'], check=True)\n"
        "from gpuwarden.host import Host\n"
        "from gpuwarden.sensors import hidden\n"
        "from gpuwarden.sensors.seen import Seen\n"
        "print([(f.pid, f.seen_by) for f in hidden.read(Host(), Seen())])\n"
    )
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"[({pid}, ('mount',))]\n", done.stderr


# -------------------------------------------------------------------- a machine in motion


def test_five_thousand_processes_that_come_and_go(idle: Idlers, folder: Path) -> None:
    bystander = idle.binary(SLEEP)
    # Each forks until it is told to stop, and says when it has done its half of 5,000.
    code = """
    import os, sys
    print("ready", flush=True)
    stop, enough = sys.argv[1:]
    count = 0
    while not os.path.exists(stop):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        count += 1
        if count == 2500:
            open(enough, "w").close()
    """
    stop, enough = folder / "stop", [folder / "first", folder / "second"]
    forking = [idle.python(code, str(stop), str(path))[0] for path in enough]
    host = StandInHost(numbers={(250, 250): (195, 99)})
    rounds = 0
    try:
        while rounds < 3 or not all(path.exists() for path in enough):
            assert "Z" not in {stat_lines.read_line(Host(), pid).state for pid in forking}
            facts = look(host)
            rounds += 1
            told = {fact.pid: fact for fact in facts if isinstance(fact, Process)}
            assert bystander in told
            assert not [fact for fact in facts if isinstance(fact, HiddenProcess)]
    finally:
        stop.touch()


def test_every_single_look_at_a_process_may_fail(idle: Idlers) -> None:
    victim, bystander = idle.binary(SLEEP), idle.binary(SLEEP)
    pids = [victim, bystander]

    def fresh() -> Host:
        return StandInHost(numbers={(250, 250): (195, 99)})

    whole = [f for f in look(fresh(), pids) if isinstance(f, Process)]
    assert len(whole) == 2
    errors: list[Exception] = [Unavailable("gone: not there"), Denied("kept: permission denied")]
    host, count = failing(fresh(), errors[0], -1, under=f"/proc/{victim}/")
    look(host, pids)
    assert count() > 15
    for error in errors:
        for at in range(count()):
            facts = look(failing(fresh(), error, at, under=f"/proc/{victim}/")[0], pids)
            kept = [f for f in facts if isinstance(f, Process) and f.pid == bystander]
            assert [_still(f) for f in kept] == [_still(whole[1])], at


def _still(process: Process) -> tuple[object, ...]:
    return (process.pid, process.argv, process.exe, process.namespaces, process.cwd)
