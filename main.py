"""The one command: `python main.py --mode opd`. Config, start-up, queues, supervision, shut-down.

Place in the system: starts the policy engine (sync.py), the judge threads (judge.py), the proxy
(proxy.py) and the trainer (trainer.py), holds the queue that joins them, and ends them all.

Reading order: Config -> main -> start -> supervise -> finish.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import secrets
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, fields
from multiprocessing import managers
from pathlib import Path

import urllib3

import proxy
from judge import HINT_CHOICE, JUDGES, SCHEDULES, JudgeThreads, SampleQueue, decide
from sync import (
    BASE,
    ENGINE_FLAGS,
    HERE,
    ROUTES,
    Child,
    engine_command,
    engine_env,
    free_port,
    load_extra,
    parse_cores,
    through_memory,
    wait_ready,
)

AUTO, GIB = "auto", 1 << 30
LOGITS = 1 << 26  # numbers (tokens x vocabulary) that the trainer makes at once: 256 MiB a copy
DEMO_MODEL = HERE / "models" / "SmolLM2-135M-Instruct"


class Problem(Exception):
    """Something the user can change; shown as one sentence, exit code 1."""


def knob(default, group, text, choices=None):
    return field(default=default, metadata={"group": group, "help": text, "choices": choices})


@dataclass
class Config:
    """Every knob, once. `auto` is filled from PRESETS for the hardware found."""

    mode: str = knob("opd", "run", "learn from scores, from hints, or both",
                     ("rl", "opd", "combine"))
    steps: int = knob(0, "run", "end training after this many updates (0: never)")
    simulate: str = knob("", "run", "talk to simulated users of this persona, then end: concise, "
                         "student, assistant_teacher, teacher, drifting")
    max_turns: int = knob(0, "run", "questions that the simulated users ask (0: no limit)")
    users: int = knob(8, "run", "simulated users at once")
    held_out: int = knob(2, "run", "replies to each held-out question, before and after (0: none)")
    lockstep: bool = knob(False, "run", "simulated users wait while a batch is being trained")
    allocation: str = knob("uniform", "run", "what simulated users ask next: uniform, curriculum, "
                           "boundary, reinforce-ada")
    drift_at: int = knob(0, "run", "question at which a drifting user changes its wish (0: half of "
                         "--max-turns)")
    user_url: str = knob("", "run", "an OpenAI-compatible URL ending in /v1 whose model words the "
                         "simulated users' reactions (key in env USER_KEY)")
    user_model: str = knob("", "run", "model name at that URL")
    save_every: int = knob(AUTO, "run", "updates between checkpoints of the training (0: none; "
                           "auto: 10 with an adapter, none of full weights)")
    resume: str = knob("", "run", "go on with the run in this directory, from its last checkpoint; "
                       "other flags change its config")
    run_dir: str = knob("", "run", "where everything is recorded (default runs/<time>-<mode>)")
    seed: int = knob(0, "run", "for questions, sampling and initial adapter")
    extra: str = knob("", "run", "a Python file that may add rows to LOSSES, SCHEDULES, "
                      "HINT_CHOICE, PERSONAS, ROUTES")
    tracker: str = knob("", "run", "a tracker that accelerate knows, such as tensorboard or wandb")

    model: str = knob(AUTO, "model", "a folder or a name on the Hugging Face hub")
    engine_dtype: str = knob(AUTO, "model", "arithmetic of engine and trainer (auto: bfloat16, but "
                             "float32 on a CPU that has no units for it)",
                             (AUTO, "bfloat16", "float32"))
    max_model_len: int = knob(AUTO, "model", "window: prompt + reply, tokens")
    max_tokens: int = knob(AUTO, "model", "reply limit for clients that give none, tokens")
    tool_parser: str = knob(AUTO, "model", "vLLM's --tool-call-parser (auto: by model family; '': "
                            "tools are shown to the model, calls are not parsed)")
    reasoning_parser: str = knob(AUTO, "model", "vLLM's --reasoning-parser (auto: by family)")
    temperature: float = knob(1.0, "model", "of sampling, log-probs and teacher alike")

    host: str = knob("127.0.0.1", "serving", "address to listen on; others than loopback "
                     "need a key")
    port: int = knob(30000, "serving", "port to listen on")
    served_name: str = knob("policy", "serving", "model name that clients see")
    api_key_file: str = knob("", "serving", "file with the key for clients (or env "
                             "OPENCLAW_API_KEY)")
    client_sampling: str = knob("ignore", "serving", "ignore: main turns get the run's sampling; "
                                "respect: as asked, untrained where it differs",
                                ("ignore", "respect"))
    pause: str = knob("hold", "serving", "while full weights are swapped: hold requests, or refuse "
                      "them with 503", ("hold", "reject"))
    session_timeout: float = knob(1800, "serving", "silence after which a session is over, s")
    max_requests: int = knob(64, "serving", "requests at once; further ones get 429")
    max_body_mb: int = knob(16, "serving", "largest request body, MiB")
    request_timeout: float = knob(600, "serving", "longest silence of the engine, s")
    overload: str = knob("serve", "serving", "when the trainer is behind: serve untrained, or "
                         "refuse with 429", ("serve", "429"))

    judge: str = knob(AUTO, "judging", "lexicon needs no model and reads approval and "
                      "correction words", (AUTO, *JUDGES))
    judge_url: str = knob("", "judging", "an OpenAI-compatible URL ending in /v1 (key in env "
                          "JUDGE_KEY)")
    judge_model: str = knob("", "judging", "model name at that URL")
    teacher_url: str = knob("", "judging", "a vLLM with the policy's vocabulary that scores "
                            "replies under the hinted prompt (key in env TEACHER_KEY)")
    teacher_model: str = knob("", "judging", "model name at that URL")
    judge_timeout: float = knob(60, "judging", "longest time for one vote, s")
    judge_max_tokens: int = knob(1024, "judging", "answer limit of the judge, tokens")
    judge_threads: int = knob(8, "judging", "turns judged at once")
    votes: int = knob(0, "judging", "votes per turn (0: 3 scores in rl; else 1 score and 3 hints)")
    eval: bool = knob(True, "judging", "score turns in opd too, for reporting")
    hint_choice: str = knob("longest", "judging", "row of judge.HINT_CHOICE: which valid hint "
                            "teaches")
    teacher: str = knob(AUTO, "judging", "who scores replies under the hinted prompt: the trainer "
                        "(base model) or the judge's engine", (AUTO, "trainer", "engine"))
    train_cut: str = knob("all", "judging", "what replies cut by the limit give: all parts, the "
                          "hint part, nothing", ("all", "hint", "none"))
    at_least_one: bool = knob(False, "judging", "rl: keep a session's first turn even if it "
                              "scored 0")

    lora_rank: int = knob(AUTO, "training", "rank of the adapter; 0 trains the full weights")
    lr: float = knob(AUTO, "training", "AdamW's learning rate")
    batch_size: int = knob(16, "training", "trainable turns per update")
    loss: str = knob("ppo", "training", "row of trainer.LOSSES: ppo, decoupled")
    tis_cap: float = knob(AUTO, "training", "bound of pi_p / pi_b with --loss decoupled (auto: 5)")
    updates_per_batch: int = knob(1, "training", "optimiser updates on each batch")
    kl_coef: float = knob(0.0, "training", "weight of k3 against the base model")
    topk: str = knob("", "training", "distil over the teacher's K likeliest tokens and a tail, or "
                     "over the full vocabulary, instead of the sampled token: K or full")
    freshness_half_life: float = knob(0.0, "training", "halve a turn's weight with every so many "
                                      "seconds of its age (0: off)")
    loss_agg: str = knob("sample", "training", "mean over tokens then samples, or over all tokens",
                         ("sample", "token"))
    w_rl: float = knob(1.0, "training", "weight of the score")
    w_opd: float = knob(1.0, "training", "weight of the hint")
    opd_clip: float = knob(5.0, "training", "bound of teacher_logp - prox_logp per token")
    clip_low: float = knob(0.2, "training", "ratio is clipped below 1 - this")
    clip_high: float = knob(0.28, "training", "ratio is clipped above 1 + this")
    dual_clip: float = knob(10.0, "training", "bound of the loss per token for bad turns, "
                             "times |A|")
    max_grad_norm: float = knob(1.0, "training", "gradient clipping")
    token_budget: int = knob(AUTO, "training", "padded tokens per micro-batch")
    max_train_len: int = knob(AUTO, "training", "longest turn to train (prompt + reply, tokens); "
                              "longer ones are dropped as too_long")
    gradient_checkpointing: bool = knob(AUTO, "training", "recompute activations to save memory")
    cpu_offload: bool = knob(False, "training", "GPUs: weights, gradients and moments of the "
                             "trainer wait in main memory (FSDP2)")
    compile: bool = knob(False, "training", "torch.compile the model's layers: slow at first")
    schedule: str = knob("greedy", "training", "order of training: " + ", ".join(SCHEDULES))
    window: int = knob(64, "training", "places looked at by --schedule windowed")
    max_staleness: int = knob(4, "training", "oldest turn to train, in updates (-1: any age)")
    max_wait: float = knob(0, "training", "train a smaller batch after this long without a new "
                           "sample, s (0: never)")
    sync_every: int = knob(1, "training", "updates between weight syncs, or auto")

    gpus: str = knob(AUTO, "hardware", "GPUs for trainer, policy engine, judge engine, "
                     "such as 4,2,2")
    policy_url: str = knob("", "hardware", "a vLLM that you started for the policy (key in env "
                           "POLICY_KEY); it must see --run-dir, and main says which flags it needs")
    lora_slots: int = knob(4, "hardware", "adapter versions that can be in use at once")
    gpu_share: float = knob(AUTO, "hardware", "part of a GPU's memory for an engine (auto: 0.4 "
                            "where the trainer shares it, else 0.85)")
    kv_cache_gb: int = knob(1, "hardware", "CPU engine: memory for keys and values, GiB")
    engine_cores: str = knob(AUTO, "hardware", "CPU engine: cores, such as 0-3, or all (auto: the "
                             "first half; a small model gains little from more)")
    trainer_cores: str = knob(AUTO, "hardware", "CPU trainer: cores, or all (auto: the other half)")


def cpu_dtype(path="/proc/cpuinfo"):
    """bfloat16 where the CPU has units for it. Elsewhere it is emulated, and float32 trains and
    serves about three times as fast (LOG.md)."""
    words = set(Path(path).read_text().split()) if Path(path).exists() else set()
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


CPU = dict(model=str(DEMO_MODEL), max_tokens=96, max_model_len=4096, engine_dtype=cpu_dtype(),
           judge="lexicon", token_budget=2048, max_train_len=4096, gradient_checkpointing=False)
GPU = dict(model="Qwen/Qwen3-4B-Instruct-2507", max_tokens=2048, max_model_len=32768,
           engine_dtype="bfloat16", judge="llm", token_budget=16384, max_train_len=16384,
           gradient_checkpointing=True)
PRESETS = {"cpu": CPU | dict(lora_rank=16, lr=2e-4), "cpu-full": CPU | dict(lora_rank=0, lr=1e-5),
           "gpu-lora": GPU | dict(lora_rank=16, lr=1e-4),
           "gpu-full": GPU | dict(lora_rank=0, lr=1e-6)}
TOOL_PARSERS = {"qwen3": "hermes", "qwen2.5": "hermes", "hermes": "hermes",  # part of a name ->
                "llama-3": "llama3_json", "mistral": "mistral"}
REASONING_PARSERS = {"qwen3": "qwen3", "qwq": "deepseek_r1", "deepseek-r1": "deepseek_r1"}
# What an engine must offer so that we can put weights into it.
LORA_PATHS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
SWAP_PATHS = {"/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/weight_checker"}
SAMPLE = "Vocabulary: naïve café, Москва, 東京へ行く, 你好, 한국어, 3.14159, x[i] += 1;\n\t🙂"
LAYOUTS = {0: (0, 0, 0), 1: (0, 1, 0), 2: (1, 1, 0), 4: (2, 1, 1), 8: (4, 2, 2)}  # 0: shared
MAY_BE_0 = set("steps max_turns held_out drift_at save_every seed votes lora_rank kl_coef w_rl "
               "w_opd clip_low clip_high freshness_half_life max_wait max_staleness".split())
SECRET = ("api_key", "judge_key")  # set beside the knobs, never written anywhere


def parse(argv):
    """Flags from the fields of Config -> Config, `auto` filled in."""
    parser = argparse.ArgumentParser(
        prog="main.py", allow_abbrev=False, description=__doc__.split("\n")[0],
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100))
    parser.error = bad_flag
    groups = {}
    for f in fields(Config):
        meta, kind = f.metadata, f.type
        group = groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        flag = "--" + f.name.replace("_", "-")
        text = f"{meta['help']} [{f.default}]".replace("%", "%%")
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default,
                               help=text)
        else:
            group.add_argument(flag, type=or_auto(kind), default=f.default, help=text,
                               choices=meta["choices"],
                               metavar=None if meta["choices"] else kind.__name__.upper())
    given = parser.parse_args(argv)
    if given.resume:
        parser.set_defaults(**(old := recorded_config(given.resume)))
        given = parser.parse_args(argv)
        for key in ("run_dir", "lora_rank", "temperature"):
            if getattr(given, key) != old[key]:
                raise Problem(f"--resume {given.resume}: its checkpoint and turns belong to "
                              f"--{key.replace('_', '-')} {old[key]}, which cannot be changed")
        said = sys.argv if argv is None else argv
        if given.loss != "decoupled" and not any(a.startswith("--tis-cap") for a in said):
            given.tis_cap = AUTO  # the recorded one belonged to another loss, or was filled in
    return fill(Config(**vars(given)))


def recorded_config(run_dir):
    """The knobs of a recorded run, for --resume."""
    path = Path(run_dir) / "config.json"
    if not path.is_file():
        raise Problem(f"--resume {run_dir}: no config.json there")
    old = json.loads(path.read_text())
    old |= {"run_dir": str(Path(run_dir).resolve()), "resume": run_dir}
    forget_engines(old)
    return {f.name: old[f.name] for f in fields(Config) if f.name in old}


def forget_engines(old):
    """Take the addresses of engines that have ended with their run out of its config (a dict)."""
    for role in ("judge", "teacher"):
        if old.get(f"{role}_is_ours", role == "teacher"):
            old |= {f"{role}_url": "", f"{role}_model": ""}


def or_auto(kind):
    def value(text):
        return text if text == AUTO else kind(text)

    value.__name__ = kind.__name__  # for argparse's messages
    return value


def bad_flag(message):
    raise Problem(f"{message} (see python main.py --help)")


def fill(cfg):
    """Replace every `auto`, add what is derived from the machine and the environment."""
    gpus = visible_gpus()
    cfg.device = "cuda" if gpus else "cpu"
    full = cfg.lora_rank == 0
    preset = f"gpu-{'full' if full else 'lora'}" if gpus else "cpu-full" if full else "cpu"
    if cfg.judge == AUTO and cfg.judge_url:
        cfg.judge = "llm"
    for key, value in PRESETS[preset].items():
        if getattr(cfg, key) == AUTO:
            setattr(cfg, key, value)
    cfg.judge_url = cfg.judge_url.rstrip("/")
    cfg.policy_url = cfg.policy_url.rstrip("/").removesuffix("/v1")
    cfg.teacher_url = cfg.teacher_url.rstrip("/").removesuffix("/v1")
    cfg.preset, cfg.layout = preset, layout_for(cfg, gpus)
    name = Path(cfg.model).name.lower()
    cfg.tool_parser = parser_for(cfg.tool_parser, TOOL_PARSERS, name)
    thinks = {} if "instruct" in name else REASONING_PARSERS
    cfg.reasoning_parser = parser_for(cfg.reasoning_parser, thinks, name)
    fill_tis_cap(cfg)
    if cfg.gpu_share == AUTO:
        cfg.gpu_share = 0.4 if set(cfg.layout["trainer"]) & set(cfg.layout["policy"]) else 0.85
    if cfg.teacher == AUTO:
        own = cfg.layout["judge"] and not cfg.judge_url
        own = cfg.teacher_url or own and not cfg.lora_rank
        cfg.teacher = "engine" if own else "trainer"
    split_cores(cfg)
    default = HERE / f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.mode}"
    cfg.run_dir = str(Path(cfg.run_dir or default).resolve())  # the trainer runs elsewhere
    cfg.api_key = os.environ.get("OPENCLAW_API_KEY", "")
    if cfg.api_key_file:
        cfg.api_key = read_key(cfg.api_key_file)
    cfg.judge_key = os.environ.get("JUDGE_KEY", "")
    if cfg.save_every == AUTO:
        cfg.save_every = 10 if cfg.lora_rank else 0
    cfg.checkpoint, cfg.replay = checkpoint_of(cfg), ""  # trainer.py --replay sets the latter
    validate(cfg)
    return cfg


def fill_tis_cap(cfg):
    if cfg.tis_cap != AUTO and cfg.loss == "ppo":
        raise Problem("--tis-cap belongs to --loss decoupled: with ppo it would square the ratio")
    cfg.tis_cap = 5.0 if cfg.tis_cap == AUTO else cfg.tis_cap


def step_of(path):
    """checkpoints/step-12.pt -> 12"""
    return int(path.stem.split("-")[1])


def checkpoint_of(cfg):
    """--resume: the newest checkpoint of the run, else ''."""
    found = sorted(Path(cfg.run_dir).glob("checkpoints/step-*.pt"), key=step_of)
    if cfg.resume and not found:
        raise Problem(f"--resume {cfg.resume}: no checkpoint there; a run writes them every "
                      "--save-every updates and when they end by themselves")
    return str(found[-1]) if cfg.resume else ""


def split_cores(cfg):
    """Disjoint halves for engine and trainer: sharing makes a training step ten times slower."""
    ids = sorted(os.sched_getaffinity(0))
    half = max(1, len(ids) // 2)
    for key, auto in (("engine_cores", ids[:half]), ("trainer_cores", ids[half:] or ids)):
        if getattr(cfg, key) in (AUTO, "all"):
            chosen = ids if getattr(cfg, key) == "all" or cfg.device != "cpu" else auto
            setattr(cfg, key, ",".join(map(str, chosen)))
        try:
            if not set() < parse_cores(getattr(cfg, key)) <= set(ids):
                raise ValueError
        except ValueError:
            flag = "--" + key.replace("_", "-")
            raise Problem(f"{flag} {getattr(cfg, key)}: write cores of this machine ({ids[0]} to "
                          f"{ids[-1]}) as 0,1 or 0-3, or all") from None


def parser_for(wish, table, name):
    """vLLM's parser for a model family: without one it answers 400 to every agent with tools."""
    return next((v for k, v in table.items() if k in name), "") if wish == AUTO else wish


def read_key(path):
    try:
        key = Path(path).read_text().strip()
    except OSError as error:
        raise Problem(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    if not key:
        raise Problem(f"--api-key-file {path} is empty")
    return key


def nvidia_smi(*flags):
    """Lines of nvidia-smi; none without it."""
    if not shutil.which("nvidia-smi"):
        return []
    return subprocess.run(["nvidia-smi", *flags], capture_output=True, text=True,
                          timeout=60).stdout.splitlines()


def visible_gpus():
    """Ids of the GPUs that we may use."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [g for g in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if g and g != "-1"]
    return [str(i) for i in range(sum(x.startswith("GPU ") for x in nvidia_smi("-L")))]


def gpu_memory(gpus):
    """GiB of the smallest of these GPUs, or None where nvidia-smi does not say."""
    rows = [line.split(", ") for line in nvidia_smi("--query-gpu=index,uuid,memory.total",
                                                    "--format=csv,noheader,nounits")]
    sizes = [int(mib) / 1024 for index, uuid, mib in rows
             if any(g == index or uuid.startswith(g) for g in gpus)]
    return min(sizes, default=None)


def layout_for(cfg, gpus):
    """-> {'trainer' | 'policy' | 'judge': device ids}; an empty list shares the policy's, or is
    elsewhere (--policy-url, --judge-url)."""
    n, wish = len(gpus), cfg.gpus
    judge_here = cfg.judge == "llm" and not cfg.judge_url
    if wish == AUTO:
        trainer, policy, judge = LAYOUTS[max(k for k in LAYOUTS if k <= n)]
        if cfg.policy_url:
            trainer, policy = trainer + policy, 0
        if not judge_here and (cfg.teacher != "engine" or cfg.teacher_url):
            trainer, judge = trainer + judge, 0
    else:
        try:
            trainer, policy, judge = sizes = tuple(int(x) for x in wish.split(","))
        except ValueError:
            sizes = (-1,)
        if min(sizes) < 0 or sum(sizes) > n or bool(sizes[1]) == bool(cfg.policy_url):
            raise Problem(f"--gpus {wish}: three numbers (trainer, policy, judge) with a sum of at "
                          f"most {n}, the GPUs visible here, and "
                          + ("none for the policy, which is at --policy-url" if cfg.policy_url else
                             "at least one for the policy"))
        if cfg.policy_url and not trainer:
            raise Problem(f"--gpus {wish}: with --policy-url the trainer needs GPUs of its own")
    ids = iter(gpus)
    out = {"policy": [next(ids) for _ in range(policy)], "judge": [next(ids) for _ in range(judge)]}
    out["trainer"] = [next(ids) for _ in range(trainer)] or out["policy"][:1]
    return out


# Memory, in GiB on each GPU of a role. An estimate from the sizes in a model's config.json, made to
# refuse what cannot work before minutes of loading; bench/memory_table.py prints it for the README.


@dataclass
class Shape:
    """Sizes of a decoder; attention heads of `width` numbers, `kv` of them with keys and values."""

    params: int
    layers: int
    hidden: int
    inner: int
    vocab: int
    heads: int
    kv: int
    width: int
    adapter: int  # parameters of an adapter of rank 1 on all seven products of a layer


def shape_of(config):
    """A model's config as a dict -> Shape. Mixtures of experts count all their experts. KeyError
    for a family that names its sizes otherwise."""
    config = config.get("text_config") or config
    h, layers, vocab = (config[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = config["num_attention_heads"]
    kv = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or h // heads
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    q, k = heads * width, kv * width
    layer = 2 * h * q + 2 * h * k + 3 * h * inner * experts + 2 * h
    tables = 1 if config.get("tie_word_embeddings") else 2
    adapter = layers * (2 * (h + q) + 2 * (h + k) + 3 * (h + inner) * experts)
    return Shape(tables * vocab * h + layers * layer + h, layers, h, inner, vocab, heads, kv, width,
                 adapter)


def engine_memory(cfg, s, gpus, rank):
    """What a vLLM needs on each of its GPUs to serve one request of the whole window."""
    b = 4 if cfg.engine_dtype == "float32" else 2  # bytes per number
    kv = b * 2 * s.layers * -(-s.kv // gpus) * s.width * cfg.max_model_len
    return {"weights": b * s.params / gpus / GIB,
            f"keys and values of {cfg.max_model_len:,} tokens": kv / GIB,
            "adapters": b * s.adapter * rank * cfg.lora_slots / gpus / GIB,
            "working memory": 2.0}


def trainer_memory(cfg, s, gpus):
    """What a training step needs on each of its GPUs. The trainer-side teacher's pass needs less
    than the step itself and comes before it; with full weights its frozen copy is whole on each."""
    b = 4 if cfg.engine_dtype == "float32" else 2
    n = max(cfg.token_budget, cfg.max_train_len)  # tokens in the largest micro-batch
    inside = b * (16 * s.hidden + 6 * s.inner)  # what a layer keeps per token for its gradient
    copies = 5 if cfg.topk else 3  # of a chunk of logits in the backward pass: measured
    kept = (s.layers * b * s.hidden + inside if cfg.gradient_checkpointing else s.layers * inside)
    if cfg.lora_rank:
        weights = {"base": b * s.params / gpus, "adapter, gradients, moments":
                   16 * s.adapter * cfg.lora_rank / gpus}
    else:
        weights = {"weights, gradients, moments": 0 if cfg.cpu_offload else 16 * s.params / gpus,
                   "teacher's copy": b * s.params if cfg.teacher == "trainer" else 0,
                   "products' copies": b * s.params / (1 if gpus == 1 else s.layers)}
    return {k: v / GIB for k, v in weights.items()} | {
        f"activations of {n:,} tokens": n * kept / GIB, "logits": copies * 4 * LOGITS / GIB,
        "working memory": 1.0}


def layout_rows(cfg, s, memory):
    """-> (role, device ids, what it needs on each: dict, GiB there for it or None) per role.
    memory(ids) -> GiB of the smallest; s: Shape."""
    at, rows = cfg.layout, []
    if not at["trainer"]:
        return rows
    for role in ("policy", "judge"):
        if at[role]:
            need = engine_memory(cfg, s, len(at[role]), cfg.lora_rank * (role == "policy"))
            size = memory(at[role])
            rows.append((role, at[role], need, size and size * cfg.gpu_share))
    size, shared = memory(at["trainer"]), set(at["trainer"]) & set(at["policy"])
    room = size and size * (1 - cfg.gpu_share if shared else 1)
    return [*rows, ("trainer", at["trainer"], trainer_memory(cfg, s, len(at["trainer"])), room)]


def check_layout(cfg, s, memory):
    """Print who gets which GPUs and how full they get; refuse what cannot fit, with the sum."""
    for role, ids, need, room in layout_rows(cfg, s, memory):
        n, total = len(ids), sum(need.values())
        how = ("" if n == 1 else f", FSDP2 over {n}" if role == "trainer" else
               f", tensor parallel {n}")
        said = f"of {room:.1f} GiB" if room else "GiB"
        say(f"  {role:8} GPU {','.join(ids)}{how}: needs about {total:.1f} {said} on each")
        if role != "trainer" and (s.heads % n or s.kv % n and n % s.kv):
            raise Problem(f"the {role} engine cannot be split over {n} GPUs: the model has "
                          f"{s.heads} attention heads and {s.kv} heads of keys and values; --gpus")
        if room and total > room:
            sums = " + ".join(f"{v:.1f} {k}" for k, v in need.items() if v >= 0.05)
            raise Problem(
                f"the {role} does not fit: {sums} = {total:.1f} GiB on each of its {n} GPUs, and "
                f"there are {room:.1f}. More GPUs for it (--gpus), another --gpu-share, a smaller "
                + ("--max-train-len and --token-budget, --lora-rank 16" if role == "trainer" else
                   "--max-model-len") + " or a smaller model would help")
    unused = len(visible_gpus()) - len({g for ids in cfg.layout.values() for g in ids})
    if unused:
        say(f"  {unused} GPUs are not used: say how with --gpus")


def check_number(name, value):
    """Every number is finite and above 0, but for those of MAY_BE_0 and -1 for 'any age'."""
    flag = f"--{name.replace('_', '-')} {value}"
    if value == AUTO or not math.isfinite(value):
        raise Problem(f"{flag}: a finite number is needed")
    if value < 0 and (name, value) != ("max_staleness", -1):
        raise Problem(f"{flag} must not be negative")
    if value == 0 and name not in MAY_BE_0:
        raise Problem(f"{flag} must be above 0")


def validate(cfg):
    """Wrong settings end here, with a sentence that says what to change."""
    for f in fields(Config):
        if f.type in (int, float) and (f.name, getattr(cfg, f.name)) != ("sync_every", AUTO):
            check_number(f.name, getattr(cfg, f.name))
    rules = [
        (cfg.port < 65536, f"--port {cfg.port} must be below 65536"),
        (cfg.gpu_share <= 1, f"--gpu-share {cfg.gpu_share} must be at most 1"),
        (cfg.dual_clip >= 1, f"--dual-clip {cfg.dual_clip} must be at least 1: below, bad turns "
         "would have no gradient"),
        (not cfg.tracker or importlib.util.find_spec(cfg.tracker.replace("-", "_")),
         f"--tracker {cfg.tracker}: there is no such package here (pip install {cfg.tracker}?)"),
        (not cfg.topk or cfg.mode != "rl", f"--topk {cfg.topk} is about hints: --mode rl has none"),
        (cfg.max_tokens < cfg.max_model_len, f"--max-tokens {cfg.max_tokens} must be below "
         f"--max-model-len {cfg.max_model_len}"),
        (cfg.loss in ("ppo", "decoupled") or cfg.extra,
         f"--loss {cfg.loss} is not ppo or decoupled, and no --extra adds it"),
        (cfg.topk in ("", "full", *map(str, range(1, 51))),
         f"--topk {cfg.topk}: a number from 1 to 50, or full"),
        (cfg.topk != "full" or cfg.teacher == "trainer", "--topk full needs --teacher trainer: "
         "an engine sends the likeliest tokens only"),
        (cfg.sync_every == AUTO or cfg.sync_every <= cfg.max_staleness + 1
         or cfg.max_staleness < 0,
         f"--sync-every {cfg.sync_every} must be at most --max-staleness {cfg.max_staleness} + 1: "
         "every turn would be too old before the next sync"),
        (not cfg.cpu_offload or cfg.device != "cpu", "--cpu-offload is for GPUs"),
        (cfg.lora_slots >= 2, "--lora-slots must be at least 2: one in use, one for the next"),
        (not cfg.kl_coef or cfg.lora_rank or cfg.teacher == "trainer",
         "--kl-coef with full weights needs --teacher trainer: its frozen copy is the reference"),
        (cfg.schedule in SCHEDULES or cfg.extra, f"--schedule {cfg.schedule} is not one of "
         f"{', '.join(SCHEDULES)}"),
        (cfg.hint_choice in HINT_CHOICE or cfg.extra, f"--hint-choice {cfg.hint_choice} is not one "
         f"of {', '.join(HINT_CHOICE)}"),
        (cfg.schedule != "windowed" or cfg.window >= cfg.batch_size,
         f"--window {cfg.window} must be at least --batch-size {cfg.batch_size}"),
        (cfg.host in proxy.LOOPBACK or cfg.api_key,
         f"--host {cfg.host} can be reached from outside: "
         "set a key with --api-key-file or OPENCLAW_API_KEY, or use --host 127.0.0.1"),
        (cfg.judge != "llm" or cfg.judge_url or cfg.layout["judge"] or cfg.lora_rank or cfg.replay,
         "--judge llm with full weights needs GPUs of its own (--gpus) or --judge-url: the policy "
         "engine's base model is being trained"),
        (not cfg.judge_url or cfg.judge_model, "--judge-url needs --judge-model"),
        (not cfg.judge_url or cfg.judge == "llm",
         "--judge-url and --judge lexicon are two different judges"),
        (not cfg.teacher_url or cfg.teacher_model, "--teacher-url needs --teacher-model"),
        (not cfg.teacher_url or cfg.teacher == "engine",
         "--teacher-url and --teacher trainer are two different teachers"),
        (all(x.startswith(("http://", "https://")) for x in (
            cfg.policy_url, cfg.judge_url, cfg.teacher_url, cfg.user_url) if x),
         "--policy-url, --judge-url, --teacher-url and --user-url start with http:// or https://"),
        (cfg.teacher != "engine" or cfg.temperature == 1,
         f"--teacher engine needs --temperature 1, not "
         f"{cfg.temperature}: vLLM scores prompts at temperature 1 only"),
        (cfg.teacher != "engine" or cfg.layout["judge"] or cfg.lora_rank or cfg.teacher_url,
         "--teacher engine with full weights needs a judge engine of its own (--gpus) or "
         "--teacher-url"),
        (cfg.lora_rank in (0, 1, 8, 16, 32, 64, 128, 256, 320, 512),
         f"--lora-rank {cfg.lora_rank}: vLLM takes 0 (full weights), 1, 8, 16, 32, 64, 128, 256, "
         "320, 512"),
        (not cfg.extra or Path(cfg.extra).is_file(), f"--extra {cfg.extra} does not exist"),
        (not cfg.simulate or cfg.steps or cfg.max_turns or cfg.max_wait, "--simulate needs an end: "
         "--steps, --max-turns or --max-wait"),
        (cfg.simulate or cfg.allocation == "uniform" and not (cfg.drift_at or cfg.user_url),
         "--allocation, --drift-at and --user-url are for users of --simulate only"),
    ]
    for good, sentence in rules:
        if not good:
            raise Problem(sentence)


def check_model(cfg):
    """A folder must hold a model; a hub name is left to the hub."""
    path = Path(cfg.model)
    if path.is_dir() and (path / "config.json").exists():
        cfg.model = str(path.resolve())
    elif path.is_absolute() or cfg.model.startswith(".") or path.is_dir():
        raise Problem(f"--model {cfg.model}: no config.json there (the demo model comes with "
                      "`make setup`; or name a model on the Hugging Face hub)")
    window = model_config(cfg.model).get("max_position_embeddings") if path.is_dir() else None
    if window and cfg.max_model_len > window:
        raise Problem(f"--max-model-len {cfg.max_model_len} is above the model's window of "
                      f"{window}")


def model_config(name):
    """The config of a model, a folder's or the hub's."""
    if Path(name).is_dir():
        return json.loads((Path(name) / "config.json").read_text())
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise Problem(f"--model {name} is no folder, and the Hugging Face hub does not give it: "
                      f"{str(error).splitlines()[0]}") from None


def persona_flags(cfg):
    """What the users' script checks by itself: the tables are its own, --extra may add to them."""
    keys = ("max_turns", "max_tokens", "allocation", "drift_at", "user_url", "user_model")
    flags = ["--persona", cfg.simulate] + ["--extra", cfg.extra] * bool(cfg.extra)
    return flags + [str(x) for k in keys for x in ("--" + k.replace("_", "-"), getattr(cfg, k))]


def check_persona(cfg):
    command = [sys.executable, "examples/simulated_user.py", "--run-dir", ".", "--check"]
    done = subprocess.run(command + persona_flags(cfg), cwd=HERE, capture_output=True, text=True,
                          timeout=60)
    if done.returncode:
        raise Problem(f"--simulate {cfg.simulate}: {done.stderr.strip().splitlines()[-1]}")


def check_port(cfg):
    """Refuse a busy port, and say whose it is."""
    import socket

    with socket.socket(socket.AF_INET6 if ":" in cfg.host else socket.AF_INET) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((cfg.host, cfg.port))
        except OSError as error:
            raise Problem(f"{cfg.host}:{cfg.port} cannot be used "
                          f"({error.strerror}{owner(cfg.port)}); choose another --port") from None


def owner(port):
    import psutil

    with contextlib.suppress(psutil.Error):
        for c in psutil.net_connections("tcp"):
            if c.laddr and c.laddr.port == port and c.status == "LISTEN" and c.pid:
                return f" by process {c.pid}, {psutil.Process(c.pid).name()}"
    return ""


# ------------------------------------------------------------------------------------- the queue


class LineServer(managers.Server):
    """BaseManager's server, which also tells the line when a trainer's connection ends."""

    line = None

    def serve_client(self, conn):
        try:
            super().serve_client(conn)
        finally:
            self.line.release(threading.get_ident())


def serve_line(line, folder):
    """Put the sample queue on a Unix socket (mode 0600) -> environment for the trainer."""
    key = secrets.token_bytes(32)
    managers.BaseManager.register("queue", callable=lambda: line,
                                  exposed=("lease", "commit", "status", "publish"))
    # KEEP: not BaseManager.get_server(), which makes the plain Server whatever _Server says
    server = LineServer(managers.BaseManager._registry, f"{folder}/queue", key, "pickle")
    server.line = line
    os.chmod(f"{folder}/queue", 0o600)
    server.stop_event = threading.Event()
    # not serve_forever: that one ends the whole process when it is done
    threading.Thread(target=server.accepter, daemon=True, name="queue").start()
    return server, {"OPENCLAW_QUEUE": f"{folder}/queue", "OPENCLAW_KEY": key.hex()}


# ------------------------------------------------------------------------------------ start-up


# On a terminal the last line tells what is going on now; whoever prints wipes it away first.
CLEAR = "\r\x1b[K" if sys.stdout.isatty() else ""


def say(text, end="\n"):
    print(CLEAR + text, end=end, flush=True)


class System:
    """Everything that runs, so that one place can look after it and end it."""

    def __init__(self, cfg):
        self.cfg, self.children, self.started = cfg, [], time.time()
        self.run_dir = Path(cfg.run_dir)
        self.phases, self.mark, self.ended = {}, time.monotonic(), False
        self.trainer = self.users = self.web = self.policy = self.socket_dir = None

    def phase(self, name):
        """Seconds since the last phase ended are this phase's."""
        now = time.monotonic()
        self.phases[name] = round(now - self.mark, 2)
        self.mark = now

    def child(self, name, command, **kwargs):
        log = self.run_dir / "logs" / f"{name.replace(' ', '-')}.log"
        child = Child(name, command, log, **kwargs)
        self.children.append(child)
        return child

    def stop(self):
        """End all children at once; nothing that we did not start is touched."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.web:
            self.web.close()
        for child in self.children:
            child.release()
        deadline = time.monotonic() + 6
        for child in self.children:
            child.stop(max(0.1, deadline - time.monotonic()))


def start_engine(system, name, gpus, lora):
    """Start a vLLM engine and wait for it, saying what we wait for -> its URL."""
    cfg, port = system.cfg, free_port()
    url = f"http://127.0.0.1:{port}"
    command = engine_command(cfg, cfg.model, port, lora, len(gpus) or 1)
    command += ENGINE_FLAGS if name == "policy engine" else []
    child = system.child(name, command, env=engine_env(cfg, ",".join(gpus)), cores=cfg.engine_cores)
    shown = [-10]

    def tick(waited, last):
        if waited - shown[0] >= 10:
            shown[0] = waited
            say(f"waiting for the {name} ({waited:.0f} s) {last.strip()[:90]}")

    wait_ready(child, url, 1800 if cfg.device != "cpu" else 600, tick)
    say(f"the {name} is up: {cfg.model}, {cfg.engine_dtype}")
    return url


def start_judge_engine(system, policy_url):
    """Where votes and an engine-side teacher come from: a URL, an engine of its own, or the policy
    engine's base model."""
    cfg = system.cfg
    ours = cfg.judge == "llm" and not cfg.judge_url
    own = cfg.layout["judge"] and (ours or cfg.teacher == "engine" and not cfg.teacher_url)
    url = (start_engine(system, "judge engine", cfg.layout["judge"], lora=False) if own
           else policy_url)
    cfg.judge_is_ours, cfg.teacher_is_ours = ours, not cfg.teacher_url
    if ours:
        cfg.judge_url, cfg.judge_model = f"{url}/v1", BASE
        cfg.judge_key = "" if own else os.environ.get("POLICY_KEY", "")
    if cfg.teacher_is_ours:
        cfg.teacher_url, cfg.teacher_model = url, BASE
    elif cfg.teacher == "engine":
        check_teacher(cfg)


def asked(method, url, key, body=None):
    """One question to an engine that we did not start, at start-up."""
    http = urllib3.PoolManager(retries=False, timeout=20.0, headers=proxy.bearer(key))
    try:
        response = http.request(method, url, json=body)
        if response.status == 200:
            return json.loads(response.data)
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        raise Problem(f"{url} does not answer: {error}") from None
    raise Problem(f"{url} answers {response.status}: {response.data[:200]!r}")


def check_policy(cfg):
    """--policy-url: a vLLM that we could have started ourselves, with the same flags."""
    url, key = cfg.policy_url, os.environ.get("POLICY_KEY")
    models = {m["id"]: m for m in asked("GET", f"{url}/v1/models", key)["data"]}
    window = models.get(BASE, {}).get("max_model_len")
    needed = {"/tokenize", *(LORA_PATHS if cfg.lora_rank else SWAP_PATHS)}
    if cfg.device == "cpu":
        needed.add("/collective_rpc")  # sync.OnCpu
    lacking = needed - asked("GET", f"{url}/openapi.json", key)["paths"].keys()
    if window != cfg.max_model_len or lacking:
        command = engine_command(cfg, cfg.model, 8000, bool(cfg.lora_rank))
        command += ENGINE_FLAGS
        env = [f"{k}={v}" for k, v in engine_env(cfg).items()
               if k.startswith(("VLLM", "PYTHONPATH"))]
        raise Problem(f"--policy-url {url} serves {', '.join(models)} (window of '{BASE}': "
                      f"{window}) and lacks {', '.join(sorted(lacking)) or 'no route'}; needed is "
                      f"'{BASE}' with a window of {cfg.max_model_len}. On its machine, where no "
                      f"stranger may reach its port:\n  {shlex.join(env + command)}")
    return url


def check_teacher(cfg):
    """--teacher-url: log-probs of ids mean something only under the same vocabulary."""
    ours, theirs = proxy.policy_engine(cfg, BASE), proxy.teacher_engine(cfg)

    def both(path, **body):
        return [asked("POST", e.url + path, e.key, {"model": e.model, **body})
                for e in (ours, theirs)]

    a, b = both("/tokenize", prompt=SAMPLE, add_special_tokens=False)
    ids = [*a["tokens"], *range(0, max(a["tokens"]), 7)]
    texts = {x["prompt"] for x in both("/detokenize", tokens=ids)}
    if a["tokens"] != b["tokens"] or len(texts) > 1:
        raise Problem(f"--teacher-url {cfg.teacher_url}: {cfg.teacher_model} has another "
                      "vocabulary than the policy")


def write_config(cfg):
    public = {k: v for k, v in vars(cfg).items() if k not in SECRET}
    (Path(cfg.run_dir) / "config.json").write_text(json.dumps(public, indent=1))


def start(system):
    """Model, engine, judge, queue, judge threads, proxy (not accepting yet), trainer, in order."""
    cfg = system.cfg
    check_model(cfg)
    check_port(cfg)
    if cfg.extra:
        cfg.extra = str(Path(cfg.extra).resolve())
        load_extra(cfg.extra)
        for key, table in (("schedule", SCHEDULES), ("hint_choice", HINT_CHOICE)):
            if getattr(cfg, key) not in table:
                raise Problem(f"--{key.replace('_', '-')} {getattr(cfg, key)} is not a row of its "
                              f"table, nor does --extra {cfg.extra} add it")
        if cfg.lora_rank and ROUTES["full"] is not through_memory:
            raise Problem(f"--extra {cfg.extra} changes how full weights travel: --lora-rank 0, or "
                          "leave it out")
    if cfg.simulate:
        check_persona(cfg)
    if (system.run_dir / "turns.jsonl").exists() and not cfg.resume:
        raise Problem(f"--run-dir {cfg.run_dir} holds a run already; name another one, or go on "
                      f"with it: --resume {cfg.run_dir}")
    (system.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    chosen = {k: getattr(cfg, k) for k in PRESETS[cfg.preset]} | {"teacher": cfg.teacher}
    say(f"run {cfg.run_dir} on {cfg.preset}: " + " ".join(f"{k}={v}" for k, v in chosen.items()))
    if cfg.device != "cpu":
        try:
            check_layout(cfg, shape_of(model_config(cfg.model)), gpu_memory)
        except KeyError as error:
            say(f"  memory is not checked: the model's config has no {error}")
    cfg.engine_url = check_policy(cfg) if cfg.policy_url else start_engine(
        system, "policy engine", cfg.layout["policy"], bool(cfg.lora_rank))
    start_judge_engine(system, cfg.engine_url)
    write_config(cfg)
    system.phase("start_engine")
    turns = recorded_turns(system) if cfg.resume else None
    log = system.log = proxy.TurnLog(system.run_dir / "turns.jsonl")
    policy = system.policy = proxy.Policy(BASE)
    policy.pausing = not cfg.lora_rank
    system.line = SampleQueue(cfg, log, policy)
    system.sessions = proxy.Sessions(log, cfg.session_timeout)
    system.judges = JudgeThreads(cfg, system.line, log, proxy.policy_engine(cfg, BASE), say)
    if cfg.resume:
        take_up(system, turns)
    start_proxy(system)
    start_trainer(system)
    system.phase("start_trainer")
    policy.accepting = True


def recorded_turns(system):
    """--resume: what turns.jsonl knows, before it is written to again. A line that a crash cut is
    taken off, and so are the traces of the updates that were lost."""
    run, step = system.run_dir, step_of(Path(system.cfg.checkpoint))
    for name in ("stop_users", "talk_done", "measure_after"):
        (run / name).unlink(missing_ok=True)
    for name in ("turns.jsonl", "metrics.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True) if (run / name).exists() else []
        whole = [x for x in lines if x.endswith("\n")]
        if name == "metrics.jsonl":
            whole = [x for x in whole if json.loads(x)["step"] <= step]
        if whole != lines:
            (run / f"{name}.part").touch(mode=0o600)
            (run / f"{name}.part").write_text("".join(whole))
            os.replace(run / f"{name}.part", run / name)
    return proxy.load_turns(run / "turns.jsonl")


def take_up(system, turns):
    """--resume: what was trained by the restored step stays so; every other turn that a lost update
    or the end of the run took away comes back to where it was: judged into the line, paired to the
    judges, answered to waiting for its user's next words."""
    cfg, line, log, back = system.cfg, system.line, system.log, 0
    step = line.updates = system.policy.version = step_of(Path(cfg.checkpoint))
    ids = json.loads(Path(cfg.checkpoint).with_suffix(".json").read_text())["turns"]
    for turn in turns.values():
        lost = turn.fate == "trained" and turn.step > step and turn.id not in ids
        if turn.fate not in (None, "run_ended") and not lost:
            log.count(turn)
            continue
        again = bool(turn.feedback)  # it may have come after the judge
        if turn.version_start > step:  # sampled by weights that are lost: no version of this run's
            turn.version_start, turn.version_end = step, -1
        turn.fate, turn.step, turn.closed, turn.age_s = None, None, 0.0, None
        log.take_up(turn)
        if turn.skip or turn.id in ids:  # its fate was known, or the checkpoint was written, and
            log.close(turn, turn.skip or "trained", None if turn.skip else step)  # no line said so
            continue
        back += 1
        if turn.judged_at and not again and not decide(turn, cfg):
            line.take_up(turn)
        elif turn.paired_at:
            system.judges.put(turn)
        else:
            system.sessions.wait(turn)
    line.fates_before = log.counts()
    say(f"resumed at update {step}: {log.fates['trained']} turns are trained, {back} taken up "
        "again")


def start_proxy(system):
    cfg, hooks = system.cfg, proxy.Hooks()
    hooks.paired, hooks.overloaded, hooks.say = system.judges.put, system.line.full, say
    hooks.feedback, hooks.health = system.judges.again, system.line.health
    system.server = proxy.Server(cfg, cfg.engine_url, system.policy, system.sessions, system.log,
                                 hooks)
    system.web = proxy.serve(proxy.make_app(system.server), cfg)
    threading.Thread(target=system.web.run, daemon=True, name="proxy").start()


def start_trainer(system):
    """Start it and wait until it has checked version 0 against the engine."""
    cfg, gpus = system.cfg, system.cfg.layout["trainer"]
    folder = system.socket_dir = tempfile.mkdtemp(prefix="openclaw-")  # a socket path must be short
    system.socket, env = serve_line(system.line, folder)
    env |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "KMP_BLOCKTIME": "0",
            "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "trainer.py", system.run_dir.resolve()]
    if len(gpus) > 1 or cfg.cpu_offload:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc_per_node", len(gpus), *command[1:]]
    say("waiting for the trainer: it loads the model and checks version 0 against the engine")
    system.trainer = system.child("trainer", command, env=env, screen=True, cores=cfg.trainer_cores)
    limit = time.monotonic() + 900
    while not system.line.checked:
        check_children(system)
        if time.monotonic() > limit:
            raise Problem(f"the trainer was not ready after 900 s:\n{system.trainer.tail()}")
        time.sleep(0.1)


def welcome(system):
    cfg = system.cfg
    base = base_url(cfg)
    key = " -H 'Authorization: Bearer '$OPENCLAW_API_KEY" if cfg.api_key else ""
    say(f"\nready: {base} (model '{cfg.served_name}', mode {cfg.mode}, window "
        f"{cfg.max_model_len})\n"
        f"  {base.removesuffix('v1')} in a browser: curves, turns, a chat\n"
        f"  curl {base}/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is rain?\"}}]}}'")
    if cfg.max_model_len >= 24_576:  # OpenClaw's own prompt and tools need about 13,000 tokens
        block = {"agents": {"defaults": {"model": f"claw/{cfg.served_name}"}},
                 "models": {"providers": {"claw": {
            "baseUrl": base, "apiKey": "OPENCLAW_API_KEY" if cfg.api_key else "none",
            "api": "openai-completions", "models": [{
                "id": cfg.served_name, "name": cfg.served_name, "contextWindow": cfg.max_model_len,
                "maxTokens": cfg.max_tokens}]}}}}
        say(f"for openclaw.json:\n{json.dumps(block, indent=1)}")
    say("")


# --------------------------------------------------------------------------------- supervision


def check_children(system):
    """A dead child or thread ends the run, with its last words."""
    for child in system.children:
        done = child in (system.trainer, system.users) and child.code() == 0
        if not child.alive() and not done:
            raise Problem(f"the {child.name} ended; its last lines, from {child.log}:\n"
                          f"{child.tail()}")
    names = {t.name for t in threading.enumerate()}
    judges = [f"judge-{i}" for i in range(system.cfg.judge_threads)]
    for thread in ("proxy", "queue", *judges):
        if system.web and system.trainer and thread not in names:
            raise Problem(f"the thread '{thread}' ended; see the lines above")


def base_url(cfg):
    return f"http://{f'[{cfg.host}]' if ':' in cfg.host else cfg.host}:{cfg.port}/v1"


def users_command(system):
    cfg = system.cfg
    command = [sys.executable, "examples/simulated_user.py", "--base-url", base_url(cfg),
               *persona_flags(cfg), "--users", cfg.users, "--seed", cfg.seed,
               "--held-out-samples", cfg.held_out, "--run-dir", system.run_dir.resolve()]
    if cfg.lora_rank:  # the base model is in the engine beside its adapters
        command += ["--score-url", cfg.engine_url, "--score-model", BASE]
    return command + ["--lockstep"] * cfg.lockstep + ["--go-on"] * bool(cfg.resume)


def now(system):
    """What is waiting on what, in one line."""
    depth, fates, cfg = system.line.depths(), system.log.counts(), system.cfg
    trained, alone = fates.pop("trained", 0), fates.pop("no_next_state", 0)
    side = fates.pop("side", 0)
    dropped = " ".join(f"{k}:{n}" for k, n in fates.items()) or "none"
    return (f"serving v{system.policy.version} | batch {depth['ready']}/{cfg.batch_size}, judging "
            f"{depth['judging']}, in training {depth['leased']}, waiting for a reaction "
            f"{len(system.sessions.keys)} | trained {trained}, not trained {dropped} | no reaction "
            f"{alone}, side {side} | last sample {system.line.quiet():.0f} s ago")


def heartbeat(system, beat):
    """On a terminal the line that is always there; else a line when none was shown for a while.
    -> when the last line was shown."""
    if CLEAR:
        say(now(system)[: shutil.get_terminal_size().columns - 1], end="")
    elif time.monotonic() - beat > 30:
        say(now(system))
        return time.monotonic()
    return beat


def supervise(system):
    """Runs until the simulated talk is over (or Ctrl-C); minds children, sessions and users."""
    cfg, beat, seen = system.cfg, time.monotonic(), -1
    while True:
        time.sleep(0.2)
        check_children(system)
        system.sessions.expire()
        line = system.line
        if line.updates != seen:
            seen, beat = line.updates, time.monotonic()
        beat = heartbeat(system, beat)
        if cfg.steps and line.updates >= cfg.steps and not line.closing:
            line.closing = True
            say(f"{cfg.steps} updates are done" + ("" if cfg.simulate else "; serving goes on"))
        if cfg.simulate and talk_over(system):
            return


def talk_over(system):
    """Move the simulated talk on: stop the users, let the trainer finish, measure, end."""
    cfg, line, flags = system.cfg, system.line, system.run_dir
    quiet, depth = line.quiet(), line.depths()
    if cfg.max_wait and quiet > cfg.max_wait + 5 and not depth["ready"] + depth["leased"]:
        if not line.closing:
            what = "left to correct" if line.updates else "could be trained"
            say(f"nothing {what}: no new sample for {quiet:.0f} s")
        line.closing = True
    if line.closing and not (flags / "stop_users").exists():
        (flags / "stop_users").touch()
    if (flags / "talk_done").exists() and not line.closing:
        busy = depth["judging"] + depth["leased"] or depth["ready"] >= cfg.batch_size
        line.closing = not busy
    if system.trainer.code() == 0 and (flags / "talk_done").exists():
        if not (flags / "measure_after").exists():
            system.phase("talk")
            (flags / "measure_after").touch()
        return system.users.code() == 0
    return False


# ------------------------------------------------------------------------------------- the end


def read_json(path, default):
    return json.loads(path.read_text()) if path.exists() else default


def finish(system):
    """Give every open turn its fate; write summary.json."""
    cfg, log = system.cfg, system.log
    system.phase("after" if cfg.simulate else "serving")
    log.close_all("run_ended")
    path = system.run_dir / "metrics.jsonl"
    rows = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    users = read_json(system.run_dir / "users.json", {})
    system.phases |= users.get("phases_s", {})
    rewards = [r["reward_mean"] for r in rows if r["reward_mean"] is not None]
    requests = system.requests | {"held": system.policy.held}
    requests["failed"] = max(requests["failed"], users.get("requests", {}).get("failed", 0))
    summary = {
        "ended": system.ended, "mode": cfg.mode, "seed": cfg.seed,
        "steps": system.line.updates, "turns": log.turns,
        "trained": log.fates["trained"],
        "dropped": {k: n for k, n in sorted(log.fates.items()) if k != "trained"},
        "held_out": users.get("held_out"), "sessions_to_three": users.get("sessions_to_three"),
        "drift": users.get("drift"),
        "requests": requests,
        "reward_first3": mean(rewards[:3]), "reward_last3": mean(rewards[-3:]),
        "sync_s_median": median([r["sync_s"] for r in rows if r["sync_s"]]),
        "sync_gap_max_s": system.policy.gap_run_max,
        "pause_s_max": max([r["pause_s"] for r in rows], default=0.0),
        "wall_s": round(time.time() - system.started, 1), "phases_s": system.phases,
        "train_s": sum(r["train_s"] for r in rows)}
    (system.run_dir / "summary.json").write_text(json.dumps(summary, indent=1))
    show_end(system, summary)


def mean(values):
    return sum(values) / len(values) if values else None


def median(values):
    return statistics.median(values) if values else None


def show_end(system, summary):
    dropped = " ".join(f"{k}:{n}" for k, n in summary["dropped"].items())
    say(f"\n{summary['steps']} updates, {summary['turns']} turns: {summary['trained']} trained, "
        f"others {dropped or 'none'}; requests {summary['requests']}")
    held = summary["held_out"]
    if held and held.get("after") is not None:
        say(f"held-out good: {held['before']:.2f} before -> {held['after']:.2f} after "
            f"(tokens {held['mean_tokens_before']:.0f} -> {held['mean_tokens_after']:.0f})")
    say(f"wall time {summary['wall_s']:.0f} s {summary['phases_s']}; see "
        f"{system.run_dir}/summary.json, curve.png, turns.jsonl")


def interrupt(signum, frame):
    raise KeyboardInterrupt


def main(argv=None):
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)  # also where a shell started us with it ignored
    system, code = None, 0
    try:
        system = System(parse(argv))
        start(system)
        welcome(system)
        if system.cfg.simulate:
            system.users = system.child("simulated users", users_command(system), screen=True,
                                        env={"OPENCLAW_API_KEY": system.cfg.api_key or "none"})
        supervise(system)
        system.ended = True  # the simulated talk is over: not ended by Ctrl-C or a fault
    except KeyboardInterrupt:
        code = 130 if not (system and system.policy and system.policy.accepting) else 0
        say("\nstopping")
        if code == 0 and not system.cfg.lora_rank and system.line.updates:
            let_it_save(system)
    except (Problem, ChildProcessError, TimeoutError) as problem:
        code = 1
        print(f"{CLEAR}error: {problem}", file=sys.stderr, flush=True)
    finally:
        if system:
            end(system)
    return code


def let_it_save(system, patience=300):
    """Full weights are in the trainer alone (adapters lie in the run directory): it ends as after
    --steps, by itself."""
    say("the trainer saves the weights first (Ctrl-C again: at once)")
    system.line.closing = True
    with contextlib.suppress(KeyboardInterrupt):
        limit = time.monotonic() + patience
        while system.trainer.alive() and time.monotonic() < limit:
            time.sleep(0.1)


def end(system):
    """End the children, sum up, and only then take the time to draw."""
    if system.web:  # the counts of now: what our own end cuts off is no failed request
        system.policy.accepting, system.requests = False, dict(system.server.requests)
        system.judges.stop()
    system.stop()
    limit = time.monotonic() + 2
    while system.web and system.policy.open and time.monotonic() < limit:
        time.sleep(0.05)  # streams that ended with the engine still get their fate
    try:
        if system.web:
            finish(system)
    finally:
        if system.socket_dir:
            system.socket.listener.close()
            shutil.rmtree(system.socket_dir, ignore_errors=True)
        for folder in Path("/dev/shm").glob("nano-openclaw-*"):
            if not Path(f"/proc/{folder.name.rsplit('-', 1)[1]}").exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a trainer that was killed
    if (system.run_dir / "metrics.jsonl").exists():
        subprocess.run([sys.executable, "examples/plot_run.py", system.run_dir.resolve()], cwd=HERE,
                       stdout=subprocess.DEVNULL, timeout=60)


if __name__ == "__main__":
    sys.exit(main())
