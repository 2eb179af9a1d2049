"""examples/inspect_run.py on a run made by hand: five turns, every number worked out here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import REPLY_FIELDS, Turn, TurnLog

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import inspect_run

WORDS = ["Rain", " is", " water", "!", "<end>"]


def turn(log, name, reply, fate, then="", step=None, found=None, **judged):
    one = Turn(name, "s", messages=[{"role": "user", "content": f"What is {name}?"}],
               prompt_ids=[7, 8, 9], response_ids=[0, 1, 4], rollout_logp=[-1.0, -2.0, -0.5],
               finish_reason="stop", reply={"role": "assistant", "content": reply})
    log.write(one, "reply", **{k: getattr(one, k) for k in REPLY_FIELDS})
    if then:
        log.write(one, "next_state", next_state=[{"role": "user", "content": then}])
    if judged:
        log.write(one, "judged", **judged)
    if fate:
        log.close(one, fate, step, **(found or {}))


@pytest.fixture
def run(tmp_path):
    """combine: w_rl r + w_opd clamp(T - p, +-5), mean over three tokens.
    good-1: 1. bad-2: -1 + (5 + 0 - 2) / 3 = 0, for T - p = 9, 0, -2. bad-3: -1."""
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {"mode": "combine", "seed": 3, "w_rl": 1.0, "w_opd": 1.0, "opd_clip": 5.0,
              "model": str(tmp_path / "nothing"), "run_dir": str(folder)}
    (folder / "config.json").write_text(json.dumps(config))
    log = TurnLog(folder / "turns.jsonl")
    turn(log, "good-1", "Rain is water.", "trained", "Thanks.", 1, votes=[1], score=1, r=1.0)
    turn(log, "bad-2", "Rain\x1b[2J is wet.", "trained", "No. Be brief, please now.", 2,
         {"prox_logp": [-10.0, -2.5, -1.0], "teacher_logp": [-1.0, -2.5, -3.0]}, votes=[-1, 1],
         score=-1, r=-1.0, distil=True, hints=["Be brief, please now.", "Be brief, please."],
         hint="Be brief, please now.", hinted_prompt_ids=[[7], [8]])
    turn(log, "bad-3", "Rain " * 60, "trained", "No.", 2, votes=[-1], score=-1, r=-1.0)
    turn(log, "lost-4", "Rain.", "no_next_state")
    turn(log, "late-5", "Rain?", None)
    log.file.close()
    return folder


def shown(capsys, *argv):
    code = inspect_run.main([str(a) for a in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_fates_with_share_and_example(run, capsys):
    """The commonest first; the example of a fate is a turn with a reaction, if there is one."""
    code, text, _ = shown(capsys, run)
    assert code == 0 and "5 turns, by fate" in text and "mode combine, seed 3" in text
    heads = [x for x in text.splitlines() if " %  (" in x]
    assert heads == ["trained  3  60.0 %  (a sample of an update)",
                     "no_next_state  1  20.0 %  (nobody reacted to the reply)",
                     "open  1  20.0 %  (still waiting, or the run was killed)"]
    lost = text.split("no_next_state")[1].split("open")[0]
    assert "for example lost-4" in lost and "user: What is lost-4?" in lost and "then" not in lost


def test_best_and_worst_by_mean_advantage(run, capsys):
    _, text, _ = shown(capsys, run, "-n", "1")
    best, worst = text.split("best of 3")[1].split("worst of 3")
    assert "good-1  step 1  advantage +1.000  score 1  3 tokens" in best and "bad" not in best
    assert "bad-3  step 2  advantage -1.000  score -1  3 tokens" in worst and "bad-2" not in worst
    _, text, _ = shown(capsys, run, "-n", "9")
    order = [x.split()[0] for x in text.splitlines() if "  advantage " in x]
    assert order == ["good-1", "bad-2", "bad-3", "bad-3", "bad-2", "good-1"]
    assert "bad-2  step 2  advantage +0.000" in text
    assert "hints: Be brief, please." in text  # all valid ones, where there was a choice


def test_equal_turns_are_not_ranked(run, capsys):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"w_rl": 0.0, "w_opd": 0.0}))
    _, text, _ = shown(capsys, run)
    assert "some (all have the same advantage) of 3 trained turns" in text and "worst" not in text


def test_one_turn_token_by_token(run, capsys, tmp_path):
    """By a part of its id. p - b: -9, -0.5, -0.5; T - p: 9, 0, -2, as bars of at most eight."""
    code, text, said = shown(capsys, run, "--turn", "d-2")
    assert code == 0 and "ids are shown" in said
    rows = [x.split() for x in text.splitlines()]
    assert ["token", "b", "p", "T", "p", "-", "b", "T", "-", "p"] in rows
    assert ["0", "0", "-1.000", "-10.000", "-1.000", "-9.000", "9.000", ">>>>>>>>"] in rows
    assert ["1", "1", "-2.000", "-2.500", "-2.500", "-0.500", "0.000"] in rows
    assert ["2", "4", "-0.500", "-1.000", "-3.000", "-0.500", "-2.000", "<<"] in rows
    assert "votes [-1, 1], score -1, r -1.0, hint Be brief, please now." in text
    assert "then user: No. Be brief" in text and "valid hint: Be brief, please.\n" in text


def test_tokens_as_text_where_the_tokenizer_loads(run, capsys, tmp_path):
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="!"))
    tokenizer.decoder = decoders.Fuse()
    (tmp_path / "nothing").mkdir()
    tokenizer.save(str(tmp_path / "nothing" / "tokenizer.json"))
    _, text, said = shown(capsys, run, "--turn", "good-1")
    rows = [" ".join(x.split()) for x in text.splitlines()]
    assert said == "" and "0 'Rain' -1.000 - - - -" in rows and "1 ' is' -2.000 - - - -" in rows
    assert "2 '<end>' -0.500 - - - -" in rows  # p and T were not recorded for it


def test_text_of_a_reply_cannot_move_the_cursor(run, capsys):
    """Escape sequences of a model would reach the reader's terminal; and no colour in a pipe."""
    for argv in ([run], [run, "--turn", "bad-2"]):
        _, text, _ = shown(capsys, *argv)
        assert "\x1b" not in text and "Rain\ufffd[2J is wet." in text


def test_a_run_that_is_still_being_written(run, capsys):
    """Half a line at the end is not read; all turns before it are."""
    whole = shown(capsys, run)[1]
    with open(run / "turns.jsonl", "a") as file:
        file.write('{"turn": "good-6", "event": "rep')
    assert shown(capsys, run)[1] == whole


@pytest.mark.parametrize(("part", "words"), [("bad", "2 turns have that"), ("x", "0 turns have")])
def test_no_such_turn_is_one_sentence(run, capsys, part, words):
    code, _, said = shown(capsys, run, "--turn", part)
    assert code == 1 and words in said and said.startswith("error: ")


def test_no_such_run_is_one_sentence(run, capsys, tmp_path):
    for argv in ([tmp_path], [run, "--compare", tmp_path]):
        code, _, said = shown(capsys, *argv)
        assert code == 1 and said == f"error: {tmp_path}: no run directory (no config.json) there\n"
    (run / "turns.jsonl").unlink()
    assert shown(capsys, run)[2] == f"error: {run}: no turns.jsonl there\n"


def test_two_runs_side_by_side(run, capsys, tmp_path):
    """Knobs that differ, figures of the summary, the last three updates: 2 + 3 + 4, 5 alone."""
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((run / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"mode": "opd", "run_dir": "x"}))
    for folder, good, kl in ((run, 0.25, [1, 2, 3, 4]), (other, 0.75, [5])):
        summary = {"steps": len(kl), "held_out": {"after": good}, "mode": "m"}
        (folder / "summary.json").write_text(json.dumps(summary))
        rows = [json.dumps({"step": i, "kl": x, "time": 1e9}) + "\n" for i, x in enumerate(kl)]
        (folder / "metrics.jsonl").write_text("".join(rows))
    code, text, _ = shown(capsys, run, "--compare", other)
    rows = [x.split() for x in text.splitlines()]
    assert code == 0 and ["mine", "other", "difference"] in rows
    assert ["mode", "combine", "opd"] in rows and not any("run_dir" in row for row in rows)
    assert ["held_out.after", "0.25", "0.75", "+0.5"] in rows and ["steps", "4", "1", "-3"] in rows
    assert ["kl", "3", "5", "+2"] in rows and "time" not in text


def test_as_a_user_starts_it(run):
    """The script itself; a reader that closes the pipe is no error."""
    script = [sys.executable, ROOT / "examples" / "inspect_run.py", run]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "worst of 3" in done.stdout and not done.stderr
    head = subprocess.run(["bash", "-c", 'set -o pipefail; "$@" | true', "-", *script],
                          capture_output=True, text=True, timeout=120)
    assert head.returncode == 0 and not head.stderr
