"""Log-probabilities of prompts' own tokens, as prefill passes give them; for requests that ask.

The pass over position p knows what it expects at p + 1, so a prompt's first token has none. A prompt that
is scored is computed as a whole: what the prefix cache holds of it has no logits any more.

Letters: S scored tokens of a step, H hidden size, V vocabulary, K most alternatives asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.request import TokenLogprobs
from paceline.sample.sampler import CHUNK, scored

if TYPE_CHECKING:
    from paceline.engine.plan import Chunk

    Place = tuple[Chunk, int, int]  # chunk, the token's position in the prompt, its row in the pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Of the tokens that `places` lists, under the unprocessed logits."""

    logprobs: Tensor  # [S] float32 or wider
    ranks: Tensor  # [S] int64: how many tokens are likelier, plus 1
    top_ids: Tensor  # [S, K] int64, best first
    top_logprobs: Tensor  # [S, K]


def places(chunks: Sequence[Chunk]) -> Iterator[Place]:
    """The prompt tokens that a step scores, and which row of its hidden states expects each."""
    first = 0
    for chunk in chunks:
        if chunk.scores:
            last = min(chunk.start + chunk.count, chunk.sequence.num_prompt - 1)
            for position in range(chunk.start + 1, last + 1):
                yield chunk, position, first + position - 1 - chunk.start
        first += chunk.count


def scores_of(
    chunks: Sequence[Chunk], hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> PromptScores | None:
    """Score the tokens of a step; device operations only, a part of the positions at a time.

    Args:
        chunks: of the step.
        hidden: [T, H] final hidden states of its pass, one chunk after the other.
        head: hidden [m, H] -> logits [m, V], float32 or wider.

    Returns:
        None if nobody asks.
    """
    found = list(places(chunks))
    if not found:
        return None
    num_top = max(chunk.sequence.request.prompt_logprobs or 0 for chunk, _, _ in found)
    device = hidden.device
    rows = torch.tensor([row for _, _, row in found], device=device)
    tokens = torch.tensor([chunk.sequence.tokens[at] for chunk, at, _ in found], device=device)
    parts = []
    for start in range(0, len(found), CHUNK):
        logits = head(hidden[rows[start : start + CHUNK]])
        most = min(num_top, logits.shape[1])
        own = tokens[start : start + CHUNK]
        ranks = (logits > logits.gather(1, own.unsqueeze(1))).sum(1) + 1
        parts.append((ranks, *scored(logits, own, most)))
    ranks, logprobs, top_ids, top_logprobs = (torch.cat(each) for each in zip(*parts, strict=True))
    return PromptScores(logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs)


def keep(chunks: Sequence[Chunk], scores: PromptScores | None) -> None:
    """Note a step's scores, if it has any, with the sequences that they belong to; reads the tensors."""
    if scores is None:
        return
    logprobs, ranks = scores.logprobs.tolist(), scores.ranks.tolist()
    top_ids, top_logprobs = scores.top_ids.tolist(), scores.top_logprobs.tolist()
    for i, (chunk, position, _) in enumerate(places(chunks)):
        wanted = chunk.sequence.request.prompt_logprobs or 0
        chunk.sequence.prompt_scores[position] = TokenLogprobs(
            logprob=logprobs[i],
            rank=ranks[i],
            top_ids=tuple(top_ids[i][:wanted]),
            top_logprobs=tuple(top_logprobs[i][:wanted]),
        )
