"""Device events as JSON lines: all of an event, what is not known as null with its reason."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.model import DeviceOpen, Process
from gpuwarden.outputs.event_lines import EVENT_SCHEMA, EVENT_VERSION, event_line
from gpuwarden.watch.identity import of_kernel
from tests.support.nodes import container_id
from tests.support.open_watching import BOOT_TIME_NS, container
from tests.support.opening import contained, identity

AT_NS = 1_767_225_600_000_000_007


def device_open(**fields: Any) -> DeviceOpen:
    """One open of /dev/nvidia0 that worked."""
    values: dict[str, Any] = {
        "pid": 200,
        "start_time_ticks": 900,
        "major": 195,
        "minor": 0,
        "kind": "nvidia-gpu",
        "how": "open",
        "state": "opened",
        "first_ns": AT_NS,
        "last_ns": AT_NS,
        "path": "/dev/nvidia0",
        "renamed": False,
    }
    return DeviceOpen(**{**values, **fields})


def line(event: DeviceOpen, process: Process, *rest: Any) -> dict[str, Any]:
    parent, inside = (*rest, None, None)[:2]
    data = event_line(event, process, parent, inside, node="node1", at_ns=AT_NS)
    assert b"\n" not in data
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


def test_an_event_says_who_with_what_where_and_how_it_ended() -> None:
    process = of_kernel(contained(ppid=40, loginuid=1000, tty="pts0"), BOOT_TIME_NS)
    parent = of_kernel(identity(40, exe_path="/usr/bin/bash", comm="bash"), BOOT_TIME_NS)
    event = device_open(
        container_state="known",
        how="open",
        state="denied",
        error=13,
        denial="denied",
        open_flags=2,
        reads=True,
        writes=True,
        io_uring=True,
        count=3,
        unread={"return": "lost"},
    )
    told = line(event, process, parent, container(image_digest="sha256:1", labels={"team": "x"}))
    assert (told["schema"], told["version"]) == (EVENT_SCHEMA, EVENT_VERSION)
    assert (told["time"], told["at_ns"]) == ("2026-01-01T00:00:00.000000007Z", AT_NS)
    assert told["node"] == "node1"
    assert told["device"] == {
        "major": 195,
        "minor": 0,
        "kind": "nvidia-gpu",
        "path": "/dev/nvidia0",
        "path_is_claimed": True,
        "renamed": False,
    }
    how = ("how", "state", "error", "denial", "flags", "reads", "writes", "io_uring", "count")
    assert [told[key] for key in how] == ["open", "denied", 13, "denied", 2, True, True, True, 3]
    who = told["process"]
    assert (who["pid"], who["comm"], who["uid"]) == (200, "python3", 1000)
    assert (who["exe"], who["exe_device"], who["exe_inode"]) == ("/usr/bin/python3.11", "8:1", 77)
    assert who["argv"] == ["python3", "serve.py"]
    assert (who["loginuid"], who["tty"]) == (1000, "pts0")
    assert who["namespaces"]["mnt"] == process.namespaces["mnt"]
    assert who["cgroup"] == [f"/system.slice/docker-{container_id('c1')}.scope"]
    assert told["parent"] == {"pid": 40, "comm": "bash", "exe": "/usr/bin/bash"}
    inside = told["container"]
    assert (inside["state"], inside["id"], inside["name"]) == ("known", container_id("c1"), "c1")
    assert (inside["image_digest"], inside["labels"]) == ("sha256:1", {"team": "x"})
    assert told["unread"]["return"] == "lost"
    assert "cwd" in told["unread"]  # what the kernel does not tell of one that has ended


def test_a_pod_is_named_as_such() -> None:
    inside = container(pod_name="p", pod_namespace="ns", pod_uid="u", pod_labels={"app": "a"})
    told = line(device_open(), of_kernel(contained(), BOOT_TIME_NS), None, inside)["container"]
    names = [told[key] for key in ("pod", "namespace", "pod_uid", "pod_labels")]
    assert names == ["p", "ns", "u", {"app": "a"}]


def test_a_container_that_nobody_told_of_keeps_the_id_that_its_group_names() -> None:
    process = of_kernel(contained(), BOOT_TIME_NS)
    told = line(device_open(container_state="unknown"), process)
    assert told["container"] == {"state": "unknown", "id": container_id("c1")}


def test_what_is_not_known_is_null_never_empty() -> None:
    bare = Process(pid=200, start_time_ticks=900, ppid=0, comm="x", unread={"exe": "it had ended"})
    told = line(device_open(path=None, renamed=None), bare)
    assert told["device"]["path"] is None
    assert told["device"]["renamed"] is None
    for key in ("exe", "exe_inode", "exe_deleted", "argv", "uid", "loginuid", "tty", "cgroup"):
        assert told["process"][key] is None, key
    assert told["unread"]["exe"] == "it had ended"
    assert told["parent"] == {"pid": 0, "comm": None, "exe": None}
    assert told["container"] == {"state": "none", "id": None}


HOSTILE = st.text(max_size=40)


@given(HOSTILE, st.lists(HOSTILE, max_size=3), st.none() | HOSTILE, st.none() | HOSTILE)
def test_one_line_of_json_whatever_a_process_calls_itself(
    comm: str, argv: list[str], path: str | None, exe: str | None
) -> None:
    process = of_kernel(contained(comm=comm, argv=tuple(argv), exe_path=exe), BOOT_TIME_NS)
    told = line(device_open(path=path), process)
    assert told["process"]["comm"] == comm
    assert told["process"]["argv"] == argv
    assert told["device"]["path"] == path
