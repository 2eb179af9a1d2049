"""Run directories -> one table (Markdown, CSV) and one picture, with mean and range over seeds.

A run is its settings and its figures: those of summary.json by a flat name (`held_out.after`), and
of each key of metrics.jsonl the mean over the last three updates (`reward_mean_last3`). Runs whose
settings differ in nothing but the seed are one row of the table and one curve of the picture.

Run it alone: python examples/ablate.py --table runs/A runs/B   (a grid does this at its end)

Reading order: a run and its figures -> which runs, which settings -> table -> picture -> publish.
"""

import csv
import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path


class Missing(Exception):
    """A directory, knob or figure that is not there; shown as one sentence."""


# ------------------------------------------------------------------------------- a run's figures


@dataclass
class Run:
    folder: Path
    settings: dict  # seed included
    ended: bool
    figures: dict = field(default_factory=dict)  # flat name -> value
    curves: list = field(default_factory=list)  # rows of metrics.jsonl

    def __post_init__(self):
        self.curves = read_metrics(self.folder)
        self.figures = flatten(read_json(self.folder / "summary.json", {})) | last3(self.curves)

    def figure(self, key):
        """'held_out.after', or shorter 'after', or a key of metrics.jsonl: its last three rows."""
        there = (self.figures.get(name) for name in (*long_names(key), f"{key}_last3"))
        return next((x for x in there if is_number(x)), None)

    def curve(self, key):
        return {r["step"]: r[key] for r in self.curves if is_number(r.get(key))}

    def setting(self):
        return {k: v for k, v in self.settings.items() if k != "seed"}


def long_names(key):
    return key, f"held_out.{key}", f"requests.{key}"


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_json(path, default=None):
    try:
        return json.loads(path.read_text()) if path.exists() else default
    except ValueError:
        raise Missing(f"{path} is not whole: move its directory away") from None


def read_metrics(folder):
    """Rows of metrics.jsonl; a last line without an end is still being written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(x) for x in lines if x.endswith("\n")]


def flatten(value, name=""):
    """
    >>> flatten({"steps": 8, "requests": {"ok": 1}})
    {'steps': 8, 'requests.ok': 1}
    """
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, x in value.items()
            for k, v in flatten(x, f"{name}.{key}" if name else key).items()}


def last3(rows):
    """Of each figure of metrics.jsonl the mean over the last three updates that have it."""
    out = {}
    for key in dict.fromkeys(k for row in rows for k in row if k not in ("step", "version")):
        values = [r[key] for r in rows if is_number(r.get(key))][-3:]
        if values:
            out[f"{key}_last3"] = mean(values)
    return out


def mean(values):
    return sum(values) / len(values)


def label(settings):
    return " ".join(f"{k}={shown(v)}" for k, v in settings.items()) or "all"


def shown(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------- which runs, which settings

# Knobs of where and when a run was made, not of how it learns.
PLACES = ("run_dir seed port host engine_url policy_url teacher_url judge_url engine_cores gpus "
          "trainer_cores layout api_key api_key_file rebatch resume save_every cpu_offload "
          "compile").split()


def run_folders(folders):
    """Run directories, or directories of them; what a grid moved aside or replays is left out."""
    out = []
    for folder in map(Path, folders):
        here = (folder / "config.json").exists()
        found = [folder] if here else sorted(p.parent for p in folder.glob("*/config.json"))
        if not found:
            raise Missing(f"{folder}: no run directory (no config.json) there")
        out += found if here and len(folders) == 1 else [
            f for f in found if ".broken-" not in f.name and f.name != "recorded"]
    return list(dict.fromkeys(f.resolve() for f in out))


def differing(configs):
    """Knobs with several values; one that an older run does not know makes no difference."""
    keys = dict.fromkeys(k for c in configs for k in c if k not in PLACES)
    return [k for k in keys if len({json.dumps(c[k]) for c in configs if k in c}) > 1]


def runs_of(folders, by=None):
    """Existing run directories -> (runs, the knobs that differ but are not among `by`)."""
    folders = run_folders(folders)
    configs = [read_json(f / "config.json") for f in folders]
    differ = differing(configs)
    if wrong := [k for k in by or [] if not any(k in c for c in configs)]:
        raise Missing(f"--by {', '.join(wrong)}: no such knob in config.json; these differ: "
                      f"{', '.join(differ) or 'none'}")
    keys = by or differ
    runs = [Run(f, {k: c.get(k, "-") for k in [*keys, "seed"]}, bool(c.get("replay")) or
                (f / "summary.json").exists()) for f, c in zip(folders, configs, strict=True)]
    return runs, [k for k in differ if k not in keys]


def grouped(runs):
    """Runs that ended, by setting: {label: runs}, in the order in which they came."""
    out = {}
    for run in runs:
        if run.ended:
            out.setdefault(label(run.setting()), []).append(run)
    return out


# ------------------------------------------------------------------------------------------ table

LIVE = ("held_out.before held_out.after held_out.mean_tokens_after held_out.nll_before "
        "held_out.nll_after held_out.nll_hinted_base steps turns wall_s requests.failed "
        "requests.rejected").split()
REPLAY = "opd_mean kl clip_frac grad_norm loss ratio_mean cap_frac logp_gap_update".split()
HEADS = {"held_out.before": "good before", "held_out.after": "good after",
         "held_out.mean_tokens_after": "tokens after", "held_out.nll_before": "nll before",
         "held_out.nll_after": "nll after", "held_out.nll_hinted_base": "nll hinted base",
         "steps": "updates", "wall_s": "wall s", "requests.failed": "failed",
         "requests.rejected": "rejected"}


def number(x):
    """
    >>> [number(x) for x in (8, 0.8125, 652.31, 0.00268)]
    ['8', '0.812', '652', '0.00268']
    """
    return f"{x:.0f}" if isinstance(x, int) or abs(x) >= 100 else f"{x:.3g}"


def spread(values):
    """Numbers of a setting's runs -> 'mean (smallest to largest)', 'of k' where only k have one.

    >>> spread([1, 2, None]), spread([3, 3]), spread([None])
    ('1.5 (1 to 2) of 2', '3', '–')
    """
    there = [v for v in values if v is not None]
    if not there:
        return "–"
    low, high = min(there), max(there)
    text = number(low) if low == high else (
        f"{number(mean(there))} ({number(low)} to {number(high)})")
    return text + f" of {len(there)}" * (len(there) < len(values))


def has(runs, key):
    return any(run.figure(key) is not None for run in runs)


def columns(runs):
    """What the table shows unless told: a live run's or a replay's figures, if there is a value."""
    live = any((run.folder / "summary.json").exists() for run in runs)
    return [k for k in (LIVE if live else REPLAY) if has(runs, k)]


def check_keys(runs, keys):
    for key in keys:
        if not has(runs, key):
            names = sorted({k.removesuffix("_last3") for r in runs for k, v in r.figures.items()
                            if is_number(v)})
            raise Missing(f"--keys {key}: no run has such a figure; there are {', '.join(names)}")


def table(runs, keys, caption, notes=()):
    """Markdown: one row per setting, mean and range over its runs."""
    knobs = list(dict.fromkeys(k for run in runs for k in run.setting()))
    heads = [*knobs, "n", *(HEADS.get(k, k) for k in keys)]
    lines = [f"**{caption}**", "", line(heads), line(["---"] * len(heads))]
    for group in grouped(runs).values():
        setting = group[0].setting()
        lines.append(line([*(shown(setting.get(k, "–")) for k in knobs), len(group),
                           *(spread([run.figure(k) for run in group]) for k in keys)]))
    lines += ["", "Mean (smallest to largest) over n runs; figures of updates are those of a run's "
              "last three."]
    missing = [label(run.settings) for run in runs if not run.ended]
    lines += [f"Not ended, so not in the table: {'; '.join(missing)}."] * bool(missing)
    return "\n".join([*lines, *notes]) + "\n"


def line(cells):
    return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"


def write_csv(path, runs):
    """One row per run: its settings, every figure; `summary.` before one that is called as a
    setting is (steps wanted, steps done)."""
    rows = [{"run": run.folder.name, "ended": int(run.ended), **run.settings,
             **{f"summary.{k}" if k in run.settings else k: v for k, v in run.figures.items()}}
            for run in runs]
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, list(dict.fromkeys(k for row in rows for k in row)))
        out.writeheader()
        out.writerows(rows)


# ---------------------------------------------------------------------------------------- picture

COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #8B4513".split()  # Okabe-Ito
MARKERS = "osD^vP*Xh"  # nine, with eight colours: no pair comes twice
PANELS = ["reward_mean", "reply_tokens", "held_out.after", "held_out.nll_after"]
TITLES = {"reward_mean": "reward (mean score of judged turns)",
          "reply_tokens": "reply length (tokens)",
          "held_out.after": "held-out replies that are good (grey: before)",
          "held_out.nll_after": "held-out nll, nats per token (grey: hinted base)",
          "held_out.mean_tokens_after": "held-out reply length, tokens (grey: before)",
          "opd_mean": "teacher minus policy, nats per token", "kl": "kl to the policy that sampled",
          "clip_frac": "share of tokens clipped", "grad_norm": "gradient norm",
          "cap_frac": "share of tokens at the TIS cap"}
BESIDE = {"held_out.after": "held_out.before", "held_out.nll_after": "held_out.nll_hinted_base",
          "held_out.mean_tokens_after": "held_out.mean_tokens_before"}  # the grey bars
SHAPES = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}
STYLE = {"font.size": 20, "axes.titlesize": 22, "lines.linewidth": 3.5, "lines.markersize": 11,
         "axes.spines.top": False, "axes.spines.right": False}


def draw(path, runs, keys, caption):
    """16:9, to be read from the last row: up to six panels, curves of metrics.jsonl and bars for
    what a run has once."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = grouped(runs)
    runs = [run for group in groups.values() for run in group]
    keys = [k for k in keys if has(runs, k)][:6]
    if not keys:
        return
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*SHAPES[len(keys)], figsize=(19.2, 10.8), squeeze=False,
                                    layout="constrained")
        figure.get_layout_engine().set(w_pad=0.2, h_pad=0.12)
        for axis, key in zip(axes.flat, keys, strict=False):
            curves = any(run.curve(key) for run in runs)
            (draw_curves if curves else draw_bars)(axis, groups, key)
            wide = SHAPES[len(keys)][1] < 3
            axis.set_title(textwrap.fill(TITLES.get(key, HEADS.get(key, key)), 50 if wide else 36),
                           fontsize=22 if wide else 18)
        for axis in axes.flat[len(keys):]:
            axis.axis("off")
        draw_legend(figure, groups)
        figure.suptitle(textwrap.fill(caption, 80), fontsize=28, fontweight="bold")
        figure.savefig(path, dpi=100)
        plt.close(figure)


def look(i):
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def draw_legend(figure, groups):
    from matplotlib.lines import Line2D

    knobs = {k for group in groups.values() for k in group[0].setting()}
    names = list(groups) if len(knobs) != 1 else [name.partition("=")[2] for name in groups]
    texts = [f"{name}  (n={len(group)})" for name, group in
             zip(names, groups.values(), strict=True)]
    longest = max(map(len, texts))
    size, row = (20, 120) if longest < 30 else (16, 150)  # characters that fit in a row
    figure.legend([Line2D([], [], **look(i)) for i in range(len(groups))], texts,
                  title=min(knobs) if len(knobs) == 1 else None, loc="outside lower center",
                  ncols=max(1, min(row // (longest + 8), len(groups))), frameon=False,
                  fontsize=size, title_fontsize=20)


def draw_curves(axis, groups, key):
    """Per setting the mean over the steps that all its seeds have, a band from smallest to largest;
    each seed to its own end as a thin line."""
    for i, group in enumerate(groups.values()):
        curves = [c for c in (run.curve(key) for run in group) if c]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        values = [[c[step] for c in curves] for step in steps]
        axis.plot(steps, [mean(x) for x in values], **look(i))
        if len(curves) > 1:
            axis.fill_between(steps, [min(x) for x in values], [max(x) for x in values],
                              color=look(i)["color"], alpha=0.15, linewidth=0)
            for curve in curves:
                axis.plot(list(curve), list(curve.values()), color=look(i)["color"], alpha=0.4,
                          linewidth=1.2)
    axis.set_xlabel("update")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if key == "reward_mean":
        axis.set_ylim(-1.08, 1.08)
    if key == "reply_tokens":
        axis.set_ylim(bottom=0)


def draw_bars(axis, groups, key):
    """Per setting the mean with its range, a mark per seed, and a grey bar to compare it with."""
    for i, group in enumerate(groups.values()):
        draw_bar(axis, i, group, key, 20 if len(groups) < 5 else 14)
    axis.set_xticks([])
    axis.set_xlim(-0.6, max(2, len(groups)) - 0.4)
    axis.margins(y=0.18)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def draw_bar(axis, i, group, key, size):
    values = [v for v in (run.figure(key) for run in group) if v is not None]
    beside = [v for v in (run.figure(BESIDE.get(key, "")) for run in group) if v is not None]
    if beside:
        axis.bar(i - 0.3, mean(beside), 0.25, color="0.75")
    if not values:
        axis.text(i + 0.05, 0, "none", ha="center", va="bottom", color="0.4")
        return
    axis.bar(i + 0.05, mean(values), 0.45, color=look(i)["color"])
    if len(values) > 1:
        axis.vlines(i + 0.05, min(values), max(values), color="0.15", linewidth=2.5)
        axis.plot([i + 0.05] * len(values), values, linestyle="", marker=look(i)["marker"],
                  color="white", markeredgecolor="0.15")
    axis.annotate(number(mean(values)), (i + 0.05, max(values)), (0, 14), fontsize=size,
                  textcoords="offset points", ha="center", fontweight="bold")


# ---------------------------------------------------------------------------------------- publish


def publish(out, runs, keys, caption, notes=(), picture=True):
    """results.csv, table.md and figure.png of the runs -> the table. keys: columns and panels."""
    keys = [next((name for name in long_names(key) if any(name in r.figures for r in runs)), key)
            for key in keys or []]
    shown_keys = keys or columns(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "results.csv", runs)
    text = table(runs, shown_keys, caption, notes)
    (out / "table.md").write_text(text)
    if picture:
        panels = keys or (PANELS if set(shown_keys) & set(LIVE) else shown_keys[:4])
        draw(out / "figure.png", runs, panels, caption)
    return text
