"""Is the proxy safe to leave running? Two figures, against a mock engine.

sessions   10,000 sessions of one turn each, which expire after a second of silence: what is left in
           the maps, and the proxy's memory after every 2,000 of them.
readers    64 clients that read their streams very slowly: the latency of everybody else's requests,
           with them against without them (A B B A, medians).

    python bench/bench_stress.py [--json FILE] [--sessions 10000] [--readers 64]
"""
import argparse
import contextlib
import http.client
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import psutil
from bench_proxy import bare_proxy, launch

from sync import free_port


def start(engine, folder, **changes):
    """The proxy in this process -> its Server."""
    server, web = bare_proxy(engine, folder / "turns.jsonl", port=free_port(), **changes)
    threading.Thread(target=web.run, daemon=True).start()
    return server


def ask(port, n, **more):
    """One request on a connection of its own -> seconds."""
    begin = time.monotonic()
    body = {"messages": [{"role": "user", "content": f"Question {n}?"}], **more}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as link:
        link.request("POST", "/v1/chat/completions", json.dumps(body),
                     {"Content-Type": "application/json"})
        answer = link.getresponse()
        answer.read()
    assert answer.status == 200, answer.status
    return time.monotonic() - begin


def many_sessions(engine, folder, n):
    """-> memory in MB after every fifth of the sessions, and what is left in the maps."""
    server, mine, memory = start(engine, folder, session_timeout=1.0), psutil.Process(), []
    with ThreadPoolExecutor(8) as pool:
        for part in range(5):
            list(pool.map(lambda i: ask(server.cfg.port, i, max_tokens=4),
                          range(part * n // 5, (part + 1) * n // 5)))
            time.sleep(1.2)
            server.sessions.expire()
            memory.append(round(mine.memory_info().rss / 1e6, 1))
    tables = {k: v for k, v in vars(server.sessions).items() if isinstance(v, dict | set)}
    return {"sessions": n, "memory_mb": memory, "open_turns": len(server.log.open),
            "left": {k: len(v) for k, v in tables.items()}, "fates": dict(server.log.fates)}


@contextlib.contextmanager
def slow_readers(port, n):
    """n open streams, of which a few bytes are read now and then."""
    body = json.dumps({"messages": [{"role": "user", "content": "Long."}], "stream": True,
                       "max_tokens": 2000})
    over, links = threading.Event(), []
    for _ in range(n):
        link = socket.create_connection(("127.0.0.1", port))
        link.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                     f"application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        links.append(link)

    def read():
        while not over.wait(1):
            for link in links:
                link.recv(64)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()
        for link in links:
            link.close()


def beside_readers(engine, folder, n, requests=100, rounds=3):
    """-> median latency in ms of requests one after another: without, with the slow readers, who
    have streams of 2,000 tokens; the others ask the same engine for one token each."""
    port = start(engine, folder, max_requests=n + 8).cfg.port
    alone, beside, ratios = [], [], []
    for _ in range(rounds):
        a = [ask(port, i, max_tokens=1) for i in range(requests)]
        with slow_readers(port, n):
            time.sleep(1)
            b = [ask(port, i, max_tokens=1) for i in range(2 * requests)]
        a += [ask(port, i, max_tokens=1) for i in range(requests)]
        alone.append(1000 * statistics.median(a))
        beside.append(1000 * statistics.median(b))
        ratios.append(beside[-1] / alone[-1])
        time.sleep(1)
    return {"readers": n, "alone_ms": alone, "beside_ms": beside, "ratios": ratios}


def run(args):
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine, _ = launch(stack, folder, "mock", "--tokens", 2000)
        for name in "ab":
            (folder / name).mkdir()
        out = {"many_sessions": many_sessions(engine, folder / "a", args.sessions),
               "slow_readers": beside_readers(engine, folder / "b", args.readers)}
    print(json.dumps(out, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=64)
    run(parser.parse_args())
