"""The richer losses: decoupled, k3, distillation over a distribution; by hand and against loops."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from test_trainer import KNOBS, config, gradients, make_trainer, make_turns, tiny

import trainer as T

LOG = math.log


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32)


def knobs(**changes):
    return SimpleNamespace(**vars(KNOBS) | {"tis_cap": 5.0} | changes)


def test_decoupled_by_hand():
    """u = pi/pi_p, w = min(pi_p/pi_b, 5).
    Token 1: u = 1, w = 2, A = 1: loss -2. Token 2: u = 1.5 clipped at 1.28, w = 1, A = 1: -1.28.
    Token 3: u = 1, pi_p/pi_b = 8 capped at 5, A = -1: 5. Token 4: u = 0.5 clipped at 0.8, A = -1,
    w = 0.5: 0.5 * 0.8 = 0.4."""
    prox = tensor(0, 0, 0, 0)
    loss, took = T.decoupled(tensor(0, LOG(1.5), 0, LOG(0.5)), prox,
                             tensor(-LOG(2), 0, -LOG(8), LOG(2)), tensor(1, 1, -1, -1), knobs())
    assert loss.tolist() == pytest.approx([-2, -1.28, 5, 0.4], abs=1e-5)
    assert took.tolist() == [False, True, False, True]


def test_decoupled_against_a_loop():
    g = torch.Generator().manual_seed(0)
    logp, prox, rollout = (torch.randn(200, generator=g) * 0.5 for _ in range(3))
    a = torch.randn(200, generator=g)
    loss, _ = T.decoupled(logp, prox, rollout, a, knobs(tis_cap=1.5))
    for i in range(200):
        u, adv = math.exp(logp[i] - prox[i]), a[i].item()
        want = max(-u * adv, -min(max(u, 0.8), 1.28) * adv)
        want = min(want, -10 * adv) if adv < 0 else want
        weight = min(math.exp(prox[i] - rollout[i]), 1.5)
        assert loss[i].item() == pytest.approx(weight * want, abs=1e-5)


def test_tis_weight_has_no_gradient():
    """w = pi_p/pi_b scales the loss (-e here) but is detached: with pi_p = pi both live, u is 1
    whatever the policy does, so all that could move the loss would be w."""
    logp = tensor(0.0).requires_grad_()
    loss = T.decoupled(logp, logp, tensor(-1), tensor(1), knobs())[0]
    loss.sum().backward()
    assert loss.item() == pytest.approx(-math.e, abs=1e-5) and logp.grad.item() == 0


def test_k3_by_hand():
    """x = ref - logp = ln 2: 2 - 1 - ln 2 = 0.30685; x = 0: 0; x = -ln 2: 0.5 - 1 + ln 2."""
    got = T.k3(tensor(0, 0, 0), tensor(LOG(2), 0, -LOG(2)))
    assert got.tolist() == pytest.approx([0.306853, 0, 0.193147], abs=1e-5)
    assert torch.isfinite(T.k3(tensor(-200, 200), tensor(0, 0))).all()


def test_tail_kl_by_hand():
    """Vocabulary of 3, K = 1. pi = (0.5, 0.25, 0.25), T = (0.8, 0.1, 0.1): bins (0.5, 0.5) against
    (0.8, 0.2): 0.5 ln(0.5/0.8) + 0.5 ln(0.5/0.2) = 0.223144."""
    got = T.tail_kl(tensor(LOG(0.5))[None], tensor(LOG(0.8))[None])
    assert got.item() == pytest.approx(0.223144, abs=1e-5)


@pytest.mark.parametrize("gap", [1e-9, 1e-7, 1e-3])
def test_sure_tokens_stay_finite(gap):
    """E7: log(1 - sum p) is -inf in the plain form when a token is sure; once the loss was nan."""
    sure = tensor(math.log1p(-gap))[None].requires_grad_()
    loss = T.tail_kl(sure, tensor(LOG(0.5))[None])
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(sure.grad).all()
    assert loss.item() == pytest.approx(LOG(2), abs=0.02)


def test_distillation_points_to_the_teacher():
    """E5: 3-token vocabulary, all (teacher, start) of a grid: a small step down the loss brings the
    student's distribution closer to the teacher's, with a tail bin and over the full vocabulary."""
    grid = [p for p in itertools.product((0.1, 0.3, 0.6, 0.8), repeat=2) if sum(p) < 0.95]
    for t, s in itertools.permutations(grid, 2):
        teacher = tensor(*t, 1 - sum(t)).log()
        for k in (2, 3):
            z = tensor(*s, 1 - sum(s)).log().requires_grad_()
            student, top = z.log_softmax(0), teacher.topk(2)
            loss = (T.tail_kl(student[top.indices][None], top.values[None]) if k == 2
                    else T.reverse_kl(student[None], teacher[None]))
            loss.sum().backward()
            after = (z - 0.05 * z.grad).log_softmax(0).detach()
            was = T.reverse_kl(student.detach()[None], teacher[None]).item()
            assert T.reverse_kl(after[None], teacher[None]).item() < was + 1e-7


@pytest.mark.parametrize("topk", ["1", "7", "full"])
@pytest.mark.parametrize("rank", [0, 8])
def test_distillation_step_against_a_loop(tmp_path, topk, rank):
    """The loss of a whole step equals a plain loop over turns, tokens and vocabulary; turns without
    a hint give none of it."""
    tiny().save_pretrained(tmp_path)
    step = make_trainer(config(tmp_path, topk=topk, lora_rank=rank, token_budget=40,
                               temperature=0.9))
    turns = make_turns(4, hint="h", hints=["h"], r=None)
    for i, turn in enumerate(turns):
        turn |= dict(hinted_prompt_ids=[[*turn["prompt_ids"], 3, 5 + i]], teacher_logp=None,
                     distil=i != 2)
    student, teacher = step.policy.lm, tiny()
    want = 0.0
    for turn in turns:
        for logp, logt in full_logps(student, teacher, turn, 0.9) if turn["distil"] else ():
            want += kl_loop(logp, logt, topk) / len(turn["response_ids"]) / len(turns)
    metrics = step.train(turns)
    assert metrics["loss"] == pytest.approx(want, abs=1e-5)
    assert metrics["nonzero_grad_frac"] == pytest.approx(0.75) and metrics["grad_norm"] > 0


def full_logps(student, teacher, turn, temperature):
    """Per response token the (V,) log-probs of student and teacher, by full forward passes."""
    with torch.no_grad():
        pairs = []
        for lm, prompt in ((student, turn["prompt_ids"]), (teacher, turn["hinted_prompt_ids"][0])):
            ids = torch.tensor([[*prompt, *turn["response_ids"]]])
            z = lm(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
            pairs.append(z.log_softmax(1))
        return list(zip(*pairs, strict=True))


def kl_loop(logp, logt, topk):
    ids = range(len(logp)) if topk == "full" else logt.topk(int(topk)).indices.tolist()
    total = sum(math.exp(logp[i]) * (logp[i] - logt[i]).item() for i in ids)
    if topk != "full":
        rest_p = 1 - sum(math.exp(logp[i]) for i in ids)
        rest_t = 1 - sum(math.exp(logt[i]) for i in ids)
        total += rest_p * math.log(rest_p / rest_t)
    return total


def test_two_updates_keep_prox(tmp_path):
    """With --updates-per-batch 2 pi_p is the policy before the first update, also in the second."""
    tiny().save_pretrained(tmp_path)
    step = make_trainer(config(tmp_path, updates_per_batch=2, loss="decoupled", lr=1e-2))
    turns = make_turns(3)
    before = step.logp([t["prompt_ids"] for t in turns], [t["response_ids"] for t in turns])
    step.train(turns)
    assert step.step == 2
    for turn, logp in zip(turns, before, strict=True):
        assert turn["prox_logp"].tolist() == pytest.approx(logp.tolist(), abs=1e-5)


def test_kl_to_the_base(tmp_path):
    """k3's gradient pulls an adapter that moved back to the base; none at the base itself."""
    tiny().save_pretrained(tmp_path)
    step = make_trainer(config(tmp_path, kl_coef=1.0))
    turns = make_turns(3, r=None, distil=False)
    prompts, replies = zip(*((t["prompt_ids"], t["response_ids"]) for t in turns), strict=True)
    logps = step.logp(prompts, replies)
    with step.base() as model:
        refs = step.logp(prompts, replies, model)
    for turn, logp in zip(turns, logps, strict=True):
        turn["rollout_logp"] = logp.tolist()
    want = 0.0
    for logp, ref in zip(logps, refs, strict=True):
        x = (ref - logp).tolist()
        want += sum(math.exp(v) - 1 - v for v in x) / len(x) / len(turns)
    assert step.train(turns)["loss"] == pytest.approx(want, abs=1e-5)
    assert any(g.any() for g in gradients(step).values())


def test_freshness_is_not_normalised_away():
    """An old batch is damped: the weight halves per half-life and is not divided by its sum. In a
    replay the recorded age holds."""
    import time

    cfg = SimpleNamespace(freshness_half_life=10.0)
    assert T.freshness({"age_s": 20.0}, cfg) == 0.25
    assert T.freshness({"age_s": 20.0}, SimpleNamespace(freshness_half_life=0)) == 1
    assert T.age_s({"finished": time.time() - 20, "age_s": None}) == pytest.approx(20, abs=1)
    assert T.age_s({"finished": 100.0, "age_s": 7.0}) == 7.0


def test_diagnostics_against_a_loop(tmp_path):
    """Six turns of ages 0 to 2, one sampled across a swap: every diagnostic is a plain sum over a
    plain count of the tokens concerned, under the policy before the step."""
    tiny().save_pretrained(tmp_path)
    step = make_trainer(config(tmp_path, loss="decoupled", tis_cap=1.05, opd_clip=0.3))
    step.step = 2
    turns = make_turns(6, hint="h", hints=["h"])
    for i, turn in enumerate(turns):
        turn |= dict(version_start=i % 3, version_end=2 if i == 0 else i % 3)
    got = step.train(turns)
    by_age, rows = {}, []
    for turn in turns:
        x = [p.item() - b for p, b in zip(turn["prox_logp"], turn["rollout_logp"], strict=True)]
        by_age.setdefault(2 - turn["version_start"], []).extend(x)
        fresh = turn["version_start"] == turn["version_end"] == 2
        hints = [t - p.item() for t, p in zip(turn["teacher_logp"], turn["prox_logp"], strict=True)]
        rows.append((x, fresh, hints if turn["distil"] else []))
    for age, xs in by_age.items():
        row = got["by_age"][age]
        assert row["tokens"] == len(xs)
        assert row["ratio_mean"] == pytest.approx(sum(map(math.exp, xs)) / len(xs), abs=1e-5)
        assert row["kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in xs) / len(xs), abs=1e-5)
        assert row["cap_frac"] == pytest.approx(sum(x > LOG(1.05) for x in xs) / len(xs))
    assert 0 < got["cap_frac"] < 1 and got["tokens"] == sum(map(len, by_age.values()))
    for key, wanted in (("logp_gap_turns", True), ("logp_gap_stale", False)):
        gaps = [abs(v) for x, fresh, _ in rows if fresh == wanted for v in x]
        assert gaps and got[key] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert got["logp_gap_n"] == 2 and got["logp_gap_update"] == 0
    hints = [h for *_, hs in rows for h in hs]
    mean = sum(hints) / len(hints)
    assert got["opd_mean"] == pytest.approx(mean, abs=1e-4)
    spread = math.sqrt(sum((h - mean) ** 2 for h in hints) / len(hints))
    assert got["opd_std"] == pytest.approx(spread, abs=1e-4)
    assert got["opd_clip_frac"] == sum(abs(h) > 0.3 for h in hints) / len(hints)


def test_gap_within_the_step(tmp_path):
    """One update: the policy is its own prox. A second one: it has moved, and the clip sees it."""
    tiny().save_pretrained(tmp_path)
    moved = []
    for updates in (1, 2):
        step = make_trainer(config(tmp_path, loss="decoupled", lr=1e-2, updates_per_batch=updates))
        moved.append(step.train(make_turns(4)))
    assert moved[0]["logp_gap_update"] == 0 < moved[1]["logp_gap_update"]
    assert moved[0]["clip_frac"] == 0 < moved[1]["clip_frac"]
    assert moved[1]["tokens"] == 2 * moved[0]["tokens"]
    assert moved[1]["logp_gap_n"] == moved[0]["logp_gap_n"] == 4


def test_engine_side_top_k_is_used_as_it_came(tmp_path):
    """Distributions that the judge's engine sent are not scored again and give the same loss as
    the trainer's own; those of another K are of no use and are replaced."""
    tiny().save_pretrained(tmp_path)
    step = make_trainer(config(tmp_path, topk="3"))
    turns = make_turns(3, hint="h", hints=["h"], r=None, teacher_logp=None)
    for i, turn in enumerate(turns):
        turn |= dict(hinted_prompt_ids=[[*turn["prompt_ids"], 3]], distil=i != 2)
    want = step.train(turns)
    for turn in turns[:2]:
        turn["teacher_top"] = [column.tolist() for column in turn["teacher_top"]]
    monkey = step.each
    step.each = None  # the teacher must not be asked
    step.step = 0
    assert step.train(turns)["loss"] == pytest.approx(want["loss"], abs=1e-6)
    step.each, step.cfg.topk = monkey, "2"
    assert step.train(turns)["loss"] != want["loss"]
    assert len(turns[0]["teacher_top"][0][0]) == 2
