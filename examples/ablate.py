"""A grid of runs over any flags and seeds, with a table and a figure at the end.

A grid is a small YAML file (nine stand in examples/grids/):

    name: signals
    question: which signal learns?                # the caption of table and figure
    base: {simulate: concise, steps: 8, lr: 4e-4}         # flags of every cell
    grid: {mode: [rl, opd, combine], seed: [0, 1]}        # every combination is a cell
    settings: [{loss: ppo}, {loss: decoupled, tis_cap: 1}]    # optional: rows instead of a product
    keys: [held_out.after, split_frac]            # optional: columns of the table, panels
    replay: runs/MINE/turns.jsonl                 # optional: cells are `trainer.py --replay`;
    replay: {mode: opd, simulate: concise}        # or so: record that run first, then replay it

Run it alone:
    python examples/ablate.py examples/grids/signals.yaml     # again: goes on where it stopped
    python examples/ablate.py examples/grids/signals.yaml --only "mode=rl seed=0" --dry-run
    python examples/ablate.py --table runs/A runs/B --by mode --keys reward_mean,cut_frac

Each cell is `python main.py --run-dir OUT/CELL` in a process group of its own, one after another. A
cell that ended is not run again; what was left half-done is moved to CELL.broken-N.

Reading order: the grid -> checks -> one cell -> all cells -> main. Figures, table and picture are
made in run_table.py.
"""

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from run_table import (
    Missing,
    Run,
    check_keys,
    has,
    label,
    number,
    publish,
    read_json,
    read_metrics,
    runs_of,
    shown,
)

from main import Problem, check_model, check_persona, parse, persona_flags, write_config

MAIN, TRAINER = ROOT / "main.py", ROOT / "trainer.py"
PATIENCE = 90  # seconds that an interrupted cell has to end its children and sum up
TELL_EVERY = 60  # seconds between two lines about a running cell
LIBC = ctypes.CDLL(None)
KINDS = {str: "text", dict: "mapping, such as {seed: 0}", list: "list, such as [a, b]"}
PARTS = {"name": str, "question": str, "base": dict, "settings": list, "grid": dict, "keys": list}


def say(text):
    """A grid outlives whoever reads along: Ctrl-C ends a `| tee` first."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


# ---------------------------------------------------------------------------------------- the grid


@dataclass
class Cell:
    settings: dict  # what the grid varies, seed included
    knobs: dict  # the same and the base: its flags
    folder: Path
    replay: Path | None = None  # the recorded turns, where only the training changes
    kind: str = "cell"  # or "recording"

    def command(self):
        start = [TRAINER, "--replay", self.replay] if self.replay else [MAIN]
        return [sys.executable, *map(str, start), "--run-dir", str(self.folder), *flags(self)]

    def made_of(self):
        """What must not change under a cell that is done."""
        made = {**{k: shown(v) for k, v in self.knobs.items()}, "replay": str(self.replay)}
        if self.replay and self.replay.exists():  # other turns under the same name
            made["turns"] = hashlib.sha256(self.replay.read_bytes()).hexdigest()[:16]
        return made


def flags(cell):
    """{'lr': '4e-4', 'lockstep': False} -> --lr 4e-4 --no-lockstep; a replay wants true or false"""
    out = []
    for key, value in cell.knobs.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool) and not cell.replay:
            out.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            out += [f"--{flag}", shown(value)]
    return out


def read_grid(path):
    """YAML -> dict with every part there; a mistake in it is a Problem of one sentence."""
    try:
        spec = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Problem(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(spec, dict):
        raise Problem(f"{path}: a grid is a mapping with the keys {', '.join(PARTS)}, replay")
    if unknown := [str(k) for k in spec if k not in (*PARTS, "replay")]:
        raise Problem(f"{path}: unknown key {', '.join(unknown)}; known are {', '.join(PARTS)}, "
                      "replay")
    for key, kind in PARTS.items():
        if not isinstance(spec.setdefault(key, kind()), kind):
            raise Problem(f"{path}: {key} must be a {KINDS[kind]}")
    if not isinstance(spec.setdefault("replay", None), str | dict | None):
        raise Problem(f"{path}: replay is a path to turns.jsonl, or the flags of a run to record")
    spec["name"] = spec["name"] or Path(path).stem
    check_knobs(path, spec)
    return spec


def check_knobs(path, spec):
    """Every knob stands in one place, has a value, and a grid's knob a list of values."""
    if not spec["grid"] and not spec["settings"]:
        raise Problem(f"{path}: nothing varies: give a grid or settings")
    if not all(isinstance(key, str) for key in spec["keys"]):
        raise Problem(f"{path}: keys is a list of figures, such as [held_out.after, kl]")
    if not all(isinstance(row, dict) for row in spec["settings"]):
        raise Problem(f"{path}: settings is a list of mappings, such as [{{loss: ppo}}]")
    for key, values in spec["grid"].items():
        if not isinstance(values, list) or not values:
            raise Problem(f"{path}: grid: {key} needs a list of values, such as [0, 1]")
    recorded = spec["replay"] if isinstance(spec["replay"], dict) else {}
    rows = [spec["base"], recorded, *spec["settings"]]
    values = [(k, v) for row in rows for k, v in row.items()]
    values += [(k, v) for k, several in spec["grid"].items() for v in several]
    for key, value in values:
        if not isinstance(key, str) or value is None or isinstance(value, list | dict):
            raise Problem(f"{path}: {key} needs one value, not {value}")
        if key in ("run_dir", "run-dir"):
            raise Problem(f"{path}: {key} is given by --out")
    check_twice(path, {"base": spec["base"], "grid": spec["grid"],
                       "settings": {k: 0 for row in spec["settings"] for k in row}})


def check_twice(path, parts):
    for a, b in itertools.combinations(parts, 2):
        if twice := normal(parts[a]).keys() & normal(parts[b]).keys():
            raise Problem(f"{path}: {', '.join(sorted(twice))} stands in {a} and in {b}")


def normal(knobs):
    """A YAML file may write max-tokens or max_tokens."""
    return {k.replace("-", "_"): v for k, v in knobs.items()}


def cells_of(spec, out):
    """settings x grid -> the cells, in order; a run to be recorded first stands before them."""
    cells, replay = [], spec["replay"]
    if isinstance(replay, dict):
        cells.append(Cell({}, normal(replay), out / "recorded", kind="recording"))
        replay = out / "recorded" / "turns.jsonl"
    replay = replay and (ROOT / replay).resolve()
    for row in spec["settings"] or [{}]:
        for values in itertools.product(*spec["grid"].values()):
            settings = normal(row | dict(zip(spec["grid"], values, strict=True)))
            name = re.sub(r"[^\w.=,+-]+", "-", label(settings).replace(" ", ","))
            cells.append(Cell(settings, normal(spec["base"]) | settings, out / name, replay))
    names = [c.folder.name for c in cells]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise Problem(f"two cells are {twice[0]}: a value stands twice in the grid")
    return cells


def chosen(cells, only):
    """--only "mode=rl seed=0" -> the cells that are so (and what must be recorded for them)."""
    wanted = normal(dict(part.partition("=")[::2] for part in words(only)))
    out = [c for c in cells if c.kind == "recording"
           or all(k in c.settings and shown(c.settings[k]) == v for k, v in wanted.items())]
    if all(c.kind == "recording" for c in out):
        raise Problem(f"--only {only}: no cell is so; the cells are "
                      + "; ".join(label(c.settings) for c in cells if c.kind == "cell"))
    return out


# ---------------------------------------------------------------------------------------- checks

CHECK_REPLAYS = """
import json, sys, trainer
for name, argv in json.load(sys.stdin):
    try:
        trainer.replay_config(argv)
    except SystemExit as error:
        sys.exit(f"{name}: {error}")
"""


def check(cells):
    """Every cell's flags, by those who will read them, before the first cell starts."""
    personas = set()
    for cell in cells:
        if not cell.replay:
            try:
                check_live(cell, personas)
            except Problem as problem:
                raise Problem(f"{cell.folder.name}: {problem}") from None
    if replays := [c for c in cells if c.replay]:
        check_replays(cells, replays)


def check_live(cell, personas):
    if not cell.knobs.get("simulate"):
        raise Problem("simulate is missing: without simulated users it would never end")
    cfg = parse(cell.command()[2:])
    check_model(cfg)
    if (asked := tuple(persona_flags(cfg))) not in personas:
        personas.add(asked)
        check_persona(cfg)


def check_replays(cells, replays):
    """trainer.replay_config itself; it needs torch, and a recorded config, which may not be yet."""
    with tempfile.TemporaryDirectory() as folder:
        folder, turns = Path(folder), replays[0].replay
        if cells[0].kind == "recording":
            turns = folder / "turns.jsonl"
            turns.touch()
            write_config(parse([*flags(cells[0]), "--run-dir", str(folder)]))
        jobs = [(c.folder.name, ["--replay", str(turns), "--run-dir", str(folder / str(i)),
                                 *flags(c)]) for i, c in enumerate(replays)]
        done = subprocess.run([sys.executable, "-c", CHECK_REPLAYS], cwd=ROOT, text=True,
                              input=json.dumps(jobs), capture_output=True, timeout=600)
    if done.returncode:
        raise Problem((done.stderr.strip().splitlines() or ["trainer.py does not start"])[-1])


# ---------------------------------------------------------------------------------------- one cell


def ended(cell):
    """Did it come to its own end? A live run's users have measured; a replay left exit code 0."""
    if cell.replay:
        return read_json(cell.folder / "cell.json", {}).get("exit") == 0
    phases = read_json(cell.folder / "summary.json", {}).get("phases_s", {})
    return None not in (phases.get("talk"), phases.get("after"))


def check_unchanged(cell):
    """A finished cell with other flags would mix two grids in one table."""
    now, then = cell.made_of(), read_json(cell.folder / "cell.json", {}).get("made_of")
    if then is None or then == now:
        return
    changed = [f"{k} {then.get(k, '-')} then, {now.get(k, '-')} now" for k in sorted({*then, *now})
               if then.get(k) != now.get(k)]
    raise Problem(f"{cell.folder} was run with other flags ({'; '.join(changed)}): give another "
                  "--out, or move that directory away")


def move_aside(folder):
    """A half-done directory -> CELL.broken-1, -2 ..."""
    aside = (folder.with_name(f"{folder.name}.broken-{n}") for n in itertools.count(1))
    folder.rename(next(path for path in aside if not path.exists()))


def die_with_us():
    """In the child: SIGINT when we are killed, so that no cell is left behind (Linux)."""
    LIBC.prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG


def run_cell(cell, tell):
    """Run it to its end, output to out.txt -> seconds. Ctrl-C ends it in order."""
    if cell.folder.exists():
        move_aside(cell.folder)
    cell.folder.mkdir(parents=True)
    record = {"made_of": cell.made_of(), "command": shlex.join(cell.command())}
    (cell.folder / "cell.json").write_text(json.dumps(record, indent=1))
    start, told = time.monotonic(), 0
    with open(cell.folder / "out.txt", "wb") as out:
        process = subprocess.Popen(cell.command(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=out, start_new_session=True, preexec_fn=die_with_us)
    try:
        while process.poll() is None:
            time.sleep(0.1)
            seconds = time.monotonic() - start
            if seconds // TELL_EVERY > told:
                told = seconds // TELL_EVERY
                tell(cell, seconds)
    except KeyboardInterrupt:
        stop(process)
        raise
    record |= {"exit": process.returncode, "wall_s": round(time.monotonic() - start, 1)}
    (cell.folder / "cell.json").write_text(json.dumps(record, indent=1))
    return record["wall_s"]


def stop(process):
    """SIGINT to the cell, which ends its own children; a second Ctrl-C does not wait for it."""
    process.send_signal(signal.SIGINT)
    say("stopping: the cell ends its engine and trainer first (Ctrl-C again: at once)")
    try:
        process.wait(PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Progress:
    """What is done, how long it took, and how long the rest may take."""

    def __init__(self, cells):
        self.cells, self.walls, self.start = cells, [], time.monotonic()

    def left(self, cell, running=None):
        """Estimated from the cells that ended. running: seconds that `cell` has taken so far."""
        if not self.walls:
            return "time left unknown"
        each = sum(self.walls) / len(self.walls)
        later = self.cells[self.cells.index(cell) + 1:]
        seconds = each * sum(not ended(c) for c in later)
        seconds += 0 if running is None else max(0, each - running)
        return f"about {minutes(seconds)} left"

    def since(self):
        return f"{minutes(time.monotonic() - self.start)} since the start"

    def tell(self, cell, seconds):
        rows = read_metrics(cell.folder)
        numbers = ", ".join(
            f"{k} {number(rows[-1][k])}" for k in ("step", "reward_mean", "reply_tokens", "loss")
            if rows[-1].get(k) is not None) if rows else "no update yet"
        say(f"      {minutes(seconds)}: {numbers}; {self.left(cell, seconds)}")

    def line(self, cell, text):
        say(f"[{self.cells.index(cell) + 1}/{len(self.cells)}] {name_of(cell)}: {text}")


def name_of(cell):
    return cell.kind if cell.kind == "recording" else label(cell.settings)


def minutes(seconds):
    return f"{seconds / 60:.1f} min"


def last_lines(path, n=6):
    lines = [x for x in path.read_text(errors="replace").splitlines() if x.strip()]
    return "\n".join(f"      | {x[:300]}" for x in lines[-n:])


def run_cells(cells, after):
    """One after another -> the cells that failed. A failed one is reported and the grid goes on."""
    progress, failed = Progress(cells), []
    for cell in cells:
        if ended(cell):
            wall = read_json(cell.folder / "cell.json", {}).get("wall_s")
            progress.walls += [wall] * (wall is not None)
            progress.line(cell, "done before")
            continue
        progress.line(cell, f"started {time.strftime('%H:%M')}, see {cell.folder}/out.txt")
        wall = run_cell(cell, progress.tell)
        if ended(cell):
            progress.walls.append(wall)
            progress.line(cell, f"ended after {minutes(wall)}{gained(cell)}; {progress.since()}, "
                          f"{progress.left(cell)}")
        else:
            failed.append(cell)
            progress.line(cell, f"FAILED after {minutes(wall)}{why(cell)}")
        after()
        if cell.kind == "recording" and cell in failed:
            raise Problem("the run to be replayed was not recorded")
    return failed


def why(cell):
    code, lines = read_json(cell.folder / "cell.json")["exit"], last_lines(cell.folder / "out.txt")
    how = f" with exit code {code}" if code else ": it was stopped before it had measured"
    return f"{how}\n{lines}"


def gained(cell):
    held = read_json(cell.folder / "summary.json", {}).get("held_out") or {}
    return "" if held.get("after") is None else (
        f", held-out good {held['before']:.2f} -> {held['after']:.2f}")


# -------------------------------------------------------------------------------------------- main


def runs_in(cells):
    return [Run(c.folder, c.settings, ended(c)) for c in cells
            if c.kind == "cell" and c.folder.exists()]


def show(out, cells, keys, caption, picture):
    """Table and figure of what has ended so far."""
    runs = runs_in(cells)
    if any(run.ended for run in runs):
        text = publish(out, runs, [k for k in keys if has(runs, k)], caption, picture=picture)
        if picture:
            say(f"\n{text}\nsee {out}: table.md, results.csv, figure.png")


def run_grid(args):
    spec = read_grid(args.grid)
    out = Path(args.out or ROOT / "runs" / "ablate" / spec["name"]).resolve()
    every = cells_of(spec, out)
    cells = chosen(every, args.only) if args.only else every
    check(cells)
    for cell in filter(ended, every):
        check_unchanged(cell)
    if args.dry_run:
        for cell in cells:
            say(("# done: " if ended(cell) else "") + shlex.join(cell.command()))
        return 0
    say(f"{spec['name']}: {len(cells)} runs into {out}")
    what = out, every, args.keys or spec["keys"], spec["question"] or spec["name"]
    try:
        failed = run_cells(cells, lambda: show(*what, picture=False))
    finally:
        show(*what, picture=True)
    for cell in failed:
        say(f"failed: {name_of(cell)}, see {cell.folder}/out.txt")
    return 1 if failed else 0


def show_table(args):
    runs, hidden = runs_of(args.table, args.by)
    check_keys(runs, args.keys or [])
    out = Path(args.out or ROOT / "runs" / "ablate" / "table").resolve()
    knobs = ", ".join(runs[0].setting())
    caption = args.caption or (f"runs by {knobs}" if knobs else "runs that differ in their seed")
    notes = [f"These differ too and are not shown: {', '.join(hidden)}."] if hidden else []
    say(publish(out, runs, args.keys, caption, notes))
    say(f"see {out}: table.md, results.csv, figure.png")
    return 0


def words(text):
    return text.replace(",", " ").split()


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("grid", nargs="?", help="a YAML file, such as examples/grids/signals.yaml")
    add("--out", help="where everything goes (default runs/ablate/NAME)")
    add("--only", help='the cells that are so: "mode=rl seed=0"')
    add("--dry-run", action="store_true", help="check every flag and show the commands")
    add("--table", nargs="+", metavar="DIR", help="table and figure of these run directories")
    add("--by", type=words, help="with --table: the knobs that make a row (default: all that "
        "differ)")
    add("--keys", type=words, help="columns of the table and panels of the figure")
    add("--caption", help="with --table: what stands above table and figure")
    args = parser.parse_args(argv)
    if bool(args.grid) == bool(args.table):
        parser.error("give a grid file, or --table DIR ...")
    return args


def interrupt(signum, frame):
    raise KeyboardInterrupt


def main(argv=None):
    args = parse_args(argv)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:  # nohup
            signal.signal(name, interrupt)
    try:
        return show_table(args) if args.table else run_grid(args)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return 130
    except (Problem, Missing) as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
