"""Evidence of real processes: what is in an archive, and what a process can do while it is made."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuwarden.errors import Unavailable
from gpuwarden.evidence import archive, descriptors, gpu_modules, nameless_files
from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.host import Host
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.sensors.process import stat_lines
from tests.support import nvcc
from tests.support.acted_on import born_as, child_of, wait_for_words
from tests.support.code_holder import holding
from tests.support.containers import busybox_root, no_new_cgroups, podman
from tests.support.evidence import LIMIT_BYTES, Collected, collected, python
from tests.support.nodes import NodeBuilder
from tests.support.packages import require, require_root

pytestmark = pytest.mark.real

SECRET = "q7Gk2LmZ0vRt9XwB4nEh"
WAIT = "\nprint('ready', flush=True)\nsys.stdin.readline()\n"
FILES = """
import os, sys
memory = os.memfd_create("held\\n\\x1b[31m")
os.write(memory, b"only in memory")
sparse = os.memfd_create("sparse")
os.truncate(sparse, 1 << 30)
gone = open(sys.argv[1] + "/gone", "w+b")
gone.write(b"deleted")
gone.flush()
os.unlink(sys.argv[1] + "/gone")
os.mkfifo(sys.argv[1] + "/fifo")
fifo = os.open(sys.argv[1] + "/fifo", os.O_RDWR)
os.unlink(sys.argv[1] + "/fifo")
null = os.open("/dev/null", os.O_RDWR)
"""


@pytest.fixture(autouse=True)
def as_root() -> None:
    require_root()


def nowhere(tmp_path: Path) -> str:
    return str(tmp_path / "no-state")


def of_pid(tmp_path: Path, pid: int, **options: object) -> Collected:
    wanted = Wanted(pid=pid, state=nowhere(tmp_path))
    return collected(tmp_path / "evidence.tar", wanted, **options)  # type: ignore[arg-type]


def test_a_deleted_binary_its_words_and_its_environment(tmp_path: Path) -> None:
    binary = tmp_path / "kworker"
    shutil.copy2("/bin/sleep", binary)
    content = binary.read_bytes()
    environment = {"HF_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}
    words = [f"--token={SECRET}", "1000"]
    process = subprocess.Popen(words, executable=binary, env=environment)
    try:
        wait_for_words(process.pid, words)
        binary.unlink()
        found = of_pid(tmp_path, process.pid)
        started = stat_lines.read_line(Host(), process.pid).start_time_ticks
    finally:
        process.kill()
        process.wait()
    assert found.files[f"processes/{process.pid}/exe"] == content
    subject = found.manifest.account.subject
    assert subject.exe == f"{binary} (deleted)"
    assert subject.start_time_ticks == started
    assert SECRET.encode() not in b"".join(found.files.values())
    assert found.of(process.pid, "arguments")["argv"][1] == "1000"
    variables = found.of(process.pid, "environment")["variables"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert variables["HF_TOKEN"] == f"MASKED-{len(SECRET)}"
    assert found.of(process.pid, "parents")[0]["pid"] == os.getpid()
    for name in ("maps", "status", "cgroup", "mountinfo", "auxv", "net/tcp"):
        assert found.files[f"processes/{process.pid}/{name}"], name
    assert not found.manifest.account.ended


def test_files_that_only_the_process_still_has(tmp_path: Path) -> None:
    with python("import sys" + FILES + WAIT, str(tmp_path)) as process:
        found = of_pid(tmp_path, process.pid)
    kept = {
        name: data for name, data in found.files.items() if "/files/" in name and len(data) < 100
    }
    assert {b"deleted", b"only in memory"} <= set(kept.values())
    sparse = next(one for one in found.manifest.members if "sparse" in one.what)
    assert sparse.cut and sparse.size_bytes < 1 << 20
    assert sparse.plain_size_bytes == nameless_files.FILE_LIMIT_BYTES
    told = found.of(process.pid, "descriptors")["descriptors"]
    memory = next(one for one in told if one["target"].startswith("/memfd:held"))
    assert memory["target"] == "/memfd:held\\n\\x1b[31m (deleted)" or "\\e[31m" in memory["target"]
    assert memory["notes"]["pos"] == "14"
    assert "pipe" in {one["kind"] for one in told}
    assert not any("\x1b" in one.what for one in found.manifest.members)


def test_no_pipe_and_no_device_is_opened(tmp_path: Path) -> None:
    with (
        python("import sys" + FILES + WAIT, str(tmp_path)) as process,
        OpenedProcess(Host(), process.pid) as opened,
    ):
        kinds = set()
        for name in opened.names("fd"):
            with nameless_files._handle(opened, f"fd/{name}") as handle:
                status = opened.handle_status(handle)
                assert os.readlink(f"/proc/self/fd/{handle}")
                flags = int(
                    Path(f"/proc/self/fdinfo/{handle}").read_text().split("flags:")[1].split()[0], 8
                )
                assert flags & os.O_PATH
                kinds.add(stat.S_IFMT(status.mode))
        assert {stat.S_IFIFO, stat.S_IFCHR, stat.S_IFREG} <= kinds


def test_modules_in_memory_come_whole_under_their_digests(tmp_path: Path) -> None:
    cubin, text = nvcc.cubin("gemm"), nvcc.ptx("reduction")
    with holding(f"heap:{cubin}", f"memfd:{text}") as holder:
        found = of_pid(tmp_path, holder.pid)
    told = {one["digest"]: one for one in found.json("modules/modules.json")["modules"]}
    digest = hashlib.sha256(cubin.read_bytes()).hexdigest()
    assert found.files[told[digest]["file"]] == cubin.read_bytes()
    assert told[digest]["sightings"][0]["place"]["mapping"] == "[heap]"
    kinds = {one["kind"] for one in told.values()}
    assert kinds == {"cubin", "ptx"}
    for one in told.values():
        assert hashlib.sha256(found.files[one["file"]]).hexdigest() == one["digest"]


def test_without_memory_no_module_is_looked_for(tmp_path: Path) -> None:
    with holding(f"heap:{nvcc.cubin('gemm')}") as holder:
        wanted = Wanted(pid=holder.pid, memory=False, state=nowhere(tmp_path))
        found = collected(tmp_path / "one.tar", wanted)
    assert not any(name.startswith("modules/") for name in found.files)


def test_a_container_with_its_image_and_all_its_processes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    require("podman", "runc", "busybox-static")
    reference = "localhost/training:1.2"
    with no_new_cgroups(), podman(tmp_path_factory.mktemp("podman")) as engine:
        engine.import_image(busybox_root(tmp_path / "root"), reference)
        command = ("sh", "-c", "sleep 1000 & sleep 1000")
        identity = engine.start(reference, "--env", f"API_KEY={SECRET}", command=command)
        child_of(engine.pid(identity), "sleep", "1000")
        wanted = Wanted(container=identity[:12], state=nowhere(tmp_path))
        found = collected(tmp_path / "one.tar", wanted)
        image = engine("inspect", "--format", "{{.Image}}", identity)
    folder = f"node/containers/0-{identity[:12]}"
    container = found.json(f"{folder}/container.json")
    assert container["image"] == reference
    assert container["image_digest"].removeprefix("sha256:") == image.removeprefix("sha256:")
    assert container["id"] == identity
    raw = [name for name in found.files if name.startswith(folder) and "config.json" in name]
    assert raw and b"API_KEY=MASKED-" in found.files[raw[0]]
    assert SECRET.encode() not in b"".join(found.files.values())
    subject = found.manifest.account.subject
    assert subject.container_id == identity and len(subject.pids) >= 2
    words = [found.of(pid, "arguments")["argv"] for pid in subject.pids]
    assert ["sleep", "1000"] in words


def test_what_is_killed_at_any_moment_leaves_what_was_had(tmp_path: Path) -> None:
    """Twenty moments, all over the time that it takes."""
    draw = random.Random(20)
    outcomes = []
    took = 60.0
    for number in range(21):
        with python("import sys" + WAIT) as process:
            killer = None
            if number:
                delay = f"{draw.uniform(0, took):.3f}"
                words = ["sh", "-c", f"sleep {delay}; kill -9 {process.pid}"]
                killer = subprocess.Popen(words)
            began = time.monotonic()
            try:
                wanted = Wanted(pid=process.pid, state=nowhere(tmp_path))
                found = collected(tmp_path / f"{number}.tar", wanted)
            except Unavailable:
                outcomes.append("nothing")
            else:
                outcomes.append("ended" if found.manifest.account.ended else "whole")
                assert f"processes/{process.pid}/identity.json" in found.files
                assert found.manifest.account.ended or "has ended" not in found.noted
            if outcomes[-1] == "whole":
                # Of all, since the first may have been the slowest by far.
                took = min(took, time.monotonic() - began)
            assert outcomes[0] == "whole"
            if killer is not None:
                killer.wait()
    assert "ended" in outcomes


def test_a_program_that_executes_another_in_the_middle_is_said_to(tmp_path: Path) -> None:
    program = f"import os, sys{WAIT}os.execv('/bin/sleep', ['sleep', '1000'])"
    with python(program) as process:

        def tell(line: str) -> None:
            if line.startswith("GPU modules"):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                while not os.readlink(f"/proc/{process.pid}/exe").endswith("sleep"):
                    time.sleep(0.01)

        found = of_pid(tmp_path, process.pid, tell=tell)
    (ended,) = found.manifest.account.ended
    assert "it has executed another program" in ended
    interpreter = Path(os.path.realpath(sys.executable)).read_bytes()
    assert found.files[f"processes/{process.pid}/exe"] == interpreter


def test_a_process_that_ends_before_its_memory_is_read(tmp_path: Path) -> None:
    with holding(f"heap:{nvcc.cubin('gemm')}") as holder:

        def tell(line: str) -> None:
            if line.startswith("GPU modules"):
                holder.process.kill()
                holder.process.wait()

        found = of_pid(tmp_path, holder.pid, tell=tell)
    assert "has ended" in "".join(found.manifest.account.ended)
    assert f"processes/{holder.pid}/exe" in found.files
    assert not any(name.startswith("modules/images/") for name in found.files)


def test_another_process_than_was_asked_for_is_not_looked_at(tmp_path: Path) -> None:
    started = stat_lines.read_line(Host(), os.getpid()).start_time_ticks
    for wanted in (
        Wanted(pid=os.getpid(), start_time_ticks=started + 1),
        Wanted(pid=os.getpid(), boot_id="11111111-2222-3333-4444-555555555555"),
    ):
        with pytest.raises(Unavailable, match=r"another process|anew"):
            collected(tmp_path / "one.tar", wanted)
    assert not list(tmp_path.glob("*.tar*"))


def test_of_another_process_with_the_same_number_nothing_is_kept(tmp_path: Path) -> None:
    """The number passes on while the archive is made: in the middle, and before the modules."""
    others: list[int] = []
    with python("import sys" + WAIT, env={"WHO": "the first"}) as process:

        def tell(line: str) -> None:
            if line.startswith("GPU modules"):
                process.kill()
                process.wait()
                others.append(born_as(process.pid, ["sleep", "1000"]))

        try:
            found = of_pid(tmp_path, process.pid, tell=tell)
        finally:
            for pid in others:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    assert others == [process.pid]
    (ended,) = found.manifest.account.ended
    assert "it has ended, and another process has its number" in ended
    assert found.of(process.pid, "environment")["variables"]["WHO"] == "the first"
    assert found.of(process.pid, "arguments")["argv"][1] == "-c"
    assert "modules/modules.json" not in found.files


def test_modules_of_another_process_with_the_same_number_are_not_kept(tmp_path: Path) -> None:
    """It passed on after the last look and before the memory was opened."""
    path = tmp_path / "one.tar"
    with (
        holding(f"heap:{nvcc.cubin('gemm')}") as holder,
        ArchiveWriter(str(path), limit_bytes=LIMIT_BYTES) as writer,
    ):
        started = stat_lines.read_line(Host(), holder.pid).start_time_ticks
        node = Node(NodeBuilder().snapshot())
        of_itself = gpu_modules.collect(
            Shelf(writer, "itself", ""), Host(), [(holder.pid, started)], Policy(), node
        )
        of_another = gpu_modules.collect(
            Shelf(writer, "another", ""), Host(), [(holder.pid, started - 1)], Policy(), node
        )
        names = [member.name for member in writer.members]
    assert of_itself and any(name.startswith("itself/images/") for name in names)
    assert not of_another and not any(name.startswith("another/images/") for name in names)


def test_of_too_many_descriptors_the_telling_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "TOLD_LIMIT", 20)
    program = (
        "import os, sys\nkept = [open('/etc/hostname') for _ in range(500)]\n"
        "last = os.memfd_create('last')\nos.write(last, b'hidden behind')" + WAIT
    )
    with python(program) as process:
        found = of_pid(tmp_path, process.pid)
    document = found.of(process.pid, "descriptors")
    assert document["count"] > 500 and len(document["descriptors"]) == 20
    assert any("memfd:last" in one["target"] for one in document["descriptors"])
    assert b"hidden behind" in found.files.values()
    assert "descriptors: only 20 are told" in found.noted


def test_an_archive_without_room_names_what_it_lacks(tmp_path: Path) -> None:
    program = (
        "import os, sys\nlarge = os.memfd_create('large')\n"
        "os.write(large, os.urandom(4 << 20))" + WAIT
    )
    with python(program) as process:
        found = of_pid(tmp_path, process.pid, limit_bytes=1 << 20)
    (large,) = (one for one in found.manifest.members if "memfd:large" in one.what)
    assert "only the first" in large.cut and large.size_bytes < 1 << 20
    assert "node/report.json" in found.files
    assert os.stat(found.path).st_size <= 1 << 20


def test_a_deadline_ends_the_search_and_the_archive_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(archive, "_now", lambda: now)

    def tell(line: str) -> None:
        nonlocal now
        if line.startswith("GPU modules"):
            now = 60.0

    with holding(f"heap:{nvcc.cubin('gemm')}", f"sparse:{1 << 30}") as holder:
        found = of_pid(tmp_path, holder.pid, deadline_seconds=60.0, tell=tell)
    assert f"processes/{holder.pid}/identity.json" in found.files
    assert "no time" in found.noted
    assert found.manifest.account.subject.pid == holder.pid


def test_maps_that_change_while_they_are_read_do_no_harm(tmp_path: Path) -> None:
    program = """
import mmap, sys, threading
def churn():
    while True:
        kept = [mmap.mmap(-1, 4096 * (i % 7 + 1)) for i in range(300)]
        for one in kept:
            one.close()
threading.Thread(target=churn, daemon=True).start()
"""
    with python(program + WAIT) as process:
        found = of_pid(tmp_path, process.pid)
    assert found.json("modules/modules.json")["processes"][0]["pid"] == process.pid
    assert not found.manifest.account.ended


def test_the_snapshot_in_it_replays(tmp_path: Path) -> None:
    with python("import sys" + WAIT) as process:
        found = of_pid(tmp_path, process.pid)
    path = tmp_path / "snapshot.json.gz"
    path.write_bytes(found.files["snapshot.json.gz"])
    for recording in (path, found.path):
        words = [sys.executable, "-m", "gpuwarden", "scan", str(recording), "--format", "json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1, 2), done.stderr
        assert '"schema": "gpuwarden.report"' in done.stdout


def test_a_stopped_process_stays_stopped_and_is_read(tmp_path: Path) -> None:
    with python("import sys" + WAIT) as process:
        os.kill(process.pid, signal.SIGSTOP)
        while stat_lines.read_line(Host(), process.pid).state != "T":
            time.sleep(0.01)
        found = of_pid(tmp_path, process.pid)
        assert stat_lines.read_line(Host(), process.pid).state == "T"
    assert found.of(process.pid, "identity")["state"] == "T"
