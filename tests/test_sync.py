"""Children that end with us, and versions that are proved to be in the engine."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import main
import sync
from judge import SampleQueue
from proxy import Policy, TurnLog
from sync import BASE, Child, Sync, SyncError, canary_verdict, mean_abs, weights_folder


def until(condition, seconds=8.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


# --------------------------------------------------------------------------------------- the canary

T_0 = [-1.0, -2.0, -3.0, -0.5]


def plus(values, x):
    """All log-probs moved by x, up and down in turn, so that mean|difference| is |x|."""
    return [v + x * (-1) ** i for i, v in enumerate(values)]


# step: what the step changed in the trainer; e: the engine's distance to version 0 and noise.
@pytest.mark.parametrize(("exact", "old", "new", "engine", "verdict"), [
    (True, 0.00, 0.05, 0.0500, "ok"), (True, 0.00, 0.05, 0.0508, "ok"),
    (True, 0.02, 0.05, 0.02, "wrong"),  # the previous version is served
    (True, 0.02, 0.05, 0.00, "wrong"),  # no adapter at all
    (True, 0.00, 0.05, 0.10, "wrong"),  # alpha applied twice: the effect doubled
    (True, 0.05, 0.05, 0.05, "unchanged"), (True, 0.05, 0.05, 0.06, "wrong"),
    (False, 0.20, 0.30, 0.31, "ok"),
    (False, 0.20, 0.30, 0.20, "suspicious"),  # previous version: nearer to it than to the new one
    (False, 0.00, 0.07, 0.00, "suspicious"),
    (False, 0.20, 0.25, 0.20, "unchanged"),  # within what rounding alone does in bf16
    (False, 0.20, 0.30, 0.10, "suspicious"),  # a third of the effect: a scaled adapter
    (False, 0.55, 0.60, 1.30, "suspicious"),  # twice the effect and more
    (False, 0.20, 0.30, 0.39, "ok"), (False, 0.29, 0.30, 0.42, "suspicious"),  # 2 x 0.04 + 0.02
    (False, 0.30, 0.30, 0.32, "unchanged"), (False, 0.30, 0.30, 0.45, "suspicious")])
def test_canary_verdict(exact, old, new, engine, verdict):
    """F6: a 200 is no proof. Trainer and engine as distances from version 0 on a base gap of 0.04
    (bf16) or 0 (float32). float32 with a step too small to see once said 'ok'."""
    gap = 0.0 if exact else 0.04
    got, d_new = canary_verdict(plus(T_0, old), plus(T_0, new), T_0, plus(T_0, engine),
                                plus(T_0, 0.0), gap, exact)
    assert got == verdict and d_new == pytest.approx(abs(engine - new))


def test_canaries_must_be_comparable():
    """Lists of different lengths, or empty ones, are a fault of ours and never a small
    difference."""
    assert mean_abs([1.0, 2.0], [2.0, 4.0]) == 1.5
    for a, b in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(AssertionError):
            mean_abs(a, b)


# ----------------------------------------------------------------------------- children of main

PY = sys.executable


def child(tmp_path, code, **kwargs):
    return Child("test child", [PY, "-c", code], tmp_path / "child.log", **kwargs)


def said(path):
    return path.read_text() if path.exists() else ""


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
SPAWN = ("import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', %r]); "
         "time.sleep(0.5); print(p.pid, flush=True); time.sleep(60)")


def test_stop_ends_a_child_that_ignores_sigterm(tmp_path):
    """H1: after `patience` the whole group is killed; stopping twice is harmless."""
    deaf = child(tmp_path, SPAWN % (DEAF + "time.sleep(60)"))
    until(lambda: said(deaf.log).strip())
    grandchild, start = int(said(deaf.log)), time.monotonic()
    deaf.stop(patience=0.3)
    assert time.monotonic() - start < 4.5 and not deaf.alive()
    until(lambda: gone(grandchild))
    deaf.stop()


def test_guard_ends_a_child_that_ignores_sigterm(tmp_path):
    """Released and not waited for: TERM now, KILL by the guard itself."""
    deaf = child(tmp_path, DEAF + "print('up', flush=True); time.sleep(60)")
    until(lambda: "up" in said(deaf.log))
    start = time.monotonic()
    deaf.release()
    until(lambda: not deaf.alive())
    assert 4 < time.monotonic() - start < 30


def test_kill_9_of_the_parent_leaves_nobody(tmp_path):
    """H1: neither a child nor a grandchild (vLLM's engine process) survives its parent, also when
    the grandchild ignores SIGTERM; else it keeps the port and the GPU."""
    code = (f"import sys, time; sys.path.insert(0, {str(sync.HERE)!r}); from sync import Child; "
            f"c = Child('x', [sys.executable, '-c', {SPAWN % (DEAF + 'time.sleep(60)')!r}], "
            f"{str(tmp_path / 'log')!r}); print(c.process.pid, flush=True); time.sleep(60)")
    parent = subprocess.Popen([PY, "-c", code], stdout=subprocess.PIPE, text=True)
    guard = int(parent.stdout.readline())
    until(lambda: said(tmp_path / "log").strip())
    family = [guard, *(p.pid for p in psutil.Process(guard).children(recursive=True))]
    assert len(family) == 3 and int(said(tmp_path / "log")) in family
    parent.kill()
    parent.wait()
    until(lambda: all(map(gone, family)))


def test_end_of_a_child_is_seen(tmp_path):
    """A child that ends by itself is reported with its own exit code, which once read -9 whatever
    had happened, and nothing of its group stays behind."""
    good = child(tmp_path, "print('done')")
    until(lambda: not good.alive())
    assert good.code() == 0 and good.tail() == "  | done"
    leaves = (SPAWN % (DEAF + "time.sleep(60)")).removesuffix("time.sleep(60)") + "sys.exit(3)"
    bad = child(tmp_path, leaves)
    until(lambda: not bad.alive())
    assert bad.code() != 0 and bad.tail(1) == "  | ended with exit code 3"
    until(lambda: gone(int(said(bad.log).split()[1])))


def test_child_gets_environment_and_cores(tmp_path):
    """Cores are set before the program starts; output goes to the log."""
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.environ['MARK'], os.sched_getaffinity(0))"
    c = child(tmp_path, code, cores=str(core), env={"MARK": "here"})
    until(lambda: not c.alive())
    assert f"here {{{core}}}" in said(c.log)


def test_tail_shows_what_matters(tmp_path):
    """The last lines of this run that say something, with errors that came before them; nothing of
    an earlier run in the same log."""
    (tmp_path / "child.log").write_text("ValueError: of an earlier run\n")
    code = "print('ValueError: bad dtype'); [print(f'line {i}\\n') for i in range(20)]"
    c = child(tmp_path, code)
    until(lambda: not c.alive())
    assert c.tail(2) == "  | ValueError: bad dtype\n  | line 18\n  | line 19"
    assert "earlier" not in c.tail(100)
    silent = child(tmp_path, "pass")
    until(lambda: not silent.alive())
    assert silent.tail() == "  | (nothing)"


def test_wait_ready(tmp_path):
    """The engine's health is waited for; an engine that ends or never comes is an error with its
    last words; Ctrl-C ends the waiting."""
    with Engine() as engine:
        c = child(tmp_path, "print('no such model', flush=True); import time; time.sleep(60)")
        assert sync.wait_ready(c, engine.url, 5, lambda *args: None)
        until(lambda: "no such model" in c.tail())
        nobody, ticks = "http://127.0.0.1:9", []
        with pytest.raises(TimeoutError, match="no such model"):
            sync.wait_ready(c, nobody, 0.2, lambda *args: ticks.append(args))
        assert ticks
        assert sync.wait_ready(c, nobody, 5, None, stopping=lambda: True) is False
        c.stop(0.2)
        with pytest.raises(ChildProcessError, match="no such model"):
            sync.wait_ready(c, nobody, 5, None)


def test_busy_port_is_refused_and_left_alone():
    """H2: an unrelated server on the port survives, and we say whose it is; nothing is killed by
    name."""
    code = ("import socket; s = socket.create_server(('127.0.0.1', 0)); "
            "print(s.getsockname()[1], flush=True); s.accept()[0].send(b'hello')")
    server = subprocess.Popen([PY, "-c", code], stdout=subprocess.PIPE, text=True)
    port = int(server.stdout.readline())
    with pytest.raises(main.Problem, match=f"process {server.pid}.*--port"):
        main.check_port(SimpleNamespace(host="127.0.0.1", port=port))
    assert socket.create_connection(("127.0.0.1", port)).recv(5) == b"hello"
    server.wait(5)
    main.check_port(SimpleNamespace(host="127.0.0.1", port=sync.free_port()))


def test_engine_listens_on_loopback_only():
    """Its dev endpoints can do anything; and LoRA must stay off the lm_head, or prompt_logprobs
    kills vLLM."""
    cfg = SimpleNamespace(engine_dtype="float32", max_model_len=512, seed=0, max_requests=8,
                          lora_slots=4, lora_rank=8, device="cpu", tool_parser="hermes",
                          reasoning_parser="")
    command = sync.engine_command(cfg, "m", 1234, lora=True)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--tool-call-parser") + 1] == "hermes"
    assert command[command.index("--max-loras") + 1] == "4"
    assert command[command.index("--max-cpu-loras") + 1] == "8"
    assert command[command.index("--lora-target-modules") + 1:][:7] == sync.LORA_TARGETS
    assert "--enable-lora" not in sync.engine_command(cfg, "m", 1234, lora=False)


# ------------------------------------------------------------------------------------ a fake engine


class Engine:
    """A small HTTP server with vLLM's endpoints for adapters and weights. `calls` is what it was
    asked, in order; `answers` replaces answers: path -> (status, body)."""

    def __init__(self):
        self.calls, self.answers, self.loaded, self.weights = [], {}, {}, 1
        self.in_use = lambda name: False
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                path, body = self.path, json.loads(self.rfile.read(length) or b"{}")
                engine.calls.append(path)
                status, answer = engine.answers.get(path) or engine.answer(path, body)
                raw = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": n} for n in (BASE, *self.loaded)]}
        if path == "/v1/load_lora_adapter":
            return self.load(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            return self.unload(body["lora_name"])
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.weights += (Path(body["kwargs"]["weights_path"]) / "model.safetensors").exists()
        if path == "/weight_checker":
            return 200, {"checksums": {"a.weight": self.weights, "b.weight": self.weights}}
        return 200, {"success": True}

    def load(self, name, folder):
        assert folder.is_dir() and name not in self.loaded and folder not in self.loaded.values()
        self.loaded[name] = folder
        return 200, {}

    def unload(self, name):
        folder = self.loaded.pop(name)
        if self.in_use(name) or not folder.is_dir():
            return 500, {"error": f"{name} is in use or its folder is gone: the engine dies"}
        return 200, {}


class Service:
    """Trainer's half and engine, with the real queue and policy between them."""

    def __init__(self, engine, tmp_path, **cfg):
        self.cfg = SimpleNamespace(
            **dict(lora_slots=2, engine_dtype="float32", device="cuda", policy_url="",
                   run_dir=tmp_path) | cfg)
        self.engine, self.tmp_path, self.policy = engine, tmp_path, Policy(BASE)
        engine.in_use = lambda name: self.policy.open.get(name)
        self.queue = SampleQueue(SimpleNamespace(), TurnLog(os.devnull), self.policy)
        self.truth, self.served = {BASE: T_0}, []  # engine name -> its canary log-probs
        publish = self.queue.publish
        self.queue.publish = lambda version, name: (engine.calls.append(f"publish {name}"),
                                                    self.served.append(self.policy.name),
                                                    publish(version, name))
        self.sync = Sync(self.cfg, engine.url, self.queue, lambda name: self.truth[name])
        self.sync.start(T_0)
        engine.calls.clear()
        self.version = 0

    def folder(self, version):
        return self.tmp_path / "adapters" / f"v{version}"

    def push(self, engine_says=None):
        """Version + 1, whose canary moved by 0.1 per version."""
        self.version += 1
        logp = plus(T_0, 0.1 * self.version)
        self.truth[f"v{self.version}"] = logp if engine_says is None else engine_says
        self.folder(self.version).mkdir(parents=True)
        return self.sync.push_lora(self.version, self.folder(self.version), logp)

    def push_full(self):
        self.version += 1
        logp = self.truth[BASE] = plus(T_0, 0.1 * self.version)
        return self.sync.push_full(self.version, {"a": torch.ones(5), "b": torch.ones(2)}, logp)


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


@pytest.fixture
def service(engine, tmp_path):
    return Service(engine, tmp_path)


# ----------------------------------------------------------------------------------------- slots


def test_every_version_has_its_own_name_and_folder(service, engine):
    """F1, F2: under an old name the engine would serve its old prefix cache. Users get the name
    only after the check, and what the proxy sends is the new one."""
    for version in (1, 2, 3):
        assert service.sync.has_slot()
        metrics = service.push()
        assert (metrics["canary"], metrics["pause_s"]) == ("ok", 0.0)
        assert (service.policy.name, service.policy.version) == (f"v{version}", version)
    assert list(engine.loaded) == ["v2", "v3"], "v1 was retired when the third came"
    assert engine.calls.index("/v1/models") < engine.calls.index("publish v1")


def test_a_slot_is_free_when_no_request_is_open(service, engine):
    """F0: two slots, one stream held open on v1: the third version waits until it is closed. The
    name in use is not unloaded before, nor is its folder deleted: the engine reads it again and
    would die."""
    service.push()
    name, _ = service.policy.enter()
    assert name == "v1" and service.sync.has_slot()
    service.push()
    for _ in range(3):
        assert not service.sync.has_slot()
    assert list(engine.loaded) == ["v1", "v2"] and service.folder(1).is_dir()
    service.policy.leave(name)
    assert service.sync.has_slot() and list(engine.loaded) == ["v2"]
    service.push()
    assert service.sync.has_slot() and not service.folder(1).exists() and service.folder(2).is_dir()


def test_a_stream_held_open_over_all_slots(engine, tmp_path):
    """F0: with three slots, one stream stays on v1 over S + 1 further syncs: v1 stays loaded and
    on disk all the time, the versions between come and go, and no folder is left of those
    retired."""
    service = Service(engine, tmp_path, lora_slots=3)
    service.push()
    name, _ = service.policy.enter()
    for _ in range(4):
        assert service.sync.has_slot()
        service.push()
        assert name in engine.loaded and service.folder(1).is_dir() and len(engine.loaded) <= 3
    service.policy.leave(name)
    assert service.sync.has_slot() and list(engine.loaded) == ["v5"]
    assert sorted(f.name for f in (tmp_path / "adapters").iterdir()) == ["v4", "v5"]


def test_a_folder_goes_only_after_its_adapter(service, engine):
    """Nothing is deleted when the engine refuses to unload."""
    service.push(), service.push()
    engine.answers["/v1/unload_lora_adapter"] = (500, {"error": "busy"})
    with pytest.raises(SyncError, match="unload_lora_adapter answered 500.*busy"):
        service.sync.has_slot()
    assert service.folder(1).is_dir()


def test_loaded_but_not_listed(service, engine):
    """F6: the load answers 200 and nothing is there: the run must not go on with it."""
    engine.answers["/v1/load_lora_adapter"] = (200, {})
    with pytest.raises(SyncError, match="does not list v1"):
        service.push()
    assert service.policy.name == BASE


def test_load_refused(service, engine):
    """The engine's own words are in the error."""
    engine.answers["/v1/load_lora_adapter"] = (400, {"error": "rank 8 > max_lora_rank"})
    with pytest.raises(SyncError, match="400.*max_lora_rank"):
        service.push()


def test_wrong_version_never_reaches_users(service):
    """F6: the engine gives the base model's log-probs under the new name: stopped before users get
    it."""
    with pytest.raises(SyncError, match="does not serve what was trained"):
        service.push(engine_says=T_0)
    assert service.policy.name == BASE


def test_two_suspicions_in_a_row_stop_the_run(engine, tmp_path):
    """bf16: one is shown, a good check clears it, two in a row stop the run."""
    service = Service(engine, tmp_path, engine_dtype="bfloat16", lora_slots=9)
    wrong = plus(T_0, 1.0)
    assert [service.push(engine_says=e)["canary"] for e in (wrong, None, wrong)] == [
        "suspicious", "ok", "suspicious"]
    with pytest.raises(SyncError, match="does not serve what was trained"):
        service.push(engine_says=wrong)


def test_rounding_is_no_suspicion_and_small_steps_add_up():
    """bf16: any change of the weights rounds the log-probs anew. An engine that then is nearer to
    the version before, ten times on end, once stopped runs at a small learning rate. One that stays
    behind is found once the trainer has moved far enough from what was last told apart."""
    cfg, rounded = SimpleNamespace(engine_dtype="bfloat16", device="cuda"), [0.08, 0.08, 0, 0]
    e_0 = [t + x for t, x in zip(T_0, rounded, strict=True)]
    right, says = Sync(cfg, "", None, lambda name: says[name]), {BASE: e_0}
    right.listed = lambda: []
    right.start(T_0)
    for version in range(1, 11):
        says["right"] = [x + 0.01 * (-1) ** (i + version) for i, x in enumerate(e_0)]
        t_new = plus(T_0, 0.02 * (-1) ** (version + 1))
        if version > 1:
            assert mean_abs(says["right"], t_new) > mean_abs(says["right"], right.t_old)
        assert right.verify("right", t_new)[0] == "unchanged"
    stuck = Sync(cfg, "", None, lambda name: e_0)
    stuck.listed = lambda: []
    stuck.start(T_0)
    assert [stuck.verify("v", plus(T_0, x))[0] for x in (0.03, 0.06)] == ["unchanged", "suspicious"]
    with pytest.raises(SyncError, match="does not serve what was trained"):
        stuck.verify("v", plus(T_0, 0.09))


@pytest.mark.parametrize(("dtype", "off", "good"), [
    ("float32", 0.0005, True), ("float32", 0.002, False), ("bfloat16", 0.1, True),
    ("bfloat16", 0.2, False)])
def test_untouched_model_is_compared_before_the_first_user(engine, dtype, off, good):
    """A wrong dtype, rope or tokeniser is found at start."""
    start = Sync(SimpleNamespace(engine_dtype=dtype, device="cuda"), engine.url, None,
                 lambda name: plus(T_0, off)).start
    if good:
        assert start(T_0) == pytest.approx(off)
    else:
        with pytest.raises(SyncError, match="untouched model"):
            start(T_0)


def test_adapters_of_an_earlier_run_are_unloaded(engine, tmp_path):
    """An engine at --policy-url outlives a run; a new one would get 'already loaded' for its v1."""
    engine.loaded, engine.in_use = {"v1": tmp_path, "v7": tmp_path}, lambda name: 0
    cfg = SimpleNamespace(engine_dtype="float32", device="cuda")
    Sync(cfg, engine.url, None, lambda name: T_0).start(T_0)
    assert engine.loaded == {}


@pytest.mark.parametrize(("device", "rank", "mended"), [("cpu", 16, True), ("cpu", 0, False),
                                                        ("cuda", 16, False)])
def test_lora_on_cpu_is_mended_before_the_first_version(engine, device, rank, mended):
    """See sync.OnCpu. An engine that cannot be mended ends the start with its own words."""
    engine.answers["/collective_rpc"] = (200, {})
    cfg = SimpleNamespace(engine_dtype="float32", device=device, lora_rank=rank)
    Sync(cfg, engine.url, None, lambda name: T_0).start(T_0)
    assert ("/collective_rpc" in engine.calls) == mended
    engine.answers["/collective_rpc"] = (500, {"error": "no mend_lora here"})
    with pytest.raises(SyncError, match="no mend_lora here") if mended else nullcontext():
        Sync(cfg, engine.url, None, lambda name: T_0).start(T_0)


# ---------------------------------------------------------------------------------- full weights


@pytest.fixture
def shm(monkeypatch, tmp_path):
    """Weights go to the run directory, so that a failing test leaves nothing in shared memory."""
    monkeypatch.setattr(sync.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))


SWAP = ["publish None", "/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache",
        "publish base", "/resume"]


def test_full_swap_order(service, engine, shm):
    """Pause, reload, reset the prefix cache, publish, resume: what starts after it is new. The
    folder is gone afterwards and the metrics say how long users waited."""
    metrics = service.push_full()
    assert engine.calls == ["/weight_checker", *SWAP, "/weight_checker", "publish base"]
    assert (metrics["canary"], metrics["bytes"]) == ("ok", 28) and 0 < metrics["pause_s"] < 5
    assert not list(service.tmp_path.glob("weights/*"))
    engine.calls.clear()
    service.push_full()
    assert engine.calls == [*SWAP, "/weight_checker", "publish base"]
    assert service.policy.version == 2


@pytest.mark.parametrize(("path", "answer", "error"), [
    ("/collective_rpc", (500, {"error": "no such file"}), "no such file"),
    ("/reset_prefix_cache", (500, {}), "reset_prefix_cache answered 500"),
    ("/reset_prefix_cache", (200, {"success": False}), "prefix cache")])
def test_engine_is_resumed_after_an_error(service, engine, shm, path, answer, error):
    """Users must not hang on a paused engine; the old version stays published. A reset that says
    success: false (blocks in use) would serve old prefixes with new weights."""
    engine.answers[path] = answer
    with pytest.raises(SyncError, match=error):
        service.push_full()
    assert engine.calls[-1] == "/resume" and "publish base" not in engine.calls
    assert service.policy.version == 0


def test_the_first_error_is_told(service, engine, shm):
    """An engine that dies in the reload does not answer /resume either; the reload is told."""
    engine.answers |= {"/collective_rpc": (500, {"error": "out of memory"}), "/resume": (500, {})}
    with pytest.raises(SyncError, match="out of memory"):
        service.push_full()


def test_unchanged_checksum_is_an_error(service, engine, shm):
    """F6: the reload answered 200 and the engine holds the old tensors."""
    engine.answers["/collective_rpc"] = (200, {})
    with pytest.raises(SyncError, match="did not change"):
        service.push_full()


def test_other_tensors_after_the_swap_are_an_error(service, engine, shm):
    """F6: one name less after the reload."""
    service.push_full()
    engine.answers["/weight_checker"] = (200, {"checksums": {"a.weight": 7}})
    with pytest.raises(SyncError, match="1 tensors were saved, 2 expected"):
        service.push_full()


def test_weights_folder_needs_room(tmp_path, monkeypatch):
    """Shared memory if the weights fit with room to spare, else the run directory."""
    cfg = SimpleNamespace(run_dir=tmp_path, policy_url="")
    made = weights_folder(cfg, 1, 1 << 60)
    assert made.parent.parent == tmp_path / "weights" and made.name == "v1"
    assert made.stat().st_mode & 0o777 == 0o700
    if Path("/dev/shm").is_dir():
        monkeypatch.setattr(sync.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
        made = weights_folder(cfg, 1, 1000)
        assert made.parent == Path(f"/dev/shm/nano-openclaw-{os.getpid()}")
        sync.shutil.rmtree(made.parent)
        cfg.policy_url = "http://elsewhere:8000"  # it does not see this machine's memory
        assert weights_folder(cfg, 2, 1000).parent.parent == tmp_path / "weights"


def test_cores():
    """'0-2,5' and single cores."""
    assert sync.parse_cores("0-2,5") == {0, 1, 2, 5} and sync.parse_cores("3") == {3}


def test_a_swap_folder_is_never_the_kept_model(tmp_path, monkeypatch):
    """Where shared memory is small the tensors pass through the run's directory. Once a bug: in the
    folder of the model that the run had kept, which a later swap then removed."""
    monkeypatch.setattr(sync.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    kept = tmp_path / "weights" / "v3"
    kept.mkdir(parents=True)
    folder = sync.weights_folder(SimpleNamespace(run_dir=tmp_path, policy_url=""), 3, 1000)
    assert folder.is_dir() and folder != kept and kept.is_dir()
    assert tmp_path in folder.parents
