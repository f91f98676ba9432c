"""Flags made from the config dataclasses: a flag without a field cannot exist.

A command is a plain function whose parameters say what it needs; `with_flags` gives it a signature
in which a parameter of type `EngineConfig`, `SpecChoices`, `SamplingParams` or `Settings` is
replaced by that class's fields, as keyword-only flags with help and default. Only flags that were
given are passed on, so "given" and "left at its default" stay apart.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from paceline.api.options import ALIASES, Option, engine_config, options
from paceline.bench.run import Settings
from paceline.cli.console import STDIN, in_paragraphs
from paceline.core.config import EngineConfig
from paceline.core.errors import ConfigError, RequestError
from paceline.core.request import SamplingParams
from paceline.core.sampling_rules import MAX_SAMPLES, MAX_TOP_LOGPROBS
from paceline.draft import AUTO, COMPOSITES, DRAFTERS, NETWORKS, folder_problems

_SPECULATION = Group("Speculation", sort_key=30)
_SAMPLING = Group("Sampling", sort_key=20)
_RUN = Group("Run", sort_key=10)
_ENGINE = Group("Engine", sort_key=40)

_SPEC_HELP = (
    f"drafter: {', '.join(DRAFTERS)} (none: plain autoregressive decoding; suffix also as suffix:tree, "
    f"suffix:path), a network in the folder --spec-model: {', '.join(NETWORKS)}, or one tree of several "
    f"drafters (--spec-parts): {', '.join(COMPOSITES)}; "
    f"{AUTO}: the network that comes with exactly this model, else suffix. For example "
    f"'--spec suffix --spec-nodes 8', '--spec {next(iter(NETWORKS))} --spec-model FOLDER'"
)
_CONFIG_HELP = (
    "the same and more as a JSON object with vLLM's keys, for example "
    """'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}' or """
    f"""'{{"method": "{next(iter(NETWORKS))}", "model": "FOLDER", "num_speculative_tokens": 8}}'; """
    "a key may be a flag of its own: --spec-config.method=ngram"
)
# SamplingParams has no help texts of its own; tests check that every field is here.
SAMPLING_HELP: Mapping[str, str] = {
    "max_tokens": "most tokens to be made",
    "temperature": "0 is greedy",
    "top_p": "keep the most likely tokens up to this share of probability",
    "top_k": "keep this many of the most likely tokens; 0: all",
    "min_p": "keep tokens at least this likely, relative to the most likely one",
    "repetition_penalty": "above 1 discourages tokens of prompt and answer",
    "presence_penalty": "above 0 discourages tokens of the answer",
    "frequency_penalty": "above 0 discourages tokens by their count in the answer",
    "logit_bias": """JSON object, token id to bias, for example '{"198": -5}'""",
    "allowed_token_ids": "only these token ids may be made; give it several times",
    "banned_token_ids": "these token ids may not be made; give it several times",
    "min_tokens": "no stop before this many tokens",
    "stop": "end at this text; give it several times",
    "stop_token_ids": "end at this token id; give it several times",
    "ignore_eos": "go on after the model's end of text",
    "seed": "the same seed repeats the same answer; default: drawn, and reported",
    "n": f"independent answers to the prompt, {MAX_SAMPLES} at most",
    "logprobs": "report log-probabilities: of each token, and of this many alternatives "
    f"({MAX_TOP_LOGPROBS} at most)",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop_str_in_output": "let the text end with the stop text",
    "num_speculative_tokens": "most draft nodes for this answer; 0: no speculation",
    "drafter": "of several that are loaded, the only one that drafts for this answer",
}
# Served by the engine's own flags of the same meaning.
_NO_FLAG = frozenset({"num_speculative_tokens", "drafter"})
# On the command line --seed is the answer's; the engine's own has another name.
ENGINE_SEED = "engine_seed"
_LISTS = {"stop": list[str], "allowed_token_ids": list[int], "banned_token_ids": list[int]}
_LISTS["stop_token_ids"] = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecChoice:
    """One drafter of a run that compares several."""

    spec: str  # as it was asked for
    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecChoices:
    """The drafters of a run, in the order given."""

    items: tuple[SpecChoice, ...]


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags behind one parameter of a command, and how they become its value."""

    parameters: list[inspect.Parameter]
    make: Callable[[dict[str, Any]], object]


def with_flags(
    command: Callable[..., int], more: Mapping[type, Callable[[], Flags]] | None = None
) -> Callable[..., int]:
    """Return `command` with flags in place of its config parameters (see above).

    Args:
        command: to be given flags.
        more: further types of parameters, and the flags behind each.
    """
    hints = get_type_hints(command, include_extras=True)
    makers: dict[type, Callable[[], Flags]] = {
        EngineConfig: _engine_flags,
        SpecChoices: _choices_flags,
        SamplingParams: _sampling_flags,
        Settings: _settings_flags,
        **(more or {}),
    }
    expanded: dict[str, Flags] = {}
    own: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in hints and hints[name] in makers:
            expanded[name] = makers[hints[name]]()
        else:
            own.append(parameter.replace(annotation=hints.get(name, parameter.annotation)))
    flags = [p for group in expanded.values() for p in group.parameters]
    signature = inspect.Signature([*own, *flags])

    def run(*args: object, **kwargs: object) -> int:
        given = signature.bind(*args, **kwargs)
        values = dict(given.arguments)
        made: dict[str, object] = {}
        # "-" is standard input as an argument; as a flag's value it is only a dash.
        values = {
            p.name: _dashes(values[p.name]) if p.kind is p.KEYWORD_ONLY else values[p.name]
            for p in signature.parameters.values()
            if p.name in values
        }
        for name, group in expanded.items():
            names = [p.name for p in group.parameters]
            made[name] = group.make({n: values[n] for n in names if values.get(n) is not None})
        rest = {p.name: values[p.name] for p in own if p.name in values}
        positional = [
            rest.pop(p.name) for p in own if p.kind is p.POSITIONAL_ONLY and p.name in rest
        ]
        return command(*positional, **rest, **made)

    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__name__ = command.__name__
    run.__doc__ = in_paragraphs(command.__doc__)
    return run


def _dashes(value: object) -> object:
    """A flag's value, with what `STDIN` stands for in place of it."""
    if isinstance(value, list):
        return [_dashes(item) for item in value]
    return "-" if value == STDIN or value == Path(STDIN) else value


def _engine_flags() -> Flags:
    parameters = [*(option_flag(o) for o in options().values()), config_flag()]
    return Flags(parameters, _engine_config)


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    renamed = {"seed" if k == ENGINE_SEED else k: v for k, v in values.items()}
    return engine_config(renamed)


def _choices_flags() -> Flags:
    several = flag(
        "spec",
        list[str],
        _SPEC_HELP + "; give it several times to compare",
        _SPECULATION,
        names=["--spec", "--spec-method"],
        default=options()["spec"].default,
    )
    rest = [option_flag(o) for o in options().values() if o.name != "spec"]

    def make(values: dict[str, Any]) -> SpecChoices:
        specs = values.pop("spec", None)
        if specs is None:
            config = _engine_config(values)
            return SpecChoices(items=(SpecChoice(spec=config.draft.method, config=config),))
        items = [SpecChoice(spec=s, config=_engine_config({**values, "spec": s})) for s in specs]
        return SpecChoices(items=_with_folders(items))

    return Flags([several, *rest, config_flag()], make)


def _with_folders(items: list[SpecChoice]) -> tuple[SpecChoice, ...]:
    """Of several drafters, those that are compared with a network have none of its folder."""
    lone = [bool(folder_problems(item.config.draft)) for item in items]
    if all(lone):
        return tuple(items)  # refused where the engine is built
    return tuple(
        replace(item, config=replace(item.config, draft=replace(item.config.draft, model=None)))
        if without
        else item
        for item, without in zip(items, lone, strict=True)
    )


def option_flag(option: Option, *more: str, env: str | None = None) -> inspect.Parameter:
    """An engine's option as a flag.

    Args:
        option: of the flat names.
        more: further names of the flag.
        env: environment variable that stands in for it.
    """
    name = ENGINE_SEED if option.name == "seed" else option.name
    names = [name, *ALIASES.get(name, ())]
    return flag(
        name,
        option.annotation,
        _SPEC_HELP if option.name == "spec" else option.help,
        _SPECULATION if option.part == "draft" else _ENGINE,
        names=[*(dashed(n) for n in names), *more],
        default=option.default,
        env=env,
    )


def config_flag(env: str | None = None) -> inspect.Parameter:
    """The drafter's options as one JSON object."""
    return flag(
        "speculative_config",
        str,
        _CONFIG_HELP,
        _SPECULATION,
        names=["--speculative-config", "-sc"],
        default=None,
        env=env,
    )


def _sampling_flags() -> Flags:
    hints = get_type_hints(SamplingParams)
    by_name = {f.name: f for f in fields(SamplingParams)}
    parameters = [
        flag(
            name,
            str if name == "logit_bias" else _LISTS.get(name, hints[name]),
            text,
            _SAMPLING,
            default=_default(by_name[name]),
        )
        for name, text in SAMPLING_HELP.items()
        if name not in _NO_FLAG
    ]

    def make(values: dict[str, Any]) -> SamplingParams:
        if "logit_bias" in values:
            values["logit_bias"] = _logit_bias(values["logit_bias"])
        return SamplingParams(**values)

    return Flags(parameters, make)


def _settings_flags() -> Flags:
    hints = get_type_hints(Settings)
    parameters = [
        flag(f.name, hints[f.name], f.metadata["help"], _RUN, default=f.default)
        for f in fields(Settings)
    ]
    return Flags(parameters, lambda values: Settings(**values))


def _default(field: Field[Any]) -> object:
    return None if field.default is MISSING else field.default


def flag(
    name: str,
    annotation: Any,
    text: str,
    group: Group,
    *,
    default: object,
    names: list[str] | None = None,
    env: str | None = None,
    hidden: bool = False,
) -> inspect.Parameter:
    """One optional flag; None means that it was not given, help shows the field's default.

    Args:
        name: of the parameter, and of the flag where `names` is None.
        annotation: type of its value.
        text: help.
        group: its place in the help.
        default: shown.
        names: of the flag.
        env: environment variable that stands in for it.
        hidden: not in the help.
    """
    shown = default is not None and default not in {(), ""}
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            annotation | None,
            Parameter(
                name=names or [dashed(name)],
                group=group,
                help=text,
                show_default=(lambda _: spelled(default)) if shown else False,
                negative_iterable=(),
                env_var=env,
                show_env_var=False,
                show=not hidden,
            ),
        ],
    )


def spelled(default: object) -> str:
    """A default as `--help` shows it: several values as one would type them."""
    return shlex.join(map(str, default)) if isinstance(default, tuple) else str(default)


def dashed(name: str) -> str:
    """A field's name as a flag."""
    return "--" + name.replace("_", "-")


def _logit_bias(text: str) -> dict[int, float]:
    try:
        given = json.loads(text)
        return {int(key): float(value) for key, value in given.items()}
    except (ValueError, AttributeError, TypeError) as error:
        msg = f"cannot read --logit-bias {text!r}; it is {SAMPLING_HELP['logit_bias']}"
        raise RequestError(msg) from error


def parse_json_object(text: str, flag: str) -> dict[str, object]:
    """Read a flag's JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        msg = f"cannot read {flag} {text!r}: {error}; it must be a JSON object"
        raise ConfigError(msg) from error
    if not isinstance(given, dict):
        msg = f"{flag} {text!r} is no JSON object; write it as '{{\"key\": value}}'"
        raise ConfigError(msg)
    return given
