"""What `bench` and `check` share: engines that hold one model, prompts as tokens, records on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

from paceline.bench.run import Task
from paceline.cli.console import waiting
from paceline.core.errors import RequestError

if TYPE_CHECKING:
    from paceline.api.tokenizer import Tokenizer
    from paceline.bench.workload import Workload
    from paceline.core.config import EngineConfig
    from paceline.engine.engine import Engine
    from paceline.engine.fitness import Probes
    from paceline.models import LoadedModel

_MAX_SHOWN = 3
RECORD_HELP = "the JSON record as the last line of stdout on a terminal too, where it is left out"
AsJson: TypeAlias = Annotated[bool, Parameter(name="--json", negative="", help=RECORD_HELP)]


class Workbench:
    """Builds engines that differ in their drafter only, one at a time, over one loaded model."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None

    @contextmanager
    def engine(
        self, config: EngineConfig, probes: Callable[[], Probes] | None = None
    ) -> Iterator[Engine]:
        """An engine for the time of the context; `probes` as for `Engine.build`."""
        from paceline.engine.engine import Engine

        with waiting("loading", "capturing CUDA graphs") as bar:
            engine = Engine.build(config, loaded=self._loaded, probes=probes, progress=bar)
        self._loaded = engine.loaded
        try:
            yield engine
        finally:
            engine.close()


def tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer of a config's model."""
    from paceline import models
    from paceline.api.tokenizer import Tokenizer

    return Tokenizer.from_files(models.resolve(config.model).path)


def encode(workload: Workload, tokens: Tokenizer) -> list[Task]:
    """Prompts as token ids: through the chat template, or as they are if they have no messages.

    Raises:
        TemplateError: the model has no chat template.
        RequestError: a prompt has no tokens.
    """
    return [
        Task(
            key=p.key,
            group=p.group,
            prompt_ids=tokens.encode_chat(p.messages)
            if p.messages
            else tokens.encode_prompt(p.text),
        )
        for p in workload.prompts
    ]


def check_lengths(tasks: Sequence[Task], max_len: int, most: int) -> None:
    """Refuse before a long run what would fail in the midst of it.

    Args:
        tasks: what is to be answered.
        max_len: the context window, tokens.
        most: the longest window that the model can have.

    Raises:
        RequestError: prompts that leave no room for an answer.
    """
    long = [t for t in tasks if len(t.prompt_ids) >= max_len]
    if long:
        shown = ", ".join(f"{t.key} ({len(t.prompt_ids)} tokens)" for t in long[:_MAX_SHOWN])
        more = f" and {len(long) - _MAX_SHOWN} more" if len(long) > _MAX_SHOWN else ""
        remedy = f"raise --max-len (the model's limit is {most}), or leave them out"
        if all(len(t.prompt_ids) >= most for t in long):
            remedy = (
                f"the model can have no longer one than {most}: leave them out, or shorten them"
            )
        msg = (
            f"the context window of {max_len} tokens must hold prompt and answer, but these "
            f"prompts fill it: {shown}{more}; {remedy}"
        )
        raise RequestError(msg)


def stop_ids(tokens: Tokenizer, engine: Engine) -> frozenset[int]:
    """Ids that end an answer."""
    return frozenset(tokens.eos_token_ids) | frozenset(engine.model_config.eos_token_ids)


def command_line() -> list[str]:
    """How this run was started, for records."""
    return ["paceline", *sys.argv[1:]]


def publish(record: Mapping[str, object], out: Path | None, *, as_json: bool = False) -> None:
    """Write a record as the last line of stdout, and readably to a file if one is named.

    A terminal gets it only where `as_json` asks for it: it is one line of thousands of characters.
    """
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
        out.write_text(text + "\n", encoding="utf-8")
    if as_json or not sys.stdout.isatty():
        print(json.dumps(record, ensure_ascii=False, allow_nan=False))
