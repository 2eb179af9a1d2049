"""examples/rules.py: each rule by hand, against a plain loop, and in a step of a tiny Trainer."""

import itertools
import math
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_trainer import (
    KNOBS,
    config,
    difference,
    gradients,
    level,
    logp_of,
    make_trainer,
    make_turns,
    parts_of,
    reference_logp,
    tensor,
    tiny,
)

import judge
import main
import trainer as T
from sync import load_extra

RULES = Path(main.__file__).resolve().parent / "examples" / "rules.py"
sys.path.append(str(RULES.parent))

import rules  # after trainer: it adds the trainer's rows

LOSSES = ("opsm", "batch_norm", "entropy", "hybrid")
LOG = math.log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny")
    tiny().save_pretrained(out)
    return out


def stepper(folder, **changes):
    return make_trainer(config(folder, max_train_len=100, **changes))


def hinted_turns(n=8, **fields):
    """Turns with three hints and their prompts; every second one is distilled."""
    turns = make_turns(n, **dict(hints=["hint one", "hint two, the longest", "hint 3"],
                                 hint="hint two, the longest", teacher_logp=None) | fields)
    for i, turn in enumerate(turns):
        turn["hinted_prompt_ids"] = [[*turn["prompt_ids"], 3 + k, 5 + i, 7 * k] for k in range(3)]
    return turns


def full(lm, prompt, response, temperature=1.0):
    """(R, V) log-probs of one unpadded sequence."""
    with torch.no_grad():
        z = lm(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return (z / temperature).log_softmax(1)


def surrogate(u, a):
    """The clipped loss in plain numbers, with the dual clip."""
    worst = max(-u * a, -min(max(u, 0.8), 1.28) * a)
    return min(worst, -10 * a) if a < 0 else worst


def read_all(read, z):
    """What a read function makes of logits (N, V)."""
    return read(None, lambda: z, slice(0, len(z)))


# -------------------------------------------------------------------------------- opsm


def test_opsm_by_hand():
    """Turn 0, A = -1: drift (0.2 + 0.1) / 2 = 0.15 > 0.1: out. Turn 1, A = -1: drift 0.05: kept,
    rho = e^-0.05, loss e^-0.05. Turn 2, A = 1: drift 0.5, kept because it is good: loss -e^-0.5."""
    logp = tensor(-1.2, -1.1, -1.05, -1.5).requires_grad_()
    loss, took = rules.opsm(logp, None, tensor(-1, -1, -1, -1), tensor(-1, -1, -1, 1), KNOBS,
                            torch.tensor([0, 0, 1, 2]))
    assert loss.tolist() == pytest.approx([0, 0, math.exp(-0.05), -math.exp(-0.5)], abs=1e-6)
    assert took.tolist() == [True, True, False, False]
    loss.sum().backward()
    assert (logp.grad != 0).tolist() == [False, False, True, True]


def test_opsm_with_an_advantage_per_token_goes_by_the_mean():
    """A = (-3, 1), mean -1: both tokens are out; A = (-1, 3), mean 1: both stay; drift 0.2."""
    loss, took = rules.opsm(tensor(*[-1.2] * 4), None, tensor(*[-1] * 4), tensor(-3, 1, -1, 3),
                            KNOBS, torch.tensor([0, 0, 1, 1]))
    assert loss[:2].tolist() == [0, 0] and took[:2].all()
    assert (loss[2:] != 0).all()


def test_opsm_against_a_loop():
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 40, (300,), generator=g).sort().values
    rows = torch.unique(rows, return_inverse=True)[1]
    logp, rollout = (torch.randn(300, generator=g) * 0.5 for _ in range(2))
    a = torch.randn(300, generator=g)
    loss, took = rules.opsm(logp, None, rollout, a, KNOBS, rows)
    dropped = 0
    for turn in range(int(rows.max()) + 1):
        at = [i for i in range(300) if rows[i] == turn]
        drift = statistics.fmean(float(rollout[i] - logp[i]) for i in at)
        out = statistics.fmean(float(a[i]) for i in at) < 0 and drift > 0.1
        dropped += out
        for i in at:
            want = 0 if out else surrogate(math.exp(logp[i] - rollout[i]), float(a[i]))
            assert float(loss[i]) == pytest.approx(want, abs=1e-5)
            assert bool(took[i]) or not out
    assert 3 < dropped < 37


# -------------------------------------------------------------------------------- batch_norm


def scored(*values):
    return [{"r": v} for v in values]


def test_batch_norm_by_hand():
    """1, 1, -1 and a turn without a reward part: mean 1/3, std sqrt(8/9): 0.7071, 0.7071, -1.4142.
    The turn without one is neither counted nor given one; a score of 0 counts: 1, 0 give 1, -1."""
    turns = scored(1, 1, None, -1)
    rules.batch_norm(None, turns)
    assert [t["r"] for t in turns if t["r"]] == pytest.approx(
        [0.707107, 0.707107, -1.414214], abs=1e-5)
    assert turns[2]["r"] is None
    turns = scored(1, 0)
    rules.batch_norm(None, turns)
    assert [t["r"] for t in turns] == pytest.approx([1, -1], abs=1e-5)


@pytest.mark.parametrize("values", [(1, 1, 1), (-1, None, -1), (-1,), (None, None)])
def test_equal_scores_become_nothing(values):
    turns = scored(*values)
    rules.batch_norm(None, turns)
    assert [t["r"] for t in turns] == [None if v is None else 0 for v in values]


def test_batch_norm_against_a_loop():
    """Mean 0 and std 1 afterwards, in the old order, and the same as the loop's."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(50, generator=g).tolist()
    turns = scored(*values)
    rules.batch_norm(None, turns)
    mean = sum(values) / 50
    std = (sum((v - mean) ** 2 for v in values) / 50) ** 0.5
    for turn, v in zip(turns, values, strict=True):
        assert turn["r"] == pytest.approx((v - mean) / std, abs=1e-5)


def test_a_batch_of_equal_scores_has_no_gradient(folder):
    """The same batch has one under ppo."""
    for loss, silent in (("batch_norm", True), ("ppo", False)):
        step = stepper(folder, loss=loss)
        assert (step.train(make_turns(3, r=-1, distil=False))["grad_norm"] == 0) == silent


# -------------------------------------------------------------------------------- entropy


def entropy_of(targets, z):
    return read_all(rules.entropy(None, SimpleNamespace(targets=torch.tensor(targets)), []), z)


def test_entropy_by_hand():
    """pi = (0.5, 0.25, 0.25): H = 0.5 ln 2 + 2 * 0.25 ln 4 = 1.5 ln 2 = 1.03972; one sure token:
    H = 0. The loss is -0.001 H."""
    z = torch.stack([tensor(0.5, 0.25, 0.25).log(), tensor(40, 0, 0)])
    logp, loss = entropy_of([1, 0], z)
    assert logp.tolist() == pytest.approx([LOG(0.25), 0], abs=1e-6)
    assert (loss / -rules.ENTROPY_BETA).tolist() == pytest.approx([1.039721, 0], abs=1e-5)


def test_entropy_against_a_loop():
    z = torch.randn(30, 17, generator=torch.Generator().manual_seed(0)) * 2
    targets = [i % 17 for i in range(30)]
    logp, loss = entropy_of(targets, z)
    for i in range(30):
        p = [math.exp(v) for v in z[i].tolist()]
        p = [v / sum(p) for v in p]
        assert float(logp[i]) == pytest.approx(LOG(p[targets[i]]), abs=1e-5)
        assert float(loss[i]) / -rules.ENTROPY_BETA == pytest.approx(
            -sum(v * LOG(v) for v in p), abs=1e-5)


GRID = [p for p in itertools.product((0.1, 0.3, 0.6, 0.8), repeat=2) if sum(p) < 0.95]


@pytest.mark.parametrize("p", GRID)
def test_entropy_bonus_raises_the_entropy(p):
    """3-token vocabulary, enumerated: a small step down the loss raises H."""
    z = tensor(*p, 1 - sum(p)).log().requires_grad_()
    before = entropy_of([0], z[None])[1]
    before.backward()
    after = entropy_of([0], (z - 100 * z.grad).detach()[None])[1]
    assert -after.item() > -before.item() + 1e-7


# -------------------------------------------------------------------------------- choice of hint


def test_overlap_by_hand():
    """{1, 2} and {5, 2} share one token, {3, 4} and {4, 3} two, {1, 2} and {3, 4} none: 3."""
    assert rules.overlap(torch.tensor([[1, 2], [3, 4], [1, 2]]),
                         torch.tensor([[5, 2], [4, 3], [3, 4]])) == 3


def test_overlap_against_a_loop():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.stack([torch.randperm(9, generator=g)[:4] for _ in range(50)]) for _ in "ab")
    assert rules.overlap(a, b) == sum(
        len(set(x) & set(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True))


def test_ties_go_to_the_longest_hint():
    """Overlaps 5, 7, 7: hint 1 is longer than hint 2. Of equally long ones the first, as judge's
    `longest` does. Indices are those of the hints that fit."""
    assert rules.nearest(["a very long one", "medium", "tiny"], {0: 5, 1: 7, 2: 7}) == 1
    assert rules.nearest(["tiny", "medium", "medium"], {0: 7, 1: 7, 2: 7}) == 1
    assert rules.nearest(["a very long one", "medium", "tiny"], {2: 3}) == 2


@pytest.mark.parametrize("rank", [0, 8])
def test_the_choice_against_a_loop(folder, rank):
    """Full logits of both models, position by position, sets of Python: the same hints; and the
    step that follows scores the teacher under the chosen one."""
    step = stepper(folder, lora_rank=rank, hint_choice="overlap", temperature=0.8, lr=1e-2)
    step.train(make_turns(4, distil=False))  # the student is not the base any more
    turns = hinted_turns(12, teacher_logp=[-1.0], teacher_top="old")
    want = {t["id"]: best_hint(step.policy.lm, t) for t in turns}
    assert len(set(want.values())) > 1, "a test that cannot fail"
    for turn in turns:
        turn["teacher_logp"] = [-1.0] * len(turn["response_ids"])
    step.train(turns)
    for turn in turns:
        if not turn["distil"]:
            assert turn["hint"] == "hint two, the longest" and turn["teacher_top"] == "old"
            continue
        assert turn["hint"] == want[turn["id"]]
        kept = turn["hint"] == "hint two, the longest"
        scores = [-1.0] * len(turn["response_ids"]) if kept else reference_logp(
            tiny(), T.hinted_prompt(turn), turn["response_ids"], 0.8)
        assert list(turn["teacher_logp"]) == pytest.approx(scores, abs=1e-4)
        assert (turn["teacher_top"] == "old") == kept


def best_hint(student, turn):
    def sets(lm, prompt):
        return [set(row.topk(4).indices.tolist()) for row in full(lm, prompt, turn["response_ids"])]

    own = sets(student, turn["prompt_ids"])
    shared = [sum(len(a & b) for a, b in zip(own, sets(tiny(), p), strict=True))
              for p in turn["hinted_prompt_ids"]]
    return max(zip(shared, map(len, turn["hints"]), turn["hints"], strict=True))[2]


class Untouchable:
    """A trainer that may not run its model."""

    cfg = SimpleNamespace(max_train_len=100, hint_choice="overlap")


@pytest.mark.parametrize("fields", [
    dict(distil=False), dict(distil=True, hints=["only one"], hint="only one")])
def test_without_a_choice_nothing_is_run(fields):
    """Turns without distillation (skipped hints, mode rl) and turns with one hint."""
    turns = hinted_turns(3, **fields)
    for turn in turns:
        turn["hinted_prompt_ids"] = turn["hinted_prompt_ids"][: len(turn["hints"])]
    rules.by_overlap(Untouchable, turns)
    assert [t["hint"] for t in turns] == [fields.get("hint", "hint two, the longest")] * 3


def test_too_long_prompts_are_no_candidates(folder):
    """Hint 0's teacher is the student itself (its prompt, and an adapter that does nothing): all
    of 4 R tokens are shared. It is taken, until prompt and reply have one token too many."""
    step = T.Trainer(config(folder, max_train_len=100, hint_choice="overlap"))
    for spare, want in ((0, "hint one"), (-1, "hint 3")):
        turn = hinted_turns(1)[0]
        turn["hinted_prompt_ids"] = [turn["prompt_ids"], [9] * 200, turn["prompt_ids"][1:]]
        step.cfg.max_train_len = len(turn["prompt_ids"]) + len(turn["response_ids"]) + spare
        turn["hint"] = "hint 3"
        rules.by_overlap(step, [turn])
        assert turn["hint"] == want


def test_rows_of_judge():
    hints = ["a middling one", "short", "by far the longest one"]
    assert judge.HINT_CHOICE["shortest"](hints) == "short"
    assert judge.HINT_CHOICE["overlap"](hints) == judge.HINT_CHOICE["longest"](hints) == hints[2]


# -------------------------------------------------------------------------------- hybrid


def support_loop(logp, prox, teacher):
    """The hybrid loss of one position in plain numbers; three lists of K log-probs."""
    mass = sum(math.exp(p) for p in prox)
    return sum(math.exp(p) / mass * surrogate(math.exp(new - p), max(-1, min(1, t - p)))
               for new, p, t in zip(logp, prox, teacher, strict=True))


def test_hybrid_by_hand():
    """Support of 2: pi_p = (0.5, 0.1), so w = (5/6, 1/6); T = (0.5 e^-0.4, 0.6): A = (-0.4, 1), the
    second bounded from ln 6 = 1.79. With u = (1, 1): 5/6 * 0.4 - 1/6 = 0.166667. With u = (1.5,
    1.5): max(0.6, 0.512) = 0.6 and max(-1.5, -1.28) = -1.28: 5/6 * 0.6 - 1.28/6 = 0.286667."""
    prox, teacher = tensor(0.5, 0.1).log()[None], tensor(0.5 * math.exp(-0.4), 0.6).log()[None]
    for u, want in ((1, 0.166667), (1.5, 0.286667)):
        loss = rules.support_loss(prox + LOG(u), prox, teacher, KNOBS)
        assert loss.tolist() == pytest.approx([want], abs=1e-5)


def test_hybrid_against_a_loop():
    g = torch.Generator().manual_seed(0)
    prox, teacher = (torch.randn(200, 9, generator=g).log_softmax(1)[:, :4] for _ in range(2))
    logp = prox + torch.randn(200, 4, generator=g) * 0.4
    loss = rules.support_loss(logp, prox, teacher, KNOBS)
    for i, row in enumerate(zip(logp.tolist(), prox.tolist(), teacher.tolist(), strict=True)):
        assert float(loss[i]) == pytest.approx(support_loop(*row), abs=1e-5)


@pytest.mark.parametrize("k", [2, 3])
def test_hybrid_points_to_the_teacher(k):
    """3-token vocabulary, all (teacher, start) of a grid, support of the 2 likeliest or of all: a
    small step brings pi closer to T. Over all tokens, and where no log-ratio is bounded, the
    gradient is that of KL(pi || T)."""
    exact = 0
    for t, s in itertools.permutations(GRID, 2):
        teacher = tensor(*t, 1 - sum(t)).log()
        z = tensor(*s, 1 - sum(s)).log().requires_grad_()
        student = z.log_softmax(0)
        ids = student.topk(k).indices
        loss = rules.support_loss(student[ids][None], student[ids].detach()[None],
                                  teacher[ids][None], KNOBS)
        got = torch.autograd.grad(loss.sum(), z, retain_graph=True)[0]
        kl = T.reverse_kl(student[None], teacher[None]).sum()
        after = (z - 0.02 * got).log_softmax(0).detach()
        if got.abs().max() > 1e-6:
            assert T.reverse_kl(after[None], teacher[None]).item() < kl.item(), (t, s)
        if k == 3 and (teacher - student).abs().max() < 1:
            assert torch.allclose(got, torch.autograd.grad(kl, z)[0], atol=1e-6)
            exact += 1
    assert k == 2 or exact > 5


def hybrid_want(turn, student_now, student_then, temperature=1.0):
    """Mean over the turn's tokens of the loss of a hint, from full logits."""
    logp = full(student_now, turn["prompt_ids"], turn["response_ids"], temperature)
    prox = full(student_then, turn["prompt_ids"], turn["response_ids"], temperature)
    logt = full(tiny(), T.hinted_prompt(turn), turn["response_ids"], temperature)
    ids = prox.topk(4).indices
    rows = zip(*(x.gather(1, ids).tolist() for x in (logp, prox, logt)), strict=True)
    return statistics.fmean(support_loop(*row) for row in rows)


@pytest.mark.parametrize("rank", [0, 8])
def test_hybrid_step_against_a_loop(folder, rank):
    """A whole step: the base model reads the hinted prompts and the student its own; turns
    without a hint give no such loss, those with r give ppo's beside it; w_opd scales it."""
    step = stepper(folder, loss="hybrid", lora_rank=rank, token_budget=40, temperature=0.9,
                   w_opd=0.5, lr=1e-2)
    step.train(make_turns(4, distil=False))  # the student is not the base any more
    turns = hinted_turns(6)
    lm, want, hinted = step.policy.lm, 0.0, [t["distil"] for t in turns]
    for turn in turns:
        loss = 0.5 * hybrid_want(turn, lm, lm, 0.9) if turn["distil"] else 0.0
        logp = reference_logp(lm, turn["prompt_ids"], turn["response_ids"], 0.9)
        turn["rollout_logp"] = [x + 0.1 * (-1) ** i for i, x in enumerate(logp)]
        loss += statistics.fmean(surrogate(math.exp(new - old), turn["r"] or 0) for new, old in
                                 zip(logp, turn["rollout_logp"], strict=True))
        want += loss / len(turns)
    metrics = step.train(turns)
    assert metrics["loss"] == pytest.approx(want, abs=1e-5)
    assert ["support" in t for t in turns] == hinted and not any(t["distil"] for t in turns)
    assert all(t["teacher_logp"] is None for t in turns), "the teacher is read once"
    assert metrics["opd_mean"] is None and metrics["advantage_mean"] is not None
    assert metrics["nonzero_grad_frac"] == pytest.approx(
        sum(h or bool(t["r"]) for h, t in zip(hinted, turns, strict=True)) / len(turns))


def test_the_second_update_keeps_pi_p(folder):
    """--updates-per-batch 2: ratio, weights and support of the second update are against the policy
    before the first one. (A twin that takes the first update only has the weights in between.)"""
    fields = dict(r=None, distil=True)
    step, twin = (stepper(folder, loss="hybrid", lr=1e-2, updates_per_batch=n) for n in (2, 1))
    then = stepper(folder, loss="hybrid").policy.lm
    turns = hinted_turns(4, **fields)
    twin.train(hinted_turns(4, **fields))
    first = statistics.fmean(hybrid_want(t, then, then) for t in turns)
    second = statistics.fmean(hybrid_want(t, twin.policy.lm, then) for t in turns)
    afresh = statistics.fmean(hybrid_want(t, twin.policy.lm, twin.policy.lm) for t in turns)
    assert abs(second - afresh) > 1e-3, "a test that cannot fail"
    assert step.train(turns)["loss"] == pytest.approx((first + second) / 2, abs=1e-5)
    for turn in turns:
        logp = full(then, turn["prompt_ids"], turn["response_ids"])
        assert torch.equal(turn["support"][0], logp.topk(4).indices)
        assert torch.allclose(turn["support"][1], logp.topk(4).values, atol=1e-5)


def test_hybrid_distils_the_hint_that_overlap_chose(folder):
    """Both rows want the turns before the step; the choice has to come first."""
    step = stepper(folder, loss="hybrid", hint_choice="overlap")
    turns = hinted_turns(6, distil=True)
    want = [best_hint(step.policy.lm, t) for t in turns]
    assert len(set(want)) > 1, "a test that cannot fail"
    step.train(turns)
    assert [t["hint"] for t in turns] == want
    for turn in turns:
        ids, _, teacher = turn["support"]
        logt = full(tiny(), T.hinted_prompt(turn), turn["response_ids"])
        assert torch.allclose(teacher, logt.gather(1, ids), atol=1e-5)


# -------------------------------------------------------------------------------- in a step

CHOICES = [dict(loss=name) for name in LOSSES] + [
    dict(hint_choice="overlap"), dict(loss="hybrid", hint_choice="overlap")]


def mixed_turns(step):
    """Turns with reward and hint parts, more good ones than bad, drifted (by 0.3 nats per token,
    for opsm) or not."""
    turns = hinted_turns()
    turns[1]["r"] = 1
    for i, (turn, logp) in enumerate(zip(turns, logp_of(step, turns), strict=True)):
        turn["rollout_logp"] = (logp + (0.3 if i % 4 < 2 else 0.01)).tolist()
    return turns


@pytest.mark.parametrize("changes", CHOICES, ids=lambda c: "-".join(c.values()))
def test_gradient_does_not_depend_on_the_cut(folder, changes):
    """Eight ragged turns as 1, 2, 3 or 8 micro-batches, and with logits in chunks of 3 tokens:
    the same gradient, loss and metrics."""
    step, results = stepper(folder, **changes), []
    for budget, parts, chunk in ((10_000, 1, 2048), (90, 2, 3), (70, 3, 2048), (1, 8, 3)):
        turns = mixed_turns(step)
        assert parts_of(turns, budget) == parts
        step.cfg.token_budget, step.policy.chunk, step.step = budget, chunk, 0
        results.append((step.train(turns), gradients(step)))
    metrics, grads = results[0]
    assert metrics["grad_norm"] > 0
    for other, others in results[1:]:
        assert level(other) == pytest.approx(level(metrics), rel=1e-4, abs=1e-6)
        assert max(difference(others[n], g) for n, g in grads.items()) < 1e-4


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("changes", CHOICES, ids=lambda c: "-".join(c.values()))
def test_a_step_with_each_row(folder, changes, rank):
    """The row is at work: its step differs from ppo's with the longest hint."""
    losses = []
    for row in (changes, {}):
        step = stepper(folder, lora_rank=rank, lr=1e-3, **row)
        turns = mixed_turns(step)
        before = torch.cat(logp_of(step, turns))
        metrics = step.train(turns)
        assert step.step == 1
        assert (torch.cat(logp_of(step, turns)) - before).abs().mean() > 1e-4
        losses.append(metrics["loss"])
    assert math.isfinite(losses[0]) and abs(losses[0] - losses[1]) > 1e-4


def test_steps_of_the_bonus_raise_the_entropy(folder):
    """Without reward and hint only the bonus is left: H rises over the replies, and the loss is
    -beta times its mean."""
    step = stepper(folder, loss="entropy", lr=1e-3)
    turns, means = make_turns(4, r=None, distil=False), []
    for _ in range(3):
        rows = [full(step.policy.lm, t["prompt_ids"], t["response_ids"]) for t in turns]
        means.append(statistics.fmean(float(-(x.exp() * x).sum(1).mean()) for x in rows))
        assert step.train(turns)["loss"] == pytest.approx(-rules.ENTROPY_BETA * means[-1],
                                                          abs=1e-6)
    assert means[0] < means[1] < means[2]


def test_steps_of_hybrid_come_closer_to_the_teacher(folder):
    step = stepper(folder, loss="hybrid", lr=1e-3)
    distances = []
    for _ in range(4):
        turns = hinted_turns(4, r=None, distil=True)
        pairs = [(full(step.policy.lm, t["prompt_ids"], t["response_ids"]),
                  full(tiny(), T.hinted_prompt(t), t["response_ids"])) for t in turns]
        distances.append(statistics.fmean(T.reverse_kl(*pair).mean().item() for pair in pairs))
        step.train(turns)
    assert distances == sorted(distances, reverse=True) and distances[-1] < distances[0] - 1e-3


def test_opsm_keeps_the_denominator(folder):
    """Two bad turns, one of them drifted: the step's loss is half of the other's mean, not all of
    it, and clip_frac counts the tokens left out."""
    step = stepper(folder, loss="opsm")
    turns = make_turns(2, r=-1, distil=False)
    for turn, logp, drift in zip(turns, logp_of(step, turns), (0.0, 0.3), strict=True):
        turn["rollout_logp"] = (logp + drift).tolist()
    metrics = step.train(turns)
    assert metrics["loss"] == pytest.approx(0.5, abs=1e-4)
    sizes = [len(t["response_ids"]) for t in turns]
    assert metrics["clip_frac"] == pytest.approx(sizes[1] / sum(sizes))
    assert metrics["nonzero_grad_frac"] == 0.5


# -------------------------------------------------------------------------------- loading


def test_the_trainer_gets_every_row(monkeypatch):
    tables = {"LOSSES": LOSSES, "BEFORE": ("batch_norm", "hybrid", "overlap"),
              "READS": ("entropy", "hybrid")}
    for table, names in tables.items():
        for name in names:
            monkeypatch.delitem(getattr(T, table), name)
    for name in ("overlap", "shortest"):
        monkeypatch.delitem(judge.HINT_CHOICE, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    load_extra(str(RULES))
    for table, names in tables.items():
        assert set(names) <= set(getattr(T, table)), table
    assert {"longest", "overlap", "shortest"} <= set(judge.HINT_CHOICE)


@pytest.mark.parametrize("flags", [("--loss", name) for name in LOSSES] + [
    ("--hint-choice", "overlap"), ("--hint-choice", "shortest")])
def test_main_takes_the_flags(monkeypatch, flags):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cfg = main.parse([*flags, "--extra", str(RULES)])
    assert getattr(cfg, flags[0][2:].replace("-", "_")) == flags[1]


ON_MAINS_SIDE = """
import sys
sys.path.insert(0, "examples")
import {module}
from {loader} import load_extra
load_extra({path!r})
from judge import HINT_CHOICE
assert HINT_CHOICE["shortest"](["long", "s"]) == "s" and "overlap" in HINT_CHOICE
print([name for name in ("torch", "trainer", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize(("module", "loader"), [
    ("main", "sync"), ("simulated_user", "simulated_user")])
def test_main_and_users_need_no_torch(module, loader):
    """Both load the file in their own process, where torch would cost seconds and memory."""
    code = ON_MAINS_SIDE.format(module=module, loader=loader, path=str(RULES))
    done = subprocess.run([sys.executable, "-c", code], cwd=RULES.parent.parent,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"
