"""How much memory does the vocabulary cost in a training step of one long turn?

`ours` is trainer.Trainer.train on one turn of --tokens, --response of them the reply; `alone` is
the same step with the head's product left out: whatever the step reads of a token's logits is taken
from the first columns of its hidden state instead. Weights, gradients, Adam's moments, activations
and the frozen teacher are the same in both. The model is random and made on the spot: small, but
with a vocabulary of --vocab, tied as in small Qwen3. (tokens, vocabulary) float32 logits would take
16,000 x 150,000 x 4 bytes = 8.9 GiB for one copy; a step as textbooks write it holds four.

Each step is a process of its own: libraries, model, an unmeasured step of 64 tokens (Adam's moments
are there then), the measured one. Peak memory is the RSS high-water mark (Linux) less what the
libraries took, in GiB. Beside it the same by arithmetic, see `by_formula`; `ratio` is ours / alone
as measured. The step takes place on the CPU; of a GPU's rules it takes gradient checkpointing.

    python bench/bench_memory.py [--json FILE]              LoRA and full weights, two dtypes
    python bench/bench_memory.py --response 15900           nearly all of the turn is the reply
    python bench/bench_memory.py --chunks 64,256,1024       so many tokens meet the vocabulary
    python bench/bench_memory.py --topk 20,full             the teacher's logits too
"""
import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from bench_trainer import (
    GB,
    SHAPES,
    Failed,
    forget_peak,
    knobs,
    make_turns,
    peak_gb,
    random_models,
    rss_gb,
    timed,
)

# float32 rows of V that are alive at once in the backward pass of a chunk: counted in the code, and
# the slope of the measured peaks over --chunks agrees
COPIES = {"": 3, "20": 5, "full": 5}
TEXTBOOK = 4  # logits, log_softmax and their gradients, of all tokens
EXACT = {"MALLOC_MMAP_THRESHOLD_": "1048576"}  # glibc gives a freed tensor's memory back at once


def shape(args):
    """Sizes for transformers' Qwen3Config."""
    return dict(vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden,
                num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=2,
                head_dim=64, max_position_embeddings=args.tokens, tie_word_embeddings=True)


# ------------------------------------------------------------------------------ what it should take


def by_formula(sizes, tokens, response, rank, dtype, checkpointing, topk, chunk):
    """-> GiB of weights, activations, one chunk of logits, all of ours, the textbook's step.

    P parameters (A of an adapter of rank 1), b bytes per number, T tokens, R of them the reply,
    L layers, H hidden, I intermediate size, V vocabulary, c = min(chunk, R), k = COPIES:
    weights      b P + 16 rank A with an adapter; 16 P (weight, gradient, two moments) in full, and
                 b P more for the frozen teacher of --topk
    activations  T b L (16 H + 6 I); with checkpointing T b L H, and T b (16 H + 6 I) inside a layer
    logits       4 c V for one copy of a chunk, k of them in the head's backward pass
    ours         weights + activations + logits; with checkpointing the inside of a layer and the
                 logits are not there at the same time: the larger counts
    textbook     weights + activations + TEXTBOOK x 4 T V
    """
    import main

    s, b = main.shape_of(sizes), 2 if dtype == "bfloat16" else 4
    copy = 0 if rank or not topk else b * s.params
    weights = b * s.params + 16 * rank * s.adapter if rank else 16 * s.params + copy
    inside = tokens * b * (16 * s.hidden + 6 * s.inner)
    kept = tokens * b * s.layers * s.hidden if checkpointing else s.layers * inside
    logits = 4 * min(chunk, response) * s.vocab
    head = COPIES[topk] * logits
    ours = weights + kept + (max(inside, head) if checkpointing else head)
    activations = kept + inside * checkpointing
    whole = weights + activations + TEXTBOOK * 4 * tokens * s.vocab
    return {key: value / GB for key, value in
            dict(weights=weights, activations=activations, chunk_of_logits=logits, ours=ours,
                 textbook=whole).items()}


# ---------------------------------------------------------------------------------- what it takes


def without_vocabulary():
    """From now on a step reads its numbers from hidden states (n, H): no logits (n, V)."""
    import torch

    import trainer

    def first(n):
        return lambda h, logits, at: tuple(h[:, i].float() for i in range(n))

    def top(k):
        return lambda h, logits, at: (h[:, :k].float(), torch.arange(k).expand(len(h), k))

    trainer.chosen, trainer.top = lambda targets: first(1), top
    trainer.distilled_top = trainer.distilled_full = lambda *given: first(2)


def one_turn(prompt, response, vocab, topk):
    """What Trainer.train gets, with the teacher's log-probs, or a hint that it has to score."""
    turn, = make_turns(1, prompt, response, prompt + response, vocab, spread=False)
    if topk:
        turn |= dict(hint="h", hints=["h"], hinted_prompt_ids=[turn["prompt_ids"]])
    return turn


def measure(job):
    """One step, in this process -> figures."""
    import peft  # noqa: F401 # what the libraries take is not the step's
    import torch
    import transformers  # noqa: F401

    import trainer

    SHAPES["random"] = job["sizes"]
    random_models("cpu")
    cfg, libraries = SimpleNamespace(**job["cfg"]), rss_gb()
    if job["way"] == "alone":
        without_vocabulary()
    way = trainer.Trainer(cfg)
    for policy in filter(None, (way.policy, way.teacher)):
        policy.chunk = job["chunk"] or policy.chunk
    prompt, response, vocab = job["prompt"], job["response"], job["sizes"]["vocab_size"]
    way.train([one_turn(32, 32, vocab, cfg.topk)])
    forget_peak("cpu")
    start = time.process_time()
    figures = timed(way, [one_turn(prompt, response, vocab, cfg.topk)], "cpu")
    return figures | {"cpu_seconds": time.process_time() - start, "libraries_gb": libraries,
                      "peak_gb": peak_gb("cpu") - libraries, "chunk": way.policy.chunk,
                      "threads": torch.get_num_threads()}


def launch(job):
    """The job in a process of its own; its figures are the last line that it prints."""
    done = subprocess.run([sys.executable, __file__, "step"], input=json.dumps(job), text=True,
                          capture_output=True, env=os.environ | EXACT)
    if done.returncode:
        why = " (out of memory?)" if done.returncode == -9 else ""
        raise Failed(f"{job['way']} ended with {done.returncode}{why}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------- the comparison


def bench(args):
    """One `alone` per setting, and `ours` with each chunk -> rows."""
    sizes = shape(args)
    for response, rank, dtype, checkpointing, topk in itertools.product(
            args.response, args.ranks, args.dtypes, args.checkpointing, args.topk):
        cfg = knobs("random", "cpu", dtype, lora_rank=rank, gradient_checkpointing=checkpointing,
                    topk=topk, teacher="trainer" if topk else "engine", lr=1e-5)
        job = dict(sizes=sizes, cfg=cfg, prompt=args.tokens - response, response=response)
        alone = launch(job | dict(way="alone", chunk=0))
        for chunk in args.chunks:
            ours = launch(job | dict(way="ours", chunk=chunk))
            formula = by_formula(sizes, args.tokens, response, rank, dtype, checkpointing, topk,
                                 ours["chunk"])
            yield dict(response=response, rank=rank, dtype=dtype, checkpointing=checkpointing,
                       topk=topk, ours=ours, alone=alone, by_formula=formula,
                       ratio=ours["peak_gb"] / alone["peak_gb"])


HEADER = ("reply weights dtype    ckpt topk chunk |  ours alone ratio  s ours s alone | "
          "by formula: weights + activations, chunk of logits -> ours | textbook")


def line(row):
    ours, alone, f = row["ours"], row["alone"], row["by_formula"]
    weights = f"LoRA {row['rank']}" if row["rank"] else "full"
    on = "on" if row["checkpointing"] else "off"
    return (f"{row['response']:5} {weights:7} {row['dtype']:8} {on:4} {row['topk'] or '-':4} "
            f"{ours['chunk']:5} | {ours['peak_gb']:5.2f} {alone['peak_gb']:5.2f} "
            f"{row['ratio']:5.2f} {ours['cpu_seconds']:7.0f} {alone['cpu_seconds']:7.0f} | "
            f"{f['weights']:.2f} + {f['activations']:.2f}, {COPIES[row['topk']]} x "
            f"{f['chunk_of_logits']:.2f} -> {f['ours']:5.2f} | {f['textbook']:5.1f}")


# ------------------------------------------------------------------------------------- the command


def flags(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument

    def numbers(text):
        return [int(x) for x in text.split(",")]

    def names(text):
        return ["" if x == "none" else x for x in text.split(",")]

    def switches(text):
        return [{"on": True, "off": False}[x] for x in text.split(",")]

    add("what", nargs="?", default="run", choices=("run", "step"),
        help="run (default): measure; step: one step, its job on stdin")
    add("--tokens", type=int, default=16_000, help="of the turn, prompt and reply [16000]")
    add("--response", type=numbers, default=[4000], metavar="N,N", help="of them the reply [4000]")
    add("--vocab", type=int, default=150_000, help="[150000]")
    add("--hidden", type=int, default=512, help="hidden size, a multiple of 64 [512]")
    add("--layers", type=int, default=4, help="[4]")
    add("--ranks", type=numbers, default=[16, 0], metavar="N,N", help="0: full weights [16,0]")
    add("--dtypes", type=names, default=["float32", "bfloat16"], metavar="NAME,NAME",
        help="[float32,bfloat16]")
    add("--checkpointing", type=switches, default=[True], metavar="on,off", help="[on]")
    add("--topk", type=names, default=[""], metavar="K,K", help="of none, 20, full [none]")
    add("--chunks", type=numbers, default=[0], metavar="N,N", help="0: trainer.py's own [0]")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args(argv)


def run(args):
    print(f"a turn of {args.tokens:,} tokens, vocabulary {args.vocab:,}, hidden {args.hidden}, "
          f"{args.layers} layers; GiB\n{HEADER}", flush=True)
    rows = []
    for row in bench(args):
        print(line(row), flush=True)
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps({"tokens": args.tokens} | shape(args) | {"rows": rows},
                                        indent=1))


if __name__ == "__main__":
    args = flags()
    try:
        print(json.dumps(measure(json.load(sys.stdin)))) if args.what == "step" else run(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except Failed as error:
        sys.exit(f"no figures: {error}")
