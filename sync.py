"""Weight sync: two halves joined by HTTP only.

`Child` and `engine_command` are main's half: processes in groups of their own that end when main
ends, however it ends. `Sync` is the trainer's half: it puts version after version of the weights
into the running engine and proves each time that they are there.

Run it alone: `python sync.py guard FD COMMAND...` is how every child is started.

How it differs from the original:
 1. LoRA: each version is a new adapter beside the old ones; nothing pauses, streams keep theirs.
 2. Full weights: the engine pauses in place (requests are held, not refused), reads the new tensors
    from shared memory and goes on.
 3. A 200 is no proof. Names are matched and counted, the engine must list the version, and four
    fixed texts (the canary) must get the log-probs that the trainer computes for them.
"""

import contextlib
import importlib.util
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import urllib3

HERE = Path(__file__).resolve().parent
BASE = "base"  # the engine's name for the model without an adapter
LORA_TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()

# ---------------------------------------------------------------------------- main's half: children


def parse_cores(text):
    """'0-2,5' -> {0, 1, 2, 5}"""
    spans = [part.split("-") for part in text.split(",")]
    return {i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)}


def guard(fd, command):
    """Run `command` in this process group; end the whole group when `fd` (a pipe from main) closes.

    PR_SET_PDEATHSIG would not do: it does not reach vLLM's engine process, which is a grandchild.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, preexec_fn=restore_signals)
    while child.poll() is None and not select.select([fd], [], [], 0.1)[0]:
        pass
    code = child.poll()
    os.killpg(0, signal.SIGTERM)  # we ignore it ourselves
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    if code == 0:
        sys.exit(0)
    if code is not None:  # for main's error message: KILL below ends this process too
        print(f"ended with exit code {code}", file=sys.stderr, flush=True)
    time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


def restore_signals():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is main's; it ends us in order


class Child:
    """A process that we started, in a process group of its own, with its output in a log file."""

    def __init__(self, name, command, log, env=None, screen=False, cores=None):
        self.name, self.log = name, Path(log)
        read, self.pipe = os.pipe()
        wanted = cores and parse_cores(cores)
        self.read_from = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "sync.py"), "guard", str(read), *map(str, command)],
                stdin=subprocess.DEVNULL, stdout=None if screen else out, stderr=out,
                env={**os.environ, **(env or {})}, pass_fds=[read], start_new_session=True,
                cwd=HERE, preexec_fn=(lambda: os.sched_setaffinity(0, wanted)) if wanted else None)
        os.close(read)

    def alive(self):
        return self.process.poll() is None

    def code(self):
        return self.process.poll()

    def tail(self, lines=8):
        """The last log lines that say something, for an error message."""
        with open(self.log, errors="replace") as file:
            file.seek(self.read_from)
            said = [line.rstrip()[:300] for line in file if line.strip()]
        telling = [line for line in said if "Error" in line and "Traceback" not in line]
        shown = telling[-3:] + said[-lines:] if said else ["(nothing)"]
        return "\n".join(f"  | {line}" for line in shown)

    def release(self):
        """Close our end of the pipe: the guard TERMs the group now and KILLs it 5 s later."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def stop(self, patience=5.0):
        """TERM the group, KILL what is left. Safe to call twice."""
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=5)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# More flags for the policy engine, from a file of --extra.
ENGINE_FLAGS = []


def engine_command(cfg, model, port, lora, devices=1):
    """The vLLM command line. It listens on loopback only: its dev endpoints can do anything."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
               "--served-model-name", BASE, "--host", "127.0.0.1", "--port", port,
               "--dtype", cfg.engine_dtype, "--max-model-len", cfg.max_model_len,
               "--generation-config", "vllm",  # no sampling defaults from the model's folder
               "--logprobs-mode", "processed_logprobs",  # log-probs of what was sampled from
               "--max-logprobs", 64, "--scheduling-policy", "priority", "--seed", cfg.seed,
               "--max-num-seqs", cfg.max_requests, "--disable-uvicorn-access-log"]
    if cfg.tool_parser:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", cfg.tool_parser]
    if cfg.reasoning_parser:
        command += ["--reasoning-parser", cfg.reasoning_parser]
    if lora:
        command += ["--enable-lora", "--max-loras", cfg.lora_slots, "--max-lora-rank",
                    cfg.lora_rank, "--max-cpu-loras", 2 * cfg.lora_slots,
                    # KEEP: without this LoRA covers the lm_head, and prompt_logprobs kills vLLM
                    "--lora-target-modules", *LORA_TARGETS]
    if cfg.device == "cpu":
        command += ["--enforce-eager", "--worker-extension-cls", "sync.OnCpu"]
    else:
        command += ["--tensor-parallel-size", devices, "--gpu-memory-utilization", cfg.gpu_share]
    return [str(c) for c in command]


class OnCpu:
    """Added to vLLM's workers on CPU, called over /collective_rpc: mends for vLLM 0.32."""

    def repack_tied_head(self):
        """The lm_head's weights are packed once: where they are tied to the embedding,
        reload_weights leaves the old packed copy in use (the canary found it)."""
        head = self.model_runner.model.lm_head
        head.quant_method.process_weights_after_loading(head)

    def mend_lora(self):
        """vLLM copies the adapter's matrices once per token, which is slow. And its slot for "no
        adapter", -1, is the last slot as an index: a base model's tokens get that one's adapter
        when they share a step with an adapter's (vLLM pull request 48421). So: one product for all
        tokens of a slot, none for -1."""
        import torch
        from vllm.lora.punica_wrapper import punica_cpu

        def per_slot(lengths, slots):
            """Runs of tokens -> (their rows, the slot), each slot once."""
            each = torch.repeat_interleave(slots, lengths)
            for slot in set(slots.tolist()) - {-1}:
                yield (slice(None) if len(slots) == 1 else each == slot), slot

        def shrink(x, a, y, _starts, lengths, slots, _batches, _longest, _tokens, scale):
            for rows, slot in per_slot(lengths, slots):
                y[rows] = scale * (x[rows].to(y.dtype) @ a[slot, 0].to(y.dtype).T)

        def expand(x, b, y, _starts, lengths, slots, _batches, _longest, _tokens, at, width, _add):
            for rows, slot in per_slot(lengths, slots):
                y[rows, at:at + width] += x[rows].to(y.dtype) @ b[slot, 0].T

        punica_cpu.sgmv_shrink, punica_cpu.sgmv_expand_slice = shrink, expand


def engine_env(cfg, gpus=""):
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
           "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    if cfg.device != "cpu":
        return {**env, "CUDA_VISIBLE_DEVICES": gpus}
    omp = sorted(Path(sys.prefix).glob("lib/python*/site-packages/**/libiomp5.so"))
    omp += sorted(Path(sys.prefix).glob("lib/libiomp5.so"))
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**env, "VLLM_CPU_KVCACHE_SPACE": str(cfg.kv_cache_gb), "KMP_BLOCKTIME": "0",
            "VLLM_CPU_OMP_THREADS_BIND": cfg.engine_cores,
            **({"LD_PRELOAD": str(omp[0])} if omp else {})}


def wait_ready(child, url, seconds, tick, stopping=lambda: False):
    """Wait until the engine answers. `tick(waited, last_line)` is called about every second."""
    http, start = urllib3.PoolManager(retries=False, timeout=2.0), time.monotonic()
    while child.alive() and not stopping():
        waited = time.monotonic() - start
        with contextlib.suppress(urllib3.exceptions.HTTPError, OSError):
            if http.request("GET", f"{url}/health").status == 200:
                return True
        if waited > seconds:
            raise TimeoutError(f"the {child.name} was not ready after {seconds:.0f} s:\n"
                               f"{child.tail()}")
        tick(waited, child.tail(1))
        time.sleep(0.5)
    if not stopping():
        raise ChildProcessError(f"the {child.name} ended while it was starting:\n{child.tail()}")
    return False


# ------------------------------------------------------------------------------- the trainer's half


def load_extra(path):
    """--extra FILE: a student's file that may add rows to LOSSES, SCHEDULES, PERSONAS, JUDGES,
    ROUTES, and to ENGINE_FLAGS."""
    sys.path.append(str(HERE / "examples"))  # for `from simulated_user import PERSONAS`
    spec = importlib.util.spec_from_file_location("extra", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


class SyncError(RuntimeError):
    """The engine does not serve what the trainer computed; the run must not go on."""


def mean_abs(a, b):
    """mean |a_i - b_i| over two equally long lists of numbers."""
    assert len(a) == len(b) and a, f"canaries of {len(a)} and {len(b)} tokens cannot be compared"
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def check_names(saved, expected):
    """Every tensor of the trainer is in the file under the engine's name, and no other one."""
    saved, expected = set(saved), set(expected)
    if saved != expected:
        raise SyncError(
            f"{len(saved)} tensors were saved, {len(expected)} expected; "
            f"missing: {sorted(expected - saved)[:3]}, unknown: {sorted(saved - expected)[:3]}")


def canary_verdict(t_old, t_new, t_0, e_new, e_0, base_gap, exact):
    """Does the engine serve the new weights? All arguments are log-probs (N,) at temperature 1.

    t: trainer, e: engine; _old: an earlier version, _new: this one, _0: version 0.
    d_new = mean|e_new - t_new|, d_old = mean|e_new - t_old|. Returns (verdict, d_new), verdict one
    of 'ok', 'unchanged' (the trainer moved too little to see), 'suspicious', 'wrong'.
    exact: engine and trainer are both float32, where 0.001 is far above the noise. In bfloat16 any
    change of the weights moves the trainer's log-probs by about the base gap, at random: whether
    the engine is nearer to t_new or to t_old says something from 1.5 times that on.
    """
    d_new, d_old, change = mean_abs(e_new, t_new), mean_abs(e_new, t_old), mean_abs(t_new, t_old)
    effect, wanted = mean_abs(e_new, e_0), mean_abs(t_new, t_0)
    if not math.isfinite(d_new) or (exact and d_new > 1e-3):
        return "wrong", d_new
    seen = change >= max(1e-4, 0.0 if exact else 1.5 * base_gap)
    if not exact and (d_new > 2 * base_gap + 0.02 or (seen and d_new > d_old)
                      or (wanted > base_gap and not 0.5 <= effect / wanted <= 2)):
        return "suspicious", d_new
    return ("ok" if seen else "unchanged"), d_new


class Sync:
    """Puts versions into the engine. `queue` is main's (status, publish); `score(name)` returns the
    engine's canary log-probs under one of its model names."""

    def __init__(self, cfg, url, queue, score):
        self.cfg, self.url, self.queue, self.score = cfg, url, queue, score
        key = os.environ.get("POLICY_KEY")
        self.http = urllib3.PoolManager(retries=False,
                                        headers={"Authorization": f"Bearer {key}"} if key else {})
        self.live = {}  # adapter name -> its folder, loaded in the engine
        self.folders = []  # every version's folder, oldest first; the newest two stay on disk
        self.suspicions, self.checksums = 0, None
        self.exact = cfg.engine_dtype == "float32"

    def call(self, method, path, body=None, limit=600):
        """One request to the engine; anything but 200 is an error with the engine's own words."""
        response = self.http.request(method, self.url + path, json=body,
                                     timeout=urllib3.Timeout(connect=10, read=limit))
        if response.status != 200:
            raise SyncError(f"engine: {path} answered {response.status}: {response.data[:300]!r}")
        return json.loads(response.data) if response.data[:1] in (b"{", b"[") else {}

    def listed(self):
        return [m["id"] for m in self.call("GET", "/v1/models")["data"]]

    def start(self, t_0):
        """Version 0, before the first user: engine and trainer must agree on the untouched model.
        Catches a wrong dtype, rope or tokeniser. Returns the base gap."""
        if self.cfg.device == "cpu" and self.cfg.lora_rank:
            self.call("POST", "/collective_rpc", {"method": "mend_lora"})
        for name in self.listed():  # of a run that ended: an engine at --policy-url outlives it
            if name != BASE:
                self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        self.t_0 = self.t_old = self.t_seen = t_0
        self.e_0 = self.score(BASE)
        self.base_gap = mean_abs(self.e_0, t_0)
        limit = 1e-3 if self.exact else 0.15
        if not self.base_gap <= limit:  # also where it is no number
            raise SyncError(f"engine and trainer disagree on the untouched model: "
                            f"logp_gap {self.base_gap:.4f} is above {limit}; same weights, dtype, "
                            "tokenizer? (An engine at --policy-url whose full weights another run "
                            "has swapped must be started again.)")
        return self.base_gap

    def verify(self, name, t_new):
        """The canary, after version `name` was loaded -> (verdict, gap). Raises SyncError."""
        e_new = self.score(name)
        verdict, gap = canary_verdict(self.t_seen, t_new, self.t_0, e_new, self.e_0, self.base_gap,
                                      self.exact)
        self.suspicions = self.suspicions + 1 if verdict == "suspicious" else 0
        if verdict == "wrong" or self.suspicions == 2:
            raise SyncError(f"the engine does not serve what was trained: logp_gap {gap:.4f} on "
                            f"the canary of {name} (base gap {self.base_gap:.4f})")
        self.t_old = t_new
        if verdict != "unchanged":  # else small steps add up until they can be seen
            self.t_seen = t_new
        return verdict, gap

    # ---- LoRA: slots

    def has_slot(self):
        """Retire what nobody uses any more; is a slot free for the next version?"""
        status = self.queue.status()
        for name in [n for n in self.live if n != status["name"] and not status["open"].get(n)]:
            self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
            del self.live[name]
            self._clean()
        return len(self.live) < self.cfg.lora_slots

    def _clean(self):
        """KEEP: a folder goes only after its adapter is unloaded and no request is open on it: vLLM
        reads evicted adapters back from disk and dies if they are gone."""
        for folder in self.folders[:-2]:
            if folder not in self.live.values():
                shutil.rmtree(folder)
                self.folders.remove(folder)

    def push_lora(self, version, folder, t_new):
        """folder: a saved PEFT adapter. Loads it under a new name, proves it, then serves it."""
        name, start = f"v{version}", time.monotonic()
        self.queue.publish(version, None)
        self.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        load_s = time.monotonic() - start
        self.live[name] = str(folder)
        self.folders.append(str(folder))
        if name not in self.listed():
            raise SyncError(f"the engine does not list {name} after loading it")
        verdict, gap = self.verify(name, t_new)  # KEEP: before users get it
        self._go_live(version, name)
        return {"logp_gap": gap, "canary": verdict, "sync_s": load_s, "pause_s": 0.0}

    def _go_live(self, version, name):
        self.queue.publish(version, name)
        status = self.queue.status()
        if (status["version"], status["name"]) != (version, name):
            raise SyncError(f"the proxy serves {status['name']} after {name} was published")

    # ---- full weights: swap in place

    def push_full(self, version, tensors, t_new):
        """tensors: every parameter by its name, on the CPU, in the engine's dtype (rank 0's)."""
        start = time.monotonic()
        with ROUTES["full"](self, version, tensors) as hand_over:
            self.checksums = self.checksums or self.checksum()
            self.queue.publish(version, None)
            paused = time.monotonic()
            self.call("POST", "/pause?mode=keep")
            try:
                hand_over()
                if self.cfg.device == "cpu":
                    self.call("POST", "/collective_rpc", {"method": "repack_tied_head"})
                if not self.call("POST", "/reset_prefix_cache").get("success", True):
                    raise SyncError("the engine kept its old prefix cache")
                self.queue.publish(version, BASE)  # KEEP: before resume, what starts now is new
            except BaseException:
                with contextlib.suppress(SyncError, urllib3.exceptions.HTTPError):
                    self.call("POST", "/resume", limit=30)  # what went wrong first is told
                raise
            self.call("POST", "/resume")
            pause_s = time.monotonic() - paused
        self._compare_checksums(t_new)
        self._go_live(version, BASE)
        verdict, gap = self.verify(BASE, t_new)
        return {"logp_gap": gap, "canary": verdict, "sync_s": time.monotonic() - start,
                "pause_s": pause_s, "bytes": sum(t.nbytes for t in tensors.values())}

    def checksum(self):
        return self.call("POST", "/weight_checker", {"action": "checksum"})["checksums"]

    def _compare_checksums(self, t_new):
        """The engine holds the same set of tensors, and other values if the canary moved. (On CPU
        the packed linear layers have no checksum, so there the values are the canary's matter.)"""
        before, self.checksums = self.checksums, self.checksum()
        check_names(self.checksums, before)
        moved = mean_abs(t_new, self.t_old) > 1e-4 and self.cfg.device != "cpu"
        if moved and before == self.checksums:
            raise SyncError("the engine's weights did not change in the swap")


@contextlib.contextmanager
def through_memory(sync, version, tensors):
    """A file in shared memory, which the engine's workers map. -> hand_over(), called in the pause:
    what takes time is done before it and after it."""
    folder = weights_folder(sync.cfg, version, sum(t.nbytes for t in tensors.values()))
    try:
        write(folder / "model.safetensors", tensors, tensors)
        yield lambda: sync.call("POST", "/collective_rpc", {
            "method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    finally:
        shutil.rmtree(folder.parent)


# How full weights get into the engine: --extra may put another way here (examples/sync_nccl.py).
ROUTES = {"full": through_memory}


def write(path, expected, state):
    """Tensors -> file, read back by name -> its size in bytes."""
    from safetensors.torch import safe_open, save_file

    save_file({k: v.contiguous().cpu() for k, v in state.items()}, path, {"format": "pt"})
    with safe_open(path, "pt") as file:
        check_names(file.keys(), expected)
    return path.stat().st_size


def weights_folder(cfg, version, size):
    """A new folder in shared memory if `size` bytes easily fit there (and the engine is on this
    machine), else in the run."""
    shm = Path("/dev/shm")
    fits = shm.is_dir() and shutil.disk_usage(shm).free > 1.2 * size + (64 << 20)
    name = f"nano-openclaw-{os.getpid()}"  # not where the run keeps its last version
    parent = (shm if fits and not cfg.policy_url else Path(cfg.run_dir) / "weights") / name
    folder = parent / f"v{version}"
    folder.mkdir(parents=True, mode=0o700)
    return folder


if __name__ == "__main__" and sys.argv[1:2] == ["guard"]:
    guard(int(sys.argv[2]), sys.argv[3:])
