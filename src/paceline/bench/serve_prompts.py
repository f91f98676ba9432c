"""What is asked of a server: prompts of a workload, or random token ids, as request bodies."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.bench.serve_client import Endpoint
from paceline.bench.workload import Prompt, Workload
from paceline.core.errors import ConfigError

# Ids that are ordinary tokens in every usual vocabulary: special tokens and single bytes come first
# or last, and no usual vocabulary is smaller.
LOWEST_ID, ABOVE_IDS = 1000, 20_000
# A body's keys that the measurement itself needs.
_OURS = ("stream", "stream_options", "messages", "prompt", "n", "best_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, without what all requests of a run share."""

    key: str
    group: str
    content: Mapping[str, object]  # "messages" or "prompt", and what else is this request's own


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompts:
    """Prompts of random token ids, and answers of set lengths.

    Lengths are drawn evenly from length x (1 - ratio) to length x (1 + ratio), as vLLM does.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def calls(self, num: int, seed: int) -> list[Call]:
        """`num` requests for the completions endpoint."""
        drawn = random.Random(seed)  # noqa: S311 (no secret)
        return [
            Call(
                key=f"random/{i}",
                group="random",
                content={
                    "prompt": drawn.choices(
                        range(LOWEST_ID, ABOVE_IDS), k=self._length(drawn, self.input_len)
                    ),
                    "max_tokens": self._length(drawn, self.output_len),
                    "ignore_eos": True,
                },
            )
            for i in range(num)
        ]

    def _length(self, drawn: random.Random, mean: int) -> int:
        low, high = int(mean * (1 - self.range_ratio)), int(mean * (1 + self.range_ratio))
        return max(1, drawn.randint(low, high))


def chosen(workload: Workload, num: int, seed: int) -> Workload:
    """At most `num` prompts of a workload, mixed: groups take turns, and categories within a group's turns."""
    drawn = random.Random(seed)  # noqa: S311 (no secret)
    groups: dict[str, dict[str, list[Prompt]]] = {}
    for prompt in workload.prompts:
        groups.setdefault(prompt.group, {}).setdefault(prompt.category, []).append(prompt)
    queues = []
    for categories in groups.values():
        piles = list(categories.values())
        for pile in piles:
            drawn.shuffle(pile)
        drawn.shuffle(piles)
        queues.append(_by_turns(piles))
    return replace(workload, prompts=tuple(_by_turns(queues)[:num]))


def _by_turns(piles: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One of each pile, then the next of each, until all are used up."""
    depth = max(map(len, piles), default=0)
    return [pile[i] for i in range(depth) for pile in piles if i < len(pile)]


def calls_of(workload: Workload, num: int) -> list[Call]:
    """`num` requests; prompts come again from the first one where there are fewer."""
    made = [
        Call(
            key=p.key,
            group=p.group,
            content={"messages": list(p.messages)} if p.messages else {"prompt": p.text},
        )
        for p in workload.prompts
    ]
    return [made[i % len(made)] for i in range(num)]


def check_extra(extra: Mapping[str, object], flag: str) -> None:
    """Refuse what would make another measurement of it.

    Raises:
        ConfigError: a key that the measurement sets itself.
    """
    taken = [key for key in extra if key in _OURS]
    if taken:
        msg = (
            f"{flag} sets {', '.join(map(repr, taken))}, which the measurement sets itself (one streamed "
            "answer per request, with usage); leave it out"
        )
        raise ConfigError(msg)


def bodies(
    calls: Sequence[Call],
    *,
    model: str,
    endpoint: Endpoint,
    max_tokens: int,
    temperature: float,
    seed: int,
    extra: Mapping[str, object],
) -> list[bytes]:
    """Request bodies as JSON, made before the clock runs.

    Args:
        calls: what is asked.
        model: the model's name.
        endpoint: which one; a prompt as text or ids is for "completions" only.
        max_tokens: of an answer whose call does not say.
        temperature: of sampling.
        seed: of the first request; the others follow.
        extra: more keys, the same for all requests; null takes a key out.
    """
    made = []
    for i, call in enumerate(calls):
        assert ("messages" in call.content) == (endpoint == "chat"), "prompts fit their endpoint"
        body: dict[str, object] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed + i,
            "stream": True,
            "stream_options": {"include_usage": True},
            **call.content,
            **extra,
        }
        kept = {key: value for key, value in body.items() if value is not None}
        made.append(json.dumps(kept, ensure_ascii=False).encode())
    return made
