"""curve.png of a run: reward, reply length, logp_gap and hint rate over the steps.

Run it alone: python examples/plot_run.py runs/MINE   (main.py does so at the end of each run)
"""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = [  # key of metrics.jsonl, title, colour
    ("reward_mean", "reward (mean score of judged turns)", "tab:green"),
    ("reply_tokens", "reply length (tokens)", "tab:blue"),
    ("logp_gap", "logp_gap (engine against trainer)", "tab:red"),
    ("hint_rate", "hint rate (turns with a correction)", "tab:orange"),
]


def plot(run_dir):
    rows = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((run_dir / "config.json").read_text())
    plt.rcParams.update({"font.size": 16, "lines.linewidth": 3, "lines.markersize": 9})
    figure, axes = plt.subplots(2, 2, figsize=(16, 9), sharex=True)
    for axis, (key, title, colour) in zip(axes.flat, PANELS, strict=True):
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        axis.plot(*zip(*points, strict=True) if points else ([], []), "o-", color=colour)
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.margins(y=0.1)
    axes[0, 0].set_ylim(-1.05, 1.05)
    axes[0, 0].axhline(0, color="grey", linewidth=1)
    axes[0, 1].set_ylim(bottom=0)
    axes[1, 0].set_ylim(bottom=0)
    axes[1, 1].set_ylim(-0.05, 1.05)
    for axis in axes[1]:
        axis.set_xlabel("update")
        axis.xaxis.get_major_locator().set_params(integer=True)
    adapter = f"LoRA r{config['lora_rank']}" if config["lora_rank"] else "full weights"
    figure.suptitle(f"mode {config['mode']}, seed {config['seed']}, "
                    f"{Path(config['model']).name}, {adapter}")
    figure.tight_layout()
    figure.savefig(run_dir / "curve.png", dpi=80)


if __name__ == "__main__":
    plot(Path(sys.argv[1]))
