"""Mining command lines are recognised, everyday ones are not, and nothing blows up."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.command_lines.shell_words import split_commands
from gpuwarden.command_lines.wrappers import unwrap
from gpuwarden.rules.miner_judgement import STRENGTHS
from gpuwarden.rules.miner_signs import CommandSigns, command_signs, line_signs, name_signs, plain

TESTS = Path(__file__).parent.parent
COMMANDS = TESTS / "fixtures" / "commands"
CASES = TESTS.parent.parent / "shared" / "cases"

POOL = "stratum+tcp://pool.example.com:6060"
MINING = f"./a -a kawpow -o {POOL} -u WALLET"


def rows(name: str) -> list[tuple[str, ...]]:
    lines = (COMMANDS / name).read_text(encoding="utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines if line and not line.startswith("#")]


def at_most(signs: CommandSigns, strength: str) -> bool:
    return STRENGTHS.index(signs.strength) <= [*STRENGTHS].index(strength)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["argv", "line"])
@pytest.mark.parametrize(("activity", "strength", "command"), rows("benign.txt"))
def test_everyday_command_is_no_miner(
    activity: str, strength: str, command: str, form: str
) -> None:
    signs = command_signs(shlex.split(command)) if form == "argv" else line_signs(command)
    assert at_most(signs, strength), signs
    if activity != "none":
        assert signs.activity == activity
        assert signs.strength != "none"
    elif strength == "none":
        assert signs == CommandSigns()


@pytest.mark.parametrize("form", ["argv", "line"])
@pytest.mark.parametrize(("strength", "command"), rows("mining.txt"))
def test_mining_command_is_recognised(strength: str, command: str, form: str) -> None:
    signs = command_signs(shlex.split(command)) if form == "argv" else line_signs(command)
    assert (signs.activity, signs.strength) == ("mining", strength), signs
    assert signs.reasons


def test_tables_are_as_large_as_promised() -> None:
    assert len(rows("benign.txt")) >= 150
    assert len(rows("mining.txt")) >= 80


# --- Details of a hit


def test_a_complete_line_says_what_it_saw() -> None:
    wallet = "4" + "A" * 94
    line = "graftcp ./lolMiner --algo ETCHASH --pool etc.2miners.com:1010 --pass secretsecretsecret"
    signs = command_signs([*line.split(), "--user", f"{wallet}.rig"])
    assert signs.strength == "complete"
    assert signs.miner_name == "lolminer"
    assert signs.algorithm == "etchash"
    assert signs.pools == (("etc.2miners.com", 1010),)
    assert signs.account == "4AAAAA….rig"
    assert signs.wrapped_by == ("graftcp",)
    text = " ".join(signs.reasons)
    assert "etc.2miners.com:1010 after --pool" in text
    assert "secretsecret" not in text
    assert wallet not in text


def test_pools_keep_order_and_tls_port_form() -> None:
    signs = line_signs("./m -p=auto.c3pool.org:ssl33333 -u=WALLET --url pool.example.com:1")
    assert signs.pools[0] == ("auto.c3pool.org", 33333)


def test_user_in_the_url_is_the_account() -> None:
    signs = line_signs("ethminer -P stratum1+tcp://WALLET_OF_SOMEONE.rig@pool.example.com:4444")
    assert signs.account == "WALLET….rig"
    assert signs.pools == (("pool.example.com", 4444),)


# --- Shapes of argv


@pytest.mark.parametrize(
    "argv",
    [
        ["python3 \n\n\n", "-a", "kawpow", "-o", POOL, "-u", "WALLET"],
        ["python3" + " " * 4000 + f"-a kawpow -o {POOL} -u WALLET"],
        [f"python3\n\n\n\n-a kawpow -o {POOL} -u WALLET", "", "", ""],
        ["python3", "", "", "-a", "kawpow", "-o", POOL, "-u", "WALLET"],
        ["python3", "-u", "WALLET", "-a", "kawpow", "-o", "stratum+tcp://pool.example.com:60"],
        ["/bin/sh", "-a", "ethash", "-o", POOL, "-u", "WALLET"],
        ["sh", "-c", f"cd /tmp; exec -a python3 {MINING}"],
    ],
)
def test_padded_rewritten_and_cut_arguments(argv: list[str]) -> None:
    assert command_signs(argv, comm="miner", exe="/tmp/x").strength == "complete"


def test_an_argv_cut_after_the_pool_is_still_strong() -> None:
    assert command_signs(["./a", "-o", POOL, "-u"]).strength == "strong"


def test_the_binary_and_comm_name_a_miner_under_another_argv() -> None:
    assert command_signs(["python3"], exe="/tmp/.x/xmrig").strength == "name"
    assert command_signs(["python3", "train.py"], comm="lolMiner").strength == "name"
    assert command_signs(["python3"], comm="moneroocean_min").strength == "name"
    assert command_signs(["python3", "train.py"], comm="miner").strength == "weak"
    assert command_signs([], comm="xmrig").strength == "name"
    assert command_signs([]) == CommandSigns()


def test_a_reader_is_believed_only_with_its_own_binary() -> None:
    argv = ["grep", "-o", POOL, "--user", "WALLET", "x"]
    assert command_signs(["grep", "x", "-o", POOL], exe="/usr/bin/grep").strength == "none"
    assert command_signs(argv, exe="/tmp/.cache/grepd").strength == "complete"
    assert command_signs(["vim", "x", POOL], exe="/usr/bin/vim.basic").strength == "none"


# --- Environment


@pytest.mark.parametrize(
    ("environment", "strength"),
    [
        ({"POOL_URL": "pool.example.com:3333", "POOL_USER": "WALLET"}, "strong"),
        ({"POOL_URL": POOL}, "strong"),
        ({"ARGS": f"-o {POOL}"}, "strong"),
        ({"TARGET": POOL}, "strong"),
        ({"POOL_USER": "alice"}, "none"),
        ({"POOL_URL": "postgres://u:p@db.example.com:5432/x", "POOL_USER": "app"}, "none"),
        ({"POOL_URL": "db.example.com:6432", "POOL_USER": "app"}, "none"),
        ({"DATA": "/datasets/stratum/v2", "POOL_SIZE": "10"}, "none"),
    ],
)
def test_environment(environment: dict[str, str], strength: str) -> None:
    assert command_signs(["python3", "run.py"], environment=environment).strength == strength


def test_pool_in_the_environment_and_algorithm_in_argv_are_complete() -> None:
    signs = command_signs(["./x", "-a", "kawpow"], environment={"POOL_URL": POOL})
    assert signs.strength == "complete"


# --- Lines that cron, systemd and shells run

ENCODED = base64.b64encode(MINING.encode()).decode()


@pytest.mark.parametrize(
    "line",
    [
        f"*/5 * * * * {MINING}",
        f"@reboot root {MINING} >/dev/null 2>&1",
        f"17 * * * * root cd / && nohup {MINING} &",
        f"ExecStart=-{MINING}",
        f"ExecStartPre = +{MINING}",
        f"command=/bin/bash -c '{MINING}'",
        f"A={POOL}; B=kawpow; ./x -a $B -o ${{A}} -u W_1",
        f"sh -c \"bash -c '{MINING}'\"",
        f"echo {ENCODED} | base64 -d | sh",
        f"base64 -d <<< {ENCODED} | bash",
        f'bash -c "$(echo {ENCODED} | base64 --decode)"',
        f"eval $(echo {ENCODED}|base64 -d)",
        f"./x $(echo {base64.b64encode(MINING[4:].encode()).decode()} | base64 -d)",
        f"if true; then {MINING}; fi",
        f"(sleep 60; {MINING})",
        './x -a "kaw""pow" -o str\'at\'um+tcp://pool.example.com:6060 -u W_1',
        f"echo {MINING.encode().hex()} | xxd -r -p | sh",
    ],
)
def test_lines(line: str) -> None:
    assert line_signs(line).strength == "complete", line_signs(line)


@pytest.mark.parametrize(
    "line",
    [
        f"# {MINING}",
        "*/5 * * * * root pgrep xmrig && systemctl restart monitor",
        "0 3 * * * alice /usr/bin/find / -name 'xmrig*' -delete",
        "*/5 * * * * ps aux | grep -c ethminer >> /var/log/count",
        "ExecStart=/usr/bin/python3 -m app --pool 4 --user web",
        "* * * * * /usr/local/bin/backup -o host.example.com -u backup",
        f"echo {base64.b64encode(b'hello, this is only a greeting').decode()} | base64 -d | sh",
    ],
)
def test_harmless_lines(line: str) -> None:
    assert line_signs(line) == CommandSigns()


def test_wrappers_are_peeled_in_order() -> None:
    words = tuple("sudo -u bob env A=1 nice -n 5 timeout 3s setsid ./prog -x".split())
    inner = unwrap(words)
    assert inner.words == ("./prog", "-x")
    assert inner.wrapped_by == ("sudo", "env", "nice", "timeout", "setsid")
    assert inner.assignments == (("A", "1"),)


def test_split_commands_handles_quotes_pipes_and_redirects() -> None:
    commands = split_commands('A=1 a \'b c\' "d\\"e" 2>/dev/null | f > out; g # h\ni && j')
    assert [command.words for command in commands] == [
        ("a", "b c", 'd"e'), ("f",), ("g",), ("i",), ("j",),
    ]  # fmt: skip
    assert commands[0].assignments == (("A", "1"),)
    assert [command.feeds_next for command in commands] == [True, False, False, False, False]


# --- Names


@pytest.mark.parametrize(
    ("name", "activity", "strength"),
    [
        ("xmrig", "mining", "name"),
        ("./ethminer", "mining", "name"),
        ("XMRig-6.21.0", "mining", "name"),
        (r"C:\Tools\xmrig.exe", "mining", "name"),
        ("SRBMiner-MULTI", "mining", "name"),
        ("rgminer-1.1.2", "mining", "name"),
        ("xmrig-6.21.0-li", "mining", "name"),
        ("хmrig", "mining", "name"),  # a Cyrillic first letter
        ("/var/lib/docker/overlay2/abc/diff/tmp/kinsing", "mining", "name"),
        (".../64bit/22-0.0.11/Core_22.fah/FahCore_22", "volunteer-computing", "name"),
        ("chia_harvester", "plotting", "name"),
        ("hashcat", "hash-cracking", "name"),
        ("miner", "mining", "weak"),
        ("my-miner", "mining", "weak"),
        ("kan", "mining", "weak"),
        ("_t-rex-64", "none", "none"),
        ("t-rex-64", "none", "none"),
        ("TREX", "mining", "weak"),
        ("ethminer-tests", "none", "none"),
        ("xmrig.log", "none", "none"),
        ("xmrig-exporter", "none", "none"),
        ("rapidminer", "none", "none"),
        ("VLLM::EngineCore", "none", "none"),
        ("python: app.py", "none", "none"),
        ("/tmp/nbody", "none", "none"),
        ("[Not Found]", "none", "none"),
        ("", "none", "none"),
    ],
)
def test_names(name: str, activity: str, strength: str) -> None:
    signs = name_signs(name)
    assert (signs.activity, signs.strength) == (activity, strength)


# --- Cases from public reports

# (file, line number from 1, activity, strength); what is not listed is prose or another subject.
CASE_LINES = [
    *(("f/f01-rigel.txt", n, "mining", "complete") for n in (1, 2, 3, 4)),
    ("f/f04-wildrig-hidden.txt", 1, "mining", "complete"),
    *(("f/f06-trex-renamed.txt", n, "mining", "complete") for n in (1, 2, 3, 5)),
    ("f/f06-trex-renamed.txt", 4, "none", "none"),
    *(("f/f07-lolminer-renamed.txt", n, "mining", "complete") for n in range(1, 7)),
    *(("f/f10-trex-cli-legit-form.txt", n, "mining", "complete") for n in (1, 2)),
    ("f/f17-cron-sshd-update.cron", 1, "mining", "complete"),
    *(("f/f19-kinsing.txt", n, "mining", "name") for n in (1, 2, 3)),
    *(("f/f21-ld-so-preload-benign.txt", n, "none", "none") for n in (1, 2)),
    *(("f/f22-pearl-era-miners.txt", n, "mining", "complete") for n in range(1, 6)),
    ("f/f23-apt-style-screen.txt", 1, "mining", "complete"),
    ("f/f23-apt-style-screen.txt", 2, "none", "none"),
    *(("g/g01-rl-algo-flag.txt", n, "none", "none") for n in range(1, 6)),
    ("g/g02-pearl-name-clash.txt", 1, "none", "none"),
    ("g/g02-pearl-name-clash.txt", 2, "mining", "complete"),
    *(("g/g05-vllm-port-3333.txt", n, "none", "none") for n in (1, 2, 3)),
    *(("g/g06-cisco-trex.txt", n, "none", "none") for n in (1, 2, 3)),
    ("g/g08-stratum-path.txt", 1, "none", "none"),
    ("g/g10-folding.txt", 2, "volunteer-computing", "name"),
    *(("g/g11-hashcat.txt", n, "hash-cracking", "strong") for n in (1, 2, 3)),
    *(("g/g13-dcgm.txt", n, "none", "none") for n in (1, 2)),
    ("g/g17-steam-string.txt", 1, "none", "none"),
    ("g/g22-triton.txt", 1, "none", "none"),
    ("b/b01-sdwebui-argv-padding/ps.txt", 2, "mining", "complete"),
    ("b/b03-ultralytics-runner.txt", 2, "mining", "complete"),
    ("b/b06-ray-redis-xmrig-notls.txt", 1, "mining", "complete"),
    ("b/b09-nvcc-orphan-pbs.txt", 1, "none", "none"),
    ("b/b09-nvcc-orphan-pbs.txt", 2, "none", "none"),
    ("b/b10-comfy-srl-nodes-sshd-update.txt", 2, "mining", "complete"),
]
CASE_NAMES = [
    ("VLLM::EngineCore", "none"), ("python: app.py", "none"), ("ffmpeg", "none"),
    ("chia_harvester", "plotting"), ("Unknown Error", "none"), ("/tmp/nbody", "none"),
    ("[Insufficient Permissions]", "none"), ("/opt/Some Dir, v2/bin/tool", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "number", "activity", "strength"), CASE_LINES)
def test_case_line(file: str, number: int, activity: str, strength: str) -> None:
    if not (CASES / file).exists():
        pytest.skip("the recorded cases are not beside this checkout")
    line = (CASES / file).read_text(encoding="utf-8").splitlines()[number - 1]
    line = line.removeprefix("# against: ").removeprefix("argv ")
    if file.startswith("b/b09"):
        line = line.split(None, 4)[-1]
    signs = line_signs(line)
    assert (signs.activity, signs.strength) == (activity, strength), signs


@pytest.mark.parametrize(("name", "activity"), CASE_NAMES)
def test_case_name(name: str, activity: str) -> None:
    assert name_signs(name).activity == activity
    assert line_signs(name).activity == activity


# --- Hostile input

WORDS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        f"-o -u -a kawpow {POOL} sh -c sudo docker run --pool x:1 $( ` ' \" {{ | base64 -d screen "
        "-dmS grep [1] =".split()
    ),
)


@given(st.lists(WORDS, max_size=20), st.text(max_size=20), st.none() | st.text(max_size=30))
def test_any_arguments_give_signs(argv: list[str], comm: str, exe: str | None) -> None:
    signs = command_signs(
        argv, comm=comm, exe=exe, environment={"POOL_URL": comm, comm: "".join(argv)}
    )
    assert isinstance(signs, CommandSigns)
    assert isinstance(line_signs(" ".join(argv)), CommandSigns)
    assert isinstance(name_signs(" ".join(argv)), CommandSigns)
    assert (signs.activity == "none") == (signs.strength == "none")
    assert signs.activity == "mining" or signs.strength != "complete"


TOKENS = st.text(
    alphabet="ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz123456789", min_size=20, max_size=110
)


@given(
    TOKENS,
    st.sampled_from(
        [
            "./a -a kawpow -o stratum+tcp://pool.example.com:1 -u {t}",
            "./a -a kawpow -o stratum+tcp://{t}@pool.example.com:1",
            "./a -a {t} -o stratum+tcp://{t}.example.com:1 -u {t}.w -p {t}",
            "xmrig --url pool.example.com:1 --user={t}+5000 --pass {t}",
            "POOL_URL=stratum+tcp://{t}:1 POOL_USER={t} {t}",
            "./{t}-miner -w {t} -p stratum+tcp://pool.example.com:1",
            './x \'{{"pools":[{{"url":"pool.example.com:1","user":"{t}"}}]}}\'',
            "curl {t}.2miners.com",
        ]
    ),
)
def test_a_long_token_is_never_shown_whole(token: str, shape: str) -> None:
    line = shape.format(t=token)
    for signs in (line_signs(line), command_signs(line.split())):
        assert signs.strength != "none"
        assert all(token not in reason for reason in signs.reasons)
        assert token not in (signs.account or "")


@pytest.mark.parametrize(
    "unit",
    [
        "a-.:", "a", "a.", "://", "stratum+", "$(", "`", "\"\\", "'", "[1]", "-o ", "a=$a ", "|",
        "((", "${a", "@", "aA1+/", '{"a":"', "\u200b", "\ufdfa", "a;", "<<<", "sudo ", "-", "\\x41",
        "sh -c ", "eval ", "AAAAAAAAAAAAAAAAAAAA ", "$(echo ", "a|base64 -d|",
    ],
)  # fmt: skip
def test_long_repetitions_end(unit: str) -> None:
    text = unit * (131_072 // len(unit))
    assert isinstance(line_signs(text), CommandSigns)
    assert isinstance(line_signs(f"./x -o {text}"), CommandSigns)
    assert isinstance(command_signs([text]), CommandSigns)
    assert isinstance(command_signs(["./x", "-o", text, f"-o{text}"]), CommandSigns)
    assert isinstance(command_signs(["./x", *([unit] * 5000)]), CommandSigns)
    assert isinstance(name_signs(text), CommandSigns)


def test_variables_cannot_multiply_text() -> None:
    line = "a=" + "x" * 4000 + ";" + " ".join(["b=$a$a$a$a$a$a$a$a"] + ["echo $b$b$b$b"] * 5000)
    total = sum(len(word) for command in split_commands(line) for word in command.words)
    assert total < 4 * 131_072


def test_plain_removes_what_hides_a_word() -> None:
    assert plain("ｘｍ\u200bｒｉｇ") == "xmrig"
    assert plain("\\x78mrig") == "xmrig"
