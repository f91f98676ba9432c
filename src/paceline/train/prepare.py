"""Prompts as token ids: files are read once, line by line, through the target's chat template.

Which prompts are held out is decided here, by a hash of their token ids, so it depends on nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.core.errors import ConfigError, RequestError
from paceline.models.atomic import replacing
from paceline.train.prompts import Broken, Message, Reading, read_prompts
from paceline.train.shards import Doc, ShardWriter

log = logging.getLogger(__name__)

_FACTS = "facts.json"
_MARK = "\ue000prompt\ue000"  # stands for a user's text where a template is taken apart


class ChatTokenizer(Protocol):
    """What training asks of a tokenizer."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end an answer."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to the opening of the assistant's message."""
        ...

    def chat_text(self, messages: Sequence[Message]) -> str:
        """The same as text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """What a run's prompt files held, for resuming and for the card."""

    files: dict[str, str]  # name -> SHA-256
    num_prompts: int
    num_too_long: int
    num_broken: int
    sources: dict[str, int]  # "source (licence)" -> prompts


def together(parts: Sequence[PromptFacts]) -> PromptFacts:
    """Facts about the prompts of several runs, as of one; the same files count once."""
    apart = list({tuple(sorted(part.files.items())): part for part in parts}.values())
    sources: Counter[str] = Counter()
    for part in apart:
        sources.update(part.sources)
    return PromptFacts(
        files={name: digest for part in apart for name, digest in part.files.items()},
        num_prompts=sum(part.num_prompts for part in apart),
        num_too_long=sum(part.num_too_long for part in apart),
        num_broken=sum(part.num_broken for part in apart),
        sources=dict(sources),
    )


def is_held_out(prompt_ids: Sequence[int], share: float) -> bool:
    """Whether a prompt is kept for measuring: its hash, as a fraction, is below `share`."""
    data = np.array(prompt_ids, dtype="<i4").tobytes()
    head = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(head, "little") < share * 2.0**64


def user_turn_header(tokenizer: ChatTokenizer) -> list[int]:
    """Token ids of the chat template up to where a user's first message begins."""
    text = tokenizer.chat_text([{"role": "user", "content": _MARK}])
    head, found, _ = text.partition(_MARK)
    if not found:
        msg = (
            "the chat template does not show the user's text as it is, so the target cannot make "
            "prompts of its own; use prompts from files only, with --own-share 0"
        )
        raise ConfigError(msg)
    return tokenizer.encode(head, add_special_tokens=False)


def prepare(
    paths: Sequence[Path],
    folder: Path,
    tokenizer: ChatTokenizer,
    *,
    vocab_size: int,
    broken: Broken,
    max_tokens: int,
    held_out: float,
) -> PromptFacts:
    """Turn prompt files into shards of token ids; at once if that was done before.

    Args:
        paths: JSONL files.
        folder: where the shards go; complete or absent.
        tokenizer: the target's.
        vocab_size: the target's.
        broken: see `read_prompts`.
        max_tokens: longer prompts are left out and counted.
        held_out: share kept for measuring.

    Raises:
        ConfigError: see `read_prompts`; every prompt is too long; the folder was made from others.
        OSError: the folder can't be written.
    """
    files = {path.name: _digest(path) for path in paths}
    about = {"max_tokens": max_tokens, "held_out": held_out}
    known = facts(folder)
    if known is not None:
        if known.files != files:
            msg = (
                f"{folder} was made from {', '.join(known.files) or 'no files'}, and this call "
                f"names {', '.join(files) or 'none'} (or their content has changed); a run has one "
                "set of prompts. Name the same files, or use another run folder."
            )
            raise ConfigError(msg)
        return known
    fresh = partial_folder(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    writer = ShardWriter(fresh, vocab_size, about)
    reading, sources, too_long = Reading(), Counter[str](), 0
    for prompt in read_prompts(paths, broken=broken, reading=reading) if paths else ():
        try:
            ids = tokenizer.encode_chat(prompt.messages)
        except RequestError as error:  # the template refuses these roles
            reading.reject(prompt, str(error))
            continue
        if len(ids) > max_tokens:
            too_long += 1
            continue
        sources[f"{prompt.source} ({prompt.licence})"] += 1
        kept = is_held_out(ids, held_out)
        writer.add(Doc(token_ids=ids, num_prompt=len(ids), held_out=kept, group=prompt.group))
    if paths and not sources:
        msg = (
            f"all {too_long} prompts are longer than {max_tokens} tokens with the chat template; "
            "raise --max-prompt-tokens, or name other files"
        )
        raise ConfigError(msg)
    writer.flush()
    made = PromptFacts(
        files=files,
        num_prompts=sum(sources.values()),
        num_too_long=too_long,
        num_broken=len(reading.broken),
        sources=dict(sources.most_common()),
    )
    with replacing(fresh / _FACTS) as file:
        values = {name: getattr(made, name) for name in PromptFacts.__dataclass_fields__}
        file.write(json.dumps(values, indent=1, ensure_ascii=False).encode())
    fresh.rename(folder)
    log.info(
        "%d prompts prepared, %d left out as too long, %d broken lines",
        made.num_prompts,
        made.num_too_long,
        made.num_broken,
    )
    return made


def partial_folder(folder: Path) -> Path:
    """Where `prepare` makes what becomes `folder` once it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def facts(folder: Path) -> PromptFacts | None:
    """What `prepare` wrote down; None if it has not run."""
    path = folder / _FACTS
    if not path.is_file():
        return None
    try:
        return PromptFacts(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        msg = f"{path} is damaged ({error}); delete the folder {folder} and run again"
        raise ConfigError(msg) from error


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        msg = f"cannot read the prompts in {path}: {error}; check the path"
        raise ConfigError(msg) from error
