"""A scriptable stand-in for vLLM 0.32's OpenAI server, in threads of the test.

    with FakeEngine() as engine:
        engine.script = lambda body: say("Paris.", finish="length")

`script(body)` returns the steps of one answer to /v1/chat/completions. A step is
  dict     one server-sent event, shaped like vLLM's (`say` and `chunk` make them)
  number   so many seconds of silence, after the response's headers as vLLM sends them at once
  Late(s)  the same before the headers (first step only)
  Refuse   an error status instead of an answer (first step only)
  str      sent as it is;  CUT: the connection breaks
What arrived is in `requests` (bodies of chat completions) and `calls` ((path, body) of the rest);
`cancelled` holds the bodies whose client went away before the answer's end.
"""

import json
import re
import select
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from zlib import crc32

CUT, MISSING, EOS = object(), object(), 2
DONE = "data: [DONE]\n\n"


@dataclass
class Refuse:
    status: int
    body: object  # a dict is sent as JSON, a string as it is


@dataclass
class Late:
    seconds: float


class Gone(Exception):
    """The client closed its connection."""


# ------------------------------------------------------------------------------- vLLM's shapes


def error(message, code=400, kind="BadRequestError", param=None):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def chunk(delta=None, **more):
    """One event. With `delta` its one choice is made of delta and those of `more` that belong
    there."""
    choices = []
    if delta is not None:
        keys = ("logprobs", "finish_reason", "stop_reason", "token_ids")
        picked = {k: more.pop(k) for k in keys if k in more}
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **picked}]
    return {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 1_700_000_000,
            "model": "base", "choices": choices, **more}


def entry(logprob, token="x", top=()):
    """One token of logprobs.content. vLLM leaves the number out where it has none."""
    out = {"token": token, "bytes": list(token.encode())}
    if logprob is MISSING:
        return out
    return {"token": token, "logprob": logprob, "bytes": out["bytes"], "top_logprobs": list(top)}


def say(text="Hello there.", deltas=None, ids=None, logp=None, finish="stop", stop_reason=None,
        prompt_ids=None, usage=None):
    """-> the steps of a whole reply, a chunk per token. ids, logp and usage may be made to
    disagree."""
    if deltas is None:
        deltas = [{"content": word} for word in re.findall(r"\s*\S+|\s+$", text)]
    if ids is None:
        ended = finish in ("stop", "tool_calls") and stop_reason is None
        ids = [*range(10, 10 + len(deltas)), *[EOS] * ended]
    logp = [-0.5] * len(ids) if logp is None else logp
    steps = [chunk({"role": "assistant", "content": ""}, prompt_token_ids=prompt_ids,
                   prompt_text=None)]
    n = max(len(deltas), len(ids), len(logp), 1)
    for i in range(n):
        delta = deltas[i] if i < len(deltas) else {"content": ""}
        entries = [entry(x, delta.get("content") or "") for x in logp[i : i + 1]]
        last = {"finish_reason": finish, "stop_reason": stop_reason} if i == n - 1 else {}
        steps.append(chunk(delta, logprobs={"content": entries}, token_ids=ids[i : i + 1], **last))
    usage = {"prompt_tokens": None, "total_tokens": None, "completion_tokens": len(ids),
             **(usage or {})}
    return [*steps, chunk(usage=usage, system_fingerprint="vllm-0.32.0-fake"), DONE]


def call_deltas(index, name, arguments, id=None):
    """The deltas of one tool call as vLLM's parsers send them: the head first, arguments in
    pieces."""
    head = {"id": id or f"call_{index}", "type": "function", "index": index,
            "function": {"name": name, "arguments": ""}}
    return [{"tool_calls": [head]}] + [
        {"tool_calls": [{"index": index, "function": {"arguments": arguments[i : i + 5]}}]}
        for i in range(0, len(arguments), 5)]


# ----------------------------------------------------------------------------------- the server


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


class FakeEngine:
    """State and answers; `url` is where it listens. Every answer can be replaced by a test."""

    def __init__(self, window=4096):
        self.window, self.script = window, lambda body: say()
        self.tokens = lambda messages: [crc32(w.encode()) % 900 + 100 for m in messages
                                        for w in (m.get("content") or "x").split()]
        self.score = lambda model, ids: [-1.0] * len(ids)  # log-prob of each id but the first
        self.requests, self.calls, self.cancelled, self.keys = [], [], [], set()
        self.models, self.paused, self.checksums = {"base": None}, False, {"w": "0"}
        self.open = 0
        handler = type("BoundHandler", (Handler,), {"engine": self})
        self.server = Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()

    def refusal(self, body):
        """What vLLM refuses before it generates: unknown model, wrong lengths, what no template
        takes."""
        if body.get("model") not in self.models:
            return Refuse(404, error(f"The model `{body.get('model')}` does not exist.", 404,
                                     "NotFoundError", "model"))
        wish, n = body.get("max_tokens") or 0, len(self.tokens(body["messages"]))
        if wish > self.window:
            return Refuse(400, error(f"max_tokens={wish} cannot be greater than max_model_len="
                                     f"{self.window}. Please request fewer output tokens.",
                                     param="max_tokens"))
        if n >= self.window:
            return Refuse(400, error(f"This model's maximum context length is {self.window} "
                                     f"tokens. However, your prompt contains {n} input tokens.",
                                     param="input_tokens"))
        if body.get("tool_choice") not in (None, "none") and not body.get("tools"):
            return Refuse(400, error("When using `tool_choice`, `tools` must be set."))
        for call in (c for m in body["messages"] for c in m.get("tool_calls") or []):
            assert isinstance(json.loads(call["function"]["arguments"]), dict), call
        return None

    def answer(self, path, query, body):
        """Everything except chat completions -> (status, body)."""
        if path == "/v1/models":
            return 200, {"object": "list", "data": [self.card(m) for m in self.models]}
        if path == "/tokenize":
            ids = self.tokens(body["messages"]) if "messages" in body else [7] * len(body["prompt"])
            return 200, {"count": len(ids), "max_model_len": self.window, "tokens": ids,
                         "token_strs": None}
        if path == "/v1/completions":
            return 200, self.completion(body)
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return self.adapter(body["lora_name"], body.get("lora_path"), "unload" not in path)
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return 200, {"status": "paused" if self.paused else "resumed"}
        simple = {"/health": "", "/is_paused": {"is_paused": self.paused},
                  "/reset_prefix_cache": {"success": True}, "/collective_rpc": {"results": [None]},
                  "/weight_checker": {"checksums": self.checksums}}
        return (200, simple[path]) if path in simple else (404, {"detail": "Not Found"})

    def card(self, name):
        adapter = self.models[name]
        return {"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "vllm",
                "root": adapter or "model", "parent": "base" if adapter else None,
                "max_model_len": None if adapter else self.window, "permission": []}

    def adapter(self, name, path, load):
        if load == (name in self.models):
            said = "has already been loaded" if load else "cannot be found"
            return (400 if load else 404), error(f"The lora adapter '{name}' {said}.",
                                                 400 if load else 404, "InvalidUserInput")
        if load:
            self.models[name] = path
        else:
            del self.models[name]
        return 200, f"Success: LoRA adapter '{name}' {'added' if load else 'removed'} successfully."

    def completion(self, body):
        ids, k = body["prompt"], body["prompt_logprobs"]
        scored = [ranked(i, x, k) for i, x in zip(ids, self.score(body["model"], ids), strict=True)]
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length",
                  "stop_reason": None, "token_ids": None, "prompt_logprobs": [None, *scored[1:]],
                  "prompt_token_ids": None, "routed_experts": None}
        return {"id": "cmpl-fake", "object": "text_completion", "created": 1_700_000_000,
                "model": body["model"], "choices": [choice],
                "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1,
                          "completion_tokens": 1}}


def ranked(token, logp, k):
    """One place of prompt_logprobs: the token itself and, if k > 0, the k likeliest ones, here ids
    900 ... Every other token is the likeliest: then there are k entries, else k + 1."""
    own = k > 0 and token % 2 == 0
    places = [(token, logp, 1 if own else k + 1)]
    places += [(900 + j, logp - j, j + 1) if own else (900 + j, logp + j, k + 1 - j)
               for j in range(1, k + (not own))]
    return {str(i): {"logprob": x, "rank": rank, "decoded_token": ""} for i, x, rank in places}


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send(*self.engine.answer(urlsplit(self.path).path, {}, None))

    def do_POST(self):
        self.engine.keys.add(self.headers.get("Authorization"))
        raw, url = self.rfile.read(int(self.headers["Content-Length"] or 0)), urlsplit(self.path)
        body = json.loads(raw) if raw else {}
        if url.path != "/v1/chat/completions":
            self.engine.calls.append((self.path, body))
            return self.send(*self.engine.answer(url.path, parse_qs(url.query), body))
        self.engine.requests.append(body)
        self.engine.open += 1
        try:
            self.chat(body)
        except (Gone, OSError):
            self.engine.cancelled.append(body)
            self.close_connection = True
        finally:
            self.engine.open -= 1

    def chat(self, body):
        refusal = self.engine.refusal(body)
        steps = [refusal] if refusal else list(self.engine.script(body))
        if steps and isinstance(steps[0], Late):
            self.silence(steps.pop(0).seconds)
        if steps and isinstance(steps[0], Refuse):
            return self.send(steps[0].status, steps[0].body)
        steps = [shaped(s, body, self.engine.tokens) if isinstance(s, dict) else s for s in steps]
        if not body.get("stream"):
            return self.send(200, folded([s for s in steps if isinstance(s, dict)]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for step in steps:
            if step is CUT:
                self.close_connection = True
                return self.connection.shutdown(socket.SHUT_RDWR)
            if isinstance(step, int | float):
                self.silence(step)
            elif step is not None:
                text = step if isinstance(step, str) else f"data: {json.dumps(step)}\n\n"
                self.silence(0)
                self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def silence(self, seconds):
        """Wait, looking after the client as vLLM does."""
        end = time.monotonic() + seconds
        while True:
            left = max(0, end - time.monotonic())
            if select.select([self.connection], [], [], min(left, 0.05))[0]:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    raise Gone
                time.sleep(min(left, 0.05))  # a next request is waiting already
            if not left:
                return

    def send(self, status, body):
        kind = "text/plain" if isinstance(body, str) else "application/json"
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def shaped(step, body, tokens):
    """What vLLM leaves out unless it is asked for, and the prompt's own numbers. None: not sent."""
    prompt = tokens(body["messages"])
    if step.get("usage"):
        if body.get("stream") and not (body.get("stream_options") or {}).get("include_usage"):
            return None
        usage = step["usage"]
        if usage["prompt_tokens"] is None:
            usage["prompt_tokens"] = len(prompt)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    if "prompt_token_ids" in step:
        if step["prompt_token_ids"] is None:
            step["prompt_token_ids"] = prompt
        if not body.get("return_token_ids"):
            step["prompt_token_ids"] = None
    for choice in step.get("choices") or ():
        if not body.get("logprobs"):
            choice["logprobs"] = None
        for token in (choice["logprobs"] or {}).get("content") or ():
            if "top_logprobs" in token:
                likely = {k: token[k] for k in ("token", "logprob", "bytes")}
                token["top_logprobs"] = [likely] * (body.get("top_logprobs") or 0)
        if "token_ids" in choice and not body.get("return_token_ids"):
            choice["token_ids"] = None
    return step


def folded(chunks):
    """The chunks as one answer to a request without `stream`."""
    out, message, finish = {}, {"content": "", "reasoning": "", "tool_calls": []}, "stop"
    for c in chunks:
        if "error" in c:
            return c
        out["usage"] = c.get("usage") or out.get("usage")
        for choice in c["choices"]:
            finish = choice["finish_reason"] or finish
            for key in ("content", "reasoning"):
                message[key] += choice["delta"].get(key) or ""
            message["tool_calls"] += choice["delta"].get("tool_calls") or []
    message = {"role": "assistant", "content": message["content"] or None, "refusal": None,
               "annotations": None, "audio": None, "function_call": None,
               "tool_calls": message["tool_calls"], "reasoning": message["reasoning"] or None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish,
              "stop_reason": None, "token_ids": None}
    return {"id": "chatcmpl-fake", "object": "chat.completion", "created": 1_700_000_000,
            "model": "base", "choices": [choice], **out, "prompt_logprobs": None,
            "prompt_token_ids": None, "kv_transfer_params": None}
