"""examples/ablate.py and run_table.py: grids over a stand-in for main.py, tables worked by hand."""

import csv
import doctest
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import yaml
from conftest import until

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import ablate
import run_table

# Behaves as main.py and trainer.py do from outside: takes flags, fills --run-dir, knows Ctrl-C.
# The file `plan` beside it says what a cell does instead of ending; `ran` collects the cells.
STAND_IN = '''
import json, os, signal, sys, time
from pathlib import Path
knobs = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, here = Path(knobs["--run-dir"]), Path(__file__).parent
plan = json.loads((here / "plan").read_text()).get(folder.name, "end")
with open(here / "ran", "a") as file:
    file.write(folder.name + "\\n")
print("stand-in", folder.name, flush=True)
mode, seed = knobs.get("--mode", "rl"), int(knobs.get("--seed", 0))
assert not (folder / "turns.jsonl").exists()
(folder / "turns.jsonl").write_text("")
config = {"mode": mode, "seed": seed, "run_dir": str(folder), "replay": knobs.get("--replay", "")}
(folder / "config.json").write_text(json.dumps(config))
for step in (1, 2, 3, 4):
    row = {"step": step, "reward_mean": step * 0.25 - 1, "reply_tokens": 50 - 10 * step + seed,
           "kl": step * 0.001 * len(knobs.get("--loss", "")), "opd_mean": None, "age_hist": {}}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
phases = {"talk": 5.0, "after": 1.0}

def interrupted(*_):
    (folder / "sigint").touch()
    if plan != "deaf":
        time.sleep(0.3)  # the engine and the trainer end
        finish({"talk": None, "after": None})

def finish(phases):
    if "--replay" not in knobs:
        after = {"rl": 0.5, "opd": 0.75}.get(mode) + 0.125 * seed
        summary = {"mode": mode, "seed": seed, "steps": 4, "turns": 100 + 4 * seed, "wall_s": 60.5,
                   "held_out": {"before": 0.0625, "after": after, "nll_after": None},
                   "requests": {"ok": 9, "failed": 0, "rejected": seed}, "phases_s": phases}
        (folder / "summary.json").write_text(json.dumps(summary))
    sys.exit(0)

signal.signal(signal.SIGINT, interrupted)
if plan == "fail":
    sys.exit("error: no config.json there")
(folder / "pid").write_text(str(os.getpid()))
(folder / "waiting").touch()
while plan in ("wait", "deaf"):
    time.sleep(0.02)
finish(phases)
'''
GRID = {"name": "signals", "question": "which signal learns?",
        "base": {"simulate": "concise", "steps": 4},
        "grid": {"mode": ["rl", "opd"], "seed": [0, 1]}}
DRAW = run_table.draw
CELLS = ["mode=rl,seed=0", "mode=rl,seed=1", "mode=opd,seed=0", "mode=opd,seed=1"]


class Lab:
    """A folder with the stand-in, a grid file and the grid's output."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.plan({})

    def plan(self, plan):
        (self.folder / "plan").write_text(json.dumps(plan))

    def grid(self, **changes):
        spec = GRID | changes
        if "replay" not in changes and isinstance(spec["base"], dict):
            spec["base"] = {**spec["base"], "model": str(self.folder / "model")}
        path = self.folder / "grid.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in spec.items() if v is not None}))
        return str(path)

    def run(self, *more, **changes):
        return ablate.main([self.grid(**changes), "--out", str(self.out), *more])

    def ran(self):
        path = self.folder / "ran"
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names

    def start(self):
        """The whole script as a process, for signals. Cells are processes of their own."""
        code = (f"import sys; sys.path[:0] = ['{ROOT / 'examples'}']; import ablate\n"
                f"ablate.MAIN = '{self.folder / 'stand_in.py'}'; ablate.check = lambda cells: 0\n"
                "sys.exit(ablate.main(sys.argv[1:]))")
        return subprocess.Popen([sys.executable, "-c", code, self.grid(), "--out", str(self.out)],
                                stdout=subprocess.PIPE, text=True)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ablate, "MAIN", tmp_path / "stand_in.py")
    monkeypatch.setattr(ablate, "TRAINER", tmp_path / "stand_in.py")
    monkeypatch.setattr(ablate, "check_persona", lambda cfg: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own Ctrl-C stays as it is
    monkeypatch.setattr(run_table, "draw", lambda *_: None)  # seconds each; two tests have it
    return Lab(tmp_path)


def rows_of(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_examples_in_docstrings():
    assert doctest.testmod(run_table).attempted > 2 and not doctest.testmod(run_table).failed


# ------------------------------------------------------------------------------ running a grid


def test_a_grid_runs_every_cell_and_tabulates_it(lab, capsys):
    """Numbers worked by hand: rl 0.5 and 0.625, opd 0.75 and 0.875; requests rejected = seed."""
    assert lab.run() == 0
    assert lab.ran() == CELLS
    lines = (lab.out / "table.md").read_text().splitlines()
    assert lines[0] == "**which signal learns?**"
    assert lines[2:6] == [
        "| mode | n | good before | good after | updates | turns | wall s | failed | rejected |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| rl | 2 | 0.0625 | 0.562 (0.5 to 0.625) | 4 | 102 (100 to 104) | 60.5 | 0 "
        "| 0.5 (0 to 1) |",
        "| opd | 2 | 0.0625 | 0.812 (0.75 to 0.875) | 4 | 102 (100 to 104) | 60.5 | 0 "
        "| 0.5 (0 to 1) |"]
    rows = rows_of(lab.out / "results.csv")
    assert [r["run"] for r in rows] == CELLS and {r["ended"] for r in rows} == {"1"}
    last = rows[-1]
    assert (last["mode"], last["seed"], last["held_out.after"]) == ("opd", "1", "0.875")
    assert last["requests.rejected"] == "1" and last["phases_s.talk"] == "5.0"
    # updates 2 to 4 of four: (-0.5 - 0.25 + 0) / 3 and 50 - 30 + 1
    assert float(last["reward_mean_last3"]) == -0.25 and float(last["reply_tokens_last3"]) == 21
    record = json.loads((lab.out / CELLS[0] / "cell.json").read_text())
    assert record["exit"] == 0 and "--mode rl --seed 0" in record["command"]
    assert "stand-in" in (lab.out / CELLS[0] / "out.txt").read_text()
    shown = capsys.readouterr().out
    assert "[4/4] mode=opd seed=1: ended after" in shown and "good 0.06 -> 0.88" in shown


def test_the_figure_shows_every_setting(lab, monkeypatch):
    """16:9 and not blank: both settings' colours are in it, in curves and bars; a third is not."""
    monkeypatch.setattr(run_table, "draw", DRAW)
    assert lab.run() == 0
    picture = matplotlib.image.imread(lab.out / "figure.png")[..., :3]
    assert picture.shape[:2] == (1080, 1920)
    for i, there in enumerate((True, True, False)):
        colour = [int(run_table.COLOURS[i][k:k + 2], 16) / 255 for k in (1, 3, 5)]
        pixels = (abs(picture - colour).max(2) < 0.01).sum()
        assert (pixels > 5000) == there, (i, pixels)


def test_a_finished_cell_is_not_run_again_and_a_half_done_one_is_moved_aside(lab):
    """Half done: no summary, or one that says that nobody measured. Nothing is deleted."""
    assert lab.run() == 0
    lab.ran()
    (lab.out / CELLS[1] / "summary.json").unlink()
    phases = {"talk": None, "after": 3.0}
    (lab.out / CELLS[2] / "summary.json").write_text(json.dumps({"phases_s": phases}))
    (lab.out / f"{CELLS[2]}.broken-1").mkdir()
    assert lab.run() == 0
    assert lab.ran() == [CELLS[1], CELLS[2]]
    assert (lab.out / f"{CELLS[1]}.broken-1" / "metrics.jsonl").exists()
    assert (lab.out / f"{CELLS[2]}.broken-2" / "metrics.jsonl").exists()
    assert len(rows_of(lab.out / "results.csv")) == 4
    assert lab.run() == 0 and lab.ran() == []


def test_finished_cells_with_other_flags_are_not_mixed_in(lab, capsys):
    assert lab.run() == 0
    assert lab.run(base={"simulate": "concise", "steps": 5}) == 1
    assert "run with other flags (steps 4 then, 5 now)" in capsys.readouterr().err


def test_a_failed_cell_is_reported_and_the_grid_goes_on(lab, capsys):
    """It is named with its last words, left out of the table, and run again next time."""
    lab.plan({CELLS[1]: "fail"})
    assert lab.run() == 1
    assert lab.ran() == CELLS
    shown = capsys.readouterr().out
    assert "[2/4] mode=rl seed=1: FAILED" in shown and "with exit code 1" in shown
    assert "| error: no config.json there" in shown
    text = (lab.out / "table.md").read_text()
    assert "| rl | 1 | 0.0625 | 0.5 |" in text
    assert "Not ended, so not in the table: mode=rl seed=1." in text
    assert [r["ended"] for r in rows_of(lab.out / "results.csv")] == ["1", "0", "1", "1"]
    lab.plan({})
    assert lab.run() == 0 and lab.ran() == [CELLS[1]]


def test_cells_done_before_count_for_the_time_left(lab, capsys):
    """(6000 s + a moment) / 2 for each of two cells that are left: 100 minutes at least."""
    assert lab.run("--only", "mode=rl seed=0") == 0
    path = lab.out / CELLS[0] / "cell.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"wall_s": 6000}))
    capsys.readouterr()
    assert lab.run() == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("[2/4]")
                and "ended" in x)
    assert float(line.rpartition("about ")[2].split()[0]) >= 100


def test_exit_code_0_without_a_measurement_is_a_failure(lab, capsys):
    """main.py ends with 0 when somebody else interrupts it."""
    summary = "finish(phases)\n"
    stand_in = lab.folder / "stand_in.py"
    stand_in.write_text(STAND_IN.removesuffix(summary) + 'finish({"talk": 5.0, "after": None})\n')
    assert lab.run("--only", "mode=rl seed=0") == 1
    assert "stopped before it had measured" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ctrl_c_ends_the_cell_in_order_and_stops(lab, name):
    """The cell gets one SIGINT and is waited for; no further cell starts; a new start goes on."""
    lab.plan({CELLS[1]: "wait"})
    process, cell = lab.start(), lab.out / CELLS[1]
    assert until((cell / "waiting").exists, 60)
    process.send_signal(getattr(signal, name))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "the same command goes on from here" in output
    assert (cell / "sigint").exists() and (cell / "summary.json").exists()
    assert lab.ran() == CELLS[:2]
    assert "| rl | 1 |" in (lab.out / "table.md").read_text()
    lab.plan({})
    assert lab.run() == 0 and lab.ran() == CELLS[1:]


def test_a_second_ctrl_c_does_not_wait(lab):
    lab.plan({CELLS[0]: "deaf"})
    process, cell = lab.start(), lab.out / CELLS[0]
    assert until((cell / "waiting").exists, 60)
    process.send_signal(signal.SIGINT)
    assert until((cell / "sigint").exists, 20)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and lab.ran() == CELLS[:1]
    pid = int((cell / "pid").read_text())
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the cell outlived the grid")


def test_a_killed_grid_leaves_no_cell_behind(lab):
    """Without it a second grid would find the port taken, by a run that nobody ends."""
    lab.plan({CELLS[0]: "wait"})
    process, cell = lab.start(), lab.out / CELLS[0]
    assert until((cell / "waiting").exists, 60)
    process.kill()
    process.communicate(timeout=60)
    assert until((cell / "summary.json").exists, 20)


def test_only_and_dry_run(lab, capsys):
    assert lab.run("--only", "mode=rl seed=1", "--dry-run") == 0
    line, = capsys.readouterr().out.splitlines()
    assert line.endswith("--mode rl --seed 1") and str(lab.out / CELLS[1]) in line
    assert not lab.out.exists() and lab.ran() == []
    assert lab.run("--only", "seed=1") == 0 and lab.ran() == [CELLS[1], CELLS[3]]
    assert lab.run("--only", "mode=combine") == 1
    assert "no cell is so; the cells are mode=rl seed=0;" in capsys.readouterr().err


def test_time_left_is_estimated_from_the_cells_that_ended(lab):
    """60 s and 120 s so far: 90 s each; 30 s into the third of four, 60 + 90 s are left."""
    cells = ablate.cells_of(ablate.read_grid(lab.grid()), lab.out)
    progress = ablate.Progress(cells)
    assert progress.left(cells[0]) == "time left unknown"
    progress.walls = [60, 120]
    assert progress.left(cells[2]) == "about 1.5 min left"
    assert progress.left(cells[2], 30) == "about 2.5 min left"
    assert progress.left(cells[2], 300) == "about 1.5 min left"


# ------------------------------------------------------------------------- mistakes in a grid


@pytest.mark.parametrize(("text", "words"), [
    ("a: [", "is not YAML"), ("- 1", "a grid is a mapping"), ("", "a grid is a mapping"),
    ("grids: {mode: [rl]}", "unknown key grids"), ("base: {lr: 1}", "nothing varies"),
    ("grid: {mode: rl}", "mode needs a list"), ("grid: {mode: []}", "mode needs a list"),
    ("grid: [mode]", "grid must be a mapping"), ("grid: {mode: [~]}", "one value, not None"),
    ("grid: {mode: [[rl]]}", "one value"), ("grid: {run-dir: [a]}", "given by --out"),
    ("grid: {seed: [0]}\nbase: {seed: 1}", "seed stands in base and in grid"),
    ("grid: {max-tokens: [9]}\nsettings: [{max_tokens: 8}]", "max_tokens stands in"),
    ("grid: {seed: [0, 0]}", "a value stands twice"), ("settings: [ppo]", "list of mappings"),
    ("grid: {seed: [0]}\nreplay: 3", "replay is a path"), ("grid: {seed: [0]}\nkeys: [1]", "keys")])
def test_mistakes_in_the_file_are_one_sentence(lab, capsys, text, words):
    path = lab.folder / "wrong.yaml"
    path.write_text(text)
    assert ablate.main([str(path), "--out", str(lab.out)]) == 1
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1
    assert not lab.out.exists()


@pytest.mark.parametrize(("knobs", "words"), [
    ({"simulate": "concise", "stepz": 3}, "unrecognized arguments: --stepz 3"),
    ({"simulate": "concise", "lr": "fast"}, "--lr: invalid float value"),
    ({"simulate": "concise", "steps": 1, "batch_size": 0}, "--batch-size 0 must be above 0"),
    ({"simulate": "concise", "steps": 1, "model": "/nowhere"}, "no config.json there"),
    ({"simulate": "concise"}, "--simulate needs an end"), ({"steps": 3}, "simulate is missing")])
def test_what_main_refuses_is_said_before_the_first_cell(lab, capsys, knobs, words):
    path = lab.folder / "wrong.yaml"
    path.write_text(yaml.safe_dump(GRID | {"base": {"model": str(lab.folder / "model"), **knobs}}))
    assert ablate.main([str(path), "--out", str(lab.out)]) == 1
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: mode=rl,seed=0: ") and said.count("\n") == 1
    assert lab.ran() == [] and not lab.out.exists()


def test_an_unknown_persona_is_said_before_the_first_cell(lab, capsys, monkeypatch):
    import main

    monkeypatch.setattr(ablate, "check_persona", main.check_persona)
    assert lab.run(base={"simulate": "nobody", "steps": 1}) == 1
    assert "--simulate nobody" in capsys.readouterr().err and lab.ran() == []
    base = {"simulate": "concise", "steps": 1, "model": str(lab.folder / "model")}
    assert lab.run(base=base, grid={"allocation": ["uniform", "boundry"]}) == 1
    assert "boundry" in capsys.readouterr().err and lab.ran() == []  # once: the first cell alone


def test_flags_of_yes_and_no():
    """main.py has --x and --no-x, a replay wants true or false; an empty text stays a value."""
    knobs = {"lockstep": True, "eval": False, "topk": "", "max_staleness": -1}
    live = ablate.Cell({}, knobs, Path("x"))
    assert ablate.flags(live) == ["--lockstep", "--no-eval", "--topk", "", "--max-staleness", "-1"]
    replay = ablate.Cell({}, {"gradient_checkpointing": True}, Path("x"), replay=Path("y"))
    assert ablate.flags(replay) == ["--gradient-checkpointing", "true"]
    cfg = ablate.parse(ablate.flags(live))
    assert cfg.lockstep and not cfg.eval and cfg.topk == "" and cfg.max_staleness == -1


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "grids").glob("*.yaml")), ids=str)
def test_the_grids_of_the_repository_are_accepted(path, monkeypatch, tmp_path):
    """Every live cell and every run to be recorded, by main.parse; replays name knobs of main."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)
    spec = ablate.read_grid(path)
    assert spec["name"] == path.stem and spec["question"].endswith("?")
    cells = ablate.cells_of(spec, tmp_path)
    assert len({c.settings.get("seed") for c in cells if c.kind == "cell"}) > 1
    for cell in cells:
        argv = [a for a in ablate.flags(cell) if a not in ("true", "false")]
        cfg = ablate.parse([*argv, "--run-dir", str(cell.folder)])
        assert cell.replay or cfg.simulate


# ------------------------------------------------------------------------------------ replays


def test_a_run_is_recorded_once_and_replayed(lab, monkeypatch):
    """A replay has no summary: its figures are the last three updates; kl = 0.001 step len(loss),
    so 0.009 for ppo and 0.027 for decoupled."""
    monkeypatch.setattr(ablate, "check_replays", lambda *_: None)
    changes = {"replay": {"mode": "opd", "simulate": "concise", "steps": 4,
                          "model": str(lab.folder / "model")}, "base": {"lr": "1e-3"},
               "settings": [{"loss": "ppo"}, {"loss": "decoupled", "tis_cap": 1}],
               "grid": {"seed": [0, 1]}}
    names = [f"{s},seed={i}" for s in ("loss=ppo", "loss=decoupled,tis_cap=1") for i in (0, 1)]
    assert lab.run(**changes) == 0 and lab.ran() == ["recorded", *names]
    assert lab.run(**changes) == 0 and lab.ran() == []
    assert (lab.out / "table.md").read_text().splitlines()[2:6] == [
        "| loss | tis_cap | n | kl |", "| --- | --- | --- | --- |",
        "| ppo | – | 2 | 0.009 |", "| decoupled | 1 | 2 | 0.027 |"]
    command = json.loads((lab.out / names[0] / "cell.json").read_text())["command"]
    assert f"--replay {lab.out / 'recorded' / 'turns.jsonl'}" in command
    (lab.out / names[0] / "cell.json").unlink()  # it was killed: no exit code
    assert lab.run(**changes) == 0 and lab.ran() == names[:1]
    with open(lab.out / "recorded" / "turns.jsonl", "a") as turns:  # recorded anew
        turns.write("{}\n")
    assert lab.run(**changes) == 1 and lab.ran() == []


def test_a_failed_recording_ends_the_grid(lab, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "check_replays", lambda *_: None)
    lab.plan({"recorded": "fail"})
    assert lab.run(replay={"simulate": "concise", "steps": 4, "model": str(lab.folder / "model")},
                   base={}, grid={"seed": [0, 1]}) == 1
    assert lab.ran() == ["recorded"] and "was not recorded" in capsys.readouterr().err


def test_what_the_trainer_refuses_is_said_before_the_first_cell(lab, capsys):
    """By trainer.replay_config itself, for a run that is still to be recorded. A replay cannot
    change what was decided while serving."""
    recorded = {"simulate": "concise", "steps": 4, "model": str(lab.folder / "model")}
    wrong = {"replay": recorded, "base": {"loss": "ppo"}, "grid": {"max_tokens": [48, 96]}}
    assert lab.run(**wrong) == 1
    said = capsys.readouterr().err
    assert said == ("error: max_tokens=48: trainer: --max-tokens is not a knob of training: a "
                    "replay cannot change it\n")
    assert lab.ran() == [] and not lab.out.exists()
    good = wrong | {"grid": {"clip_low": [0.1, 0.2]}}
    assert lab.run("--dry-run", **good) == 0 and not lab.out.exists()


# ----------------------------------------------------------------- a table of hand-made runs


def fabricate(folder, mode, seed, after, rewards, **more):
    folder.mkdir()
    config = {"mode": mode, "seed": seed, "lr": 1e-4, "port": 1000 + seed, "run_dir": str(folder)}
    (folder / "config.json").write_text(json.dumps(config | more))
    lines = [json.dumps({"step": i + 1, "reward_mean": r}) + "\n" for i, r in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "rew')  # being written
    if after is not None:
        (folder / "summary.json").write_text(json.dumps({"held_out": {"after": after}}))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    return [fabricate(tmp_path / "a", "rl", 0, 0.25, [-1.0, -0.5, 0.0, 0.5]),
            fabricate(tmp_path / "b", "rl", 1, 0.75, [-1.0, -0.5]),
            fabricate(tmp_path / "c", "opd", 0, 0.5, [-1.0], lr=2e-4, topk="full")]


def test_a_table_of_existing_runs(runs, tmp_path, capsys):
    """Settings are the knobs that differ, without seed and port; topk, which the older two do not
    know, makes no difference. reward_mean: a (-0.5 + 0 + 0.5) / 3, b (-1 - 0.5) / 2."""
    out = tmp_path / "out"
    assert ablate.main(["--table", *runs, "--out", str(out), "--keys", "reward_mean,after"]) == 0
    lines = (out / "table.md").read_text().splitlines()
    assert lines[0] == "**runs by mode, lr**"
    assert lines[2:6] == [
        "| mode | lr | n | reward_mean | good after |", "| --- | --- | --- | --- | --- |",
        "| rl | 0.0001 | 2 | -0.375 (-0.75 to 0) | 0.5 (0.25 to 0.75) |",
        "| opd | 0.0002 | 1 | -1 | 0.5 |"]
    assert (out / "figure.png").exists() and len(rows_of(out / "results.csv")) == 3
    assert ablate.main(["--table", *runs, "--out", str(out), "--by", "mode"]) == 0
    text = capsys.readouterr().out
    assert "| mode | n | good after |" in text and "not shown: lr." in text


def test_a_folder_of_runs_and_runs_that_have_not_ended(runs, tmp_path):
    """What a grid moved aside is no run; one without a summary is named, not averaged."""
    fabricate(tmp_path / "d", "opd", 1, None, [-1.0])
    fabricate(tmp_path / "c.broken-1", "opd", 1, 0.9, [-1.0])
    out = tmp_path / "tables" / "x"
    assert ablate.main(["--table", str(tmp_path), "--by", "mode", "--out", str(out)]) == 0
    text = (out / "table.md").read_text()
    assert "| opd | 1 | 0.5 |" in text
    assert "Not ended, so not in the table: mode=opd seed=1." in text


@pytest.mark.parametrize(("argv", "words"), [
    (["--keys", "rewards"], "--keys rewards: no run has such a figure; there are held_out.after"),
    (["--by", "loss"], "--by loss: no such knob in config.json; these differ: mode, lr")])
def test_unknown_names_are_one_sentence(runs, tmp_path, capsys, argv, words):
    assert ablate.main(["--table", *runs, "--out", str(tmp_path / "out"), *argv]) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert ablate.main(["--table", str(tmp_path / "none")]) == 1
    assert "no run directory" in capsys.readouterr().err


def test_a_setting_and_a_figure_of_the_same_name(tmp_path):
    """steps wanted and steps done are two columns."""
    for steps in (4, 8):
        fabricate(tmp_path / str(steps), "rl", 0, 0.5, [0.0], steps=steps)
        (tmp_path / str(steps) / "summary.json").write_text(json.dumps({"steps": steps - 1}))
    out = tmp_path / "out"
    assert ablate.main(["--table", str(tmp_path), "--out", str(out)]) == 0
    assert [(r["steps"], r["summary.steps"]) for r in rows_of(out / "results.csv")] == [
        ("4", "3"), ("8", "7")]


def test_a_grid_file_or_a_table_is_needed():
    """The script itself, as a user starts it."""
    done = subprocess.run([sys.executable, ROOT / "examples" / "ablate.py"], capture_output=True,
                          text=True, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and "give a grid file, or --table DIR" in done.stderr
