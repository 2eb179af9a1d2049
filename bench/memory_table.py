"""How much memory does each GPU need? The README's table, from the arithmetic that main.py uses to
refuse what cannot fit (engine_memory, trainer_memory). Computed, not measured.

    python bench/memory_table.py [--gib 80] [--model FOLDER_OR_HUB_NAME]

A cell is what policy engine, judge engine and trainer need on each of their GPUs, in GiB; `x` marks
what has too little room on GPUs of --gib. Not in the table: with LoRA the trainer-side teacher is
the same model with its adapter off, whose pass over the hinted prompt keeps no activations and ends
before the step begins; with full weights its frozen copy is counted.
"""
import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main

MODELS = {  # hidden, layers, heads, inner, head table shared with the embedding; from the hub
    "Qwen3-1.7B": (2048, 28, 16, 6144, True), "Qwen3-4B": (2560, 36, 32, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 12_288, False), "Qwen3-14B": (5120, 40, 40, 17_408, False),
    "Qwen3-32B": (5120, 64, 64, 25_600, False)}
CONTEXTS = ((8192, 8192), (32_768, 16_384))  # window of the engines, longest trained turn
SETTINGS = [(n, rank) for rank in (16, 0) for n in (1, 2, 4, 8)]


def config(name):
    if name not in MODELS:
        return main.model_config(name)
    hidden, layers, heads, inner, tied = MODELS[name]
    return dict(hidden_size=hidden, num_hidden_layers=layers, vocab_size=151_936, head_dim=128,
                num_attention_heads=heads, num_key_value_heads=8, intermediate_size=inner,
                tie_word_embeddings=tied)


def knobs(n, rank, window, longest):
    """The flags of a machine with n GPUs -> main's Config."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(n)))
    flags = ["--lora-rank", rank, "--max-model-len", window, "--max-train-len", longest,
             "--token-budget", longest]
    own = rank or n > 2  # full weights: a judge model needs GPUs of its own
    return main.parse([str(x) for x in flags + ["--judge", "llm" if own else "lexicon"]])


def cell(cfg, shape, gib):
    """'policy / judge / trainer', each with an x where it does not fit."""
    out = {"judge": "-"}
    for role, ids, need, room in main.layout_rows(cfg, shape, lambda ids: gib):
        total = sum(need.values())
        whole = role == "trainer" or not (shape.heads % len(ids) or shape.kv % len(ids))
        out[role] = f"{total:.0f}{'' if total <= room and whole else 'x'}"
    return " / ".join(out[role] for role in ("policy", "judge", "trainer"))


def table(names, gib):
    yield "| model | window, longest trained turn | " + " | ".join(
        f"{n} GPU{'s' * (n > 1)}, {'LoRA' if rank else 'full'}" for n, rank in SETTINGS) + " |"
    yield "|---" * (len(SETTINGS) + 2) + "|"
    for name in names:
        shape = main.shape_of(config(name))
        for window, longest in CONTEXTS:
            cells = [cell(knobs(n, rank, window, longest), shape, gib) for n, rank in SETTINGS]
            yield f"| {name} | {window:,}, {longest:,} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=80, help="memory of one GPU, GiB")
    parser.add_argument("--model", action="append", help="instead of Qwen3's")
    args = parser.parse_args()
    print("\n".join(table(args.model or MODELS, args.gib)))
