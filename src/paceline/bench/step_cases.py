"""What is measured: drafters as they are asked for, cases, and the engine that has room for them.

A drafter is METHOD:CONFIG[:NODES]; CONFIG is a folder with a config.json, that file, or the name of a
shape that comes with Paceline; NODES are the tokens that a step verifies for a sequence, root included.
Or it is one that costs nothing and only has trees verified (`fixed_trees.py`): chain:NODES, and
uneven:MEAN:MOST for sequences of different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.errors import ConfigError, MemoryBudgetError
from paceline.draft.dflash_config import DFlashConfig, read_config
from paceline.engine.build import MAX_ROWS

NETWORKS = ("dflash", "ddtree")
FIXED = {"chain": 1, "uneven": 2}  # how many numbers each takes
_DDTREE_NODES = 32
_MOST_NODES = 256  # root included
_MOST_DIGITS = 9  # of a number; longer ones are no sizes of anything
_FORM = (
    "a drafter is none, or METHOD:CONFIG or METHOD:CONFIG:NODES with METHOD dflash or ddtree, or "
    "chain:NODES or uneven:MEAN:MOST, for example dflash:qwen3-8b-dflash-b16, ddtree:FOLDER:32, "
    "chain:16 or uneven:4:16"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A drafter, and how many tokens a step verifies with it."""

    name: str  # as it was asked for
    method: str
    folder: Path | None = None
    net: DFlashConfig | None = None  # of that folder
    nodes: int = 1  # root included; of a sequence on average
    most: int = 1  # of one sequence

    @property
    def draft(self) -> DraftConfig:
        """The engine's words for it: everything that is drafted is verified."""
        return DraftConfig(
            method=self.method,
            model=None if self.folder is None else str(self.folder),
            num_speculative_tokens=self.most - 1,
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
    if method in FIXED and len(rest) == FIXED[method]:
        return _fixed(text, method, [_nodes(number, text) for number in rest])
    if method == "none" and not rest:
        return Spec(name=text, method=method)
    if method not in NETWORKS or len(rest) not in {1, 2}:
        msg = f"unknown drafter {text!r} to be measured; {_FORM}"
        raise ConfigError(msg)
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
    most = net.num_proposals + 1 if method == "dflash" else _MOST_NODES
    if not 2 <= nodes <= most:
        msg = (
            f"{text!r} asks for {nodes} nodes a sequence, root included; 2 to {most} are possible. "
            f"Give one of these, or leave it out for {usual}"
        )
        raise ConfigError(msg)
    return Spec(name=text, method=method, folder=folder, net=net, nodes=nodes, most=nodes)


def _fixed(text: str, method: str, numbers: Sequence[int]) -> Spec:
    """A drafter without a network: MEAN nodes, and MOST where they are not the same."""
    mean, most = numbers[0], numbers[-1]
    if not 2 <= mean <= most <= _MOST_NODES:
        msg = (
            f"{text!r} asks for {mean} nodes a sequence and {most} at most, root included; 2 to "
            f"{_MOST_NODES} are possible, and no more on average than at most. Give such numbers, or "
            "none for one node"
        )
        raise ConfigError(msg)
    return Spec(name=text, method=method, nodes=mean, most=most)


def _nodes(text: str, whole: str) -> int:
    number = _number(text)
    if number is not None:
        return number
    msg = f"{text!r} in {whole!r} is no number of nodes; {_FORM}"
    raise ConfigError(msg)


def _number(text: str) -> int | None:
    """A number of digits; None: it is none, or too long to mean anything."""
    plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if plain else None


def cases_of(sequences: Sequence[int], contexts: Sequence[int], words: Sequence[str]) -> list[Case]:
    """What is measured: every number of sequences at every context, or the cases that are named.

    Args:
        sequences: numbers of sequences; default: 1.
        contexts: tokens of a prompt; default: 1024.
        words: cases as SEQUENCESxCONTEXT, in place of both.

    Raises:
        ConfigError: a word of another form, both ways at once, or more sequences than decode together.
    """
    if words and (sequences or contexts):
        msg = (
            "--case says how many sequences of which context there are, and so do --sequences and "
            "--context; give one or the other"
        )
        raise ConfigError(msg)
    cases = [_case(word) for word in dict.fromkeys(words)] or [
        Case(sequences=n, context=length)
        for length in dict.fromkeys(contexts or [1024])
        for n in dict.fromkeys(sequences or [1])
    ]
    most = max(case.sequences for case in cases)
    if most > MAX_ROWS:
        msg = (
            f"{most} sequences were asked for, and {MAX_ROWS} at most decode together; ask for fewer "
            "(--sequences, --case)"
        )
        raise ConfigError(msg)
    return cases


def _case(word: str) -> Case:
    numbers = [_number(part) or 0 for part in word.split("x")]
    if len(numbers) != 2 or min(numbers) < 1:
        msg = (
            f"cannot read the case {word!r}; a case is SEQUENCESxCONTEXT, both 1 or more, for example "
            "8x1024"
        )
        raise ConfigError(msg)
    return Case(sequences=numbers[0], context=numbers[1])


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
    growth = (steps + starting) * spec.most
    need = longest + growth
    if need > most:
        room = most - growth
        msg = (
            f"prompts of {longest} tokens and {growth} that the steps may add need {need} positions, "
            f"and the model's positions end at {most}; use "
            + (f"shorter contexts ({room} tokens at most), or " if room > 0 else "")
            + "fewer steps (--steps, --stage-steps, --warmup)"
            + (", nodes (--spec)" if spec.most > 1 else "")
            + (", or sequences, which start one after the other" if rows > 1 else "")
        )
        raise ConfigError(msg)
    max_len = min(2 * need, most)
    scratch = max(spec.most, 0 if spec.net is None else spec.net.block_size)
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


def check_pages(cases: Sequence[Case], steps: int, cache: CacheConfig, pool: str) -> None:
    """Refuse cases whose sequences cannot all decode at once: waiting ones would be no part of a step.

    Args:
        cases: what is measured.
        steps: of a repeat, warm-up included; each makes a token at least.
        cache: of the engine, sized.
        pool: what was said of its size.

    Raises:
        MemoryBudgetError: one of them has too few pages.
    """
    assert cache.num_pages is not None, "it is sized"
    large = {
        f"{case.sequences}x{case.context}": need
        for case in cases
        if (need := case.sequences * -(-(case.context + steps) // cache.page_size))
        > cache.num_pages
    }
    if large:
        msg = (
            f"{', '.join(large)} (sequences x context) {'needs' if len(large) == 1 else 'need'} "
            f"{max(large.values())} KV pages at least to decode at once, and {cache.num_pages} fit: "
            f"{pool}; measure fewer sequences or shorter contexts (--case), or free memory"
        )
        raise MemoryBudgetError(msg)
