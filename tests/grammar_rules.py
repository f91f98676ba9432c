"""Grammars made of rules over known tokens, for tests that compare with brute force; no tests here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

V = 41


class Rule:
    """A grammar made of a rule over known tokens: allowed ids after a path."""

    def __init__(self, rule: Callable[[Sequence[int]], set[int]]) -> None:
        self.rule, self.path = rule, list[int]()

    def mask(self) -> bytes:
        return sum(1 << t for t in self.rule(self.path)).to_bytes(4 * -(-V // 32), "little")

    def advance(self, token_id: int) -> bool:
        if token_id not in self.rule(self.path):
            return False
        self.path.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.path[len(self.path) - num_tokens :]

    def forced(self) -> Sequence[int]:
        run: list[int] = []
        while len(run) < 3 and len(only := self.rule([*self.path, *run])) == 1:
            run += only
        return run


def thirds(path: Sequence[int]) -> set[int]:
    """After a multiple of 3 only the next number; else whatever has the parity of the path's sum."""
    if path and path[-1] % 3 == 0:
        return {(path[-1] + 1) % V}
    return {t for t in range(V) if (t + sum(path)) % 2 == 0}
