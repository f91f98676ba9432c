"""Settings of a run: those of its first call, what later calls change, and what comes with answers.

A run may use the prompts and answers of another one (`--answers`); then what those are, temperatures and
lengths for example, is as that run's settings say, and is not said again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.core.errors import ConfigError
from paceline.models.atomic import replacing
from paceline.train.settings import FREE, OF_ANSWERS, PER_CALL, TrainSettings, as_json

S = TypeVar("S", bound=TrainSettings)

SETTINGS: Final = "settings.json"
_METHOD = "method"
_FIRST_METHOD = "dflash"  # of runs from before there was another, which do not say


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """What is taken from the run whose answers are used."""

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
            and it has none.
    """
    path = folder / SETTINGS
    stored = _read(path)
    given = dict(given)
    before = None if stored is None else _restored(stored, kind, path)
    source = given.get("answers", None if before is None else before.answers)
    if isinstance(source, Path):
        given = _with_answers(given, source, before)
        if Path(str(given["answers"])).resolve() == folder.resolve():
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
        f"{name} was {getattr(before, name)!r}, now {value!r}"
        for name, value in given.items()
        if name not in FREE | PER_CALL and value != getattr(before, name)
    ]
    if changed:
        msg = (
            f"{folder} holds a run with other settings: {'; '.join(changed)}; only "
            f"{', '.join(sorted(FREE | PER_CALL))} may change between calls. Leave these flags "
            "out, or use another run folder."
        )
        raise ConfigError(msg)
    if "steps" in given:  # the two say the same thing in two ways
        given.setdefault("train_minutes", None)
    elif "train_minutes" in given:
        given.setdefault("steps", None)
    return replace(before, **given)  # type: ignore[arg-type]


def _with_answers(
    given: dict[str, object], source: Path, before: TrainSettings | None
) -> dict[str, object]:
    """This call's settings with those that belong to another run's answers."""
    said = sorted(OF_ANSWERS & given.keys())
    if said:
        flags = ", ".join("--" + name.replace("_", "-") for name in said)
        msg = (
            f"the answers of {source} are used as they are, so {flags} cannot be chosen; leave out "
            "these flags, or leave out --answers and generate answers of this run's own"
        )
        raise ConfigError(msg)
    other = _other(source)
    found = dict(given)
    found["answers"] = other.folder
    found |= {name: other.values[name] for name in OF_ANSWERS & other.values.keys()}
    if before is None and "model" in other.values:
        found.setdefault("model", other.values["model"])
    return found


def _other(source: Path) -> _Other:
    """The run that made the answers, which may be one that the named run itself borrows from."""
    values = _read(source / SETTINGS)
    if values is None:
        msg = (
            f"{source} is no folder of a run: it has no {SETTINGS}; --answers names the folder that "
            "an earlier run was given, with its prompts and answers"
        )
        raise ConfigError(msg)
    borrowed = values.get("answers")
    if isinstance(borrowed, str):
        return _other(Path(borrowed))
    return _Other(folder=source, values=_typed(values, TrainSettings()))


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
            value = tuple(Path(v) if item.name == "prompts" else v for v in value)
        elif item.name in ("init", "answers") and value is not None:
            value = Path(value)
        found[item.name] = value
    return found


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged ({error!r}); use another run folder")
