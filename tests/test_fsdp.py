"""FSDP2 on two gloo ranks: the code that runs on several GPUs, on a CPU. accelerate itself falls
back to DDP there, so the test says that the state is FSDP's; all else is the trainer's own path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import config, difference, level, make_trainer, make_turns, tiny

import trainer as T

CASES = {f"{rank}-{topk or 'sampled'}": dict(lora_rank=rank, topk=topk, token_budget=70, lr=1e-2)
         for rank in (0, 8) for topk in ("", "3", "full")}
CASES["0-offload"] = CASES["0-sampled"] | dict(cpu_offload=True)


def fsdp_accelerator(cfg):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    precision = "bf16" if cfg.engine_dtype == "bfloat16" else "no"
    plugin = T.fsdp_plugin(cfg)
    acc = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
    acc.state.distributed_type, acc.state.fsdp_plugin = DistributedType.FSDP, plugin
    return acc


def turns():
    out = make_turns(hint="h", hints=["h"])
    for turn in out:
        turn |= dict(hinted_prompt_ids=[[*turn["prompt_ids"], 3]], teacher_logp=None)
    return out


def case(folder, out, name):
    """Two steps -> metrics, gradients of the first, weights as an engine would load them."""
    cfg = config(folder, **CASES[name])
    step = make_trainer(cfg) if int(os.environ.get("WORLD_SIZE", 1)) == 1 else sharded(cfg)
    metrics = step.train(turns())
    grads = {n: whole(p.grad) for n, p in step.policy.lm.named_parameters() if p.requires_grad}
    step.save(out / "checkpoints", turns())
    back = T.Trainer(cfg)
    back.load(out / "checkpoints" / "step-1.pt")
    again, state = step.train(turns()), step.state()
    restored = back.train(turns())
    assert level(restored) == pytest.approx(level(again), rel=1e-5, abs=1e-6) and back.step == 2
    now = back.state()
    assert all(torch.allclose(now[k], v, atol=1e-6) for k, v in state.items()) and now.keys() == \
        state.keys()
    if step.acc.is_main_process:
        if not cfg.lora_rank:
            (out / name).mkdir()
        (step.save_adapter if cfg.lora_rank else step.save_full)(out / name, state)
    return {"metrics": level(metrics), "again": level(again), "grads": grads}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def sharded(cfg):
    """make_trainer's adapter on sharded parameters; every layer is a unit of its own."""
    out, generator = T.Trainer(cfg), torch.Generator().manual_seed(5)
    layers = [m for m in out.policy.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
    assert len(layers) == 2 and all(type(m).__name__.startswith("FSDP") for m in layers)
    with torch.no_grad():
        for name, p in out.policy.named_parameters():
            if "lora_B" in name:
                value = torch.randn(p.shape, generator=generator) * 0.1
                p.copy_(torch.distributed.tensor.distribute_tensor(value, p.device_mesh,
                                                                   p.placements))
    return out


def for_an_engine(model, out):
    """A step of the real model on two ranks: adapter and full weights as an engine gets them, and
    what the ranks compute for the canary with them. See tests/test_real.py."""
    from transformers import AutoTokenizer

    for name, changes in (("lora", dict(lora_rank=16, lr=1e-3)), ("full", dict(lora_rank=0))):
        cfg = config(model, teacher="engine", token_budget=512, lr=1e-5, engine_url="",
                     max_grad_norm=1.0)
        vars(cfg).update(changes)
        step = T.Trainer(cfg)
        step.train(make_turns(4))
        state = step.state()
        canary = T.Service(cfg, step, None, AutoTokenizer.from_pretrained(model)).trainer_canary()
        if step.acc.is_main_process:
            (out / name).mkdir()
            (out / f"{name}.json").write_text(json.dumps(canary))
            if cfg.lora_rank:
                step.save_adapter(out / name / "v1", state)
            else:
                step.save_full(out / name, state)


def two_ranks(folder, out, *names):
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
         "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", __file__, folder, out, *names],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[:6000]
    return torch.load(out / "rank0.pt"), torch.load(out / "rank1.pt")


def test_fsdp_equals_one_process(tmp_path):
    """Loss, metrics, gradients and the next step's weights equal one process's (1e-5), full and
    LoRA, sampled token and distributions, offloaded; one rank holds a dummy micro-batch. What is
    saved is whole: every tensor, its whole shape. A trainer that loads the first step's checkpoint
    takes the very same second one. Once a hang: the slopes of the loss were taken through the
    sharded model, on the ranks that had something to train only."""
    tiny().save_pretrained(tmp_path / "model")
    first, second = two_ranks(tmp_path / "model", tmp_path / "two", *CASES)
    (tmp_path / "one").mkdir()
    for name in CASES:
        want, got = case(tmp_path / "model", tmp_path / "one", name), first[name]
        assert got["metrics"] == pytest.approx(want["metrics"], rel=1e-4, abs=1e-5), name
        assert got["again"] == pytest.approx(want["again"], rel=1e-3, abs=1e-4), name
        assert want["grads"].keys() == got["grads"].keys()
        assert max(difference(got["grads"][n], g) for n, g in want["grads"].items()) < 1e-5, name
        assert got["metrics"] == second[name]["metrics"]
        files = [f for f in (tmp_path / "one" / name).iterdir() if f.suffix == ".safetensors"]
        assert len(files) == 1
        mine, theirs = load_file(files[0]), load_file(tmp_path / "two" / name / files[0].name)
        assert mine.keys() == theirs.keys() and len(mine) > 10
        for key in mine:
            assert mine[key].shape == theirs[key].shape
            assert torch.allclose(mine[key], theirs[key], atol=1e-5), (name, key)
    same = pytest.approx(first["0-sampled"]["again"], rel=1e-3, abs=1e-4)
    assert first["0-offload"]["again"] == same


def test_fsdp_in_bfloat16(tmp_path):
    """The GPU setting: bf16 compute over float32 masters. A step runs and moves the weights."""
    tiny().save_pretrained(tmp_path / "model")
    both = two_ranks(tmp_path / "model", tmp_path / "two", "bf16")
    assert all(out["bf16"]["metrics"]["grad_norm"] > 0 for out in both)
    assert both[0]["bf16"]["again"]["loss"] != both[0]["bf16"]["metrics"]["loss"]
    saved = json.loads((tmp_path / "two" / "bf16" / "adapter_config.json").read_text())
    assert saved["r"] == 8


if __name__ == "__main__":
    CASES["bf16"] = dict(lora_rank=8, engine_dtype="bfloat16", token_budget=70, lr=1e-2)
    T.make_accelerator = fsdp_accelerator
    if sys.argv[3] == "for_an_engine":
        results = for_an_engine(sys.argv[1], Path(sys.argv[2]))
    else:
        results = {name: case(sys.argv[1], Path(sys.argv[2]), name) for name in sys.argv[3:]}
    torch.save(results, Path(sys.argv[2]) / f"rank{os.environ['RANK']}.pt")
