"""The batch-invariant mode on a CUDA device: kernels, passes and whole engines, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import models
from paceline.attention.triton_invariant import InvariantTritonAttention
from paceline.core.batch import ForwardMode
from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.invariance import arithmetic
from paceline.engine.runner import ModelRunner
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from tests import attention_grid as grid
from tests import fused_grid, invariance_grid, network_cases, tiny, tiny_drafters
from tests.engine.harness import Outcome, engine, request, run
from tests.gpu_capture import captured
from tests.oracle import attention as oracle
from tests.tolerance import close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
UNIT = 256  # keys
TYPES = (torch.bfloat16, torch.float16)
CASES = grid.cases(unit=UNIT)
# A head size that the kernels take, a vocabulary that fills no block, a product whose K is split.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 203,
}
LISTS: Sequence[tuple[str, Mapping[str, Any]]] = (("none", {}), ("ngram", {}), ("suffix", {}))
ENGINES = [*LISTS, *network_cases.network_cases()]
PROMPTS = {
    "loop": [11, 12, 13, 14, 15] * 5 + [11, 12],
    "mixed": [31, 7, 7, 7, 9, 31, 7, 7, 8, 40, 41, 42, 31, 7, 7],
    "short": [5],
    "long": [(7 * i * i + 3 * i) % 23 + 3 for i in range(75)],
}
KINDS: Mapping[str, Mapping[str, Any]] = {  # options that a prompt is answered with
    "loop": {"temperature": 0.0},
    "mixed": {"temperature": 1.0},
    "short": {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.5},
    "long": {"temperature": 1.0, "min_p": 0.05, "logit_bias": {12: 1.5}},
}


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", fused_grid.poison(torch.empty))


# ----------------------------------------------------------------------------------------- kernels


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_kernels_are_the_definition(name: str, split: bool) -> None:
    """Every kind of BLOCK pass, at borders of pages, tiles and units; NaN in all that nobody sees."""
    for dtype in (
        TYPES if name == "ragged trees" else TYPES[:1]
    ):  # compilation takes most of the time
        case = dataclasses.replace(CASES[name], dtype=dtype)
        made = case.scene("cuda")
        found = grid.attend_by(InvariantTritonAttention(split), made, case)
        live = int(made.batch.cu_q[-1])
        assert (found[live:] == 0).all()
        assert close(found[:live].cpu(), grid.definition(made, case.site)[:live])


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("scene", list(oracle.SCENES))
def test_scenes_of_the_engine_and_its_drafters(scene: str) -> None:
    """What all backends are tested with, prompts too: windows, tail rules, padding, dead tokens."""
    layout, backend = Heads(2, 64), InvariantTritonAttention()
    for site in oracle.every_site(64):
        made = oracle.build(scene, dtype=torch.bfloat16, layout=layout)
        want, live = oracle.attend(made, site), int(made.batch.cu_q[-1])
        made = oracle.on(oracle.build(scene, dtype=torch.bfloat16, layout=layout), "cuda")
        case = grid.Case(rows=[], window=site.window, causal_tail=site.tail == "causal")
        found = grid.attend_by(backend, made, case)
        assert (found[live:] == 0).all()
        assert close(found[:live].cpu(), want[:live]), site


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "dtype, kv_heads, group, dim",
    [
        (torch.bfloat16, 2, 4, 128),
        (torch.bfloat16, 3, 3, 64),
        (torch.bfloat16, 1, 7, 96),
        (torch.bfloat16, 2, 1, 64),
        (torch.bfloat16, 1, 20, 64),
        (torch.float16, 1, 4, 128),
    ],
    ids=str,
)
def test_a_token_has_one_set_of_bits(
    dtype: torch.dtype, kv_heads: int, group: int, dim: int, window: int | None
) -> None:
    """Alone, as a node of chains and trees, in chunks, among others, split or not."""
    of, other = (
        invariance_grid.text(563, dtype=dtype, kv_heads=kv_heads, group=group, dim=dim, seed=seed)
        for seed in (0, 1)
    )
    invariance_grid.bits_are_one_set(of, other, device="cuda", unit=UNIT, step=31, window=window)


def test_a_node_that_fails_spoils_no_other() -> None:
    """NaN in the keys of one branch stays there, although branches share a program."""
    of = invariance_grid.text(40, dtype=torch.bfloat16, group=2)
    plain = invariance_grid.attend([invariance_grid.run(of, 35, 1)], device="cuda", masked=False)
    found = invariance_grid.attend([invariance_grid.bushy(of, 34, 2, 3)], device="cuda")
    assert torch.equal(found[0][35], plain[0][35])


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n, k", [(97, 70), (960, 576), (576, 1536), (256, 2048), (4096, 4096)])
def test_a_row_of_a_product_has_one_set_of_bits(n: int, k: int, bias: bool) -> None:
    """One row, a block of rows and more, the definition within the tolerance."""
    for dtype in TYPES if n == 97 else TYPES[:1]:
        invariance_grid.product_bits(
            n, k, (1, 2, 16, 17, 63, 64, 65, 300), dtype=dtype, device="cuda", bias=bias
        )


@pytest.mark.parametrize("n, k", [(4096, 12_288), (24_576, 4096), (6144, 4096)])
def test_products_of_an_8_b_model(n: int, k: int) -> None:
    """Its sizes, from one row to a long chunk."""
    counts = (1, 8, 64, 129, 2049)
    invariance_grid.product_bits(n, k, counts, dtype=torch.bfloat16, device="cuda", bias=False)


@pytest.mark.parametrize("name", ["ragged trees", "decode at borders", "tree of 40"])
def test_a_replay_equals_the_eager_pass(name: str) -> None:
    """Captured once, replayed with other lengths and keys in the same tensors."""
    case = dataclasses.replace(CASES[name], dtype=torch.bfloat16)
    made = case.scene("cuda")
    backend = InvariantTritonAttention()
    graph, result = captured(lambda: grid.attend_by(backend, made, case))
    for turn in range(3):
        batch = made.batch
        if turn:  # shorter prefixes of the same pages, other queries
            batch.prefix_lens.sub_(batch.prefix_lens.clamp(max=7 * 9**turn // 9))
            batch.slots.fill_(-1)
            made.q.copy_(torch.randn_like(made.q))
            made.pool.k.copy_(torch.randn_like(made.pool.k))
            made.pool.v.copy_(torch.randn_like(made.pool.v))
        result.fill_(torch.nan)
        graph.replay()
        replayed = result.clone()
        assert torch.equal(replayed, grid.attend_by(backend, made, case))
        live = int(batch.cu_q[-1])
        assert close(replayed[:live].cpu(), grid.definition(made, case.site)[:live])


# ------------------------------------------------------------------------------------------ passes


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tiny model with biases and a vocabulary that fills no block."""
    shape = {**SHAPE, "max_position_embeddings": 320}
    return tiny.write_tiny(tmp_path / "target", "qwen2", seed=3, **shape)


class Passes:
    """A network over a pool of its own: caches texts and says the logits of what follows."""

    def __init__(self, folder: Path) -> None:
        self.cuda = torch.device("cuda")
        loaded = models.load(
            models.resolve(str(folder)), device=self.cuda, dtype=torch.bfloat16, weights="bf16"
        )
        layout = Heads(loaded.config.num_kv_heads, loaded.config.head_dim)
        self.pages = torch.randperm(6 * 24, generator=torch.Generator().manual_seed(0))
        self.pages = self.pages.view(6, 24).int()
        self.pool = KVPool(layout, loaded.config.num_layers, 6 * 24, 16, torch.bfloat16, self.cuda)
        self.pool.k.fill_(torch.nan)
        self.pool.v.fill_(torch.nan)
        found = arithmetic(True, loaded.net, layout, self.cuda, torch.bfloat16, 16)
        self.runner = ModelRunner(
            loaded.net, self.pool, found.backend, product=found.product, head=found.head
        )

    def logits(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        ids: Sequence[int],
        mode: ForwardMode = ForwardMode.BLOCK,
        *,
        masked: bool = True,
    ) -> Tensor:
        """[T, V] of a pass of rows, each a prefix length and parents."""
        batch = invariance_grid.batch_of(
            rows,
            self.pages[: len(rows)],
            page_size=16,
            device="cuda",
            mode=mode,
            masked=masked,
            token_ids=ids,
        )
        return self.runner.head(self.runner.forward(batch).hidden)

    def cache(self, texts: Sequence[Sequence[int]], chunk: int) -> Tensor:
        """Texts into the rows' caches, together and in chunks; [L, V] of the first."""
        found = []
        for start in range(0, max(map(len, texts)), chunk):
            parts = [list(text[start : start + chunk]) for text in texts]
            rows = [(start, range(-1, len(part) - 1)) for part in parts]
            ids = [token for part in parts for token in part]
            whole = self.logits(rows, ids, ForwardMode.EXTEND, masked=False)
            found.append(whole[: len(parts[0])])
        return torch.cat(found)


def test_logits_of_a_token_are_one_set_of_bits(target: Path) -> None:
    """A prompt in chunks of any size, token by token, and as nodes of a tree of 32 among others."""
    text = [(11 * i * i + 5 * i) % 197 + 3 for i in range(300)]
    passes = Passes(target)
    whole = passes.cache([text], 300)
    assert whole.isfinite().all()
    others = [text[7:] + text[:7], text[::-1], [3] * 300]
    assert torch.equal(passes.cache([text, *others], 70), whole)
    by_token = [passes.logits([(i, [-1])], [text[i]], masked=False) for i in range(250, 300)]
    assert torch.equal(torch.cat(by_token), whole[250:])
    for prefix in (188, 250, 255):
        for wrong in (0, 4):
            passes.cache([text, *others], 300)  # what the last tree wrote is gone
            tree = invariance_grid.bushy(invariance_grid.text(1, dtype=torch.float16), 0, 6, wrong)
            ids, depths = [], invariance_grid.depths_of(tree.parents)
            for i, depth in enumerate(depths):
                ids.append(text[prefix + depth] if tree.right[i] else 5 + i)
            rows = [(prefix, tree.parents), (299, [-1]), (120, [-1, 0, 0])]
            found = passes.logits(rows, [*ids, others[0][299], *others[1][120:123]])
            for i, depth in enumerate(depths):
                if tree.right[i]:
                    assert torch.equal(found[i], whole[prefix + depth]), (prefix, wrong, depth)


# ----------------------------------------------------------------------------------------- engines


def told(outcome: Outcome) -> list[tuple[int, float]]:
    """Each token with its log-probability, in full precision."""
    logprobs = [entry.logprob for out in outcome.outputs for entry in out.logprobs or ()]
    return list(zip(outcome.tokens, logprobs, strict=True))


@pytest.mark.parametrize(
    "number, method, own",
    [(number, *case) for number, case in enumerate(ENGINES)],
    ids=[network_cases.case_id(name, own) for name, own in ENGINES],
)
def test_bits_are_those_of_plain_decoding(
    tmp_path: Path, number: int, method: str, own: Mapping[str, Any]
) -> None:
    """Batches, chunks, preemption and prefix hits, with options of all kinds: every log-probability."""
    architecture = ("qwen3", "llama")[number % 2]  # with norms of heads and without
    folder = tiny.write_tiny(tmp_path / "target", architecture, seed=3, **SHAPE)
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_len": 120,
        "batch_invariant": True,
    }
    params = {
        name: SamplingParams(max_tokens=24, seed=i, ignore_eos=True, logprobs=0, **KINDS[name])
        for i, name in enumerate(PROMPTS)
    }
    plain = engine(folder, Engine.build, method="none", graphs="off", **options)
    assert plain.config.batch_invariant is True
    assert any(note.startswith("batch-invariant: yes") for note in plain.notes)
    expected = {
        name: told(run(plain, [request(name, ids, params[name])])[name])
        for name, ids in PROMPTS.items()
    }
    draft: dict[str, Any] = {"method": method, **own}
    if method not in dict(LISTS):
        texts = [PROMPTS[name] + [token for token, _ in expected[name]] for name in PROMPTS]
        build = tiny_drafters.BUILDERS[network_cases.network_in(method, own)]
        draft["model"] = str(build(tmp_path / "drafter", folder, texts, steps=40))
    eng = engine(folder, Engine.build, num_pages=42, chunk_size=9, **draft, **options)
    for repeat in range(2):
        jobs = [
            request(f"{name}/{repeat}", ids, params[name], scope=name)
            for name, ids in PROMPTS.items()
        ]
        for name, outcome in run(eng, jobs).items():
            assert told(outcome) == expected[name.split("/")[0]], (method, name)
    report = eng.report()
    assert report["num_preemptions"] > 0, "nobody was preempted"
    assert report["num_steps_without_graph"] == 0
    assert method == "none" or report["spec_decode_num_draft_tokens"] > 0
    assert method in {"none", "ngram"} or report["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"head_dim": 80}], ids=str)
def test_what_is_not_possible_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """No kernel, no promise: the error says what is possible."""
    shape = {**SHAPE, "head_dim": options.get("head_dim", 64)}
    folder = tiny.write_tiny(tmp_path, "llama", **shape)
    with pytest.raises(ConfigError, match=r"batch_invariant was asked for.* leave batch_invariant"):
        engine(
            folder,
            Engine.build,
            device="cuda",
            dtype=options.get("dtype", "bfloat16"),
            batch_invariant=True,
        )
