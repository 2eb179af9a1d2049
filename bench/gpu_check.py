"""What a single GPU does with the trainer: one JSON line per figure. Run by gpu_check.sh.

No network, no engine, no model on disk: the weights are random, of Qwen3-4B's sizes.
  step lora, step full    steps on 8 turns of 1,024 tokens
  step lora, one turn     the same on one turn of 8,192
  fsdp2 lora, fsdp2 full  as the first two, under FSDP2 with one rank, against them
  log-probs               of 8,000 response tokens, forward and backward: in chunks against at once

Model FLOPs of a step, without what gradient checkpointing computes again, over all turns of
T = P + R tokens (prompt, response), with L layers, A = heads x head size, N weights in the layers'
matrices, and H V in the head, which only response tokens meet:
    k (N T + H V R) + 6 L A T^2     k = 6: forward 2, gradients to activations 2, to weights 2;
                                    k = 4 with adapters, whose own work is left out
    (causal attention: two products of 2 A T^2 / 2 per layer forward, twice that backward)
mfu is that, divided by the seconds and the GPU's dense bf16 rate by its data sheet; of_matmul
divides by what a large bf16 product reaches here.
"""
import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
from bench_trainer import (
    SHAPES,
    forget_peak,
    knobs,
    make_turns,
    peak_gb,
    random_models,
    size,
    timed,
)

import trainer as T
from sync import free_port

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
FULL = dict(shape="random-4b", turns=(8, 900, 124), long=(1, 8000, 192), replies=(8, 24, 1000),
            product=8192, chunk=2048)
TINY = dict(shape="tiny", turns=(4, 24, 8), long=(1, 200, 8), replies=(4, 8, 24), product=256,
            chunk=10)


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait():
    if device() == "cuda":
        torch.cuda.synchronize()


def turns_of(plan, key):
    batch, prompt, response = plan[key]
    return make_turns(batch, prompt, response, prompt + response,
                      SHAPES[plan["shape"]]["vocab_size"], spread=False)


def config(plan, rank):
    """The GPU preset's config, also on a CPU, so that --tiny takes the same path."""
    cfg = knobs(plan["shape"], "cuda", "bfloat16", lora_rank=rank, lr=1e-4 if rank else 1e-6)
    return SimpleNamespace(**cfg | {"device": device()})


# ------------------------------------------------------------------------------------ the figures


def flops(shape, turns, rank):
    """The formula above."""
    s = SimpleNamespace(**SHAPES[shape])
    a, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    layer = s.hidden_size * (2 * a + 2 * kv + 3 * s.intermediate_size)
    n, k = s.num_hidden_layers * layer, 4 if rank else 6
    return sum(k * (n * size(t) + s.hidden_size * s.vocab_size * len(t["response_ids"]))
               + 6 * s.num_hidden_layers * a * size(t) ** 2 for t in turns)


def machine(plan):
    """-> name, versions, and the rate of a square bf16 product, FLOP/s"""
    n = plan["product"]
    a, b = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    for i in range(13):
        if i == 3:
            wait()
            start = time.perf_counter()
        a @ b
    wait()
    plan["matmul"] = 10 * 2 * n**3 / (time.perf_counter() - start)
    name = torch.cuda.get_device_name() if device() == "cuda" else "cpu"
    plan["peak"] = next((v for k, v in PEAKS.items() if k in name), None)
    return {"device": name, "torch": torch.__version__, "matmul_tflops": plan["matmul"] / 1e12,
            "datasheet_tflops": plan["peak"] and plan["peak"] / 1e12, "model": plan["shape"]}


def steps(plan, rank, key="turns", times=3):
    """One unmeasured step and `times` measured ones -> figures."""
    cfg, turns = config(plan, rank), turns_of(plan, key)
    torch.manual_seed(cfg.seed)
    trainer = T.Trainer(cfg)
    first = timed(trainer, turns, device())
    forget_peak(device())
    runs = [timed(trainer, turns, device()) for _ in range(times)]
    seconds = statistics.median(r["seconds"] for r in runs)
    work, tokens = flops(plan["shape"], turns, rank), sum(map(size, turns))
    out = {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
           "peak_gb": peak_gb(device()), "model_tflop": work / 1e12, "loss": first["loss"],
           "grad_norm": first["grad_norm"], "last_grad_norm": runs[-1]["grad_norm"],
           "sharded": sum(type(m).__name__.startswith("FSDP") for m in trainer.model.modules())}
    if "matmul" in plan:
        out["mfu"] = plan["peak"] and work / seconds / plan["peak"]
        out["of_matmul"] = work / seconds / plan["matmul"]
    return out


def log_probs(plan):
    """Forward and backward of the policy over long responses, in chunks and at once."""
    cfg, turns = config(plan, 16), turns_of(plan, "replies")
    trainer, out, seen = T.Trainer(cfg), {"chunk": plan["chunk"]}, []
    batch = T.collate([t["prompt_ids"] for t in turns], [t["response_ids"] for t in turns],
                      device())
    for name, chunk in (("chunks", plan["chunk"]), ("at_once", 1 << 30)):
        trainer.policy.chunk = chunk
        for _ in range(2):  # the first is not measured
            trainer.optimiser.zero_grad()
            wait()
            forget_peak(device())
            start = time.perf_counter()
            logp = trainer.model(batch)
            trainer.acc.backward(logp.sum())
            wait()
            out[f"{name}_s"], out[f"{name}_gb"] = time.perf_counter() - start, peak_gb(device())
        grads = [p.grad.flatten() for p in trainer.policy.parameters() if p.grad is not None]
        seen.append((logp.detach(), torch.cat(grads)))
        del logp
    (logp, grad), (logp_2, grad_2) = seen
    out |= {"tokens": len(logp), "logp_difference": float((logp - logp_2).abs().mean()),
            "gradient_difference": float((grad - grad_2).norm() / grad_2.norm())}
    return out | {"ok": out["logp_difference"] < 0.01 and out["gradient_difference"] < 0.05}


# ---------------------------------------------------------------------------------- FSDP2, one rank


def sharded_accelerator(cfg):
    """trainer.make_accelerator for several ranks, where there is one. (Without a GPU accelerate
    would fall back to DDP, or with one rank to nothing.)"""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    if cfg.device == "cpu" and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    acc = Accelerator(mixed_precision="bf16", cpu=cfg.device == "cpu",
                      fsdp_plugin=(plugin := T.fsdp_plugin(cfg)))
    acc.state.distributed_type, acc.state.fsdp_plugin = DistributedType.FSDP, plugin
    return acc


def as_rank(plan):
    """The steps under FSDP2, in a process of its own: adapters, then full weights, a line each."""
    T.make_accelerator = sharded_accelerator
    for rank in (16, 0):
        print(json.dumps(attempt(lambda rank=rank: steps(plan, rank))), flush=True)
    torch.distributed.destroy_process_group()


def start_rank(plan):
    """Start that process -> its two rows."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port())}
    command = [sys.executable, __file__, "--rank"] + ["--tiny"] * (plan["shape"] == "tiny")
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True,
                          timeout=150)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def against(out, plain):
    """The figures of FSDP2's steps, and how they differ from those of the plain steps."""
    if "error" in out or "error" in plain:
        return out
    out |= {f"{k}_over_plain": out[k] / plain[k] for k in ("seconds", "peak_gb")}
    out |= {f"{k}_difference": abs(out[k] / plain[k] - 1) for k in ("grad_norm", "last_grad_norm")}
    return out | {"ok": out["sharded"] > 0 and out["grad_norm_difference"] < 0.05}


# ------------------------------------------------------------------------------------- the command


def attempt(figure):
    """A figure, or why there is none: with too little memory for one, the others still count."""
    start = time.perf_counter()
    try:
        row = figure()
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}"[-1500:]}
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
    return row | {"took_s": time.perf_counter() - start}


def tell(name, row):
    """-> is it there, and as it should be?"""
    print(json.dumps({"figure": name, **row}), flush=True)
    return "error" not in row and row.get("ok", True)


def figures(plan):
    good, plain = tell("machine", attempt(lambda: machine(plan))), []
    for name, rank in (("lora", 16), ("full", 0)):
        plain.append(attempt(lambda rank=rank: steps(plan, rank)))
        good &= tell(f"step {name}", plain[-1])
    good &= tell("step lora, one turn", attempt(lambda: steps(plan, 16, "long")))
    good &= tell("log-probs", attempt(lambda: log_probs(plan)))
    try:
        rows = start_rank(plan)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        rows = [{"error": str(error)}] * 2
    for name, one, other in zip(("lora", "full"), rows, plain, strict=True):
        good &= tell(f"fsdp2 {name}", against(one, other))
    return good


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if device() == "cpu" and not args.tiny:
        sys.exit("gpu_check: torch sees no GPU; --tiny runs the same on a CPU")
    random_models(device())
    plan = dict(TINY if args.tiny else FULL)
    if args.rank:
        as_rank(plan)
    elif not figures(plan):
        sys.exit(1)


if __name__ == "__main__":
    main()
