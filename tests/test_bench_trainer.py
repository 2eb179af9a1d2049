"""The benchmarks of training and sync: the shape of their figures, never their size; that ours and
the textbook's step are the same step; that the check for a GPU runs to its end without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_engine import FakeEngine, say
from test_trainer import difference, tiny
from transformers import AutoConfig, AutoModelForCausalLM

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import bench_sync
import bench_trainer
import gpu_check

import main
import trainer

FIGURES = {"seconds", "tokens_per_s", "peak_gb", "rest_gb", "loss", "grad_norm"}


@pytest.fixture(autouse=True)
def random_models(monkeypatch):
    """Models of bench_trainer.SHAPES by name, until the test's end."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained",
                        AutoModelForCausalLM.from_pretrained)
    bench_trainer.random_models("cpu")


def config(model="tiny", **changes):
    base = dict(lora_rank=8, max_grad_norm=1e9, replay="", gradient_checkpointing=False)
    return SimpleNamespace(**bench_trainer.knobs(model, "cpu", "float32", **base | changes))


# --------------------------------------------------------------------------------- the trainer's


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_ours_and_the_textbook_give_the_same_gradient(rank, checkpointing):
    """On ragged turns, in micro-batches of their own or of ours: loss, norm and every gradient
    agree to 1e-5, or the benchmark would compare two different things."""
    cfg = config(lora_rank=rank, token_budget=60, lr=0.0, gradient_checkpointing=checkpointing)
    turns, results = bench_trainer.make_turns(7, 20, 6, 100, 64), []
    for way in (trainer.Trainer(cfg), *(bench_trainer.Textbook(cfg, n) for n in (7, 3, 0))):
        lm = way.lm if hasattr(way, "lm") else way.policy.lm
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():  # an adapter that does something: its B matrices are zero at first
            for name, p in lm.named_parameters():
                if "lora_B" in name:
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        metrics = way.train(turns)
        results.append((metrics, {n: p.grad for n, p in lm.named_parameters() if p.requires_grad}))
    (want, grads), *others = results
    assert want["grad_norm"] > 0.01
    for metrics, other in others:
        assert metrics["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        assert other.keys() == grads.keys()
        assert max(difference(other[n], g) for n, g in grads.items()) < 1e-5


def test_the_unmeasured_step_moves_nothing():
    """What is compared after it starts from the same weights; the step after it does move them."""
    turns = bench_trainer.make_turns(3, 20, 6, 100, 64)
    for make in (trainer.Trainer, lambda cfg: bench_trainer.Textbook(cfg, 2)):
        way = make(config(lora_rank=0, lr=0.1))
        lm = way.lm if hasattr(way, "lm") else way.policy.lm
        before = [p.detach().clone() for p in lm.parameters()]
        bench_trainer.unmeasured(way, turns)
        assert all(map(torch.equal, before, lm.parameters()))
        way.train(turns)
        assert not any(map(torch.equal, before, lm.parameters()))


def test_turns_are_spread_and_the_same_each_time():
    """Lengths vary around their means and stay within what is trained; a seed gives the same
    turns."""
    turns = bench_trainer.make_turns(400, 700, 100, 4096, 64)
    prompts, replies = ([len(t[k]) for t in turns] for k in ("prompt_ids", "response_ids"))
    assert 650 < sum(prompts) / 400 < 750 and 93 < sum(replies) / 400 < 107
    assert min(prompts) < 350 and 1400 < max(prompts) <= 2100
    assert all(len(t["rollout_logp"]) == len(t["teacher_logp"]) == r
               for t, r in zip(turns, replies, strict=True))
    again = bench_trainer.make_turns(400, 700, 100, 4096, 64)
    assert [t["response_ids"] for t in again] == [t["response_ids"] for t in turns]
    assert max(map(bench_trainer.size, bench_trainer.make_turns(50, 4000, 100, 4096, 64))) == 4096


def test_the_textbook_takes_fewer_turns_where_memory_ends():
    """All at once where they fit, else half as many, again and again."""
    turns, cfg = bench_trainer.make_turns(16, 700, 100, 4096, 64), vars(config())
    n, whole = bench_trainer.at_once(turns, cfg, 20)
    assert n == 16 and 0 < whole < 20
    assert bench_trainer.at_once(turns, cfg, 0.9 * whole)[0] == 8
    assert bench_trainer.at_once(turns, cfg, 0.0)[0] == 1
    large = cfg | {"model": "random-4b"}
    assert bench_trainer.at_once(turns, large, 20)[0] < 4
    kept = [bench_trainer.at_once(turns, large | {"gradient_checkpointing": x}, 20)[1]
            for x in (False, True)]
    assert kept[1] < kept[0] / 2


def test_figures(monkeypatch, tmp_path, capsys):
    """Every way has every figure, every ratio its median within its range; the runs are here in
    one process, and in the order A B B A."""
    order = []

    def launch(job, python):
        order.append(job["way"])
        return bench_trainer.measure(json.loads(json.dumps(job)))

    monkeypatch.setattr(bench_trainer, "launch", launch)
    bench_trainer.run(bench_trainer.flags(
        ["--model", "tiny", "--device", "cpu", "--prompt", "20", "--response", "6", "--batch", "5",
         "--dtypes", "float32", "--against", "textbook,budget", "--rounds", "2", "--json",
         str(tmp_path / "figures")]))
    assert order == ["ours", "textbook", "textbook", "ours"] * 2 + [
        "ours", "budget", "budget", "ours"] * 2
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "figures").read_text())
    assert "ours / textbook (all 5 turns at once)" in printed and "ours / budget" in printed
    assert (figures["model"], figures["turns"], figures["rounds"]) == ("tiny", 5, 2)
    assert [c["other"] for c in figures["cells"]] == ["textbook", "budget"]
    for cell in figures["cells"]:
        assert set(cell["ways"]) == {"ours", cell["other"]}
        for row in cell["ways"].values():
            assert set(row) == FIGURES and row["peak_gb"] > 0 and row["seconds"] > 0
        assert set(cell["ratio"]) == {"tokens_per_s", "peak_gb"}
        assert all(x["min"] <= x["median"] <= x["max"] for x in cell["ratio"].values())


def test_one_run_in_a_process_of_its_own():
    """bfloat16, over the wire; a run that fails ends the benchmark with its last words."""
    job = {"cfg": vars(config(engine_dtype="bfloat16")), "way": "textbook", "micro": 2,
           "turns": bench_trainer.make_turns(4, 20, 6, 100, 64), "threads": 1}
    row = bench_trainer.launch(job, sys.executable)
    assert FIGURES <= set(row) and row["threads"] == 1 and 0 < row["rest_gb"] <= row["peak_gb"]
    with pytest.raises(bench_trainer.Failed, match="textbook in bfloat16 ended with 1"):
        bench_trainer.launch(job, "false")


def test_two_ways_that_differ_are_refused():
    rows = {"ours": [{"grad_norm": 1.0}], "textbook": [{"grad_norm": 1.01}],
            "trl": [{"grad_norm": 9.0}]}
    bench_trainer.agree("bfloat16", rows)
    with pytest.raises(bench_trainer.Failed, match="the gradient norms differ"):
        bench_trainer.agree("float32", rows)


# ------------------------------------------------------------------------------------ a single GPU


def test_flops_by_hand():
    """tiny: heads x head size 32, keys and values 16; a layer 32 (2 x 32 + 2 x 16 + 3 x 64) = 9,216
    weights, two of them 18,432, a head of 2,048. 3 + 1 tokens, full weights: 6 (18,432 x 4 + 2,048)
    = 454,656 and attention 6 x 2 x 32 x 16 = 6,144; with adapters 4 in place of the first 6."""
    turn = dict(prompt_ids=[1, 2, 3], response_ids=[4])
    assert gpu_check.flops("tiny", [turn], 0) == 454_656 + 6_144
    assert gpu_check.flops("tiny", [turn] * 2, 16) == 2 * (303_104 + 6_144)


def test_the_check_for_a_gpu_runs_to_its_end():
    """--tiny goes through every figure, FSDP2 with one rank included, and none is missing."""
    done = subprocess.run([BENCH / "gpu_check.sh", "--tiny"], capture_output=True, text=True,
                          timeout=240, env=os.environ | {
                              "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
                              "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.pop("figure"): row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["machine", "step lora", "step full", "step lora, one turn", "log-probs",
                          "fsdp2 lora", "fsdp2 full"]
    for name in ("step lora", "step full", "step lora, one turn"):
        row = rows[name]
        assert row["tokens_per_s"] > 0 and row["of_matmul"] > 0 and row["mfu"] is None
        assert row["peak_gb"] > 0 and row["grad_norm"] > 0 and not row["sharded"]
    assert rows["log-probs"]["ok"] and rows["log-probs"]["tokens"] > rows["log-probs"]["chunk"]
    assert all(rows[f"fsdp2 {x}"]["ok"] and rows[f"fsdp2 {x}"]["sharded"] for x in ("lora", "full"))


def test_the_check_says_what_is_missing(tmp_path):
    """A python without the packages: one sentence with their names."""
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S \"$@\"\n")
    bare.chmod(0o755)
    done = subprocess.run([BENCH / "gpu_check.sh"], capture_output=True, text=True,
                          env=os.environ | {"PYTHON": str(bare)})
    assert done.returncode == 1 and not done.stdout
    assert "lacks torch, transformers, accelerate" in done.stderr and "flask" in done.stderr
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------- the sync


class Words:
    """As much of a tokenizer as a sync needs."""

    def encode(self, text, **more):
        return [len(word) % 64 for word in text.split()]

    def apply_chat_template(self, messages, **more):
        return [1, *self.encode(messages[0]["content"])]

    def save_pretrained(self, folder):
        pass


@pytest.mark.parametrize("rank", [8, 0])
def test_every_route_is_measured(tmp_path, rank, capsys, monkeypatch):
    """Against a fake engine that scores with the trainer's own weights: each sync comes with a copy
    of the same bytes, an open stream and a canary that saw it, full weights by both ways; nothing
    stays behind."""
    tiny().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(bench_sync, "STILL", 0.3)
    with FakeEngine() as engine:
        engine.script = lambda body: [x for step in say("a b c d e")[:-1] for x in (step, 0.05)]
        cfg = config(str(tmp_path / "model"), lora_rank=rank, engine_url=engine.url, lora_slots=2,
                     run_dir=str(tmp_path), resume="")
        own, kept = trainer.Trainer(cfg), []  # version 0, until there is a service
        engine.score = lambda name, ids: [0.0, *own.logp([ids[:1]], [ids[1:]])[0].tolist()]
        service = bench_sync.make_service(cfg, Words())
        own = service.trainer
        rows = bench_sync.measure(service, 2)
        again = SimpleNamespace(stop=lambda: None, start=kept.append)
        restart_s = bench_sync.restart(again, service) if not rank else 1.0
    assert {k: len(v) for k, v in rows.items()} == (
        {"lora": 4} if rank else {"full-shm": 4, "full-dir": 4})
    for syncs in rows.values():
        for row in syncs:
            assert row["canary"] == "ok" and row["total_s"] > row["pause_s"]
            assert (row["pause_s"] > 0) == (not rank) and row["copy_s"] > 0
            assert row["still_s"] > 0.04 and row["stream_s"] >= 0
        assert len({row["bytes"] for row in syncs}) == 1
    told = {route: bench_sync.summary(syncs, restart_s) for route, syncs in rows.items()}
    for one in told.values():
        assert one["total_s"]["min"] <= one["total_s"]["median"] <= one["total_s"]["max"]
        assert one["syncs"] == 4 and one["pause_over_copy"]["max"] >= 0
    bench_sync.show([{"model": "tiny", "parameters": 1, "restart_s": restart_s, "routes": told}])
    printed = capsys.readouterr().out
    assert all(f"  {route} " in printed for route in told)
    paths = [body["kwargs"]["weights_path"] for path, body in engine.calls
             if path == "/collective_rpc" and "kwargs" in body]
    assert [p.startswith("/dev/shm") for p in paths] == [True, False, False, True] * 2 * (not rank)
    assert not any(Path(p).exists() for p in paths)
    assert not rank or len(list((tmp_path / "adapters").iterdir())) <= 3
    assert rank or (Path(kept[0]) / "model.safetensors").exists()


def test_a_sync_without_a_model_is_refused(tmp_path):
    """Before any engine is started."""
    with pytest.raises(main.Problem, match="no config.json there"):
        bench_sync.config(str(tmp_path), 16, "float32", tmp_path)


def test_a_larger_model_has_so_many_parameters(tmp_path, monkeypatch):
    """Four times the size, to a tenth; a narrow one here, the tokenizer copied beside it."""
    tiny(tied=True).save_pretrained(tmp_path / "model")
    copied = SimpleNamespace(save_pretrained=lambda folder: copied.__dict__.update(to=folder))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda source: copied)
    made = bench_sync.larger(str(tmp_path / "model"), 4, tmp_path / "larger")
    size, large = (bench_sync.parameters(AutoConfig.from_pretrained(x))
                   for x in (tmp_path / "model", made))
    assert size == sum(p.numel() for p in tiny(tied=True).parameters())
    assert large == pytest.approx(4 * size, rel=0.1) and copied.to == tmp_path / "larger"
    assert AutoConfig.from_pretrained(made).hidden_size == 64
