"""What does the proxy cost, and what does it save?

One client asks the same engine in three ways: `direct`, the engine itself; `ours`, proxy.py behind
waitress; `original`, a stand-in for the original project's design: an httpx client per request,
and always the whole answer, which is replayed to those who wanted a stream. (It records nothing,
which is in its favour.) The client wants no log-probs; that both proxies ask the engine for them is
part of what they cost. Client, engine and both proxies are processes of their own.

A round runs ours (A) and another way (B) in the order A B B A, so that a machine that gets slower
favours neither. Printed are medians over all runs, then ratios and differences per round: their
median and range. CPU and memory are the proxy process's, read from /proc: Linux only.

    python bench/bench_proxy.py [--json FILE]         a mock engine that costs next to nothing
    python bench/bench_proxy.py --real --concurrency 1,8 --requests 16 --rounds 2     the demo model
    python bench/bench_proxy.py --engine http://127.0.0.1:8000 --model NAME    a running engine
"""
import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil
from fake_engine import folded, say, shaped

import main
import proxy
from sync import BASE, Child, engine_command, engine_env, free_port, wait_ready

LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
CONTENT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)+)"')  # words of a reply, streamed or not
FINISH = re.compile(rb'"finish_reason": ?"(?:stop|length|tool_calls)"')

# --------------------------------------------------------------------------------- the mock engine


def packed(data):
    return json.dumps(data, separators=(",", ":")).encode()


@functools.cache
def mock_parts(tokens, stream, logprobs, ids, usage):
    """One answer in vLLM's shape -> [(tokens to wait for, bytes)]; what was not asked is null."""
    asked = {"messages": [], "stream": stream, "logprobs": logprobs, "return_token_ids": ids,
             "stream_options": {"include_usage": usage}}
    steps = say("".join(f" word{i}" for i in range(tokens)), finish="length")[:-1]
    steps = [s for s in (shaped(s, asked, lambda _: list(range(100, 140))) for s in steps) if s]
    if stream:
        head = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n")
        waits = [bool(s["choices"]) and "token_ids" in s["choices"][0] for s in steps] + [False]
        framed = [b"%x\r\ndata: %b\n\n\r\n" % (len(event) + 8, event)
                  for event in (*map(packed, steps), b"[DONE]")]
        return [(0, head), *zip(waits, framed, strict=True), (0, b"0\r\n\r\n")]
    answer, choices = folded(steps), [c for s in steps for c in s["choices"]]
    answer["prompt_token_ids"] = steps[0]["prompt_token_ids"]
    if ids:
        answer["choices"][0]["token_ids"] = [i for c in choices for i in c.get("token_ids") or ()]
    if logprobs:
        answer["choices"][0]["logprobs"] = {
            "content": [e for c in choices for e in (c["logprobs"] or {}).get("content") or ()]}
    body = packed(answer)
    return [(tokens, b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d"
             b"\r\n\r\n%b" % (len(body), body))]


def serve_mock(args):
    """Answers every POST with bytes made beforehand, one write per chunk as vLLM does."""

    async def connection(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                asked = json.loads(await reader.readexactly(int(LENGTH.search(head)[1])))
                usage = (asked.get("stream_options") or {}).get("include_usage")
                wishes = (asked.get(k) for k in ("stream", "logprobs", "return_token_ids"))
                tokens = min(args.tokens, asked.get("max_tokens") or args.tokens)
                for n, part in mock_parts(tokens, *map(bool, (*wishes, usage))):
                    if n and args.mock_delay:
                        await asyncio.sleep(n * args.mock_delay)
                    writer.write(part)

    async def serve():
        server = await asyncio.start_server(connection, "127.0.0.1", args.port, backlog=512)
        await server.serve_forever()

    asyncio.run(serve())


# ------------------------------------------------------------------------------------- the proxies


def bare_proxy(engine, log, model=BASE, **changes):
    """The proxy as main.py starts it, without judge and trainer -> proxy.Server, web server."""
    cfg = SimpleNamespace(**vars(main.Config()))
    vars(cfg).update(main.PRESETS["cpu"], api_key="", tool_parser="")
    vars(cfg).update(changes)
    log, policy = proxy.TurnLog(log), proxy.Policy(model)
    policy.accepting = True
    sessions, hooks = proxy.Sessions(log, cfg.session_timeout), proxy.Hooks()
    server = proxy.Server(cfg, engine, policy, sessions, log, hooks)
    return server, proxy.serve(proxy.make_app(server), cfg)


def serve_ours(args):
    server, web = bare_proxy(args.engine, args.log, args.model, port=args.port, session_timeout=10,
                             max_requests=max(main.Config().max_requests, *args.concurrency))
    # or it would be kept for ever
    server.hooks.paired = lambda turn: server.log.close(turn, "trained", 0)

    def expire():
        while True:
            time.sleep(1)
            server.sessions.expire()

    threading.Thread(target=expire, daemon=True).start()
    web.run()


def serve_original(args):
    """The original's design, nothing more: a new client per request, answers replayed."""
    import httpx
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, StreamingResponse

    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = await request.json()
        stream = body.pop("stream", False)
        body |= {"model": args.model, "logprobs": True, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=None) as client:
            response = await client.post(f"{args.engine}/v1/chat/completions", json=body)
        answer = response.json()
        if response.status_code != 200 or not stream:
            return JSONResponse(answer, response.status_code)
        return StreamingResponse(replayed(answer), media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


async def replayed(answer):
    """A finished answer as a stream: role, all words, the end."""
    base = {k: answer[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = answer["choices"][0]
    for delta, finish in (({"role": "assistant", "content": ""}, None),
                          ({"content": choice["message"]["content"]}, None),
                          ({}, choice["finish_reason"])):
        one = {"index": 0, "delta": delta, "finish_reason": finish}
        yield f"data: {json.dumps({**base, 'choices': [one]})}\n\n"
    yield "data: [DONE]\n\n"


SERVERS = {"serve-mock": serve_mock, "serve-ours": serve_ours, "serve-original": serve_original}

# -------------------------------------------------------------------------------------- the client


class Failed(Exception):
    """A request or a server did not do its work; the figures would mean nothing."""


class Connection(asyncio.Protocol):
    """One connection, kept as long as the server keeps it. Words are looked for in the raw bytes:
    parsing would cost the client more than the fastest server needs."""

    reply, closed = None, False

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, error):
        self.closed = True
        if self.reply and not self.reply.done():
            self.reply.set_exception(Failed(f"the connection broke after {bytes(self.got)!r}"))

    async def ask(self, start, head, body):
        """-> (seconds, seconds to the first words, gaps between words, what was said)"""
        self.got, self.head, self.at, self.times, self.words = bytearray(), None, 0, [], []
        self.reply = asyncio.get_running_loop().create_future()
        self.transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        end = await self.reply
        if not self.got.startswith(b"HTTP/1.1 200 ") or not FINISH.search(self.got) or (
                b"text/event-stream" in self.head and b"data: [DONE]" not in self.got):
            raise Failed(f"no complete answer: {self.got[:2000].decode(errors='replace')}")
        if self.closed or b"connection: close" in self.head:
            self.closed = True
            self.transport.abort()
        gaps = [b - a for a, b in itertools.pairwise(self.times)]
        said = json.loads(b'"%b"' % b"".join(self.words))
        return end - start, (self.times or [end])[0] - start, gaps, said

    def data_received(self, data):
        now = time.perf_counter()
        self.got += data
        for match in CONTENT.finditer(self.got, self.at):
            self.times.append(now)
            self.words.append(match[1])
            self.at = match.end()
        if self.head is None and b"\r\n\r\n" in self.got:
            self.head = bytes(self.got.partition(b"\r\n\r\n")[0]).lower()
        if self.head is not None and not self.reply.done() and self.whole():
            self.reply.set_result(now)

    def whole(self):
        length = LENGTH.search(self.head)
        if length:
            return len(self.got) >= len(self.head) + 4 + int(length[1])
        return self.got.endswith(b"\r\n0\r\n\r\n")


async def connect(way):
    return (await asyncio.get_running_loop().create_connection(Connection, way.host, way.port))[1]


async def talk(way, connection, numbers, options, out):
    """One user. Every second request goes on with the conversation, so that turns are paired."""
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: {way.host}:{way.port}\r\n"
            "Content-Type: application/json\r\n").encode()
    said = []
    for _ in numbers:
        said = [] if len(said) == 4 else said
        words = f"{secrets.token_hex(4)}: what should I know about this number, and why?"
        said += [{"role": "user", "content": words}]
        body, start = json.dumps({**options, "messages": said}).encode(), time.perf_counter()
        if connection.closed:  # the server ended it: its users pay for a new one
            connection = await connect(way)
        answer = await connection.ask(start, head, body)
        said += [{"role": "assistant", "content": answer[3]}]
        out.append(answer)
    connection.transport.abort()


async def load(way, at_once, requests, streamed, tokens):
    """-> (wall seconds, answers). Connections are opened before the clock starts."""
    out, numbers = [], iter(range(requests))
    options = {"model": way.model, "max_tokens": tokens, "stream": streamed}
    connections = [await connect(way) for _ in range(at_once)]
    start = time.perf_counter()
    await asyncio.gather(*(talk(way, c, numbers, options, out) for c in connections))
    return time.perf_counter() - start, out


def measure(way, *args):
    """One run -> its figures."""
    way.forget_peak()
    used, mine = way.cpu_s(), time.process_time()
    try:
        wall, answers = asyncio.run(asyncio.wait_for(load(way, *args), 1200))
    except (Failed, OSError) as error:
        raise Failed(f"{way.name}: {error or type(error).__name__}"
                     + (f"\n{way.child.tail()}" if way.child else "")) from None
    used, mine, n = way.cpu_s() - used, time.process_time() - mine, len(answers)
    seconds = sorted(a[0] for a in answers)
    gaps = [gap for a in answers for gap in a[2]]
    events = n + len(gaps)  # with words in them, as the client got them
    return {"rps": n / wall, "p50_ms": 1e3 * statistics.median(seconds),
            "p99_ms": 1e3 * seconds[int(0.99 * (n - 1) + 0.5)],
            "first_ms": 1e3 * statistics.median(a[1] for a in answers),
            "gap_ms": 1e3 * statistics.median(gaps) if gaps else None,
            "events": events / n, "peak_mb": way.peak_mb(),
            "cpu_ms": 1e3 * used / n if way.process else None,
            "cpu_us_event": 1e6 * used / events if way.process and gaps else None,
            "client_busy": mine / wall}


# ----------------------------------------------------------------------- the ways and their figures


class Way:
    """Where the client can ask, and the process behind it if it is a proxy."""

    def __init__(self, name, url, model, child=None):
        self.name, self.model, self.child, parts = name, model, child, urlsplit(url)
        self.host, self.port = parts.hostname, parts.port or 80
        # the child's own process is the guard that ends it with us; the server is its child
        self.process = child and psutil.Process(child.process.pid).children()[0]

    def cpu_s(self):
        return sum(self.process.cpu_times()[:2]) if self.process else 0.0

    def forget_peak(self):
        if self.process:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_mb(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text() if self.process else None
        return status and int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def launch(stack, folder, name, *flags, cores=None):
    """Start `serve-NAME` -> (its URL, Child), once it listens. The stack ends it."""
    port = free_port()
    child = Child(name, [sys.executable, Path(__file__).resolve(), f"serve-{name}", "--port", port,
                         *flags], folder / f"{name}.log", cores=cores)
    stack.callback(child.stop)
    limit = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return f"http://127.0.0.1:{port}", child
        if not child.alive() or time.monotonic() > limit:
            raise Failed(f"{name} did not start:\n{child.tail()}")
        time.sleep(0.05)


def real_engine(stack, folder):
    cfg, port = main.parse(["--run-dir", str(folder / "run")]), free_port()
    child = Child("engine", engine_command(cfg, cfg.model, port, False), folder / "engine.log",
                  env=engine_env(cfg), cores=cfg.engine_cores)
    stack.callback(child.stop)
    wait_ready(child, f"http://127.0.0.1:{port}", 600, lambda *_: None)
    return f"http://127.0.0.1:{port}"


def ways(stack, args, folder):
    """Start everything -> {name: Way}"""
    engine = args.engine
    if args.real:
        engine = real_engine(stack, folder)
    elif not engine:
        engine, _ = launch(stack, folder, "mock", "--tokens", args.tokens, "--mock-delay",
                           args.mock_delay)
    flags = ["--engine", engine, "--model", args.model, "--log", folder / "turns.jsonl",
             "--concurrency", ",".join(map(str, args.concurrency))]
    proxies = {name: launch(stack, folder, name, *flags, cores=args.proxy_cores)
               for name in ("ours", "original")}
    return {"direct": Way("direct", engine, args.model),
            **{name: Way(name, url, args.model, child) for name, (url, child) in proxies.items()}}


def compare(rounds):
    """[(ours' two runs, the other's two)] -> ratios ours / other and differences in ms."""
    pairs = defaultdict(list)
    for runs in rounds:
        for key in ("rps", "p50_ms", "p99_ms", "first_ms", "cpu_ms", "peak_mb"):
            if runs[1][0][key]:
                ours, other = (statistics.mean(r[key] for r in two) for two in runs)
                pairs[key].append(ours / other)
                if key in ("p50_ms", "first_ms"):
                    pairs[f"{key}_added"].append(ours - other)
    return {key: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for key, values in pairs.items()}


def bench(args, to):
    """-> one entry per cell: {concurrency, streamed, ways: medians, against: comparisons}"""
    runs, pairs = defaultdict(list), defaultdict(list)
    cells = list(itertools.product(args.concurrency, (True, False)))
    for cell, way in itertools.product(cells, to.values()):  # unmeasured: caches, threads, imports
        measure(way, cell[0], cell[0], cell[1], args.tokens)
    for i, cell, other in itertools.product(range(args.rounds), cells, ("direct", "original")):
        if (cell, other) == (cells[0], "direct"):
            print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
        a_b_b_a = [measure(to[name], cell[0], args.requests, cell[1], args.tokens)
                   for name in ("ours", other, other, "ours")]
        pairs[cell, other].append((a_b_b_a[::3], a_b_b_a[1:3]))
        runs[cell, "ours"] += a_b_b_a[::3]
        runs[cell, other] += a_b_b_a[1:3]
    return [{"concurrency": cell[0], "streamed": cell[1],
             "ways": {name: medians(runs[cell, name]) for name in to},
             "against": {o: compare(pairs[cell, o]) for o in ("direct", "original")}}
            for cell in cells]


def medians(rows):
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: None if None in column else statistics.median(column)
            for key, column in columns.items()}


COLUMNS = {"rps": "req/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "first_ms": "first ms",
           "gap_ms": "gap ms", "peak_mb": "peak MB", "cpu_ms": "CPU ms/req",
           "cpu_us_event": "us/event"}
NOTES = {"rps": "req/s x", "p50_ms": "p50 x", "p50_ms_added": "p50 added ms",
         "first_ms_added": "first words added ms"}


def show(cells):
    print(f"{'':28}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
    for cell in cells:
        what = f"{cell['concurrency']} at once, {'streamed' if cell['streamed'] else 'whole'}"
        for name, row in cell["ways"].items():
            numbers = ["-" if row[k] is None else f"{row[k]:.2f}" for k in COLUMNS]
            print(f"{what:>20} {name:8}" + "".join(f"{x:>11}" for x in numbers))
        for other, ratio in cell["against"].items():
            told = [f"{title} {x['median']:.2f} ({x['min']:.2f} to {x['max']:.2f})"
                    for x, title in ((ratio[key], title) for key, title in NOTES.items())]
            print(f"  ours / {other}: " + ", ".join(told))


# ------------------------------------------------------------------------------------- the command


def flags():
    def numbers(text):
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", nargs="?", default="run", choices=("run", *SERVERS),
        help="run (default): measure; the others are the servers that it starts")
    add("--engine", default="", metavar="URL", help="a running engine instead of the mock one")
    add("--model", default=BASE, help="the engine's name for its model [base]")
    add("--real", action="store_true", help="start vLLM with the demo model")
    add("--tokens", "--mock-tokens", type=int, default=16, metavar="N",
        help="per reply: chunks of the mock engine, limit for a real one [16]")
    add("--mock-delay", type=float, default=0.0, metavar="S", help="seconds per mock token [0]")
    add("--concurrency", type=numbers, default=[1, 8, 32, 64], metavar="N,N",
        help="requests at once [1,8,32,64]")
    add("--requests", type=int, default=128, help="per run [128]")
    add("--rounds", type=int, default=5, help="of A B B A per cell and comparison [5]")
    add("--proxy-cores", metavar="0-1,3", help="pin both proxies to these cores [not pinned]")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--port", type=int, help="servers only: where to listen")
    add("--log", help="servers only: file for the turns")
    return parser.parse_args()


def run(args):
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-proxy-")))
        cells = bench(args, ways(stack, args, folder))
    engine = "demo model" if args.real else args.engine or "mock"
    print(f"engine: {engine}, {args.tokens} tokens a reply, {args.requests} requests a run, "
          f"{args.rounds} rounds, {os.cpu_count()} cores")
    show(cells)
    if args.json:
        knobs = ("model", "tokens", "mock_delay", "requests", "rounds", "proxy_cores")
        args.json.write_text(json.dumps(
            {"engine": engine, "cores": os.cpu_count(), **{k: getattr(args, k) for k in knobs},
             "cells": cells}, indent=1))


if __name__ == "__main__":
    args = flags()
    if args.what != "run":
        SERVERS[args.what](args)
    else:
        try:
            run(args)
        except KeyboardInterrupt:
            sys.exit(130)
        except (Failed, main.Problem, ChildProcessError, TimeoutError) as error:
            sys.exit(f"no figures: {error}")
