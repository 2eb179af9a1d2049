"""What does it cost users that somebody looks at the page?

Requests per second with the page open against without, of one proxy in front of the mock engine,
with the fake users of bench_proxy.py. A looker-on is a process of its own that does what a browser
does: it fetches the page and its files as the run begins, opens the event stream and reads it to
the run's end. In a run without, it waits. Before each run, of both kinds, it has glanced at the
stream, so that no run pays for the record of the one before.

A round runs with (A) and without the page (B) in the order A B B A. Printed are medians over all
runs, then the ratios with / without per round: their median and range. 0.97 req/s x is the aim.

    python bench/bench_page.py [--json FILE] [--pages 4]
"""
import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_proxy import COLUMNS, NOTES, Failed, Way, compare, launch, measure, medians

from page.live import STREAMS
from sync import BASE

# ---------------------------------------------------------------------- one looker-on, as a process


def stream(port):
    """The page's event stream -> (its socket, response), once there is a place for it."""
    for _ in range(100):  # a place is free again a moment after its page has gone
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        link.request("GET", "/events")
        wire, response = link.sock, link.getresponse()
        if response.status == 200:
            return wire, response
        link.close()
        time.sleep(0.05)
    raise Failed(f"the page's stream answers {response.status}")


def load_page(port):
    """What a browser fetches before the stream -> bytes."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as link:
        size, paths = 0, ["/"]
        for path in paths:
            link.request("GET", path)
            body = link.getresponse().read()
            size += len(body)
            if path == "/":
                paths += re.findall(r'(?:src|href)="(/[^"]+)"', body.decode())
        return size


def look(port):
    """Glance, say "ready", wait for a line, look on until the input ends, say what was seen. An
    input that ends without a line wants no more than the glance."""
    _, response = stream(port)
    while not response.readline().startswith(b"event: status"):
        pass
    response.close()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    size, (wire, response) = load_page(port), stream(port)
    events, told, over = Counter(), threading.Event(), threading.Event()

    def leave():
        sys.stdin.read()
        told.wait()  # also in a run that is over at once
        over.set()
        wire.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=leave, daemon=True).start()
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        while line := response.readline():
            size += len(line)
            if line.startswith(b"event: "):
                events[line[7:-1].decode()] += 1
                events["status"] and told.set()
    if not over.is_set():
        raise Failed("the page's stream ended by itself")
    print(json.dumps({"bytes": size, "turns": events["turns"], "status": events["status"]}))


class Looker:
    """That process, from outside."""

    def __init__(self, stack, port):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "look", "--port", str(port)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def ready(self):
        if self.process.stdout.readline() != "ready\n":
            raise Failed(self.process.communicate()[1])

    def open(self):
        self.process.stdin.write("open\n")
        self.process.stdin.flush()

    def close(self):
        said, complaint = self.process.communicate(timeout=60)
        if self.process.returncode:
            raise Failed(complaint)
        return json.loads(said or "null")


# ------------------------------------------------------------------------------------- the figures


def measure_beside(way, looking, args):
    """One run, with the pages open or without -> its figures."""
    with contextlib.ExitStack() as stack:
        lookers = [Looker(stack, way.port) for _ in range(args.pages)]
        for looker in lookers:
            looker.ready()
        for looker in lookers if looking else ():
            looker.open()
        figures = measure(way, args.concurrency, args.requests, True, args.tokens)
        seen = [looker.close() for looker in lookers]
    if looking and not all(s["turns"] and s["status"] for s in seen):
        raise Failed(f"a page was told nothing: {seen}")
    return {**figures, "page_kb": statistics.mean(s["bytes"] for s in seen) / 1e3 if looking else 0}


def bench(way, args):
    """-> (medians with, medians without, comparison)"""
    rounds, wants = [], (True, False, False, True)
    measure_beside(way, True, args)  # unmeasured: caches, threads, imports
    for i in range(args.rounds):
        print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
        runs = [measure_beside(way, looking, args) for looking in wants]
        rounds.append((runs[::3], runs[1:3]))
    return (*(medians([run for two in rounds for run in two[kind]]) for kind in (0, 1)),
            compare(rounds))


def show(beside, alone, ratio):
    print(f"{'':12}" + "".join(f"{title:>11}" for title in COLUMNS.values()) + f"{'page kB':>11}")
    for name, row in (("page open", beside), ("without", alone)):
        print(f"{name:12}" + "".join(f"{row[k]:11.2f}" for k in (*COLUMNS, "page_kb")))
    told = [f"{title} {x['median']:.3f} ({x['min']:.3f} to {x['max']:.3f})"
            for x, title in ((ratio[key], title) for key, title in NOTES.items())]
    print("  page open / without: " + ", ".join(told))


# ------------------------------------------------------------------------------------- the command


def flags():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", nargs="?", default="run", choices=("run", "look"),
        help="run (default): measure; look: the looker-on that it starts")
    add("--pages", type=int, default=1, choices=range(1, STREAMS + 1), help="open at once [1]")
    add("--concurrency", type=int, default=8, help="requests at once [8]")
    add("--requests", type=int, default=1000, help="per run [1000]")
    add("--tokens", type=int, default=16, help="per reply [16]")
    add("--rounds", type=int, default=5, help="of A B B A [5]")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--port", type=int, help="look only: the proxy's")
    return parser.parse_args()


def run(args):
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-page-")))
        engine, _ = launch(stack, folder, "mock", "--tokens", args.tokens)
        url, child = launch(stack, folder, "ours", "--engine", engine, "--model", BASE,
                            "--log", folder / "turns.jsonl", "--concurrency", args.concurrency)
        beside, alone, ratio = bench(Way("ours", url, BASE, child), args)
    knobs = {k: getattr(args, k) for k in ("pages", "concurrency", "requests", "tokens", "rounds")}
    print(", ".join(f"{k} {v}" for k, v in knobs.items()) + f", {os.cpu_count()} cores")
    show(beside, alone, ratio)
    if args.json:
        args.json.write_text(json.dumps({**knobs, "cores": os.cpu_count(), "page_open": beside,
                                         "without": alone, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    args = flags()
    try:
        look(args.port) if args.what == "look" else run(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except (Failed, ChildProcessError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"no figures: {error}" if args.what == "run" else str(error))
