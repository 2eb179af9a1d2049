"""The real thing: vLLM on CPU, the 135M model, main.py as a user starts it. Slow, not replaceable:
everything that crosses a wire is tested here once."""

import contextlib
import itertools
import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import openai
import psutil
import pytest
import test_browser
import test_fsdp
import torch
import urllib3
from conftest import Proxy, config
from safetensors.torch import load_file
from test_browser import browser, look  # noqa: F401 - fixtures

import main
import proxy
import trainer as trainer_module
from judge import SampleQueue
from sync import BASE, Child, SyncError, engine_command, engine_env, free_port, wait_ready

ROOT = Path(main.__file__).parent
pytestmark = pytest.mark.real


def start_main(tmp_path, *flags):
    """`python main.py ...` with its screen in a file."""
    port = free_port()
    out = open(tmp_path / "screen", "w")
    process = subprocess.Popen(
        [sys.executable, "main.py", "--port", str(port), "--run-dir", str(tmp_path / "run"),
         *flags],
        cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    return process, port


def wait_for(condition, seconds, what):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)


def family(process):
    """main and everything it started."""
    me = psutil.Process(process.pid)
    return [me, *me.children(recursive=True)]


def all_gone(processes):
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def screen(tmp_path):
    return (tmp_path / "screen").read_text()


# ------------------------------------------------------------------- two updates, end to end


@pytest.mark.parametrize("rank", [16, 0], ids=["lora", "full"])
def test_two_updates_end_to_end(tmp_path, rank):
    """Users, judge, trainer and sync in float32: two updates reach the engine, exactly.

    Protects: every turn has one fate; no request fails; the engine serves what was trained (canary
    within 0.001) and the trainer computes what the engine sampled (turns' gap within 0.001).
    """
    process, _ = start_main(
        tmp_path, "--mode", "combine", "--simulate", "concise", "--steps", "2", "--max-turns", "60",
        "--batch-size", "8", "--engine-dtype", "float32", "--max-staleness", "0", "--held-out", "0",
        "--max-tokens", "24", "--lora-rank", str(rank), "--max-wait", "60")
    assert process.wait(timeout=420) == 0, screen(tmp_path)
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    turns = proxy.load_turns(run / "turns.jsonl")
    assert summary["steps"] == 2 and [r["version"] for r in rows] == [1, 2], screen(tmp_path)
    assert all(r["logp_gap"] <= 1e-3 for r in rows)
    assert all(r["logp_gap_turns"] <= 1e-3 and r["logp_gap_n"] >= 8 for r in rows)
    assert summary["requests"]["failed"] == summary["requests"]["rejected"] == 0
    assert all(t.fate for t in turns.values())
    assert summary["trained"] + sum(summary["dropped"].values()) == summary["turns"] == len(turns)
    trained = [t for t in turns.values() if t.fate == "trained"]
    assert len(trained) == summary["trained"] == 16
    for t in trained:
        assert len(t.response_ids) == len(t.rollout_logp) == t.completion_tokens > 0
        assert t.next_state and (t.r or t.distil)
    assert (run / "turns.jsonl").stat().st_mode & 0o777 == 0o600
    assert (run / "curve.png").stat().st_size > 10_000
    assert not list(Path("/dev/shm").glob("nano-openclaw-*"))
    kept = run / ("adapters/v2/adapter_config.json" if rank else "weights/v2/config.json")
    assert kept.exists()
    again = ["--replay", str(run / "turns.jsonl"), "--run-dir", str(tmp_path / "again")]
    assert trainer_module.replay_config(again).lora_rank == rank  # its config can be replayed


# ------------------------------------------------------------ clients, Ctrl-C, kill -9, refusals


def test_clients_and_ctrl_c(tmp_path):
    """An ordinary openai client and curl, without any special header, streaming and not: two-turn
    conversations give turns that are trained or dropped with a reason. Ctrl-C while training."""
    process, port = start_main(tmp_path, "--mode", "rl", "--batch-size", "4", "--max-tokens", "16")
    try:
        wait_for(lambda: "ready:" in screen(tmp_path) or process.poll() is not None, 240, "ready")
        started = family(process)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none",
                               max_retries=0)
        for i in range(4):
            messages = [{"role": "user", "content": f"Tell me fact number {i} about rain."}]
            if i % 2:
                stream = client.chat.completions.create(model="policy", messages=messages,
                                                        stream=True)
                reply = "".join(c.choices[0].delta.content or "" for c in stream)
            else:
                done = client.chat.completions.create(model="policy", messages=messages)
                reply = done.choices[0].message.content
                assert done.usage.completion_tokens > 0
            messages += [{"role": "assistant", "content": reply},
                         {"role": "user", "content": "Thanks, great!"}]
            curl = ["curl", "-sS", f"http://127.0.0.1:{port}/v1/chat/completions", "-H",
                    "Content-Type: application/json", "-d", json.dumps({
                        "messages": messages, "max_tokens": 2, "stream": bool(i % 2)})]
            assert "choices" in subprocess.run(curl, capture_output=True, text=True).stdout
        wait_for(lambda: "step   1 v1" in screen(tmp_path), 120, "a step")
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0
    wait_for(lambda: all_gone(started), 1, "an empty process list")
    fates = [t.fate for t in proxy.load_turns(tmp_path / "run" / "turns.jsonl").values()]
    assert fates.count("trained") == 4 and set(fates) == {"trained", "run_ended"}
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))


def test_ctrl_c_while_starting(tmp_path):
    process, _ = start_main(tmp_path)
    wait_for(lambda: "waiting for the policy engine (10" in screen(tmp_path), 60,
             "a starting engine")
    started = family(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) != 0
    wait_for(lambda: all_gone(started), 1, "an empty process list")


def test_kill_9_of_main(tmp_path):
    """No engine survives its parent (H1)."""
    process, _ = start_main(tmp_path)
    wait_for(lambda: "waiting for the policy engine (10" in screen(tmp_path), 60,
             "a starting engine")
    started = family(process)
    assert len(started) > 2
    process.kill()
    process.wait()
    wait_for(lambda: all_gone(started), 10, "an empty process list")


def test_kill_9_and_resume(engine, tmp_path):
    """The trainer dies while it trains, before the commit: main says so and ends. --resume goes on
    at the last checkpoint. Then main itself is killed, and resumed again. Each time the first
    request is served by the restored version, the turns of a lost step come back, every one is
    trained once, and the steps count on. The engine is one that we did not start (--policy-url): it
    lives on with the adapters of the run before."""
    run = tmp_path / "run"
    line, turns_of = run / "metrics.jsonl", lambda: proxy.load_turns(run / "turns.jsonl")
    process, port = start_main(
        tmp_path, "--mode", "rl", "--batch-size", "4", "--save-every", "1", "--max-tokens", "24",
        "--policy-url", engine.url, "--engine-dtype", "float32", "--max-model-len", "1024",
        "--lora-slots", "2")
    wait_for(lambda: "ready:" in screen(tmp_path), 240, "the start")
    with talking(port):
        wait_for(lambda: line.exists() and line.read_text().count("\n") >= 2, 240, "two updates")
        wait_for(lambda: main_health(port)["leased"], 120, "a third one's start")
        next(p for p in family(process) if "trainer.py" in " ".join(p.cmdline()[1:3])).kill()
        assert process.wait(timeout=60) == 1 and "the trainer ended" in screen(tmp_path)
    first = []
    for end in ("of main", "in order"):
        step = main.step_of(Path(main.checkpoint_of(SimpleNamespace(resume="x", run_dir=run))))
        trained = {i for i, t in turns_of().items() if t.fate == "trained"}
        assert step >= 2 and len(trained) in (4 * step, 4 * step - 4)  # before or after its save
        process, port = start_main(tmp_path, "--resume", str(run))
        wait_for(lambda: "ready:" in screen(tmp_path), 240, "the resumed start")
        assert f"resumed at update {step}: {4 * step} turns are trained" in screen(tmp_path)
        assert main_health(port)["version"] == step
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        said = [{"role": "user", "content": "What is one?"}]
        reply = client.chat.completions.create(model="policy", max_tokens=4, messages=said)
        first.append((reply.id, step))
        with talking(port):
            wait_for(lambda at=step, port=port: main_health(port)["updates"] > at, 240, "a step")
            if end == "in order":  # a step's row comes after its sync
                wait_for(lambda at=step: steps_of(line)[-1] > at, 60, "its row")
            else:
                everything = family(process)
                process.kill()
                wait_for(lambda all=everything: all_gone(all), 10, "the end of all")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    turns = turns_of()
    assert all(turns[i].version_start == step for i, step in first)
    steps = steps_of(line)
    assert steps == sorted(set(steps)) and steps[-1] > first[1][1]  # a row may be lost, not twice
    events = [json.loads(x) for x in (run / "turns.jsonl").read_text().splitlines()]
    kept = [e["turn"] for e in events if e["event"] == "fate" and e["fate"] == "trained"]
    assert len(kept) == len(set(kept)) and all(t.fate for t in turns.values())
    assert engine.child.alive()


def steps_of(metrics):
    return [json.loads(x)["step"] for x in metrics.read_text().splitlines(keepends=True)
            if x.endswith("\n")]


def test_a_live_run_on_the_page(engine, tmp_path, look):  # noqa: F811
    """Three talks in the chat box, one judged by what is said next, one by a thumb: they stand in
    turns.jsonl, the step that trains them is drawn as it comes, and its turns are shaded."""
    process, port = start_main(
        tmp_path, "--mode", "combine", "--batch-size", "2", "--max-tokens", "24", "--policy-url",
        engine.url, "--engine-dtype", "float32", "--max-model-len", "1024", "--lora-slots", "2")
    try:
        wait_for(lambda: "ready:" in screen(tmp_path), 240, "the start")
        path = tmp_path / "run" / "turns.jsonl"
        page = look(SimpleNamespace(cfg=SimpleNamespace(port=port), path=path,
                                    turns=lambda: list(proxy.load_turns(path).values())))
        assert page.count("#charts .empty") == 6
        said = test_browser.sent(page, "What is rain?")
        test_browser.sent(page, "Too long. Answer in one short sentence.")
        page.click("#new")
        liked = test_browser.sent(page, "What is snow?")
        page.click("#log .after button:nth-of-type(2)")
        wait_for(lambda: page.js("document.querySelector('#train').textContent.includes('step 1')"),
                 240, "a step on the page")
        page.until("document.querySelectorAll('#charts canvas').length >= 4")
        page.says("#charts figure", "-1.00")
        assert test_browser.events(page.server, "feedback") == [(liked, {"score": -1})]
        turns = proxy.load_turns(path)
        assert [turns[x].fate for x in (said, liked)] == ["trained"] * 2 and turns[said].hint
        for turn in (said, liked):
            box = test_browser.opened(page, turn)
            page.there(f"{box} .scale")
            found = test_browser.shades(page, box)
            assert len(found) == len(turns[turn].response_ids) and any(found)
        assert not page.problems()
        page.expected = "ERR_"  # its server goes now
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 0


@contextlib.contextmanager
def talking(port):
    """Two users who find every answer wrong."""
    over = threading.Event()

    def talk(n):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none",
                               max_retries=0, timeout=20)
        while not over.wait(0.05):
            said = [{"role": "user", "content": f"What is {n}?"}]
            with contextlib.suppress(openai.OpenAIError):
                reply = client.chat.completions.create(model="policy", messages=said)
                said += [{"role": "assistant", "content": reply.choices[0].message.content or " "},
                         {"role": "user", "content": f"No, wrong. I asked for {n}."}]
                client.chat.completions.create(model="policy", messages=said, max_tokens=1)

    users = [threading.Thread(target=talk, args=(n,)) for n in range(2)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        over.set()
        for user in users:
            user.join(60)


def main_health(port):
    return json.loads(urllib3.PoolManager().request(
        "GET", f"http://127.0.0.1:{port}/healthz").data)


@pytest.mark.parametrize(("flags", "words"), [
    (["--model", "/no/such/folder"], "no config.json there"),
    (["--batch-sise", "3"], "--batch-sise"),
    (["--mode", "sft"], "invalid choice"),
    (["--extra", "examples/sync_nccl.py"], "changes how full weights travel"),
    (["--host", "0.0.0.0"], "set a key"),
    (["--temperature", "0.6", "--teacher", "engine"], "--temperature 1"),
    (["--max-model-len", "100000"], "window of 8192"),
    (["--max-tokens", "5000"], "--max-tokens 5000 must be below"),
    (["--lora-rank", "7"], "--lora-rank 7"),
    (["--schedule", "windowed", "--window", "3"], "--window 3 must be at least"),
])
def test_mistakes_end_with_one_sentence(tmp_path, flags, words):
    process, _ = start_main(tmp_path, *flags)
    assert process.wait(timeout=30) == 1
    assert words in screen(tmp_path) and "Traceback" not in screen(tmp_path)
    assert screen(tmp_path).count("\n") <= 2


def test_dead_engine_is_reported_with_its_last_words(tmp_path):
    """An engine that dies while starting ends the run within seconds of its death."""
    bad = tmp_path / "model"
    bad.mkdir()
    (bad / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    process, _ = start_main(tmp_path, "--model", str(bad))
    assert process.wait(timeout=120) == 1
    assert "the policy engine ended while it was starting" in screen(tmp_path)


# ---------------------------------------------------------------- the engine itself, and the sync


@contextlib.contextmanager
def a_float32_engine(folder, *flags):
    """A float32 vLLM, and a float32 trainer beside it."""
    cfg = main.parse(["--engine-dtype", "float32", "--max-model-len", "1024", "--run-dir",
                      str(folder), "--max-requests", "16", *flags])
    url = f"http://127.0.0.1:{(port := free_port())}"
    child = Child("policy engine", engine_command(cfg, cfg.model, port, bool(cfg.lora_rank)),
                  folder / "log", env=engine_env(cfg), cores=cfg.engine_cores)
    try:
        wait_ready(child, url, 240, lambda *_: None)
        cfg.engine_url = url
        yield SimpleNamespace(cfg=cfg, url=url, child=child, trainer=trainer_module.Trainer(cfg))
    finally:
        child.stop()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """With two LoRA slots."""
    folder = tmp_path_factory.mktemp("engine")
    with a_float32_engine(folder, "--lora-slots", "2", "--lr", "1e-3") as engine:
        yield engine


class Line:
    """Main's side of the queue, as far as a sync needs it."""

    def __init__(self):
        self.policy = proxy.Policy(BASE)
        self.publish = lambda *a: SampleQueue.publish(self, *a)

    def status(self):
        return {"version": self.policy.version, "name": self.policy.name,
                "open": dict(self.policy.open)}


def a_sync(engine):
    """A new sync on the untouched model: what an earlier test did to the adapter is undone."""
    with torch.no_grad():
        for name, p in engine.trainer.policy.named_parameters():
            p.mul_(0.0 if "lora_B" in name else 1.0)
    line = Line()
    service = trainer_module.Service(engine.cfg, engine.trainer, line, tokenizer(engine.cfg))
    service.start()
    return line, service


def tokenizer(cfg):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(cfg.model)


def nudge(engine, size=0.02):
    """Move the adapter as a step would."""
    with torch.no_grad():
        for name, p in engine.trainer.policy.named_parameters():
            if "lora_B" in name:
                p.add_(size * torch.randn_like(p) * 0.1)
    engine.trainer.step += 1


def push(engine, service, folder):
    nudge(engine)
    version = engine.trainer.step
    engine.trainer.save_adapter(folder / f"v{version}")
    return service.sync.push_lora(version, folder / f"v{version}", service.trainer_canary())


def test_slots_with_an_open_stream(engine, tmp_path):
    """F0, F1, F2: a stream held open over slots + 1 syncs ends well, the engine lives, every
    version is exact (0.001) and nothing in use is unloaded."""
    line, service = a_sync(engine)
    assert push(engine, service, tmp_path)["logp_gap"] <= 1e-3
    name, _ = line.policy.enter()
    body = {"model": name, "max_tokens": 300, "min_tokens": 300, "stream": True, "temperature": 1,
            "messages": [{"role": "user", "content": "Tell me a very long story."}]}
    chunks, finished = [], threading.Event()

    def read():
        reply = urllib3.PoolManager().request("POST", f"{engine.url}/v1/chat/completions",
                                              json=body, preload_content=False)
        chunks.extend(line for line in reply if line.startswith(b"data: "))
        line_leave()
        finished.set()

    line_leave = lambda: line.policy.leave(name)  # noqa: E731
    threading.Thread(target=read, daemon=True).start()
    pushed = 1
    while not finished.is_set():
        if service.sync.has_slot() and pushed < 4:
            assert push(engine, service, tmp_path)["logp_gap"] <= 1e-3
            pushed += 1
        assert finished.is_set() or name in service.sync.live
        time.sleep(0.2)
    assert b"[DONE]" in chunks[-1] and b'"finish_reason":"length"' in chunks[-3] + chunks[-2]
    wait_for(service.sync.has_slot, 5, "a free slot")
    while pushed < 4:  # the stream's own version is retired now; the engine must live on
        wait_for(service.sync.has_slot, 5, "a free slot")
        assert push(engine, service, tmp_path)["logp_gap"] <= 1e-3
        pushed += 1
    assert engine.child.alive()


def test_stale_and_scaled_versions_are_refused(engine, tmp_path):
    """F6: the previous version, or a wrongly scaled adapter, under the new name does not pass."""
    _, service = a_sync(engine)
    old = tmp_path / "old"
    engine.trainer.save_adapter(old)
    nudge(engine)
    with pytest.raises(SyncError, match="does not serve what was trained"):
        service.sync.push_lora(901, old, service.trainer_canary())
    scaled = tmp_path / "scaled"
    engine.trainer.save_adapter(scaled)
    config = json.loads((scaled / "adapter_config.json").read_text())
    config["lora_alpha"] *= 2
    (scaled / "adapter_config.json").write_text(json.dumps(config))
    wait_for(service.sync.has_slot, 5, "a free slot")
    with pytest.raises(SyncError, match="does not serve what was trained"):
        service.sync.push_lora(902, scaled, service.trainer_canary())
    for name in ("v901", "v902"):
        with contextlib.suppress(SyncError):
            service.sync.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})


def test_base_and_adapters_in_one_step(engine, tmp_path):
    """Who shares a step with others gets the log-probs that it gets alone: the base model too (on
    CPU vLLM gives it the last slot's adapter there, see sync.OnCpu)."""
    _, service = a_sync(engine)
    names = [BASE]
    for _ in range(2):
        push(engine, service, tmp_path)
        names.append(f"v{engine.trainer.step}")
    alone = [torch.tensor(service.engine_canary(name)) for name in names]
    assert min((a - b).abs().mean() for a, b in itertools.combinations(alone, 2)) > 1e-3
    body = {"max_tokens": 500, "min_tokens": 500, "temperature": 1, "stream": True,
            "messages": [{"role": "user", "content": "Tell me a very long story."}]}
    streams = [urllib3.PoolManager().request("POST", f"{engine.url}/v1/chat/completions",
                                             json=body | {"model": name}, preload_content=False)
               for name in names * 2]
    urllib3.PoolManager().request("POST", f"{engine.url}/reset_prefix_cache")
    beside = [torch.tensor(service.engine_canary(name)) for name in names]
    assert running(engine) == 6  # they were there all the while
    for stream in streams:
        stream.close()
    assert max((a - b).abs().max() for a, b in zip(alone, beside, strict=True)) < 1e-4


def test_fake_engine_has_the_shapes_of_the_real_one(engine):
    """The fake is only worth something while the real engine answers in its shapes."""
    from fake_engine import FakeEngine

    body = {"model": BASE, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4,
            "temperature": 1, "stream": True, "stream_options": {"include_usage": True},
            "logprobs": True, "return_token_ids": True, "n": 1}
    with FakeEngine() as fake:
        real, mine = (chat_shapes(url, body) for url in (engine.url, fake.url))
    assert mine["first"] <= real["first"] and mine["delta"] <= real["delta"]
    assert mine["logprob"] <= real["logprob"] and mine["usage"] <= real["usage"]
    for shapes in (real, mine):
        assert shapes["ids"] == shapes["logps"] == shapes["completion_tokens"]
        assert shapes["prompt_ids"] > 0 and shapes["last"] == "[DONE]"


def chat_shapes(url, body):
    """What proxy.py reads of a stream, as sets of keys and counts."""
    raw = urllib3.PoolManager().request("POST", f"{url}/v1/chat/completions", json=body).data
    lines = [x[6:] for x in raw.decode().splitlines() if x.startswith("data: ")]
    events = [json.loads(x) for x in lines[:-1]]
    choices = [e["choices"][0] for e in events if e["choices"]]
    ids = [i for c in choices for i in c.get("token_ids") or []]
    entries = [e for c in choices for e in (c.get("logprobs") or {}).get("content") or []]
    usage = next(e["usage"] for e in events if e.get("usage"))
    return {"first": {k for k, v in events[0].items() if v is not None},
            "delta": {k for c in choices for k, v in c["delta"].items() if v is not None},
            "logprob": set(entries[0]), "usage": {k for k, v in usage.items() if v is not None},
            "ids": len(ids), "logps": len(entries), "completion_tokens": usage["completion_tokens"],
            "prompt_ids": len(events[0].get("prompt_token_ids") or []), "last": lines[-1]}


def test_teacher_of_the_engine_is_the_teacher_of_the_trainer(engine):
    """E4, B3: prompt_logprobs of the base and the adapter switched off agree to 0.001."""
    service = a_sync(engine)[1]
    turns = [{"hinted_prompt_ids": [p], "hints": ["h"], "hint": "h", "response_ids": r}
             for p, r in zip(service.prompts, service.replies, strict=True)]
    for turn in turns:
        turn |= {"distil": True, "teacher_logp": None}
    engine.trainer.attach(turns)
    ours = torch.cat([t["teacher_logp"] for t in turns])
    theirs = torch.tensor(service.engine_canary(BASE))
    assert (ours - theirs).abs().mean() < 1e-3




def test_top_k_of_the_engine_is_that_of_the_trainer(engine):
    """Exactly K ids at each place, the trainer's own, with its log-probs (to 0.001); also where the
    engine sends K + 1 because the reply's own token is not among them."""
    service = a_sync(engine)[1]
    own = proxy.engine_scores(service.http, proxy.Endpoint(engine.url, BASE), service.prompts[0],
                              service.replies[0], 3)
    with engine.trainer.base() as model:
        logp, ids = engine.trainer.each(service.prompts[:1], service.replies[:1], model, 1.0,
                                        trainer_module.top(3))[0]
    outside = [r not in row for r, row in zip(service.replies[0], own[2], strict=True)]
    assert any(outside) and not all(outside)
    assert {len(row) for row in own[1] + own[2]} == {3}
    assert (torch.tensor(own[1]) - logp).abs().max() < 1e-3
    assert (torch.tensor(own[2]) == ids).float().mean() > 0.98  # near ties may change places


# --------------------------------------------------------------------- users meet weight updates


class Load:
    """Users at a proxy in front of the real engine until `stop`: eight without a pause, half of
    them streaming, and one who asks whenever a weight update is under way."""

    def __init__(self, server, version):
        self.server, self.outcomes, self.over = server, [], threading.Event()
        self.published, publish = [(0.0, 0.0, version)], server.policy.publish
        server.policy.version = version  # KEEP: before the first user

        def note(version, name):
            before = time.time()
            publish(version, name)
            self.published.append((before, time.time(), version))

        server.policy.publish = note
        self.threads = [threading.Thread(target=self.talk, args=(i,)) for i in range(8)]
        self.threads.append(threading.Thread(target=self.meet_updates))
        for thread in self.threads:
            thread.start()

    def talk(self, i):
        for n in range(10_000):
            if self.over.is_set():
                return
            self.ask(i * n + n, stream=i % 2 == 0)

    def meet_updates(self):
        while not self.over.wait(0.005):
            if self.server.policy.swapping:
                self.ask(-1, stream=False)

    def ask(self, number, stream):
        said = [{"role": "user", "content": f"What do you know about the number {number}?"}]
        status, headers, answer = self.server.post(
            {"messages": said, "max_tokens": 8, "stream": stream})
        whole = (answer.endswith("data: [DONE]\n\n") if isinstance(answer, str) else
                 status != 200 or answer["choices"][0]["finish_reason"] in ("stop", "length"))
        self.outcomes.append((status, headers.get("Retry-After"), whole))

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join(60)

    def live(self, when):
        """The version that was live then; two while one was being published."""
        ends = [after for _, after, _ in self.published[1:]] + [math.inf]
        return {version for (before, _, version), end in zip(self.published, ends, strict=True)
                if before <= when <= end}

    def check_spans(self, full):
        """Every turn carries the version that was live when it was forwarded and when it ended."""
        turns = self.server.turns()
        for turn in turns:
            assert turn.version_start in self.live(turn.created) | self.live(turn.first_token)
            ends = self.live(turn.finished - 0.1) | self.live(turn.finished)
            assert turn.version_end in (ends if full else {turn.version_start})
        return sum(t.version_end > t.version_start for t in turns)


@pytest.fixture
def load(tmp_path):
    """load(engine, version, **config) -> a Load on a proxy of its own, and the sync's queue."""
    made = []

    def make(engine, version=0, **changes):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        server = Proxy(config(lora_rank=engine.cfg.lora_rank, max_requests=16, **changes), engine,
                       folder)
        line = Line()
        line.policy = server.policy
        line.policy.pausing = not engine.cfg.lora_rank
        made.append(Load(server, version))
        return made[-1], line

    yield make
    for one in made:
        one.stop()
        one.server.close()


def swap(engine, service, load, times):
    """So many updates while the users talk on, and at least ten requests per update."""
    for done in range(1, times + 1):
        with torch.no_grad():
            for name, p in engine.trainer.policy.named_parameters():
                if "lora_B" in name or (not engine.cfg.lora_rank and "mlp" in name):
                    p.add_(1e-3 * torch.randn_like(p))
        engine.trainer.step += 1
        while (pushed := service.push()) is None:  # all slots are in use
            time.sleep(0.1)
        assert pushed["logp_gap"] <= 1e-3
        limit = time.monotonic() + 60
        while len(load.outcomes) < 10 * done:
            assert time.monotonic() < limit, "the users wait"
            time.sleep(0.05)


def a_service(engine, line):
    service = trainer_module.Service(engine.cfg, engine.trainer, line, tokenizer(engine.cfg))
    service.start()
    return service


def test_ten_adapters_under_load(engine, load):
    """LoRA: 100 requests across 10 updates, none refused, none cut, each of one version only."""
    a_sync(engine)
    users, line = load(engine)
    swap(engine, a_service(engine, line), users, 10)
    users.stop()
    assert {(status, whole) for status, _, whole in users.outcomes} == {(200, True)}
    assert len(users.outcomes) >= 100 and users.check_spans(full=False) == 0
    assert len({t.version_start for t in users.server.turns()}) >= 8
    assert users.server.idle() and engine.child.alive()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chunks", [0, 2])
def test_a_client_that_leaves_frees_the_engine(engine, tmp_path, stream, chunks):
    """A10, with the engine's own count: gone before the first byte, in mid-stream, or while a
    whole answer is being made; nothing runs on, nothing becomes a sample."""
    server = Proxy(config(max_requests=4, max_model_len=1024), engine, tmp_path)
    said = [{"role": "user", "content": "Tell me a very long story. " * 40}]
    body = json.dumps({"messages": said, "max_tokens": 600, "stream": stream}).encode()
    try:
        with socket.create_connection(("127.0.0.1", server.cfg.port)) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                           % len(body) + body)
            wait_for(lambda: running(engine) if chunks else server.policy.open, 20, "a start")
            for _ in range(chunks * stream):
                assert client.recv(4096)
        wait_for(lambda: server.fates() == {"aborted": 1}, 20, "the turn's fate")
        wait_for(lambda: not running(engine), 20, "the engine's end of it")
        assert server.idle() and not server.sessions.keys
    finally:
        server.close()


def running(engine):
    """What the engine says that it is working on."""
    text = urllib3.PoolManager().request("GET", f"{engine.url}/metrics").data.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines()
               if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")))


@pytest.fixture(scope="module")
def full_engine(tmp_path_factory):
    """Whose own weights are swapped."""
    with a_float32_engine(tmp_path_factory.mktemp("full"), "--lora-rank", "0") as engine:
        yield engine


def test_ten_full_swaps_under_load(full_engine, load):
    """Full weights: 100 requests across 10 swaps are held, none refused, none cut; those that saw
    a swap carry both versions. With --pause reject: only 503 with Retry-After, and they come."""
    users, line = load(full_engine)
    service = a_service(full_engine, line)
    swap(full_engine, service, users, 10)
    users.stop()
    assert {(status, whole) for status, _, whole in users.outcomes} == {(200, True)}
    assert len(users.outcomes) >= 100 and users.check_spans(full=True) > 0
    assert users.server.policy.held > 0 and users.server.idle()

    users, line = load(full_engine, full_engine.trainer.step, pause="reject")
    service.queue = service.sync.queue = line
    swap(full_engine, service, users, 3)
    users.stop()
    assert {(status, whole) for status, _, whole in users.outcomes} == {(200, True), (503, True)}
    assert all((after is not None) == (status == 503) for status, after, _ in users.outcomes)
    users.check_spans(full=True)


def test_what_two_ranks_save_is_what_the_engine_serves(engine, full_engine, tmp_path):
    """FSDP2 on two gloo ranks, a step of the real model: the saved adapter and the saved full
    weights give in the engine the log-probs that the ranks compute (canary within 0.001), and other
    ones than before."""
    test_fsdp.two_ranks(engine.cfg.model, tmp_path / "out", "for_an_engine")
    for kind, where in (("lora", engine), ("full", full_engine)):
        where.cfg.run_dir = str(tmp_path)
        service = a_sync(engine)[1] if kind == "lora" else a_service(where, Line())
        canary = json.loads((tmp_path / "out" / f"{kind}.json").read_text())
        folder = tmp_path / "out" / kind
        pushed = (service.sync.push_lora(1, folder / "v1", canary) if kind == "lora" else
                  service.sync.push_full(1, load_file(folder / "model.safetensors"), canary))
        assert pushed["logp_gap"] <= 1e-3 and pushed["canary"] == "ok"
