"""Which proposed nodes turned out right, as far as the emitted tokens tell.

A node is judged if the path to it was emitted and the token after that path is known; whether it
was verified makes no difference. So the first level of every proposal is judged, even one that was
not verified at all, and drafting is learned from while it is off.

Not here: what is learned from it (`policy.py`, `draft/survival.py`).
"""

from __future__ import annotations

from collections.abc import Sequence


def judge(
    tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]
) -> list[tuple[int, int, bool]]:
    """Judge a proposal by the tokens emitted after its root.

    Args:
        tokens: proposed tokens.
        parents: index of each node's parent, which precedes it; -1 is the root.
        emitted: tokens emitted after the root, oldest first.

    Returns:
        (node, depth, right) for every node whose fate is known; depth 0 is a child of the root.
        "Right" is conditional: the node's path up to its parent is right already.
    """
    judged = []
    depth_below = {-1: 0}  # nodes on the emitted path -> depth of their children
    known = len(emitted)
    for i, parent in enumerate(parents):
        depth = depth_below.get(parent)
        if depth is None or depth >= known:
            continue
        right = tokens[i] == emitted[depth]
        if right:
            depth_below[i] = depth + 1
        judged.append((i, depth, right))
    return judged
