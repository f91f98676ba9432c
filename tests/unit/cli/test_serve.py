"""`paceline serve`: one configuration out of flags, environment and file; what is wrong is told before a start."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.api.options import options
from paceline.api.server.settings import ServerSettings
from paceline.api.server.settings_values import changed, public, settings_of
from paceline.cli import main, serve, serve_flags
from paceline.cli.serve_flags import Serving, serving_of
from paceline.core import environment
from paceline.core.errors import ConfigError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    """Runs `paceline serve` up to the point where a model would be loaded."""
    found: list[Serving] = []

    def take(serving: Serving) -> int:
        found.append(serving)
        return 0

    monkeypatch.setattr(serve, "_run", take)
    for name in environment.serve_variables():
        monkeypatch.delenv(name)

    def ask(*words: str) -> Serving:
        assert main(["serve", *words]) == 0
        return found[-1]

    return ask


@pytest.fixture
def refused(asked, capsys: pytest.CaptureFixture[str]):
    def ask(*words: str) -> str:
        assert main(["serve", *words]) == 2
        return " ".join(capsys.readouterr().err.split())

    return ask


def test_without_flags_the_defaults_are_served(asked) -> None:
    """The bundled model at vLLM's port, for this machine only."""
    serving = asked()
    assert serving.settings == ServerSettings()
    assert (serving.settings.host, serving.settings.port) == ("127.0.0.1", 8000)
    assert serving.config.model == "default"
    assert changed(serving.settings) == {}


def test_flags_reach_both_dataclasses(asked) -> None:
    """Server's and engine's flags stand side by side, under vLLM's names where there are some."""
    serving = asked(
        "some-model",
        *("--port", "0", "--api-key", "a", "--api-key", "b", "--served-model-name", "x"),
        *("--max-model-len", "512", "--max-num-seqs", "4", "--no-enable-prefix-caching"),
        *("--seed", "5", "--spec", "ngram", "--spec-tokens", "3", "--vllm-metrics"),
    )
    assert serving.settings.api_key == ("a", "b")
    assert serving.settings.served_model_name == ("x",)
    assert serving.settings.vllm_metrics
    config = serving.config
    assert (config.model, config.seed) == ("some-model", 5)
    assert (config.cache.max_len, config.cache.max_rows, config.cache.prefix_cache) == (
        512,
        4,
        False,
    )
    assert (config.draft.method, config.draft.num_speculative_tokens) == ("ngram", 3)


@pytest.mark.parametrize(
    "words,part,name,value",
    [
        (("--model-path", "m"), "engine", "model", "m"),
        (("--context-length", "64"), "cache", "max_len", 64),
        (("--max-running-requests", "3"), "cache", "max_rows", 3),
        (("--chunked-prefill-size", "32"), "cache", "chunk_size", 32),
        (("--random-seed", "9"), "engine", "seed", 9),
        (("--disable-radix-cache",), "cache", "prefix_cache", False),
        (("--speculative-draft-model-path", "d"), "draft", "model", "d"),
        (("--speculative-eagle-topk", "2"), "draft", "eagle_topk", 2),
        (("--max-num-queued-reqs", "7"), "settings", "max_queued_requests", 7),
        (("--h11-max-header-count", "50"), "settings", "max_headers", 50),
    ],
)
def test_other_servers_names_are_understood(asked, words, part, name, value) -> None:
    """SGLang's and vLLM's flags of the same meaning, though the help shows none of SGLang's."""
    serving = asked(*words)
    holders = {
        "engine": serving.config,
        "cache": serving.config.cache,
        "draft": serving.config.draft,
        "settings": serving.settings,
    }
    assert getattr(holders[part], name) == value


def test_flags_go_before_the_environment_and_that_before_the_file(
    asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place changes what it names and leaves the rest."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from-file\nport: 1\nmax-len: 100\nmax_num_seqs: 2\napi-key: one\n"
        "allowed-origins: [a, b]\nstrict: true\n"
        "speculative_config: {method: ngram, num_speculative_tokens: 5}\n"
    )
    monkeypatch.setenv("PACELINE_SERVE_CONFIG", str(file))
    monkeypatch.setenv("PACELINE_SERVE_PORT", "2")
    monkeypatch.setenv("PACELINE_SERVE_MAX_LEN", "200")
    serving = asked("--port", "3")
    assert serving.settings.port == 3
    assert serving.config.cache.max_len == 200
    assert serving.config.cache.max_rows == 2
    assert serving.config.model == "from-file"
    assert serving.config.draft.method == "ngram"
    settings = serving.settings
    assert (settings.api_key, settings.allowed_origins, settings.strict) == (
        ("one",),
        ("a", "b"),
        True,
    )


@pytest.mark.parametrize(
    "text,told",
    [
        ("prot: 1", "unknown option 'prot'; did you mean 'port'?"),
        ("max-lenn: 1", "unknown option 'max_lenn'; did you mean 'max_len'?"),
        ("port: many", "port must be a whole number, got 'many'"),
        ("max_len: 1\nmax_model_len: 2", "--max-len is given twice in"),
        ("- port", "is no mapping; write lines such as"),
        ("1: 2", "has the key 1, which is no name of a flag"),
        ("port: 1\nmodel: x\nport: 1", "has 'port' twice; one value is possible"),
        ("speculative_config: {method: ngram, method: suffix}", "has 'method' twice"),
        ("config: x", "names a configuration of its own"),
        ("a: [", "cannot be read"),
        ("port: 70000", "port is 70000; 0 to 65535 is possible"),
        ("ssl_certfile: x", "of ssl_certfile and ssl_keyfile one is missing"),
        ("drain-timeout: -1\nmax-queued-requests: -2", "drain_timeout is -1"),
        ("root-path: x", "write it as /prefix"),
        ("api-key: ['']", "an api_key is empty"),
        ("allow-credentials: true\nallowed-origins: '*'", "name the origins"),
    ],
)
def test_mistakes_in_the_file_are_told(refused, tmp_path: Path, text: str, told: str) -> None:
    """With the place and a near match, exit code 2."""
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert told in refused("--config", str(file))


def test_an_empty_file_changes_nothing(asked, tmp_path: Path) -> None:
    """Comments alone are a configuration too."""
    file = tmp_path / "serve.yaml"
    file.write_text("# nothing yet\n")
    assert asked("--config", str(file)).settings == ServerSettings()


@pytest.mark.parametrize(
    "words,told",
    [
        (("--prot", "1"), "--port"),
        (("--max-len", "5", "--context-length", "6"), "--max-len is given twice"),
        (("--config", "/nowhere.yaml"), "cannot be read"),
        (("a", "--model", "b"), "two models are named, a and b"),
        (("--cache-scope", "all"), "cache-scope"),
    ],
)
def test_mistakes_on_the_command_line_are_told(refused, words, told: str) -> None:
    """Nothing is ignored."""
    assert told in refused(*words)


def test_an_unknown_variable_is_told(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in the environment would otherwise leave a server without its key."""
    monkeypatch.setenv("PACELINE_SERVE_API_KEYS", "secret")
    told = refused()
    assert "did you mean 'PACELINE_SERVE_API_KEY'?" in told
    assert "secret" not in told


def test_a_variable_like_none_of_ours_gets_no_guess(
    refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That all of them begin alike makes none of them the one that was meant."""
    monkeypatch.setenv("PACELINE_SERVE_FOO", "1")
    told = refused()
    assert "unknown variable 'PACELINE_SERVE_FOO'; the flags of" in told
    assert "did you mean" not in told


def test_every_setting_and_option_can_stand_in_all_three_places(asked) -> None:
    """A setting without a flag cannot exist, and one name is one thing."""
    names = {f.name for f in fields(ServerSettings)}
    assert not names & set(options())
    helps = [f.metadata["help"] for f in fields(ServerSettings)]
    assert all(helps)
    assert len(set(helps)) == len(helps)
    serving = serving_of({"port": 1, "max_len": 5, "api_key": ["a"]})
    assert serving.settings.port == 1
    with pytest.raises(ConfigError, match="did you mean 'max_rows'"):
        serving_of({"max_row": 1})


def test_keys_are_never_shown() -> None:
    """The resolved configuration is logged; secrets are not."""
    shown = json.dumps(changed(settings_of({"api_key": ["hush", "hush2"]})))
    assert "hush" not in shown
    assert "2 not shown" in shown


def test_what_names_a_file_or_a_key_is_for_the_log_or_for_nobody() -> None:
    """A field of a new file or secret is found by its name, whatever its author forgot."""
    told = set(public(ServerSettings()))
    every = {field.name for field in fields(ServerSettings)}
    strange = {name for name in every if re.search(r"key|file|ssl|uds|template|token$", name)}
    assert strange - {"timeout_keep_alive"} == every - told
    assert json.loads(json.dumps(changed(ServerSettings(uds="/run/s")))) == {"uds": "/run/s"}


def test_the_help_has_examples_and_hides_other_servers_names(capsys) -> None:
    """Grouped, with defaults; what is only understood is not advertised."""
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("Address", "Limits", "Life cycle", "--drain-timeout", "paceline serve --config"):
        assert word in text
    assert "context-length" not in text
    pages = text.partition(" Pages ")[2].partition("╰")[0]
    assert "--disable-page" in pages
    assert "--disable-fastapi-docs" in pages


def test_every_flag_says_what_it_is_for() -> None:
    """Those that are only understood, which are not shown, say nothing."""
    shown = [p.annotation.__metadata__[0] for p in serve_flags.serving_flags().parameters]
    silent = [flag.name for flag in shown if flag.show and len(flag.help.split()) < 2]
    assert silent == []


@pytest.mark.parametrize("example", serve.EXAMPLES)
def test_examples_of_the_help_work(asked, tmp_path, monkeypatch, example: str) -> None:
    """As they stand there, in a folder with the file that one of them names."""
    (tmp_path / "serve.yaml").write_text("max-len: 4096\n")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(example)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    assert words[:2] == ["paceline", "serve"]
    serving = asked(*words[2:])
    assert serving.config.cache.max_len == {"--config": 4096, "--max-model-len": 8192}.get(
        next((w for w in words if w in {"--config", "--max-model-len"}), "")
    )
    assert serving.settings.api_key == (("SECRET",) if "SECRET" in example else ())


def test_without_the_extra_it_says_how_to_install_it(
    refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three parts; nothing else needs those packages."""
    import importlib.util

    find = importlib.util.find_spec
    hidden = {"fastapi", "uvicorn"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in hidden else find(name, *a)
    )
    told = refused()
    assert "needs fastapi, uvicorn, which are not installed" in told
    assert "pip install 'paceline[server]'" in told


def test_nothing_but_serve_loads_the_web_packages() -> None:
    """The command line stays quick, and works without the extra."""
    import subprocess
    import sys

    code = (
        "import sys; from paceline.cli.app import build_app; build_app(); "
        "print([m for m in ('fastapi', 'starlette', 'uvicorn', 'pydantic', 'prometheus_client', "
        "'yaml', 'torch') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
