"""How often is the canary right in bfloat16? (sync.canary_verdict)

Takes real updates on the turns of a recorded run, loads every version into a real engine and asks
the rule three times: about the right version, about the previous one (stale) and about the base
model (the adapter was ignored). The first must pass, the others must be suspicious.

    python bench/bench_canary.py runs/MINE [--steps 8] [--json FILE]
"""
import argparse
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
from sync import BASE, Child, canary_verdict, engine_command, engine_env, free_port, wait_ready


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


def measure(cfg, run_dir, folder, steps):
    """-> {case: Counter of verdicts}, base gap."""
    from transformers import AutoTokenizer

    trainer = trainer_module.Trainer(cfg)
    service = trainer_module.Service(cfg, trainer, Line(), AutoTokenizer.from_pretrained(cfg.model))
    service.start()
    sync, counts = service.sync, {"right": Counter(), "stale": Counter(), "no adapter": Counter()}
    t_old = t_0 = sync.t_0
    e_old = e_0 = sync.e_0
    for turns in batches(run_dir, steps, cfg.batch_size):
        trainer.train(turns)
        path, name = folder / f"v{trainer.step}", f"v{trainer.step}"
        trainer.save_adapter(path)
        sync.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        t_new, e_new = service.trainer_canary(), service.engine_canary(name)
        for case, e in (("right", e_new), ("stale", e_old), ("no adapter", e_0)):
            verdict, gap = canary_verdict(t_old, t_new, t_0, e, e_0, sync.base_gap, sync.exact)
            counts[case][verdict] += 1
            print(f"step {trainer.step} {case:>10}: {verdict}, gap {gap:.4f}", flush=True)
        if trainer.step > 1:
            sync.call("POST", "/v1/unload_lora_adapter", {"lora_name": f"v{trainer.step - 1}"})
        t_old, e_old = t_new, e_new
    return counts, sync.base_gap


def run():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-canary-"))
    cfg = main.parse(["--run-dir", str(folder)])
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
