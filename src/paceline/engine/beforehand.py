"""Graphs before they are asked for: the usual ones of an engine, so that no request waits for one.

First a trial over a small pool says how much memory they take (`trial`), so that the KV pool leaves it; then
they are captured over the pool that stays (`capture_usual`). What there is no time or memory for is left to
the first step that asks for it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.device import lacks_memory
from paceline.engine.graphs import REMEDY

if TYPE_CHECKING:
    from paceline.engine.graph_keys import GraphKey
    from paceline.engine.graphs import GraphCache

log = logging.getLogger(__name__)  # the command line shows its INFO too: a start takes longer

Progress = Callable[[int, int], None]  # done, of so many

_GB = 1e9
_MOST_SECONDS = 60.0
_TRIALS = 6
_LEAST_BYTES = 4 << 20  # of a graph; the driver takes its memory in steps larger than a graph
_SPARE = 0.5  # graphs on demand that memory is left for, as a share of the usual ones
_ANY_PAGES = 1 << 30


def unheard(done: int, total: int) -> None:
    """Nobody wants to know."""


def capture_usual(
    graphs: GraphCache,
    *,
    progress: Progress = unheard,
    most_seconds: float = _MOST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Capture the usual graphs, within the memory that was set aside and a minute.

    Args:
        graphs: whose.
        progress: told graphs done, and in all.
        most_seconds: after which the others are left for later.
        clock: in seconds.

    Returns:
        What was done, for people.
    """
    keys = graphs.ladder.usual(graphs.kinds)
    started, made = clock(), 0
    lack = ""
    for key, fits in _tried(graphs, keys):
        if not fits:
            lack = f"there was no memory for steps of {key.tokens} tokens. {REMEDY}"
            continue
        made += 1
        progress(made, len(keys))
        if made == len(keys):
            break
        if clock() - started > most_seconds:
            lack = f"{most_seconds:g} s were over"
            break
        if graphs.room is not None and graphs.room <= 0:
            lack = f"the memory set aside for graphs is taken. {REMEDY}"
            break
    what = f"{made}" if made == len(keys) else f"{made} of {len(keys)}"
    note = (
        f"CUDA graphs: {what} captured in {clock() - started:.1f} s, {graphs.nbytes / _GB:.2f} GB"
        f"{'' if graphs.set_aside is None else f' of {graphs.set_aside / _GB:.2f} GB set aside'}; "
        "others when a step first asks for them"
    )
    if lack:
        note += f"; not all, because {lack}"
    log.log(logging.WARNING if lack else logging.INFO, "%s", note)
    return note


def trial(graphs: GraphCache) -> int:
    """Capture the largest of the usual graphs, and say how many bytes to set aside for all.

    Args:
        graphs: of an engine that differs from the one to be served in its pool alone.
    """
    sizes: list[int] = []
    for key, fits in _tried(graphs, graphs.ladder.usual(graphs.kinds)):
        if fits:
            sizes.append(graphs.make(key).nbytes)
        if len(sizes) == _TRIALS:
            break
    widest = replace(graphs.ladder, max_pages=_ANY_PAGES)
    return set_aside(sizes, len(widest.usual(graphs.kinds)))


def _tried(graphs: GraphCache, keys: Sequence[GraphKey]) -> Iterator[tuple[GraphKey, bool]]:
    """Capture one by one: each key, and whether there was memory for it.

    Where there was none, steps of as many tokens or more are not tried.
    """
    too_large: int | None = None  # tokens
    for key in keys:
        if too_large is not None and key.tokens >= too_large:
            continue
        try:
            graphs.make(key)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            too_large = key.tokens
        yield key, too_large != key.tokens


def set_aside(sizes: Sequence[int], count: int) -> int:
    """Bytes for `count` usual graphs and some more, after the sizes of the first that were captured.

    A few of them take the memory that all share: the largest step of each kind. Any other is as large as
    most of these, which is what the driver keeps of it.
    """
    if not sizes:
        return 0
    taken = [max(size, _LEAST_BYTES) for size in sizes]
    further = max(0.0, count * (1 + _SPARE) - len(sizes))
    return int(sum(taken) + statistics.median(taken) * further)
