"""Several proposals as one dictionary of paths: what a fold is, without any tree."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.tree import Proposal


def folded(proposals: Sequence[Proposal]) -> dict[tuple[int, ...], tuple[float, int]]:
    """Every path that somebody proposes -> (log survival, who claims most for its last token)."""
    claims: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    for proposal in proposals:
        score_of: dict[tuple[int, ...], float] = {(): 0.0}
        for i in range(len(proposal.tokens)):
            path, node = [], i
            while node >= 0:
                path.append(proposal.tokens[node])
                node = proposal.parents[node]
            own = tuple(reversed(path))
            score_of[own] = proposal.scores[i]
            claim = proposal.scores[i] - score_of[own[:-1]]
            claims.setdefault(own, []).append((claim, proposal.sources[i]))
    best = {path: max(given, key=lambda pair: pair[0]) for path, given in claims.items()}
    return {
        path: (sum(best[path[: n + 1]][0] for n in range(len(path))), source)
        for path, (_, source) in best.items()
    }
