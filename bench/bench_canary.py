"""How often is the canary right in bfloat16? (sync.Sync.verify)

Takes real updates on the turns of a recorded run, loads every version into a real engine and asks
the rule about engines that serve: the right version, always the one before (stale), the third for
ever (stuck), the base model (the adapter was ignored). The first must pass; the others must be
suspicious as soon as that can be seen, and two suspicions in a row stop a run.

    python bench/bench_canary.py runs/MINE [--steps 8] [--lr 4e-4] [--json FILE]
"""
import argparse
import copy
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
import proxy
import trainer as trainer_module
from judge import SampleQueue
from sync import (
    BASE,
    Child,
    SyncError,
    engine_command,
    engine_env,
    free_port,
    mean_abs,
    wait_ready,
)


class Line:
    """Main's side of the queue, as far as a sync needs it."""

    def __init__(self):
        self.policy = proxy.Policy(BASE)

    def publish(self, version, name):
        SampleQueue.publish(self, version, name)

    def status(self):
        return {"version": self.policy.version, "name": self.policy.name, "open": {}}


def batches(run_dir, steps, size):
    """The trained turns of the run in their order, going around when there are too few."""
    turns = [t for t in proxy.load_turns(run_dir / "turns.jsonl").values() if t.fate == "trained"]
    turns.sort(key=lambda t: t.step)
    for k in range(steps):
        yield [asdict(turns[(k * size + i) % len(turns)]) for i in range(size)]


def asked(sync, t_new, e_new):
    """One case's canary on these log-probs -> its verdict; 'STOPPED' where a run would end."""
    sync.score = lambda name: e_new
    try:
        return sync.verify("", t_new)[0]
    except SyncError:
        sync.suspicions, sync.t_seen = 0, t_new
        return "STOPPED"


def measure(cfg, run_dir, folder, steps):
    """-> {case: Counter of verdicts}, base gap."""
    from transformers import AutoTokenizer

    trainer = trainer_module.Trainer(cfg)
    service = trainer_module.Service(cfg, trainer, Line(), AutoTokenizer.from_pretrained(cfg.model))
    service.start()
    sync, engine = service.sync, [service.sync.e_0]  # what the engine says, by version
    cases = {"right": lambda: engine[-1], "stale": lambda: engine[-2],
             "stuck": lambda: engine[min(len(engine) - 1, 3)], "no adapter": lambda: engine[0]}
    syncs = {case: copy.copy(sync) for case in cases}
    counts = {case: Counter() for case in cases}
    for turns in batches(run_dir, steps, cfg.batch_size):
        trainer.train(turns)
        path, name = folder / f"v{trainer.step}", f"v{trainer.step}"
        trainer.save_adapter(path)
        sync.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        t_new = service.trainer_canary()
        engine.append(service.engine_canary(name))
        sync.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        said = {case: asked(syncs[case], t_new, e()) for case, e in cases.items()}
        for case, verdict in said.items():
            counts[case][verdict] += 1
        print(f"step {trainer.step}: trainer moved {mean_abs(t_new, sync.t_old):.4f}, gap "
              f"{mean_abs(engine[-1], t_new):.4f}, " + ", ".join(map(": ".join, said.items())),
              flush=True)
        sync.t_old = t_new
    return counts, sync.base_gap


def run():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", default="2e-4")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-canary-"))
    cfg = main.parse(["--run-dir", str(folder), "--lr", args.lr, "--batch-size", "8"])
    cfg.engine_url = f"http://127.0.0.1:{(port := free_port())}"
    child = Child("engine", engine_command(cfg, cfg.model, port, True), folder / "log",
                  env=engine_env(cfg), cores=cfg.engine_cores)
    try:
        wait_ready(child, cfg.engine_url, 600, lambda *_: None)
        counts, base_gap = measure(cfg, args.run_dir, folder, args.steps)
    finally:
        child.stop()
    result = {"base_gap": base_gap, **{k: dict(v) for k, v in counts.items()}}
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    run()
