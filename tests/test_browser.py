"""The page in a real browser: it draws, opens turns, talks, takes thumbs and asks for the key.

Needs a Chromium (Debian: `apt install chromium-headless-shell`), looked for in $CHROME and the
PATH; without one the tests are skipped. It is spoken to in its own DevTools protocol over a pipe,
so no driver is needed, and it can reach nothing but this machine. Nothing here waits for a time:
`Page.until` asks until it is so, and its limit is only there to end a test that fails.

    python tests/test_browser.py --run runs/NAME --step 8 --shots DIR     pictures of a recorded run
"""

import argparse
import base64
import contextlib
import io
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import Proxy, config, until
from fake_engine import FakeEngine, Refuse, error, say
from test_page import HOSTILE, KEY, metrics, tell_words

import proxy
from page import live

NAMES = ["chromium", "chromium-headless-shell", "chromium-browser", "google-chrome",
         "google-chrome-stable", "chrome-headless-shell", "chrome"]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
         "--remote-debugging-pipe",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
PATIENCE = 30  # seconds until a test that waits has failed

# ------------------------------------------------------------------------------------- the browser


class Browser:
    """A headless Chromium. It reads commands from its fd 3 and answers on its fd 4, JSON with a
    zero byte behind it, and ends when its pipe does."""

    def __init__(self, program, folder):
        pipes = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
        self.process = subprocess.Popen(
            ["sh", "-c", pipes, program, *FLAGS, f"--user-data-dir={folder}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.heard, self.numbers, self.events = queue.Queue(), itertools.count(1), []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        rest = b""
        while data := self.process.stdout.read1(1 << 20):
            *whole, rest = (rest + data).split(b"\0")
            for message in whole:
                self.heard.put(json.loads(message))
        self.heard.put({"id": None, "method": "the browser has ended"})

    def call(self, method, session=None, **params):
        """One command -> its result. Events that come in between are kept."""
        number = next(self.numbers)
        asked = {"id": number, "method": method, "params": params}
        asked |= {"sessionId": session} if session else {}
        self.process.stdin.write(json.dumps(asked).encode() + b"\0")
        self.process.stdin.flush()
        while (heard := self.heard.get(timeout=PATIENCE)).get("id") != number:
            assert "id" not in heard, f"{heard} instead of an answer to {method}"
            self.events.append(heard)
        assert "error" not in heard, f"{method}: {heard['error']}"
        return heard["result"]

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Page:
    """One tab with cookies of its own. What may be complained of stands in `expected`."""

    def __init__(self, browser, server, width=1280, height=900, dark=False):
        self.browser, self.server, self.expected = browser, server, None
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]
        tab = browser.call("Target.createTarget", url="about:blank", width=width, height=height,
                           browserContextId=self.context)
        self.session = browser.call("Target.attachToTarget", targetId=tab["targetId"],
                                    flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self(f"{domain}.enable")
        self.size(width, height)
        self.scheme(dark)
        self("Page.navigate", url=f"http://127.0.0.1:{server.cfg.port}/")

    def __call__(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def size(self, width, height):
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=False,
             deviceScaleFactor=1)

    def scheme(self, dark):
        self("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def js(self, code):
        """The value of an expression in the page."""
        found = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, code):
        """Ask until the expression is true -> its value."""
        end = time.monotonic() + PATIENCE
        while not (value := self.js(code)):
            assert time.monotonic() < end, (code, self.problems(), self.js(
                "document.body?.innerText"))
            time.sleep(0.02)
        return value

    def there(self, selector):
        self.until(f"Boolean(document.querySelector({json.dumps(selector)}))")

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)})?.textContent")

    def says(self, selector, words):
        """Wait until this element's text contains these words."""
        self.until(f"document.querySelector({json.dumps(selector)})?.textContent"
                   f".includes({json.dumps(words)})")

    def count(self, selector):
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

    def place(self, selector):
        """Scroll there -> a point of the element that nothing covers and that no longer moves."""
        before, at, end = None, self.point_in(selector), time.monotonic() + PATIENCE
        while at != before:
            assert time.monotonic() < end, f"{selector} does not come to rest"
            time.sleep(0.05)  # two or three frames
            before, at = at, self.point_in(selector)
        return at

    def point_in(self, selector):
        return self.until(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node?.scrollIntoView({{ block: "center" }});
            const box = node?.getClientRects()[0];
            const at = box && {{ x: box.x + box.width / 2, y: box.y + box.height / 2 }};
            return at && node.contains(document.elementFromPoint(at.x, at.y)) && at }})()""")

    def point(self, selector):
        self("Input.dispatchMouseEvent", type="mouseMoved", **self.place(selector))

    def click(self, selector):
        at = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def type(self, text):
        """Where the focus is."""
        self("Input.insertText", text=text)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                 **({"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}))

    def heard(self, *methods):
        return [e["params"] for e in self.browser.events
                if e.get("sessionId") == self.session and e["method"] in methods]

    def problems(self):
        """What a developer would see in the console as errors and warnings, unless expected."""
        found = [e["exceptionDetails"] for e in self.heard("Runtime.exceptionThrown")]
        found += [e for e in self.heard("Runtime.consoleAPICalled")
                  if e["type"] in ("error", "warning", "assert")]
        found += [e["entry"] for e in self.heard("Log.entryAdded")
                  if e["entry"]["level"] in ("error", "warning")]
        return [x for x in map(json.dumps, found)
                if not self.expected or not re.search(self.expected, x)]

    def foreign(self):
        """Requests to anybody but the server."""
        ours = f"http://127.0.0.1:{self.server.cfg.port}/"
        return [url for e in self.heard("Network.requestWillBeSent")
                if not (url := e["request"]["url"]).startswith(ours)]

    def close(self):
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)


def find_browser():
    return next(filter(None, map(shutil.which, [os.environ.get("CHROME") or "", *NAMES])), None)


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if not program:
        pytest.skip(f"no browser here: neither $CHROME nor {', '.join(NAMES)} is a program")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder)
        yield browser
        browser.close()


@pytest.fixture
def look(browser):
    """look(server, ...) -> Page, loaded and drawn. Whatever a test is about: in the end no page may
    have complained, or asked anybody else for anything."""
    pages = []

    def look(server, locked=False, **how):
        pages.append(Page(browser, server, **how))
        pages[-1].says(*("#link", "locked") if locked else ("#fates", "turn"))
        return pages[-1]

    yield look
    for page in pages:
        page.js("0")  # what was complained of before this has been heard after it
        problems, foreign = page.problems(), page.foreign()
        page.close()
        assert not problems and not foreign


# ------------------------------------------------------------------------------------ what is shown

ROWS = [{"step": i, "version": i, "judged": 16, "reward_mean": -1 + i / 5,
         "reply_tokens": 50 - 4 * i, "hint_rate": 1 - i / 10, "logp_gap": 0.02,
         "logp_gap_turns": 0.03, "logp_gap_stale": 0.04, "clip_frac": 0.01, "age_mean": 1.5,
         "age_max": 3} for i in range(1, 10)]
# the mean height (0: bottom, 1: top) of the pixels in this colour, in the left and right third
HEIGHTS = """(() => [...document.querySelectorAll("#charts .plot")].map((plot) => {
  const canvas = plot.querySelector("canvas"), { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  return ["--series-0", "--series-1", "--series-2"].map((name) => {
    const colour = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    const thirds = [[0, 0], [0, 0], [0, 0]];
    for (let i = 0; i < pixels.length; i += 4) {
      if (pixels[i] !== r || pixels[i + 1] !== g || pixels[i + 2] !== b) continue;
      const third = thirds[Math.floor(3 * (i / 4 % width) / width)];
      third[0] += 1;
      third[1] += 1 - Math.floor(i / 4 / width) / height;
    }
    const seen = thirds.reduce((n, t) => n + t[0], 0);
    return [seen, thirds[0][1] / thirds[0][0], thirds[2][1] / thirds[2][0]];
  });
}))()"""
LINES = [1, 1, 1, 3, 1, 2]  # per chart


def rows(found):
    return "".join(json.dumps(row) + "\n" for row in found)


def judged(server, turn, hint="", **found):
    """What the judge does at the end."""
    for key, value in ({"votes": [-1], "score": -1, "r": -1, "hint": hint, "distil": bool(hint),
                        "hints": [hint] * bool(hint), "hint_votes": [(1, hint)] * bool(hint)}
                       | found).items():
        setattr(turn, key, value)
    server.log.write(turn, "judged", **{k: getattr(turn, k) for k in proxy.JUDGED_FIELDS})


def opened(page, turn_id):
    """Click on a turn in the list -> the selector of what opens."""
    box, row = f"#detail-{turn_id}", f"[aria-controls=detail-{turn_id}]"
    for _ in range(5):  # the list may move away from under the mouse
        page.click(row)
        if page.js(f"document.querySelector('{row}').ariaExpanded") == "true":
            break
    page.until(f"document.querySelector('{box}').childElementCount")
    return box


def shades(page, box):
    """-> one (red, green, blue, opacity) per token of an opened turn, None: not shaded."""
    colours = page.js(f"[...document.querySelectorAll('{box} .tokens span')]"
                      ".map((s) => getComputedStyle(s).backgroundColor)")
    numbers = [[float(x) for x in re.findall(r"[\d.]+", c)] for c in colours]
    return [None if n[3:] == [0] else (*n, 1.0)[:4] for n in numbers]


@pytest.mark.parametrize("dark", [False, True])
def test_curves(server, look, dark):
    """Protects: every curve is drawn, in its own colour, as high as its numbers are; a row that
    comes later is drawn without a reload, and a change of the colours needs none either."""
    page = look(server, dark=dark)
    page.expected = "getImageData"  # reading pixels is slow, says the browser
    assert page.count("#charts .empty") == 6 and not page.count("canvas")
    metrics(server, rows(ROWS[:5]))
    page.says("#charts figure", "0.00")  # reward of the fifth step
    metrics(server, rows(ROWS[5:]))
    page.says("#charts figure", "0.80")
    for scheme in (dark, not dark):
        page.scheme(scheme)
        page.until(f"matchMedia('(prefers-color-scheme: dark)').matches === {str(scheme).lower()}")
        charts = page.until(f"(() => {{ const found = {HEIGHTS}; return found.every((c, i) =>"
                            f" c[{LINES}[i] - 1][0] > 100) && found }})()")
        for lines, chart in zip(LINES, charts, strict=True):
            assert [seen > 100 for seen, *_ in chart] == [i < lines for i in range(3)]
        reward, length, hints, gap, _, age = (
            [line[1:] for line in chart[:n]] for chart, n in zip(charts, LINES, strict=True))
        assert reward[0][0] < 0.5 < reward[0][1] and length[0][0] > length[0][1] + 0.2
        assert hints[0][0] > hints[0][1] + 0.2
        assert gap[0] < gap[1] < gap[2] and age[0][0] + 0.2 < age[1][0]
    assert page.js("getComputedStyle(document.body).backgroundColor") == (
        "rgb(246, 247, 249)" if dark else "rgb(16, 20, 27)")  # the other scheme, by now
    page.point("#charts .u-over")  # the middle of the first curve
    page.says("#charts figure strong", "Reward, step 5")
    page.says("#charts figure .key", "0.00")
    page.click("#numbers summary")
    page.until("document.querySelectorAll('#numbers tbody tr').length === 9")


def test_loops(server, look):
    """Protects: the four cards say what the loops do, as they do it."""
    now = {"judging": 2, "ready": 5, "leased": 16, "updates": 3}
    server.hooks.health = lambda: now
    server.policy.publish(3, "base")
    page = look(server)
    page.says("#serve", "v3")
    page.says("#judge", "2turns being judged")
    page.says("#train", "step 3training 16, next batch 5/16")
    assert page.js("document.querySelector('progress').value") == 5
    page.says("#sync", "in step")
    now.update(judging=1, updates=4, leased=0)
    page.says("#judge", "1turn being judged")
    page.says("#sync", "1 behind")
    server.policy.begin_swap()
    page.says("#sync", "→ v4")
    server.ask("Hi.")
    page.says("#serve", "0 open, 1 await a reaction")
    page.says("#fates", "1 turn: 0 trained")


def test_a_turn(server, engine, look):
    """Protects: a turn appears, is opened and is followed to its training without a reload. Its
    tokens are shaded one by one: blue is pushed up, orange down, more is darker, none is none."""
    words = [b"It", b" rains", b" water", b" from", b" clouds", b" .", b"<|im_end|>"]
    tell_words(engine, dict(zip([*range(10, 16), 2], words, strict=True)))
    engine.script = lambda body: say("It rains water from clouds .")
    page = look(server)
    page.js("window.loaded = 'once'")
    turn_id = server.ask("What is rain?")["id"]
    page.says("#turns .turn .asked", "What is rain?")
    box = opened(page, turn_id)
    assert page.count(f"{box} .tokens span") == 7 and shades(page, box) == [None] * 7
    page.says(box, "No colours before it is judged.")
    server.ask("What is rain?", "It rains water from clouds .", "Too long.")
    page.says(box, "What came nextuser: Too long.")
    (turn,) = server.paired
    judged(server, turn, "Be brief, please.", r=None)
    page.says(box, "HintBe brief, please.")
    page.says(box, "The colours come with the training step")
    advantages = [0.5, 2.0, 0.0, -0.5, -2.0, -4.0, -90.0]  # the last one is cut at -5
    server.log.close(turn, "trained", 7, prox_logp=[-1.0] * 7,
                     teacher_logp=[a - 1 for a in advantages])
    page.says(box, "trained in step 7")
    page.there(f"{box} .scale")
    assert page.js(f"[...document.querySelectorAll('{box} .tokens span')].map((s) =>"
                   " s.textContent)") == [w.decode() for w in words]
    found = shades(page, box)
    assert [c and (c[2] > c[0]) for c in found] == [True, True, None, *[False] * 4]
    assert found[0][3] < found[1][3] and len({c and c[:3] for c in found}) == 3
    assert found[3][3] < found[4][3] < found[5][3] < found[6][3] < 0.8
    page.click(f"{box} .tokens span:nth-child(2)")
    page.says(f"{box} .about", '" rains" · token 2 of 7 · advantage +2.00 · teacher 1.00 · '
                               "student -1.00 · sampled at -0.50")
    page.press("ArrowRight")
    page.says(f"{box} .about", '" water" · token 3 of 7 · advantage 0.00')
    page.press("End")
    page.says(f"{box} .about", "token 7 of 7 · advantage -5.00")
    page.click(f"{box} [data-name=table] summary")
    page.until(f"document.querySelectorAll('{box} tbody tr').length === 7")
    page.click(f"[aria-controls=detail-{turn_id}]")
    page.until(f"document.querySelector('{box}').hidden")
    assert page.js("window.loaded") == "once"


def test_the_list(server, look):
    """Protects: the newest turn is on top; a list that is held stands still until it is let go."""
    page = look(server)
    assert page.js("!document.querySelector('#no-turns').hidden")
    server.ask("First?")
    page.says("#turns .turn:first-child .asked", "First?")
    assert page.js("document.querySelector('#no-turns').hidden")
    page.click("#hold")
    server.ask("Second?")
    server.post({"messages": [{"role": "user", "content": "Third?"}], "session_done": True})
    page.says("#hold", "Go on (2 new)")
    assert page.count("#turns .turn") == 1
    page.click("#hold")
    page.says("#turns .turn:first-child", "Third?")
    page.says("#turns .turn:first-child", "not trained: nobody reacted")
    assert page.count("#turns .turn") == 3


def test_hostile_text_is_text(server, engine, look):
    """Protects: what models and users write is shown as they wrote it, and nothing of it runs,
    loads or becomes an element."""
    tell_words(engine, {10: HOSTILE.encode(), 2: b"</div>"})
    engine.script = lambda body: say(deltas=[{"content": HOSTILE}])
    page = look(server)
    page.click("#text")
    page.type(HOSTILE)
    page.click("#say button")
    page.there("#log .after")
    turn_id = page.until("document.querySelector('#turns .detail')?.id").removeprefix("detail-")
    box = opened(page, turn_id)
    for selector in ("#log .user", "#log article:nth-child(2)", ".turn .asked", ".turn .short",
                     f"{box} pre", f"{box} .tokens"):
        assert HOSTILE in page.text(selector), selector
    assert not page.count("main img, main script, #log textarea, #turns textarea")


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_widths(server, engine, look, width):
    """Protects: nothing has to be scrolled sideways, on a phone or on a projector, also with long
    words, an opened turn and all tables open."""
    engine.script = lambda body: say("x" * 300 + " " + "word " * 60)
    metrics(server, rows(ROWS))
    turn_id = server.ask("y" * 300, session_id="s" * 100)["id"]
    server.ask("y" * 300, "x" * 300 + " " + "word " * 60, "Too long.")
    judged(server, server.paired[0])
    page = look(server, width=width)
    page.click("#text")
    page.type("z" * 300)
    page.click("#say button")
    page.there("#log .after")
    page.click("#numbers summary")
    box = opened(page, turn_id)
    page.click(f"{box} [data-name=table] summary")
    page.until(f"document.querySelectorAll('{box} tbody tr').length > 60")
    assert page.js("document.documentElement.scrollWidth") <= width
    outside = page.js("""[...document.querySelectorAll("main *")].filter((n) =>
        !n.closest(".scroll *, .plot *, .quiet") && n.getClientRects().length
        && n.getBoundingClientRect().right > innerWidth + 1)
        .map((n) => n.outerHTML.slice(0, 200))""")
    assert outside == []


# ------------------------------------------------------------------------------- what can be done


def sent(page, text):
    """Say something in the chat box -> the turn's id, once its answer is complete."""
    before = page.count("#log .after")
    page.click("#text")
    page.type(text)
    page.click("#say button")
    page.until(f"document.querySelectorAll('#log .after').length === {before + 1}")
    return page.server.turns()[-1].id


def events(server, kind):
    found = [json.loads(line) for line in server.path.read_text().splitlines()]
    return [(e["turn"], e[kind]) for e in found if e["event"] == kind]


def test_the_chat(server, engine, look):
    """Protects: a reply comes; the second message is what judges the first reply; a new talk is
    another session."""
    page = look(server)
    first = sent(page, "What is rain?")
    assert page.js("[...document.querySelectorAll('#log article')].map((a) => "
                   "a.firstChild.nodeName === '#text' ? a.textContent :"
                   " a.childNodes[1].data)") == ["What is rain?", "Hello there."]
    assert page.text("#log .after span") == "waits for a reaction"
    assert page.js("document.querySelector('#text').value") == ""
    page.click("#text")
    page.type("Too long.")
    page.press("Enter")
    page.until("document.querySelectorAll('#log .after').length === 2")
    assert events(server, "next_state") == [(first, [{"role": "user", "content": "Too long."}])]
    page.says("#log .after span", "being judged")
    assert [m["content"] for m in engine.requests[-1]["messages"]] == [
        "What is rain?", "Hello there.", "Too long."]
    (turn,) = server.paired
    judged(server, turn)
    page.says("#log .after span", "score -1, judged, in line")
    server.log.close(turn, "trained", 3)
    page.says("#log .after span", "score -1, trained in step 3")
    page.click("#new")
    assert not page.count("#log article")
    sent(page, "Who are you?")
    assert [m["content"] for m in engine.requests[-1]["messages"]] == ["Who are you?"]
    sessions = [t.session for t in server.turns()]
    assert sessions[0] == sessions[1] != sessions[2] and len(server.paired) == 1


def test_thumbs(server, look):
    """Protects: a thumb becomes the reaction to its own reply, and says so; a refusal is told."""
    page = look(server)
    good, up = sent(page, "What is rain?"), "#log .after button:nth-of-type(1)"
    assert page.count("#log .after button[aria-pressed=true]") == 0
    page.click(up)
    page.until(f"document.querySelector('{up}').ariaPressed === 'true'")
    assert events(server, "feedback") == [(good, {"score": 1})]
    assert [(t.id, t.next_state[0]["content"]) for t in server.paired] == [(good, "👍")]
    page.says("#log .after span", "being judged")
    page.click("#new")
    bad, down = sent(page, "What is snow?"), "#log .after button:nth-of-type(2)"
    page.click(down)
    page.until(f"document.querySelector('{down}').ariaPressed === 'true'")
    assert page.js(f"document.querySelector('{up}').ariaPressed") == "false"
    assert events(server, "feedback")[1:] == [(bad, {"score": -1})]
    page.expected = "status of 409"  # the fake judge takes no second thought
    page.click(up)
    page.says("#log .after span", "is unknown, trained or dropped already")
    assert page.js(f"document.querySelector('{down}').ariaPressed") == "true"


def test_words_come_as_they_are_made_and_can_be_stopped(server, engine, look):
    """Protects: the first words are there long before the last; Stop ends the engine's work too,
    and what was said so far stays in the talk."""
    engine.script = lambda body: [*say("Once upon a time.")[:3], 600]
    page = look(server)
    page.click("#text")
    page.type("Tell me a story.")
    page.click("#say button")
    page.says("#log article:nth-child(2)", "Once upon")
    assert page.text("#say button") == "Stop"
    page.says("#serve", "1 open")
    page.click("#say button")
    page.says("#log .after", "stopped; not trained")
    assert until(lambda: server.fates() == {"aborted": 1} and not engine.open, PATIENCE)
    engine.script = lambda body: say()
    sent(page, "Go on.")
    assert [m["content"] for m in engine.requests[-1]["messages"]] == [
        "Tell me a story.", "Once upon", "Go on."]


def test_a_refusal_in_the_chat(server, engine, look):
    """Protects: the server's sentence is shown, nothing typed is lost and the talk goes on."""
    engine.script = lambda body: [Refuse(400, error("This prompt is too long, sorry."))]
    page = look(server)
    page.expected = "status of 400"
    page.click("#text")
    page.type("A long prompt")
    page.click("#say button")
    page.says("#chat > .error", "This prompt is too long, sorry.")
    assert page.js("document.querySelector('#text').value") == "A long prompt"
    assert not page.count("#log article")
    engine.script = lambda body: say()
    page.click("#say button")
    page.there("#log .after")
    assert page.text("#chat > .error") == ""
    assert [m["content"] for m in engine.requests[-1]["messages"]] == ["A long prompt"]


def test_the_key(make_server, look):
    """Protects: with a key the page asks for it and shows nothing before; a wrong one is refused;
    the right one is kept only as a cookie that no script reads and no other page sends along, and
    opens everything that the page does."""
    server = make_server(api_key=KEY)
    page = look(server, locked=True)
    page.expected = "status of 401"
    assert page.js("document.querySelector('main').hidden")
    page.type("not-the-key")  # the focus is there
    page.press("Enter")
    page.says("#login .error", "that is not the key of this server")
    assert page.js("document.querySelector('main').hidden")
    assert page("Network.getCookies")["cookies"] == []
    page.type(KEY)  # the wrong one is selected: typing replaces it
    page.click("#login button")
    page.says("#fates", "0 turns")
    assert not page.js("document.querySelector('main').hidden")
    (kept,) = page("Network.getCookies")["cookies"]
    assert kept["httpOnly"] and kept["sameSite"] == "Strict" and kept["session"]
    assert kept["name"] == f"openclaw-{server.cfg.port}" and KEY not in kept["value"]
    assert page.js("document.cookie + localStorage.length + sessionStorage.length") == "00"
    assert page.js("document.querySelector('#key').value") == ""
    page.expected = None
    page.browser.events.clear()
    turn_id = sent(page, "What is rain?")
    assert page.text(opened(page, turn_id)).startswith("PromptWhat is rain?")
    page.click("#log .after button")
    page.until("document.querySelector('#log .after button').ariaPressed === 'true'")
    assert events(server, "feedback") == [(turn_id, {"score": 1})]
    page.js("document.querySelector('#turns').remove()")
    page("Page.reload")
    page.says("#turns", "What is rain?")
    assert page.js("document.querySelector('#login').hidden")


# -------------------------------------------------------------------------------------- pictures

SHOTS = {"page-1920.png": dict(width=1920, height=1500),
         "page-1280-light.png": dict(width=1280, height=1300),
         "page-1280.png": dict(width=1280, height=1450, dark=True),
         "page-390.png": dict(width=390, height=2300)}


def recorded(run, step, engine, folder):
    """A proxy with the record of a run up to its `step`-th update -> Proxy. The words of the tokens
    come from the tokenizer of the run's model."""
    from transformers import AutoTokenizer

    was = json.loads((run / "config.json").read_text())
    known = "mode model lora_rank judge simulate topk w_rl w_opd opd_clip batch_size".split()
    tokenizer, plain = AutoTokenizer.from_pretrained(was["model"]), FakeEngine.answer
    engine.answer = lambda path, query, body: (
        (200, {"prompt": tokenizer.decode(body["tokens"])}) if path == "/detokenize"
        else plain(engine, path, query, body))
    lines = (run / "turns.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, x in enumerate(lines) if f'"fate": "trained", "step": {step},' in x)
    (folder / "turns.jsonl").write_text("".join(lines[: last + 1]))
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(metrics[:step]))
    server = Proxy(config(**{k: was[k] for k in known}), engine, folder)
    turns = server.turns()
    server.log.turns = len(turns)
    server.log.fates.update(t.fate for t in turns if t.fate)
    server.policy.publish(step, "base")
    server.hooks.health = lambda: {"judging": 2, "ready": 5, "leased": 0, "updates": step}
    return server


def telling(server):
    """Of the newest trained turns the one with the most tokens of both colours -> its id."""
    newest = [t for t in server.turns() if t.fate == "trained"][-40:]
    colours = {t.id: live.advantage(t, server.cfg) or () for t in newest}
    return max(colours, key=lambda i: min(sum(a > 0 for a in colours[i]),
                                          sum(a < 0 for a in colours[i])))


def shots(run, step, to):
    from PIL import Image

    with FakeEngine() as engine, tempfile.TemporaryDirectory() as folder:
        browser = Browser(find_browser(), f"{folder}/browser")
        engine.script = lambda body: say("Rain is water that falls from clouds.")
        for name, how in SHOTS.items():
            (place := Path(folder, name)).mkdir()
            server = recorded(run, step, engine, place)
            page, turn_id = Page(browser, server, **how), telling(server)
            page.until("document.querySelectorAll('canvas').length === 6")
            page.there(f"#detail-{turn_id}")
            sent(page, "What is rain?")
            if how.get("dark"):
                page.js("document.querySelector('#turns').prepend("
                        f"document.querySelector('#detail-{turn_id}').closest('li'))")
                opened(page, turn_id)
                page.there(".tokens")
            page.says("#turns", "What is rain?")
            page.js("document.activeElement.blur(), scrollTo(0, 0)")
            picture = Image.open(io.BytesIO(base64.b64decode(
                page("Page.captureScreenshot")["data"])))
            picture.convert("RGB").quantize(256, dither=0).save(to / name, optimize=True)
            page.close()
            server.close()
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run directory")
    parser.add_argument("--step", type=int, required=True, help="as it was after this update")
    parser.add_argument("--shots", type=Path, required=True, metavar="DIR", help="where to")
    args = parser.parse_args()
    shots(args.run, args.step, args.shots)
