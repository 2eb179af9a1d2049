"""The benchmark of the proxy: the shape of its figures, never their size; that it fails honestly
and leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sync import free_port

BENCH = Path(__file__).resolve().parent.parent / "bench" / "bench_proxy.py"
RATIOS = {"rps", "p50_ms", "p99_ms", "first_ms", "p50_ms_added", "first_ms_added"}


def start(*flags):
    return subprocess.Popen([sys.executable, BENCH, *map(str, flags)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_figures(tmp_path):
    """One tiny run: every cell has every way, and every comparison its median within its range.

    Protects: no request fails, whole or streamed, also where a conversation goes on.
    """
    bench = start("--rounds", 2, "--requests", 10, "--concurrency", "1,2", "--mock-tokens", 5,
                  "--json", tmp_path / "figures")
    printed, said = bench.communicate(timeout=120)
    assert bench.returncode == 0, said
    assert "ours / original" in printed and "2 at once, whole" in printed
    figures = json.loads((tmp_path / "figures").read_text())
    assert (figures["engine"], figures["tokens"], figures["rounds"]) == ("mock", 5, 2)
    cells = figures["cells"]
    assert [(c["concurrency"], c["streamed"]) for c in cells] == [
        (1, True), (1, False), (2, True), (2, False)]
    for cell in cells:
        check_ways(cell["ways"], cell["streamed"])
        assert set(cell["against"]) == {"direct", "original"}
        for other, against in cell["against"].items():
            of_a_process = {"cpu_ms", "peak_mb"} if other == "original" else set()
            assert set(against) == RATIOS | of_a_process
            assert all(x["min"] <= x["median"] <= x["max"] for x in against.values())


def check_ways(ways, streamed):
    assert list(ways) == ["direct", "ours", "original"]
    assert ways["direct"]["events"] == ways["ours"]["events"] == (5 if streamed else 1)
    assert ways["original"]["events"] == 1  # a finished answer, replayed
    for name, way in ways.items():
        assert way["rps"] > 0 and way["p50_ms"] <= way["p99_ms"], name
        assert way["first_ms"] <= way["p50_ms"] or not streamed, name
        assert (way["peak_mb"] is None) == (way["cpu_ms"] is None) == (name == "direct"), name
        assert (way["gap_ms"] is None) == (not streamed or name == "original"), name
        assert (way["cpu_us_event"] is None) == (not streamed or name != "ours"), name


def test_a_failed_request_ends_it():
    """Without an engine there are no figures but a sentence and exit code 1."""
    bench = start("--engine", f"http://127.0.0.1:{free_port()}", "--requests", 2, "--rounds", 1)
    printed, said = bench.communicate(timeout=60)
    assert bench.returncode == 1 and not printed
    assert "no figures: direct: " in said and "Traceback" not in said


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM)])
def test_an_interrupt_leaves_nothing(name, code):
    """Engine and proxies end with the benchmark, however it ends, and free their ports."""
    bench = start("--rounds", 1000, "--requests", 10, "--concurrency", 1)
    while "round 1 of" not in bench.stderr.readline():
        assert bench.poll() is None
    servers = psutil.Process(bench.pid).children(recursive=True)
    assert len(servers) == 6  # three servers, each with its guard
    bench.send_signal(getattr(signal, name))
    bench.communicate(timeout=30)
    assert bench.returncode == code
    limit = time.monotonic() + 10
    while [p for p in servers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < limit, "a server went on"
        time.sleep(0.05)
