"""`paceline widen`: a model and its drafters at a large model's cost, with the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from paceline.cli.console import notes, progress
from paceline.cli.workbench import AsJson, publish
from paceline.core.errors import ConfigError

_SIZES = Group("Sizes", sort_key=1)
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
    as_json: AsJson = False,
) -> int:
    """Widen a model and its drafters to a large model's cost; they say what they said before.

    For measuring what speculation wins on a large model where none can be had. OUT gets a folder
    'target' in Hugging Face layout and one for each drafter; one JSON record is the last line of stdout,
    which a terminal shows with --json only.
    """
    from paceline.api.widen import plan_widening
    from paceline.bench.widen_facts import table
    from paceline.bench.widen_files import refuse_filled

    if not 0 < shard_gb < float("inf"):
        msg = (
            f"--shard-gb {shard_gb} is no size; a number above 0 is possible, such as 5: give that"
        )
        raise ConfigError(msg)
    refuse_filled(out)
    given = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
    }
    sizes = {name: size for name, size in given.items() if size is not None}
    planned = plan_widening(
        model=model,
        drafters=drafter,
        like=like,
        sizes=sizes,
        copies=copies,
        dtype=dtype,
        seed=seed,
    )
    _show(table(planned.record, None if sizes else like), dry_run=dry_run)
    if not dry_run:
        with progress("writing (MB)") as report:
            planned.write(out, shard_bytes=int(shard_gb * _GB), progress=report)
    publish(planned.record, None, as_json=as_json)
    return 0


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
