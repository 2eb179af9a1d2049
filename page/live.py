"""The live page at `/`: the four loops, the curves, the turns and a chat, in one browser window.

Place in the system: proxy.make_app hangs this blueprint into its app. It looks on from outside: at
the run's record (turns.jsonl, and metrics.jsonl beside it), at the policy and at the queue's
depths. Nothing here is on a request's path, and while no page is open it does nothing at all: the
files are read on when an event stream asks for news.

Memory is bounded: of the newest turns a few lines each and where their events lie in the file; a
turn that somebody opens is read from there again. What people said goes to the page and nowhere
else.
"""

import hashlib
import hmac
import json
import math
import os
import threading
import time
from collections import deque
from dataclasses import fields
from pathlib import Path

import urllib3
from flask import Blueprint, Response, jsonify, request, send_from_directory

from proxy import EngineError, Turn, ask_engine, failure, json_body, said_last

HERE = Path(__file__).resolve().parent
FILES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml",
         "uPlot.min.css": "text/css", "uPlot.iife.min.js": "text/javascript"}
STREAMS = 4  # event streams at once; each holds a thread of the web server
TURNS, ROWS = 200, 2000  # newest ones that a page gets
BACKLOG = 32 << 20  # bytes at the end of a file that are looked at; older ones are skipped
SHORT, LONG = 240, 20_000  # characters: of a text in the list, of a message in an opened turn
HEADERS = {  # whatever a model or a user wrote, nothing but our own files can run
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}
CONFIG = ("mode model served_name batch_size w_rl w_opd opd_clip topk lora_rank judge "
          "simulate").split()
CURVES = ("step version time reward_mean judged reply_tokens logp_gap logp_gap_turns "
          "logp_gap_stale clip_frac age_mean age_max hint_rate cut_frac loss canary").split()
SHOWN = ("id session kind messages reply finish_reason version_start version_end sampling created "
         "first_token finished next_state paired_at feedback votes hint_votes hints hint hint_skip "
         "score judged_at r distil fate step closed").split()
KNOWN = {f.name for f in fields(Turn)}

# ------------------------------------------------------------------------------------- who comes in


def same(a, b):
    """In constant time. A JSON string may hold half a character, which has no plain UTF-8."""
    return hmac.compare_digest(*(x.encode("utf-8", "surrogatepass") for x in (a, b)))


def cookie(cfg):
    """-> (name, value) of what a browser keeps instead of the key. Cookies do not know ports: two
    runs on one machine need two names."""
    value = hmac.new(cfg.api_key.encode(), b"nano-openclaw-rl page", hashlib.sha256).hexdigest()
    return f"openclaw-{cfg.port}", value


def let_in(cfg):
    """With a key: is this request good without it? The page's own files are, they hold no data and
    ask for the key; and a browser that has the cookie. A cookie comes with whatever any page makes
    a browser ask, so a post must name the page that it comes from, which guard compares."""
    path, reads = request.path, request.method in ("GET", "HEAD")
    if path == "/login" or reads and (path == "/" or path.startswith("/page/")):
        return True
    if not (reads and (path == "/events" or path.startswith("/events/"))
            or path in ("/v1/chat/completions", "/v1/feedback") and request.headers.get("Origin")):
        return False
    name, value = cookie(cfg)
    return same(request.cookies.get(name, ""), value)


# ----------------------------------------------------------------------------- what there is to see


class Tail:
    """The lines that were added to a file since the last look, whole ones only."""

    def __init__(self, path):
        self.path, self.at = Path(path), 0

    def lines(self):
        """Yields (offset, line); nothing while there is no file."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            first = os.fstat(file.fileno()).st_size - BACKLOG
            if self.at < first:
                self.at = file.seek(first) + len(file.readline())  # from the next whole line on
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):  # being written: next time
                    return
                at, self.at = self.at, self.at + len(line)
                yield at, line


class Live:
    """What the pages are told. `changes` numbers all news; a stream remembers what it has seen."""

    def __init__(self, server):
        self.server, self.lock, self.changes = server, threading.Lock(), 0
        self.run = time.time()  # a page that outlives us sees by it that another run began
        self.record = Tail(server.log.path)
        self.metrics = Tail(self.record.path.parent / "metrics.jsonl")
        self.rows = deque(maxlen=ROWS)  # (change, row)
        self.turns = {}  # id -> {brief, change, places: where its events lie}, oldest first
        self.places = threading.BoundedSemaphore(STREAMS)
        self.words = Words(server.engine)

    def read(self):
        """Read both files on. The caller holds the lock."""
        for _, line in self.metrics.lines():
            row = json.loads(line)
            self.changes += 1
            self.rows.append((self.changes, {k: row.get(k) for k in CURVES}))
        for at, line in self.record.lines():
            event = json.loads(line)
            if event["event"] == "reply":
                self.turns[event["turn"]] = {"brief": {}, "places": []}
                if len(self.turns) > TURNS:
                    del self.turns[next(iter(self.turns))]
            turn = self.turns.get(event["turn"])
            if turn:  # else it is older than what is kept
                self.changes += 1
                turn["change"] = self.changes
                turn["places"].append((at, len(line)))
                turn["brief"].update(brief(event))

    def news(self, seen):
        """-> (rows, turns in brief) that changed after change number `seen`, the latest number."""
        with self.lock:
            self.read()
            return ([row for change, row in self.rows if change > seen],
                    [dict(t["brief"]) for t in self.turns.values() if t["change"] > seen],
                    self.changes)

    def status(self):
        policy, log = self.server.policy, self.server.log
        with policy.lock:
            now = {"accepting": policy.accepting, "version": policy.version,
                   "swapping": policy.swapping, "open": sum(policy.open.values())}
        return {**now, "waiting": len(self.server.sessions.keys), "turns": log.turns,
                "fates": log.counts(), "requests": dict(self.server.requests),
                **self.server.hooks.health()}

    def stream(self, gone):
        """All there is, then what is new; the status each second is the stream's sign of life."""
        cfg, seen, told = self.server.cfg, 0, -math.inf
        yield message("hello", {k: getattr(cfg, k) for k in CONFIG}
                      | {"model": Path(cfg.model).name, "run": self.run})
        while not gone():
            rows, turns, seen = self.news(seen)
            if rows:
                yield message("rows", rows)
            if turns:
                yield message("turns", turns)
            if time.monotonic() - told >= 1:
                told = time.monotonic()
                yield message("status", self.status())
            time.sleep(0.25)

    def detail(self, turn_id):
        """Everything about one turn, from the record -> dict, or None."""
        with self.lock:
            self.read()
            places = [*self.turns.get(turn_id, {"places": ()})["places"]]
        if not places:
            return None
        turn = Turn(turn_id, session="")
        with open(self.record.path, "rb") as file:
            for at, size in places:
                file.seek(at)
                found = json.loads(file.read(size))
                for key in KNOWN & found.keys():
                    setattr(turn, key, found[key])
        out = {k: getattr(turn, k) for k in SHOWN}
        out["messages"] = [m | {"content": middle_out(m["content"])} for m in turn.messages]
        out["tokens"] = {
            "text": self.words.of(turn.response_ids), "id": turn.response_ids,
            "rollout": turn.rollout_logp, "prox": turn.prox_logp, "teacher": turn.teacher_logp,
            "advantage": advantage(turn, self.server.cfg)}
        return out


def brief(event):
    """A turn's line in the list: what one event adds to it."""
    kind = event["event"]
    if kind == "reply":
        reply = event["reply"]
        calls = "".join(f" [calls {c['function']['name']}]" for c in reply.get("tool_calls") or [])
        return {"id": event["turn"], "session": event["session"], "kind": event["kind"],
                "time": event["finished"], "asked": said_last(event["messages"])[:SHORT],
                "reply": (reply.get("content") or "")[:SHORT] + calls[:SHORT], "state": "waiting",
                "fate": None, "tokens": len(event["response_ids"]),
                "version": event["version_start"]}
    if kind == "next_state":
        said = " / ".join(m["content"][:SHORT] for m in event["next_state"][:4])
        return {"state": "judging", "said": said[:SHORT]}
    if kind == "judged":
        return {"state": "judged", "score": event["score"], "hint": (event["hint"] or "")[:SHORT]}
    if kind in ("fate", "resumed"):  # --resume may take a fate off again
        return {k: event[k] for k in ("fate", "step")}
    return {}


def advantage(turn, cfg):
    """What trainer.advantages gives its tokens (R,); None where that is not known (yet), and for a
    turn that is not trained."""
    hint = turn.distil and not cfg.topk  # --topk: the hint part is no advantage, but a loss
    if turn.fate not in (None, "trained") or turn.r is None and not hint:
        return None
    r = cfg.w_rl * (turn.r or 0.0)
    if not hint:
        return [r] * len(turn.response_ids)
    if turn.fate is None or turn.teacher_logp is None or turn.prox_logp is None:
        return None  # what a lost update found out is in the record, and will be found out again
    return [r + cfg.w_opd * max(-cfg.opd_clip, min(cfg.opd_clip, t - p))
            for t, p in zip(turn.teacher_logp, turn.prox_logp, strict=True)]


def middle_out(text):
    """An agent's prompt can be a book; its beginning and its end will do."""
    left = len(text) - LONG
    return text if left <= 0 else (
        f"{text[: LONG // 2]}\n[... {left:,} characters are not shown ...]\n{text[-LONG // 2 :]}")


class Words:
    """The text of token ids, asked of the engine's own tokenizer, once per id."""

    def __init__(self, engine):
        self.engine, self.known = engine, {}
        self.http = urllib3.PoolManager(retries=False, timeout=2)

    def of(self, ids, seconds=3):
        """-> one text per id. A character that is spread over several tokens stands with the first
        of them. None: the engine did not say, or not in time; the next look asks for the rest."""
        end, words = time.monotonic() + seconds, []
        try:
            for i in ids:
                words.append(self.ask([i, i], end))
            for start, stop in broken(words):
                whole = self.ask(ids[start:stop], end)
                words[start:stop] = [whole, *[""] * (stop - start - 1)]
        except (EngineError, urllib3.exceptions.HTTPError, LookupError, TypeError, ValueError):
            pass
        return words + [None] * (len(ids) - len(words))

    def ask(self, ids, end):
        key = tuple(ids)
        if key not in self.known:
            if time.monotonic() > end:
                raise EngineError(504, "too many new tokens for one look")
            if len(self.known) > 50_000:
                self.known.clear()
            text = ask_engine(self.http, self.engine, "/detokenize", {"tokens": ids})["prompt"]
            self.known[key] = second(text) if len(ids) == 2 and ids[0] == ids[1] else text
        return self.known[key]


def second(text):
    """A token was decoded twice in a row -> the second one. Some tokenizers take a leading space
    off whatever stands first: 'Hi Hi' -> ' Hi', but 'HiHi' -> 'Hi'."""
    return text[len(text) // 2 :]


def broken(words):
    """Runs of tokens that are no whole characters by themselves, as [start, stop) pairs."""
    runs = []
    for i, word in enumerate(words):
        if "\ufffd" in word:
            if runs and runs[-1][1] == i:
                runs[-1][1] = i + 1
            else:
                runs.append([i, i + 1])
    return runs


def plain(value):
    """The same without NaN and infinity, which are no JSON to a browser."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def message(name, data):
    return f"event: {name}\ndata: {json.dumps(plain(data))}\n\n"


# -------------------------------------------------------------------------------------- the routes


def blueprint(server):
    """The page's routes -> Blueprint. proxy.guard has looked at every request before."""
    page, live, cfg = Blueprint("page", __name__), Live(server), server.cfg

    @page.before_request
    def own_pages_only():
        """A foreign page may link to us; it must not take our streams or read our data."""
        site = request.headers.get("Sec-Fetch-Site")
        if request.path != "/" and site in ("cross-site", "same-site"):
            return failure(403, "requests from other web pages are refused")
        return None

    @page.after_request
    def harden(response):
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    @page.get("/")
    def index():
        return send_from_directory(HERE, "index.html", max_age=0)

    @page.get("/page/<name>")
    def file(name):
        if name not in FILES:
            return failure(404, "there is no such file")
        return send_from_directory(HERE, name, mimetype=FILES[name], max_age=0)

    @page.post("/login")
    def login():
        if (request.content_length or 0) > 4096:  # nobody has shown a key yet
            return failure(413, "that is no key")
        key, ok = json_body().get("key"), jsonify(ok=True)
        if cfg.api_key:
            if not isinstance(key, str) or not same(key, cfg.api_key):
                return failure(401, "that is not the key of this server")
            name, value = cookie(cfg)
            ok.set_cookie(name, value, path="/", httponly=True, samesite="Strict")
        return ok

    @page.get("/events")
    def events():
        if not live.places.acquire(blocking=False):
            return failure(503, f"{STREAMS} pages look on already; close one of them", 5)
        gone = request.environ.get("waitress.client_disconnected", lambda: False)
        response = Response(live.stream(gone), mimetype="text/event-stream")
        response.call_on_close(live.places.release)  # KEEP: also if the stream never began
        return response

    @page.get("/events/turns/<turn_id>")
    def turn(turn_id):
        found = live.detail(turn_id)
        if found is None:
            return failure(404, f"this turn is not among the newest {TURNS}")
        return jsonify(plain(found))

    return page
