"""Policy training: lease a batch of judged turns, take one optimiser step, serve the new weights.

Place in the system: judge.py's `SampleQueue` (in main) -> this script, an accelerate program
of 1..N ranks -> sync.py -> vLLM. Only rank 0 talks to main; the other ranks follow its broadcasts.

Run it alone: `python trainer.py --replay runs/MINE/turns.jsonl --loss decoupled` trains again on a
recorded run, without engine or judge. main starts it as `python trainer.py RUN_DIR`.

How it differs from the paper and the original:
 1. Tokens and log-probs of the behaviour policy are the engine's own, never recomputed or padded.
 2. The distillation advantage compares the teacher with the policy being moved (prox_logp), not
    with the policy that sampled.
 3. No normalisation: live traffic has groups of one.
 4. Means are taken with the global count of the step, so the gradient does not depend on how the
    batch was cut into micro-batches or ranks.
 5. The circulating excerpt of the clipped loss has the wrong sign on its first term; `ppo` has not.

Letters: pi_b sampled the turn (rollout_logp), pi_p is the policy at the step's start (prox_logp),
pi the current one (logp), T the teacher (teacher_logp), r the score. N counts response tokens.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, fields
from multiprocessing.managers import BaseManager
from pathlib import Path
from types import SimpleNamespace

import torch
import urllib3
from accelerate import Accelerator

from judge import HINT_CHOICE
from main import (
    AUTO,
    LOGITS,
    Config,
    Problem,
    fill_tis_cap,
    forget_engines,
    say,
    step_of,
    validate,
)
from proxy import engine_logp, judged_numbers, load_turns, policy_engine, strip_wrappers
from sync import BASE, LORA_TARGETS, Sync, SyncError, check_names, load_extra, write

# ------------------------------------------------------------------------- ragged turns -> tensors


@dataclass
class Batch:
    """A micro-batch. Sequences are padded on the right only to run through the model (causal
    attention never looks there); everything about response tokens is flat: nothing to mask."""

    ids: torch.Tensor  # (B, T) prompt + response, right-padded
    rows: torch.Tensor  # (N,) which sequence a response token belongs to
    cols: torch.Tensor  # (N,) the position that predicts it
    targets: torch.Tensor  # (N,) the response token itself


def collate(prompts, responses, device="cpu", pad=0):
    """Ragged lists -> Batch. Two turns, with 2+2 and 1+1 tokens:

    >>> b = collate([[5, 6], [7]], [[8, 9], [4]])
    >>> b.ids.tolist()
    [[5, 6, 8, 9], [7, 4, 0, 0]]
    >>> b.rows.tolist(), b.cols.tolist(), b.targets.tolist()
    ([0, 0, 1], [1, 2, 0], [8, 9, 4])
    """
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    ids = torch.full((len(prompts), longest), pad)  # (B, T)
    rows, cols, targets = [], [], []
    for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        ids[i, : len(p) + len(r)] = torch.tensor([*p, *r])
        rows += [i] * len(r)
        cols += range(len(p) - 1, len(p) + len(r) - 1)  # position t predicts token t + 1
        targets += r
    flat = [torch.tensor(x, dtype=torch.long, device=device) for x in (rows, cols, targets)]
    return Batch(ids.to(device), *flat)


def cut(lengths, budget):
    """Sequence lengths -> micro-batches (lists of indices) of at most `budget` padded tokens each,
    similar lengths together.

    >>> cut([10, 3, 4, 9], budget=20)
    [[1, 2], [3, 0]]
    """
    out = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not out or lengths[i] * (len(out[-1]) + 1) > budget:
            out.append([])
        out[-1].append(i)
    return out


# ------------------------------------------------------------------------------------- the policy


class Policy(torch.nn.Module):
    """A causal language model whose forward gives what `read` makes of the response tokens' logits,
    by default their log-probs, and nothing else: logp_t = log softmax(logits_t / T)[target_t].

    Only `chunk` response tokens at a time meet the vocabulary, so many that their logits are LOGITS
    numbers: no (tokens, vocabulary) of a long turn is ever there.
    """

    def __init__(self, lm, temperature, chunk=None):
        super().__init__()
        self.lm, self.temperature = lm, temperature
        self.chunk = chunk or max(1, LOGITS // self.head().weight.shape[0])
        self._no_split_modules = getattr(lm, "_no_split_modules", None)  # FSDP wraps these layers

    def causal(self):
        return self.lm.get_base_model() if hasattr(self.lm, "peft_config") else self.lm

    def head(self):
        return self.causal().get_output_embeddings()

    def forward(self, batch, temperature=None, read=None):
        """Batch -> logp (N,) in float32, or the tensors (N, ...) that `read` returns."""
        temperature, head = temperature or self.temperature, self.head()
        hidden = self.causal().base_model(input_ids=batch.ids,
                                          use_cache=False).last_hidden_state  # (B, T, H)
        hidden = hidden[batch.rows, batch.cols]  # (N, H)

        def piece(h, at):
            return (read or chosen(batch.targets))(h, lambda: scaled(head(h), temperature), at)

        spans = [slice(i, i + self.chunk) for i in range(0, len(hidden), self.chunk)]
        if len(spans) == 1:
            outs = [piece(hidden, spans[0])]
        else:  # the logits are made again in the backward pass
            outs = [torch.utils.checkpoint.checkpoint(piece, hidden[at], at, use_reentrant=False)
                    for at in spans]
        joined = tuple(torch.cat(column) for column in zip(*outs, strict=True))
        return joined if read else joined[0]


def scaled(logits, temperature):
    """Logits (n, V) in float32 over the temperature; at 1 that needs no second copy of them."""
    return logits.float() if temperature == 1 else logits.float() / temperature


# What a forward pass may read. h (n, H) hidden states, logits() (n, V), at: which of the N tokens.


def chosen(targets):
    """Log-probs (n,) of the tokens themselves."""

    def read(h, logits, at):
        z = logits()  # (n, V)
        return (-torch.nn.functional.cross_entropy(z, targets[at], reduction="none"),)

    return read


def hidden_only(h, logits, at):
    """The teacher's hidden states (n, H): its whole distribution, if one has its head."""
    return (h,)


def top(k):
    """The k most likely tokens, (n, k) log-probs and (n, k) ids."""

    def read(h, logits, at):
        z = logits()  # (n, V)
        best, ids = z.topk(k)  # (n, k)
        return best - z.logsumexp(1, keepdim=True), ids

    return read


def distilled_top(targets, teacher_logp, teacher_ids):
    """logp (n,) and reverse KL (n,) over the teacher's K tokens (N, K) and one tail bin."""

    def read(h, logits, at):
        z = logits()  # (n, V)
        norm = z.logsumexp(1, keepdim=True)  # (n, 1)
        student = z.gather(1, teacher_ids[at]) - norm  # (n, K)
        return (z.gather(1, targets[at, None]) - norm)[:, 0], tail_kl(student, teacher_logp[at])

    return read


def distilled_full(targets, teacher_hidden, teacher_head, temperature):
    """logp (n,) and reverse KL (n,) over the whole vocabulary; teacher_hidden (N, H)."""

    def read(h, logits, at):
        student = logits().log_softmax(1)  # (n, V)
        with torch.no_grad():
            teacher = scaled(teacher_head(teacher_hidden[at]), temperature).log_softmax(1)
        return student.gather(1, targets[at, None])[:, 0], reverse_kl(student, teacher)

    return read


# ---------------------------------------------------------------------------- advantages and losses


def advantages(r, distil, teacher_logp, prox_logp, cfg):
    """A_t = w_rl * r + w_opd * clamp(logp_T,t - prox_logp_t, -5, 5), each part where there is one.

    r (N,), 0 where there is no reward part; distil (N,) bool; teacher_logp, prox_logp (N,) -> (N,)
    OPD is on-policy distillation: in expectation over pi_p this is the gradient of KL(pi_p || T).
    """
    hint = (teacher_logp - prox_logp).clamp(-cfg.opd_clip, cfg.opd_clip)  # (N,)
    return cfg.w_rl * r + cfg.w_opd * torch.where(distil, hint, torch.zeros_like(hint))


def ratio(new, old):
    """rho = exp(logp - old_logp), the log-ratio clamped to +-20 so that exp stays finite."""
    return (new - old).clamp(-20, 20).exp()


def clipped(rho, advantage, cfg):
    """PPO's surrogate with asymmetric clip (Schulman 2017; clip-higher: DAPO 2025) and a dual clip
    for A < 0 (Ye 2020):  max(-rho A, -clip(rho, 1 - low, 1 + high) A), for A < 0 at most -10 A.

    rho, advantage (N,) -> loss (N,), clipped (N,) bool where the clip took the gradient away
    """
    bounded = rho.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(-rho * advantage, -bounded * advantage)
    took = (-bounded * advantage > -rho * advantage) & (bounded != rho)
    ceiling = torch.where(advantage < 0, -cfg.dual_clip * advantage, torch.inf)
    return torch.minimum(loss, ceiling), took | (loss > ceiling)


def ppo(logp, prox_logp, rollout_logp, advantage, cfg, rows=None):
    """old = pi_b: the ratio repairs staleness and the difference between engine and trainer."""
    return clipped(ratio(logp, rollout_logp), advantage, cfg)


def decoupled(logp, prox_logp, rollout_logp, advantage, cfg, rows=None):
    """Decoupled PPO (AReaL, Fu 2025), with one update per batch truncated importance sampling (TIS,
    Yao 2025):  w * max(-u A, -clip(u) A), u = pi / pi_p, w = min(pi_p / pi_b, C) detached."""
    weight = ratio(prox_logp, rollout_logp).clamp(max=cfg.tis_cap).detach()  # (N,)
    loss, took = clipped(ratio(logp, prox_logp), advantage, cfg)
    return weight * loss, took


# ABLATE: --extra adds rows. --loss NAME picks all of its name; BEFORE also goes by --hint-choice.
LOSSES = {"ppo": ppo, "decoupled": decoupled}  # rows (N,): which turn a token belongs to
BEFORE = {}  # (trainer, turns): on the whole batch before its first update, to change the turns
READS = {}  # (trainer, batch, turns) -> what to read of the logits: logp (n,), a further loss (n,)


def k3(logp, ref_logp):
    """exp(x) - 1 - x, x = ref_logp - logp: on tokens of pi an unbiased, positive estimate of
    KL(pi || ref) (Schulman 2020). As a loss its expected gradient is that of KL(ref || pi). (N,)"""
    x = (ref_logp - logp).clamp(-20, 20)
    return x.exp() - 1 - x


def reverse_kl(student, teacher):
    """KL(pi || T) = sum_v pi_v (log pi_v - log T_v); log-probs (n, V) -> (n,)"""
    return (student.exp() * (student - teacher)).sum(1)


def log_tail(logp):
    """log(1 - sum_k p_k) of K log-probs (n, K) -> (n, 1). The plain form is -inf for sure tokens:
    log(-expm1(min(logsumexp(logp), -1e-6)))."""
    total = logp.logsumexp(1, keepdim=True).clamp(max=-1e-6)
    return (-torch.expm1(total)).log()


def tail_kl(student, teacher):
    """Reverse KL over the teacher's K tokens and one bin for all others; (n, K) -> (n,). Without
    the bin the loss would only raise the entropy."""
    return reverse_kl(torch.cat([student, log_tail(student)], 1),
                      torch.cat([teacher, log_tail(teacher)], 1))


def token_weights(counts, agg):
    """Weight of each sample's tokens (S,): mean over its tokens, then over samples ('sample'),
    or mean over all tokens ('token'). counts (S,) response tokens, all ranks and micro-batches."""
    if agg == "token":
        return [1 / sum(counts)] * len(counts)
    return [1 / (len(counts) * n) for n in counts]


# ------------------------------------------------------------------------------------ set-up


def load_lm(cfg, device):
    """-> (trainable model, frozen teacher or None for 'the same with the adapter off')."""
    from transformers import AutoModelForCausalLM

    def base(dtype):
        return AutoModelForCausalLM.from_pretrained(cfg.model, dtype=dtype).to(device)

    engine_dtype = getattr(torch, cfg.engine_dtype)
    if not cfg.lora_rank:
        teacher = (base(engine_dtype).eval().requires_grad_(False)
                   if cfg.teacher == "trainer" else None)
        return base(torch.float32), teacher
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank, lora_dropout=0.0,
                      target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    # The frozen base is held in the engine's dtype, as the engine holds it; adapters are float32.
    return get_peft_model(base(engine_dtype), lora, autocast_adapter_dtype=True), None


def make_accelerator(cfg):
    """bf16 engine -> bf16 autocast over float32 trainable weights; float32 engine -> float32. (A
    float32 trainer beside a bf16 engine believes in an adapter that users do not get.)"""
    precision = "bf16" if cfg.engine_dtype == "bfloat16" else "no"
    many = "LOCAL_RANK" in os.environ
    plugin = fsdp_plugin(cfg) if many and cfg.device != "cpu" else None
    return Accelerator(mixed_precision=precision, cpu=cfg.device == "cpu", fsdp_plugin=plugin,
                       log_with=cfg.tracker or None, project_dir=cfg.run_dir)


def fsdp_plugin(cfg):
    """FSDP2 over the model's layers (Policy names their class); gathered whole when saved."""
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    # accelerate then makes a group that can also gather what is on the CPU
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT",
                                          auto_wrap_policy="transformer_based_wrap",
                                          cpu_offload=offload if cfg.cpu_offload else False)


def compile_layers(policy):
    """--compile: each layer by itself, which is quick, survives FSDP and takes any length."""
    for module in policy.modules():
        if type(module).__name__ in (policy._no_split_modules or ()):
            module.compile(dynamic=True)


class Trainer:
    """Model, optimiser and what a step needs to know. One per rank."""

    def __init__(self, cfg):
        self.cfg, self.acc = cfg, make_accelerator(cfg)
        torch.manual_seed(cfg.seed)
        self.device = self.acc.device
        lm, teacher = load_lm(cfg, self.device)
        if cfg.gradient_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            lm.enable_input_require_grads()
            lm.train()  # transformers checkpoints in training mode only; there is no dropout
        self.teacher = teacher and Policy(teacher, cfg.temperature)
        policy = Policy(lm, cfg.temperature)
        if cfg.compile:
            compile_layers(policy)
        trainable = [p for p in policy.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(trainable, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.model, self.optimiser = self.acc.prepare(policy, optimiser)
        self.step = self.saved = 0  # updates done; those that the last checkpoint holds

    @property
    def policy(self):
        return self.acc.unwrap_model(self.model)

    # ---- forward passes

    def each(self, prompts, responses, model=None, temperature=None, read=None):
        """Forward without gradient, in micro-batches shared out among the ranks -> per turn the
        tuple that `read` gives, each tensor (R, ...), in the given order, on every rank."""
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        parts, world, found = cut(lengths, self.cfg.token_budget), self.acc.num_processes, {}
        with torch.no_grad(), self.acc.autocast():
            for k in range(self.acc.process_index, len(parts) + -len(parts) % world, world):
                part = parts[k % len(parts)]  # KEEP: as many forward passes on all ranks
                batch = collate([prompts[i] for i in part], [responses[i] for i in part],
                                self.device)
                flat = (model or self.model)(batch, temperature, read or chosen(batch.targets))
                sizes = [len(responses[i]) for i in part]
                # KEEP: a view would be sent to the other ranks with its whole storage
                columns = [[x.clone() for x in column.cpu().split(sizes)] for column in flat]
                found |= zip(part, zip(*columns, strict=True), strict=True)
        if world > 1:
            boxes = [None] * world
            torch.distributed.all_gather_object(boxes, found)
            found = {i: row for box in boxes for i, row in box.items()}
        return [found[i] for i in range(len(lengths))]

    def logp(self, prompts, responses, model=None, temperature=None):
        """Log-probs without gradient -> list of (R,) tensors."""
        return [row[0] for row in self.each(prompts, responses, model, temperature)]

    @contextlib.contextmanager
    def base(self):
        """The untouched model: the frozen copy, or the policy with its adapter off."""
        if self.teacher is not None:
            yield self.teacher
        elif not self.cfg.lora_rank:
            sys.exit("trainer: the base model is needed here: --teacher trainer keeps a copy of it")
        else:
            with self.policy.lm.disable_adapter():
                yield self.model

    def attach(self, turns):
        """What the step needs of the base model and of the policy before it: teacher and reference.

        The teacher scores the original response ids under their hinted prompts, with the student's
        arithmetic and temperature.
        """
        cfg, key = self.cfg, "teacher_top" if self.cfg.topk else "teacher_logp"
        todo = [t for t in turns if t["distil"] and not self.scored(t)]
        reads = {"": None, "full": hidden_only}
        read = reads[cfg.topk] if cfg.topk in reads else top(int(cfg.topk))
        if not todo and not cfg.kl_coef:
            return
        with self.base() as model:
            rows = self.each([hinted_prompt(t) for t in todo], [t["response_ids"] for t in todo],
                             model, read=read)
            for turn, row in zip(todo, rows, strict=True):
                turn[key] = row if cfg.topk else row[0]
            if cfg.kl_coef:
                refs = self.logp([t["prompt_ids"] for t in turns],
                                 [t["response_ids"] for t in turns], model)
                for turn, ref in zip(turns, refs, strict=True):
                    turn["ref_logp"] = ref

    def scored(self, turn):
        """Has an engine, or the run that is replayed, scored this turn as we need it?"""
        if not self.cfg.topk:
            return turn["teacher_logp"] is not None
        best = turn.get("teacher_top")  # log-probs and ids, (R, K) each
        return best is not None and str(len(best[0][0])) == self.cfg.topk

    # ---- one step

    def train(self, turns):
        """--updates-per-batch optimiser updates on a batch of turns (dicts) -> metrics. All ranks
        call it alike."""
        cfg = self.cfg
        for name in (cfg.hint_choice, cfg.loss):  # the hint first: the other may read it
            if name in BEFORE:
                BEFORE[name](self, turns)
        self.attach(turns)
        weights = token_weights([len(t["response_ids"]) for t in turns], cfg.loss_agg)
        for turn, weight in zip(turns, weights, strict=True):
            turn["age_s"] = age_s(turn)
            turn["weight"], turn["prox_logp"] = weight * freshness(turn, cfg), None
            turn["age"] = turn.get("recorded_age", self.step - turn["version_start"])
        stats = Stats(turns)
        for _ in range(cfg.updates_per_batch):
            grad_norm = self.update(turns, stats)
        self.share_prox(turns)
        return {**stats.gather(self.acc, cfg), "grad_norm": grad_norm}

    def share_prox(self, turns):
        """Each rank knows pi_p of the turns that it trained; for the record all get all."""
        if self.acc.num_processes > 1:
            boxes = [None] * self.acc.num_processes
            torch.distributed.all_gather_object(
                boxes, {t["id"]: t["prox_logp"].cpu() for t in turns
                        if t["prox_logp"] is not None})
            for turn in turns:
                turn["prox_logp"] = next(box[turn["id"]] for box in boxes if turn["id"] in box)

    def update(self, turns, stats):
        """One optimiser update over all micro-batches -> gradient norm before clipping."""
        world = self.acc.num_processes
        lengths = [len(t["prompt_ids"]) + len(t["response_ids"]) for t in turns]
        parts = [[turns[i] for i in part] for part in cut(lengths, self.cfg.token_budget)]
        real = len(parts)
        parts += [parts[0]] * (-real % world)  # KEEP: all ranks run the same number, or they hang
        self.optimiser.zero_grad()
        for k in range(self.acc.process_index, len(parts), world):
            last = k + world >= len(parts)
            with contextlib.nullcontext() if last else self.acc.no_sync(self.model):
                self.micro(parts[k], stats, dummy=k >= real)
        grad_norm = float(self.acc.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm))
        if not math.isfinite(grad_norm):  # before it is in the weights and in a checkpoint
            sys.exit(f"trainer: Error: the gradient of update {self.step + 1} is {grad_norm}; no "
                     "weight was changed (a smaller --lr? a row of --extra?)")
        self.optimiser.step()
        self.step += 1
        return grad_norm

    def micro(self, turns, stats, dummy):
        """Forward, loss and backward of one micro-batch; a dummy one has loss 0."""
        cfg = self.cfg
        batch = collate([t["prompt_ids"] for t in turns], [t["response_ids"] for t in turns],
                        self.device)
        outs = [x for x in self.forward(batch, turns) if x is not None]
        # The loss is taken at leaves and its slopes are sent into the model. KEEP: grad(loss, logp)
        # would start FSDP's backward on this rank only, and the ranks would hang.
        logp, *further = [x.detach().requires_grad_() for x in outs]  # (N,) each
        if turns[0]["prox_logp"] is None:  # pi_p is pi before the first update
            sizes = [len(t["response_ids"]) for t in turns]
            for turn, piece in zip(turns, logp.detach().split(sizes), strict=True):
                turn["prox_logp"] = piece
        prox_logp = self.flat(turns, lambda t: t["prox_logp"])  # (N,)
        rollout_logp = self.flat(turns, lambda t: t["rollout_logp"])  # (N,)
        teacher_logp = self.flat(turns, lambda t: zeros(t, t["teacher_logp"]))  # (N,)
        r = self.spread(turns, lambda t: t["r"] or 0.0)  # (N,)
        # with --topk the hint part is a loss of its own
        distil = self.spread(turns, lambda t: t["distil"] and not cfg.topk).bool()  # (N,)
        advantage = advantages(r, distil, teacher_logp, prox_logp, cfg)  # (N,)
        loss, was_clipped = LOSSES[cfg.loss](logp, prox_logp, rollout_logp, advantage, cfg,
                                             batch.rows)  # (N,)
        loss = sum(further, loss)
        if cfg.kl_coef:
            near = ratio(logp, rollout_logp).clamp(max=cfg.tis_cap).detach()  # (N,)
            ref_logp = self.flat(turns, lambda t: t["ref_logp"])  # (N,)
            loss = loss + cfg.kl_coef * near * k3(logp, ref_logp)
        loss = loss * self.spread(turns, lambda t: t["weight"])  # (N,)
        slopes = torch.autograd.grad(loss.sum(), [logp, *further])  # (N,) each token's pull
        if not dummy:
            pull = slopes[0].abs() + sum(x.detach().abs() for x in further)  # (N,)
            hint = torch.where(distil, teacher_logp - prox_logp, torch.nan)  # (N,)
            stats.add(cfg, turns, batch.rows, loss.detach(), pull, logp.detach(), prox_logp,
                      rollout_logp, was_clipped, advantage, hint)
        # DDP and FSDP average over ranks; the weights above are those of the whole step.
        scale = 0.0 if dummy else self.acc.num_processes
        self.acc.backward(sum((x * g).sum() for x, g in zip(outs, slopes, strict=True)) * scale)

    def forward(self, batch, turns):
        """-> logp (N,) and a further loss (N,) of --topk (the reverse KL to the teacher where there
        is a hint) or of a row of READS, else None."""
        cfg = self.cfg
        if cfg.loss in READS:
            return self.model(batch, read=READS[cfg.loss](self, batch, turns))
        if not cfg.topk:
            return self.model(batch), None
        columns = [torch.cat([self.top_of(t, k) for t in turns]).to(self.device)
                   for k in range(1 if cfg.topk == "full" else 2)]
        if cfg.topk == "full":
            read = distilled_full(batch.targets, columns[0], self.base_head(), cfg.temperature)
        else:
            read = distilled_top(batch.targets, *columns)
        logp, distance = self.model(batch, read=read)
        distil = self.spread(turns, lambda t: t["distil"]).bool()  # (N,)
        return logp, cfg.w_opd * torch.where(distil, distance, torch.zeros_like(distance))

    def base_head(self):
        """What turns the teacher's hidden states into logits."""
        with self.base() as model:
            return self.acc.unwrap_model(model).head()

    def top_of(self, turn, k):
        """Column k of a turn's teacher (R, ...); a turn without a hint gets one of weight 0."""
        if turn.get("teacher_top") is not None:
            return torch.as_tensor(turn["teacher_top"][k])
        n = len(turn["response_ids"])
        if self.cfg.topk == "full":
            return torch.zeros(n, self.policy.head().weight.shape[1])
        width = int(self.cfg.topk)
        return torch.zeros(n, width).long() if k else torch.full((n, width), -math.log(2 * width))

    def flat(self, turns, values):
        """Per turn R numbers -> (N,) on the device."""
        return torch.cat([torch.as_tensor(values(t), dtype=torch.float32) for t in turns]).to(
            self.device)

    def spread(self, turns, value):
        """One number per turn -> one per response token (N,)."""
        return self.flat(turns, lambda t: [float(value(t))] * len(t["response_ids"]))

    # ---- weights on disk

    def state(self):
        """Whole tensors of all that is trained, by the model's own names, on rank 0; the others get
        none. KEEP: on all ranks, or gathering the shards hangs. (accelerate's get_state_dict hands
        out shards under FSDP2 on a CPU.)"""
        trained = {n for n, p in self.policy.named_parameters() if p.requires_grad}
        out = {}
        for name, value in self.policy.state_dict().items():
            if name in trained:
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                if self.acc.is_main_process:
                    value = getattr(value, "wait", lambda v=value: v)()  # it may be under way
                    out[name.removeprefix("lm.")] = value.cpu()
        return out

    def save_adapter(self, folder, state=None):
        """PEFT adapter in the engine's dtype -> folder; every adapter tensor is in the file."""
        state, lm = state or self.state(), self.policy.lm
        dtype = getattr(torch, self.cfg.engine_dtype)
        trained = [n for n, p in lm.named_parameters() if p.requires_grad]
        folder.mkdir(parents=True)
        lm.peft_config["default"].save_pretrained(folder)
        write(folder / "adapter_model.safetensors", [n.replace(".default", "") for n in trained],
              {k.replace(".default", ""): v.to(dtype) for k, v in state.items() if "lora_" in k})

    def full(self, state):
        """All weights in the engine's dtype, by the names of its checkpoints, each of them."""
        lm, dtype = self.policy.lm, getattr(torch, self.cfg.engine_dtype)
        tied = (set(getattr(lm, "_tied_weights_keys", None) or ())
                if lm.config.tie_word_embeddings else set())
        tensors = {k: v.to(dtype) for k, v in state.items() if k not in tied}
        check_names(tensors, {n for n, _ in lm.named_parameters()} - tied)
        return tensors

    def save_full(self, folder, state=None):
        """All weights -> folder/model.safetensors -> bytes written."""
        tensors = self.full(state or self.state())
        return write(folder / "model.safetensors", tensors, tensors)

    # ---- checkpoints

    def save(self, folder, turns):
        """Weights, optimiser, step and random state -> folder/step-N.pt, whole or not at all, and
        beside it the ids of the turns that the last step trained. KEEP: on all ranks."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        weights, self.saved = self.state(), self.step
        moments = get_optimizer_state_dict(self.model, self.optimiser.optimizer, options=whole())
        if not self.acc.is_main_process:
            return
        folder.mkdir(exist_ok=True)
        path, ids = folder / f"step-{self.step}.pt", [t["id"] for t in turns]
        path.with_suffix(".json").write_text(json.dumps({"step": self.step, "turns": ids}))
        torch.save({"step": self.step, "weights": weights, "optimiser": moments,
                    "random": torch.get_rng_state()}, folder / "part")
        os.replace(folder / "part", path)
        for old in sorted(folder.glob("step-*.pt"), key=step_of)[:-2]:
            old.unlink()
            old.with_suffix(".json").unlink()

    def load(self, path):
        """A checkpoint -> this trainer, at its step. Every rank reads the file."""
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        saved = torch.load(path, map_location="cpu", weights_only=True)
        params = {n.removeprefix("lm."): p for n, p in self.policy.named_parameters()
                  if p.requires_grad}
        check_names(saved["weights"], params)
        wrong = [n for n, p in params.items() if p.shape != saved["weights"][n].shape]
        if wrong:
            raise SyncError(f"{path}: {len(wrong)} tensors have another shape, such as {wrong[0]}: "
                            "another --lora-rank?")
        with torch.no_grad():
            for name, p in params.items():
                value = saved["weights"][name].to(p.device)
                if hasattr(p, "placements"):  # this rank's share of it
                    value = torch.distributed.tensor.distribute_tensor(value, p.device_mesh,
                                                                       p.placements)
                p.copy_(value)
        set_optimizer_state_dict(self.model, self.optimiser.optimizer,
                                 optim_state_dict=saved["optimiser"], options=whole())
        for group in self.optimiser.param_groups:
            group["lr"] = self.cfg.lr  # of now, not of then
        torch.set_rng_state(saved["random"])
        self.step = self.saved = saved["step"]


def whole():
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def hinted_prompt(turn):
    return turn["hinted_prompt_ids"][turn["hints"].index(turn["hint"])]


def zeros(turn, values):
    return [0.0] * len(turn["response_ids"]) if values is None else values


def freshness(turn, cfg):
    """--freshness-half-life S: 2^(-seconds since the reply / S), else 1. The sum is still divided
    by the number of samples, or an old batch would not be damped at all."""
    if not cfg.freshness_half_life:
        return 1.0
    return 2.0 ** (-max(0.0, turn["age_s"]) / cfg.freshness_half_life)


def age_s(turn):
    """Seconds from the reply's end to its training; in a replay those of the recorded run."""
    return time.time() - turn["finished"] if turn["age_s"] is None else turn["age_s"]


class Stats:
    """Sums over response tokens of one batch, by the age of their turns in updates. Every metric is
    a sum over a count; what belongs to a turn is spread over its tokens."""

    KEYS = ("tokens turns loss ratio clipped capped kl advantage live fresh_turns fresh fresh_gap "
            "stale_gap update_gap hint_tokens hint hint_sq hint_clipped").split()

    def __init__(self, turns):
        self.ages = sorted({t["age"] for t in turns})  # the same on all ranks
        self.sums = torch.zeros(len(self.ages), len(self.KEYS), dtype=torch.float64)

    def add(self, cfg, turns, rows, loss, pull, logp, prox_logp, rollout_logp, was_clipped,
            advantage, hint):
        """One micro-batch. rows (N,) which turn; hint (N,) the distillation advantage before its
        bound, nan where there is none; all else (N,) as well. Log-ratios are not clamped here."""
        n = torch.bincount(rows, minlength=len(turns))[rows].double()  # (N,)
        fresh = torch.tensor([t["age"] == 0 and t["version_end"] == t["version_start"]
                              for t in turns], device=rows.device)[rows]  # (N,)
        live = torch.zeros(len(turns), device=rows.device).index_add_(0, rows, pull) > 0
        x, gap = logp - rollout_logp, (prox_logp - rollout_logp).abs()
        big = x.clamp(max=80).exp()
        has_hint = ~hint.isnan()
        hint = hint.nan_to_num()
        capped = (prox_logp - rollout_logp > math.log(cfg.tis_cap)) & (cfg.loss == "decoupled")
        columns = [torch.ones_like(x), 1 / n, loss, big, was_clipped, capped, big - 1 - x,
                   advantage, live[rows] / n, fresh / n, fresh, gap * fresh, gap * ~fresh,
                   (logp - prox_logp).abs(), has_hint, hint, hint * hint,
                   hint.abs() > cfg.opd_clip]
        at = torch.tensor([self.ages.index(t["age"]) for t in turns])[rows.cpu()]
        self.sums.index_add_(0, at, torch.stack([c.double() for c in columns], 1).cpu())

    def gather(self, acc, cfg):
        """Sum over ranks, then divide. Several updates on a batch count its tokens each time."""
        sums, updates = self.sums, cfg.updates_per_batch
        if acc.num_processes > 1:
            sums = acc.reduce(sums.to(acc.device), "sum").cpu()
        by_age = {age: self.ratios(row, cfg) for age, row in zip(self.ages, sums, strict=True)}
        s = dict(zip(self.KEYS, sums.sum(0).tolist(), strict=True))
        stale, hints = s["tokens"] - s["fresh"], s["hint_tokens"]
        mean = s["hint"] / hints if hints else None
        return {"loss": s["loss"] / updates, **self.ratios(sums.sum(0), cfg), "by_age": by_age,
                "advantage_mean": s["advantage"] / s["tokens"],
                "nonzero_grad_frac": s["live"] / s["turns"],
                "logp_gap_n": round(s["fresh_turns"] / updates),
                "logp_gap_turns": s["fresh_gap"] / s["fresh"] if s["fresh"] else None,
                "logp_gap_stale": s["stale_gap"] / stale if stale else None,
                "logp_gap_update": s["update_gap"] / s["tokens"],
                "opd_mean": mean,
                "opd_std": hints and max(0.0, s["hint_sq"] / hints - mean * mean) ** 0.5 or None,
                "opd_clip_frac": s["hint_clipped"] / hints if hints else None}

    def ratios(self, sums, cfg):
        s = dict(zip(self.KEYS, sums.tolist(), strict=True))
        return {"tokens": round(s["tokens"]), "ratio_mean": s["ratio"] / s["tokens"],
                "clip_frac": s["clipped"] / s["tokens"], "kl": s["kl"] / s["tokens"],
                "cap_frac": s["capped"] / s["tokens"] if cfg.loss == "decoupled" else None}


# -------------------------------------------------------------------------------------- the canary

CANARY = [  # four fixed exchanges, about 256 tokens with their prompts, scored after every sync
    ("Why does the moon change its shape?",
     "The moon does not really change. We see more or less of its sunlit half while it goes "
     "around us."),
    ("How do I keep cut flowers fresh?",
     "Trim the stems, change the water every other day and keep the vase away from the sun "
     "and fruit."),
    ("What is a library card good for?",
     "With a library card you can borrow books and films, use the computers and ask for "
     "quiet rooms."),
    ("Tell me something about salt.",
     "Salt is made of sodium and chlorine. People once paid with it, and food tastes flat "
     "without it."),
]


def canary_ids(tokenizer):
    """-> prompts, replies: lists of token ids."""
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=True,
                                             add_generation_prompt=True, return_dict=False)
               for q, _ in CANARY]
    return prompts, [tokenizer.encode(a, add_special_tokens=False) for _, a in CANARY]


class Service:
    """A rank's link to the outside. Only rank 0 has a queue (in main) and an engine; what it learns
    goes to the other ranks by `share`."""

    def __init__(self, cfg, trainer, queue, tokenizer):
        self.cfg, self.trainer, self.queue, self.tokenizer = cfg, trainer, queue, tokenizer
        self.boss, many = trainer.acc.is_main_process, trainer.acc.num_processes > 1
        # gloo: an idle NCCL broadcast keeps the GPUs busy
        self.group = torch.distributed.new_group(backend="gloo") if many else None
        self.prompts, self.replies = canary_ids(tokenizer)
        self.http = urllib3.PoolManager(retries=False,
                                        timeout=urllib3.Timeout(connect=10, read=300))
        self.sync = Sync(cfg, cfg.engine_url, queue, self.engine_canary)
        self.blocked = None  # since when all adapter slots have been in use
        # KEEP: vLLM caches prompts by an adapter's name and path, and an engine that is not ours
        # still has those of a run that was here before.
        self.tag = f"-{time.time_ns()}" if cfg.policy_url else ""

    def share(self, ask):
        """Rank 0 asks; all ranks get the answer."""
        box = [ask() if self.boss else None]
        if self.group:
            torch.distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def engine_canary(self, name):
        """The engine's canary log-probs under one of its model names. One text after another:
        users' streams wait for a text, not for all four."""
        engine = policy_engine(self.cfg, name)
        return [x for p, r in zip(self.prompts, self.replies, strict=True)
                for x in engine_logp(self.http, engine, p, r)]

    def trainer_canary(self):
        """The same under the trainer's current weights, about 90 tokens."""
        return torch.cat(self.trainer.logp(self.prompts, self.replies, temperature=1.0)).tolist()

    def start(self):
        """Version 0: engine and trainer agree on the untouched model, before the first user. With
        --resume that is checked as well, and then the restored version is put into service."""
        if self.cfg.replay:
            return
        t_0 = self.trainer_canary()
        if self.boss:
            gap = self.sync.start(t_0)
            say(f"version 0 checked: logp_gap {gap:.4f} between engine and trainer")
        if self.cfg.resume:
            self.trainer.load(self.cfg.checkpoint)
            done = self.push()
            if self.boss:
                say(f"version {self.trainer.step} is back: {done}")
        elif self.boss:
            self.queue.publish(0, BASE)

    def push(self):
        """Put the current weights into service -> metrics, or None while all slots are in use."""
        if self.cfg.replay:
            return {}
        if self.cfg.lora_rank and not self.share(self.sync.has_slot):
            self.blocked = self.blocked or time.monotonic()
            return None
        start, version, t_new, done = time.monotonic(), self.trainer.step, self.trainer_canary(), {}
        waited, self.blocked = start - (self.blocked or start), None
        state = self.trainer.state()
        if self.cfg.lora_rank and self.boss:
            folder = Path(self.cfg.run_dir) / "adapters" / f"v{version}{self.tag}"
            shutil.rmtree(folder, ignore_errors=True)  # of a run that is resumed
            self.trainer.save_adapter(folder, state)
            done = self.sync.push_lora(version, folder, t_new)
        elif self.boss:
            done = self.sync.push_full(version, self.trainer.full(state), t_new)
        self.trainer.acc.wait_for_everyone()
        return {**done, "sync_wait_s": waited, "check_s": time.monotonic() - start}

    def keep(self):
        """Full weights are swapped through memory; the last version stays in the run directory,
        as a model folder that vLLM and transformers load. (Adapters are there already.)"""
        if self.cfg.lora_rank or not self.trainer.step:
            return
        state, folder = self.trainer.state(), Path(self.cfg.run_dir) / "weights"
        if self.boss:
            folder /= f"v{self.trainer.step}"
            folder.mkdir(parents=True, exist_ok=True)
            self.trainer.save_full(folder, state)
            self.trainer.policy.lm.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


# ----------------------------------------------------------------------------------------- the loop

REPLAYED = ("run_dir", "seed", "hint_choice", "extra", "tracker")  # beside the training knobs
QUEUE = ("schedule", "window", "max_staleness", "max_wait", "sync_every", "max_train_len")


def connect():
    """The sample queue that main holds, over its Unix socket."""
    BaseManager.register("queue")
    manager = BaseManager(os.environ["OPENCLAW_QUEUE"], bytes.fromhex(os.environ["OPENCLAW_KEY"]))
    manager.connect()
    return manager.queue()


class Recorded:
    """--replay: the judged turns of a recorded run in place of main's queue. Batch k is what step k
    trained then, or, with another --batch-size, the next so many turns."""

    def __init__(self, cfg):
        turns = [t for t in load_turns(cfg.replay).values() if t.fate == "trained"]
        for turn in turns:
            choose_again(turn, cfg)
            if turn.age_s is None:  # an older record
                turn.age_s = max(0.0, turn.closed - turn.finished)
            turn.version_end = -1  # none of them was sampled by this trainer's weights
        turns.sort(key=lambda t: t.step)  # stable: the order of the file within a step
        steps, n = sorted({t.step for t in turns}), cfg.batch_size
        self.updates = cfg.recorded_updates  # a turn's step is the number after its batch
        self.batches = [turns[i : i + n] for i in range(0, len(turns), n)] if cfg.rebatch else [
            [t for t in turns if t.step == k] for k in steps]

    def lease(self, n):
        turns = self.batches.pop(0) if self.batches else []
        ages = [{"recorded_age": t.step - self.updates - t.version_start} for t in turns]
        return {"turns": [asdict(t) | age for t, age in zip(turns, ages, strict=True)],
                "stop": not turns,
                "window": judged_numbers(turns) | {"dropped": {}, "queue_depth": 0}}

    def commit(self, step, fates, found):
        pass

    def status(self, line=False):
        return {"version": 0, "gap_max": 0.0, "ready": sum(map(len, self.batches))}


def choose_again(turn, cfg):
    """The recorded hints under this run's --hint-choice; another hint has another teacher."""
    if turn.hint and turn.hint_skip is None:
        hint = HINT_CHOICE[cfg.hint_choice](turn.hints)
        if hint != turn.hint:
            turn.hint, turn.teacher_logp, turn.teacher_top = hint, None, None


def replay_config(argv):
    """--replay RUN/turns.jsonl [--run-dir DIR] [--knob value]: the recorded run's config with the
    given training knobs changed. What was decided while serving and judging cannot be changed."""
    if len(argv) % 2 or not all(flag.startswith("--") for flag in argv[::2]):
        sys.exit("trainer: --replay RUN/turns.jsonl [--knob value ...]")
    given = {k[2:].replace("-", "_"): v for k, v in zip(argv[::2], argv[1::2], strict=True)}
    path = Path(given.pop("replay"))
    if not path.is_file() or not (path.parent / "config.json").is_file():
        sys.exit(f"trainer: --replay {path}: no such file, or no config.json beside it")
    cfg = load_config(path.parent)
    forget_engines(vars(cfg))
    cfg.run_dir = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-replay"
    cfg.recorded_updates = cfg.updates_per_batch
    knobs = {f.name: f for f in fields(Config)}
    for key, value in given.items():
        flag = f"--{key.replace('_', '-')}"
        if key not in knobs or not (knobs[key].metadata["group"] == "training" and key not in QUEUE
                                    or key in REPLAYED):
            sys.exit(f"trainer: {flag} is not a knob of training: a replay cannot change it")
        kind, choices = knobs[key].type, knobs[key].metadata["choices"]
        choices = ("true", "false") if kind is bool else choices
        if choices and value not in choices:
            sys.exit(f"trainer: {flag} {value}: one of {', '.join(choices)} is needed")
        try:
            setattr(cfg, key, value == "true" if kind is bool else kind(value))
        except ValueError:
            sys.exit(f"trainer: {flag} {value}: {kind.__name__} is needed")
    if cfg.loss != "decoupled" and "tis_cap" not in given:
        cfg.tis_cap = AUTO  # the recorded one belonged to another loss, or was filled in
    if (Path(cfg.run_dir) / "metrics.jsonl").exists():
        sys.exit(f"trainer: --run-dir {cfg.run_dir} holds a run already; name another one")
    cfg.replay, cfg.rebatch, cfg.engine_url, cfg.api_key = str(path), "batch_size" in given, "", "-"
    cfg.save_every = 0  # what is replayed can be replayed again
    if cfg.extra:
        load_extra(cfg.extra)
    try:
        fill_tis_cap(cfg)
        validate(cfg)
    except Problem as problem:
        sys.exit(f"trainer: {problem}")
    Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
    (Path(cfg.run_dir) / "config.json").write_text(json.dumps(vars(cfg), indent=1))
    return cfg


def run(cfg):
    """Lease, train, commit, sync, until main says stop."""
    from transformers import AutoTokenizer

    if cfg.loss not in LOSSES:
        sys.exit(f"trainer: --loss {cfg.loss} is not one of {', '.join(LOSSES)}")
    if cfg.topk and cfg.loss in READS:
        sys.exit(f"trainer: --topk {cfg.topk} and --loss {cfg.loss} both say what to distil")
    source = Recorded(cfg) if cfg.replay else None
    if source and not source.batches:
        sys.exit(f"trainer: {cfg.replay} holds no trained turn")
    trainer = Trainer(cfg)
    queue = (source or connect()) if trainer.acc.is_main_process else None
    service = Service(cfg, trainer, queue, AutoTokenizer.from_pretrained(cfg.model))
    service.start()
    if cfg.tracker:
        trainer.acc.init_trackers("nano-openclaw-rl", {k: str(v) for k, v in vars(cfg).items()})
    idle_since, unsynced, synced, trained = time.monotonic(), 0, {}, []
    while True:
        lease = service.share(lambda: queue.lease(cfg.batch_size))
        metrics = None
        if lease["turns"]:
            metrics = {"wait_s": time.monotonic() - idle_since, **step(service, lease["turns"])}
            unsynced, trained = unsynced + cfg.updates_per_batch, lease["turns"]
        if unsynced and (lease["stop"] or sync_due(service, unsynced)):
            done = service.push()
            if done is not None:  # a sync between two steps is shown with the next one
                unsynced, synced = 0, done
        if metrics:
            if service.boss:
                report(service, lease, metrics, synced)
            synced = {}
            idle_since = time.monotonic()
        elif lease["stop"] and not unsynced:
            break
        else:
            time.sleep(0.5)  # "nothing yet" went around too: no rank may wait in a collective
    service.keep()
    if cfg.save_every and trainer.saved != trainer.step:
        trainer.save(Path(cfg.run_dir) / "checkpoints", trained)
    trainer.acc.end_training()


def sync_due(service, unsynced):
    """--sync-every n, or auto: when less than a batch waits (the trainer has caught up), or when
    max(1, eta) updates are not served yet."""
    cfg = service.cfg
    if cfg.sync_every != "auto":
        return unsynced >= cfg.sync_every
    ready = service.share(lambda: service.queue.status()["ready"])
    return ready < cfg.batch_size or unsynced >= max(1, cfg.max_staleness)


def step(service, turns):
    """Train and commit -> metrics. A trainer that dies in between has trained nothing: its weights
    are gone, and main puts the turns back into their places."""
    start, trainer, cfg = time.monotonic(), service.trainer, service.cfg
    metrics = trainer.train(turns)
    if cfg.save_every and trainer.step % cfg.save_every < cfg.updates_per_batch:
        trainer.save(Path(cfg.run_dir) / "checkpoints", turns)  # KEEP: before the commit
    if service.boss:
        service.queue.commit(trainer.step, {t["id"]: "trained" for t in turns},
                             {t["id"]: scores(t) for t in turns})
    return metrics | {"train_s": time.monotonic() - start}


def scores(turn):
    """What the step found out about a turn's tokens: for the record, and for --replay."""
    found = {k: turn[k] for k in ("prox_logp", "teacher_logp") if turn[k] is not None}
    found = {k: [round(x, 5) for x in torch.as_tensor(v).tolist()] for k, v in found.items()}
    # a row of BEFORE may have chosen another hint
    return found | {"hint": turn["hint"], "age_s": turn["age_s"]}


# ------------------------------------------------------------------------------------ what is shown


def report(service, lease, metrics, synced):
    """One line and one decoded turn on screen, the same in metrics.jsonl and the trackers."""
    cfg, trainer = service.cfg, service.trainer
    turns, window, status = lease["turns"], lease["window"], service.queue.status(True)
    ages, seconds = [t["age"] for t in turns], [t["age_s"] for t in turns]
    scored = [t["score"] for t in turns if t["score"] is not None]
    row = {"step": trainer.step, "version": status["version"], **window, **metrics,
           "turns": len(turns), "logp_gap": synced.get("logp_gap"), "canary": synced.get("canary"),
           "age_mean": sum(ages) / len(ages), "age_max": max(ages),
           "age_hist": {a: ages.count(a) for a in sorted(set(ages))},
           "age0_frac": ages.count(0) / len(ages),
           "age_s_mean": sum(seconds) / len(ages), "age_s_max": max(seconds),
           "trained_reward_mean": sum(scored) / len(scored) if scored else None,
           "trained_tokens_mean": sum(len(t["response_ids"]) for t in turns) / len(turns),
           "trained_frac": len(turns) / window["judged"] if window["judged"] else None,
           "sync_s": synced.get("sync_s", 0.0), "sync_wait_s": synced.get("sync_wait_s", 0.0),
           "check_s": synced.get("check_s", 0.0), "pause_s": synced.get("pause_s", 0.0),
           "sync_gap_max_s": status["gap_max"], "time": time.time(),
           "tokens_per_s": metrics["tokens"] / metrics["train_s"]}
    with open(Path(cfg.run_dir) / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    flat = {k: v for k, v in row.items() if isinstance(v, int | float)}
    trainer.acc.log(flat, step=trainer.step)
    say(step_line(row) + "\n" + show_turn(turns[0], service.tokenizer))


def step_line(row):
    """The fixed order of the screen line; `-` stands for 'nothing to measure'."""

    def num(key, digits=2):
        return "-" if row[key] is None else f"{row[key]:.{digits}f}"

    votes = row["votes"]
    dropped = " ".join(f"{k}:{n}" for k, n in row["dropped"].items()) or "none"
    return (f"step {row['step']:>3} v{row['version']} | reward {num('reward_mean')} of "
            f"{row['judged']} (+{votes['plus']} 0:{votes['zero']} -{votes['minus']} "
            f"?{votes['invalid']}) "
            f"tokens {num('reply_tokens', 0)} hint {num('hint_rate')} cut {num('cut_frac')} | "
            f"loss {num('loss', 3)} gap {num('logp_gap', 4)} turns' {num('logp_gap_turns', 4)} "
            f"ratio {num('ratio_mean')} clip {num('clip_frac')} cap {num('cap_frac')} "
            f"|g| {num('grad_norm')} | "
            f"age {num('age_mean', 1)}/{row['age_max']} | wait {num('wait_s', 1)} "
            f"train {num('train_s', 1)} sync {num('sync_s')} s | not trained: {dropped}"
            + (" | CANARY SUSPICIOUS" if row["canary"] == "suspicious" else ""))


def show_turn(turn, tokenizer):
    """One trained turn, readable: what was asked, answered, said next, and how it was judged."""
    asked = next((m["content"] for m in reversed(turn["messages"]) if m["role"] == "user"), "")
    rows = {"user": strip_wrappers(asked)[0], "reply": tokenizer.decode(turn["response_ids"]),
            "then": " / ".join(m["content"] for m in turn["next_state"]),
            "judged": f"votes {turn['votes']} score {turn['score']}, hint: {turn['hint']}"}
    return "\n".join(f"      {k:>6}: {shorten(v)}" for k, v in rows.items())


def shorten(text, width=150):
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 4] + " ..."


def load_config(run_dir):
    """config.json; knobs that it is too old to know have their defaults."""
    return SimpleNamespace(**vars(Config())
                           | json.loads((Path(run_dir) / "config.json").read_text()))


if __name__ == "__main__":
    sys.modules["trainer"] = sys.modules["__main__"]  # so that --extra files see this very module
    replayed = "--replay" in sys.argv
    config = replay_config(sys.argv[1:]) if replayed else load_config(sys.argv[1])
    if config.extra and not replayed:
        load_extra(config.extra)
    try:
        run(config)
    except (SyncError, EOFError, ConnectionError) as error:
        sys.exit(f"trainer: {error or type(error).__name__}")
