"""What `benchmarks/gpu_linear.py` writes into the table of products, and what it tries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.ops.triton import linear_table
from paceline.ops.triton.linear_table import BLOCKS, Tiles

ROOT = Path(__file__).parents[3]
TABLE = Path(linear_table.__file__)
MORE = {
    ("linear", 6144, 4096): {16: Tiles(block_n=32, block_k=256, num_stages=3)},
    ("linear_add_rms_norm", 4096, 12_288): {
        16: Tiles(block_n=64, block_k=128, split=4, swap=True),
        64: Tiles(block_n=128, block_k=64, num_warps=8),
    },
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


def loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script() -> ModuleType:
    return loaded("gpu_linear", ROOT / "benchmarks" / "gpu_linear.py")


def test_the_table_is_as_the_script_writes_it(script: ModuleType) -> None:
    """The same lines give the same file."""
    text = TABLE.read_text()
    assert script.put(linear_table.TABLE, text) == text


def test_lines_are_exchanged(script: ModuleType, tmp_path: Path) -> None:
    """Other lines, and the empty table again; all else stays."""
    text = TABLE.read_text()
    path = tmp_path / "other_table.py"
    path.write_text(script.put(MORE, text))
    other = loaded("other_table", path)
    assert repr(other.TABLE) == repr(MORE)
    assert repr(other.tiles_for("linear", 9, 6144, 4096)) == repr(MORE["linear", 6144, 4096][16])
    assert other.tiles_for("linear", 17, 6144, 4096) is None
    assert script.put(linear_table.TABLE, path.read_text()) == text
    assert script.put(linear_table.TABLE, script.put({}, text)) == text


def test_what_is_tried_fits(script: ModuleType) -> None:
    """Something for each product and number of rows; splits without rest, and only where they help."""
    for product in script.PRODUCTS:
        for block in BLOCKS:
            tried = script.candidates(product, block, 132)
            assert tried
            assert len(set(tried)) == len(tried)
            for tiles in tried:
                assert tiles.split == 1 or product.op == "linear_add_rms_norm"
                assert -(-product.k // tiles.block_k) % tiles.split == 0
    assert sum(product.time for product in script.PRODUCTS) == pytest.approx(1)
