"""Should users wait for an update, and should engine and trainer share their cores?

Runs the demo three times for a few updates and prints wall times and the guard: the default may
take at most 1.3 times (start + generation alone + training alone), both measured in the run where
users wait and each has the whole machine to itself.

    python bench/bench_overlap.py [--steps 4] [--max-tokens 48] [--json FILE]
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = {
    "users wait": ["--lockstep", "--engine-cores", "all", "--trainer-cores", "all"],
    "shared cores": ["--engine-cores", "all", "--trainer-cores", "all"],
    "disjoint cores": [],
}


def run(way, flags, args, folder):
    """One demo run -> its figures."""
    run_dir = folder / way.replace(" ", "-")
    command = [sys.executable, "main.py", "--mode", "opd", "--simulate", "concise", "--held-out",
               "0", "--steps", args.steps, "--max-tokens", args.max_tokens, "--run-dir", run_dir,
               *flags]
    with open(folder / f"{run_dir.name}.log", "w") as out:
        subprocess.run([str(c) for c in command], cwd=ROOT, stdout=out, check=True, timeout=1800)
    summary = json.loads((run_dir / "summary.json").read_text())
    phases = summary["phases_s"]
    start = phases["start_engine"] + phases["start_trainer"]
    return {"wall_s": summary["wall_s"], "start_s": start, "talk_s": phases["talk"],
            "train_s": summary["train_s"], "turns": summary["turns"], "steps": summary["steps"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-overlap-"))
    out = {way: run(way, flags, args, folder) for way, flags in WAYS.items()}
    for way, row in out.items():
        print(f"{way:>15}: wall {row['wall_s']:.0f} s (start {row['start_s']:.0f}, talk "
              f"{row['talk_s']:.0f}, of it training {row['train_s']:.0f}), {row['turns']} turns")
    alone = out["users wait"]
    sequential = alone["start_s"] + (alone["talk_s"] - alone["train_s"]) + alone["train_s"]
    guard = (out["disjoint cores"]["start_s"] + out["disjoint cores"]["talk_s"]) / sequential
    print(f"default against start + generation alone + training alone: {guard:.2f} (at most 1.3)")
    out["guard"] = guard
    if args.json:
        args.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
