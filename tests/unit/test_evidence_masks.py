"""What is masked in evidence: no secret stays, and what tells of a miner does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.evidence.masks import (
    is_secret_name,
    mask_arguments,
    mask_entry,
    mask_json,
    mask_policy,
    mask_sink,
    mask_text,
    mask_variable,
    masked,
)
from gpuwarden.evidence.process_files import environment

SECRET = "q7Gk2LmZ0vRt9XwB4nEh"
WALLET = "4" + "A1b2C3d4E5" * 9 + "F6gH"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJlLW9m"
SECRET_NAMES = (
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN PGPASSWORD "
    "MYSQL_PWD GITHUB_TOKEN SLURM_JWT POOL_PASS dbPassword apiKey REDISCLI_AUTH client_secret "
    "GOOGLE_APPLICATION_CREDENTIALS NGC_API_KEY AZURE_CLIENT_SECRET sshpass DOCKER_AUTH_TOKEN"
).split()
PLAIN = {
    "CUDA_VISIBLE_DEVICES": "GPU-5f2a1c3e-1111-2222-3333-444455556666",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "SLURM_JOB_ID": "4711",
    "SLURM_TRES_PER_TASK": "cpu:4",
    "LD_PRELOAD": "/usr/lib/libx.so",
    "PATH": "/usr/bin:/bin",
    "PWD": "/home/a",
    "SSH_AUTH_SOCK": "/tmp/ssh-a/agent.1",
    "MAX_TOKENS": "4096",
    "TOKENIZER": "llama",
    "WALLET": WALLET,
    "POOL_USER": f"{WALLET}.rig",
    "SOMETHING": WALLET,
    "KUBERNETES_SERVICE_HOST": "192.0.2.1",
    "MODEL_SHA256": "a3" * 32,
    "PYTHON_VERSION": "3.11.7",
}


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_what_is_called_a_secret_is_masked_whatever_it_looks_like(name: str) -> None:
    assert is_secret_name(name)
    for value in ("x1", SECRET, "with blanks and\nlines", "/a/path"):
        assert mask_variable(name, value) == masked(value)


@pytest.mark.parametrize(("name", "value"), PLAIN.items())
def test_settings_and_wallets_stay(name: str, value: str) -> None:
    assert mask_variable(name, value) == value


@pytest.mark.parametrize(
    "text",
    [
        f"AKIA{'Q' * 12}ABCD",
        f"ghp_{SECRET}{SECRET}",
        f"hf_{SECRET}",
        f"sk-{SECRET}",
        f"nvapi-{SECRET}",
        JWT,
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"Authorization: Bearer {SECRET}",
        f"https://user:{SECRET}@host.example.net/path",
        f"redis://:{SECRET}@host.example.net",
        f'{{"password": "{SECRET}"}}',
        f"export HF_TOKEN={SECRET}; python train.py",
        f"token='{SECRET}'",
    ],
)
def test_shapes_of_secrets_are_masked_in_any_text(text: str) -> None:
    for around in (text, f"before {text} after"):
        kept = mask_text(around)
        assert SECRET not in kept
        assert "MASKED-" in kept
        assert mask_text(kept) == kept


def test_a_word_without_sense_under_a_name_that_says_nothing_is_masked() -> None:
    value = "0123456789abcdef0011223344556677deadbeef"
    assert mask_variable("SOMETHING", value) == masked(value)
    assert mask_variable("GIT_COMMIT", value) == value


def test_arguments() -> None:
    url = f"stratum+tcp://{WALLET}:{SECRET}@pool.example.net:3333"
    argv = ["/tmp/m", "-o", url, "--token", SECRET, f"--password={SECRET}", f"API_KEY={SECRET}"]
    kept = mask_arguments([*argv, "-u", f"{WALLET}.rig", "--max-tokens", "512", "-H"])
    assert SECRET not in " ".join(kept)
    assert kept[2] == f"stratum+tcp://{WALLET}:{masked(SECRET)}@pool.example.net:3333"
    assert kept[3:6] == ("--token", masked(SECRET), f"--password={masked(SECRET)}")
    assert kept[7:] == ("-u", f"{WALLET}.rig", "--max-tokens", "512", "-H")


def test_an_option_behind_a_secret_option_is_no_secret() -> None:
    assert mask_arguments(["a", "--auth", "--port", "80"]) == ("a", "--auth", "--port", "80")


def test_json_by_its_keys_in_its_texts_and_in_lists_of_variables() -> None:
    document = {
        "process": {"env": ["PATH=/bin", f"HF_TOKEN={SECRET}"], "args": ["a", "--key", SECRET]},
        "auth": {"password": SECRET, "user": "a"},
        "count": 3,
    }
    kept = mask_json(document)
    assert SECRET not in str(kept)
    assert kept["process"]["env"][0] == "PATH=/bin"
    assert kept["auth"]["user"] == "a" and kept["count"] == 3


def test_a_document_nested_too_deep_ends() -> None:
    deep: object = SECRET
    for _ in range(500):
        deep = [deep]
    assert SECRET not in str(mask_json(deep))


def test_sinks_keep_their_host_alone() -> None:
    sink = f"webhook:https://hooks.example.net/services/{SECRET}"
    assert mask_sink(sink) == f"webhook:https://hooks.example.net/{masked(f'services/{SECRET}')}"
    assert mask_sink("file:/var/log/x") == "file:/var/log/x"
    kept = mask_policy(f'version: 1\nsinks:\n  - "{sink}"\n  - syslog:\n')
    assert SECRET not in kept and "hooks.example.net" in kept and "syslog:" in kept


@given(st.binary(max_size=4000))
def test_any_environment_gives_a_result(data: bytes) -> None:
    told = environment(data)
    assert len(told["variables"]) <= data.count(b"\0") + 1


@given(st.text(max_size=400))
def test_masking_twice_changes_nothing_more(text: str) -> None:
    kept = mask_text(text)
    assert mask_text(kept) == kept
    mask_entry(text)
    mask_arguments(text.split(" "))


@given(st.sampled_from(SECRET_NAMES), st.text(st.characters(blacklist_characters="\0"), min_size=1))
def test_no_value_of_a_secret_name_stays(name: str, value: str) -> None:
    data = b"A=1\0" + f"{name}={value}".encode("utf-8", "surrogatepass") + b"\0B=2"
    told = environment(data)
    kept = told["variables"][name]
    assert kept.startswith("MASKED-")
    assert told["variables"]["A"] == "1" and told["variables"]["B"] == "2"


def test_of_several_values_of_one_name_all_are_masked() -> None:
    told = environment(f"HF_TOKEN=a{SECRET}\0HF_TOKEN=b{SECRET}\0".encode())
    assert SECRET not in str(told)
    assert len(told["duplicates"]) == 1


@pytest.mark.parametrize(
    "piece",
    ["a://b:", "token=", "x" * 50 + ".", '"key": "', "eyJaaaaaaaa.", "bearer ", "://@", "="],
)
def test_a_long_text_made_to_hurt_comes_to_an_end(piece: str) -> None:
    """A megabyte, which in time that grows with its square takes an hour."""
    text = piece * (1_000_000 // len(piece))
    assert mask_text(text)
