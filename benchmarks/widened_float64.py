r"""Widened networks beside the small ones they were made of, in float64: the same function, or it says where not.

What it answers: how far the widened target's logits are from the small model's, and the widened drafters'
from the small drafters', where rounding can hide nothing. In bfloat16 sums in another order part at
near-ties (`widened_speed.py` counts them); in float64 what is left is rounding of 1e-12, and anything larger
is a fault.

    python benchmarks/widened_float64.py --out benchmarks/results/h200-widened-float64.json

The target is made on the device, 62 GB at the default sizes, and never written; an EAGLE-3 drafter passes
through a temporary folder (2.7 GB). Every prompt goes through both models as it does in service, over a
paged pool: its tokens in one pass, then steps of one token each, which is the small model's greedy one.
Drafters draft from every few places of the first texts, each from its own target's streams. `--size
NAME=NUMBER` makes a smaller one for a trial on a CPU.

One JSON record is the last line of stdout; exit code 1 where a difference is above `--most`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from widened_args import sizes_of

from paceline import models
from paceline.api.tokenizer import Tokenizer
from paceline.api.widen import PlannedWidening, plan_widening
from paceline.attention import choose
from paceline.bench import workload
from paceline.bench.machine import Json, machine, source, versions
from paceline.bench.widen_files import Part, write_json
from paceline.bench.widen_load import WidenedTensors, load_target
from paceline.cli.workbench import command_line, encode, publish
from paceline.core.batch import ForwardBatch, ForwardMode
from paceline.core.device import choose_device, peak_memory
from paceline.core.errors import PacelineError
from paceline.draft import dflash_checkpoint, eagle3_checkpoint
from paceline.draft.base import TargetInfo
from paceline.draft.dflash_config import FIRST, SECOND
from paceline.draft.dflash_net import DFlashNet, block_tokens
from paceline.draft.eagle3_net import Eagle3Net
from paceline.draft.teacher_forcing import BlocksAttend, ChainsAttend, streams, text_pass
from paceline.engine.runner import ModelRunner
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.models import LoadedModel

HERE = Path(__file__).parent
DTYPE = torch.float64
PAGE = 16
STRIDE = 4  # places from which a block is drafted
CHAINED = 3  # passes of EAGLE-3, each fed by the one before
Say: TypeAlias = Callable[[str], None]


@dataclass(slots=True)
class Difference:
    """The largest of many differences, and over how much."""

    positions: int = 0
    largest: float = 0.0
    largest_logit: float = 0.0
    other_choices: int = 0  # positions whose largest logit is another token's
    spreads: list[float] = field(default_factory=list)  # of logits; flat ones would equal anything

    def add(self, small: Tensor, wide: Tensor) -> None:
        """Compare logits [T, V]; one that is no number counts as infinitely far."""
        assert small.dtype == wide.dtype == DTYPE, "something computed in fewer bits"
        off = (small - wide).abs().nan_to_num(nan=torch.inf)
        self.positions += len(small)
        self.largest = max(self.largest, float(off.max()))
        self.largest_logit = max(self.largest_logit, float(small.abs().max()))
        self.other_choices += int((small.argmax(-1) != wide.argmax(-1)).sum())
        self.spreads.append(float(small.std(-1).mean()))

    def facts(self) -> dict[str, Json]:
        """A row of the record."""
        return {
            "positions": self.positions,
            "largest_difference": self.largest if self.largest < torch.inf else None,
            "largest_logit": self.largest_logit,
            "spread_of_logits": sum(self.spreads) / max(len(self.spreads), 1),
            "other_choices": self.other_choices,
        }


class Row:
    """One sequence in a pool of its own, as the engine runs it.

    Args:
        model: the target.
        room: tokens that it may have.
    """

    def __init__(self, model: LoadedModel, room: int) -> None:
        config, device = model.config, model.net.device
        layout = Heads(config.num_kv_heads, config.head_dim)
        pages = -(-room // PAGE)
        pool = KVPool(layout, config.num_layers, pages, PAGE, DTYPE, device)
        backend, _ = choose(layout, device, DTYPE, PAGE)
        self._runner = ModelRunner(model.net, pool, backend)
        self._pages = torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0)
        self._known = 0

    def logits(self, tokens: Tensor, mode: ForwardMode) -> Tensor:
        """Of the next tokens [T] int64 of the sequence: [T, V]."""
        count, device = len(tokens), tokens.device
        at = torch.arange(self._known, self._known + count, device=device)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        one = mode is ForwardMode.BLOCK
        assert count == 1 or not one, "a step of one token"
        batch = ForwardBatch(
            mode=mode,
            num_rows=1,
            q_len=count,
            rows=first,
            token_ids=tokens,
            positions=at,
            slots=at,
            prefix_lens=first + self._known,
            cu_q=torch.cat((first, first + count)),
            tail_lens=first + count,
            mask=torch.ones(1, 1, dtype=torch.int64, device=device) if one else None,
            pages=self._pages,
        )
        self._known += count
        return self._runner.head(self._runner.forward(batch).hidden)


def compare_targets(
    small: LoadedModel, wide: LoadedModel, prompts: Sequence[Tensor], steps: int, say: Say
) -> tuple[Difference, list[Tensor]]:
    """Both over every prompt and some greedy steps; what was found, and the texts."""
    found, texts = Difference(), []
    for prompt in prompts:
        rows = [Row(model, len(prompt) + steps) for model in (small, wide)]
        tokens, text = prompt, prompt
        for step in range(steps + 1):
            mode = ForwardMode.BLOCK if step else ForwardMode.EXTEND
            before, after = (row.logits(tokens, mode) for row in rows)
            found.add(before, after)
            tokens = before[-1:].argmax(-1)
            text = torch.cat((text, tokens))
        texts.append(text)
        say(f"target: {found.positions} positions, largest difference {found.largest:.1e}")
    return found, texts


@torch.inference_mode()
def dflash_logits(target: LoadedModel, net: DFlashNet, text: Tensor) -> Tensor:
    """Logits [n * b, V] of blocks that begin at every few places of a text."""
    taps = net.config.target_layer_ids
    found = streams(target.net, text, taps)
    features = torch.cat([found[i] for i in taps], dim=-1)
    starts = torch.arange(1, len(text), STRIDE, device=text.device)
    size = net.config.block_size
    inside = torch.arange(size, device=text.device)
    tokens = block_tokens(net.config, text[starts]).view(-1)
    batch = text_pass(tokens, (starts[:, None] + inside).view(-1))
    context = net.context(features, torch.arange(len(text), device=text.device))
    return net.logits(net(batch, BlocksAttend(context, starts, size)).hidden)


@torch.inference_mode()
def eagle3_logits(target: LoadedModel, net: Eagle3Net, text: Tensor) -> Tensor:
    """Logits [passes * n, Vd] of chains from every place of a text, each pass fed by the one before."""
    taps = net.config.aux_layers
    found = streams(target.net, text, taps)
    count = len(text) - CHAINED
    assert count > 0, "a text is longer than a chain"
    feature = net.project(torch.cat([found[i][:count] for i in taps], dim=-1))
    attend, logits = ChainsAttend(), []
    places = torch.arange(count, device=text.device)
    for step in range(CHAINED):
        embeds = net.embed(text[1 + step : 1 + step + count])
        out = net.layer(embeds, feature, places + step, attend)
        logits.append(net.logits(out))
        feature = net.fed_back(out)
    return torch.cat(logits)


def info_of(model: LoadedModel) -> TargetInfo:
    """What a target lends its drafters."""
    return TargetInfo(
        config=model.config,
        device=model.net.device,
        dtype=DTYPE,
        embed=model.net.embed,
        head=model.net.head,
        weights="bf16",
    )


def drafter_logits(
    model: LoadedModel, folder: Path, part: Part | None, seed: int, scratch: Path
) -> Callable[[Tensor], Tensor]:
    """Logits of a text [T] int64 by the drafter in `folder`, or by the widened one that `part` says."""
    info = info_of(model)
    where = scratch / folder.name
    if is_dflash(folder):
        if part is None:
            net = dflash_checkpoint.load(folder, info)
        else:
            where.mkdir()
            write_json(where / "config.json", part.config)
            tensors = WidenedTensors(part, where, info.device, seed)
            net = dflash_checkpoint.load(where, info, lambda _: tensors)
        return lambda text: dflash_logits(model, net, text)
    if part is not None:
        only = PlannedWidening(parts=(part,), record={}, seed=seed)
        only.write(
            where, shard_bytes=5_000_000_000, progress=lambda _, __: None, device=info.device
        )
    chained = eagle3_checkpoint.load(folder if part is None else where / part.name, info)
    return lambda text: eagle3_logits(model, chained, text)


def is_dflash(folder: Path) -> bool:
    """Whether a folder holds DFlash's network, and not EAGLE-3's."""
    names = models.hf.read_config(folder).values.get("architectures")
    return isinstance(names, list) and bool({FIRST, SECOND} & set(names))


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="what is widened")
    parser.add_argument(
        "--drafter",
        type=Path,
        action="append",
        help="folder of a drafter of it; several; default: ours",
    )
    parser.add_argument("--without-drafters", action="store_true", help="the target alone")
    parser.add_argument("--size", action="append", default=[], help="NAME=NUMBER of the new shape")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[HERE / "prompts" / "human_eval.jsonl"]
    )
    parser.add_argument("--limit", type=int, default=3, help="prompts")
    parser.add_argument("--tokens", type=int, default=160, help="of a prompt, at most: its first")
    parser.add_argument("--steps", type=int, default=8, help="of one token, after each prompt")
    parser.add_argument("--drafted", type=int, default=1, help="texts that drafters draft from")
    parser.add_argument("--most", type=float, default=1e-9, help="difference that is no fault")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    args = parser.parse_args()
    low = [n for n in ("limit", "tokens") if getattr(args, n) < 1]
    low += [n for n in ("steps", "drafted") if getattr(args, n) < 0]
    if low:
        parser.error(f"--{', --'.join(low)}: too small; prompts and tokens are 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "a widened target of 62 GB needs an NVIDIA GPU, and PyTorch finds none; run it on one, or "
            "make a smaller one on a CPU (--device cpu --size num_layers=31 --size ...)"
        )
    return args


def main() -> int:
    """Measure, or say what is wrong with what was asked."""
    args = arguments()
    try:
        return measure(args)
    except PacelineError as error:
        print(f"widened_float64: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace) -> int:
    """Widen, compare, record."""
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    device = choose_device(args.device)
    asked = ["none"] if args.without_drafters else [str(folder) for folder in args.drafter or ()]
    planned = plan_widening(
        model=args.model, drafters=asked, dtype="float64", sizes=sizes_of(args.size)
    )
    prompts = workload.load(args.prompts, limit=args.limit)
    small = models.load(models.resolve(args.model), device=device, dtype=DTYPE, weights="bf16")
    tasks = encode(prompts, Tokenizer.from_files(small.files.path))
    texts = [torch.tensor(task.prompt_ids[: args.tokens], device=device) for task in tasks]
    target, *parts = planned.parts
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wide = load_target(target, scratch / "target", device, planned.seed)
        parameters = parameters_of(target)
        say(f"the target is widened: {parameters / 1e9:.2f} billion parameters in float64")
        found, said = compare_targets(small, wide, texts, args.steps, say)
        rows.append({"network": "target", "parameters": parameters, **found.facts()})
        worst = found.largest
        for part in parts:
            folder = folder_of(part, args.drafter)
            before = drafter_logits(small, folder, None, planned.seed, scratch)
            after = drafter_logits(wide, folder, part, planned.seed, scratch)
            found = Difference()
            for text in said[: args.drafted]:
                found.add(before(text), after(text))
            parameters = parameters_of(part)
            rows.append({"network": part.name, "parameters": parameters, **found.facts()})
            worst = max(worst, found.largest)
            say(f"{part.name}: {found.positions} rows, largest difference {found.largest:.1e}")
    right = worst <= args.most
    record: dict[str, Json] = {
        "schema": "paceline-widened-float64/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/widened_float64.py", *command_line()[1:]],
        "versions": versions(),
        "source": source(),
        "machine": machine(device),
        "widened": dict(planned.record),  # type: ignore[arg-type]
        "dtype": "float64",
        "prompts": {"digest": prompts.digest, "count": len(texts), "tokens_at_most": args.tokens},
        "steps_after_each": args.steps,
        "most": args.most,
        "ok": right,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_memory_gb": round(peak_memory(device) / 1e9, 2),
        "rows": rows,
    }
    publish(record, args.out)
    return 0 if right else 1


def parameters_of(part: Part) -> int:
    """Numbers of a network; the maps of a vocabulary are none."""
    return sum(piece.numel for piece in part.pieces if piece.dtype.is_floating_point)


def folder_of(part: Part, asked: Sequence[Path] | None) -> Path:
    """The small drafter's folder."""
    folders = asked or [p for p in (HERE.parent / "drafters").iterdir() if p.is_dir()]
    return next(folder for folder in folders if folder.resolve().name == part.name)


if __name__ == "__main__":
    sys.exit(main())
