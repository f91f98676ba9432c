"""Builds the parts of an engine from its config: resolve, load, measure, size, connect."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from paceline import models
from paceline.attention import choose
from paceline.core.config import CacheConfig, DraftConfig, EngineConfig, ModelConfig
from paceline.core.device import (
    TORCH_DTYPES,
    choose_device,
    choose_dtype,
    free_memory,
    usable_cores,
    used_memory,
)
from paceline.core.errors import ConfigError
from paceline.draft import (
    COMPOSITES,
    DRAFTERS,
    borrows_head,
    build,
    build_composite,
    build_network,
    check_name,
    folder_problems,
)
from paceline.draft.base import Drafter, TargetInfo
from paceline.engine.alarm import Alarm
from paceline.engine.control import Control
from paceline.engine.draft_weights import draft_weights, light_head
from paceline.engine.invariance import arithmetic
from paceline.engine.memory import pages_for, size_pool
from paceline.engine.network_runtime import NetworkRuntime
from paceline.engine.proposers import HostProposer, MergedProposer, NetworkProposer
from paceline.engine.rows import RowTable
from paceline.engine.runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Walk
from paceline.kv.layout import Heads
from paceline.kv.pages import PageAllocator
from paceline.kv.pool import KVPool
from paceline.kv.prefix import PrefixCache
from paceline.ops.cpu import native
from paceline.sample.verifier import verify

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.engine.proposers import Proposer
    from paceline.models import LoadedModel

log = logging.getLogger(__name__)

NetworkMaker: TypeAlias = Callable[[DraftConfig, TargetInfo], Drafter]

_MAX_NODES = 256  # root included; what masks and kernels are tested for
# Beyond these no machine gains, and the host runs out of memory before a message could be given.
MAX_ROWS, _MAX_THREADS, _MAX_GB = 65_536, 4_096, 1_000_000
_OPTION_SLOTS = 16  # rows with penalties, bias or token masks at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of."""

    config: EngineConfig
    model_config: ModelConfig
    device: torch.device
    loaded: LoadedModel
    target: ModelRunner
    rows: RowTable
    scheduler: Scheduler
    proposer: Proposer
    control: Control
    alarm: Alarm
    max_len: int
    notes: tuple[str, ...]
    walk: Walk = verify
    graph_bytes: int | None = None  # set aside for graphs; None: nobody measured


def resolve(config: EngineConfig) -> EngineConfig:
    """Replace every "auto" that does not depend on the model; refuse what cannot be served."""
    device = choose_device(config.device)
    cache, draft = config.cache, config.draft
    problems = [
        f"{name} {value} must be >= {low}"
        for name, value, low in (
            ("page_size", cache.page_size, 1),
            ("max_rows", cache.max_rows, 1),
            ("chunk_size", cache.chunk_size, 1),
            ("max_len", cache.max_len, 2),
            ("num_pages", cache.num_pages, 1),
            ("num_speculative_tokens", draft.num_speculative_tokens, 0),
            ("threads", config.threads, 1),
        )
        if value is not None and value < low
    ]
    problems += [
        f"{name} {value} is above the limit of {high}; ask for {high} or fewer"
        for name, value, high in (
            ("max_rows", cache.max_rows, MAX_ROWS),
            ("threads", config.threads, _MAX_THREADS),
            ("memory_gb", cache.memory_gb, _MAX_GB),
        )
        if value is not None and value > high
    ]
    if draft.num_speculative_tokens >= _MAX_NODES:
        problems.append(
            f"num_speculative_tokens {draft.num_speculative_tokens} is above the limit of "
            f"{_MAX_NODES - 1}; ask for {_MAX_NODES - 1} or fewer"
        )
    problems += folder_problems(draft)
    if cache.memory_gb is not None and not cache.memory_gb > 0:
        problems.append(f"memory_gb {cache.memory_gb} must be > 0")
    if problems:
        msg = "invalid configuration: " + "; ".join(problems)
        raise ConfigError(msg)
    return replace(
        config,
        device=str(device),
        dtype=choose_dtype(config.dtype, device, native.refusal(torch.bfloat16)),
        threads=config.threads or usable_cores(),
    )


def load_target(resolved: EngineConfig) -> LoadedModel:
    """Load the target of a resolved config; everything that can be refused is refused before.

    Raises:
        ConfigError: there is no such drafter or model.
        ModelError: files that are missing, damaged or unsupported.
    """
    check_name(resolved.draft.method)
    return models.load(
        models.resolve(resolved.model),
        device=torch.device(resolved.device),
        dtype=TORCH_DTYPES[resolved.dtype],
        weights=resolved.weights,
    )


def build_proposer(
    config: DraftConfig,
    target: TargetInfo,
    num_rows: int,
    make_network: NetworkMaker = build_network,
) -> tuple[Proposer, Drafter | None]:
    """Who proposes, as the engine asks; and the network in it that is to be attached, if any.

    Args:
        config: which drafter.
        target: facts, embedding and head of the target.
        num_rows: most rows of a step.
        make_network: makes a drafter network of both; default: from the folder that the config names.

    Raises:
        ConfigError: no drafter has that name, its settings are out of range, or it does not belong to
            the target.
        ModelError: files that are missing, damaged or unsupported.
    """
    if config.method in COMPOSITES:
        merged = build_composite(config)
        made = [build_proposer(part, target, num_rows, make_network) for part in merged.parts]
        networks = [network for _, network in made if network is not None]
        parts = [proposer for proposer, _ in made]
        whole = MergedProposer(merged, parts, num_rows, target.device)
        return whole, next(iter(networks), None)
    if config.method in DRAFTERS:
        return HostProposer(build(config)), None
    network = make_network(config, target)
    return NetworkProposer(network, target.device), network


def build_parts(
    resolved: EngineConfig,
    loaded: LoadedModel,
    used: int,
    make_network: NetworkMaker = build_network,
    graph_bytes: int | None = None,
) -> Parts:
    """Connect everything. See `Engine.build` for what it raises.

    Args:
        resolved: from `resolve`.
        loaded: the target.
        used: bytes that weights and work space take on the device.
        make_network: as for `build_proposer`.
        graph_bytes: to be set aside for graphs; None: nobody measured.
    """
    device = torch.device(resolved.device)
    dtype = TORCH_DTYPES[resolved.dtype]
    model = loaded.config
    weights = draft_weights(resolved.draft.weights, device, dtype)
    head: Callable[[Tensor], Tensor] = loaded.net.head
    head_bytes = 0
    if weights == "8bit" and borrows_head(resolved.draft):
        head, head_bytes = light_head(loaded.net, dtype)
    target = TargetInfo(
        config=model,
        device=device,
        dtype=dtype,
        embed=loaded.net.embed,
        head=head,
        weights=weights,
    )
    proposer, network = build_proposer(
        resolved.draft, target, resolved.cache.max_rows, make_network
    )
    spec = proposer.spec
    layouts = [(Heads(model.num_kv_heads, model.head_dim), model.num_layers)]
    if spec.kv is not None:
        layouts.append((Heads(spec.kv.num_kv_heads, spec.kv.head_dim), spec.kv.num_layers))
    tail = max(min(spec.max_nodes, resolved.draft.num_speculative_tokens + 1), spec.scratch)
    size = size_pool(
        resolved.cache,
        model_max_len=model.max_position,
        bytes_per_page=sum(
            layout.token_nbytes(layers, dtype) * resolved.cache.page_size
            for layout, layers in layouts
        ),
        used=used + head_bytes,
        held=used_memory(device),
        free=free_memory(device),
        graphs=graph_bytes or 0,
        device_type=device.type,
        tail=tail,
    )
    cache: CacheConfig = replace(resolved.cache, num_pages=size.num_pages, max_len=size.max_len)
    pools = [
        KVPool(layout, layers, size.num_pages, cache.page_size, dtype, device)
        for layout, layers in layouts
    ]
    chosen = arithmetic(
        resolved.batch_invariant, loaded.net, layouts[0][0], device, dtype, cache.page_size
    )
    runner = ModelRunner(
        loaded.net,
        pools[0],
        chosen.backend,
        aux_layers=spec.aux_layers,
        product=chosen.product,
        head=chosen.head,
    )
    pages_per_row = pages_for(size.max_len, tail, cache.page_size)
    rows = RowTable(
        num_rows=cache.max_rows,
        num_pages=size.num_pages,
        pages_per_row=pages_per_row,
        page_size=cache.page_size,
        tail=tail,
        vocab_size=model.vocab_size,
        num_option_slots=min(_OPTION_SLOTS, cache.max_rows),
        proposer=proposer,
        device=device,
    )
    of_drafter: tuple[str, ...] = ()
    if network is not None:
        drafts, reasons = choose(layouts[-1][0], device, dtype, cache.page_size)
        network.attach(NetworkRuntime(rows, pools[1] if spec.kv is not None else None, drafts))
        of_drafter = tuple(f"drafter: {r}" for r in reasons if r not in chosen.notes)
    allocator = PageAllocator(size.num_pages)
    scheduler = Scheduler(
        cache,
        allocator,
        PrefixCache(
            allocator, cache.page_size, enabled=cache.prefix_cache, lookahead=spec.lookahead
        ),
        rows,
        pages_per_row=pages_per_row,
        scratch=spec.scratch,
    )
    notes = (*loaded.notes, *chosen.notes, *of_drafter, size.note)
    for note in notes:
        log.info("%s", note)
    return Parts(
        config=replace(resolved, cache=cache, batch_invariant=chosen.invariant),
        model_config=model,
        device=device,
        loaded=loaded,
        target=runner,
        rows=rows,
        scheduler=scheduler,
        proposer=proposer,
        control=Control(resolved.draft),
        alarm=Alarm(spec, resolved.draft),
        max_len=size.max_len,
        notes=notes,
        graph_bytes=graph_bytes,
    )
