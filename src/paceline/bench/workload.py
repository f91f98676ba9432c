"""Workload: prompts from JSONL files, in groups. Knows the shapes of the sets that people use.

    {"turns": [...], "category": ...}      Spec-Bench, MT-Bench: the first turn
    {"messages": [...], "category": ...}   SPEED-Bench and other chats: up to the first user message
    {"question": ...}                      GSM8K
    {"prompt": ..., "task_id": ...}        HumanEval, or anything plain

Not for: tokens and chat templates (whoever runs the workload encodes it).
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from paceline.core.errors import ConfigError

# Spec-Bench (arXiv 2401.07851) counts MT-Bench's eight categories as one group of six.
_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
MT_BENCH_GROUP = "mt_bench"
_GZIP = b"\x1f\x8b"
_SHAPES = '"turns", "messages", "question" or "prompt"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: a conversation so far, or plain text."""

    key: str  # names it in records
    group: str
    category: str
    messages: Sequence[Mapping[str, str]] = ()  # empty: `text` is meant
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts to be run, and a digest of exactly these."""

    prompts: tuple[Prompt, ...]
    sources: tuple[str, ...]  # file names

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts' content and grouping, 16 hexadecimal digits."""
        content = [[p.group, list(p.messages), p.text] for p in self.prompts]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups in order of first appearance."""
        return tuple(dict.fromkeys(p.group for p in self.prompts))


def load(
    paths: Sequence[Path],
    *,
    categories: Sequence[str] = (),
    limit: int | None = None,
    raw: bool = False,
) -> Workload:
    """Read prompts.

    Args:
        paths: JSONL files, gzipped or not.
        categories: keep only these groups or categories; empty: all.
        limit: keep at most this many of each group: the first ones, spread evenly over the group's
            categories.
        raw: what a user says is the prompt itself, not a message for a chat template.

    Raises:
        ConfigError: a file is missing or holds a line of no known shape; a category does not
            occur; nothing is left. All with what is there.
    """
    found = [p for path in paths for p in _read(path, raw=raw)]
    if categories:
        known = {p.group for p in found} | {p.category for p in found}
        missing = [c for c in categories if c not in known]
        if missing:
            msg = (
                f"no prompt has the category {', '.join(map(repr, missing))}; categories here: "
                + ", ".join(sorted(known))
            )
            raise ConfigError(msg)
        found = [p for p in found if p.group in categories or p.category in categories]
    kept = found if limit is None else _limited(found, limit)
    if not kept:
        names = ", ".join(map(str, paths))
        msg = f"no prompts in {names}; at least one is needed: check the file and the limit"
        raise ConfigError(msg)
    return Workload(prompts=tuple(kept), sources=tuple(path.name for path in paths))


def _limited(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """Keep `limit` prompts per group, categories taking turns; the files' order stays."""
    turns: dict[tuple[str, str], int] = {}
    order: list[tuple[int, int]] = []  # (turn within its category, place in the files)
    for place, prompt in enumerate(prompts):
        turn = turns.get((prompt.group, prompt.category), 0)
        turns[prompt.group, prompt.category] = turn + 1
        order.append((turn, place))
    taken: dict[str, int] = {}
    kept = []
    for _, place in sorted(order):
        group = prompts[place].group
        taken[group] = taken.get(group, 0) + 1
        if taken[group] <= limit:
            kept.append(place)
    return [prompts[place] for place in sorted(kept)]


def plain(texts: Iterable[str], *, group: str = "prompt") -> Workload:
    """A workload of user messages given as text."""
    prompts = tuple(
        Prompt(
            key=f"{group}/{i}",
            group=group,
            category=group,
            messages=({"role": "user", "content": text},),
        )
        for i, text in enumerate(texts)
    )
    return Workload(prompts=prompts, sources=())


def _read(path: Path, *, raw: bool) -> list[Prompt]:
    try:
        data = path.read_bytes()
        if data[:2] == _GZIP:
            data = gzip.decompress(data)
        lines = data.decode("utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        msg = f"cannot read prompts from {path}: {error}; give a JSONL file, gzipped or not"
        raise ConfigError(msg) from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(json.loads(line), path, number, raw=raw))
        except (json.JSONDecodeError, _ShapeError) as error:
            msg = (
                f"{path}, line {number}: {error}; each line is a JSON object with {_SHAPES}, and "
                "optionally a category"
            )
            raise ConfigError(msg) from error
    return prompts


class _ShapeError(Exception):
    """A line that is JSON but no prompt."""


def _parse(row: object, path: Path, number: int, *, raw: bool) -> Prompt:
    if not isinstance(row, dict):
        msg = "no JSON object"
        raise _ShapeError(msg)
    row = cast("dict[str, object]", row)
    task = row.get("task_id")
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json").lower()
    fallback = task.split("/")[0].lower() if isinstance(task, str) and "/" in task else stem
    category = row.get("category") or row.get("group") or fallback
    if not isinstance(category, str):
        msg = "its category is no text"
        raise _ShapeError(msg)
    key = row.get("question_id", task)
    messages = _messages(row)
    text = ""
    if raw:
        text, messages = messages[-1]["content"], []
    return Prompt(
        key=f"{stem}/{number if key is None else key}",
        group=MT_BENCH_GROUP if category in _MT_BENCH and "turns" in row else category,
        category=category,
        messages=tuple(messages),
        text=text,
    )


def _messages(row: Mapping[str, object]) -> list[Mapping[str, str]]:
    """The conversation up to and including its first user message."""
    turns, messages = row.get("turns"), row.get("messages")
    if isinstance(messages, list):
        opening: list[Mapping[str, str]] = []
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if not isinstance(content, str) or not isinstance(message.get("role"), str):
                msg = "a message without role or text content"
                raise _ShapeError(msg)
            opening.append({"role": message["role"], "content": content})
            if message["role"] == "user":
                return opening
        msg = "no message of a user"
        raise _ShapeError(msg)
    text = turns[0] if isinstance(turns, list) and turns else None
    text = text or row.get("question") or row.get("prompt")
    if not isinstance(text, str) or not text:
        msg = f"none of {_SHAPES} holds a prompt"
        raise _ShapeError(msg)
    return [{"role": "user", "content": text}]
