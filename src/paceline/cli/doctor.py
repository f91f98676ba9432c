"""`paceline doctor`: what this machine is, what will be used on it, and why the rest is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.console import notes
from paceline.cli.flags import with_flags
from paceline.core.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from paceline.bench.machine import Json
    from paceline.kv.layout import Heads

_GB = 1e9
# `linear` alone would read as if no own kernel multiplied.
_PACKED = (
    "(linear: matrices that were not packed; others go to what pack_dense or pack_groups used)"
)


@with_flags
def doctor(
    *,
    config: EngineConfig,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="one JSON object instead of text")
    ] = False,
) -> int:
    """Show machine, versions, memory, models and backends, with the reason for every refusal."""
    import torch

    from paceline.bench.machine import machine, source, versions
    from paceline.core.device import TORCH_DTYPES
    from paceline.draft import names
    from paceline.engine.build import resolve

    resolved = resolve(config)
    device, dtype = torch.device(resolved.device), TORCH_DTYPES[resolved.dtype]
    choice: dict[str, Json] = {
        "device": resolved.device,
        "dtype": resolved.dtype,
        "threads": resolved.threads,
        "fast_bf16": _fast_bf16(device),
    }
    found: dict[str, Json] = {
        "versions": {**versions(), **source()},
        "machine": machine(device),
        "choice": choice,
        "model": _model(config.model),
        "cache": _cache(),
        "drafters": list(names()),
    }
    # Asking a backend may compile its kernels, once on a machine.
    with notes().status("asking the backends (the first time takes longer)"):
        found["attention"] = _attention(config, device, dtype)
        choice["batch_invariant"] = _invariant(config, device, dtype)
        found["ops"] = _ops(device, dtype)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _show(found)
    return 0


def _model(name: str) -> Json:
    """Where the model is, or why it is not to be had; no weights are read."""
    from paceline.core.errors import ModelError
    from paceline.models.source import resolve

    try:
        files = resolve(name)
    except ModelError as error:
        return {"name": name, "found": False, "reason": str(error)}
    size = (
        sum(f.stat().st_size for f in files.path.rglob("*.safetensors"))
        if files.path.is_dir()
        else files.path.stat().st_size
    )
    return {
        "name": name,
        "found": True,
        "path": str(files.path),
        "kind": files.kind,
        "size_gb": round(size / _GB, 3),
    }


def _cache() -> Json:
    """The folder of converted models and compiled kernels; where it does not work, why and what helps."""
    import shutil
    import tempfile

    from paceline.core import environment
    from paceline.models.cache import cache_folder, remedy

    found: dict[str, Json] = {}
    try:
        found["folder"] = str(environment.cache_path())
        folder = cache_folder()
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        return {**found, "usable": False, "reason": reason, "remedy": remedy(error)}
    free = round(shutil.disk_usage(folder).free / _GB, 2)
    return {**found, "usable": True, "free_gb": free}


def _attention(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Json:
    """Every attention backend with its reason; the first without one is used."""
    from paceline.attention import refusals

    asked = bool(config.batch_invariant)
    layout, size = _heads(config.model), config.cache.page_size
    return dict(refusals(layout, device, dtype, size, invariant=asked))


def _heads(name: str) -> Heads:
    """What a token's cache entry of this model holds; of one that can't be read, the default model's."""
    from paceline import models
    from paceline.core.errors import ModelError
    from paceline.kv.layout import Heads

    try:
        model = models.read_config(models.resolve(name))
    except ModelError:
        return Heads(num_heads=3, head_dim=64)
    return Heads(num_heads=model.num_kv_heads, head_dim=model.head_dim)


def _fast_bf16(device: torch.device) -> bool | str:
    """Whether bfloat16 is what "auto" takes here; if not, why and what is taken."""
    import torch

    from paceline.core.device import slower_dtype
    from paceline.ops.cpu import native

    reason = slower_dtype(device, native.refusal(torch.bfloat16))
    return True if reason is None else f"no: {reason}"


def _invariant(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool | str:
    """Whether a row's bits are independent of its company; if not, why, and what makes them so."""
    from paceline.attention import choose, refusals

    layout, size = _heads(config.model), config.cache.page_size
    reasons = refusals(layout, device, dtype, size, invariant=True)
    if all(reason is not None for reason in reasons.values()):
        name = "triton-invariant" if device.type == "cuda" else "tiled"
        return f"no: attention backend {name} is refused: {reasons[name]}"
    if config.batch_invariant or choose(layout, device, dtype, size)[0].invariant:
        return True
    return "no: it takes longer here; --batch-invariant turns it on"


def _ops(device: torch.device, dtype: torch.dtype) -> Json:
    """Per operator: its implementations, which one is used, why the others are not."""
    from paceline.ops.dispatch import OPS, explain

    return {
        op: [
            {"name": c.name, "chosen": c.chosen, "reason": c.reason}
            for c in explain(op, device.type, dtype)
        ]
        for op in OPS
    }


def _show(found: dict[str, Json]) -> None:
    for title in ("versions", "machine", "choice", "model", "cache"):
        print(title)
        section = found[title]
        assert isinstance(section, dict)
        for key, value in section.items():
            if value is not None:
                print(f"  {key.replace('_', ' '):<16} {_words(value)}")
    print(f"drafters\n  {_words(found['drafters'])}")
    print("attention backends, best first")
    attention, used = found["attention"], False
    assert isinstance(attention, dict)
    for name, reason in attention.items():
        verdict = f"refused: {reason}" if reason else "possible" if used else "used"
        used = used or reason is None
        print(f"  {name:<16} {verdict}")
    choice = found["choice"]
    assert isinstance(choice, dict)
    on_cpu = choice["device"] == "cpu"
    print("operators")
    ops = found["ops"]
    assert isinstance(ops, dict)
    for op, lines in ops.items():
        assert isinstance(lines, list)
        print(f"  {op:<20} " + "; ".join(_line(line) for line in lines))
    if on_cpu:
        print(f"  {_PACKED}")


def _line(line: Json) -> str:
    assert isinstance(line, dict)
    if line["chosen"]:
        return f"{line['name']} (used)"
    return f"{line['name']} (" + (f"refused: {line['reason']})" if line["reason"] else "possible)")


def _words(value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
