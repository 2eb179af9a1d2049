"""What does a weight sync cost, by its route and the model's size?

    lora       a new adapter beside the old ones: nothing pauses
    full-shm   full weights swapped in place, handed over in shared memory
    full-dir   the same through the run directory

Every sync is trainer.Service.push with a real vLLM, as a run does it. `total` is all of it: the
canary in the trainer, saving, the engine's reading, the canary in the engine; `pause` is the part
in which requests are held. Each is compared with `copy`, a plain shutil.copyfile of the same bytes
in the same place (neither is flushed to disk), and with `restart`: the engine ended and started on
the new weights, until it answers (looked at every 0.5 s). The weights move a little before each
sync, so that the canary can tell the versions apart; a sync whose canary fails ends the benchmark.
A user listens all the while: `stream` is the largest time between two pieces of the answer, in the
sync, and, to compare, in three seconds before it (`still`).

A round takes the full routes in the order A B B A, and two adapters. Sizes: the demo model, and a
random Llama of --times as many parameters. In float32 by default: there the canary is exact.

    python bench/bench_sync.py [--json FILE] [--times 1,4]
"""
import argparse
import contextlib
import gc
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch
import urllib3
from bench_canary import Line

import main
import trainer as trainer_module
from sync import (
    BASE,
    Child,
    SyncError,
    engine_command,
    engine_env,
    free_port,
    mean_abs,
    parse_cores,
    wait_ready,
)

GB, SHM, STILL = 1 << 30, Path("/dev/shm"), 3.0


class Failed(Exception):
    """The figures would mean nothing."""


# ------------------------------------------------------------------------------------- the models


def larger(source, times, folder):
    """A random Llama with `times` as many parameters as the one in `source`: sqrt(times) as wide,
    and as many layers as that takes -> its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    wanted = times * parameters(config)
    wider = max(1, round(math.sqrt(times)))
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, key, wider * getattr(config, key))
    config.num_hidden_layers = 1
    one = parameters(config)
    config.num_hidden_layers = 2
    config.num_hidden_layers = max(1, round(1 + (wanted - one) / (parameters(config) - one)))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(folder)


def parameters(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


# ---------------------------------------------------------------------------- engine and trainer


def config(model, rank, dtype, run_dir):
    cfg = main.parse(["--model", model, "--lora-rank", str(rank), "--engine-dtype", dtype,
                      "--judge", "lexicon", "--lora-slots", "2", "--max-model-len", "1024",
                      "--max-requests", "16", "--run-dir", str(run_dir)])
    main.check_model(cfg)
    cfg.teacher = "engine"  # nothing is distilled here: no frozen copy
    return cfg


class Engine:
    """A vLLM that can be started again on other weights."""

    def __init__(self, cfg):
        self.cfg, self.child = cfg, None

    def start(self, model):
        """-> seconds until it answers"""
        cfg, port, start = self.cfg, free_port(), time.monotonic()
        gpus = cfg.layout["policy"]
        command = engine_command(cfg, model, port, bool(cfg.lora_rank), len(gpus) or 1)
        self.child = Child("engine", command, Path(cfg.run_dir) / "engine.log",
                           env=engine_env(cfg, ",".join(gpus)), cores=cfg.engine_cores)
        cfg.engine_url = f"http://127.0.0.1:{port}"
        wait_ready(self.child, cfg.engine_url, 600, lambda *_: None)
        return time.monotonic() - start

    def stop(self):
        if self.child:
            self.child.stop()


def make_service(cfg, tokenizer=None):
    """The trainer, its sync, and version 0 checked."""
    from transformers import AutoTokenizer

    trainer = trainer_module.Trainer(cfg)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(cfg.model)
    service = trainer_module.Service(cfg, trainer, Line(), tokenizer)
    service.start()
    return service


# ------------------------------------------------------------------------------------- one sync


def nudge(trainer):
    """Move the weights a little, as a step would."""
    with torch.no_grad():
        for name, p in trainer.policy.named_parameters():
            if p.requires_grad and ("lora_B" in name or ".mlp." in name and "lora" not in name):
                p.add_(2e-3 * torch.randn_like(p))
    trainer.step += 1


class Listener:
    """A user with an open stream of the base model: one long answer after another."""

    def __init__(self, url):
        self.url, self.over, self.failure = url, False, None
        self.last, self.gap = None, 0.0  # when the last piece came; the largest time between two
        self.thread = threading.Thread(target=self.listen)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over = True
        self.thread.join()

    def listen(self):
        body = {"model": BASE, "messages": [{"role": "user", "content": "Tell me a long story."}],
                "stream": True, "max_tokens": 900, "ignore_eos": True}
        try:
            while not self.over:
                answer = urllib3.request("POST", f"{self.url}/v1/chat/completions", json=body,
                                         preload_content=False, retries=False, timeout=600)
                if answer.status != 200:
                    raise Failed(f"the open stream was answered {answer.status}")
                for _ in answer.stream():
                    now = time.monotonic()
                    self.gap = max(self.gap, now - (self.last or now))
                    self.last = now
                    if self.over:
                        break
                self.last = None
                answer.close()  # the engine stops
        except (Failed, urllib3.exceptions.HTTPError) as error:
            self.failure = error

    def largest(self):
        """-> seconds, since it was asked last; a silence that lasts counts too"""
        if self.failure:
            raise Failed(f"the open stream: {self.failure}")
        now = time.monotonic()
        gap, self.gap = max(self.gap, now - (self.last or now)), 0.0
        return gap


def push(service, route, listener):
    """One sync by a route -> its figures."""
    nudge(service.trainer)
    listener.largest()
    time.sleep(STILL)
    still = listener.largest()
    # as for an engine on another machine, which does not see our memory
    service.cfg.policy_url = "elsewhere" if route == "full-dir" else ""
    start = time.monotonic()
    while (done := service.push()) is None:  # all slots are in use
        time.sleep(0.05)
    total = time.monotonic() - start
    size = done.get("bytes") or sum(f.stat().st_size for f in Path(
        service.sync.folders[-1]).glob("*.safetensors"))
    return {"total_s": total, "pause_s": done["pause_s"], "bytes": size,
            "stream_s": listener.largest(), "still_s": still, "canary": done["canary"],
            "logp_gap": done["logp_gap"]}


def weight_bytes(trainer):
    """Of a full sync in float32."""
    return 4 * sum(p.numel() for p in trainer.policy.parameters())


def copy(size, folder):
    """Copy a file of so many bytes beside itself -> seconds"""
    with tempfile.TemporaryDirectory(prefix="bench-sync-", dir=folder) as where:
        source = Path(where) / "a"
        block = os.urandom(1 << 20)
        with open(source, "wb") as file:
            for at in range(0, size, len(block)):
                file.write(block[: size - at])
        start = time.monotonic()
        shutil.copyfile(source, Path(where) / "b")
        return time.monotonic() - start


def measure(service, rounds):
    """-> {route: figures of its syncs}, each sync with a copy of the same bytes after it."""
    run_dir = service.cfg.run_dir
    order = ["full-shm", "full-dir", "full-dir", "full-shm"]
    needed = 0 if service.cfg.lora_rank else 3 * weight_bytes(service.trainer)
    if shutil.disk_usage(SHM).free < needed:
        raise Failed(f"too little shared memory: {SHM} must hold three times the weights")
    out = {}
    for i in range(rounds):
        for route in ["lora"] * 2 if service.cfg.lora_rank else order:
            print(f"{route}: round {i + 1} of {rounds}", file=sys.stderr)
            with Listener(service.cfg.engine_url) as listener:
                row = push(service, route, listener)
            row["copy_s"] = copy(row["bytes"], SHM if route == "full-shm" else run_dir)
            out.setdefault(route, []).append(row)
    return out


def restart(engine, service):
    """End the engine, start it on the trainer's weights -> seconds, and how well they agree."""
    service.keep()  # a model folder
    model = str(Path(service.cfg.run_dir) / "weights" / f"v{service.trainer.step}")
    start = time.monotonic()
    engine.stop()
    engine.start(model)
    seconds = time.monotonic() - start
    gap = mean_abs(service.engine_canary(BASE), service.trainer_canary())
    if gap > (1e-3 if service.sync.exact else 0.15):
        raise Failed(f"the restarted engine does not serve the trainer's weights: gap {gap:.4f}")
    return seconds


# -------------------------------------------------------------------------------------- the figures


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(rows, restart_s):
    """Syncs of one route -> medians and ranges, per GiB, against a copy and a restart."""
    size = rows[0]["bytes"] / GB
    out = {"gib": size, "syncs": len(rows), "canary": sorted({r["canary"] for r in rows}),
           "logp_gap_max": max(r["logp_gap"] for r in rows)}
    for key in ("total_s", "pause_s", "copy_s", "stream_s", "still_s"):
        out[key] = spread([r[key] for r in rows])
    out["pause_s_per_gib"] = out["pause_s"]["median"] / size
    out["pause_over_copy"] = spread([r["pause_s"] / r["copy_s"] for r in rows])
    out["total_over_copy"] = spread([r["total_s"] / r["copy_s"] for r in rows])
    out["pause_over_restart"] = spread([r["pause_s"] / restart_s for r in rows])
    out["total_over_restart"] = spread([r["total_s"] / restart_s for r in rows])
    return out


def bench(model, args, folder):
    """One model -> its figures. LoRA and full weights have an engine each, one after the other."""
    rows, cells = {}, {}
    for rank in (args.lora_rank, 0):
        run_dir = folder / f"{Path(model).name}-rank-{rank}"
        run_dir.mkdir()
        cfg = config(model, rank, args.dtype, run_dir)
        if cfg.device == "cpu":  # as many as main gives to its trainer
            torch.set_num_threads(len(parse_cores(cfg.trainer_cores)))
        engine, service = Engine(cfg), None
        gc.collect()  # KEEP: one trainer in memory at a time
        try:
            print(f"{Path(model).name}: starting vLLM", file=sys.stderr)
            cells["start_s"] = engine.start(model)
            service = make_service(cfg)
            rows |= measure(service, args.rounds)
            if not rank:
                cells["restart_s"] = restart(engine, service)
                cells["parameters"] = sum(p.numel() for p in service.trainer.policy.parameters())
        finally:
            engine.stop()
        shutil.rmtree(run_dir)
    return {"model": Path(model).name, **cells,
            "routes": {k: summary(v, cells["restart_s"]) for k, v in rows.items()}}


def show(results):
    titles = ("GiB", "pause s", "pause/GiB", "copy s", "pause/copy", "total s", "total/restart",
              "stream s", "still s")
    print(f"{'':12}" + "".join(f"{t:>14}" for t in titles))
    for one in results:
        print(f"{one['model']}: {one['parameters'] / 1e6:.0f}M parameters; restart "
              f"{one['restart_s']:.1f} s")
        for route, row in one["routes"].items():
            print(f"  {route:10}" + "".join(f"{x:14.3f}" for x in (
                row["gib"], row["pause_s"]["median"], row["pause_s_per_gib"],
                row["copy_s"]["median"], row["pause_over_copy"]["median"],
                row["total_s"]["median"], row["total_over_restart"]["median"],
                row["stream_s"]["max"], row["still_s"]["max"])))
            ranges = ", ".join(f"{k[:-2]} {row[k]['min']:.3f} to {row[k]['max']:.3f} s"
                               for k in ("pause_s", "total_s", "copy_s"))
            print(f"{'':12}{row['syncs']} syncs: {ranges}; canary {', '.join(row['canary'])}, gap "
                  f"at most {row['logp_gap_max']:.1e}")


# ------------------------------------------------------------------------------------- the command


def flags():
    def numbers(text):
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(main.DEMO_MODEL), help="a folder with a Llama [the demo model]")
    add("--times", type=numbers, default=[1, 4], metavar="N,N",
        help="sizes: 1 is the model itself, N a random one N times as large [1,4]")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="[float32]")
    add("--lora-rank", type=int, default=16, help="[16]")
    add("--rounds", type=int, default=3, help="of four full swaps and two adapters [3]")
    add("--run-dir", type=Path, help="where the run directories are made [the temporary folder]")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args()


def run(args):
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="bench-sync-", dir=args.run_dir)))
        models = [args.model if n == 1 else larger(args.model, n, folder / f"random-times-{n}")
                  for n in args.times]
        results = [bench(model, args, folder) for model in models]
    print(f"{args.dtype}, {os.cpu_count()} cores, {args.rounds} rounds, run directory on "
          f"{args.run_dir or tempfile.gettempdir()}")
    show(results)
    if args.json:
        knobs = {k: getattr(args, k) for k in ("times", "dtype", "lora_rank", "rounds")}
        args.json.write_text(json.dumps({**knobs, "models": results}, indent=1))


if __name__ == "__main__":
    try:
        run(flags())
    except KeyboardInterrupt:
        sys.exit(130)
    except (Failed, SyncError, main.Problem, ChildProcessError, TimeoutError) as error:
        sys.exit(f"no figures: {error}")
