from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

from paceline.api.options import engine_config, options
from paceline.bench.run import Settings
from paceline.cli.bench import bench
from paceline.cli.flags import SAMPLING_HELP
from paceline.cli.generate import generate
from paceline.core.request import SamplingParams
from paceline.draft import names


def test_every_sampling_field_has_help() -> None:
    """A new field of SamplingParams gets a flag, or it fails here."""
    assert set(SAMPLING_HELP) == {f.name for f in fields(SamplingParams)}


def test_every_config_field_is_a_flag() -> None:
    """Flags are the dataclasses' fields, no more and no less."""
    parameters = set(inspect.signature(generate).parameters)
    engine = {"engine_seed" if name == "seed" else name for name in options()}
    sampling = {f.name for f in fields(SamplingParams)} - {"num_speculative_tokens", "drafter"}
    own = {"prompt", "as_json", "stats", "speculative_config"}
    assert parameters == engine | sampling | own
    assert {f.name for f in fields(Settings)} <= set(inspect.signature(bench).parameters)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "demo", "doctor"])
def test_help_names_every_drafter_with_examples(run, command: str) -> None:
    """A registry line is in the help by itself; the examples are values that the options take."""
    ran = run(command, "--help")
    assert ran.code == 0, ran.err
    text = re.sub(r"[│\s]+", " ", ran.out)  # a table of one column per flag and one of help
    start = text.index("drafter: none")
    shown = text[start : text.index("vLLM's keys")]
    for name in names():
        assert re.search(rf"\b{name}\b", shown), f"{name} is registered and not shown"
    examples = re.findall(r"'(\{.*?\})'", text[start:])
    assert len(examples) == 2
    for example in examples:
        config = engine_config({"speculative_config": example})
        assert config.draft.method in names()
    flags = re.findall(r"'--spec (\S+)", text[start:])
    assert len(flags) == 2
    assert set(flags) <= set(names())


def test_only_given_flags_are_passed_on(run) -> None:
    """What is left out keeps the field's default, in every part."""
    ran = run(
        *("generate", "x", "--max-len", "64", "--no-prefix-cache", "--spec", "suffix:path"),
        *("--spec-nodes", "5", "--temperature", "0", "--stop", "a", "--stop", "b"),
        *("--seed", "3", "--engine-seed", "4", "--logit-bias", '{"7": -2}', "--ignore-eos"),
        *("--max-tokens", "4"),
    )
    assert ran.code == 0, ran.err
    (config,) = ran.configs
    assert (config.cache.max_len, config.cache.prefix_cache, config.cache.max_rows) == (
        64,
        False,
        16,
    )
    assert (config.draft.method, config.draft.suffix_shape) == ("suffix", "path")
    assert (config.draft.num_speculative_tokens, config.seed) == (5, 4)
    params = ran.engines[0].added[0].params
    assert params == SamplingParams(
        temperature=0, stop=("a", "b"), seed=3, logit_bias={7: -2.0}, ignore_eos=True, max_tokens=4
    ) or list(params.stop) == ["a", "b"]
    assert (params.temperature, params.seed, params.logit_bias, params.top_p) == (0, 3, {7: -2}, 1)


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc"])
def test_a_speculative_config_is_vllms(run, flag: str) -> None:
    """The JSON that people have for vLLM works on every command."""
    ran = run("generate", "x", flag, '{"method": "ngram", "num_speculative_tokens": 4}')
    assert ran.code == 0, ran.err
    assert ran.configs[0].draft.method == "ngram"
    assert ran.configs[0].draft.num_speculative_tokens == 4


@pytest.mark.parametrize("flag", ["--spec-config", "--speculative-config", "-sc"])
def test_a_key_of_it_may_be_a_flag(run, flag: str) -> None:
    """With `=` or a space; numbers are numbers, and text is text."""
    words = [
        f"{flag}.method=ngram",
        f"{flag}.num_speculative_tokens",
        "4",
        f"{flag}.adaptive=false",
    ]
    ran = run("generate", *words, "x", "--max-tokens", "3")
    assert ran.code == 0, ran.err
    draft = ran.configs[0].draft
    assert (draft.method, draft.num_speculative_tokens, draft.adaptive) == ("ngram", 4, False)
    assert len(ran.engines[0].added) == 1


def test_after_two_dashes_there_are_no_flags(run) -> None:
    """Words stay what they are."""
    ran = run("generate", "-sc.method=ngram", "--", "-sc.method")
    assert ran.code == 0, ran.err
    assert ran.configs[0].draft.method == "ngram"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["-sc.method"], "-sc.method has no value"),
        (
            ["-sc.method=a", "--spec-config.method", "b"],
            "method of the speculative config is given",
        ),
        (["-sc.method=ngram", "-sc", '{"method": "ngram"}'], "given as JSON and by key (method)"),
        (["-sc.method=ngram", "--speculative-config={}"], "given as JSON and by key (method)"),
        (["-sc.metod=ngram"], "known keys: method"),
        (["-sc.=ngram"], "known keys: method"),
        (["-sc.num_speculative_tokens=many"], "num_speculative_tokens must be a whole number"),
        (["-sc.method=ngram", "--spec", "suffix"], "given both"),
    ],
)
def test_keys_that_contradict_are_refused(run, arguments: list[str], message: str) -> None:
    """As the JSON would be."""
    ran = run("generate", "x", *arguments)
    assert ran.code == 2
    assert message in " ".join(ran.err.split())
    assert ran.engines == []


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--temperature", "nan"], "temperature nan not in 0"),
        (["--top-p", "0"], "top_p 0.0 not in"),
        (["--stop", ""], "stop must be non-empty"),
        (["--n", "0"], "n 0 must be a whole number in 1 ... 128"),
        (["--logit-bias", "7"], "cannot read --logit-bias"),
        (["--logit-bias", '{"7": "a"}'], "cannot read --logit-bias"),
        (["--speculative-config", '{"metod": "ngram"}'], "known keys: method"),
        (["--speculative-config", "ngram"], "is not JSON"),
        (["--spec", "ngram", "--speculative-config", '{"method": "suffix"}'], "given both"),
        (["--spec", "suffix:ring"], "suffix:tree, suffix:path"),
        (["--memory-gb", "inf"], "memory_gb must be a finite number"),
        (["--logprobs", "21"], "logprobs 21 must be"),
    ],
)
def test_bad_values_are_refused(run, arguments: list[str], message: str) -> None:
    """Out of range, not a number, unknown: exit code 2, one message, nothing loaded."""
    ran = run("generate", "x", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.engines == []
