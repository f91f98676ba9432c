"""Trees that grow level by level, against a few lines of Python over paths."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import TypeAlias

import pytest
import torch

from paceline.core.tree import DraftTree
from paceline.draft.candidates import Candidates
from paceline.draft.eagle3_growth import Growth, Level, along, num_children

Path: TypeAlias = tuple[int, ...]
NONE = -torch.inf


class Table:
    """What a drafter would say after each path of each row: candidates with two kinds of weights."""

    def __init__(self, seed: int, count: int, *, coarse: bool) -> None:
        self._seed, self._count, self._coarse = seed, count, coarse

    def after(self, row: int, path: Path) -> list[tuple[int, float, float]]:
        """(token, weight on the spine, weight off it), best first."""
        draw = random.Random(f"{self._seed} {row} {path}")
        tokens = draw.sample(range(100), self._count)
        both = [
            sorted((-draw.expovariate(1.0) for _ in tokens), reverse=True) for _ in ("on", "off")
        ]
        if self._coarse:  # many equal weights
            both = [[float(round(w)) for w in weights] for weights in both]
        if draw.random() < 0.05:
            both[0][-1] = both[1][-1] = float(draw.choice([NONE, torch.nan]))
        return list(zip(tokens, *both, strict=True))


def walk(
    table: Table, row: int, width: int, depth: int
) -> tuple[list[list[Path]], list[tuple[Path, float]]]:
    """The definition: paths that are looked at, level by level, and all children with their scores."""
    looked: list[tuple[Path, float, bool]] = [((), 0.0, True)]
    levels, children = [[path for path, _, _ in looked]], []
    for _ in range(depth):
        grown = []
        for path, score, spine in looked:
            for rank, (token, on, off) in enumerate(table.after(row, path)[:width]):
                weight = on if spine else off
                weight = NONE if math.isnan(weight) else weight
                grown.append(((*path, token), score + weight, spine and rank == 0))
        children += [(path, score) for path, score, _ in grown]
        looked = sorted(grown, key=lambda node: -node[1])[:width]
        levels.append([path for path, _, _ in looked])
    return levels, children


def paths_of(level: Level, above: list[list[Path]], row: int) -> list[Path]:
    """The paths of a level's nodes."""
    columns = zip(level.tokens[row].tolist(), level.parents[row].tolist(), strict=True)
    return [(*above[row][parent], token) for token, parent in columns]


def candidates(table: Table, paths: list[list[Path]]) -> Candidates:
    """Of one level's nodes."""
    rows = [[table.after(b, path) for path in mine] for b, mine in enumerate(paths)]
    ids = torch.tensor([[[t for t, _, _ in node] for node in mine] for mine in rows])
    on = torch.tensor([[[w for _, w, _ in node] for node in mine] for mine in rows])
    off = torch.tensor([[[w for _, _, w in node] for node in mine] for mine in rows])
    return Candidates(ids=ids, scores=on, share=on[:, :, 0], weights=on, off_spine=off)


def grown(table: Table, rows: int, width: int, depth: int) -> tuple[Growth, list[Candidates]]:
    """A growth over all levels, and what it was fed."""
    growth, paths = Growth(torch.arange(rows) + 500, width, depth), [[()]] * rows
    found = []
    for _ in range(depth):
        found.append(candidates(table, paths))
        level = growth.grow(found[-1])
        paths = [paths_of(level, paths, b) for b in range(rows)]
    return growth, found


def nodes_of(tree: DraftTree, row: int) -> list[tuple[Path, float]]:
    """A tree's nodes as (path, score), the root left out."""
    paths: list[Path] = [()]
    out = []
    for i in range(1, int(tree.num_nodes[row])):
        paths.append((*paths[int(tree.parents[row, i])], int(tree.token_ids[row, i])))
        out.append((paths[-1], float(tree.scores[row, i])))
    return out


def test_it_is_the_published_growth() -> None:
    """Levels, their masks and the proposed tree are the definition's, ties and dead ends included."""
    draw = random.Random(1)
    for case in range(150):
        rows, width, depth = draw.randint(1, 3), draw.choice([1, 2, 3, 8, 23]), draw.randint(1, 6)
        table = Table(case, max(width, draw.choice([1, 4, 30])), coarse=draw.random() < 0.4)
        count = draw.choice([1, 3, 10, 64, 150])
        growth, _ = grown(table, rows, width, depth)
        tree = growth.tree(count, 5)
        tree.check()
        assert tree.token_ids.shape[1] == 1 + min(count, num_children(width, depth))
        assert tree.token_ids[:, 0].tolist() == [500 + b for b in range(rows)]
        for b in range(rows):
            levels, children = walk(table, b, width, depth)
            best = sorted(children, key=lambda node: -node[1])[:count]
            best = [(path, score) for path, score in best if score > NONE]
            mine = nodes_of(tree, b)
            assert [path for path, _ in mine] == [path for path, _ in best]
            torch.testing.assert_close(
                torch.tensor([s for _, s in mine]), torch.tensor([s for _, s in best])
            )
            keys = [path for level in levels[1:depth] for path in level]
            for level, paths in zip(growth.levels[1:], levels[1:depth], strict=False):
                for node, path in enumerate(paths):
                    sees = {i for i, key in enumerate(keys) if key == path[: len(key)]}
                    words = [int(w) % (1 << 64) for w in level.mask[b, node]]
                    bits = {
                        64 * w + i
                        for w, word in enumerate(words)
                        for i in range(64)
                        if word >> i & 1
                    }
                    assert bits == sees


def test_no_siblings_share_a_token_and_supersets_accept_no_less() -> None:
    """Whatever the target says, more nodes accept at least as many of its tokens; a node's children
    differ.
    """
    for case in range(30):
        table = Table(case, 6, coarse=False)
        growth, _ = grown(table, 1, 3, 4)
        path: Path = ()
        for _ in range(4):
            path = (*path, random.Random(f"{case} {path}").choice(table.after(0, path)[:3])[0])
        accepted = []
        for count in (1, 4, 9, 30):
            found = [p for p, _ in nodes_of(growth.tree(count, 5), 0)]
            assert len(set(found)) == len(found)
            accepted.append(max((len(p) for p in found if p == path[: len(p)]), default=0))
        assert accepted == sorted(accepted)


@pytest.mark.parametrize("width", [1, 3])
def test_what_is_judged_follows_the_emitted_tokens(width: int) -> None:
    """Each level's candidates are those of the node that the target walked through; where it left the
    nodes that were looked at, or emitted nothing, nothing is judged.
    """
    for case in range(40):
        table = Table(case, 5, coarse=False)
        growth, found = grown(table, 2, width, 4)
        draw = random.Random(case)
        emitted = torch.full((2, 4), -1)
        known = []
        for b in range(2):
            levels, _ = walk(table, b, width, 4)
            path = list(draw.choice(levels[draw.randint(1, 4)]))
            text = [*path, 777, 778][: draw.randint(1, 4)]
            emitted[b, : len(text)] = torch.tensor(text)
            known.append((text, {p for level in levels for p in level}))
        joined, judged = along(growth.levels, found, emitted)
        for b, (text, looked) in enumerate(known):
            for depth in range(4):
                before = tuple(text[:depth])
                if depth < len(text) and before in looked:
                    assert int(judged[b, depth]) == text[depth]
                    tokens = [token for token, _, _ in table.after(b, before)]
                    assert joined.ids[b, depth].tolist() == tokens
                else:
                    assert int(judged[b, depth]) == -1
        assert all(getattr(joined, f.name).shape[:2] == (2, 4) for f in fields(Candidates))
