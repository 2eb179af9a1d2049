"""Rules that few need, as drop-in rows: --extra examples/rules.py.

    --loss opsm              leave out bad replies that pi has drifted away from   (DeepSeek-V3.2)
    --loss batch_norm        scores relative to the batch                          (REINFORCE++)
    --loss entropy           a bonus for staying undecided                         (A3C)
    --loss hybrid            distil over the student's own likeliest tokens        (OpenClaw-RL)
    --hint-choice overlap    the hint whose teacher is nearest to the student      (OpenClaw-RL)
    --hint-choice shortest   the shortest valid hint                               (OpenClaw-RL)

    python main.py --mode combine --loss hybrid --hint-choice overlap --extra examples/rules.py
    python trainer.py --replay runs/MINE/turns.jsonl --loss opsm --extra examples/rules.py

--loss NAME takes the rows called NAME in trainer's LOSSES, BEFORE and READS; --hint-choice NAME
those in judge.HINT_CHOICE and BEFORE. Letters are those of trainer.py: pi_b sampled the turn
(rollout_logp), pi_p is the policy at the step's start (prox_logp), pi the current one (logp),
T the teacher, r the score, N response tokens, n those of a chunk, V the vocabulary.
"""

import statistics
import sys

from judge import HINT_CHOICE

# main and the simulated users load this file as well: no torch there, and only judge's rows. The
# trainer is called "trainer" before it loads this file.
TRAINING = "trainer" in sys.modules
if TRAINING:
    import torch

    from trainer import BEFORE, LOSSES, READS, clipped, hinted_prompt, ppo, ratio, top

OPSM_DELTA = 0.1  # nats per token; the report names no value
NORM_EPS = 1e-8  # only keeps 0 / 0 away
ENTROPY_BETA = 0.001  # nats of loss per nat of entropy
K = 4  # size of the sets compared or distilled over (the paper's value)
HYBRID_CLIP = 1.0  # bound of log T - log pi_p per token of the support (the paper's value)

# ------------------------------------------------------------------ off-policy sequence masking


def turn_means(values, rows):
    """The mean over each turn's tokens; values, rows (N,) -> (turns,)"""
    sums = torch.zeros(int(rows.max()) + 1, device=rows.device).index_add_(0, rows, values)
    return sums / torch.bincount(rows)


def opsm(logp, prox_logp, rollout_logp, advantage, cfg, rows):
    """Off-policy sequence masking (DeepSeek-V3.2, 2025), on top of ppo:

        loss_t = 0 for a whole turn where  mean_t A_t < 0  and  mean_t log(pi_b / pi) > delta

    The second mean estimates KL(pi_b || pi) per token; it grows with the age of a turn, and where
    engine and trainer compute differently. A policy learns from its own mistakes; those that it
    would not make any more mislead it, and pushing unlikely tokens further down has no floor. A
    good turn that pi has left is worth returning to: with mean A >= 0 nothing is left out.

    The report has one A per sequence. With A per token (opd) the sign is that of the turn's mean.
    Tokens left out stay in the denominator of the step's mean, and are counted in clip_frac.
    All (N,); rows say which tokens make a turn.
    """
    drift = turn_means(rollout_logp - logp.detach(), rows)  # (turns,)
    out = ((turn_means(advantage, rows) < 0) & (drift > OPSM_DELTA))[rows]  # (N,)
    loss, took = ppo(logp, prox_logp, rollout_logp, advantage, cfg)  # (N,)
    return loss.masked_fill(out, 0.0), took | out


# ------------------------------------------------------------------------- scores of the batch


def batch_norm(trainer, turns):
    """Scores relative to the batch (REINFORCE++, Hu 2025), before ppo:

        r <- (r - mean r) / (std r + eps)   over the turns of the batch that have a reward part

    It is a baseline without a critic and without several replies to one prompt: the batch is the
    group. All ranks hold the whole batch, so mean and std (of the population) are the same on
    each. REINFORCE++ takes both over tokens; here every turn counts once, as in the step's mean.

    Equal scores all become 0: no gradient from them, so a batch of nothing but approval teaches
    nothing. That, and that a score's sign comes to depend on whose turns share its batch (a score
    of 0 gets one too), is why the system's default leaves r as it is.
    """
    scored = [t for t in turns if t["r"] is not None]
    if scored:
        r = [float(t["r"]) for t in scored]
        mean, std = statistics.fmean(r), statistics.pstdev(r)
        for turn in scored:
            turn["r"] = (turn["r"] - mean) / (std + NORM_EPS)


# --------------------------------------------------------------------------------------- entropy


def entropy(trainer, batch, turns):
    """ppo and an entropy bonus (Williams & Peng 1991; A3C, Mnih 2016). A further loss per token:

        -beta H(pi_t),   H = -sum_v pi_v log pi_v   over the whole vocabulary

    It keeps the policy from settling on one phrasing: approval and correction can only choose
    among replies that still differ. Taken where pi_b went, without an importance weight. It pulls
    at every token, so nonzero_grad_frac is 1. A large beta wins in the end: noise has the most H.
    """

    def read(h, logits, at):
        student = logits().log_softmax(1)  # (n, V)
        logp = student.gather(1, batch.targets[at, None])[:, 0]  # (n,)
        return logp, ENTROPY_BETA * (student.exp() * student).sum(1)  # (n,), (n,)

    return read


# --------------------------------------------------------------------------------- choice of hint


def fitting(turn, cfg):
    """Which of the turn's hints may teach: those whose prompt and reply are not too long."""
    room = cfg.max_train_len - len(turn["response_ids"])
    return [i for i, ids in enumerate(turn["hinted_prompt_ids"]) if len(ids) <= room]


def overlap(ids, others):
    """How many of the K tokens of a position are in both sets, over all; (R, K), (R, K) -> int"""
    return int((ids[:, :, None] == others[:, None, :]).sum())


def nearest(hints, shared):
    """shared: index of a hint -> its overlap. The largest; of equals the longest hint, then the
    first."""
    return max(shared, key=lambda i: (shared[i], len(hints[i])))


def by_overlap(trainer, turns):
    """The hint whose teacher is nearest to the student (OpenClaw-RL's paper, later version, 2026):

        h* = argmax_h sum_t | top-K of pi_p(. | s_t)  and  top-K of T(. | s_t, h) |,   K = 4

    The student reads its own prompt, the base model each hinted one; ties go to the longest hint.
    A teacher that expects quite other tokens than the student can only say "all wrong" about the
    reply; one that shares them tells better from worse. Costs a forward pass of the student and
    one per hint; turns with one hint, or without distillation, cost nothing and stay as they are.
    """
    todo = [(t, fits) for t in turns if t["distil"] and len(fits := fitting(t, trainer.cfg)) > 1]
    if not todo:
        return
    own = trainer.each([t["prompt_ids"] for t, _ in todo], [t["response_ids"] for t, _ in todo],
                       read=top(K))  # per turn log-probs and ids, (R, K) each
    with trainer.base() as model:
        taught = iter(trainer.each([t["hinted_prompt_ids"][i] for t, fits in todo for i in fits],
                                   [t["response_ids"] for t, fits in todo for _ in fits],
                                   model, read=top(K)))
    for (turn, fits), (_, ids) in zip(todo, own, strict=True):
        shared = {i: overlap(ids, next(taught)[1]) for i in fits}
        hint = turn["hints"][nearest(turn["hints"], shared)]
        if hint != turn["hint"]:  # another hint has another teacher
            turn |= {"hint": hint, "teacher_logp": None, "teacher_top": None}


# ---------------------------------------------------------------------------------------- hybrid


def at_ids(ids):
    """Reads the log-probs (n, K) of given tokens; ids (N, K)."""

    def read(h, logits, at):
        z = logits()  # (n, V)
        return (z.gather(1, ids[at]) - z.logsumexp(1, keepdim=True),)

    return read


def attach_support(trainer, turns):
    """turn["support"]: S_t, log pi_p and log T on it, (R, K) each. They are read here, before the
    first update, so that with --updates-per-batch 2 pi_p is still that of the step's start.

    turn["distil"] becomes False: for the rest of the step the turn has a reward part only, and
    the teacher is not read a second time. (So opd_mean and opd_clip_frac, which are about the
    sampled tokens, show nothing; weights and counts go by tokens and do not change.)
    """
    hinted = [t for t in turns if t["distil"]]
    if not hinted:
        return
    own = trainer.each([t["prompt_ids"] for t in hinted], [t["response_ids"] for t in hinted],
                       read=top(K))
    with trainer.base() as model:
        for turn, (prox, ids) in zip(hinted, own, strict=True):  # one by one: each has its own ids
            (teacher,), = trainer.each([hinted_prompt(turn)], [turn["response_ids"]], model,
                                       read=at_ids(ids.to(trainer.device)))
            turn |= {"support": (ids, prox, teacher), "distil": False}


def no_support(turn):
    """For a turn without a hint: log pi_p = log T, so that A is 0."""
    zeros = torch.zeros(len(turn["response_ids"]), K)  # (R, K)
    return zeros.long(), zeros, zeros


def support_loss(logp, prox_logp, teacher_logp, cfg):
    """The hybrid loss of a position; (n, K) three times -> (n,). See hybrid."""
    weight = prox_logp.softmax(1)  # (n, K)
    advantage = (teacher_logp - prox_logp).clamp(-HYBRID_CLIP, HYBRID_CLIP)  # (n, K)
    return (weight * clipped(ratio(logp, prox_logp), advantage, cfg)[0]).sum(1)


def hybrid(trainer, batch, turns):
    """ppo on the score, and OpenClaw-RL's later hint loss (2026) over S_t, the K = 4 tokens that
    pi_p finds likeliest. A further loss per token of turns with a hint:

        w_opd * sum_k w_k max(-u_k A_k, -clip(u_k, 1 - low, 1 + high) A_k),   k in S_t
        w = softmax over S_t of log pi_p,  u = pi / pi_p,  A = clamp(log T - log pi_p, -1, 1)

    Log-probs are over the whole vocabulary; only w is renormalised. (Trainer's `clipped` adds its
    dual clip, which needs u > 10.) One sampled token says little about T: if it was a rare one,
    the hint is spent on it. K of them say in which direction to change what pi would say here.

    Against reverse KL over S_t: the same gradient at u = 1, divided by pi_p's mass on S_t, with
    the log-ratio clamped and without the term sum_k pi_k grad log pi_k, which is 0 for all of V.
    """
    rows = [t.get("support") or no_support(t) for t in turns]
    ids, prox, teacher = (torch.cat(c).to(trainer.device) for c in zip(*rows, strict=True))
    cfg = trainer.cfg  # ids, prox, teacher: (N, K)

    def read(h, logits, at):
        z = logits()  # (n, V)
        norm = z.logsumexp(1, keepdim=True)  # (n, 1)
        loss = support_loss(z.gather(1, ids[at]) - norm, prox[at], teacher[at], cfg)  # (n,)
        return (z.gather(1, batch.targets[at, None]) - norm)[:, 0], cfg.w_opd * loss

    return read


# ------------------------------------------------------------------------------------- the rows

# Judge threads have no model: they take the longest hint, and by_overlap looks again.
HINT_CHOICE |= {"overlap": HINT_CHOICE["longest"], "shortest": lambda hints: min(hints, key=len)}
if TRAINING:
    LOSSES |= {"opsm": opsm, "batch_norm": ppo, "entropy": ppo, "hybrid": ppo}
    BEFORE |= {"batch_norm": batch_norm, "hybrid": attach_support, "overlap": by_overlap}
    READS |= {"entropy": entropy, "hybrid": hybrid}
