"""Training: tensors, losses, gradients, one step on one and two ranks, weights on disk.

Run as a script (by torch.distributed.run) this file is one rank of the two-rank test.
"""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import trainer as T
from sync import SyncError, check_names
from trainer import Policy, Trainer, advantages, clipped, collate, cut, ppo, ratio

torch.set_num_threads(1)
KNOBS = SimpleNamespace(w_rl=1.0, w_opd=1.0, opd_clip=5.0, clip_low=0.2, clip_high=0.28,
                        dual_clip=10.0)


def tiny(tied=False, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    lm = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=128,
        tie_word_embeddings=tied))
    with torch.no_grad():  # far from uniform, so that a wrong temperature or shift shows
        for p in lm.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return lm


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{tied: folder with a tiny model}"""
    out = {tied: tmp_path_factory.mktemp("tiny") for tied in (False, True)}
    for tied, folder in out.items():
        tiny(tied).save_pretrained(folder)
    return out


def config(model, **changes):
    base = dict(model=str(model), engine_dtype="float32", lora_rank=8, teacher="trainer",
                device="cpu", tracker="", run_dir=".", seed=0, gradient_checkpointing=False,
                temperature=1.0, lr=0.0, token_budget=10_000, loss="ppo", loss_agg="sample",
                max_grad_norm=1e9, hint_choice="longest",
                topk="", kl_coef=0.0, tis_cap=5.0, updates_per_batch=1, freshness_half_life=0.0,
                cpu_offload=False, compile=False, policy_url="")
    return SimpleNamespace(**vars(KNOBS) | base | changes)


def level(metrics):
    """A step's metrics without the nesting, for pytest.approx."""
    flat = {k: v for k, v in metrics.items() if k != "by_age"}
    flat |= {(age, k): v for age, row in metrics["by_age"].items() for k, v in row.items()}
    return {k: -1 if v is None else v for k, v in flat.items()}


def make_trainer(cfg):
    """A Trainer whose adapter does something: its B matrices are zero at first."""
    out, generator = Trainer(cfg), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in out.policy.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return out


def make_turns(n=8, seed=0, **fields):
    """Turns of different lengths: rewards and hints mixed, rollout log-probs a little off."""
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(64) for _ in range(rng.randint(low, high))]

    out = []
    for i in range(n):
        response = ids(2, 9)
        out.append(dict(
            id=f"t{i}", prompt_ids=ids(3, 20), response_ids=response, r=(1, -1, None)[i % 3],
            distil=i % 2 == 0, teacher_logp=[-3.0 - rng.random() for _ in response],
            rollout_logp=[-4.0 - rng.random() for _ in response], age_s=0.0, version_start=0,
            version_end=0) | fields)
    return out


def reference_logp(lm, prompt, response, temperature=1.0):
    """Full logits of one unpadded sequence, position by position."""
    with torch.no_grad():
        logits = lm(torch.tensor([[*prompt, *response]])).logits[0].double() / temperature
    return [float(logits[len(prompt) - 1 + t].log_softmax(0)[y]) for t, y in enumerate(response)]


# ------------------------------------------------------------------------- ragged turns -> tensors


def test_collate_slices_by_each_samples_own_lengths():
    """E4: prompts 10 and 17, replies 5 and 3: position t predicts token t + 1 of its own sample.
    The teacher shifted against the student is the bug this guards against."""
    prompts, replies = [list(range(10)), list(range(20, 37))], [[50, 51, 52, 53, 54], [60, 61, 62]]
    b = collate(prompts, replies)
    assert b.ids.shape == (2, 20) and b.ids[0, 15:].tolist() == [0] * 5
    assert list(zip(b.rows.tolist(), b.cols.tolist(), strict=True)) == [
        *((0, c) for c in range(9, 14)), *((1, c) for c in range(16, 19))]
    assert b.targets.tolist() == [50, 51, 52, 53, 54, 60, 61, 62]
    assert b.ids[b.rows, b.cols + 1].tolist() == b.targets.tolist()


def test_padding_is_never_trained():
    """B7: a reply that holds the padding id, or the end token, keeps all its tokens: masks come
    from lengths."""
    b = collate([[1], [1, 2]], [[0, 0, 2], [0]])
    assert b.targets.tolist() == [0, 0, 2, 0] and b.rows.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("budget", [1, 20, 64, 10_000])
def test_cut_keeps_every_sequence_once_within_the_budget(budget):
    """Every index once; a micro-batch holds at most `budget` padded tokens unless it is a single
    one."""
    lengths = [random.Random(1).randint(1, 40) for _ in range(30)]
    parts = cut(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(30))
    assert all(len(p) == 1 or len(p) * max(lengths[i] for i in p) <= budget for p in parts)


def test_a_very_long_turn_goes_alone():
    """H3: 17,000 tokens over a budget of 8,192 make a micro-batch of their own and nobody else's
    longer."""
    assert cut([17_000, 10, 4_000, 20], 8_192) == [[1, 3], [2], [0]]


# ------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logp_equals_full_logits(tied, temperature):
    """Only the response's rows are multiplied with the vocabulary: same numbers as the whole
    model, with prompts 10 and 17 and replies 5 and 3 (E4), at the run's temperature and at one
    given for a call."""
    lm, rng = tiny(tied), random.Random(3)
    prompts = [[rng.randrange(64) for _ in range(n)] for n in (10, 17)]
    replies = [[rng.randrange(64) for _ in range(n)] for n in (5, 3)]
    want = [x for p, r in zip(prompts, replies, strict=True)
            for x in reference_logp(lm, p, r, temperature)]
    batch = collate(prompts, replies)
    assert Policy(lm, temperature)(batch).tolist() == pytest.approx(want, abs=1e-5)
    assert Policy(lm, 3.0)(batch, temperature).tolist() == pytest.approx(want, abs=1e-5)


def test_temperature_by_hand():
    """B3: logits [2, 1, 0] at temperature 0.5 are [4, 2, 0]: log p_0 = -log(1 + e^-2 + e^-4)."""
    z = torch.tensor([[2.0, 1.0, 0.0]])
    got = T.chosen(torch.tensor([0]))(None, lambda: z / 0.5, slice(0, 1))[0]
    assert got.item() == pytest.approx(-math.log(1 + math.exp(-2) + math.exp(-4)), abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_change_nothing(tied):
    """Logits in chunks, computed again in the backward pass: same log-probs and same gradients."""
    lm, turns = tiny(tied), make_turns(4)
    batch = collate([t["prompt_ids"] for t in turns], [t["response_ids"] for t in turns])
    results = []
    for chunk in (2048, 3):
        lm.zero_grad()
        logp = Policy(lm, 0.7, chunk)(batch)
        (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
        results.append((logp.detach(), [p.grad.clone() for p in lm.parameters()]))
    (logp, grads), (logp_3, grads_3) = results
    assert torch.allclose(logp, logp_3, atol=1e-6)
    assert max(map(difference, grads, grads_3)) < 1e-5


def difference(a, b):
    """Relative: |a - b| / |b|, 0 for two zeros."""
    return float(((a - b).norm() / b.norm().clamp(min=1e-12)).detach())


# ---------------------------------------------------------------------------- advantages and losses


def tensor(*values):
    return torch.tensor([float(v) for v in values])


def test_advantages_by_hand():
    """Four tokens: reward only, hint only, both, and a hint beyond the bound. 1: 1 * 1 = 1.
    2: -1.0 - (-3.0) = 2. 3: -1 + (-2.5 - (-2.0)) = -1.5.      4: clamp(-0.5 - (-9.5), 5) = 5,
    w_opd 1. With w_rl 2 and w_opd 0.5: 2, 1, -2.25, 2.5. E1: a group of one keeps its raw score,
    -1 -> -1."""
    args = (tensor(1, 0, -1, 0), torch.tensor([False, True, True, True]), tensor(0, -1, -2.5, -0.5),
            tensor(-9, -3, -2, -9.5))
    assert advantages(*args, KNOBS).tolist() == [1, 2, -1.5, 5]
    weighted = SimpleNamespace(**vars(KNOBS) | dict(w_rl=2.0, w_opd=0.5))
    assert advantages(*args, weighted).tolist() == [2, 1, -2.25, 2.5]
    one = advantages(tensor(-1), torch.tensor([False]), tensor(0), tensor(-3), KNOBS)
    assert one.tolist() == [-1]


@pytest.mark.parametrize(("rho", "a", "loss", "took", "slope"), [
    (1.5, 2.0, -2.56, True, 0.0), (0.5, 2.0, -1.0, False, -1.0),
    (1.5, -2.0, 3.0, False, 3.0), (0.5, -2.0, 1.6, True, 0.0),
    (1.0, 2.0, -2.0, False, -2.0), (1.0, -2.0, 2.0, False, 2.0),
    (math.exp(3), -1.0, 10.0, True, 0.0), (9.0, -1.0, 9.0, False, 9.0),
    (1.5, 0.0, 0.0, False, 0.0)])
def test_clipped_loss_by_hand(rho, a, loss, took, slope):
    """E6, the four sign and side cases with clip range (0.8, 1.28), max(-rho A, -clip(rho) A):
    A = 2:  rho 1.5 -> max(-3, -2.56) = -2.56, clipped; rho 0.5 -> max(-1, -1.6) = -1.
    A = -2: rho 1.5 -> max(3, 2.56) = 3; rho 0.5 -> max(1, 1.6) = 1.6, clipped.
    Dual clip: log-ratio 3, A = -1: rho 20.1 -> min(20.1, 10) = 10, without gradient.
    The slope d loss / d logp is -rho A where nothing is clipped. An excerpt in circulation has the
    wrong sign on the first term: then good tokens become less likely."""
    logp = tensor(math.log(rho)).requires_grad_()
    got, was = clipped(ratio(logp, tensor(0)), tensor(a), KNOBS)
    got.sum().backward()
    assert got.item() == pytest.approx(loss, abs=1e-5) and bool(was) == took
    assert float(logp.grad) == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_huge_log_ratios_stay_finite(a):
    """E6: log-ratios -200, 0, 200: loss and gradient finite, and the bound is +-20 before exp."""
    logp = tensor(-200, 0, 200).requires_grad_()
    loss, _ = ppo(logp, logp.detach(), tensor(0, 0, 0), tensor(a, a, a), KNOBS)
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad.isfinite().all()
    rho = ratio(tensor(-200, 0, 200), tensor(0, 0, 0))
    assert rho.log().tolist() == pytest.approx([-20, 0, 20])


def test_losses_equal_a_plain_loop():
    """Advantages and ppo on random tokens against arithmetic on Python floats."""
    torch.manual_seed(0)
    n = 500
    r, distil = torch.randint(-1, 2, (n,)).float(), torch.rand(n) < 0.5
    teacher, prox, rollout = (-4 * torch.rand(n) - x for x in (0, 1, 0.5))
    logp = prox + 0.3 * torch.randn(n)
    advantage = advantages(r, distil, teacher, prox, KNOBS)
    loss, took = ppo(logp, prox, rollout, advantage, KNOBS)
    for i in range(n):
        a = float(r[i]) + (max(-5, min(5, float(teacher[i]) - float(prox[i]))) if distil[i] else 0)
        rho = math.exp(max(-20, min(20, float(logp[i]) - float(rollout[i]))))
        raw, bound = -rho * a, -max(0.8, min(1.28, rho)) * a
        want = min(max(raw, bound), -10 * a) if a < 0 else max(raw, bound)
        assert float(advantage[i]) == pytest.approx(a, abs=1e-5)
        assert float(loss[i]) == pytest.approx(want, abs=1e-5)
        assert bool(took[i]) == (want != raw)


def test_distillation_points_to_the_teacher():
    """Three tokens, enumerated: in expectation over pi_p, the gradient of the opd loss is that of
    KL(pi || T), and a step against it brings pi closer to T."""
    theta = tensor(0.5, -0.3, 0.1).requires_grad_()
    teacher = tensor(1.2, -1.0, 0.4).log_softmax(0)
    logp = theta.log_softmax(0)  # (3,) every token once, weighted by its probability
    a = advantages(tensor(0, 0, 0), torch.ones(3, dtype=bool), teacher, logp.detach(), KNOBS)
    loss, _ = ppo(logp, logp.detach(), logp.detach(), a, KNOBS)
    got = torch.autograd.grad((loss * logp.exp().detach()).sum(), theta, retain_graph=True)[0]
    kl = (logp.exp() * (logp - teacher)).sum()
    want = torch.autograd.grad(kl, theta)[0]
    assert torch.allclose(got, want, atol=1e-6) and want.abs().max() > 0.05
    moved = (theta - 0.1 * got).log_softmax(0)
    assert (moved.exp() * (moved - teacher)).sum() < kl


# ------------------------------------------------------------------------------------ one step


def fixed(logp, prox_logp, rollout_logp, advantage, cfg, rows):
    """A loss of 10 per token of a turn with r = 1, whatever the model says."""
    return 10 * advantage + 0 * logp, torch.zeros(len(logp), dtype=bool)


A_AND_B = [dict(id=i, prompt_ids=[1, 2], response_ids=[3] * n, rollout_logp=[-1.0] * n, r=r,
                distil=False, teacher_logp=None, version_start=0, version_end=0, age_s=0.0)
           for i, n, r in (("A", 1, 1), ("B", 9, 0))]


@pytest.mark.parametrize(("agg", "loss"), [("token", 1.0), ("sample", 5.0)])
@pytest.mark.parametrize("budget", [1, 10_000])
def test_means_are_global(folders, monkeypatch, agg, loss, budget):
    """E3: losses A [10] and B nine zeros: 10 / 10 tokens = 1.0, or (10 / 1 + 0 / 9) / 2 = 5.0, in
    one micro-batch or two. A mean per micro-batch would give 5.0 for both."""
    monkeypatch.setitem(T.LOSSES, "fixed", fixed)
    step = Trainer(config(folders[False], loss="fixed", loss_agg=agg, token_budget=budget))
    assert step.train(A_AND_B)["loss"] == pytest.approx(loss, abs=1e-6)


def gradients(step):
    return {n: p.grad.clone() for n, p in step.policy.named_parameters() if p.requires_grad}


def logp_of(step, turns):
    return step.logp([t["prompt_ids"] for t in turns], [t["response_ids"] for t in turns])


def parts_of(turns, budget):
    return len(cut([len(t["prompt_ids"]) + len(t["response_ids"]) for t in turns], budget))


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("agg", ["token", "sample"])
def test_gradient_does_not_depend_on_the_cut(folders, rank, agg):
    """Eight ragged turns as 1, 2, 3 or 8 micro-batches: same gradient, loss and norm."""
    step, turns = make_trainer(config(folders[True], lora_rank=rank, loss_agg=agg)), make_turns()
    results = []
    for budget, parts in {10_000: 1, 90: 2, 70: 3, 1: 8}.items():
        assert parts_of(turns, budget) == parts
        step.cfg.token_budget, step.step = budget, 0
        results.append((step.train(turns), gradients(step)))
    metrics, grads = results[0]
    for other, others in results[1:]:
        assert level(other) == pytest.approx(level(metrics), rel=1e-5, abs=1e-6)
        assert max(difference(others[n], g) for n, g in grads.items()) < 1e-5
    assert metrics["grad_norm"] > 0
    assert metrics["tokens"] == sum(len(t["response_ids"]) for t in turns)


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize(("fields", "up"), [
    (dict(r=1, distil=False), True), (dict(r=-1, distil=False), False),
    (dict(r=None, distil=True, teacher=0.0), True),
    (dict(r=None, distil=True, teacher=-30.0), False)])
def test_a_step_moves_the_replies_the_right_way(folders, rank, fields, up):
    """r = +1 raises the probability of the sampled tokens, -1 lowers it; so does a teacher that
    likes or dislikes all of them."""
    fields = dict(fields)
    teacher = fields.pop("teacher", 0.0)
    step = make_trainer(config(folders[False], lora_rank=rank, lr=1e-3))
    turns = make_turns(4, **fields)
    before = logp_of(step, turns)
    for turn, logp in zip(turns, before, strict=True):
        turn |= dict(rollout_logp=logp.tolist(), teacher_logp=[teacher] * len(logp))
    metrics = step.train(turns)
    after = logp_of(step, turns)
    assert (torch.cat(after).sum() > torch.cat(before).sum()) == up
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4) and step.step == 1
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)
    assert metrics["nonzero_grad_frac"] == 1 and metrics["logp_gap_n"] == 4


def test_score_0_has_no_gradient(folders):
    """--at-least-one keeps a turn with r = 0: its gradient is exactly 0, it only enlarges the
    count."""
    step = make_trainer(config(folders[False]))
    metrics = step.train(make_turns(3, r=0, distil=False))
    assert metrics["grad_norm"] == 0 == metrics["nonzero_grad_frac"]
    assert all(not g.any() for g in gradients(step).values())


@pytest.mark.parametrize("rank", [0, 8])
def test_a_gradient_that_is_no_number_ends_the_run(folders, rank, monkeypatch):
    """Before it is in the weights: a checkpoint that was saved with them could not be resumed."""
    step = make_trainer(config(folders[False], lora_rank=rank))
    turns = make_turns(3, r=1, distil=False)
    before = {n: x.clone() for n, x in step.state().items()}
    monkeypatch.setitem(T.LOSSES, "ppo", lambda logp, *args: (logp * math.nan, logp > 0))
    with pytest.raises(SystemExit, match="the gradient of update 1 is nan"):
        step.train(turns)
    after = step.state()
    assert step.step == 0 and all(torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize("rank", [0, 8])
def test_teacher_is_the_untouched_base(folders, rank):
    """With the adapter off, or as a frozen copy, the teacher is the base model under the hinted
    prompt, also after a step; the student is not it, and the adapter is on again afterwards."""
    base = tiny(False)
    step = make_trainer(config(folders[False], lora_rank=rank, lr=1e-2, temperature=0.8))
    turns = make_turns(3, hint="h", hints=["g", "h"])
    for i, turn in enumerate(turns):
        turn |= dict(hinted_prompt_ids=[[1], [*turn["prompt_ids"], 7, 8 + i]], teacher_logp=None)
    step.train(make_turns(4))
    student = torch.cat(logp_of(step, turns))
    step.attach(turns)
    assert [t["teacher_logp"] is not None for t in turns] == [t["distil"] for t in turns]
    for turn in turns:
        if turn["distil"]:
            want = reference_logp(base, turn["hinted_prompt_ids"][1], turn["response_ids"], 0.8)
            assert turn["teacher_logp"] == pytest.approx(want, abs=1e-5)
    assert torch.equal(student, torch.cat(logp_of(step, turns)))
    plain = [x for t in turns
             for x in reference_logp(base, t["prompt_ids"], t["response_ids"], 0.8)]
    assert (student - torch.tensor(plain)).abs().mean() > 0.01


# -------------------------------------------------------------------------------- weights on disk


def test_saved_adapter_is_the_trained_one(folders, tmp_path):
    """F6: every adapter tensor under PEFT's names and shapes, and loaded afresh it gives the
    trainer's log-probs."""
    from peft import PeftModel

    step = make_trainer(config(folders[False], lora_rank=8))
    step.save_adapter(tmp_path / "v1")
    state = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    assert len(state) == 2 * 7 * 2  # layers, targets, A and B
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
    assert state[name + "A.weight"].shape == (8, 32) and state[name + "B.weight"].shape == (16, 8)
    assert json.loads((tmp_path / "v1" / "adapter_config.json").read_text())["lora_alpha"] == 16
    turn = make_turns(1)[0]
    loaded = PeftModel.from_pretrained(tiny(False), tmp_path / "v1")
    want = reference_logp(loaded, turn["prompt_ids"], turn["response_ids"])
    got = step.logp([turn["prompt_ids"]], [turn["response_ids"]])[0]
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_compiled_layers_give_the_same_step(folders):
    """--compile: the same metrics, gradients and second step, at lengths it has not seen."""
    plain, compiled = (make_trainer(config(folders[False], lr=1e-2, compile=x))
                       for x in (False, True))
    for n in (3, 2):
        turns = [level(t.train(make_turns(n))) for t in (plain, compiled)]
        assert turns[1] == pytest.approx(turns[0], rel=1e-4, abs=1e-5)
    pairs = zip(plain.policy.parameters(), compiled.policy.parameters(), strict=True)
    assert max(difference(b, a) for a, b in pairs) < 1e-4
    assert any(m._compiled_call_impl for m in compiled.policy.modules())


@pytest.mark.parametrize("tied", [False, True])
def test_saved_weights_are_the_trained_ones(folders, tmp_path, tied):
    """F6: a full save has the model's own names, no wrapper prefix and a tied head once, in the
    engine's dtype; loaded afresh it gives the trainer's log-probs."""
    step = make_trainer(config(folders[tied], lora_rank=0, teacher="engine", lr=1e-2))
    step.train(make_turns(3))
    size = step.save_full(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    lm = tiny(tied, seed=1)
    assert {k: v.shape for k, v in state.items()} == {n: p.shape for n, p in lm.named_parameters()}
    assert size == (tmp_path / "model.safetensors").stat().st_size
    assert ("lm_head.weight" in state) != tied
    lm.load_state_dict(state, strict=not tied)
    turn = make_turns(1)[0]
    want = reference_logp(lm, turn["prompt_ids"], turn["response_ids"])
    got = step.logp([turn["prompt_ids"]], [turn["response_ids"]])[0]
    assert got.tolist() == pytest.approx(want, abs=1e-5)
    step.cfg.engine_dtype = "bfloat16"
    step.save_full(tmp_path)
    assert {v.dtype for v in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("wrong", [
    lambda names: [f"module.{n}" for n in names],
    lambda names: [f"_fsdp_wrapped_module.{n}" for n in names],
    lambda names: [*names[:-1], names[-1].replace("weight", "wieght")], lambda names: names[:-1],
    lambda names: [*names, "more.weight"], lambda names: []])
def test_wrong_names_are_refused(wrong):
    """F6: wrapper prefixes, one typo, one missing or one more: an engine would answer 200 and load
    nothing of it."""
    names = [n for n, _ in tiny().named_parameters()]
    check_names(reversed(names), names)
    with pytest.raises(SyncError, match="missing|unknown"):
        check_names(wrong(names), names)


# ------------------------------------------------------------------------------------- two ranks

CASES = [(rank, agg, budget) for rank in (0, 8) for agg in ("token", "sample")
         for budget in (10_000, 70)]


def case(folder, rank, agg, budget):
    """-> metrics and gradients of one step. Budget 10,000: one micro-batch, so the second of two
    ranks has nothing to train; 70: an odd number of them, so it holds a dummy one."""
    step = make_trainer(config(folder, lora_rank=rank, loss_agg=agg, token_budget=budget))
    return step.train(make_turns()), gradients(step)


def test_two_ranks_equal_one(folders, tmp_path):
    """E3: one process and two gloo ranks give the same gradient and metrics, full and LoRA, also
    when one rank has nothing to train; unequal micro-batch counts would hang (G6)."""
    assert [parts_of(make_turns(), budget) for budget in (10_000, 70)] == [1, 3]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
         "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", __file__, folders[True],
         tmp_path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-3000:]
    both = torch.load(tmp_path / "rank0.pt")
    for (metrics, grads), args in zip(both, CASES, strict=True):
        want, wanted = case(folders[True], *args)
        assert level(metrics) == pytest.approx(level(want), rel=1e-4, abs=1e-6), args
        assert max(difference(grads[n], g) for n, g in wanted.items()) < 1e-5, args
    other = torch.load(tmp_path / "rank1.pt")
    for (_, a), (_, b) in zip(both, other, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)


if __name__ == "__main__":
    results = [case(sys.argv[1], *args) for args in CASES]
    torch.save(results, Path(sys.argv[2]) / f"rank{os.environ['RANK']}.pt")
