"""Prompts from JSONL files: one object a line, gzipped or not, read line by line.

    {"id": "p000001", "source": "gsm8k-train", "licence": "MIT", "category": "math",
     "messages": [{"role": "user", "content": "..."}]}

Only `messages` must be there, and its last message must be the user's: the target answers it. Instead of
`messages` there may be what sets of prompts have: `turns` (the first one counts), `question` or `prompt`.

Not here: token ids (`prepare.py`) and the prompts that the target makes itself (`generate.py`).
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from paceline.core.errors import ConfigError

log = logging.getLogger(__name__)

Broken: TypeAlias = Literal["refuse", "skip"]
Message: TypeAlias = Mapping[str, object]

_SHOWN = 5  # broken lines that a message quotes
_SHAPE = '{"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}'
_PLAIN = ("turns", "question", "prompt")  # keys of a user's text, the first that is there counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation that waits for its answer."""

    file: Path
    line: int  # from 1
    messages: Sequence[Message]
    group: str  # category of the line, for tables
    source: str  # where the line says it comes from
    licence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLine:
    """A line that is no prompt, and why."""

    file: Path
    line: int  # from 1
    why: str


@dataclass(slots=True)
class Reading:
    """What became of the lines read so far."""

    num_prompts: int = 0
    broken: list[BrokenLine] = field(default_factory=list)

    def reject(self, prompt: Prompt, why: str) -> None:
        """Count a prompt as broken after all, while the reading goes on."""
        self.num_prompts -= 1
        self.broken.append(BrokenLine(file=prompt.file, line=prompt.line, why=why))

    def describe(self) -> str:
        """The broken lines in words."""
        shown = [f"{b.file}:{b.line}: {b.why}" for b in self.broken[:_SHOWN]]
        more = len(self.broken) - len(shown)
        listed = "\n".join(f"  - {line}" for line in shown)
        return listed + (f"\n  - and {more} more" if more else "")


def read_prompts(paths: Sequence[Path], *, broken: Broken, reading: Reading) -> Iterator[Prompt]:
    """Read prompts one by one; never more than a line is held.

    Args:
        paths: JSONL files.
        broken: what a line that is no prompt means: "refuse" raises, once all files were read, so
            that the message counts them all; "skip" leaves it out, with a warning at the end.
        reading: filled on the way.

    Raises:
        ConfigError: a file cannot be read, lines are broken and `broken` is "refuse", or there is
            no prompt at all.
    """
    for path in paths:
        for number, text in _lines(path):
            if not text.strip():
                continue
            parsed = _parse(path, number, text)
            if isinstance(parsed, str):
                reading.broken.append(BrokenLine(file=path, line=number, why=parsed))
                continue
            reading.num_prompts += 1
            yield parsed
    count = len(reading.broken)
    if count and broken == "refuse":
        msg = (
            f"{count} of {count + reading.num_prompts} lines are no prompts:\n"
            f"{reading.describe()}\nA line must be an object such as {_SHAPE}. Mend the file, or "
            "leave these lines out with --broken skip."
        )
        raise ConfigError(msg)
    if not reading.num_prompts:
        named = ", ".join(str(p) for p in paths)
        found = f"only broken lines:\n{reading.describe()}\n" if count else "no lines: "
        msg = (
            f"no prompts: {named} {'hold' if len(paths) > 1 else 'holds'} {found}at least one line "
            f"such as {_SHAPE} is needed. Name another file."
        )
        raise ConfigError(msg)
    if count:
        log.warning("%d broken lines were skipped:\n%s", count, reading.describe())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a file; bytes, so that one bad line does not end the reading."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if zipped else raw
            yield from enumerate(stream, start=1)
    except (OSError, EOFError, zlib.error) as error:
        msg = (
            f"cannot read the prompts in {path}: {error}; a JSONL file, gzipped or not, is needed; "
            "check the path, or download the file again"
        )
        raise ConfigError(msg) from error


def _parse(file: Path, number: int, text: bytes) -> Prompt | str:
    """A prompt, or why the line is none."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        return f"no JSON ({error})"
    if not isinstance(line, dict):
        return f"a JSON {type(line).__name__}, not an object"
    messages = line["messages"] if "messages" in line else _opening(line)
    if not isinstance(messages, list) or not messages:
        return 'no list of messages, and no text in "turns", "question" or "prompt"'
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"message {i} is no object"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
            return f"message {i} has no role or no content"
        try:
            content.encode()
        except UnicodeEncodeError:
            return f"message {i} holds unpaired surrogates"
    if messages[-1]["role"] != "user":
        return f"the last message is the {messages[-1]['role']}'s, so there is nothing to answer"
    return Prompt(
        file=file,
        line=number,
        messages=messages,
        group=str(line.get("category") or line.get("source") or "file"),
        source=str(line.get("source") or "file"),
        licence=str(line.get("licence") or line.get("license") or "not stated"),
    )


def _opening(line: Mapping[str, object]) -> list[Message] | None:
    """What a user says in a line without messages, as a conversation; None: nothing."""
    said = next((line[key] for key in _PLAIN if line.get(key)), None)
    text = said[0] if isinstance(said, list) else said
    return [{"role": "user", "content": text}] if isinstance(text, str) else None
