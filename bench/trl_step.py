"""The step of TRL's GRPOTrainer on given token ids, for bench_trainer.py --trl PYTHON.

Runs in a virtual environment of its own that has trl, with its datasets and peft. TRL's own loop
runs as it is; only what would generate and score replies is replaced by the given turns, padded as
TRL pads them: prompts on the left, responses on the right, all turns to the longest of the batch.
One advantage per turn, no KL to a reference, no rewards. Its first step, of the whole batch, is not
measured.
"""
import tempfile
import time
from importlib.metadata import version

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
OPTIONS = dict(loss_type="grpo", beta=0.0, num_generations=2, lr_scheduler_type="constant",
               adam_beta2=0.95)


def padded(rows, left=False, fill=0):
    """Ragged lists -> values and mask, (B, T) each."""
    width, pairs = max(map(len, rows)), []
    for row in rows:
        rest, mask, off = [fill] * (width - len(row)), [1] * len(row), [0] * (width - len(row))
        pairs.append((rest + row, off + mask) if left else (row + rest, mask + off))
    return [torch.tensor(column) for column in zip(*pairs, strict=True)]


class Given(GRPOTrainer):
    """Given turns in place of generated ones."""

    def _generate_and_score_completions(self, inputs):
        prompts, prompt_mask = padded([t["prompt_ids"] for t in self.turns], left=True)
        replies, mask = padded([t["response_ids"] for t in self.turns])
        old, _ = padded([t["rollout_logp"] for t in self.turns], fill=0.0)
        out = {"prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": replies,
               "completion_mask": mask, "old_per_token_logps": old, "num_items_in_batch":
               mask.sum(), "advantages": torch.ones(len(self.turns))}
        return {k: v.to(self.accelerator.device) for k, v in out.items()}


class Clock(TrainerCallback):
    """The last step's seconds, and what the log says of it."""

    def __init__(self):
        self.seen = {}

    def now(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, *args, **more):
        self.start = self.now()

    def on_step_end(self, *args, **more):
        self.seen["seconds"] = self.now() - self.start

    def on_log(self, args, state, control, logs=None, **more):
        self.seen |= {k: float(logs[k]) for k in ("loss", "grad_norm") if k in logs}


class Trl:
    def __init__(self, cfg, micro):
        self.cfg, self.micro, self.first = cfg, micro, True
        self.versions = ", ".join(f"{p} {version(p)}" for p in ("trl", "transformers", "torch"))
        self.versions += "; " + ", ".join(f"{k} {v}" for k, v in OPTIONS.items())

    def train(self, turns):
        if self.first:  # bench_trainer.py's unmeasured step: TRL takes its own
            self.first = False
            return None
        with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
            return self.two_steps(turns, folder)

    def two_steps(self, turns, folder):
        cfg, clock = self.cfg, Clock()
        lm = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=getattr(torch, cfg.engine_dtype))
        args = GRPOConfig(
            output_dir=folder, use_cpu=cfg.device == "cpu", bf16=cfg.engine_dtype == "bfloat16",
            learning_rate=cfg.lr, epsilon=cfg.clip_low, epsilon_high=cfg.clip_high,
            max_grad_norm=cfg.max_grad_norm, gradient_checkpointing=cfg.gradient_checkpointing,
            per_device_train_batch_size=self.micro, max_steps=2, logging_steps=1,
            gradient_accumulation_steps=len(turns) // self.micro, save_strategy="no", report_to=[],
            disable_tqdm=True, seed=cfg.seed, **OPTIONS)
        lora = LoraConfig(r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank, lora_dropout=0.0,
                          target_modules=TARGETS) if cfg.lora_rank else None
        words = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))  # never asked for anything
        trainer = Given(
            lm, reward_funcs=lambda **given: [0.0], args=args, peft_config=lora, callbacks=[clock],
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 2 * len(turns)), processing_class=
            PreTrainedTokenizerFast(tokenizer_object=words, pad_token="x", eos_token="x"))
        trainer.turns = turns
        trainer.train()
        return clock.seen
