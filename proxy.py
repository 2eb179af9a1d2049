"""Policy serving: the OpenAI-compatible front that users talk to, and the record of what they said.

Place in the system: agent or user -> this proxy -> vLLM. Each finished reply becomes a `Turn` that
waits here until the user's next message shows up; the pair goes to the judge. Nothing on a
request's path waits for judging or training.

Run it alone: `python main.py --mode rl --steps 0` starts it in front of an engine; in tests
`make_app` takes any engine URL.

How it differs from the original:
 1. The engine's own token ids and log-probs are kept; no text is tokenised again.
 2. Replies stream token by token as the engine makes them (the original replays a finished answer).
 3. A turn is *main* (trainable) unless the client says side.
 4. Turns are paired by what was said last, so clients that rewrite their history pair as well.
 5. A turn that cannot be trusted is dropped with a counted reason; nothing is padded or repaired.
"""

import contextlib
import hashlib
import hmac
import http.client
import json
import math
import os
import queue
import re
import socket
import string
import threading
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from flask import Flask, Response, jsonify, request
from werkzeug.exceptions import HTTPException

# ------------------------------------------------------------------------------- the record: Turn


@dataclass
class Turn:
    """One reply and everything that is learnt about it. Filled in along the way, never renamed.

    prompt_ids (P,), response_ids (R,) and rollout_logp (R,) are exactly what the engine sent;
    hinted_prompt_ids holds one prompt per entry of `hints`, in the same order.
    """

    id: str
    session: str
    kind: str = "main"  # main: trainable; side: forwarded only
    messages: list = field(default_factory=list)  # as forwarded to the engine
    tools: list | None = None
    chat_template_kwargs: dict | None = None
    sampling: dict = field(default_factory=dict)
    prompt_ids: list = field(default_factory=list)  # (P,)
    response_ids: list = field(default_factory=list)  # (R,)
    rollout_logp: list = field(default_factory=list)  # (R,) log-probs under the sampling policy
    completion_tokens: int = 0  # what the engine says it generated
    reply: dict = field(default_factory=dict)  # the assistant message that the client got
    finish_reason: str | None = None
    version_start: int = 0  # policy version when forwarded ...
    version_end: int = 0  # ... and when finished
    created: float = 0.0  # seconds since the epoch
    first_token: float = 0.0
    finished: float = 0.0
    stripped: list = field(default_factory=list)  # kinds of wrapper taken off for pairing
    skip: str | None = None  # why it cannot be trained, where that was clear at its end
    next_state: list = field(default_factory=list)  # all new messages since the reply
    paired_at: float = 0.0
    feedback: dict = field(default_factory=dict)
    votes: list = field(default_factory=list)  # +1, 0, -1 or None for an invalid one
    hint_votes: list = field(default_factory=list)  # (verdict, hint) or None
    hints: list = field(default_factory=list)  # every valid hint
    hinted_prompt_ids: list = field(default_factory=list)
    hint: str | None = None  # the chosen one
    hint_skip: str | None = None  # why a chosen hint was not used: render, too_long
    score: int | None = None  # None: unscored, which is not 0
    lexicon: int | None = None  # what the word list says, where a model judged
    teacher_logp: list | None = None  # (R,) the response under the hinted prompt
    teacher_top: list | None = None  # engine-side --topk K: log-probs (R, K) and ids (R, K)
    judged_at: float = 0.0
    r: float | None = None  # the reward part of the sample
    distil: bool = False  # the hint part of the sample
    fate: str | None = None
    step: int | None = None
    closed: float = 0.0  # when it got its fate
    age_s: float | None = None  # seconds from its end to its training
    prox_logp: list | None = None  # (R,) under the policy at the start of its step


REPLY_FIELDS = (
    "session kind messages tools chat_template_kwargs sampling prompt_ids response_ids "
    "rollout_logp completion_tokens reply finish_reason version_start version_end created "
    "first_token finished stripped skip"
).split()
JUDGED_FIELDS = (
    "votes hint_votes hints hinted_prompt_ids hint hint_skip score lexicon teacher_logp "
    "teacher_top judged_at r distil"
).split()


class TurnLog:
    """Appends events to turns.jsonl (mode 0600) and counts every turn's fate, once each."""

    def __init__(self, path):
        self.path = path
        self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")
        self.lock = threading.Lock()
        self.open = {}  # id -> Turn without a fate yet
        self.fates = Counter()
        self.turns = 0

    def write(self, turn, event, **data):
        """event: reply | next_state | judged | feedback (fates go through `close`)."""
        line = json.dumps({"turn": turn.id, "event": event, "time": time.time(), **data})
        with self.lock:
            self._put(line)
            if event == "reply":
                self.turns += 1
                self.open[turn.id] = turn

    def close(self, turn, fate, step=None, **found):
        """The one place where a turn gets its fate; a second call for a turn does nothing.
        found: what training it brought to light, for the record."""
        with self.lock:
            if self.open.pop(turn.id, None) is None:
                return False
            turn.fate, turn.step, turn.closed = fate, step, time.time()
            self.fates[fate] += 1
            self._put(json.dumps({"turn": turn.id, "event": "fate", "time": turn.closed,
                                  "closed": turn.closed, "fate": fate, "step": step, **found}))
        return True

    def take_up(self, turn):
        """--resume: a turn of turns.jsonl that has no fate (any more)."""
        with self.lock:
            self.turns += 1
            self.open[turn.id] = turn
        self.write(turn, "resumed", fate=None, step=None, closed=0.0, age_s=None,
                   version_start=turn.version_start, version_end=turn.version_end)

    def count(self, turn):
        """--resume: a turn whose fate stays."""
        with self.lock:
            self.turns += 1
            self.fates[turn.fate] += 1

    def _put(self, line):
        self.file.write(line + "\n")
        self.file.flush()

    def counts(self):
        with self.lock:
            return Counter(self.fates)

    def close_all(self, fate):
        for turn in list(self.open.values()):
            self.close(turn, fate)


def load_turns(path):
    """turns.jsonl -> {id: Turn}, each turn's events merged in order. (The last line has no end
    while it is being written, or where a crash cut it.)"""
    known = {f.name for f in fields(Turn)}
    turns = {}
    with open(path) as file:
        for event in (json.loads(line) for line in file if line.endswith("\n")):
            turn = turns.setdefault(event["turn"], Turn(event["turn"], session=""))
            for key in known & event.keys():
                setattr(turn, key, event[key])
    return turns


def judged_numbers(turns):
    """What a step's line says of judged turns. Every number is a sum over a count, or None."""

    def share(values):
        values = list(values)
        return sum(values) / len(values) if values else None

    votes = Counter(v for t in turns for v in t.votes)
    valid = [set(t.votes) - {None} for t in turns if set(t.votes) - {None}]
    return {"judged": len(turns),
            "reward_mean": share(t.score for t in turns if t.score is not None),
            "split_frac": share(len(v) > 1 for v in valid),
            "lexicon_agree": share(t.score == t.lexicon for t in turns
                                   if None not in (t.score, t.lexicon)),
            "votes": {"plus": votes[1], "zero": votes[0], "minus": votes[-1],
                      "invalid": votes[None]},
            "hint_rate": share(t.hint is not None for t in turns),
            "cut_frac": share(t.finish_reason == "length" for t in turns),
            "reply_tokens": share(len(t.response_ids) for t in turns),
            "judge_s": share(t.judged_at - t.paired_at for t in turns if t.judged_at)}


# ----------------------------------------------------------------------- what was said: normalising

# Wrappers that agents put around a user's words and do not send again. They are no reaction.
CONTEXT_BLOCKS = {
    "openclaw_context": re.compile(
        r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*?(<<<END_OPENCLAW_INTERNAL_CONTEXT>>>|\Z)", re.S),
    "context_tag": re.compile(
        r"<(system-reminder|environment_details|environment_context)>.*?(</\1>|\Z)", re.S),
    "timestamp": re.compile(
        r"^\s*\[(?:\w{3},? )?\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?: ?[\w+:/-]+)?\]\s*"),
    "runtime_line": re.compile(r"\n[ \t]*Runtime: agent=[^\n]*\Z"),
    "openclaw_retry": re.compile(  # around words whose request was refused; later gone again
        r"^\s*\[Queued user message from a previous active turn;[^\n]*\]\n"
        r"|\n\nContinue the current task from the existing transcript,[^\n]*\Z"),
}
THOUGHT = re.compile(r"<think(?:ing)?>(?:(?!<think).)*?</think(?:ing)?>", re.S)
THINKING = re.compile(r"<think(?:ing)?>.*?(</think(?:ing)?>|\Z)", re.S)
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class BadRequest(ValueError):
    """A client's mistake; its text is shown to the client with status 400."""


def text_of(content):
    """String, null or list of parts -> string. Raises BadRequest for parts we cannot serve."""
    if content is None or isinstance(content, str):
        return encodable(content or "")
    if not isinstance(content, list):
        raise BadRequest("message content must be a string, null or a list of parts")
    pieces = []
    for part in content:
        part = {"text": part} if isinstance(part, str) else part
        kind = part.get("type", "text") if isinstance(part, dict) else part
        if kind not in TEXT_PARTS:
            raise BadRequest(f"content part of type '{kind}' is not supported: this model reads "
                             "text only")
        text = part.get("text", part.get("refusal", ""))
        if not isinstance(text, str):
            raise BadRequest("the text of a content part must be a string")
        # words of two parts must not run into each other (agents merge messages into parts)
        if pieces and pieces[-1][-1].strip() and text[:1].strip():
            pieces.append("\n")
        pieces += [text] * bool(text)
    return encodable("".join(pieces))


def encodable(text):
    """Half of a surrogate pair (a client that cut an emoji) cannot be sent on: it becomes '?'."""
    return text.encode("utf-8", "replace").decode()


def strip_wrappers(text):
    """Own words of a message -> (words, names of the wrappers taken off)."""
    found = []
    for name, pattern in CONTEXT_BLOCKS.items():
        text, n = pattern.subn("", text.rstrip())  # KEEP: \s*\Z in a pattern would be quadratic
        found += [name] * bool(n)
    return text.strip(), found


def visible(text):
    """An answer without its thinking, also if the tag was never closed or opened in the prompt."""
    return THINKING.sub("", THOUGHT.sub("", text).rsplit("</think>", 1)[-1]).strip()


def depth(value):
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((depth(x) for x in inner if isinstance(x, dict | list)), default=0)


def parse(text):
    """JSON -> value. Raises ValueError, also for nesting too deep to be written out again."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict | list) or depth(value) <= 100:
            return value
    except RecursionError:
        pass
    raise ValueError("nested too deeply")


def parsed(arguments):
    """Tool arguments for comparison, however the client serialised them."""
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments) if arguments.strip() else {}
        except ValueError:
            return arguments
    return same_numbers(arguments or {})  # null, [] and "" all mean: called with nothing


def same_numbers(value):
    """1.0 -> 1: JavaScript clients write it so."""
    if isinstance(value, dict):
        return {k: same_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [same_numbers(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def words_of(message):
    """What a message says, in a form that survives a client's rewriting of its history."""
    text = text_of(message.get("content"))
    if message["role"] == "assistant":
        calls = [[c["function"]["name"], parsed(c["function"].get("arguments"))]
                 for c in message.get("tool_calls") or []]
        return json.dumps([" ".join(visible(text).split()), calls], sort_keys=True)
    return " ".join(strip_wrappers(text)[0].split())


def digest(*parts):
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def said_last(messages):
    """The last words that are not only a context block: what the next reply answers."""
    for message in reversed(messages):
        if message["role"] in ("user", "tool") and words_of(message):
            return words_of(message)
    return ""


def merged(words, more):
    """Is one of them the end of the other? Agents merge messages that got no answer into one."""
    short, long = sorted((words, more), key=len)
    return bool(short) and long.endswith(" " + short)


# ---------------------------------------------------------- a client's body -> the engine's request

ROLES = {"developer": "system", "function": "tool"}  # others stay as they are
PASSED = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "response_format",
          "structured_outputs", "stop", "logit_bias", "bad_words", "min_tokens", "reasoning_effort",
          "include_reasoning")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0}
LIMITS = {"temperature": (0, 2), "top_p": (0, 1), "top_k": (-1, 1 << 31), "min_p": (0, 1),
          "repetition_penalty": (1e-3, 10), "presence_penalty": (-2, 2),
          "frequency_penalty": (-2, 2)}


def clean_messages(messages):
    """OpenAI messages -> the shape that chat templates can render. Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a non-empty list")
    return [clean_message(m, i) for i, m in enumerate(messages)]


def clean_message(message, i):
    if not isinstance(message, dict):
        raise BadRequest(f"messages[{i}] must be an object")
    role = message.get("role")
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"messages[{i}].role must be system, user, assistant or tool")
    if message.get("content") is None and role != "assistant":
        raise BadRequest(f"messages[{i}].content is missing")
    out = {"role": role, "content": text_of(message.get("content"))}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise BadRequest(f"messages[{i}].{key} must be a string")
            out[key] = message[key]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            out["reasoning"] = reasoning  # vLLM's spelling; clients echo either
        if message.get("tool_calls"):
            out["tool_calls"] = [clean_call(c, i) for c in as_list(message["tool_calls"], i)]
    return out


def as_list(value, i):
    if not isinstance(value, list):
        raise BadRequest(f"messages[{i}].tool_calls must be a list")
    return value


def clean_call(call, i):
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"messages[{i}].tool_calls: each call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments) if arguments.strip() else {}
        except ValueError:
            raise BadRequest(f"messages[{i}].tool_calls: arguments of '{function['name']}' "
                             "are not valid JSON") from None
    arguments = arguments or {}  # null, [] and "" all mean: called with nothing
    if not isinstance(arguments, dict):
        raise BadRequest(f"messages[{i}].tool_calls: arguments must be a JSON object")
    return {"id": str(call.get("id") or ""), "type": "function",
            "function": {"name": function["name"], "arguments": json.dumps(arguments)}}


def number(body, key, low, high, kind=(int, float)):
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise BadRequest(f"'{key}' must be a number from {low:g} to {high:g}")
    return value


def sampling_for(body, cfg, side):
    """-> (every sampling field, explicit; 'run' or 'client'; does the client's wish differ?)

    vLLM would fill what is missing from the model's generation_config.json, so nothing is left out.
    """
    run = {**SAMPLING, "temperature": cfg.temperature}
    asked = {k: number(body, k, *LIMITS[k]) for k in SAMPLING if body.get(k) is not None}
    if body.get("seed") is not None:
        asked["seed"] = number(body, "seed", -(1 << 63), 1 << 63, int)
    differs = any(run.get(k) != v for k, v in asked.items())
    if side or cfg.client_sampling == "respect":
        return {**run, **asked}, "client" if differs else "run", differs
    return run, "run", differs


def max_tokens_for(body, cfg):
    key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wish = cfg.max_tokens if body.get(key) is None else number(body, key, 1, math.inf, int)
    return min(wish, cfg.max_model_len - 1)


def constrained(payload):
    """Would the engine sample from a distribution that is not the policy's own?"""
    response_format = payload.get("response_format")
    free_text = not response_format or response_format.get("type") == "text"
    forced = payload.get("tool_choice") not in (None, "auto", "none")
    return (not free_text or forced or bool(payload.get("structured_outputs"))
            or any(payload.get(k) for k in ("logit_bias", "bad_words", "min_tokens")))


def flag(value):
    return str(value).strip().lower() in ("1", "true", "yes", "on")


def header_or_body(body, header, key):
    value = request.headers.get(header) or body.get(key)
    if value is not None and not (isinstance(value, str | int | bool) and len(str(value)) <= 256
                                  and str(value).isprintable()):
        raise BadRequest(f"'{key}' must be a string of at most 256 printable characters")
    return value


def check_types(body):
    shapes = {"tools": list, "response_format": dict, "structured_outputs": dict,
              "logit_bias": dict, "bad_words": list, "stop": (str, list), "stream": bool,
              "stream_options": dict, "chat_template_kwargs": dict, "tool_choice": (str, dict),
              "min_tokens": int, "parallel_tool_calls": bool, "reasoning_effort": str,
              "include_reasoning": bool}
    for key, kind in shapes.items():
        if body.get(key) is not None and not isinstance(body[key], kind):
            raise BadRequest(f"'{key}' has the wrong type")
    if isinstance(body.get("stop"), list) and not all(isinstance(s, str) for s in body["stop"]):
        raise BadRequest("'stop' must be a string or a list of strings")


def engine_body(body, messages, cfg, side):
    """The engine's request by allow-list -> (payload, sampling source, why untrainable or None)."""
    check_types(body)
    sampling, source, differs = sampling_for(body, cfg, side)
    payload = {k: body[k] for k in PASSED if body.get(k) is not None}
    if not payload.get("tools"):  # an empty list is no tools; vLLM refuses tool_choice then
        for key in ("tools", "tool_choice", "parallel_tool_calls"):
            payload.pop(key, None)
    elif not cfg.tool_parser and payload.get("tool_choice", "auto") == "auto":
        payload["tool_choice"] = "none"  # vLLM refuses auto where it has no parser for the calls
    payload |= sampling | {"messages": messages, "max_tokens": max_tokens_for(body, cfg), "n": 1,
                           "stream": True, "stream_options": {"include_usage": True},
                           "logprobs": True, "return_token_ids": True}
    if body.get("logprobs") is True and body.get("top_logprobs") is not None:
        payload["top_logprobs"] = number(body, "top_logprobs", 0, 20, int)
    skip = "constrained" if constrained(payload) else None
    if skip is None and differs and source == "client" and not side:
        skip = "client_sampling"
    return payload, source, differs, skip


# ---------------------------------------------------------------- one streamed answer of the engine


class EngineError(Exception):
    """The engine refused, failed or went away; `status` is what the client gets."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


END = object()


class Connections:
    """Idle keep-alive connections to the engine. Only fresh ones are used again: vLLM closes them
    after 5 s of silence. (urllib3's pool does not let go of a request before its first byte.)"""

    def __init__(self, engine, timeout):
        at = urlsplit(engine.url)
        self.kind = http.client.HTTPSConnection if at.scheme == "https" else \
            http.client.HTTPConnection
        self.netloc, self.timeout = at.netloc, timeout
        self.path = f"{at.path}/v1/chat/completions"
        self.headers = {"Content-Type": "application/json"} | bearer(engine.key)
        self.idle, self.lock = [], threading.Lock()

    def take(self):
        with self.lock:
            while self.idle:
                connection, since = self.idle.pop()
                if time.monotonic() - since < 3:
                    return connection
                connection.close()
        connection = self.kind(self.netloc, timeout=self.timeout)
        connection.connect()
        return connection

    def give(self, connection):
        with self.lock:
            self.idle.append((connection, time.monotonic()))


class Upstream:
    """One streamed request to the engine, read by a thread of its own.

    The thread lets the handler look after its client every 0.2 s. A read timeout would not do: the
    rest of the answer would be lost. The engine notices a cancelled request by its closed
    connection.
    """

    def __init__(self, pool, payload):
        self.events, self.sock, self.cancelled = queue.SimpleQueue(), None, False
        self.lock = threading.Lock()  # KEEP: no connection may be shut down once it is in the pool
        args = (pool, json.dumps(payload).encode())
        threading.Thread(target=self._read, args=args, daemon=True, name="upstream").start()

    def _read(self, pool, body):
        connection, whole = None, False
        try:
            connection = pool.take()
            self.sock = connection.sock
            if self.cancelled:
                return
            connection.request("POST", pool.path, body, pool.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(*readable(response.status, response.read()))
            rest, whole = b"", None
            while whole is None and not self.cancelled and (data := response.read1(1 << 16)):
                *lines, rest = (rest + data).split(b"\n")
                events = [json.loads(x[6:]) for x in lines if x.startswith(b"data: {")]
                if events:  # what came together is passed on together
                    self.events.put(events)
                if any(x.startswith(b"data: [DONE]") for x in lines):
                    whole = not response.read().strip() and not response.will_close
        except EngineError as error:
            self.events.put(error)
        except http.client.IncompleteRead:
            pass  # cut off: whoever follows knows whether it was complete by then
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.events.put(EngineError(502, f"the engine did not answer: {type(error).__name__}"))
        finally:
            self._done(pool, connection, whole)
            self.events.put(END)

    def _done(self, pool, connection, whole):
        with self.lock:
            self.sock = None
            if whole and not self.cancelled:
                pool.give(connection)
            elif connection:
                connection.close()

    def follow(self, gone):
        """Yield the engine's events in order, None for each 0.2 s of silence."""
        while True:
            try:
                event = self.events.get(timeout=0.2)
            except queue.Empty:
                event = None
            if gone():
                raise ClientGone
            if isinstance(event, EngineError):
                raise event
            if event is END:
                return
            yield from event or [None]

    def cancel(self):
        with self.lock:
            self.cancelled = True
            if self.sock is not None:
                with contextlib.suppress(OSError):  # the engine was quicker
                    self.sock.shutdown(socket.SHUT_RDWR)  # wakes the reader


def readable(status, raw):
    """An engine's error body -> (status for the client, one sentence)."""
    try:
        error = json.loads(raw)
        error = error.get("error", error)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = raw[:500].decode("utf-8", "replace")
    return (status if 400 <= status < 500 else 502), str(message)


# -------------------------------------------------- the engine's other questions, asked by siblings


def bearer(key):
    return {"Authorization": f"Bearer {key}"} if key else {}


class Endpoint(NamedTuple):
    """An engine and one of its models; `url` is without /v1."""

    url: str
    model: str
    key: str | None = None


def policy_engine(cfg, model):
    return Endpoint(cfg.engine_url, model, os.environ.get("POLICY_KEY"))


def teacher_engine(cfg):
    key = "POLICY_KEY" if cfg.teacher_url == cfg.engine_url else "TEACHER_KEY"
    return Endpoint(cfg.teacher_url, cfg.teacher_model, os.environ.get(key))


def ask_engine(http, engine, path, body):
    response = http.request("POST", engine.url + path, json=body, headers=bearer(engine.key))
    if response.status != 200:
        raise EngineError(*readable(response.status, response.data))
    return json.loads(response.data)


def render(http, engine, turn, messages):
    """The prompt ids (P,) that an engine makes of these messages."""
    body = {"model": engine.model, "messages": messages, "add_generation_prompt": True}
    body |= {k: getattr(turn, k) for k in ("tools", "chat_template_kwargs") if getattr(turn, k)}
    return ask_engine(http, engine, "/tokenize", body)["tokens"]


def engine_scores(http, engine, prompt_ids, response_ids, k):
    """How an engine's model likes a response -> log-probs (R,), and of the k likeliest tokens at
    each place log-probs (R, k) and ids (R, k). At temperature 1 always: vLLM scores prompts at
    temperature 1 whatever is asked."""
    ids = [*prompt_ids, *response_ids]
    body = {"model": engine.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": k,
            "priority": 1}
    entries = ask_engine(http, engine, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    logp, top_logp, top_ids = [], [], []
    for entry, i in zip(entries[len(prompt_ids) :], response_ids, strict=True):
        logp.append(entry[str(i)]["logprob"])
        # one more comes where the response's own token is not among the k
        best = [(e["logprob"], int(j)) for j, e in entry.items() if len(entry) == k or j != str(i)]
        best.sort(reverse=True)
        top_logp.append([x for x, _ in best[:k]])
        top_ids.append([j for _, j in best[:k]])
    return logp, top_logp, top_ids


def engine_logp(http, engine, prompt_ids, response_ids):
    """Log-probs (R,) of the response under an engine's model, at temperature 1."""
    return engine_scores(http, engine, prompt_ids, response_ids, 0)[0]


class Reply:
    """Collects one answer: ids and log-probs for training, text and tool calls for the client."""

    def __init__(self):
        self.prompt_ids, self.ids, self.logp, self.logprobs = [], [], [], []
        self.content, self.reasoning, self.calls = "", "", []
        self.finish_reason = self.stop_reason = None
        self.usage, self.first_token = {}, 0.0

    def add(self, chunk):
        """Take one engine chunk; return the delta to pass on, or None."""
        if chunk.get("error"):
            raise EngineError(502, f"the engine failed: {readable(502, json.dumps(chunk))[1]}")
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        self.usage = chunk.get("usage") or self.usage
        if not chunk.get("choices"):
            return None
        choice = chunk["choices"][0]
        self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
        self.ids += choice.get("token_ids") or []
        entries = (choice.get("logprobs") or {}).get("content") or []
        self.logprobs += entries
        self.logp += [entry.get("logprob") for entry in entries]
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice.get("stop_reason")
        return self._delta(choice.get("delta") or {}, entries)

    def _delta(self, delta, entries):
        if entries and not self.first_token:
            self.first_token = time.time()
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        self.content += delta.get("content") or ""
        self.reasoning += reasoning or ""
        for call in delta.get("tool_calls") or []:
            self._add_call(call)
        out = {k: delta[k] for k in ("role", "content", "tool_calls") if delta.get(k) is not None}
        return {**out, "reasoning_content": reasoning} if reasoning else out

    def _add_call(self, call):
        while len(self.calls) <= call.get("index", 0):
            self.calls.append({"id": "", "type": "function",
                               "function": {"name": "", "arguments": ""}})
        mine, function = self.calls[call.get("index", 0)], call.get("function") or {}
        mine["id"] = call.get("id") or mine["id"]
        mine["function"]["name"] += function.get("name") or ""
        mine["function"]["arguments"] += function.get("arguments") or ""

    def message(self):
        out = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = self.calls
        return out


def distrust(reply):
    """Why this reply must not be trained, or None. Missing numbers are never repaired."""
    n = reply.usage.get("completion_tokens", -1)
    if not reply.prompt_ids or not len(reply.ids) == len(reply.logp) == n:
        return "ids_mismatch"
    if not reply.ids:
        return "empty"
    # vLLM writes -inf as -9999
    if not all(isinstance(x, int | float) and math.isfinite(x) and x > -9000 for x in reply.logp):
        return "bad_logp"
    if isinstance(reply.stop_reason, str):
        return "constrained"  # a stop string cut the reply where the policy would have gone on
    if reply.finish_reason not in ("stop", "length", "tool_calls"):
        return "aborted"
    if not visible(reply.content) and not reply.calls:
        return "no_answer"
    return None


# --------------------------------------------------------------------------- shared between threads


class Policy:
    """Which weights users get right now: the engine's name for them, their version, their users."""

    def __init__(self, name):
        self.lock = threading.Lock()
        self.name, self.version, self.accepting, self.swapping = name, 0, False, False
        self.open = Counter()  # engine name -> requests that are open on it
        self.span = (0.0, 0.0)  # start and end of the last weight update
        self.gap_max = self.gap_run_max = 0.0  # of open streams: since the last line, of the run
        self.held, self.pausing = 0, False  # pausing: full weights, the engine pauses in a swap

    def enter(self):
        with self.lock:
            self.open[self.name] += 1
            self.held += self.swapping and self.pausing
            return self.name, self.version

    def leave(self, name):
        with self.lock:
            self.open[name] -= 1
            if not self.open[name]:
                del self.open[name]

    def begin_swap(self):
        with self.lock:
            self.swapping, self.span = True, (time.monotonic(), math.inf)

    def publish(self, version, name):
        with self.lock:
            self.version, self.name, self.swapping = version, name, False
            self.span = (self.span[0], time.monotonic())

    def saw_gap(self, before, now):
        """A stream waited from `before` to `now` for its next chunk: because of a weight update?"""
        with self.lock:
            if before < self.span[1] and now > self.span[0]:
                self.gap_max = max(self.gap_max, now - before)
                self.gap_run_max = max(self.gap_run_max, now - before)


class Sessions:
    """Finished main turns that wait for their next state, and their pairing with new requests.

    A turn waits under its reply, with the words that it answered. No prefix is compared and nothing
    is counted, so sliding windows, compaction and rewritten tool-call ids do no harm.
    """

    def __init__(self, log, timeout):
        self.log, self.timeout, self.lock = log, timeout, threading.Lock()
        self.waiting = defaultdict(list)  # digest of a reply -> [Turn], oldest first
        self.history = defaultdict(set)  # digest of a request's words -> ids waiting under it
        self.keys = {}  # turn id -> (reply's digest, history digest, Turn)
        self.answered = {}  # turn id -> the words that it answered
        self.seen = {}  # session -> last sign of life (monotonic seconds)
        self.latest = {}  # session -> id of its last main turn
        self.not_chosen = {}  # waiting turn whose sibling was chosen -> {(reaction, its session)}

    def pair(self, messages, session):
        """New request -> (paired turn, its next state) or (None, None). `session` may be None."""
        with self.lock:
            for i in range(len(messages) - 1, -1, -1):
                if messages[i]["role"] != "assistant":
                    continue
                after = new_messages(messages[i + 1 :])
                turn = self._waiting_under(messages, i, session, digest(after))
                if turn:
                    if after:
                        return self._take(turn, digest(after)), after
                    return None, None  # only a context block so far: it goes on waiting
        return None, None

    def _waiting_under(self, messages, i, session, reaction):
        turns = [t for t in self.waiting.get(digest(words_of(messages[i])), ())
                 if not self._said_to_sibling(t, reaction, session)]
        if not turns:
            return None
        words = said_last(messages[:i])
        equal = [t for t in turns if self.answered[t.id] == words]
        found = equal or [t for t in turns if merged(self.answered[t.id], words)]
        same = [t for t in found if t.session == session]
        return (same or found or [None])[0]

    def _said_to_sibling(self, turn, reaction, session):
        """A sibling was chosen by these very words: they are sent again. Two people who say the
        same are told apart by session ids alone."""
        return any(said == reaction and not turn.session == session != by
                   for said, by in self.not_chosen.get(turn.id, ()))

    def _take(self, turn, reaction=None):
        _, history, _ = self.keys[turn.id]
        self._forget(turn)
        for sibling in self.history.get(history, ()):
            self.not_chosen.setdefault(sibling, set()).add((reaction, turn.session))
        return turn

    def _forget(self, turn):
        key, history, _ = self.keys.pop(turn.id)
        self.not_chosen.pop(turn.id, None)
        del self.answered[turn.id]
        for table, group, item in ((self.waiting, key, turn), (self.history, history, turn.id)):
            table[group].remove(item)
            if not table[group]:
                del table[group]

    def touch(self, session):
        with self.lock:
            self.seen[session] = time.monotonic()

    def wait(self, turn):
        """A finished main turn starts to wait for what its user says next."""
        key, words = digest(words_of(turn.reply)), said_last(turn.messages)
        history = digest([words_of(m) for m in turn.messages])
        with self.lock:
            self.waiting[key].append(turn)
            self.history[history].add(turn.id)
            self.keys[turn.id], self.answered[turn.id] = (key, history, turn), words
            self.seen[turn.session] = time.monotonic()
            self.latest[turn.session] = turn.id

    def take(self, turn_id):
        """Feedback ends the waiting of a turn."""
        with self.lock:
            return self._take(self.keys[turn_id][2]) if turn_id in self.keys else None

    def end(self, session):
        """The client says that the session is over: what still waits has no next state."""
        with self.lock:
            over = [t for _, _, t in self.keys.values() if t.session == session]
            self._expire(over, {session})

    def expire(self, now=None):
        """Called again and again: sessions that were silent for `timeout` seconds are freed."""
        now = time.monotonic() if now is None else now
        with self.lock:
            idle = {s for s, at in self.seen.items() if now - at > self.timeout}
            if idle:
                self._expire([t for _, _, t in self.keys.values() if t.session in idle], idle)

    def _expire(self, turns, sessions):
        for turn in turns:
            fate = "not_chosen" if turn.id in self.not_chosen else "no_next_state"
            self._forget(turn)
            self.log.close(turn, fate)
        for session in sessions:
            self.seen.pop(session, None)
            self.latest.pop(session, None)


def new_messages(messages):
    """What was said since a reply, up to the next reply, without wrappers and empty messages."""
    out = []
    for message in messages:
        if message["role"] == "assistant":
            break
        words, _ = strip_wrappers(message["content"])
        if message["role"] in ("user", "tool") and words:
            out.append({**message, "content": words})
    return out


# ------------------------------------------------------------------------------------------ the app


class Hooks:
    """What the proxy tells the rest of the system; main fills these in, tests replace them."""

    def paired(self, turn):
        """A turn got its next state."""

    def feedback(self, turn_id, feedback):
        """Feedback for a turn that waits no more -> True if it could still be used."""
        return False

    def overloaded(self):
        return False

    def health(self):
        return {}

    def say(self, text):
        print(text, flush=True)


class Server:
    """The state behind the routes: engine client, policy, sessions, counters."""

    def __init__(self, cfg, engine_url, policy, sessions, log, hooks):
        self.cfg, self.policy = cfg, policy
        self.sessions, self.log, self.hooks = sessions, log, hooks
        self.engine = Endpoint(engine_url, "", os.environ.get("POLICY_KEY"))
        self.pool = Connections(self.engine, cfg.request_timeout)
        self.room = threading.BoundedSemaphore(cfg.max_requests)
        self.requests, self.counting = Counter(ok=0, failed=0, rejected=0), threading.Lock()
        self.told = set()  # sessions that were told once about their sampling

    def admit(self):
        """None, or the refusal (status, sentence, seconds to wait). Takes a place if it admits."""
        if not self.policy.accepting:
            return 503, "the policy is not ready yet", 5
        if self.policy.swapping and self.cfg.pause == "reject" and not self.cfg.lora_rank:
            return 503, "weights are being updated", 1
        if self.cfg.overload == "429" and self.hooks.overloaded():
            return 429, "the trainer is behind; more turns would be too old to learn from", 5
        if not self.room.acquire(blocking=False):
            return 429, f"{self.cfg.max_requests} requests are open already", 1
        return None

    def receive(self, body):
        """Validate, pair, admit -> (turn, payload, extra headers) or a refusal Response."""
        messages = clean_messages(body.get("messages"))
        side = str(header_or_body(body, "X-Turn-Type", "turn_type") or "main").lower() == "side"
        given = header_or_body(body, "X-Session-Id", "session_id")
        given = None if given is None else str(given)
        done = flag(header_or_body(body, "X-Session-Done", "session_done"))
        payload, source, differs, skip = engine_body(body, messages, self.cfg, side)
        paired, after = (None, None) if side else self.sessions.pair(messages, given)
        if paired:  # KEEP: before admission, or a refused request would lose its user's reaction
            self.deliver(paired, after)
        session = given or (paired.session if paired else f"s-{uuid.uuid4().hex[:8]}")
        turn = Turn(id=f"chatcmpl-{uuid.uuid4().hex}", session=session, messages=messages,
                    kind="side" if side else "main", tools=payload.get("tools"),
                    chat_template_kwargs=payload.get("chat_template_kwargs"), created=time.time(),
                    sampling={k: payload[k] for k in (*SAMPLING, "max_tokens", "seed")
                              if k in payload})
        turn.stripped = sorted({n for m in messages for n in strip_wrappers(m["content"])[1]})
        self.tell(turn, differs and source == "run" and not side)
        headers = {"X-Sampling": source,  # a header carries no more than ASCII
                   "X-Session-Id": quote(session, safe=string.punctuation + " ")}
        refusal = self.admit()  # KEEP: last; what fails after it would hold its place for ever
        if refusal:
            with self.counting:
                self.requests["rejected"] += 1
            return failure(*refusal)
        return turn, payload, headers, skip, done

    def deliver(self, turn, next_state):
        turn.next_state, turn.paired_at = next_state, time.time()
        self.log.write(turn, "next_state", next_state=next_state, paired_at=turn.paired_at)
        self.hooks.paired(turn)

    def tell(self, turn, replaced):
        """Once per session, on screen: what was changed in its requests."""
        if turn.session in self.told or not (replaced or turn.stripped):
            return
        if len(self.told) > 10_000:
            self.told.clear()
        self.told.add(turn.session)
        if replaced:
            self.hooks.say(f"session {turn.session}: its own sampling parameters were replaced by "
                           "the run's (--client-sampling respect serves them, untrained)")
        if turn.stripped:
            self.hooks.say(f"session {turn.session}: not counted as the user's words: "
                           + ", ".join(turn.stripped))

    def chunks(self, turn, payload, skip, done, gone):
        """The one path of every answer: yields (delta or None, Reply); ends with a whole reply."""
        name, turn.version_start = self.policy.enter()
        upstream = Upstream(self.pool, {**payload, "model": name})
        reply, outcome, before = Reply(), "failed", None
        try:
            for event in upstream.follow(gone):
                if event is not None:
                    now = time.monotonic()
                    self.policy.saw_gap(before or now, now)
                    before = now
                yield (reply.add(event) if event else None), reply
            if not reply.finish_reason:  # KEEP: success is a finish_reason, never a [DONE]
                raise EngineError(502, "the engine's answer ended before it was complete")
            outcome = "ok"
        except (ClientGone, GeneratorExit):
            outcome = "gone"
            raise
        except EngineError as error:
            outcome = "refused" if error.status < 500 else "failed"
            raise
        finally:
            upstream.cancel()
            self.room.release()
            self.policy.leave(name)
            self.finish(turn, reply, outcome, skip, done)

    def finish(self, turn, reply, outcome, skip, done):
        """Record the turn and let it wait. KEEP: runs before the client sees the answer's end, or
        a quick client would react to a turn that does not wait yet."""
        turn.prompt_ids, turn.response_ids = reply.prompt_ids, reply.ids
        turn.rollout_logp = reply.logp
        turn.completion_tokens = reply.usage.get("completion_tokens", 0)
        turn.reply, turn.finish_reason = reply.message(), reply.finish_reason or "abort"
        turn.version_end = turn.version_start if self.cfg.lora_rank else self.policy.version
        turn.finished = time.time()
        turn.first_token = reply.first_token
        with self.counting:
            self.requests["failed" if outcome == "failed" else "ok"] += 1
        fate = {"failed": "engine_error", "refused": "refused", "gone": "aborted"}.get(outcome)
        fate = turn.skip = "side" if turn.kind == "side" else fate or skip or distrust(reply)
        self.log.write(turn, "reply", **{k: getattr(turn, k) for k in REPLY_FIELDS})
        if fate:
            self.log.close(turn, fate)
            self.sessions.touch(turn.session)
        else:
            self.sessions.wait(turn)
        if done:
            self.sessions.end(turn.session)

    def answer(self, body):
        received = self.receive(body)
        if isinstance(received, Response):
            return received
        turn, payload, headers, skip, done = received
        gone = request.environ.get("waitress.client_disconnected", lambda: False)
        stream = self.chunks(turn, payload, skip, done, gone)
        try:
            first = first_word(stream, 5.0)
            if body.get("stream"):
                parts = self.streamed(turn, stream, first, body)
                return Response(parts, mimetype="text/event-stream",
                                headers={**headers, "Cache-Control": "no-cache"})
            return self.whole(turn, stream, first, headers, body)
        except EngineError as error:
            return failure(error.status, str(error))
        except ClientGone:
            return failure(499, "the client went away")

    def whole(self, turn, stream, first, headers, body):
        reply = first[1]
        for _ in stream:
            pass
        choice = {"index": 0, "message": reply.message(), "finish_reason": reply.finish_reason,
                  "logprobs": {"content": reply.logprobs} if body.get("logprobs") else None}
        out = jsonify(id=turn.id, object="chat.completion", created=int(turn.created),
                      model=self.cfg.served_name, choices=[choice], usage=reply.usage)
        out.headers.update(headers)
        return out

    def streamed(self, turn, stream, first, body):
        """Server-sent events: deltas as they come, then a finish_reason, usage if asked, [DONE]."""
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        base = {"id": turn.id, "object": "chat.completion.chunk", "created": int(turn.created),
                "model": self.cfg.served_name} | ({"usage": None} if usage else {})

        def event(delta, finish=None, logprobs=None):
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
            return sse({**base, "choices": [choice]})

        reply, sent, quiet = first[1], 0, time.monotonic()
        yield event({"role": "assistant", "content": ""})
        try:
            for delta, reply in chain_first(first, stream):
                delta = {k: v for k, v in (delta or {}).items() if k != "role" and v}
                new = reply.logprobs[sent:] if body.get("logprobs") else []
                sent += len(new)
                if delta or new:
                    yield event(delta, logprobs={"content": new} if new else None)
                    quiet = time.monotonic()
                elif time.monotonic() - quiet > 10:
                    yield ": waiting for the engine\n\n"
                    quiet = time.monotonic()
        except EngineError as error:
            yield sse(error_body(str(error), "engine_error"))  # and no [DONE]: this is no success
            return
        except ClientGone:
            return
        yield event({}, finish=reply.finish_reason)
        if usage:
            yield sse({**base, "choices": [], "usage": reply.usage})
        yield "data: [DONE]\n\n"

    def feedback(self, body):
        """POST /v1/feedback {turn | session_id, score?, text?, hint?}: a label, no generation."""
        turn_id = body.get("turn") or self.sessions.latest.get(str(body.get("session_id")))
        given = {k: body[k] for k in ("score", "text", "hint") if body.get(k) not in (None, "")}
        if not isinstance(turn_id, str):
            raise BadRequest("'turn' (the completion's id) or a 'session_id' that has a turn is "
                             "needed")
        score = given.get("score", 0)
        if score not in (-1, 0, 1) or isinstance(score, bool) or not given or not all(
                isinstance(given.get(k, ""), str) for k in ("text", "hint")):
            raise BadRequest("give 'score' (-1, 0 or 1), 'text' or 'hint' (strings)")
        turn = self.sessions.take(turn_id)
        if turn:
            turn.feedback = given
            self.log.write(turn, "feedback", feedback=given)
            said = (given.get("text") or given.get("hint")
                    or {1: "👍", 0: "", -1: "👎"}[given["score"]])
            self.deliver(turn, [{"role": "user", "content": said}])
        elif not self.hooks.feedback(turn_id, given):
            return failure(409, f"turn {turn_id} is unknown, trained or dropped already")
        return jsonify(turn=turn_id, applied=True)


def first_word(stream, seconds):
    """Wait for the engine's first chunk, so that its refusal still becomes an honest status."""
    limit, reply = time.monotonic() + seconds, None
    for delta, reply in stream:
        if delta is not None or time.monotonic() > limit:
            return delta, reply
    return None, reply


def chain_first(first, rest):
    yield first
    yield from rest


def sse(data):
    return f"data: {json.dumps(data)}\n\n"


def error_body(message, kind="invalid_request_error"):
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def failure(status, message, retry_after=None):
    kind = "invalid_request_error" if status < 500 else "server_error"
    response = jsonify(error_body(message, kind))
    response.status_code = status
    if retry_after:
        response.headers["Retry-After"] = str(retry_after)
    return response


LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


def host_name(value):
    """'localhost:30000', '[::1]:80', 'http://a.b' -> the bare host name."""
    return re.sub(r":\d+$", "", value.split("://")[-1].split("/")[0]).lower()


def guard(cfg, let_in):
    """Who may come in -> None or the refusal. Without a key: only programs on this machine, and no
    web page (which a browser marks with an Origin and cannot give our Content-Type unasked).
    let_in(cfg): does our own page let this request in without the key?"""
    if request.path == "/healthz":
        return None
    if cfg.api_key:
        sent = request.headers.get("Authorization", "").partition(" ")[2].strip()
        if not hmac.compare_digest(sent.encode(), cfg.api_key.encode()) and not let_in(cfg):
            return failure(401, "a valid key is needed: Authorization: Bearer KEY")
    elif host_name(request.host) not in LOOPBACK:
        return failure(403, "without a key this server answers on loopback names only")
    origin = request.headers.get("Origin")
    if origin and origin.split("://")[-1].lower() != request.host.lower():
        return failure(403, "requests from other web pages are refused")
    if request.method == "POST" and request.mimetype != "application/json":
        return failure(415, "send 'Content-Type: application/json'")
    return None


def json_body():
    try:
        body = parse(request.get_data())
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def make_app(server):
    """Routes -> Flask app."""
    from page import live  # which imports this module

    app, cfg = Flask("nano-openclaw-rl"), server.cfg
    app.config["MAX_CONTENT_LENGTH"] = cfg.max_body_mb << 20
    app.before_request(lambda: guard(cfg, live.let_in))
    app.register_blueprint(live.blueprint(server))
    app.register_error_handler(BadRequest, lambda e: failure(400, str(e)))
    app.register_error_handler(HTTPException, lambda e: failure(e.code, e.description))
    app.register_error_handler(413, lambda e: failure(413, f"body above {cfg.max_body_mb} MiB"))

    @app.post("/v1/chat/completions")
    def chat():
        return server.answer(json_body())

    @app.post("/v1/feedback")
    def feedback():
        return server.feedback(json_body())

    @app.get("/v1/models")
    def models():
        return jsonify(object="list", data=[{
            "id": cfg.served_name, "object": "model", "owned_by": "nano-openclaw-rl", "created": 0,
            "max_model_len": cfg.max_model_len}])

    @app.get("/healthz")
    def health():
        policy = server.policy
        return jsonify(accepting=policy.accepting, version=policy.version, swapping=policy.swapping,
                       open=sum(policy.open.values()), waiting=len(server.sessions.keys),
                       requests=dict(server.requests), **server.hooks.health())

    return app


def serve(app, cfg):
    """-> a waitress server, bound; call .run() in a thread and .close() to end it."""
    from waitress.server import create_server

    from page.live import STREAMS

    threads = cfg.max_requests + STREAMS + 8  # the 8 keep /healthz and the 429s alive
    return create_server(
        app, host=cfg.host, port=cfg.port, threads=threads, channel_request_lookahead=1,
        asyncore_use_poll=True, connection_limit=4 * threads + 64, ident=None,
        # above Flask's own limit: waitress refuses in plain text
        max_request_body_size=4 * cfg.max_body_mb << 20, channel_timeout=300)
