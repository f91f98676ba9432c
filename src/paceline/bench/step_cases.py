"""What is measured: drafters as they are asked for, cases, and the engine that has room for them.

A drafter is METHOD[:CONFIG[:NODES]]; CONFIG is a folder with a config.json, that file, or the name of a
shape that comes with Paceline; NODES are the tokens that a step verifies for a sequence, root included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.errors import ConfigError
from paceline.draft.dflash_config import DFlashConfig, read_config

METHODS = ("none", "dflash", "ddtree")
_DDTREE_NODES = 32
_FORM = (
    "a drafter is none, or METHOD:CONFIG or METHOD:CONFIG:NODES with METHOD dflash or ddtree, for "
    "example dflash:qwen3-8b-dflash-b16 or ddtree:FOLDER:32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A drafter, and how many tokens a step verifies with it."""

    name: str  # as it was asked for
    method: str
    folder: Path | None = None
    net: DFlashConfig | None = None  # of that folder
    nodes: int = 1  # root included

    @property
    def draft(self) -> DraftConfig:
        """The engine's words for it: everything that is drafted is verified."""
        return DraftConfig(
            method=self.method,
            model=None if self.folder is None else str(self.folder),
            num_speculative_tokens=self.nodes - 1,
            adaptive=False,
            check="off",
            weights="bf16",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How many sequences, of how many tokens, decode together."""

    sequences: int
    context: int


def shapes() -> dict[str, Path]:
    """Folders of the configurations that come with Paceline, by name."""
    place = Path(__file__).with_name("shapes")
    return {folder.name: folder for folder in sorted(place.iterdir()) if folder.is_dir()}


def find_shape(name: str) -> Path | None:
    """The folder of a configuration: a shape's, the one named, or the one that holds the file named."""
    known = shapes().get(name)
    if known is not None:
        return known
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent
    return path if (path / "config.json").is_file() else None


def parse_spec(text: str) -> Spec:
    """Read a drafter as it is asked for.

    Raises:
        ConfigError: it has another form, names no drafter or no configuration, or asks for more nodes
            than there can be.
        ModelError: the configuration is malformed or not supported.
    """
    method, *rest = text.split(":")
    if method not in METHODS or len(rest) > 2 or (method == "none") != (not rest):
        msg = f"unknown drafter {text!r} to be measured; {_FORM}"
        raise ConfigError(msg)
    if not rest:
        return Spec(name=text, method=method)
    folder = find_shape(rest[0])
    if folder is None:
        known = ", ".join(name for name in shapes() if "dflash" in name)
        msg = (
            f"there is no drafter configuration {rest[0]!r} for {text!r}; possible are a folder with "
            f"config.json, that file, or one of {known}"
        )
        raise ConfigError(msg)
    net = read_config(folder)
    usual = net.num_proposals + 1 if method == "dflash" else _DDTREE_NODES
    nodes = _nodes(rest[1], text) if len(rest) == 2 else usual
    most = net.num_proposals + 1 if method == "dflash" else 256
    if not 2 <= nodes <= most:
        msg = (
            f"{text!r} asks for {nodes} nodes a sequence, root included; 2 to {most} are possible. "
            f"Give one of these, or leave it out for {usual}"
        )
        raise ConfigError(msg)
    return Spec(name=text, method=method, folder=folder, net=net, nodes=nodes)


def _nodes(text: str, whole: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    msg = f"{text!r} in {whole!r} is no number of nodes; {_FORM}"
    raise ConfigError(msg)


def config_of(
    base: EngineConfig, spec: Spec, cases: Sequence[Case], steps: int, most: int
) -> EngineConfig:
    """The config of an engine in which all of these cases fit, one at a time.

    Every sequence has room for all its nodes being accepted in every step, and one step more in flight.
    Page tables are twice as wide as that, since in service they are wider than what is in use.

    Args:
        base: device, dtype, page size.
        spec: the drafter.
        cases: what is measured.
        steps: of a repeat, warm-up included.
        most: positions that the model has.

    Raises:
        ConfigError: they do not suffice.
    """
    size = base.cache.page_size
    rows = max(case.sequences for case in cases)
    longest = max(case.context for case in cases)
    starting = 4 + rows * size // base.cache.chunk_size  # steps of those that decode already
    growth = (steps + starting) * spec.nodes
    need = longest + growth
    if need > most:
        msg = (
            f"prompts of {longest} tokens and {growth} that the steps may add need {need} positions, "
            f"and the model's positions end at {most}; use shorter contexts ({most - growth} tokens "
            "at most), or fewer steps"
        )
        raise ConfigError(msg)
    max_len = min(2 * need, most)
    scratch = max(spec.nodes, 0 if spec.net is None else spec.net.block_size)
    # What the sequences hold, and their prompts, which are kept between repeats.
    pages = [
        case.sequences
        * (-(-(case.context + growth + 2 * scratch) // size) + -(-case.context // size) + 2)
        for case in cases
    ]
    cache = CacheConfig(
        page_size=size,
        max_len=max_len,
        max_rows=rows,
        num_pages=max(*pages, -(-(max_len + scratch) // size)),
        chunk_size=base.cache.chunk_size,
    )
    return replace(base, cache=cache, draft=spec.draft)
