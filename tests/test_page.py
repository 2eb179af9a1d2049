"""page/: what the live page is told, who may see it, that nothing in it can run or get stuck."""

import http.client
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from conftest import until
from fake_engine import say

import proxy
from page import live

HI = [{"role": "user", "content": "Hi."}]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> </textarea>"
KEY = "a-key-of-some-length"


class Stream:
    """An open /events: `until(name, good)` reads on to the first such event that is good."""

    def __init__(self, server, headers=None):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.cfg.port, timeout=20)
        self.connection.request("GET", "/events", headers=headers or {})
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        self.response.close()
        self.connection.close()

    def events(self):
        name = None
        while line := self.response.readline().decode():
            if line.startswith("event: "):
                name = line[7:-1]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:], parse_constant=pytest.fail)  # NaN is no JSON

    def until(self, name, good=lambda data: True):
        return next(data for n, data in self.events() if n == name and good(data))

    def turn(self, turn_id, state):
        """The first news that this turn is in this state."""
        good = [None]

        def there(data):
            good[0] = next((t for t in data if t["id"] == turn_id
                            and state == ("closed" if t["fate"] else t["state"])), None)
            return good[0]

        self.until("turns", there)
        return good[0]


def get(server, path, headers=None, method="GET"):
    """As a browser asks: without a content type."""
    return server.request(method, path, headers={"Content-Type": None, **(headers or {})})


def metrics(server, text):
    with open(server.path.parent / "metrics.jsonl", "a") as file:
        file.write(text)


def tell_words(engine, words):
    """The engine's /detokenize: bytes per id, decoded as tokenizers do."""
    plain = engine.answer

    def answer(path, query, body):
        if path != "/detokenize":
            return plain(path, query, body)
        return 200, {"prompt": b"".join(words[i] for i in body["tokens"]).decode(errors="replace")}

    engine.answer = answer


# --------------------------------------------------------------------------------------- the files


def test_the_page_and_its_files(server):
    """Protects: everything the page needs comes from here, with headers that let nothing else
    run."""
    status, headers, html = get(server, "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    used = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert {u.removeprefix("/page/") for u in used} == set(live.FILES)
    for path in ["/", *used]:
        status, headers, _ = get(server, path)
        policy = headers["Content-Security-Policy"]
        assert status == 200 and "default-src 'self'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy and "form-action 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        if path != "/":
            assert headers["Content-Type"].split(";")[0] == live.FILES[path.removeprefix("/page/")]


@pytest.mark.parametrize("path", [
    "/page/live.py", "/page/index.html", "/page/uPlot.LICENSE.txt", "/page/", "/page",
    "/page/../proxy.py", "/page/..%2fproxy.py", "/page/%2e%2e/proxy.py", "/page/%2e%2e%2fproxy.py",
    "/page/..%5cproxy.py", "/page//etc/passwd", "/page/%2fetc%2fpasswd", "/page/page.js%00",
    "/page/./page.js/..", "/page/PAGE.JS", "/live.py", "/turns.jsonl", "/page/__pycache__"])
def test_no_other_file(server, path):
    """Protects: the list of files is the whole list, however the path is written."""
    status, _, body = get(server, path)
    assert status == 404 and set(body) == {"error"}


def test_nothing_is_inline_and_nothing_becomes_markup():
    """Protects: what models and users write is text in the page. The policy would stop a script,
    this stops the markup."""
    script = (live.HERE / "page.js").read_text()
    assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|"
                         r"new Function|DOMParser|createContextualFragment|srcdoc|https?:", script)
    found = []

    class Inline(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.extend(a for a, _ in attrs if a == "style" or a.startswith("on"))
            found.extend([tag] if tag == "style" or tag == "script" and not dict(attrs).get("src")
                         else [])

    Inline().feed((live.HERE / "index.html").read_text())
    assert not found


def test_the_script_parses():
    """Protects: a page that loads. Ids that the script looks for are in the page."""
    html = (live.HERE / "index.html").read_text()
    for name in re.findall(r'\$\("#([\w-]+)', (live.HERE / "page.js").read_text()):
        assert f'id="{name}"' in html, name
    if not shutil.which("node"):
        pytest.skip("node is not here")
    done = subprocess.run(["node", "--check", live.HERE / "page.js"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# ---------------------------------------------------------------------------------- who may see it

OURS = ["/", "/page/page.js", "/events", "/events/turns/x"]


@pytest.mark.parametrize("path", OURS)
@pytest.mark.parametrize("headers, status", [
    ({"Host": "evil.example"}, 403), ({"Host": "localhost.evil.example"}, 403), ({"Host": ""}, 403),
    ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
    ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403), ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Sec-Fetch-Site": "same-origin"}, 200), ({"Sec-Fetch-Site": "none"}, 200),
    ({"Host": "localhost"}, 200), ({"Host": "[::1]:80"}, 200)])
def test_without_a_key_only_this_machine(server, path, headers, status):
    """Protects: a foreign page, or a foreign name that leads here, sees nothing and takes no
    stream. A link to the page itself is fine."""
    if path == "/" and "Sec-Fetch-Site" in headers:
        status = 200
    if path.endswith("/x") and status == 200:
        status = 404
    if path == "/events":
        with Stream(server, headers) as stream:
            assert stream.status == status
    else:
        assert get(server, path, headers)[0] == status


def test_with_a_key_only_the_empty_page_is_open(make_server):
    """Protects: files hold no data and are open, or nobody could be asked for the key; all else
    wants it. Posting to an open path opens nothing."""
    server = make_server(api_key=KEY)
    away = {"Host": "my.gpu.box"}
    assert get(server, "/", away)[0] == get(server, "/page/page.css", away)[0] == 200
    for path in ("/events", "/events/turns/x", "/events/", "/v1/models", "/static/x"):
        assert get(server, path)[0] == 401, path
    assert server.post({"messages": HI})[0] == server.post({"turn": "x"}, path="/v1/feedback")[0] \
        == server.post({}, path="/")[0] == server.post({}, path="/page/page.js")[0] == 401
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert get(server, "/events/turns/x", bearer)[0] == 404
    with Stream(server, bearer) as stream:
        assert stream.until("hello")


def login(server, key, headers=None):
    status, headers, _ = server.post({"key": key}, headers, "/login")
    return status, headers["Set-Cookie"]


@pytest.mark.parametrize("key", [KEY + "x", KEY[:-1], "", KEY.upper(), None, 5, [], {}, [KEY], True,
                                 "\ud800", "ключ", live.cookie(SimpleNamespace(
                                     api_key=KEY, port=1))[1]])
def test_a_wrong_key(make_server, key):
    """Protects: 401 with a sentence for anything but the key, and no cookie. Once: half a
    character was a 500."""
    server = make_server(api_key=KEY)
    status, headers, body = server.post({"key": key}, path="/login")
    assert status == 401 and "Set-Cookie" not in headers and "key" in body["error"]["message"]
    assert KEY not in json.dumps(body)


def test_the_login_is_guarded(make_server):
    """Protects: a foreign page cannot even try keys; a form cannot post here."""
    server = make_server(api_key=KEY)
    assert login(server, KEY, {"Origin": "http://evil.example"}) == (403, None)
    assert login(server, KEY, {"Sec-Fetch-Site": "cross-site"}) == (403, None)
    assert login(server, KEY, {"Content-Type": "application/x-www-form-urlencoded"}) == (415, None)
    assert server.post(b"[]", path="/login")[0] == 400
    # nobody has shown a key yet: once a bug, 16 MiB of JSON were parsed for them
    assert server.post({"key": "x" * 5000}, path="/login")[0] == 413
    assert get(server, "/login")[0] == 405 and get(server, f"/?key={KEY}")[1]["Set-Cookie"] is None
    assert login(make_server(), "whatever") == (200, None)  # none is set, none is needed


def test_the_cookie(make_server):
    """Protects: what a browser keeps is not the key, no script can read it, no foreign page can
    make it go along; it opens the page's own routes and its two posts, and nothing else."""
    server = make_server(api_key=KEY)
    status, sent = login(server, KEY)
    assert status == 200 and KEY not in sent
    name, _, flags = sent.partition("=")
    value, *flags = flags.split("; ")
    assert name == f"openclaw-{server.cfg.port}"
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} == set(flags)
    here = f"http://127.0.0.1:{server.cfg.port}"
    has = {"Cookie": f"{name}={value}"}
    with Stream(server, has) as stream:
        assert stream.until("hello")
    assert get(server, "/events/turns/x", has)[0] == 404
    posts = [({"messages": HI}, "/v1/chat/completions"), ({"turn": "in line", "score": 1},
                                                         "/v1/feedback")]
    for body, path in posts:
        assert server.post(body, has | {"Origin": here}, path)[0] == 200
        for headers, status in [
                (has, 401), (has | {"Origin": "null"}, 403), ({"Origin": here}, 401),
                (has | {"Origin": "http://evil.example"}, 403),
                (has | {"Origin": "http://127.0.0.1:1"}, 403),
                (has | {"Origin": here, "Content-Type": "text/plain"}, 415),
                ({"Origin": here, "Cookie": f"{name}={value[:-1]}"}, 401),
                ({"Origin": here, "Cookie": f"{name}="}, 401),
                ({"Origin": here, "Cookie": f"{name}={KEY}"}, 401),
                ({"Origin": here, "Cookie": f"openclaw-1={value}"}, 401)]:
            assert server.post(body, headers, path)[0] == status, headers
    assert get(server, "/v1/models", has)[0] == 401
    assert get(server, "/events/turns/x", has | {"Sec-Fetch-Site": "same-site"})[0] == 403
    server.cfg.api_key = "another"  # a new key ends all old cookies
    assert get(server, "/events/turns/x", has)[0] == 401


# ---------------------------------------------------------------------------- what the page is told


def test_status(server):
    """Protects: the loops' state comes at once and then again and again, without a reload."""
    server.hooks.health = lambda: {"judging": 2, "ready": 5, "leased": 0, "updates": 3}
    with Stream(server) as stream:
        hello = stream.until("hello")
        assert (hello["mode"], hello["batch_size"]) == ("opd", 16)
        assert not {"api_key", "judge_key"} & hello.keys()
        first = stream.until("status")
        assert (first["version"], first["ready"], first["updates"]) == (0, 5, 3)
        server.policy.begin_swap()
        stream.until("status", lambda s: s["swapping"])
        server.policy.publish(4, "base")
        server.ask("Hi.")
        now = stream.until("status", lambda s: s["version"] == 4 and s["turns"] == 1)
        assert now["waiting"] == 1 and now["requests"]["ok"] == 1 and now["open"] == 0


def test_rows_of_metrics(server):
    """Protects: old and new rows come once each, a half-written one when it is whole, and NaN,
    which no browser reads, as nothing."""
    row = {"step": 1, "reward_mean": -0.5, "clip_frac": 0.1, "secret": "not shown"}
    metrics(server, json.dumps(row) + "\n")
    with Stream(server) as stream:
        (got,) = stream.until("rows")
        assert (got["step"], got["reward_mean"], got["clip_frac"]) == (1, -0.5, 0.1)
        assert got.keys() == set(live.CURVES) and got["hint_rate"] is None
        metrics(server, json.dumps({"step": 2, "loss": math.nan, "logp_gap": math.inf})[:-7])
        stream.until("status")
        stream.until("status")
        metrics(server, 'finity}\n{"step": 3}\n')
        second = stream.until("rows")
        assert [r["step"] for r in second] == [2, 3]
        assert second[0]["loss"] is None and second[0]["logp_gap"] is None


def test_a_turns_life(server, engine):
    """Protects: a turn is followed from its reply to its training, and can be opened with all that
    was found out about it."""
    tell_words(engine, {10: b"Hello", 11: b" there.", 2: b"<|im_end|>"})
    with Stream(server) as stream:
        turn_id = server.ask("What is rain?")["id"]
        first = stream.turn(turn_id, "waiting")
        assert (first["asked"], first["reply"]) == ("What is rain?", "Hello there.")
        assert first["tokens"] == 3 and first["fate"] is None
        server.ask("What is rain?", "Hello there.", "Too long.")
        assert stream.turn(turn_id, "judging")["said"] == "Too long."
        (turn,) = server.paired
        turn.votes, turn.score, turn.r, turn.distil = [-1], -1, -1, True
        turn.hint, turn.hint_votes = "Be brief, please.", [(1, "Be brief, please.")]
        turn.hints = [turn.hint]
        turn.hinted_prompt_ids = [[1, 2, 3]]
        server.log.write(turn, "judged", **{k: getattr(turn, k) for k in proxy.JUDGED_FIELDS})
        judged = stream.turn(turn_id, "judged")
        assert (judged["score"], judged["hint"]) == (-1, "Be brief, please.")
        early = get(server, f"/events/turns/{turn_id}")[2]
        assert early["tokens"]["advantage"] is None and early["tokens"]["teacher"] is None
        server.log.close(turn, "trained", 7, prox_logp=[-1.0, -2.0, -3.0],
                         teacher_logp=[-0.5, -2.0, -90.0])
        closed = stream.turn(turn_id, "closed")
        assert (closed["fate"], closed["step"], closed["asked"]) == ("trained", 7, "What is rain?")
    status, headers, detail = get(server, f"/events/turns/{turn_id}")
    assert status == 200 and headers["Cache-Control"] == "no-store"
    assert detail["messages"][0]["content"] == "What is rain?" and detail["votes"] == [-1]
    assert detail["next_state"][0]["content"] == "Too long." and detail["step"] == 7
    assert detail["tokens"] == {
        "id": [10, 11, 2], "text": ["Hello", " there.", "<|im_end|>"], "rollout": [-0.5] * 3,
        "prox": [-1, -2, -3], "teacher": [-0.5, -2, -90], "advantage": [-0.5, -1, -6]}
    with Stream(server) as stream:
        stream.turn(turn_id, "closed")
        server.log.write(turn, "resumed", fate=None, step=None)  # as after a crash
        assert stream.turn(turn_id, "judged")["step"] is None
    assert get(server, f"/events/turns/{turn_id}")[2]["tokens"]["advantage"] is None
    assert "hinted_prompt_ids" not in detail and "prompt_ids" not in detail
    assert get(server, "/events/turns/unknown")[0] == 404


def test_a_dropped_turn_says_why(server):
    """Protects: also a turn that is not trained is shown, with its reason and without colours."""
    turn_id = server.post({"messages": HI, "session_done": True})[2]["id"]
    with Stream(server) as stream:
        assert stream.turn(turn_id, "closed")["fate"] == "no_next_state"
    detail = get(server, f"/events/turns/{turn_id}")[2]
    assert detail["fate"] == "no_next_state" and detail["tokens"]["advantage"] is None


def test_hostile_text_is_data(server, engine):
    """Protects: whatever is said comes as JSON strings in events of ours; a line break cannot end
    one of them, and no browser takes the answer for a page."""
    text = HOSTILE + "\n\nevent: status\ndata: {}\n\n"
    engine.script = lambda body: say(deltas=[{"content": text}])
    turn_id = server.ask(HOSTILE + "?")["id"]
    with Stream(server) as stream:
        assert "text/event-stream" in stream.response.headers["Content-Type"]
        assert stream.response.headers["X-Content-Type-Options"] == "nosniff"
        shown = stream.turn(turn_id, "waiting")
        assert shown["reply"] == text and shown["asked"] == HOSTILE + "?"
    _, headers, detail = get(server, f"/events/turns/{turn_id}")
    assert headers["Content-Type"] == "application/json" and detail["reply"]["content"] == text
    for path in (f"/events/turns/{HOSTILE}", f"/page/{HOSTILE}"):
        _, headers, body = get(server, path.replace(" ", "%20"))
        assert headers["Content-Type"] == "application/json" and "alert" not in json.dumps(body)


def test_what_people_say_is_in_no_log(server, engine, capfd, caplog):
    """Protects: prompts are in turns.jsonl and on the page, and nowhere else, also when something
    of the page's own fails."""
    tell_words(engine, {})  # every question about a token breaks
    turn_id = server.ask("xyzzy-prompt")["id"]
    with Stream(server) as stream:
        stream.turn(turn_id, "waiting")
    assert get(server, f"/events/turns/{turn_id}")[2]["tokens"]["text"] == [None] * 3
    with open(server.path, "a") as file:
        file.write('{"turn": "xyzzy-broken\n')
    assert get(server, f"/events/turns/{turn_id}")[0] == 500
    assert get(server, f"/events/turns/{turn_id}")[0] == 200  # and it goes on behind it
    out, err = capfd.readouterr()
    assert "xyzzy" not in out + err + caplog.text + " ".join(server.said)


# ------------------------------------------------------------------------------ nothing gets stuck


def test_streams_are_few_and_leave_their_place(server):
    """Protects: lookers-on never take the threads of users; the fifth is told so; one that left is
    noticed, and one that only asked for headers never held a place."""
    assert len(server.web.task_dispatcher.threads) == server.cfg.max_requests + 8 + live.STREAMS
    for _ in range(live.STREAMS + 1):
        assert get(server, "/events", method="HEAD")[0] == 200
    streams = [Stream(server) for _ in range(live.STREAMS)]
    assert [s.status for s in streams] == [200] * live.STREAMS
    [s.until("status") for s in streams]
    status, headers, body = get(server, "/events")
    assert status == 503 and headers["Retry-After"]
    assert str(live.STREAMS) in body["error"]["message"]
    assert server.ask("Hi.") and get(server, "/healthz")[0] == 200
    streams.pop().close()

    def again():
        if len(streams) < live.STREAMS:
            stream = Stream(server)
            streams.append(stream) if stream.status == 200 else stream.close()
        return len(streams) == live.STREAMS

    assert until(again, 10)
    [s.close() for s in streams]
    assert server.idle()


def test_nobody_looks_nothing_is_read(server, monkeypatch):
    """Protects: the page costs users nothing while it is closed."""
    looks, lines = [], live.Tail.lines
    monkeypatch.setattr(live.Tail, "lines", lambda self: looks.append(1) or lines(self))
    server.ask("Hi.")
    server.ask("Hi.", "Hello there.", "Thanks!")
    assert not looks
    with Stream(server) as stream:
        stream.until("turns")
    assert looks


def test_memory_is_bounded(make_server, monkeypatch):
    """Protects: only the newest turns are kept, and of a long record only its end is read."""
    monkeypatch.setattr(live, "TURNS", 3)
    server = make_server()
    ids = [server.ask(f"Q{i}")["id"] for i in range(5)]
    with Stream(server) as stream:
        assert [t["id"] for t in stream.until("turns")] == ids[2:]
    assert [get(server, f"/events/turns/{i}")[0] for i in ids] == [404, 404, 200, 200, 200]
    text = server.path.read_text()
    monkeypatch.setattr(live, "TURNS", 200)
    monkeypatch.setattr(live, "BACKLOG", len(text) - text.index(ids[1]))  # amid the second's line
    other = make_server()
    other.path.write_text(text)
    with Stream(other) as stream:
        assert [t["id"] for t in stream.until("turns")] == ids[2:]
    monkeypatch.setattr(live, "ROWS", 2)
    third = make_server()
    metrics(third, "".join(f'{{"step": {i}}}\n' for i in range(9)))
    with Stream(third) as stream:
        assert [r["step"] for r in stream.until("rows")] == [7, 8]


def test_long_texts_are_cut_in_the_middle(server):
    """Protects: a page that opens, however long an agent's prompt is."""
    turn_id = server.ask("a" * 30_000 + "z")["id"]
    with Stream(server) as stream:
        assert len(stream.turn(turn_id, "waiting")["asked"]) == live.SHORT
    shown = get(server, f"/events/turns/{turn_id}")[2]["messages"][0]["content"]
    assert "10,001 characters" in shown and shown.endswith("z") and len(shown) < live.LONG + 100
    assert live.middle_out("x" * live.LONG) == "x" * live.LONG


# ----------------------------------------------------------------------------------- words, numbers


def test_words_are_the_engines_own(engine):
    """Protects: each token's exact text, leading spaces included; a character over several tokens
    is one; an id is asked for once."""
    face = "😀".encode()
    tell_words(engine, {1: b"Hi", 2: b" you", 3: face[:2], 4: face[2:3], 5: face[3:], 6: b"aa"})
    words = live.Words(proxy.Endpoint(engine.url, ""))
    assert words.of([1, 2, 3, 4, 5, 2, 6]) == ["Hi", " you", "😀", "", "", " you", "aa"]
    asked = len(engine.calls)
    assert words.of([6, 3, 4, 5, 1]) == ["aa", "😀", "", "", "Hi"] and len(engine.calls) == asked
    assert words.of([]) == []


def test_words_of_tokenizers_that_strip_the_first_space():
    """Protects: such tokenizers decode ' Hi' alone as 'Hi'."""
    assert [live.second(x) for x in ("Hi Hi", "HiHi", " Hi Hi", "", "aa", " ")] == [
        " Hi", "Hi", " Hi", "", "a", " "]


def test_words_that_the_engine_does_not_tell(engine):
    """Protects: a turn opens also when the engine is slow, gone or without such a route."""
    words = live.Words(proxy.Endpoint(engine.url, ""))
    assert words.of([1, 2]) == [None, None]
    tell_words(engine, {1: b"Hi"})
    assert words.of([1, 7, 1]) == ["Hi", None, None]
    assert words.of([1, 2], seconds=-1) == ["Hi", None]  # what is known needs no asking
    assert live.Words(proxy.Endpoint("http://127.0.0.1:9", "")).of([1]) == [None]


@pytest.mark.parametrize("r, distil", [
    (1, True), (-1, True), (-1, False), (None, True), (0, False)])
def test_advantages_are_the_trainers(r, distil):
    """Protects: the colours are what was trained, also when the trainer's rule changes."""
    import torch

    import trainer

    cfg = SimpleNamespace(w_rl=0.7, w_opd=1.3, opd_clip=2.0, topk="")
    turn = proxy.Turn("t", "s", r=r, distil=distil, fate="trained", response_ids=[1, 2, 3],
                      teacher_logp=[-0.5, -9.0, -1.0], prox_logp=[-1.0, -1.0, -8.0])
    expected = trainer.advantages(
        torch.full((3,), float(r or 0)), torch.tensor([distil] * 3),
        torch.tensor(turn.teacher_logp), torch.tensor(turn.prox_logp), cfg)
    assert live.advantage(turn, cfg) == pytest.approx(expected.tolist())


def test_advantages_that_are_not_known():
    """Protects: no colour is made up: before the teacher has scored, for a turn that is not
    trained, and where --topk has no advantage per token."""
    cfg = SimpleNamespace(w_rl=1.0, w_opd=1.0, opd_clip=5.0, topk="")
    base = dict(response_ids=[1, 2], teacher_logp=[-1.0, -1.0], prox_logp=[-2.0, -2.0])

    def found(**more):
        return live.advantage(proxy.Turn("t", "s", **base | more), cfg)

    assert found(r=1.0) == [1, 1] and found(r=1.0, distil=True, fate="trained") == [2, 2]
    assert found(r=1.0, distil=True) is None
    assert found(r=None) is None and found(r=1.0, fate="stale") is None
    assert found(distil=True, fate="trained", prox_logp=None) is None
    assert found(r=1.0, distil=True, fate="trained", teacher_logp=None) is None
    cfg.topk = "full"
    assert found(distil=True) is None and found(r=-1.0, distil=True) == [-1, -1]
