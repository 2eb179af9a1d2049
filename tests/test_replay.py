"""--replay: training again on recorded turns, without engine or judge."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import main
from proxy import REPLY_FIELDS, Turn, TurnLog, load_turns

ROOT = Path(main.__file__).parent
TIMES = ("wait_s", "train_s", "tokens_per_s", "time", "check_s")
pytestmark = pytest.mark.skipif(not main.DEMO_MODEL.is_dir(), reason="make setup brings the model")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run directory with two trained steps of two turns, and one turn that was not trained."""
    run = tmp_path_factory.mktemp("recorded")
    cfg = main.parse(["--run-dir", str(run), "--engine-dtype", "float32", "--lr", "1e-3"])
    cfg.engine_url = "http://127.0.0.1:9"
    main.start_judge_engine(SimpleNamespace(cfg=cfg), cfg.engine_url)  # addresses, as in a run
    main.write_config(cfg)
    log = TurnLog(run / "turns.jsonl")
    for i in range(5):
        turn = Turn(f"t{i}", "s", messages=[{"role": "user", "content": "Why?"}],
                    prompt_ids=[1, 30 + i, 31], response_ids=[40 + i, 41, 2],
                    rollout_logp=[-1.0, -2.0, -0.5], finish_reason="stop")
        log.write(turn, "reply", **{k: getattr(turn, k) for k in REPLY_FIELDS})
        log.write(turn, "judged", score=-1, votes=[-1], hints=["h"], hint="h", distil=i != 1,
                  r=-1 if i == 1 else None, hinted_prompt_ids=[[1, 30 + i, 31, 32]],
                  teacher_logp=None)
        log.close(turn, "trained" if i < 4 else "stale", step=2 if i < 2 else 1)
    return run


def replay(recorded, out, *flags):
    done = subprocess.run(
        [sys.executable, "trainer.py", "--replay", str(recorded / "turns.jsonl"), "--run-dir",
         str(out), *flags], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def test_replay_repeats_the_steps_and_is_deterministic(recorded, tmp_path):
    """The recorded batches in the order of their steps, only trained turns, the same numbers for
    the same seed, other ones for another loss."""
    first, again = (replay(recorded, tmp_path / x) for x in "ab")
    assert first == again and [r["step"] for r in first] == [1, 2]
    assert [r["turns"] for r in first] == [2, 2] and first[0]["grad_norm"] > 0
    other = replay(recorded, tmp_path / "c", "--topk", "full", "--batch-size", "4")
    assert [r["turns"] for r in other] == [4] and other[0]["loss"] != first[0]["loss"]


def test_recorded_teacher_and_other_hints(monkeypatch):
    """The recorded teacher is used again; under another --hint-choice another hint may teach, and
    what was recorded for the old one is not used for it."""
    import trainer

    turn = Turn("t", "s", hints=["a long hint", "short"], hint="a long hint", teacher_logp=[-1.0])
    trainer.choose_again(turn, SimpleNamespace(hint_choice="longest"))
    assert turn.teacher_logp == [-1.0]
    monkeypatch.setitem(trainer.HINT_CHOICE, "shortest", lambda hints: min(hints, key=len))
    trainer.choose_again(turn, SimpleNamespace(hint_choice="shortest"))
    assert (turn.hint, turn.teacher_logp) == ("short", None)


def test_what_a_step_found_out_is_recorded(tmp_path):
    """Teacher and prox log-probs of a trained turn come back from turns.jsonl."""
    import trainer

    log = TurnLog(tmp_path / "turns.jsonl")
    turn = Turn("t", "s")
    log.write(turn, "reply", session="s")
    log.close(turn, "trained", 3, **trainer.scores({"prox_logp": [-0.123456789], "hint": "chosen",
                                                    "age_s": 3.0, "teacher_logp": None}))
    back = load_turns(tmp_path / "turns.jsonl")["t"]
    assert back.prox_logp == [-0.12346] and back.teacher_logp is None and back.hint == "chosen"
    assert back.age_s == 3.0
    assert (back.fate, back.step) == ("trained", 3) and back.closed == turn.closed > 0


@pytest.mark.parametrize(("flags", "words"), [
    (["--replay", "/no/such"], "no such file"), (["--replay"], "--knob value"),
    (["--replay", "{run}/turns.jsonl", "--no-such-knob", "1"], "not a knob"),
    (["--replay", "{run}/turns.jsonl", "--lr", "much"], "float is needed"),
    (["--replay", "{run}/turns.jsonl", "--loss", "mystery", "--run-dir", "{run}/x"], "ppo or"),
    (["--replay", "{run}/turns.jsonl", "--mode", "rl"], "not a knob of training"),
    (["--replay", "{run}/turns.jsonl", "--tis-cap", "3"], "square the ratio"),
    (["--replay", "{run}/turns.jsonl", "--topk", "99"], "1 to 50"),
    (["--replay", "{run}/turns.jsonl", "--loss-agg", "tokens"], "sample, token"),
    (["--replay", "{run}/turns.jsonl", "--gradient-checkpointing", "yes"], "true, false"),
    (["--replay", "{run}/turns.jsonl", "--schedule", "fifo"], "not a knob of training")])
def test_mistakes_end_with_one_sentence(recorded, flags, words):
    import trainer

    with pytest.raises(SystemExit, match=words):
        trainer.run(trainer.replay_config([f.format(run=recorded) for f in flags]))


def test_a_mistake_on_the_command_line_shows_no_traceback(recorded):
    done = subprocess.run([sys.executable, "trainer.py", "--replay", "/no/such"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "no such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_line_that_a_crash_cut_is_not_read(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text('{"turn": "a", "event": "reply", "session": "s"}\n{"turn": "b", "eve')
    assert list(load_turns(path)) == ["a"]
