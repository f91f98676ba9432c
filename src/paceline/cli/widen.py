"""`paceline widen`: a model and its drafters at a large model's cost, with the same function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from paceline.cli.console import notes, progress
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.widen_shape import Shape
    from paceline.core.config import ModelConfig
    from paceline.models import ModelFiles

_SIZES = Group("Sizes", sort_key=1)
_NONE = "none"
_GB = 1_000_000_000


def widen(
    out: Annotated[Path, Parameter(help="folder to write to; empty, or not there yet")],
    /,
    *,
    model: Annotated[
        str, Parameter(help="what to widen: folder, GGUF file, hub id, or 'default'")
    ] = "default",
    drafter: Annotated[
        tuple[str, ...],
        Parameter(
            help="folder of a drafter of this model; give it several times, or 'none'; default: those "
            "that come with the model",
            negative_iterable=(),
            show_default=False,
        ),
    ] = (),
    like: Annotated[
        Literal["qwen3-8b"], Parameter(group=_SIZES, help="the model whose cost is aimed at")
    ] = "qwen3-8b",
    hidden_size: Annotated[
        int | None, Parameter(group=_SIZES, help="width; best a multiple of the model's own")
    ] = None,
    num_layers: Annotated[
        int | None, Parameter(group=_SIZES, help="layers; those that are more add nothing")
    ] = None,
    num_heads: Annotated[int | None, Parameter(group=_SIZES, help="query heads")] = None,
    num_kv_heads: Annotated[
        int | None, Parameter(group=_SIZES, help="heads of keys and values")
    ] = None,
    intermediate_size: Annotated[
        int | None, Parameter(group=_SIZES, help="neurons of a layer's feed-forward block")
    ] = None,
    copies: Annotated[
        int | None,
        Parameter(
            group=_SIZES,
            help="of the residual stream in the new width, whose other channels stay 0; default: as "
            "many as fit",
        ),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32", "float64"], Parameter(help="of the new tensors")
    ] = "bfloat16",
    seed: Annotated[int, Parameter(help="of what is random: weights that see only zeros")] = 0,
    shard_gb: Annotated[float, Parameter(help="most of one file, GB")] = 5.0,
    dry_run: Annotated[
        bool, Parameter(negative="", help="say what would be written, and write nothing")
    ] = False,
) -> int:
    """Widen a model and its drafters to a large model's cost; they say what they said before.

    For measuring what speculation wins on a large model where none can be had. OUT gets a folder
    'target' in Hugging Face layout and one for each drafter; one JSON record is the last line of stdout.
    """
    import torch

    from paceline import models
    from paceline.api.tokenizer_export import export_tokenizer
    from paceline.bench import widen_files
    from paceline.bench.widen import target_part, widening
    from paceline.bench.widen_drafters import drafter_part
    from paceline.bench.widen_facts import facts, table
    from paceline.core.device import TORCH_DTYPES

    if not 0 < shard_gb < float("inf"):
        msg = (
            f"--shard-gb {shard_gb} is no size; a number above 0 is possible, such as 5: give that"
        )
        raise ConfigError(msg)
    widen_files.refuse_filled(out)
    files = models.resolve(model)
    config = models.read_config(files)
    given = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
    }
    shape = _shape(config, like, {k: v for k, v in given.items() if v is not None})
    plan = widening(config, shape, copies)
    kind = TORCH_DTYPES[dtype]

    def finish(folder: Path) -> None:
        export_tokenizer(files, folder, config.max_position)

    sha256 = _digest(files)
    with torch.inference_mode():
        target = target_part(files, plan, kind, finish)
        drafters = [
            drafter_part(folder, plan, kind) for folder in _drafters(drafter, files, sha256)
        ]
        name = Path(files.name).name
        record = facts(plan, target, drafters, model=name, sha256=sha256, dtype=kind, seed=seed)
        _show(table(record, None if any(given.values()) else like), dry_run=dry_run)
        if not dry_run:
            with progress("writing (MB)") as report:
                widen_files.write(
                    out,
                    [target, *drafters],
                    record,
                    seed=seed,
                    shard_bytes=int(shard_gb * _GB),
                    progress=report,
                )
    print(json.dumps(record, ensure_ascii=False))
    return 0


def _shape(config: ModelConfig, like: str, given: dict[str, int]) -> Shape:
    """The sizes of the large model's cost, with those that were given in their places."""
    from dataclasses import replace

    from paceline.bench.widen_shape import shape_like

    return replace(shape_like(config, like), **given)


def _digest(files: ModelFiles) -> str:
    from paceline.models.cache import digest, folder_digest

    return digest(files.path) if files.kind == "gguf" else folder_digest(files.path)


def _drafters(asked: tuple[str, ...], files: ModelFiles, sha256: str) -> list[Path]:
    """The folders of the drafters to widen along.

    Raises:
        ConfigError: one is not there, or two have the same name.
    """
    from paceline.draft import shipped

    if not asked:
        found = shipped.find(sha256) if files.kind == "gguf" else []
        return [drafter.folder for drafter in found]
    if asked == (_NONE,):
        return []
    folders = [Path(name).expanduser() for name in asked]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        msg = (
            f"there is no drafter folder {', '.join(missing)}; folders with config.json and "
            f"safetensors are possible, or {_NONE!r} alone. Check the path."
        )
        raise ConfigError(msg)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        msg = (
            f"two drafter folders have the same name ({', '.join(sorted(names))}), and so would the "
            "widened ones; each needs its own. Rename one."
        )
        raise ConfigError(msg)
    return [folder.resolve() for folder in folders]


def _show(rows: list[tuple[str, ...]], *, dry_run: bool) -> None:
    from rich.table import Table

    console = notes()
    first, *rest = rows
    shown = Table(*first)
    for row in rest:
        shown.add_row(*row)
    console.print(shown)
    if dry_run:
        console.print("nothing was written (--dry-run)")
