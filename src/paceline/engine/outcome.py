"""What a step's tokens mean for their sequence: cut at the first stop, limits, logprobs, the tree shown.

The first event in the order of the tokens wins: a stop id, a stop string, the length limit, or logits
that allow no choice. What lies past it is never shown, counted, learned from or cached.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.core.request import Fault, FinishReason, TokenLogprobs, VerifiedTree
from paceline.core.tree import NOT_FINITE, Proposal
from paceline.engine.guides import Failure, Guide, ids_of
from paceline.engine.sequence import Sequence
from paceline.engine.step_tensors import StepTensors

log = logging.getLogger(__name__)

_SHOWN = 8  # token ids that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The tokens that are kept, and why the sequence ends, if it does."""

    tokens: list[int]
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    fault: Fault | None = None  # with an error


def cut(sequence: Sequence, emitted: list[int]) -> Cut:
    """Cut newly emitted tokens (not yet appended to `sequence.tokens`) at the first stop.

    A stop matcher that raises, or logits that are not finite (`emitted` ends with NOT_FINITE), end
    their own request with an error; others are not disturbed.
    """
    failed = emitted[-1] == NOT_FINITE
    if failed:
        emitted = emitted[:-1]
        if not emitted:
            return _no_choice(sequence, [])
    kept = sequence.first_stop(emitted)
    tokens = emitted if kept is None else emitted[:kept]
    stop_id = tokens[-1] if kept is not None else None
    if sequence.request.stopper is not None:
        try:
            matched = sequence.request.stopper.feed(tokens)
        except Exception as failure:
            log.exception("request %s: its stop matcher failed", sequence.request.id)
            return _failed(tokens, f"stop matcher failed: {failure}", Fault.ENGINE)
        if matched is not None:
            if matched < len(tokens):
                stop_id = None
            return Cut(tokens=tokens[:matched], reason=FinishReason.STOP, stop_token_id=stop_id)
    if kept is not None:
        return Cut(tokens=tokens, reason=FinishReason.STOP, stop_token_id=stop_id)
    if len(sequence.tokens) + len(tokens) >= sequence.limit:
        return Cut(tokens=tokens, reason=FinishReason.LENGTH)
    if failed:
        return _no_choice(sequence, tokens)
    return Cut(tokens=tokens)


def followed(sequence: Sequence, guide: Guide, kept: Cut) -> Cut:
    """Move a request's grammar on by the kept tokens; one that does not take them ends its request."""
    taken = guide.follow(kept.tokens)
    if taken == len(kept.tokens):
        return kept
    failure = guide.allowed_after(kept.tokens[taken:])
    if not isinstance(failure, Failure):
        failure = Failure("it did not take a token that it allows", Fault.ENGINE)
    return _grammar_failed(sequence, kept.tokens[:taken], failure)


def _no_choice(sequence: Sequence, tokens: list[int]) -> Cut:
    """The end of a request of which nothing can be chosen after these tokens of a step."""
    if sequence.guide is not None:
        mask = sequence.guide.allowed_after(tokens)
        if isinstance(mask, Failure):
            return _grammar_failed(sequence, tokens, mask)
        ids = ids_of(mask)
        params = sequence.request.params
        allowed = params.allowed_token_ids
        usable = set(ids if allowed is None else allowed) - set(params.banned_token_ids)
        if usable.isdisjoint(ids):
            return _failed(tokens, _contradiction(sequence, tokens, ids), Fault.REQUEST)
    known = len(sequence.tokens) + len(tokens)
    error = (
        f"request {sequence.request.id}: the target's logits for token {known} (output token "
        f"{known - sequence.num_prompt}) are not finite: NaN or infinite, or -inf for every token "
        "that the request's options allow, so none can be chosen; other requests go on. Allow more "
        "tokens if options leave few; else check the model's files, or use a wider dtype (float32)"
    )
    return _failed(tokens, error, Fault.ENGINE)


def _contradiction(sequence: Sequence, tokens: list[int], ids: list[int]) -> str:
    """What to tell of a request whose options leave none of the ids that its grammar allows."""
    shown = ", ".join(str(i) for i in ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")
    params = sequence.request.params
    names = [
        name
        for name, given in (
            ("allowed_token_ids", params.allowed_token_ids is not None),
            ("banned_token_ids (bad_words)", bool(params.banned_token_ids)),
        )
        if given
    ]
    return (
        f"{' and '.join(names)} and the grammar leave no token for output token "
        f"{sequence.num_emitted + len(tokens)}: the grammar allows only token ids {shown} there "
        f"({len(ids)} in all), and the options none of them; allow one of these, or ask for a wider "
        "grammar; other requests go on"
    )


def _grammar_failed(sequence: Sequence, tokens: list[int], failure: Failure) -> Cut:
    """The end of a request whose grammar does not go on after these tokens of a step."""
    known = len(sequence.tokens) + len(tokens)
    error = (
        f"request {sequence.request.id}: its grammar does not go on at token {known} (output token "
        f"{known - sequence.num_prompt}): {failure.why}; other requests go on. Write the schema, regex or "
        "grammar in a simpler way, or ask without it"
    )
    return _failed(tokens, error, failure.fault)


def _failed(tokens: list[int], error: str, fault: Fault) -> Cut:
    return Cut(tokens=tokens, reason=FinishReason.ERROR, error=error, fault=fault)


def logprobs_of(
    sequence: Sequence, tensors: StepTensors, b: int, count: int
) -> tuple[TokenLogprobs, ...] | None:
    """Logprobs of the first `count` emitted tokens of the step's b-th row, if it asked for them."""
    wanted = sequence.request.params.logprobs
    if wanted is None or tensors.logprobs is None:
        return None
    values = tensors.logprobs[b, :count].tolist()
    if wanted == 0 or tensors.top_ids is None or tensors.top_logprobs is None:
        return tuple(TokenLogprobs(logprob=v) for v in values)
    ids = tensors.top_ids[b, :count, :wanted].tolist()
    tops = tensors.top_logprobs[b, :count, :wanted].tolist()
    return tuple(
        TokenLogprobs(logprob=v, top_ids=tuple(i), top_logprobs=tuple(t))
        for v, i, t in zip(values, ids, tops, strict=True)
    )


def tree_shown(
    sequence: Sequence, proposal: Proposal, tensors: StepTensors, b: int, emitted: list[int]
) -> VerifiedTree | None:
    """The tree that a step verified for its b-th row; before `emitted` is appended to the sequence.

    Args:
        sequence: the row's.
        proposal: the tree.
        tensors: what the step left, on the host.
        b: which row.
        emitted: the row's tokens of the step, already cut.

    Returns:
        None unless exactly the proposal was verified.
    """
    count = len(proposal.tokens)
    if tensors.path is None or tensors.drafted is None or int(tensors.drafted[b]) != count:
        return None
    accepted = [node for node in tensors.path[b].tolist() if node >= 0]
    return VerifiedTree(
        start=sequence.num_emitted,
        token_ids=(sequence.tokens[-1], *proposal.tokens),
        parents=(-1, *(parent + 1 for parent in proposal.parents)),
        sources=(0, *(proposal.sources or [1] * count)),
        scores=(0.0, *proposal.scores),
        path=tuple(accepted[: len(emitted) + 1]),
        emitted=tuple(emitted),
    )


def grown(tensors: StepTensors, b: int) -> Proposal:
    """What was verified of a tree that the device grew for a step's b-th row, root excluded.

    Args:
        tensors: what the step left, on the host, trees included.
        b: which row.
    """
    tree, chosen = tensors.tree, tensors.chosen
    assert tree is not None, "whoever shows trees asks for them"
    assert chosen is not None, "whoever shows trees asks for them"
    first, end = chosen.cu_q[b : b + 2].tolist()
    nodes = chosen.node[first + 1 : end] - b * tree.token_ids.shape[1]
    place = {0: -1, **{node: i for i, node in enumerate(nodes.tolist())}}
    return Proposal(
        tokens=tree.token_ids[b, nodes].tolist(),
        parents=[place[parent] for parent in tree.parents[b, nodes].tolist()],
        scores=tree.scores[b, nodes].tolist(),
        sources=tree.sources[b, nodes].tolist(),
    )
