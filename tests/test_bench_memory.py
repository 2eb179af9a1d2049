"""bench/bench_memory.py: its arithmetic by hand, and that both of its steps run."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import bench_memory


def test_formula_by_hand():
    """hidden 64, 1 layer, I 192, 4 heads of 64 with 2 of keys and values, V 10, tied:
    P = 640 + (2*64*256 + 2*64*128 + 3*64*192 + 128) + 64 = 86,848.
    Full weights, float32: 16 P. T = 100: 100 * 4 * 64 kept, 100 * 4 * (16*64 + 6*192) = 870,400
    inside the layer; 3 copies of a chunk of 30 * 10 * 4 = 1,200 bytes are less, and with 20,000
    tokens to choose from more."""
    sizes = bench_memory.shape(SimpleNamespace(vocab=10, hidden=64, layers=1, tokens=100))
    args = (sizes, 100, 30, 0, "float32", True, "")
    out = {k: round(v * bench_memory.GB) for k, v in bench_memory.by_formula(*args, 50).items()}
    assert out == dict(weights=16 * 86_848, activations=25_600 + 870_400, chunk_of_logits=1200,
                       ours=16 * 86_848 + 896_000, textbook=16 * 86_848 + 896_000 + 16_000)
    sizes["vocab_size"] = 20_000
    big = bench_memory.by_formula(sizes, 100, 30, 0, "float32", True, "", 10)
    grown = 16 * (86_848 + 64 * 19_990) + 25_600 + 3 * 4 * 10 * 20_000
    assert round(big["ours"] * bench_memory.GB) == grown


def test_a_tiny_run():
    """Both steps run and are compared; ours is more than the step without the vocabulary."""
    done = subprocess.run(
        [sys.executable, BENCH / "bench_memory.py", "--tokens", "200", "--response", "100",
         "--vocab", "60000", "--hidden", "64", "--layers", "1", "--dtypes", "float32",
         "--topk", "20", "--ranks", "16"],
        capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1].split("|")
    ours, alone, ratio = (float(x) for x in row[1].split()[:3])
    assert ours > alone > 0 and ratio == pytest.approx(ours / alone, abs=0.02 + 0.01 / alone)
