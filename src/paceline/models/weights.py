"""WeightRule: which checkpoint tensors a parameter is made of; the table, read both ways.

A model's table is data. Read forwards it loads a checkpoint, one parameter at a time; read
backwards it writes one. Every disagreement between table and checkpoint is found before anything is
read, and all of them are reported together, by layer pattern.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from paceline.core.config import WeightMode
from paceline.core.errors import ModelError
from paceline.layers.linear import Matrix
from paceline.models import checkpoint
from paceline.ops.packed import Groups, PackedWeight, pack


class Join(Protocol):
    """How checkpoint tensors make a parameter, and a parameter makes them."""

    def join(self, parts: Sequence[Tensor | Groups], dtype: torch.dtype) -> Tensor | Groups:
        """Make the parameter; `dtype` where parts must be dequantised to fit together."""
        ...

    def split(self, value: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
        """Make the tensors, which have so many rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """The parameter is one checkpoint tensor."""

    def join(self, parts: Sequence[Tensor | Groups], dtype: torch.dtype) -> Tensor | Groups:
        """See `Join`."""
        del dtype
        (only,) = parts
        return only

    def split(self, value: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
        """See `Join`."""
        del rows
        return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concat:
    """The parameter is several checkpoint tensors, the rows of one after those of the other."""

    def join(self, parts: Sequence[Tensor | Groups], dtype: torch.dtype) -> Tensor | Groups:
        """See `Join`. Codes stay codes where all parts are of one kind."""
        groups = [part for part in parts if isinstance(part, Groups)]
        if len(groups) == len(parts):
            try:
                return Groups.cat_rows(groups)
            except ValueError:  # kinds differ, as in files that keep some projections finer
                pass
        dense = [part.dequantize(dtype) if isinstance(part, Groups) else part for part in parts]
        return torch.cat([part.to(dtype) for part in dense])

    def split(self, value: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
        """See `Join`."""
        return torch.split(value, [*rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One line of a model's table. `{i}` stands for the layer.

    A rule whose target the network does not have (an untied head, a bias) is passed over.
    """

    target: str  # our parameter
    sources: tuple[str, ...]  # checkpoint names
    join: Join = Single()


class _Layered(Protocol):
    @property
    def num_layers(self) -> int: ...


class Network(Protocol):
    """What the table is read for: a language model, or a drafter network."""

    WEIGHTS: ClassVar[tuple[WeightRule, ...]]
    IGNORED: ClassVar[tuple[str, ...]]  # patterns of checkpoint tensors that carry nothing

    @property
    def config(self) -> _Layered:
        """Says how many layers there are."""
        ...

    @property
    def lm_head(self) -> nn.Module | None:
        """None: there is no head of its own, and a copy in the checkpoint is passed over."""
        ...

    def get_submodule(self, target: str) -> nn.Module:
        """See `nn.Module`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A rule for one layer of one network: a parameter and the tensors that it is made of."""

    module: nn.Module
    attribute: str
    join: Join
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the sources

    @property
    def value(self) -> Tensor | PackedWeight:
        """The parameter as it is now."""
        found: Tensor | PackedWeight = getattr(self.module, self.attribute)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how parameters are kept."""

    device: torch.device
    dtype: torch.dtype
    weights: WeightMode = "auto"

    def matrix(self, value: Tensor | Groups) -> Tensor | PackedWeight:
        """A matrix: packed on a CPU if the mode and the machine want it, plain elsewhere."""
        if self.device.type == "cpu":
            return pack(value, self.weights, self.dtype)
        return self.plain(value)

    def plain(self, value: Tensor | Groups) -> Tensor:
        """Any tensor, dequantised if need be, in our dtype on our device."""
        dense = value.dequantize(self.dtype) if isinstance(value, Groups) else value
        return dense.to(device=self.device, dtype=self.dtype)


def bind(net: Network, rules: Sequence[WeightRule] | None = None) -> Iterator[Binding]:
    """Apply a network's table, or another layout's, to its parameters, in table order."""
    for rule in net.WEIGHTS if rules is None else rules:
        path, _, attribute = rule.target.rpartition(".")
        for i in range(net.config.num_layers) if "{i}" in path else (0,):
            try:
                module = net.get_submodule(path.format(i=i))
            except AttributeError:  # this network has none
                continue
            value = getattr(module, attribute, None)
            if value is None:
                continue
            shape = tuple(value.shape)
            splits = getattr(module, "splits", None) or shape[:1]
            assert len(rule.sources) == len(splits), f"{rule.target}: a source per part"
            yield Binding(
                module=module,
                attribute=attribute,
                join=rule.join,
                sources=tuple(source.format(i=i) for source in rule.sources),
                shapes=tuple((rows, *shape[1:]) for rows in splits),
            )


def load(
    net: Network,
    source: checkpoint.TensorSource,
    placement: Placement,
    *,
    rules: Sequence[WeightRule] | None = None,
    problems: Sequence[str] = (),
) -> None:
    """Fill a network from a checkpoint, one parameter at a time.

    Args:
        net: built on any device, "meta" included.
        source: the checkpoint.
        placement: device, dtype and packing of the parameters.
        rules: the table of the checkpoint's layout; default: the network's own.
        problems: what the caller found wrong with tensors that are in no table; listed with the rest.

    Raises:
        ModelError: tensors are missing, unexpected or misshapen; all are listed, nothing is loaded.
    """
    bindings = list(bind(net, rules))
    copies = (r"^lm_head\.weight$",) if net.lm_head is None else ()
    _check(bindings, source, (*net.IGNORED, *copies), problems)
    for binding in bindings:
        parts = [source.read(name) for name in binding.sources]
        value = binding.join.join(parts, placement.dtype)
        if isinstance(binding.module, Matrix) and binding.attribute == "weight":
            binding.module.set_weight(placement.matrix(value))
        else:
            plain = nn.Parameter(placement.plain(value), requires_grad=False)
            setattr(binding.module, binding.attribute, plain)


def packed_kinds(net: nn.Module) -> Counter[str]:
    """How many matrices are packed, by representation and implementation."""
    matrices = (module.weight for module in net.modules() if isinstance(module, Matrix))
    return Counter(weight.kind for weight in matrices if not isinstance(weight, Tensor))


def save(net: Network, path: Path) -> None:
    """Write a network's weights under their checkpoint names, as one safetensors file.

    Args:
        net: with weights that are plain, or packed without rounding.
        path: the file; it appears complete or not at all.

    Raises:
        ModelError: the weights are rounded to codes, so the exact values are gone.
        OSError: the folder is missing, read-only or full.
    """
    specs, tensors = [], []
    for binding in bind(net):
        value = binding.value if isinstance(binding.value, Tensor) else binding.value.plain()
        if value is None:
            msg = (
                f"cannot write {path}: the weights are packed for this CPU; plain weights can be "
                "written. Load the model with weights='bf16' first."
            )
            raise ModelError(msg)
        parts = binding.join.split(value, [shape[0] for shape in binding.shapes])
        for name, part in zip(binding.sources, parts, strict=True):
            shape = tuple(part.shape)
            specs.append(checkpoint.TensorSpec(name=name, dtype=part.dtype, shape=shape))
            tensors.append(part)
    checkpoint.write(path, specs, tensors, {"format": "pt"})


def _check(
    bindings: Sequence[Binding],
    source: checkpoint.TensorSource,
    ignored: Sequence[str],
    problems: Sequence[str],
) -> None:
    """Compare what the table wants with what the checkpoint has."""
    wanted = {
        name: shape
        for binding in bindings
        for name, shape in zip(binding.sources, binding.shapes, strict=True)
    }
    skipped = re.compile("|".join(ignored)) if ignored else None
    lines = _grouped("missing", (n for n in wanted if n not in source.shapes))
    lines += _grouped(
        "unexpected",
        (n for n in source.shapes if n not in wanted and not (skipped and skipped.search(n))),
    )
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    for name, shape in wanted.items():
        found = source.shapes.get(name, shape)
        if found != shape:
            wrong[f"wrong shape {list(found)} instead of {list(shape)}"].append(name)
    for what, names in wrong.items():
        lines += _grouped(what, names)
    lines += problems
    if lines:
        listed = "\n".join(f"  - {line}" for line in lines)
        msg = (
            f"the tensors in {source.where} do not fit its configuration:\n{listed}\nAll of these "
            "must agree. Check that weights and configuration are of the same model, complete and "
            "of a supported architecture."
        )
        raise ModelError(msg)


def _grouped(what: str, names: Iterable[str]) -> list[str]:
    """One line per layer pattern: 'missing: model.layers.{0-3,7}.mlp.up_proj.weight'."""
    layers: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if match is None else f"{name[: match.start()]}{{}}{name[match.end() :]}"
        layers.setdefault(pattern, []).extend([] if match is None else [int(match.group())])
    return [f"{what}: {pattern.replace('{}', _ranges(found))}" for pattern, found in layers.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as '{0-2,5}'; a single number as itself."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
