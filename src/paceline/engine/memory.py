"""Sizes the KV pool from a stated budget, with the numbers in every refusal.

Where a budget is stated, and on every GPU, it is measured first: with the weights loaded, one EXTEND
and one BLOCK step of full size run through the normal path over a small pool (`warm_config`), and the
most memory that the process held by then is what everything but the pool takes. On a GPU the drafter is
there too, and the graphs of the largest steps are captured over that pool (`beforehand.py`), to set aside
what all graphs will take: captured later, they would not move the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.config import CacheConfig, DraftConfig, EngineConfig, ModelConfig
from paceline.core.errors import MemoryBudgetError

_GB = 1e9
_WARM_TAIL = 16
_BLOCK = 256  # more than the block of any drafter
_DEFAULT_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of the free memory, when no budget is stated


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Outcome of sizing."""

    num_pages: int
    max_len: int  # context window per request
    note: str


def size_pool(
    config: CacheConfig,
    *,
    model_max_len: int,
    bytes_per_page: int,
    used: int,
    held: int,
    free: int,
    graphs: int,
    device_type: str,
    tail: int,
) -> PoolSize:
    """Choose the number of pages and the context window.

    Args:
        config: what the user stated.
        model_max_len: the model's own context window, tokens.
        bytes_per_page: keys and values of one page, all layers of target and drafter.
        used: bytes of weights and work space, as they were measured.
        held: bytes that the process holds now; on a GPU the rest of `used` is yet to be taken.
        free: bytes that can still be allocated.
        graphs: bytes to be set aside for captured graphs.
        device_type: "cpu" or "cuda".
        tail: places a step may write beyond the known tokens (draft nodes and root).

    Raises:
        MemoryBudgetError: one sequence of the stated window does not fit; with the numbers.
    """
    if config.memory_gb is not None:
        room = int(config.memory_gb * _GB) - used - graphs
        source = f"memory budget {config.memory_gb:g} GB - {used / _GB:.2f} GB in use"
    else:
        work = max(used - held, 0) if device_type == "cuda" else 0
        room = int(free * _DEFAULT_SHARE[device_type]) - work - graphs
        share = round(_DEFAULT_SHARE[device_type] * 100)
        source = f"{share} % of {free / _GB:.2f} GB free {device_type} memory"
        source += f" - {work / _GB:.2f} GB of work space" if work else ""
    source += f" - {graphs / _GB:.2f} GB for CUDA graphs" if graphs else ""
    if config.max_len is not None and config.max_len > model_max_len:
        msg = (
            f"context window of {config.max_len} tokens was asked for, but the model's positions "
            f"end at {model_max_len}; use max_len <= {model_max_len}"
        )
        raise MemoryBudgetError(msg)
    max_len = config.max_len or model_max_len
    size = config.page_size
    affordable = max(room // bytes_per_page, 0)
    if config.num_pages is not None:
        affordable = min(affordable, config.num_pages)
    need = pages_for(max_len, tail, size)
    if affordable < need:
        fits = (affordable * size) - tail
        if config.max_len is not None or fits < min(256, model_max_len):
            msg = (
                f"one sequence of {max_len} tokens needs {need} KV pages "
                f"({need * bytes_per_page / _GB:.3f} GB), but {affordable} fit "
                f"({source}, {bytes_per_page / 1e6:.2f} MB a page); "
                + (f"use max_len <= {fits}, or " if fits > 0 else "")
                + "give more memory_gb (or num_pages)"
                + (", or leave graphs out (graphs off)" if graphs else "")
                + (", or use device cpu" if device_type == "cuda" else "")
            )
            raise MemoryBudgetError(msg)
        max_len, need = fits, affordable
    wanted = config.num_pages or config.max_rows * need
    pages = min(wanted, affordable)
    why = source if pages < wanted else f"as many as were asked for, within {source}"
    if pages == wanted and config.num_pages is None:
        why = f"all that {config.max_rows} rows of {max_len} tokens need, within {source}"
    note = (
        f"KV pool: {pages} pages of {size} tokens, {pages * bytes_per_page / _GB:.2f} GB ({why}); "
        f"context window {max_len} tokens"
    )
    return PoolSize(num_pages=pages, max_len=max_len, note=note)


def warm_config(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The same engine with the least pool in which a step of full size runs, to measure it.

    On a GPU with its drafter, whose weights and passes take part of the budget, and with its graphs.
    """
    cache, draft = config.cache, config.draft
    max_len = min(cache.chunk_size + cache.max_rows + 8, cache.max_len or model.max_position)
    tail = _WARM_TAIL
    if config.device == "cpu":
        draft = DraftConfig(method="none", num_speculative_tokens=0)
    else:
        tail += draft.num_speculative_tokens + draft.eagle_topk * draft.eagle_num_steps + _BLOCK
    pages = pages_for(max_len, tail, cache.page_size) + 4 * cache.max_rows
    return replace(
        config,
        cache=replace(cache, max_len=max_len, num_pages=pages, memory_gb=None, prefix_cache=False),
        draft=draft,
        graphs="off" if config.device == "cpu" else config.graphs,
    )


def pages_for(max_len: int, tail: int, page_size: int) -> int:
    """Pages that one sequence of `max_len` tokens can ever hold, its tail included."""
    return -(-(max_len + tail) // page_size)
