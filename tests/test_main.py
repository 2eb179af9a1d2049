"""The one Config: presets, layouts and settings that must be refused with a sentence."""

import json
from types import SimpleNamespace

import pytest

import main
from main import Problem, parse


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_presets_fill_every_auto():
    """No second default anywhere: after parse nothing is `auto`, and flags win over presets."""
    cfg = parse(["--lr", "0.5"])
    assert [k for k, v in vars(cfg).items() if v == main.AUTO] == ["gpus"]  # see cfg.layout
    assert (cfg.lr, cfg.lora_rank, cfg.max_tokens, cfg.judge) == (0.5, 16, 96, "lexicon")
    assert parse(["--lora-rank", "0"]).preset == "cpu-full"


def test_presets_for_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    cfg = parse(["--lora-rank", "0"])
    assert cfg.preset == "gpu-full" and cfg.teacher == "engine" and cfg.judge == "llm"
    assert cfg.layout == {"trainer": list("4567"),
                          "policy": ["0", "1"], "judge": ["2", "3"]}


@pytest.mark.parametrize(("model", "tool", "reasoning"), [
    ("Qwen/Qwen3-4B-Instruct-2507", "hermes", ""), ("Qwen/Qwen3-8B", "hermes", "qwen3"),
    ("models/SmolLM2-135M-Instruct", "", ""), ("deepseek-ai/DeepSeek-R1", "", "deepseek_r1")])
def test_parsers_by_model_family(model, tool, reasoning):
    """Without a parser vLLM answers 400 to every agent that sends tools."""
    cfg = parse(["--model", model])
    assert (cfg.tool_parser, cfg.reasoning_parser) == (tool, reasoning)
    assert parse(["--model", model, "--tool-parser", "mistral"]).tool_parser == "mistral"


@pytest.mark.parametrize(("flags", "words"), [
    (["--temperature", "0"], "above 0"),
    (["--batch-size", "0"], "above 0"),
    (["--judge-threads", "0"], "--judge-threads 0 must be above 0"),
    (["--users", "0"], "above 0"),
    (["--votes", "-1"], "negative"),
    (["--max-staleness", "-2"], "negative"),
    (["--sync-every", "0"], "above 0"),
    (["--lr", "inf"], "finite"),
    (["--w-rl", "nan"], "finite"),
    (["--steps", "auto"], "finite"),
    (["--port", "70000"], "65536"),
    (["--gpu-share", "2"], "at most 1"),
    (["--max-tokens", "4096"], "must be below"),
    (["--schedule", "lifo"], "not one of"),
    (["--schedule", "windowed", "--window", "8"], "at least --batch-size 16"),
    (["--host", "0.0.0.0"], "set a key"),
    (["--judge", "llm", "--lora-rank", "0"], "--judge-url"),
    (["--judge-url", "http://x/v1"], "--judge-model"),
    (["--teacher", "engine", "--temperature", "0.6"], "temperature 1 only"),
    (["--teacher", "engine", "--lora-rank", "0"], "judge engine of its own"),
    (["--teacher-url", "http://x"], "needs --teacher-model"),
    (["--teacher-url", "http://x", "--teacher-model", "t", "--teacher", "trainer"], "different"),
    (["--policy-url", "localhost:8000"], "http://"),
    (["--lora-rank", "7"], "vLLM takes"),
    (["--extra", "/no/such.py"], "does not exist"),
    (["--simulate", "concise"], "needs an end"),
    (["--loss", "mystery"], "not ppo"),
    (["--engine-cores", "two"], "0-3"),
    (["--engine-cores", "9999"], "of this machine"),
    (["--trainer-cores", "1-0"], "of this machine"),
    (["--dual-clip", "0.5"], "at least 1"),
    (["--tracker", "no_such_tracker"], "no such package"),
    (["--judge", "lexicon", "--judge-url", "http://x/v1", "--judge-model", "j"], "two different"),
    (["--steps", "many"], "invalid int"),
    (["--step", "3"], "--step"),
    (["--api-key-file", "/no/such"], "cannot be read"),
])
def test_wrong_settings_are_refused_with_a_sentence(flags, words):
    with pytest.raises(Problem, match=words):
        parse(flags)


def test_a_judges_url_is_asked():
    """Once: on a CPU the word list judged all the same, and a slash at the end gave `//`."""
    cfg = parse(["--judge-url", "http://x/v1/", "--judge-model", "j"])
    assert (cfg.judge, cfg.judge_url) == ("llm", "http://x/v1")
    assert parse([]).judge == "lexicon"


@pytest.mark.parametrize("changed", [
    ["--lora-rank", "8"], ["--run-dir", "elsewhere"], ["--temperature", "0.6"]])
def test_a_checkpoint_belongs_to_its_run(tmp_path, changed):
    """Once: refused by the trainer only, with the run's config already written over."""
    main.write_config(parse(["--run-dir", str(tmp_path)]))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-3.pt").touch()
    resume = ["--resume", str(tmp_path)]
    assert parse([*resume, "--lora-rank", "16", "--lr", "1e-3"]).lr == 1e-3
    with pytest.raises(Problem, match="cannot be changed"):
        parse([*resume, *changed])


@pytest.mark.parametrize("second", [False, True])
def test_ctrl_c_lets_full_weights_be_saved(monkeypatch, second):
    """The trainer alone has them: it gets its order to end, and the time. A second Ctrl-C ends the
    waiting. Once: hours of training were gone."""
    asked = []

    def alive():
        asked.append(line.closing)
        if second:
            raise KeyboardInterrupt
        return len(asked) < 4

    line = SimpleNamespace(closing=False)
    main.let_it_save(SimpleNamespace(line=line, trainer=SimpleNamespace(alive=alive)))
    assert asked == [True] * (1 if second else 4)


@pytest.mark.parametrize("name", sorted(main.MAY_BE_0))
def test_numbers_that_may_be_0(name):
    """And every one of them is a number of Config."""
    flags = ["--teacher", "trainer", "--sync-every", "1"]
    assert getattr(parse([*flags, "--" + name.replace("_", "-"), "0"]), name) == 0
    assert parse(["--max-staleness", "-1"]).max_staleness == -1


def test_keys_are_never_written(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCLAW_API_KEY", "very-secret")
    monkeypatch.setenv("JUDGE_KEY", "also-secret")
    cfg = parse(["--run-dir", str(tmp_path), "--host", "0.0.0.0"])
    main.write_config(cfg)
    written = (tmp_path / "config.json").read_text()
    assert "secret" not in written and json.loads(written)["mode"] == "opd"
    assert cfg.api_key == "very-secret"


def test_model_folder_must_hold_a_model(tmp_path):
    with pytest.raises(Problem, match="no config.json"):
        main.check_model(SimpleNamespace(model=str(tmp_path), max_model_len=10))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    with pytest.raises(Problem, match="window of 8"):
        main.check_model(SimpleNamespace(model=str(tmp_path), max_model_len=10))
    main.check_model(SimpleNamespace(model="some-org/some-model", max_model_len=10))  # the hub's


def test_help_is_grouped(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    for group in ("run:", "model:", "serving:", "judging:", "training:", "hardware:"):
        assert f"\n{group}\n" in shown
