"""Shared fixtures: the real proxy, behind its real waitress server, in front of a fake engine."""

import http.client
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_engine import FakeEngine

import main
import proxy
from sync import free_port


def config(**overrides):
    """main's defaults with every `auto` filled in, as a plain namespace."""
    cfg = SimpleNamespace(**vars(main.Config()))
    vars(cfg).update(main.PRESETS["cpu"], max_model_len=4096, port=free_port(), api_key="",
                     device="cpu", max_requests=8, tool_parser="hermes", reasoning_parser="")
    vars(cfg).update(overrides)
    return cfg


class Proxy:
    """A running proxy with everything that a test looks at."""

    def __init__(self, cfg, engine, folder):
        self.cfg, self.engine, self.path = cfg, engine, folder / "turns.jsonl"
        self.log, self.policy = proxy.TurnLog(self.path), proxy.Policy("base")
        self.policy.accepting = True
        self.sessions = proxy.Sessions(self.log, cfg.session_timeout)
        self.hooks, self.paired, self.said, self.late = proxy.Hooks(), [], [], []
        self.hooks.paired, self.hooks.say = self.paired.append, self.said.append
        self.hooks.feedback = lambda turn, given: self.late.append(turn) or turn == "in line"
        self.server = proxy.Server(cfg, engine.url, self.policy, self.sessions, self.log,
                                   self.hooks)
        self.web = proxy.serve(proxy.make_app(self.server), cfg)
        threading.Thread(target=self.web.run, daemon=True, name="proxy").start()

    def close(self):
        self.web.task_dispatcher.shutdown(timeout=1)
        self.web.close()

    def request(self, method, path, body=None, headers=None):
        """-> (status, headers, parsed JSON or text). `body` is sent as JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.cfg.port, timeout=20)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        headers = {k: v for k, v in headers.items() if v is not None}
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        is_json = "json" in response.headers.get("Content-Type", "")
        return response.status, response.headers, json.loads(text) if is_json else text

    def post(self, body, headers=None, path="/v1/chat/completions"):
        return self.request("POST", path, body, headers)

    def ask(self, *messages, **more):
        """A plain conversation: strings are the user's and the assistant's words in turn."""
        roles = ("user", "assistant")
        said = [m if isinstance(m, dict) else {"role": roles[i % 2], "content": m}
                for i, m in enumerate(messages)]
        status, headers, answer = self.post({"messages": said, **more})
        assert status == 200, answer
        return answer

    def stream(self, body, headers=None):
        """-> the events of a streamed answer; [DONE] is the string "[DONE]"."""
        status, _, text = self.post({**body, "stream": True}, headers)
        assert status == 200, text
        events = [x.removeprefix("data: ") for x in text.split("\n\n") if x.startswith("data: ")]
        return [x if x == "[DONE]" else json.loads(x) for x in events]

    def turns(self):
        """What turns.jsonl says, in order."""
        return list(proxy.load_turns(self.path).values())

    def fates(self):
        return Counter(t.fate for t in self.turns())

    def idle(self):
        """No request holds a place, none is counted as open, and all places can still be taken."""
        held = [self.server.room.acquire(blocking=False) for _ in range(self.cfg.max_requests)]
        for got in held:
            got and self.server.room.release()
        return all(held) and not self.policy.open


def until(condition, seconds=3.0):
    """Wait for a condition that another thread makes true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def make_server(engine, tmp_path):
    """make_server(**config overrides) -> Proxy"""
    made = []

    def make(**overrides):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Proxy(config(**overrides), engine, folder))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def server(make_server):
    return make_server()
