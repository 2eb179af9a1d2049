"""Who gets which GPUs, how full they get, and engines that somebody else started."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import main
from main import Problem, layout_for, parse
from proxy import Endpoint
from sync import LORA_TARGETS

QWEN3_4B = dict(hidden_size=2560, num_hidden_layers=36, vocab_size=151_936, num_attention_heads=32,
                num_key_value_heads=8, head_dim=128, intermediate_size=9728,
                tie_word_embeddings=True)
QWEN3_32B = QWEN3_4B | dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64,
                            intermediate_size=25_600, tie_word_embeddings=False)


def gpus(monkeypatch, n, gib=80):
    """A machine with so many GPUs of that size."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n))))
    monkeypatch.setattr(main, "nvidia_smi", lambda *flags: [
        f"{i}, GPU-{i}{i}{i}, {gib * 1024}" for i in range(n)])


# ------------------------------------------------------------------------------------ who gets what


LLM = dict(judge="llm", judge_url="", teacher="auto", teacher_url="", policy_url="", gpus="auto")


@pytest.mark.parametrize(("n", "changes", "sizes"), [
    (1, {}, (1, 1, 0)), (2, {}, (1, 1, 0)), (3, {}, (1, 1, 0)), (4, {}, (2, 1, 1)),
    (7, {}, (2, 1, 1)), (8, {}, (4, 2, 2)),
    (8, dict(judge_url="http://api/v1"), (6, 2, 0)), (4, dict(judge="lexicon"), (3, 1, 0)),
    (4, dict(judge="lexicon", teacher="engine"), (2, 1, 1)),
    (4, dict(judge="lexicon", teacher="engine", teacher_url="http://t"), (3, 1, 0)),
    (8, dict(policy_url="http://p"), (6, 0, 2)), (1, dict(policy_url="http://p"), (1, 0, 0)),
    (8, dict(gpus="2,4,1"), (2, 4, 1)), (8, dict(gpus="0,4,4"), (1, 4, 4)),
    (2, dict(gpus="1,0,1", policy_url="http://p"), (1, 0, 1))])
def test_layouts(n, changes, sizes):
    """The table of machines; on one GPU the trainer shares the policy's. What is elsewhere needs
    no GPU here: the trainer gets it."""
    out = layout_for(SimpleNamespace(**LLM | changes), [str(i) for i in range(n)])
    assert tuple(len(out[k]) for k in ("trainer", "policy", "judge")) == sizes
    shared = set(out["trainer"]) & set(out["policy"])
    assert bool(shared) == (sum(sizes) > len({g for ids in out.values() for g in ids}))
    assert not set(out["judge"]) & {*out["policy"], *out["trainer"]}


@pytest.mark.parametrize(("wish", "url"), [
    ("4,2", ""), ("x,1,1", ""), ("4,4,4", ""), ("1,0,1", ""), ("-1,1,1", ""), ("1,1,1", "http://p"),
    ("0,0,1", "http://p")])
def test_impossible_layouts_are_refused(wish, url):
    with pytest.raises(Problem, match=f"--gpus {wish}"):
        layout_for(SimpleNamespace(**LLM | dict(gpus=wish, policy_url=url)), list("01234567"))


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("family", "changes"), [
    ("llama", dict(tie_word_embeddings=True)),
    ("llama", dict(tie_word_embeddings=False, num_key_value_heads=4)),
    ("qwen3", dict(head_dim=32, tie_word_embeddings=True))])
def test_parameters_are_those_of_the_model(family, changes):
    """The formula against transformers' own model; Qwen3 has norms of a head's width besides."""
    config = AutoConfig.for_model(family, vocab_size=500, hidden_size=64, intermediate_size=96,
                                  num_hidden_layers=3, **dict(num_attention_heads=4,
                                                              num_key_value_heads=2) | changes)
    model = AutoModelForCausalLM.from_config(config)
    true = sum(p.numel() for p in model.parameters())
    norms = 3 * 2 * 32 if family == "qwen3" else 0
    s = main.shape_of(config.to_dict())
    assert s.params + norms == true
    import peft

    lora = peft.LoraConfig(r=2, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    assert 2 * s.adapter == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_memory_by_hand():
    """2 layers, H 4, I 8, 2 heads of 2 with one of keys and values, V 10, tied:
    a layer 2*4*4 + 2*4*2 + 3*4*8 + 2*4 = 152, all 10*4 + 2*152 + 4 = 348 parameters;
    an adapter of rank 1: 2 * (2 (4+4) + 2 (4+2) + 3 (4+8)) = 128.
    Engine, bf16, 2 GPUs: 2 * 348 / 2 weights; 2 bytes * K and V * 2 layers * 1 head * 2 * window.
    Trainer, rank 3, 1 GPU: 2 * 348 and 16 * 3 * 128; per token 2 layers * 2 * 4 kept and one layer
    of 2 * (16*4 + 6*8) = 224 computed again -> 240 bytes for each of 100 tokens."""
    s = main.shape_of(dict(hidden_size=4, num_hidden_layers=2, vocab_size=10, num_attention_heads=2,
                           num_key_value_heads=1, intermediate_size=8, tie_word_embeddings=True))
    assert (s.params, s.adapter) == (348, 128)
    cfg = SimpleNamespace(engine_dtype="bfloat16", max_model_len=50, lora_slots=4, lora_rank=3,
                          token_budget=100, max_train_len=60, gradient_checkpointing=True,
                          teacher="trainer", cpu_offload=False, topk="")
    assert [round(v * main.GIB) for v in main.engine_memory(cfg, s, 2, 3).values()] == [
        348, 2 * 2 * 2 * 1 * 2 * 50, 2 * 128 * 3 * 4 // 2, 2 * main.GIB]
    mine = main.trainer_memory(cfg, s, 1)
    assert [round(v * main.GIB) for v in mine.values()][:3] == [696, 16 * 3 * 128, 24_000]
    cfg.lora_rank = 0
    mine = main.trainer_memory(cfg, s, 2)
    assert [round(v * main.GIB) for v in mine.values()][:3] == [16 * 174, 696, 348]
    cfg.gradient_checkpointing, cfg.teacher = False, "engine"
    mine = main.trainer_memory(cfg, s, 1)
    assert [round(v * main.GIB) for v in mine.values()][:4] == [16 * 348, 0, 696, 2 * 224 * 100]


@pytest.mark.parametrize(("n", "flags", "shown"), [
    (1, [], ["policy   GPU 0: needs", "of 32.0 GiB", "trainer  GPU 0: needs", "of 48.0 GiB"]),
    (2, [], ["policy   GPU 0: needs", "of 68.0 GiB", "trainer  GPU 1: needs", "of 80.0 GiB"]),
    (4, [], ["judge    GPU 1: needs", "trainer  GPU 2,3, FSDP2 over 2: needs"]),
    (8, ["--lora-rank", "0"], ["policy   GPU 0,1, tensor parallel 2", "judge    GPU 2,3, tensor",
                               "trainer  GPU 4,5,6,7, FSDP2 over 4"]),
    (6, [], ["2 GPUs are not used"])])
def test_the_layout_is_printed(monkeypatch, capsys, n, flags, shown):
    """The 4B model fits on 80 GB GPUs in every layout of the table."""
    gpus(monkeypatch, n)
    main.check_layout(parse(flags), main.shape_of(QWEN3_4B), main.gpu_memory)
    said = capsys.readouterr().out
    assert all(words in said for words in shown), said


@pytest.mark.parametrize(("n", "gib", "flags", "config", "words"), [
    (1, 80, ["--lora-rank", "0", "--judge", "lexicon"], QWEN3_4B,
     r"the trainer does not fit: 59\.9 weights, gradients, moments \+ 7\.5 teacher's copy .* = "
     r"[\d.]+ GiB on each of its 1 GPUs, and there are 48\.0"),
    (1, 24, [], QWEN3_4B, r"the policy does not fit: 7\.5 weights \+ 4\.5 keys and values of 32,768"
     r" tokens \+ 0\.2 adapters \+ 2\.0 working memory = 14\.2 GiB on each .* there are 9\.6"),
    (2, 80, [], QWEN3_32B, "--max-model-len or a smaller model"),
    (8, 80, ["--gpus", "4,3,1"], QWEN3_4B, "cannot be split over 3 GPUs: the model has 32")])
def test_what_does_not_fit_is_refused(monkeypatch, n, gib, flags, config, words):
    """With the sum in the sentence. By hand for 4B: 4.022e9 parameters * 16 / 2^30 = 59.9 GiB;
    * 2 = 7.5; keys and values 2 * 2 * 36 * 8 * 128 * 32768 / 2^30 = 4.5."""
    gpus(monkeypatch, n, gib)
    with pytest.raises(Problem, match=words):
        main.check_layout(parse(flags), main.shape_of(config), main.gpu_memory)


def test_gpu_memory_is_that_of_the_smallest(monkeypatch):
    """By index or by UUID, as CUDA_VISIBLE_DEVICES may name them; None without nvidia-smi."""
    rows = ["0, GPU-aaa, 81920", "1, GPU-bbb, 24576", "2, GPU-ccc, 49152"]
    monkeypatch.setattr(main, "nvidia_smi", lambda *flags: rows)
    assert main.gpu_memory(["0", "2"]) == 48 and main.gpu_memory(["GPU-aa", "GPU-bbb"]) == 24
    monkeypatch.setattr(main, "nvidia_smi", lambda *flags: [])
    assert main.gpu_memory(["0"]) is None


# ---------------------------------------------------------------------- engines started elsewhere


class Outside(BaseHTTPRequestHandler):
    """A vLLM that somebody else started: answers are (path -> JSON), each request is kept."""

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        at = self.server
        at.seen.append((self.path, self.headers.get("Authorization"), body))
        status, answer = at.answers.get(self.path, (404, {}))
        data = json.dumps(answer(body) if callable(answer) else answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def outside():
    """make(path=(status, answer)) -> a running engine with .url, .seen"""
    made = []

    def make(**answers):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Outside)
        server.answers = {"/" + k.replace("__", "/"): v for k, v in answers.items()}
        server.seen = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.append(server)
        return server

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


def models(name="base", window=4096):
    return 200, {"data": [{"id": name, "max_model_len": window}]}


def routes(*paths):
    return 200, {"paths": {p: {} for p in ("/tokenize", *paths)}}


LORA = (*main.LORA_PATHS, "/collective_rpc")  # the last for sync.OnCpu


@pytest.mark.parametrize(("answers", "flags", "words"), [
    (dict(v1__models=models(), **{"openapi.json": routes(*LORA)}), [], None),
    (dict(v1__models=models(), **{"openapi.json": routes(*main.SWAP_PATHS)}),
     ["--lora-rank", "0"], None),
    (dict(v1__models=models(), **{"openapi.json": routes()}), [],
     r"lacks /collective_rpc, /v1/load_lora_adapter, /v1/unload_lora_adapter"
     r".*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.* PYTHONPATH=.* --enable-lora.* sync.OnCpu"),
    (dict(v1__models=models(window=2048), **{"openapi.json": routes(*LORA)}), [],
     r"\(window of 'base': 2048\) .* needed is 'base' with a window of 4096"),
    (dict(v1__models=models("Qwen/Qwen3-4B"), **{"openapi.json": routes(*LORA)}), [],
     r"serves Qwen/Qwen3-4B .*--served-model-name base"),
    (dict(v1__models=(401, {"error": "no key"})), [], "answers 401.*no key")])
def test_policy_url(outside, monkeypatch, answers, flags, words):
    """An engine that we could have started: the right name, window and routes. If not, the sentence
    has the command to start it with."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("POLICY_KEY", "k-1")
    engine = outside(**answers)
    cfg = parse(["--policy-url", engine.url + "/v1/", *flags])
    if words:
        with pytest.raises(Problem, match=f"(?s){words}"):
            main.check_policy(cfg)
    else:
        assert main.check_policy(cfg) == engine.url
    assert {key for _, key, _ in engine.seen} == {"Bearer k-1"}


def test_policy_url_that_nobody_answers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(Problem, match="does not answer"):
        main.check_policy(parse(["--policy-url", "http://127.0.0.1:9"]))


@pytest.mark.parametrize(("tokens", "text", "ok"), [([5, 9], "same", True), ([5, 8], "same", False),
                                                    ([5, 9], "other", False)])
def test_teacher_url_needs_our_vocabulary(outside, monkeypatch, tokens, text, ok):
    """The same ids for a text of many scripts, and the same text for every seventh id."""
    monkeypatch.setenv("TEACHER_KEY", "k-2")
    monkeypatch.delenv("POLICY_KEY", raising=False)
    ours = outside(tokenize=(200, {"tokens": [5, 9]}), detokenize=(200, {"prompt": "same"}))
    theirs = outside(tokenize=(200, {"tokens": tokens}), detokenize=(200, {"prompt": text}))
    cfg = SimpleNamespace(engine_url=ours.url, teacher_url=theirs.url, teacher_model="t")
    if ok:
        main.check_teacher(cfg)
        assert [body["model"] for _, _, body in theirs.seen] == ["t", "t"]
        assert theirs.seen[1][2]["tokens"] == [5, 9, 0, 7]
    else:
        with pytest.raises(Problem, match="another vocabulary"):
            main.check_teacher(cfg)
    assert {key for _, key, _ in theirs.seen} == {"Bearer k-2"}
    assert {key for _, key, _ in ours.seen} == {None}


def test_which_key_goes_where(monkeypatch):
    """A teacher that is the policy's own engine gets the policy's key, another one its own."""
    from proxy import policy_engine, teacher_engine

    monkeypatch.setenv("POLICY_KEY", "p")
    monkeypatch.setenv("TEACHER_KEY", "t")
    cfg = SimpleNamespace(engine_url="http://e", teacher_url="http://e", teacher_model="base")
    assert teacher_engine(cfg) == Endpoint("http://e", "base", "p") == policy_engine(cfg, "base")
    cfg.teacher_url = "http://other"
    assert teacher_engine(cfg) == Endpoint("http://other", "base", "t")


@pytest.mark.parametrize(("cpuinfo", "dtype"), [
    ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile", "bfloat16"),
    ("Features\t: fp asimd i8mm bf16 dgh", "bfloat16"),
    ("flags\t\t: fpu avx2 avx512f avx512_vnni", "float32"), ("", "float32"), (None, "float32")])
def test_a_cpu_without_bfloat16_computes_in_float32(tmp_path, cpuinfo, dtype):
    """Once: bfloat16 everywhere, three times as slow where a CPU has to emulate it."""
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo + "\n")
    assert main.cpu_dtype(tmp_path / "cpuinfo") == dtype
