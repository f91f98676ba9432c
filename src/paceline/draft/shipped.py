"""Drafters that come with Paceline, by the target that they were trained on.

A drafter is worth what it knows about one target, so it is found by the digest of the target's file,
never by a name that another model may carry too. `drafters/index.json` lists them; it lies beside the
package in a source tree, and inside it where Paceline was installed from a wheel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ModelError

_INDEX = "index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One drafter."""

    target: str  # for people
    sha256: str  # of the target's file
    folder: Path
    methods: tuple[str, ...]  # registry names of the drafters that can use it, best first
    digest: str | None = None  # of what lies in the folder; None: not stated


def folders() -> tuple[Path, ...]:
    """Where drafters may lie: in the installed package, or beside `src` in a source tree."""
    package = Path(__file__).parents[1]
    return package / "drafters", package.parents[1] / "drafters"


def find(sha256: str, places: tuple[Path, ...] | None = None) -> list[Shipped]:
    """Return the drafters that were trained on the target with this digest, best first.

    Args:
        sha256: of the target's file, in hexadecimal digits.
        places: instead of `folders()`.

    Raises:
        ModelError: an index is damaged.
    """
    for place in folders() if places is None else places:
        found = [d for d in _read(place / _INDEX) if d.sha256 == sha256 and d.folder.is_dir()]
        if found:
            return found
    return []


def is_shipped(target: str, drafter: str, places: tuple[Path, ...] | None = None) -> bool:
    """Whether just this drafter, wherever it lies, comes with Paceline for just this target.

    Args:
        target: SHA-256 of the target's file.
        drafter: `models.cache.folder_digest` of the drafter's folder.
        places: instead of `folders()`.

    Raises:
        ModelError: an index is damaged.
    """
    return any(known.digest == drafter for known in find(target, places))


def _read(path: Path) -> list[Shipped]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["drafters"]
        return [
            Shipped(
                target=entry["target"],
                sha256=entry["sha256"],
                folder=path.parent / entry["folder"],
                methods=tuple(entry["methods"]),
                digest=entry.get("digest"),
            )
            for entry in entries
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = (
            f"{path}, the list of drafters that come with Paceline, can't be read ({error!r}); "
            "install Paceline again, or name a drafter with --spec"
        )
        raise ModelError(msg) from error
