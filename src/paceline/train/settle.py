"""Settings of a run: those of its first call, what later calls change, and what comes with answers.

A run may use the prompts and answers of others (`--answers`); then what those are, temperatures and
lengths for example, is as their settings say, which must agree, and is not said again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.core.errors import ConfigError
from paceline.models.atomic import replacing
from paceline.train.settings import FREE, OF_ANSWERS, PER_CALL, TrainSettings, as_json, flag

S = TypeVar("S", bound=TrainSettings)

SETTINGS: Final = "settings.json"
_METHOD = "method"
_FIRST_METHOD = "dflash"  # of runs from before there was another, which do not say


# Of what comes with answers: what each of several runs may have of its own.
_OWN: Final = frozenset({"prompts", "answer_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """What is taken from a run whose answers are used."""

    folder: Path
    values: dict[str, object]


def settle(folder: Path, given: Mapping[str, object], kind: type[S]) -> S:
    """Settings of a run: those of its first call, with what this call may and does change.

    Args:
        folder: of the run; made if it is missing.
        given: settings that this call states.
        kind: what is trained.

    Raises:
        ConfigError: a setting is invalid, or is not what it was in this run's first call; the
            folder holds the run of another kind of drafter; answers of another run are asked for
            and it has none, or those of several that were made with other settings.
    """
    path = folder / SETTINGS
    stored = _read(path)
    given = dict(given)
    before = None if stored is None else _restored(stored, kind, path)
    sources = given.get("answers", () if before is None else before.answers)
    if isinstance(sources, tuple) and sources:
        others = _others(sources)
        given = _with_answers(given, others, before)
        if folder.resolve() in (other.folder.resolve() for other in others):
            msg = f"{folder} cannot use its own answers as another run's; leave out --answers"
            raise ConfigError(msg)
    settings = kind(**given) if before is None else _changed(before, given, folder)  # type: ignore[arg-type]
    settings.check()
    folder.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in as_json(settings).items() if k not in PER_CALL}
    with replacing(path) as file:
        file.write(json.dumps({_METHOD: kind.method} | kept, indent=1).encode())
    return settings


def _changed(before: S, given: dict[str, object], folder: Path) -> S:
    changed = [
        f"{flag(name)} was {getattr(before, name)!r}, now {value!r}"
        for name, value in given.items()
        if name not in FREE | PER_CALL and value != getattr(before, name)
    ]
    if changed:
        msg = (
            f"{folder} holds a run with other settings: {'; '.join(changed)}; only "
            f"{', '.join(map(flag, sorted(FREE | PER_CALL)))} may change between calls. Leave these flags "
            "out, or use another run folder."
        )
        raise ConfigError(msg)
    if "steps" in given:  # the two say the same thing in two ways
        given.setdefault("train_minutes", None)
    elif "train_minutes" in given:
        given.setdefault("steps", None)
    return replace(before, **given)  # type: ignore[arg-type]


def _with_answers(
    given: dict[str, object], others: list[_Other], before: TrainSettings | None
) -> dict[str, object]:
    """This call's settings with those that belong to other runs' answers."""
    said = sorted(OF_ANSWERS & given.keys())
    if said:
        flags = ", ".join(map(flag, said))
        msg = (
            f"the answers of {others[0].folder} are used as they are, so {flags} cannot be chosen; leave out "
            "these flags, or leave out --answers and generate answers of this run's own"
        )
        raise ConfigError(msg)
    found = dict(given)
    found["answers"] = tuple(other.folder for other in others)
    values = others[0].values
    found |= {name: values[name] for name in OF_ANSWERS & values.keys()}
    if before is None and "model" in values:
        found.setdefault("model", values["model"])
    return found


def _others(sources: tuple[Path, ...]) -> list[_Other]:
    """The runs that made the answers, each once, in the order named."""
    named = [other for source in sources for other in _owners(source)]
    others = list({other.folder.resolve(): other for other in named}.values())
    first = others[0]
    for other in others[1:]:
        wrong = [
            f"{name} {other.values.get(name)!r} instead of {first.values.get(name)!r}"
            for name in sorted(OF_ANSWERS - _OWN)
            if other.values.get(name) != first.values.get(name)
        ]
        if wrong:
            msg = (
                f"the answers of {other.folder} were made otherwise than those of {first.folder}: "
                f"{'; '.join(wrong)}. Answers of several runs are used together if nothing but "
                "prompts, seed and number differs; name fewer runs, or generate again."
            )
            raise ConfigError(msg)
    _refuse_twins(others)
    return others


def _refuse_twins(others: list[_Other]) -> None:
    """Refuse runs that made the same answers: equal prompts and an equal seed."""
    seen: dict[object, _Other] = {}
    for other in others:
        values = other.values
        same_files = values.get("prompts") if values.get("own_share") == 0.0 else None
        twin = seen.setdefault((values.get("seed"), same_files), other)
        if twin is not other:
            msg = (
                f"{twin.folder} and {other.folder} made their answers with the same seed "
                f"{values.get('seed')}, so they say the same; leave one of them out, or generate "
                "with another --seed"
            )
            raise ConfigError(msg)


def _owners(source: Path) -> list[_Other]:
    """The runs that made a run's answers: itself, or those that it borrows from."""
    values = _read(source / SETTINGS)
    if values is None:
        msg = (
            f"{source} is no folder of a run: it has no {SETTINGS}; --answers names the folder that "
            "an earlier run was given, with its prompts and answers"
        )
        raise ConfigError(msg)
    if values.get("answers"):
        return [owner for lender in values["answers"] for owner in _owners(Path(lender))]
    return [_Other(folder=source, values=_typed(values, TrainSettings()))]


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a settings file; None if there is no file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(values, dict):
        raise _damaged(path, TypeError("no object"))
    return values


def _restored(values: dict[str, Any], kind: type[S], path: Path) -> S:
    method = values.get(_METHOD, _FIRST_METHOD)
    if method != kind.method:
        msg = (
            f"{path.parent} holds a run that trains {method}, and this call trains {kind.method}; "
            f"use another folder, with --answers {path.parent} to train on the same answers"
        )
        raise ConfigError(msg)
    unknown = values.keys() - {f.name for f in fields(kind)} - {_METHOD}
    if unknown:
        raise _damaged(path, KeyError(*unknown))
    try:
        return kind(**_typed(values, kind()))
    except TypeError as error:
        raise _damaged(path, error) from error


def _typed(values: dict[str, Any], defaults: TrainSettings) -> dict[str, Any]:
    """JSON's types as those of the fields; what `defaults` has no field for is left out."""
    found: dict[str, Any] = {}
    for item in fields(defaults):
        if item.name not in values:
            continue
        value = values[item.name]
        if isinstance(item.default, tuple):
            value = tuple(Path(v) if item.name in ("prompts", "answers") else v for v in value)
        elif item.name == "init" and value is not None:
            value = Path(value)
        found[item.name] = value
    return found


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged ({error!r}); use another run folder")
