"""--save-every and --resume: nothing lost, nothing trained twice."""

import json
from types import SimpleNamespace

import pytest
import torch
from test_trainer import config, make_trainer, make_turns, tiny

import main
import trainer as T
from judge import SampleQueue
from proxy import REPLY_FIELDS, Policy, Sessions, Turn, TurnLog, load_turns


@pytest.mark.parametrize("rank", [0, 8])
def test_a_restored_trainer_takes_the_same_next_step(tmp_path, rank):
    """Weights, optimiser moments, step and random state come back: the next step is the same to the
    last digit. A fresh optimiser would take another one."""
    tiny().save_pretrained(tmp_path)
    cfg = config(tmp_path, lora_rank=rank, lr=1e-2)
    first = make_trainer(cfg)
    for _ in range(3):
        first.train(make_turns())
    first.save(tmp_path / "checkpoints", [{"id": "a"}])
    again, fresh = T.Trainer(cfg), T.Trainer(cfg)
    again.load(tmp_path / "checkpoints" / "step-3.pt")
    fresh.policy.load_state_dict(first.policy.state_dict())
    fresh.step = 3
    for one in (first, again, fresh):
        one.train(make_turns(seed=1))
    want, got, other = (one.state() for one in (first, again, fresh))
    assert again.step == 4 and all(torch.equal(got[k], v) for k, v in want.items())
    assert any(not torch.allclose(other[k], v, atol=1e-5) for k, v in want.items())


def test_checkpoints_are_whole_or_absent(tmp_path, monkeypatch):
    """The newest two stay; one that was cut off while it was written does not count."""
    tiny().save_pretrained(tmp_path)
    step = T.Trainer(config(tmp_path))
    for _ in range(4):
        step.step += 1
        step.save(tmp_path / "checkpoints", [{"id": f"t{step.step}"}])
    names = {f.name for f in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-3.pt", "step-3.json", "step-4.pt", "step-4.json"}
    step.step = 5
    monkeypatch.setattr(T.torch, "save", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        step.save(tmp_path / "checkpoints", [])
    cfg = SimpleNamespace(resume="x", run_dir=str(tmp_path))
    assert main.checkpoint_of(cfg).endswith("step-4.pt")


def test_the_learning_rate_of_now_holds(tmp_path):
    """--resume RUN --lr X. Once a bug: the optimiser's state brought the old rate back."""
    tiny().save_pretrained(tmp_path)
    T.Trainer(config(tmp_path, lr=1e-2)).save(tmp_path / "checkpoints", [])
    again = T.Trainer(config(tmp_path, lr=1e-5))
    again.load(tmp_path / "checkpoints" / "step-0.pt")
    assert {group["lr"] for group in again.optimiser.param_groups} == {1e-5}


def test_wrong_weights_are_refused(tmp_path):
    """A checkpoint of full weights does not go into an adapter run, nor one of rank 1 into rank 8.
    Once a bug: the latter was broadcast, and would have been served."""
    tiny().save_pretrained(tmp_path)
    T.Trainer(config(tmp_path, lora_rank=1)).save(tmp_path / "small", [])
    with pytest.raises(T.SyncError, match="another shape"):
        T.Trainer(config(tmp_path, lora_rank=8)).load(tmp_path / "small" / "step-0.pt")
    full = T.Trainer(config(tmp_path, lora_rank=0))
    full.save(tmp_path / "checkpoints", [])
    with pytest.raises(T.SyncError, match="missing|unknown"):
        T.Trainer(config(tmp_path, lora_rank=8)).load(tmp_path / "checkpoints" / "step-0.pt")


# ------------------------------------------------------------------------------- what main takes up


def record(run, turns):
    """A run directory with a checkpoint at step 2 whose last step trained turn 'saved'."""
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-2.pt").write_bytes(b"")
    (run / "checkpoints" / "step-2.json").write_text(json.dumps({"step": 2, "turns": ["saved"]}))
    rows = [json.dumps({"step": k, "reward_mean": 0.0}) + "\n" for k in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(rows))
    (run / "stop_users").touch()
    log = TurnLog(run / "turns.jsonl")
    for name, (state, fate, step, version) in turns.items():
        turn = Turn(name, "s", messages=[{"role": "user", "content": f"Why {name}?"}],
                    reply={"role": "assistant", "content": "So."}, prompt_ids=[1], finished=1.0,
                    response_ids=[2], rollout_logp=[-1.0], finish_reason="stop",
                    version_start=version, version_end=version)
        log.write(turn, "reply", **{k: getattr(turn, k) for k in REPLY_FIELDS})
        if state >= 1:
            said = [{"role": "user", "content": "Too long. Answer in one sentence."}]
            log.write(turn, "next_state", next_state=said, paired_at=5.0)
        if state == 2:
            log.write(turn, "judged", score=-1, votes=[-1], hints=["h"], hint="h", distil=True,
                      r=-1, hinted_prompt_ids=[[1, 2]], judged_at=6.0)
        if fate:
            log.close(turn, fate, step)
    log.file.write('{"turn": "torn", "event": "re')
    log.file.close()


def untorn(run):
    text = (run / "turns.jsonl").read_text()
    (run / "turns.jsonl").write_text(text[: text.rindex("\n") + 1])


def resumed(run, **changes):
    """What start() does with it, without an engine."""
    cfg = SimpleNamespace(**vars(main.Config()) | dict(
        run_dir=str(run), mode="opd", max_train_len=99,
        checkpoint=str(run / "checkpoints" / "step-2.pt")) | changes)
    system = SimpleNamespace(cfg=cfg, run_dir=run, policy=Policy("base"), judging=[])
    turns = main.recorded_turns(system)
    system.log = TurnLog(run / "turns.jsonl")
    system.line = SampleQueue(cfg, system.log, system.policy)
    system.sessions = Sessions(system.log, 60)
    system.judges = SimpleNamespace(put=system.judging.append)
    main.take_up(system, turns)
    return system


TURNS = {  # name: how far it came (0 answered, 1 paired, 2 judged), fate, its step, version
    "old": (2, "trained", 1, 0), "last": (2, "trained", 2, 1), "saved": (2, None, None, 1),
    "lost": (2, "trained", 3, 2), "ready": (2, None, None, 1), "ended": (2, "run_ended", None, 3),
    "judging": (1, None, None, 1), "waiting": (0, "run_ended", None, 1),
    "dropped": (2, "stale", None, 0), "alone": (0, "no_next_state", None, 0)}


def test_every_turn_comes_back_to_its_place_once(tmp_path):
    """Trained by the restored step: stays, also where the commit was lost after the checkpoint
    ('saved'). Trained by a lost step, judged, judging, waiting: taken up. Dropped: stays."""
    record(tmp_path, TURNS)
    system = resumed(tmp_path)
    assert set(system.line.places) == {"lost", "ready", "ended"}
    assert [t.id for t in system.judging] == ["judging"]
    assert set(system.sessions.keys) == {"waiting"}
    assert system.log.fates == {"trained": 3, "stale": 1, "no_next_state": 1}
    assert system.log.turns == len(TURNS)
    assert system.line.updates == system.policy.version == 2
    back = load_turns(tmp_path / "turns.jsonl")
    assert {n for n, t in back.items() if t.fate == "trained"} == {"old", "last", "saved"}
    assert {n for n, t in back.items() if t.fate is None} == {"lost", "ready", "ended", "judging",
                                                             "waiting"}
    assert "torn" not in back and not (tmp_path / "stop_users").exists()
    rows = [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2]


def test_untrusted_turns_stay_untrusted(tmp_path):
    """A crash between the reply's line and its fate's. Once a bug: side turns and turns without
    log-probs came back as trainable."""
    record(tmp_path, {"ready": (2, None, None, 1)})
    untorn(tmp_path)
    log = TurnLog(tmp_path / "turns.jsonl")
    for name in ("side", "bad_logp"):
        turn = Turn(name, "s", skip=name)
        log.write(turn, "reply", **{k: getattr(turn, k) for k in REPLY_FIELDS})
    log.file.close()
    system = resumed(tmp_path)
    assert set(system.line.places) == {"ready"} and not system.sessions.keys
    assert system.log.fates == {"side": 1, "bad_logp": 1}


def test_a_thumb_before_the_crash_is_judged_again(tmp_path):
    """Feedback may be younger than the judge's label; clocks and the window begin anew."""
    record(tmp_path, {"ready": (2, "run_ended", None, 1), "old": (2, "stale", None, 0)})
    untorn(tmp_path)
    with open(tmp_path / "turns.jsonl", "a") as file:
        file.write('{"turn": "ready", "event": "feedback", "feedback": {"score": 1}}\n')
    system = resumed(tmp_path)
    assert [(t.id, t.closed, t.age_s) for t in system.judging] == [("ready", 0.0, None)]
    assert system.line.window()["dropped"] == {}


def test_turns_of_lost_weights_are_never_of_the_current_version(tmp_path):
    """'ended' was sampled by version 3, which is lost; a new version 3 will be another one. It
    counts as of the restored version by age, and never as sampled by the current weights."""
    record(tmp_path, TURNS)
    turn = resumed(tmp_path).line.places["ended"]["turn"]
    assert (turn.version_start, turn.version_end) == (2, -1)


def test_a_second_crash_loses_and_repeats_nothing(tmp_path):
    """The lost step 3 is in the file; after a resume and a new checkpoint of step 4 the turn that
    only the lost step 3 had trained must still count as untrained."""
    record(tmp_path, TURNS)
    system = resumed(tmp_path)
    line = system.line
    line.checked = True
    batch = [t["id"] for t in line.lease(2)["turns"]]
    line.commit(4, dict.fromkeys(batch, "trained"))
    (tmp_path / "checkpoints" / "step-4.pt").write_bytes(b"")
    (tmp_path / "checkpoints" / "step-4.json").write_text(json.dumps({"step": 4, "turns": batch}))
    system.log.file.close()
    again = resumed(tmp_path, checkpoint=str(tmp_path / "checkpoints" / "step-4.pt"))
    left = {"lost", "ready", "ended"} - set(batch)
    assert len(batch) == 2 and set(again.line.places) == left
    assert again.log.fates["trained"] == 5 and again.line.updates == 4
    assert [t.id for t in again.judging] == ["judging"]


def test_under_another_mode_they_are_judged_anew(tmp_path):
    """rl had asked for no hint: under opd its turns have none, so a judge sees them again."""
    record(tmp_path, {"ready": (2, None, None, 1)})
    with open(tmp_path / "turns.jsonl", "r+") as file:
        text = file.read().replace('"hint": "h"', '"hint": null')
        file.seek(0)
        file.write(text)
        file.truncate()
    assert [t.id for t in resumed(tmp_path).judging] == ["ready"]


@pytest.mark.parametrize(("flags", "words"), [
    (["--resume", "{run}/none"], "no config.json"), (["--resume", "{run}"], "no checkpoint")])
def test_nothing_to_resume(tmp_path, flags, words):
    (tmp_path / "config.json").write_text(json.dumps(vars(main.Config()) | {"model": "m"}))
    with pytest.raises(main.Problem, match=words):
        main.parse([f.format(run=tmp_path) for f in flags])


def test_flags_change_the_resumed_config(tmp_path):
    """The recorded knobs hold, but for those given now; the run goes on in its directory."""
    cfg = main.parse(["--mode", "rl", "--lr", "3e-4", "--run-dir", str(tmp_path)])
    main.write_config(cfg)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-7.pt").write_bytes(b"")
    (tmp_path / "checkpoints" / "step-12.pt").write_bytes(b"")
    again = main.parse(["--resume", str(tmp_path), "--lr", "1e-4"])
    assert (again.mode, again.lr, again.run_dir) == ("rl", 1e-4, str(tmp_path))
    assert again.checkpoint == str(tmp_path / "checkpoints" / "step-12.pt")
    assert again.save_every == 10


def test_what_was_filled_in_is_filled_in_again(tmp_path):
    """Once bugs: a model judge of our own was asked at the address of the engine that is gone; a
    decoupled run could not go on with ppo."""
    cfg = main.parse(["--loss", "decoupled", "--judge", "llm", "--run-dir", str(tmp_path)])
    cfg.judge_is_ours, cfg.judge_url, cfg.judge_model = True, "http://127.0.0.1:1/v1", "base"
    main.write_config(cfg)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-1.pt").write_bytes(b"")
    again = main.parse(["--resume", str(tmp_path), "--loss", "ppo"])
    assert (again.judge_url, again.judge_model, again.loss) == ("", "", "ppo")
    with pytest.raises(main.Problem, match="square the ratio"):
        main.parse(["--resume", str(tmp_path), "--loss", "ppo", "--tis-cap", "3"])
