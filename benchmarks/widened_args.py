"""What `widened_speed.py` is asked for: read and checked before anything is loaded or made."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from widened_session import Way

from paceline.api.options import engine_config
from paceline.bench.widen_shape import Shape
from paceline.core.config import EngineConfig
from paceline.core.device import TORCH_DTYPES, choose_device
from paceline.core.errors import ConfigError
from paceline.draft import check_name

HERE = Path(__file__).parent
DRAFTERS = (
    '{"method": "none"}',
    '{"method": "ddtree", "num_speculative_tokens": 32}',
    '{"method": "dflash", "num_speculative_tokens": 7}',
    '{"method": "merged", "parts": ["suffix", "ddtree"], "num_speculative_tokens": 32}',
    '{"method": "eagle3", "num_speculative_tokens": 32, "eagle_topk": 4, "eagle_num_steps": 7}',
    '{"method": "suffix", "num_speculative_tokens": 32}',
    '{"method": "ngram", "num_speculative_tokens": 8}',
)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for, with a message and the end of the program where it has another form.

    Args:
        words: default: the command line's.

    Raises:
        ConfigError: a number, a device or a place for the record that cannot be had.
    """
    parser = argparse.ArgumentParser(
        description="Measures throughput on a widened model: what speculation wins where a step costs "
        "what an 8 B's does."
    )
    parser.add_argument("folder", type=Path, help="for drafters and the tokenizer; empty, or new")
    parser.add_argument("--model", default="default", help="what is widened")
    parser.add_argument(
        "--drafter-folder", type=Path, action="append", help="its drafters; default: ours"
    )
    parser.add_argument("--size", action="append", default=[], help="NAME=NUMBER of the new shape")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[HERE / "prompts" / "human_eval.jsonl"]
    )
    parser.add_argument("--limit", type=int, help="prompts; default: all")
    parser.add_argument("--drafter", action="append", help="as --speculative-config; several")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3, help="prompts of a sequence, at least")
    parser.add_argument("--least", type=int, default=6, help="prompts of a run, at least")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=215, help="for all of it")
    parser.add_argument("--part-seconds", type=float, default=60, help="for one run or drafter")
    parser.add_argument("--memory-gb", type=float, default=60, help="of a GPU, for an engine")
    parser.add_argument("--without-small", action="store_true", help="no drafters on the small one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=list(TORCH_DTYPES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    wanted = [
        ("max-tokens", args.max_tokens),
        ("max-len", args.max_len),
        ("rounds", args.rounds),
        ("least", args.least),
        *(("sequences", n) for n in args.sequences),
        *(() if args.limit is None else (("limit", args.limit),)),
    ]
    problems = [f"--{name} {value} must be >= 1" for name, value in wanted if value < 1]
    if problems:
        msg = "invalid options: " + "; ".join(problems)
        raise ConfigError(msg)
    args.device = str(choose_device(args.device))
    try:
        args.folder.parent.mkdir(parents=True, exist_ok=True)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"cannot make a folder for {args.out or args.folder} ({error}); name another place"
        raise ConfigError(msg) from error
    if args.folder.exists() and not args.folder.is_dir():
        msg = f"{args.folder} is a file; drafters go to a folder, empty or new. Name one"
        raise ConfigError(msg)
    if args.out is not None and not os.access(args.out.parent, os.W_OK):
        msg = f"cannot write the record to {args.out}; name a file in a folder of yours with --out"
        raise ConfigError(msg)


def config_of(args: argparse.Namespace, model: str, way: Way, network: Path | None) -> EngineConfig:
    """The config of an engine with this drafter.

    Args:
        args: from `arguments`.
        model: the target.
        way: the drafter.
        network: the folder of its network; None: it has none.

    Raises:
        ConfigError: the drafter's options.
    """
    config = dict(way.config) | ({} if network is None else {"model": str(network)})
    values: dict[str, object] = {
        "model": model,
        "device": args.device,
        "dtype": args.dtype,
        "weights": "bf16",
        "seed": 0,
        "max_rows": max(args.sequences),
        "max_len": args.max_len,
        "graphs": "on-demand",
        "adaptive": False,
        "spec_check": "off",
        "spec_weights": "bf16",
        "speculative_config": json.dumps(config),
    }
    if torch.device(args.device).type == "cuda":
        values["memory_gb"] = args.memory_gb
    return engine_config(values)


def sizes_of(texts: Sequence[str]) -> dict[str, int]:
    """Sizes of the new shape, each as NAME=NUMBER.

    Raises:
        ConfigError: one of another form, or of a name that no size has.
    """
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in Shape.__dataclass_fields__ or not number.isdecimal():
            msg = (
                f"--size {text} is no size of a shape as NAME=NUMBER; possible are "
                f"{', '.join(Shape.__dataclass_fields__)}. Give one of these, for example "
                "--size hidden_size=4032"
            )
            raise ConfigError(msg)
        found[name] = int(number)
    return found


def ways_of(texts: Sequence[str] | None) -> list[Way]:
    """Drafters, each as `--speculative-config` has it; None: the usual ones.

    Raises:
        ConfigError: one of another form, or a drafter that there is not.
    """
    found = []
    for text in texts or DRAFTERS:
        try:
            config = json.loads(text)
        except json.JSONDecodeError:
            config = None
        if not isinstance(config, dict) or not isinstance(config.get("method"), str):
            msg = (
                f'--drafter {text} is no drafter, which is a JSON object with a "method". Give one, for '
                f"example --drafter '{DRAFTERS[-1]}'"
            )
            raise ConfigError(msg)
        check_name(config["method"])
        found.append(Way(config=config))
    return found
