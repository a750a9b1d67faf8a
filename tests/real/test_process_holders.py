"""Who holds device nodes on the real machine, by what way, and whom it talks to."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from gpuwarden.host import FileMapping, FileStatus
from gpuwarden.model import Connection, Holder
from gpuwarden.sensors import holders, sockets
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from tests.support.idle import Idlers, wait_for
from tests.support.process_sensors import held, node, process
from tests.support.stand_in import StandInHost

pytestmark = pytest.mark.real

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make nodes and users")


# -------------------------------------------------------------------- who holds a node


@as_root
def test_holders_are_known_by_number_whatever_the_node_is_called(
    idle: Idlers, folder: Path
) -> None:
    plain, renamed = node(folder / "nvidia0"), node(folder / "null")
    host = StandInHost(nodes={str(plain): (195, 0), str(renamed): (195, 1)})
    code = "import os, sys\nfor path in sys.argv[1:]: os.open(path, os.O_RDWR)\nprint('ready')"
    first, _ = idle.python(code, str(plain), str(plain))
    second, _ = idle.python(code, str(renamed))
    bystander, _ = idle.python(code, "/dev/null")
    renamed.unlink()
    _, found, _ = held(host, {first, second, bystander})
    assert set(found) == {first, second}
    assert [(h.major, h.minor, h.path, len(h.descriptors)) for h in found[first]] == [
        (195, 0, str(plain), 2)
    ]
    assert [(h.minor, h.path, h.renamed, h.kind) for h in found[second]] == [
        (1, f"{renamed} (deleted)", True, "nvidia-gpu")
    ]


@as_root
def test_descriptors_that_were_inherited_or_passed_are_held_too(idle: Idlers, folder: Path) -> None:
    path = node(folder / "nvidia0")
    code = """
    import array, os, socket, sys
    node = os.open(sys.argv[1], os.O_RDWR)
    ours, theirs = socket.socketpair()
    heir = os.fork()
    if heir == 0:
        os.closerange(node + 1, 64)
    else:
        receiver = os.fork()
        if receiver == 0:
            os.close(node)
            ours.close()
            theirs.recvmsg(1, 64)
        else:
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [node]))])
            os.close(node)
            print(heir, receiver)
    """
    giver, words = idle.python(code, str(path), start_new_session=True)
    heir, receiver = map(int, words)
    try:
        host = StandInHost(nodes={str(path): (195, 0)})

        def both() -> dict[int, list[Holder]] | None:
            found = held(host, {giver, heir, receiver})[1]
            return found if len(found) == 2 else None

        assert set(wait_for(both, "both hold the node")) == {heir, receiver}
    finally:
        os.killpg(giver, signal.SIGKILL)


class MappedFileAsNode(StandInHost):
    """Takes one regular file for a node, since no node here can be mapped without its driver."""

    mapped_file = ""
    by_text = False

    def link_target_status(self, path: str) -> FileStatus:
        status = super().link_target_status(path)
        real = os.stat(self.mapped_file)
        if status.is_regular and status.inode == real.st_ino:
            return FileStatus(0o20666, 0, 0, status.inode, 0, 1, status.device, (195, 0))
        return status

    def shared_mappings(self, pid: int) -> list[FileMapping] | None:
        return None if self.by_text else super().shared_mappings(pid)


@as_root
@pytest.mark.parametrize("by_text", [False, True], ids=["by query", "by text"])
def test_a_mapping_is_a_holding_when_the_descriptor_is_closed(
    idle: Idlers, folder: Path, by_text: bool
) -> None:
    path = folder / "mapped"
    path.write_bytes(bytes(4096))
    code = """
    import mmap, sys
    with open(sys.argv[1], "r+b") as file:
        kept = mmap.mmap(file.fileno(), 4096)
    print("ready")
    """
    pid, _ = idle.python(code, str(path))
    other, _ = idle.python("print('ready')")
    host = MappedFileAsNode(numbers={(250, 250): (195, 99)})
    host.mapped_file, host.by_text = str(path), by_text
    _, found, _ = held(host, {pid, other})
    assert set(found) == {pid}
    assert [(h.mapped, h.path) for h in found[pid]] == [(True, str(path))]


@as_root
def test_one_who_is_nobody_learns_why_it_sees_little(idle: Idlers, folder: Path) -> None:
    path = node(folder / "nvidia0")
    code = "import os, sys\nos.open(sys.argv[1], os.O_RDWR)\nprint('ready')"
    pid, _ = idle.python(code, str(path))
    nobody = 65534
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        lines = ["failed"]
        try:
            os.setgroups([])
            os.setgid(nobody)
            os.setuid(nobody)
            host = StandInHost(nodes={str(path): (195, 0)})
            found = process(pid, host)
            _, _, gaps = held(host, {pid})
            lines = [f"{key}: {found.unread.get(key)}" for key in ("exe", "cwd", "environment")]
            lines += [f"{gap.what}|{gap.count > 0}|{bool(gap.remedy)}" for gap in gaps]
        finally:
            os.write(writer, "\n".join(lines).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(told) >= 4, told
    assert all("permission denied" in line for line in told[:3]), told
    assert told[3] == "open descriptors of other users' processes|True|True"


# -------------------------------------------------------------------- whom it talks to


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")]
)
def test_a_listener_its_client_and_the_peer_between_them(
    idle: Idlers, family: socket.AddressFamily, address: str
) -> None:
    serve = """
    import socket
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    """
    connect = """
    import socket, sys
    client = socket.socket(int(sys.argv[1]))
    client.connect((sys.argv[2], int(sys.argv[3])))
    print(client.getsockname()[1])
    """
    proxy, words = idle.python(serve)
    port = int(words[0])
    worker, words = idle.python(connect, str(int(family)), address, str(port))
    local = int(words[0])
    host = StandInHost(numbers={(250, 250): (195, 99)})

    def connections() -> list[Connection] | None:
        seen = Seen(table=stat_lines.read(host))
        list(holders.read(host, seen))
        found = sockets.read(host, seen, [worker, proxy])
        told = [fact for fact in found if isinstance(fact, Connection)]
        return told if len(told) == 3 else None

    told = wait_for(connections, "the connection is accepted")
    by_key = {(c.pid, c.state, c.local_port): c for c in told}
    outgoing = by_key[worker, "ESTABLISHED", local]
    assert (outgoing.remote_address, outgoing.remote_port) == ("127.0.0.1", port)
    assert outgoing.peer_pid == proxy
    assert by_key[proxy, "LISTEN", port].remote_address is None
    assert by_key[proxy, "ESTABLISHED", port].peer_pid == worker
