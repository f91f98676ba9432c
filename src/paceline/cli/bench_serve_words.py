"""What the words of `paceline bench serve` mean: loads, prompts, variants, limits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.bench.serve_client import Endpoint
from paceline.bench.serve_load import Load
from paceline.bench.serve_prompts import Call, RandomPrompts, calls_of, check_extra, chosen
from paceline.bench.workload import Workload, load
from paceline.cli.console import STDIN
from paceline.cli.flags import parse_json_object
from paceline.core.errors import ConfigError

_GOODPUT = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2el", "e2e": "e2el"}
_SECRET = "--api-key"  # noqa: S105 (the flag's name)
_RANDOM_REQUESTS = 64


def workload(
    files: Sequence[Path],
    input_len: int | None,
    output_len: int,
    range_ratio: float,
    categories: Sequence[str],
    *,
    raw: bool,
    num_prompts: int | None,
    seed: int,
) -> tuple[Workload | RandomPrompts, Callable[[int, int], Sequence[Call]], int]:
    """What is asked, how requests are made of it, and how many of them a run has.

    Raises:
        ConfigError: files and random ids are both asked for, or neither, or they cannot be had.
    """
    if bool(files) == (input_len is not None):
        msg = (
            "prompts come from JSONL files, such as Spec-Bench's question.jsonl, or are random ids "
            "(--random-input-len 512); name one of the two"
        )
        raise ConfigError(msg)
    if input_len is not None:
        if input_len < 1 or output_len < 1 or not 0 <= range_ratio < 1:
            msg = (
                f"random prompts of {input_len} tokens, answers of {output_len}, ratio {range_ratio:g}: "
                "lengths must be at least 1, and the ratio 0 or more and below 1; change them"
            )
            raise ConfigError(msg)
        prompts = RandomPrompts(input_len=input_len, output_len=output_len, range_ratio=range_ratio)
        number = _RANDOM_REQUESTS if num_prompts is None else num_prompts
        return prompts, lambda turn, num: prompts.calls(num, seed + turn), number
    if any(str(path) == STDIN for path in files):
        msg = "prompts are read from files, not from standard input; name a JSONL file"
        raise ConfigError(msg)
    whole = load(files, categories=categories, raw=raw)
    number = len(whole.prompts) if num_prompts is None else num_prompts
    mixed = chosen(whole, len(whole.prompts), seed)  # what follows the counted ones is for warm-up
    return chosen(whole, number, seed), lambda _, num: calls_of(mixed, num), number


def endpoint(asked: str | None, *, is_random: bool) -> Endpoint:
    """The endpoint asked for, or the one that takes these prompts.

    Raises:
        ConfigError: there is no such one, or it takes no token ids.
    """
    if asked not in {None, "chat", "completions"}:
        msg = f"no endpoint {asked!r}; possible are chat and completions: name one of them"
        raise ConfigError(msg)
    if is_random and asked == "chat":
        msg = (
            "random token ids cannot go through a chat template; --endpoint completions takes them: "
            "leave --endpoint out, or name a file with prompts"
        )
        raise ConfigError(msg)
    return "completions" if is_random or asked == "completions" else "chat"


def loads(concurrency: str | None, rate: str | None, burstiness: float) -> list[Load]:
    """Loads in the order given, each once.

    Raises:
        ConfigError: both kinds are asked for, or a number cannot be.
    """
    if concurrency is not None and rate is not None:
        msg = (
            "--concurrency is a closed loop and --request-rate an open one; a run is one or the other: "
            "leave one of them out"
        )
        raise ConfigError(msg)
    if burstiness <= 0 or (rate is None and burstiness != 1):
        msg = f"--burstiness {burstiness:g} must be above 0, and goes with --request-rate; add that"
        raise ConfigError(msg)
    if rate is None:
        wanted = _numbers("--concurrency", concurrency or "1", int)
        return [Load(concurrency=int(n)) for n in wanted]
    return [Load(rate=n, burstiness=burstiness) for n in _numbers("--request-rate", rate, float)]


def _numbers(flag: str, text: str, kind: type[int | float]) -> list[float]:
    try:
        numbers = [float(n) for n in dict.fromkeys(kind(word) for word in text.split(","))]
    except ValueError:
        numbers = []
    if not numbers or not all(n > 0 for n in numbers):  # not a number is not above 0 either
        msg = f"cannot read {flag} {text!r}; it takes numbers above 0, separated by commas: 1,2,4,8"
        raise ConfigError(msg)
    return numbers


def more_of_body(text: str | None, *, ignore_eos: bool) -> dict[str, object]:
    """What --extra-body and --ignore-eos add to every request.

    Raises:
        ConfigError: it is no JSON object, or sets what the measurement sets.
    """
    given = {} if text is None else parse_json_object(text, "--extra-body")
    check_extra(given, "--extra-body")
    return {**({"ignore_eos": True} if ignore_eos else {}), **given}


def variants(given: Sequence[str]) -> dict[str, dict[str, object]]:
    """Name -> what it adds to every request; one without a name, which adds nothing, if none is given.

    Raises:
        ConfigError: one is not NAME=JSON object, or comes twice.
    """
    found: dict[str, dict[str, object]] = {}
    for text in given:
        name, _, body = text.partition("=")
        if not name or not body or name in found:
            msg = (
                f"cannot read --variant {text!r}; it is NAME=JSON object, with a name of its own: "
                """write it as 'plain={"speculative": {"enabled": false}}'"""
            )
            raise ConfigError(msg)
        found[name] = parse_json_object(body, f"--variant {name}")
        check_extra(found[name], f"--variant {name}")
    return found or {"": {}}


def spaced(goodput: Sequence[str], files: Sequence[Path]) -> tuple[str | None, list[Path]]:
    """Limits and files, where the limits stand as vLLM takes them: `--goodput ttft:200 tpot:50 FILE`.

    Files that follow come as limits then; those have a colon.
    """
    kept = [word for i, word in enumerate(goodput) if i == 0 or ":" in word]
    more = [Path(word) for i, word in enumerate(goodput) if i > 0 and ":" not in word]
    return " ".join(kept) or None, [*files, *more]


def limits(text: str | None) -> dict[str, float]:
    """Most milliseconds by metric, from `ttft:200,tpot:50`.

    Raises:
        ConfigError: a metric or a number cannot be.
    """
    found: dict[str, float] = {}
    for word in [] if text is None else text.replace(",", " ").split():
        name, _, value = word.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = 0.0
        if name not in _GOODPUT or not most > 0:
            msg = (
                f"cannot read --goodput {text!r} at {word!r}; it takes milliseconds for ttft, tpot and "
                "e2el: ttft:200,tpot:50"
            )
            raise ConfigError(msg)
        found[_GOODPUT[name]] = most
    return found


def command_line() -> list[str]:
    """How this run was started, without the key."""
    words = ["paceline", *sys.argv[1:]]
    for i, word in enumerate(words):
        if word.startswith(f"{_SECRET}="):
            words[i] = f"{_SECRET}=..."
        elif word == _SECRET and i + 1 < len(words):
            words[i + 1] = "..."
    return words
