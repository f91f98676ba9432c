"""Frozen configuration. A component receives its own part and nothing else.

"auto" values are resolved once, by pure functions that return a new config (`EngineConfig` is a
composition); the result is logged as a difference from the defaults. Command-line flags are made
from these dataclasses, so a flag without a field cannot exist: `help` in a field's metadata is the
flag's help text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DType = Literal["auto", "bfloat16", "float16", "float32", "float64"]
WeightMode = Literal["auto", "4bit", "8bit", "bf16"]
Graphs = Literal["beforehand", "on-demand", "off"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


def _doc(text: str) -> Mapping[str, Any]:
    return {"help": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters; the unused ones of a kind keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: floor/ceil the correction range


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and options of a network, whatever file format it came from."""

    architecture: str  # registry name: "llama", "qwen2", "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV pool and what decides its size."""

    page_size: int = field(default=16, metadata=_doc("tokens per KV page"))
    max_len: int | None = field(
        default=None, metadata=_doc("context window per request, tokens; default: the model's")
    )
    max_rows: int = field(default=16, metadata=_doc("requests decoded at the same time"))
    memory_gb: float | None = field(
        default=None,
        metadata=_doc("memory for weights, KV pool and work space, GB; default: measured"),
    )
    num_pages: int | None = field(
        default=None, metadata=_doc("KV pages; default: what the memory budget allows")
    )
    prefix_cache: bool = field(default=True, metadata=_doc("share KV of equal prefixes"))
    chunk_size: int = field(default=512, metadata=_doc("prompt tokens computed per prefill step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How tokens are proposed. Key names in JSON follow vLLM's `--speculative-config`."""

    method: str = field(
        default="auto",
        metadata=_doc("drafter: auto, none, ngram, suffix, merged, or a network's name"),
    )
    model: str | None = field(
        default=None,
        metadata=_doc("folder of a drafter network; default: the one that comes with the model"),
    )
    num_speculative_tokens: int = field(
        default=16, metadata=_doc("most draft nodes verified per request and step")
    )
    parts: tuple[str, ...] = field(
        default=("suffix", "ddtree"),
        metadata=_doc("merged: the drafters whose trees are folded into one; one network at most"),
    )
    adaptive: bool = field(
        default=True,
        metadata=_doc(
            "verify fewer nodes, or none, where they cost more than they win (on a GPU for ngram and "
            "suffix; a network's nodes are all verified there)"
        ),
    )
    check: Literal["auto", "off"] = field(
        default="auto",
        metadata=_doc(
            "auto: before it first serves a model, a drafter network that does not come along is tested "
            "on what the model says, and refused if it was trained for another one; off: it is served "
            "as it is"
        ),
    )
    weights: Literal["auto", "8bit", "bf16"] = field(
        default="auto",
        metadata=_doc(
            "how a CPU keeps a network's matrices, and its copy of the model's head: rounded to 8 "
            "bits (auto, with 16-bit activations) or not; outputs are the same"
        ),
    )
    eagle_topk: int = field(
        default=1, metadata=_doc("eagle3: children of a node; 1 drafts a chain, more a tree")
    )
    eagle_num_steps: int = field(
        default=7, metadata=_doc("eagle3: draft passes, and so the longest path of drafts")
    )
    prompt_lookup_min: int = field(default=2, metadata=_doc("ngram: shortest match"))
    prompt_lookup_max: int = field(default=5, metadata=_doc("ngram: longest match"))
    suffix_shape: Literal["tree", "path"] = field(
        default="tree", metadata=_doc("suffix: best-first tree over counts, or one path")
    )
    suffix_max_depth: int = field(default=24, metadata=_doc("suffix: deepest match, tokens"))
    suffix_max_spec_factor: float = field(
        default=1.0, metadata=_doc("suffix: draft nodes per matched token")
    )
    suffix_min_token_prob: float = field(
        default=0.1, metadata=_doc("suffix: least estimated survival of a draft node")
    )
    suffix_max_cached_tokens: int = field(
        default=1_000_000,
        metadata=_doc("suffix: tokens of past outputs kept, oldest evicted first"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: str = field(
        default="default",
        metadata=_doc("folder, GGUF file, hub id, or 'default' (SmolLM2-135M-Instruct)"),
    )
    device: str = field(default="auto", metadata=_doc("auto, cpu, cuda, cuda:N"))
    dtype: DType = field(default="auto", metadata=_doc("activations and unpacked weights"))
    weights: WeightMode = field(
        default="auto",
        metadata=_doc(
            "how a CPU keeps matrices; auto: as the file has them (groups of 4 or 8 bits with 16-bit "
            "activations only); 4bit, 8bit: plain ones rounded too; bf16: all plain"
        ),
    )
    batch_invariant: bool | None = field(
        default=None,
        metadata=_doc(
            "a row's bits do not depend on its company; default: on on a CPU, off on a GPU, where it "
            "takes longer"
        ),
    )
    graphs: Graphs = field(
        default="beforehand",
        metadata=_doc(
            "on a GPU: steps are launched as CUDA graphs; the usual ones are captured when the engine "
            "starts (beforehand), or each when a step first asks for it (on-demand); off: no graphs"
        ),
    )
    threads: int | None = field(default=None, metadata=_doc("CPU threads; default: the cores"))
    seed: int | None = field(
        default=None, metadata=_doc("seed from which unseeded requests draw theirs")
    )
    cache: CacheConfig = CacheConfig()
    draft: DraftConfig = DraftConfig()
