"""Widening from Python: what `paceline widen` does, without a command line.

`plan_widening` reads configurations and decides everything; `PlannedWidening.write` writes. Not for: how a
network grows (`bench/widen.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline import models
from paceline.api.tokenizer_export import export_tokenizer
from paceline.bench import widen_files
from paceline.bench.widen import target_part, widening
from paceline.bench.widen_drafters import drafter_part
from paceline.bench.widen_facts import facts
from paceline.bench.widen_shape import shape_like
from paceline.core.config import DType
from paceline.core.device import TORCH_DTYPES
from paceline.core.errors import ConfigError
from paceline.draft import shipped
from paceline.models import ModelFiles
from paceline.models.cache import digest, folder_digest

NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWidening:
    """Networks that are ready to be written."""

    parts: Sequence[widen_files.Part]  # the target, then drafters
    record: Mapping[str, object]  # sizes, bytes, zeros: JSON's types
    seed: int  # of random numbers

    def write(
        self,
        out: Path,
        *,
        shard_bytes: int,
        progress: widen_files.Progress,
        device: torch.device = widen_files.CPU,
    ) -> None:
        """Write a folder for each network, one tensor at a time; `out` appears whole or not at all.

        Args:
            out: empty, or not there yet.
            shard_bytes: most bytes of tensors in one file.
            progress: told megabytes done, and in all.
            device: where tensors are made.

        Raises:
            ConfigError: `out` holds something, another process writes it, or the disk is too small.
            ModelError: a source is damaged.
            OSError: the system refuses; `out` is as it was.
        """
        with torch.inference_mode():
            widen_files.write(
                out,
                self.parts,
                self.record,
                seed=self.seed,
                shard_bytes=shard_bytes,
                progress=progress,
                device=device,
            )


def plan_widening(
    *,
    model: str = "default",
    drafters: Sequence[str] = (),
    like: str = "qwen3-8b",
    sizes: Mapping[str, int] | None = None,
    copies: int | None = None,
    dtype: DType = "bfloat16",
    seed: int = 0,
) -> PlannedWidening:
    """Decide how a model and its drafters are widened.

    Args:
        model: what to widen: folder, GGUF file, hub id or "default".
        drafters: folders of drafters of it; default: those that come with it; ("none",): none.
        like: the model whose cost is aimed at.
        sizes: fields of `Shape` to have in place of those.
        copies: of the residual stream; default: as many as fit.
        dtype: of the new tensors.
        seed: of random numbers.

    Raises:
        ModelError: a model or drafter is missing, damaged or not supported.
        ConfigError: sizes do not go together, or a drafter is not this model's.
    """
    files = models.resolve(model)
    config = models.read_config(files)
    plan = widening(config, replace(shape_like(config, like), **(sizes or {})), copies)
    kind = TORCH_DTYPES[dtype]

    def finish(folder: Path) -> None:
        export_tokenizer(files, folder, config.max_position)

    sha256 = digest(files.path) if files.kind == "gguf" else folder_digest(files.path)
    target = target_part(files, plan, kind, finish)
    found = [drafter_part(folder, plan, kind) for folder in _folders(drafters, files, sha256)]
    name = Path(files.name).name
    record = facts(plan, target, found, model=name, sha256=sha256, dtype=kind, seed=seed)
    return PlannedWidening(parts=(target, *found), record=record, seed=seed)


def _folders(asked: Sequence[str], files: ModelFiles, sha256: str) -> list[Path]:
    """The folders of the drafters to widen along.

    Raises:
        ConfigError: one is not there, or two have the same name.
    """
    if not asked:
        found = shipped.find(sha256) if files.kind == "gguf" else []
        return [drafter.folder for drafter in found]
    if tuple(asked) == (NO_DRAFTER,):
        return []
    folders = [Path(name).expanduser() for name in asked]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        msg = (
            f"there is no drafter folder {', '.join(missing)}; folders with config.json and "
            f"safetensors are possible, or {NO_DRAFTER!r} alone. Check the path."
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
