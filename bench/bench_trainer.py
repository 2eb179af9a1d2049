"""What does an optimiser step cost, against the step as textbooks write it?

`ours` is trainer.Trainer: turns of similar length together, at most --token-budget padded tokens in
a micro-batch, and only response tokens meet the vocabulary. `textbook` pads the turns in the order
in which they come, takes the float32 logits of all positions, log_softmax, gather, mask, and sums
the same loss over the same LoRA with the same AdamW. All turns go through it at once, or, where
that is estimated to need more than --limit-gb, half as many at a time, and so on; how many, is
printed. `budget` is the textbook step with our micro-batches: what is left of the difference is the
logits. `trl` is the step of TRL's GRPOTrainer on the same token ids (trl_step.py), in another
virtual environment. All but `trl` compute the same gradient; that the norms agree is checked.

Prompts and responses are random tokens of lognormal lengths: mean --prompt and --response, sigma
0.5, at most three times the mean, and together at most what the preset trains (4,096 tokens on a
CPU, 16,384 on a GPU). Every turn has a hint and its teacher's log-probs: no teacher pass is timed.

Tokens/s are those of prompts and responses, without padding. Peak memory is the process's RSS
high-water mark (Linux), on CUDA torch.cuda.max_memory_allocated. Each run is a process of its own:
model, an unmeasured step (on a CPU of the two shortest turns), a measured one. A round runs ours
(A) and another way (B) in the order A B B A; printed are medians over all runs, then ratios per
round: their median and range.

    python bench/bench_trainer.py [--json FILE]       the demo model
    python bench/bench_trainer.py --prompt 4000 --dtypes bfloat16
    python bench/bench_trainer.py --model random-4b   on a GPU: Qwen3-4B's sizes, random weights
"""
import argparse
import importlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

GB, SIGMA = 1 << 30, 0.5
SHAPES = {  # made on the spot, nothing is downloaded: sizes for transformers' Qwen3Config
    "random-4b": dict(vocab_size=151_936, hidden_size=2560, intermediate_size=9728,
                      num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                      head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True),
    "tiny": dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                 max_position_embeddings=1024, tie_word_embeddings=True)}


class Failed(Exception):
    """A run did not do its work; the figures would mean nothing."""


# --------------------------------------------------------------------------------- what is trained


def knobs(model, device, dtype, **changes):
    """The config of a run, as trainer.py reads it, without an engine."""
    import main

    cfg = dict(vars(main.Config()))
    cfg |= main.PRESETS["gpu-lora" if device == "cuda" else "cpu"]
    # teacher: log-probs are given, so a frozen copy of the model would only take memory
    cfg |= dict(model=model, device=device, engine_dtype=dtype, teacher="engine", tis_cap=5.0,
                run_dir=tempfile.gettempdir())
    return cfg | changes


def sizes(model):
    """The numbers of a model's config.json, or of SHAPES."""
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model) / "config.json"
    if not path.is_file():
        raise Failed(f"--model {model}: no config.json there; a folder, or one of "
                     f"{', '.join(SHAPES)}")
    return json.loads(path.read_text())


def lengths(rng, prompt, response, longest):
    """-> (prompt, response) of one turn, in tokens."""

    def near(mean):
        drawn = rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)  # of this mean
        return round(min(max(drawn, 2), 3 * mean))

    r = min(near(response), longest // 2)
    return min(near(prompt), longest - r), r


def make_turns(batch, prompt, response, longest, vocab, seed=0, spread=True):
    """Turns as trainer.Trainer gets them: a hint each, the teacher's log-probs given."""
    from proxy import Turn

    rng, out = random.Random(seed), []
    for i in range(batch):
        p, r = lengths(rng, prompt, response, longest) if spread else (prompt, response)
        near = [-math.log(vocab) + rng.gauss(0, 0.3) for _ in range(r)]  # random tokens are rare
        out.append(asdict(Turn(
            f"t{i}", "bench", prompt_ids=[rng.randrange(vocab) for _ in range(p)],
            response_ids=[rng.randrange(vocab) for _ in range(r)], rollout_logp=near,
            teacher_logp=[x + rng.gauss(0, 1) for x in near], distil=True, finished=time.time())))
    return out


def size(turn):
    return len(turn["prompt_ids"]) + len(turn["response_ids"])


def at_once(turns, cfg, limit_gb):
    """How many turns the textbook step takes at once -> (number, GiB that all would need).

    Per padded token four float32 rows of V (logits, log_softmax, their gradients), and per layer
    what the backward pass needs: about 16 H + 6 I numbers with adapters (H hidden, I intermediate
    size), or H with gradient checkpointing. Within a tenth of what the demo model was seen to need.
    """
    s, width = sizes(cfg["model"]), 2 if cfg["engine_dtype"] == "bfloat16" else 4
    layer = 16 * s["hidden_size"] + 6 * s["intermediate_size"]
    kept = s["num_hidden_layers"] * layer
    if cfg["gradient_checkpointing"]:
        kept = s["num_hidden_layers"] * s["hidden_size"] + layer
    each = 16 * s["vocab_size"] + width * kept

    def need(n):
        parts = [turns[i : i + n] for i in range(0, len(turns), n)]
        return max(len(part) * max(map(size, part)) for part in parts) * each / GB

    n = len(turns)
    while n > 1 and need(n) > limit_gb:
        n //= 2
    return n, need(len(turns))


# ------------------------------------------------------------------------------------- the ways


def random_models(device):
    """From now on transformers makes the models of SHAPES by name, with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    given = AutoModelForCausalLM.from_pretrained

    def make(name, dtype, **more):
        if name not in SHAPES:
            return given(name, dtype=dtype, **more)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES[name]), dtype=dtype)

    AutoModelForCausalLM.from_pretrained = make


def ours(cfg, micro):
    import trainer

    return trainer.Trainer(cfg)


class Textbook:
    """Pad, logits of all positions in float32, log_softmax, gather, mask. micro: turns at once, or
    0 for the micro-batches that trainer.py would make."""

    def __init__(self, cfg, micro):
        import torch

        from trainer import load_lm

        torch.manual_seed(cfg.seed)
        self.cfg, self.micro = cfg, micro
        self.lm, _ = load_lm(cfg, cfg.device)
        if cfg.gradient_checkpointing:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})
            self.lm.enable_input_require_grads()
        self.lm.train()
        self.trained = [p for p in self.lm.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, lr=cfg.lr, betas=(0.9, 0.95),
                                           weight_decay=0.0)

    def train(self, turns):
        """One optimiser step -> loss and gradient norm."""
        import torch

        self.optimiser.zero_grad()
        total = 0.0
        for part in self.parts(turns):
            loss = self.loss(part) / len(turns)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.cfg.max_grad_norm)
        self.optimiser.step()
        return {"loss": total, "grad_norm": float(norm)}

    def parts(self, turns):
        if self.micro:
            return [turns[i : i + self.micro] for i in range(0, len(turns), self.micro)]
        from trainer import cut

        cuts = cut([size(t) for t in turns], self.cfg.token_budget)
        return [[turns[i] for i in part] for part in cuts]

    def pad(self, turns):
        """-> ids, attention, mask, rollout_logp, teacher_logp, each (B, T)"""
        import torch

        width = max(map(size, turns))
        rows = defaultdict(list)
        for t in turns:
            p, r, rest = len(t["prompt_ids"]), len(t["response_ids"]), width - size(t)
            rows["ids"].append(t["prompt_ids"] + t["response_ids"] + [0] * rest)
            rows["attention"].append([1] * (p + r) + [0] * rest)
            rows["mask"].append([0.0] * p + [1.0] * r + [0.0] * rest)
            for key in ("rollout_logp", "teacher_logp"):
                rows[key].append([0.0] * p + t[key] + [0.0] * rest)
        return [torch.tensor(x, device=self.cfg.device) for x in rows.values()]

    def loss(self, turns):
        """PPO's clipped loss with the distillation advantage, mean over each turn's tokens, summed
        over the turns."""
        import torch

        cfg = self.cfg
        ids, attention, *rest = self.pad(turns)  # (B, T) each
        mask, rollout_logp, teacher_logp = (x[:, 1:] for x in rest)  # (B, T-1) each
        with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.engine_dtype == "bfloat16"):
            logits = self.lm(input_ids=ids, attention_mask=attention, use_cache=False).logits
        logp = logits[:, :-1].float().log_softmax(-1)  # (B, T-1, V)
        logp = logp.gather(-1, ids[:, 1:, None])[..., 0]  # (B, T-1)
        a = (teacher_logp - logp.detach()).clamp(-cfg.opd_clip, cfg.opd_clip)
        rho = (logp - rollout_logp).clamp(-20, 20).exp()
        loss = torch.max(-rho * a, -rho.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * a)
        loss = torch.where(a < 0, torch.min(loss, -cfg.dual_clip * a), loss)
        return ((loss * mask).sum(1) / mask.sum(1)).sum()


WAYS = {"ours": ours, "textbook": Textbook, "budget": lambda cfg, micro: Textbook(cfg, 0)}

# ------------------------------------------------------------------------------- one measured run


def forget_peak(device):
    if device == "cuda":
        import torch

        return torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # then it is the peak since the process started


def peak_gb(device):
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / GB
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 / GB


def timed(way, turns, device):
    """One step -> its figures."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    metrics = way.train(turns)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = metrics.get("seconds") or time.perf_counter() - start  # TRL takes its own time
    return {"seconds": seconds, "tokens_per_s": sum(map(size, turns)) / seconds,
            "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


def warm_up(turns, device):
    """The turns of the unmeasured step: on a GPU all, for its allocator and kernels."""
    return turns if device == "cuda" else sorted(turns, key=size)[:2]


def unmeasured(way, turns):
    """A step at learning rate 0. Adam's first step moves every weight by the sign of its gradient,
    and where that is only rounding the ways would have gone apart before they are compared."""
    optimiser = getattr(way, "optimiser", None)  # TRL makes its own
    groups = optimiser.param_groups if optimiser else []
    kept = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    way.train([dict(t) for t in turns])
    for group, lr in zip(groups, kept, strict=True):
        group["lr"] = lr


def measure(job):
    """Model, an unmeasured step, a measured one -> figures."""
    import torch

    cfg, turns = SimpleNamespace(**job["cfg"]), job["turns"]
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    random_models(cfg.device)
    make = WAYS.get(job["way"]) or importlib.import_module("trl_step").Trl
    way = make(cfg, job["micro"])
    unmeasured(way, warm_up(turns, cfg.device))
    rest = torch.cuda.memory_allocated() / GB if cfg.device == "cuda" else rss_gb()
    forget_peak(cfg.device)
    figures = timed(way, turns, cfg.device)
    return figures | {"peak_gb": peak_gb(cfg.device), "rest_gb": rest,
                      "threads": torch.get_num_threads(), "versions": getattr(way, "versions", "")}


def rss_gb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GB


# ---------------------------------------------------------------------------------- the comparison


def config(args, dtype):
    cfg = knobs(args.model, args.device, dtype, lora_rank=args.lora_rank, lr=args.lr)
    return cfg | ({"token_budget": args.token_budget} if args.token_budget else {})


def run_job(args, dtype, way, turns, micro):
    """One run of one way -> its figures."""
    job = {"cfg": config(args, dtype), "turns": turns, "way": way, "micro": micro,
           "threads": args.threads}
    return launch(job, args.trl if way == "trl" else sys.executable)


def launch(job, python):
    """The job in a process of its own; its figures are the last line that it prints."""
    done = subprocess.run([python, __file__, "step"], input=json.dumps(job), text=True,
                          capture_output=True)
    if done.returncode:
        why = " (out of memory?)" if done.returncode == -9 else ""
        raise Failed(f"{job['way']} in {job['cfg']['engine_dtype']} ended with {done.returncode}"
                     f"{why}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def agree(dtype, runs):
    """Ours and the textbook's step have the same gradient norm, or they do not the same work."""
    norms = [row["grad_norm"] for name, rows in runs.items() if name != "trl" for row in rows]
    limit = 1e-3 if dtype == "float32" else 0.1
    if max(norms) > (1 + limit) * min(norms):
        raise Failed(f"{dtype}: the gradient norms differ: {norms}")


def compare(rounds):
    """[(ours' two runs, the other's two)] -> ratios ours / other: median and range."""
    out = {}
    for key in ("tokens_per_s", "peak_gb"):
        ratios = [statistics.mean(r[key] for r in a) / statistics.mean(r[key] for r in b)
                  for a, b in rounds]
        out[key] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return out


def bench(args, turns):
    """-> one entry per dtype and other way."""
    cells = []
    for dtype in args.dtypes:
        micro, whole_gb = at_once(turns, config(args, dtype), args.limit_gb)
        for other in args.against:
            runs, rounds = {"ours": [], other: []}, []
            for i in range(args.rounds):
                print(f"{dtype}, {other}: round {i + 1} of {args.rounds}", file=sys.stderr)
                a_b_b_a = [run_job(args, dtype, name, turns, args.micro or micro)
                           for name in ("ours", other, other, "ours")]
                rounds.append((a_b_b_a[::3], a_b_b_a[1:3]))
                runs["ours"] += a_b_b_a[::3]
                runs[other] += a_b_b_a[1:3]
            agree(dtype, runs)
            cells.append({"dtype": dtype, "other": other, "micro": args.micro or micro,
                          "at_once_gb": whole_gb, "versions": runs[other][0]["versions"],
                          "threads": runs["ours"][0]["threads"],
                          "ways": {name: medians(rows) for name, rows in runs.items()},
                          "ratio": compare(rounds)})
    return cells


def medians(rows):
    return {key: statistics.median(row[key] for row in rows)
            for key in ("seconds", "tokens_per_s", "peak_gb", "rest_gb", "loss", "grad_norm")}


def show(cells, n):
    print(f"{'':20} {'tokens/s':>9} {'s/step':>8} {'peak GiB':>8} {'at rest':>8} {'|g|':>10}")
    for cell in cells:
        for name, row in cell["ways"].items():
            print(f"{cell['dtype']:>9} {name:10} {row['tokens_per_s']:9.1f} {row['seconds']:8.2f} "
                  f"{row['peak_gb']:8.2f} {row['rest_gb']:8.2f} {row['grad_norm']:10.4g}")
        speed, memory = cell["ratio"]["tokens_per_s"], cell["ratio"]["peak_gb"]
        how = (f"all {n} turns at once" if cell["micro"] == n else f"{cell['micro']} turns at once "
               f"(all {n} need about {cell['at_once_gb']:.0f} GiB)")
        how = "our micro-batches" if cell["other"] == "budget" else how
        print(f"  ours / {cell['other']} ({how}): tokens/s x {speed['median']:.2f} "
              f"({speed['min']:.2f} to {speed['max']:.2f}), peak memory x {memory['median']:.2f} "
              f"({memory['min']:.2f} to {memory['max']:.2f})")
        if cell["versions"]:
            print(f"  {cell['versions']}")


# ------------------------------------------------------------------------------------- the command


def flags(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument

    def names(text):
        return text.split(",")

    add("what", nargs="?", default="run", choices=("run", "step"),
        help="run (default): measure; step: one run, its job on stdin")
    add("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"),
        help=f"a folder, or {' or '.join(SHAPES)} (random weights) [the demo model]")
    add("--prompt", type=int, default=700, help="mean tokens of a prompt [700]")
    add("--response", type=int, default=100, help="mean tokens of a response [100]")
    add("--batch", type=int, default=16, help="turns per step [16]")
    add("--lora-rank", type=int, default=16, help="0: full weights [16]")
    add("--lr", type=float, default=2e-4, help="learning rate [2e-4]")
    add("--dtypes", type=names, default=["float32", "bfloat16"], metavar="NAME,NAME",
        help="[float32,bfloat16]")
    add("--against", type=names, metavar="NAME,NAME", default=["textbook"],
        help="of textbook, budget [textbook]")
    add("--micro", type=int, default=0, help="turns that the textbook step takes at once [as said]")
    add("--limit-gb", type=float, default=20.0, help="GiB for the textbook step [20]")
    add("--token-budget", type=int, default=0, help="padded tokens per micro-batch of ours "
        "[preset: 2048 on a CPU, 16384 on a GPU]")
    add("--rounds", type=int, default=3, help="of A B B A per dtype and other way [3]")
    add("--threads", type=int, default=0, help="torch's threads [its own choice]")
    add("--seed", type=int, default=0, help="of the turns [0]")
    add("--device", default="", help="cpu or cuda [cuda if there is one]")
    add("--trl", metavar="PYTHON", help="python of a virtual environment with TRL: measures it too")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args(argv)


def run(args):
    import main

    args.device = args.device or ("cuda" if main.visible_gpus() else "cpu")
    args.against = list(dict.fromkeys(args.against + ["trl"] * bool(args.trl)))
    if unknown := set(args.against) - {*WAYS, "trl"} | {"ours"} & set(args.against):
        raise Failed(f"--against {','.join(unknown)}: textbook or budget")
    longest = min(main.PRESETS["gpu-lora" if args.device == "cuda" else "cpu"]["max_train_len"],
                  sizes(args.model)["max_position_embeddings"])
    turns = make_turns(args.batch, args.prompt, args.response, longest,
                       sizes(args.model)["vocab_size"], args.seed)
    told = {"model": Path(args.model).name, "device": args.device, "lora_rank": args.lora_rank,
            "turns": len(turns), "seed": args.seed, "rounds": args.rounds,
            "prompt_mean": statistics.mean(len(t["prompt_ids"]) for t in turns),
            "response_mean": statistics.mean(len(t["response_ids"]) for t in turns),
            "longest": max(map(size, turns)), "tokens": sum(map(size, turns))}
    cells = bench(args, turns)
    print(f"{told['model']} on {args.device}, {cells[0]['threads']} threads, "
          f"{'LoRA ' + str(args.lora_rank) if args.lora_rank else 'full weights'}, {args.rounds} "
          f"rounds: {len(turns)} turns of {told['prompt_mean']:.0f} + {told['response_mean']:.0f} "
          f"tokens (lognormal, sigma {SIGMA}, seed {args.seed}), the longest {told['longest']}")
    show(cells, len(turns))
    if args.json:
        args.json.write_text(json.dumps(told | {"cells": cells}, indent=1))


if __name__ == "__main__":
    args = flags()
    try:
        print(json.dumps(measure(json.load(sys.stdin)))) if args.what == "step" else run(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except Failed as error:
        sys.exit(f"no figures: {error}")
