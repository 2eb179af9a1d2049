"""What does vLLM's LoRA on CPU cost, and is it right, without and with our mend? (sync.OnCpu)

One engine, two random adapters. Tokens per second of 16 users of the base model, of one adapter and
of two; and by how much the base model's log-probs of a text change while others talk to adapters.

    python bench/bench_lora_cpu.py [--rank 16] [--dtype bfloat16] [--rounds 3]
"""
import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import urllib3

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
import proxy
import trainer as trainer_module
from sync import BASE, Child, engine_command, engine_env, free_port, mean_abs, wait_ready

USERS, TOKENS = 16, 48
http = urllib3.PoolManager(maxsize=2 * USERS, retries=False, timeout=600)


def post(url, body=None):
    response = http.request("POST", url, json=body)
    assert response.status == 200, (url, response.data[:300])


def talk(url, models, tokens):
    """One request for each -> their threads."""
    said = "Tell me all about the number {}, at home and at sea."
    bodies = [{"model": model, "max_tokens": tokens, "min_tokens": tokens, "temperature": 1,
               "messages": [{"role": "user", "content": said.format(i)}]}
              for i, model in enumerate(models)]
    threads = [threading.Thread(target=post, args=(f"{url}/v1/chat/completions", b))
               for b in bodies]
    for thread in threads:
        thread.start()
    return threads


def speed(url, models):
    """Tokens per second of all together."""
    start = time.monotonic()
    for thread in talk(url, models, TOKENS):
        thread.join()
    return len(models) * TOKENS / (time.monotonic() - start)


def score(url):
    post(f"{url}/reset_prefix_cache")
    ids = list(range(1000, 1060))
    return proxy.engine_logp(http, proxy.Endpoint(url, BASE), ids[:20], ids[20:])


def measure(url, rounds):
    """-> {who talks: median tokens/s}, mean |change| of the base's log-probs beside adapters."""
    alone, threads = score(url), talk(url, ["v1", "v2"] * 3, 150)
    time.sleep(2)
    error = mean_abs(score(url), alone)
    for thread in threads:
        thread.join()
    crowds = {"base": [BASE] * USERS, "one adapter": ["v1"] * USERS, "two": ["v1", "v2"] * 8}
    speeds = [{who: speed(url, models) for who, models in crowds.items()} for _ in range(rounds)]
    return {who: statistics.median(s[who] for s in speeds) for who in crowds}, error


def bench(args, folder):
    cfg = main.parse(["--lora-rank", str(args.rank), "--engine-dtype", args.dtype, "--lora-slots",
                      "2", "--max-model-len", "1024", "--max-requests", "16", "--run-dir", folder])
    url = f"http://127.0.0.1:{(port := free_port())}"
    child = Child("policy engine", engine_command(cfg, cfg.model, port, True), Path(folder) / "log",
                  env=engine_env(cfg), cores=cfg.engine_cores)
    try:
        wait_ready(child, url, 240, lambda *_: None)
        trainer = trainer_module.Trainer(cfg)
        for name in ("v1", "v2"):
            with torch.no_grad():
                for key, p in trainer.policy.named_parameters():
                    if "lora_B" in key:
                        p.copy_(0.02 * torch.randn_like(p))
            trainer.save_adapter(Path(folder) / name)
            post(f"{url}/v1/load_lora_adapter",
                 {"lora_name": name, "lora_path": f"{folder}/{name}"})
        print(f"rank {args.rank}, {args.dtype}: tokens/s of {USERS} users; error of the base's "
              "log-probs beside adapters")
        for state in ("vLLM's", "mended"):
            if state == "mended":
                post(f"{url}/collective_rpc", {"method": "mend_lora"})
            speeds, error = measure(url, args.rounds)
            print(f"{state:7}", *(f"{who} {v:.1f} (x {v / speeds['base']:.2f})"
                                  for who, v in speeds.items()), f"error {error:.5f}", flush=True)
    finally:
        child.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    with tempfile.TemporaryDirectory() as tmp:
        bench(parser.parse_args(), tmp)
