"""What happened in a run: why turns were dropped, which taught most, one turn token by token.

Run it alone: it only reads a run directory, also of a run that is still going on.
    python examples/inspect_run.py runs/MINE                        # fates, best and worst turns
    python examples/inspect_run.py runs/MINE --turn dbc1            # part of a turn's id
    python examples/inspect_run.py runs/MINE --compare runs/OTHER   # two runs side by side

Letters of the token table, as in trainer.py: b is rollout_logp, under the policy that sampled; p is
prox_logp, under the policy at the start of the turn's step; T is teacher_logp, under the base model
that has read the hint. Distillation pushes by T - p: above 0 the better informed model likes the
token more.
"""

import argparse
import os
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

from run_table import (
    Missing,
    differing,
    flatten,
    is_number,
    last3,
    mean,
    number,
    read_json,
    read_metrics,
    shown,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from proxy import load_turns

WHY = {"trained": "a sample of an update", "no_next_state": "nobody reacted to the reply",
       "side": "the client said: not to be learnt from",
       "no_hint": "the reaction held no correction",
       "score_0": "neither good nor bad", "unscored": "no valid vote", "cut": "the limit cut it",
       "render": "its prompt could not be reproduced", "too_long": "above --max-train-len",
       "stale": "older than --max-staleness", "overload": "the queue was full",
       "not_chosen": "another reply to the same question was kept",
       "constrained": "a grammar chose among its tokens",
       "client_sampling": "sampled as the client wished",
       "ids_mismatch": "ids or log-probs missing",
       "bad_logp": "a log-prob was no number", "empty": "no token at all",
       "no_answer": "cut before a visible answer began", "aborted": "its client left",
       "refused": "the engine did not take it", "engine_error": "the engine failed",
       "judge_error": "judging failed", "run_ended": "still open when the run ended",
       "open": "still waiting, or the run was killed"}


def paint(text, code):
    """Colour on a terminal only."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\033[{code}m{text}\033[0m"


def short(text, width=84):
    """One line without control characters: a reply must not be able to move the cursor."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join((text or "").split()))
    return text if len(text) <= width else text[: width - 4] + " ..."


def rows(table, left=1):
    """Columns as wide as they must be; the first `left` of them on the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        yield "  ".join(cell.ljust(w) if i < left else cell.rjust(w)
                        for i, (cell, w) in enumerate(zip(line, widths, strict=True))).rstrip()


def read_turns(folder):
    """The turns of a run that may be going on: half a line at the end is not read."""
    path = folder / "turns.jsonl"
    if not path.exists():
        raise Missing(f"{folder}: no turns.jsonl there")
    lines = path.read_bytes().splitlines(keepends=True)
    with tempfile.NamedTemporaryFile() as whole:
        whole.writelines(line for line in lines if line.endswith(b"\n"))
        whole.flush()
        return list(load_turns(whole.name).values())


# ------------------------------------------------------------------------------- fates, best, worst


def asked(turn):
    return next((m["content"] for m in reversed(turn.messages) if m["role"] == "user"), "")


def reply(turn):
    calls = [f"[calls {c['function']['name']}]" for c in turn.reply.get("tool_calls") or []]
    return " ".join([turn.reply.get("content") or "", *calls])


def said(turn):
    return " / ".join(m["content"] for m in turn.next_state)


def story(turn):
    """What was asked, answered and said next; empty parts are left out."""
    hints = turn.hints if len(turn.hints) > 1 else []
    parts = [("user", asked(turn)), ("reply", reply(turn)), ("then", said(turn)),
             ("hint", turn.hint), *(("hints", h) for h in hints)]
    return [f"      {name:>5}: {short(text)}" for name, text in parts if text]


def fates(turns):
    """Every fate with its share, why, and one example: the first that has a reaction, if any."""
    groups = {}
    for turn in turns:
        groups.setdefault(turn.fate or "open", []).append(turn)
    yield f"{len(turns)} turns, by fate"
    for fate, group in sorted(groups.items(), key=lambda x: -len(x[1])):
        share = 100 * len(group) / len(turns)
        yield f"\n{paint(fate, 1)}  {len(group)}  {share:.1f} %  ({WHY.get(fate, 'a later fate')})"
        example = next((t for t in group if t.next_state), group[0])
        yield f"  for example {example.id}"
        yield from story(example)


def pull(turn, cfg):
    """Its advantage as the trainer had it, mean over tokens: w_rl r + w_opd clamp(T - p); where
    T or p were not recorded, the score."""
    if turn.r is None and (not turn.teacher_logp or not turn.prox_logp):
        return float(turn.score or 0)
    bound, out = cfg.get("opd_clip", 5.0), cfg.get("w_rl", 1.0) * (turn.r or 0)
    if turn.distil and turn.teacher_logp and turn.prox_logp:
        gaps = zip(turn.teacher_logp, turn.prox_logp, strict=True)
        out += cfg.get("w_opd", 1.0) * mean([min(bound, max(-bound, t - p)) for t, p in gaps])
    return out


def best_and_worst(turns, cfg, n):
    trained = sorted((t for t in turns if t.fate == "trained"), key=lambda t: -pull(t, cfg))
    if not trained:
        yield "\nno turn was trained"
        return
    lists = {"best": trained[:n], "worst": trained[: -n - 1 : -1]}
    if pull(trained[0], cfg) == pull(trained[-1], cfg):
        lists = {"some (all have the same advantage)": trained[:n]}
    for name, some in lists.items():
        yield f"\n{paint(name, 1)} of {len(trained)} trained turns, by mean advantage per token"
        for turn in some:
            yield (f"  {turn.id}  step {turn.step}  advantage {pull(turn, cfg):+.3f}  score "
                   f"{shown(turn.score)}  {len(turn.response_ids)} tokens")
            yield from story(turn)


def overview(folder, cfg, n):
    turns = read_turns(folder)
    yield (f"{folder}: mode {cfg.get('mode')}, seed {cfg.get('seed')}, "
           f"{len(read_metrics(folder))} steps\n")
    if turns:
        yield from fates(turns)
    yield from best_and_worst(turns, cfg, n)


# ------------------------------------------------------------------------------- token by token


def decoder(model):
    """-> a function from an id to its text; without the model's tokenizer the id itself."""
    try:
        from tokenizers import Tokenizer

        path = Path(model)
        tokenizer = (Tokenizer.from_file(str(path / "tokenizer.json")) if path.is_dir()
                     else Tokenizer.from_pretrained(model))
    except Exception as error:  # a file, the network, the package: tokenizers raises no other kind
        print(f"no tokenizer of {model} ({short(str(error), 60)}): ids are shown", file=sys.stderr)
        return str
    return lambda i: repr(tokenizer.decode([i], skip_special_tokens=False))


def find(turns, part):
    found = [t for t in turns if t.id == part] or [t for t in turns if part in t.id]
    if len(found) != 1:
        raise Missing(f"--turn {part}: {len(found)} turns have that in their id"
                      + "".join(f"\n  {t.id}" for t in found[:5]))
    return found[0]


def arrow(gap):
    """T - p as a bar: '>>' for about +2 nats, '<' for about -1."""
    n = min(8, round(abs(gap)))
    return paint(">" * n, 32) if gap > 0 else paint("<" * n, 31)


def tokens(turn, text):
    """The table: a row per token, '-' for what was not recorded."""
    def form(value):
        return "-" if value is None else f"{value:.3f}"

    columns = (turn.response_ids, turn.rollout_logp, turn.prox_logp or [], turn.teacher_logp or [])
    yield ["", "token", "b", "p", "T", "p - b", "T - p", ""]
    for i, (token, b, p, t) in enumerate(zip_longest(*columns)):
        drift = None if None in (p, b) else p - b
        gap = None if None in (t, p) else t - p
        yield [str(i), "-" if token is None else text(token), form(b), form(p), form(t),
               form(drift), form(gap), "" if gap is None else arrow(gap)]


def one_turn(folder, cfg, part):
    turn = find(read_turns(folder), part)
    yield (f"{paint(turn.id, 1)}: {turn.fate or 'open'} ({WHY.get(turn.fate or 'open', '')})"
           + (f", step {turn.step}" if turn.step is not None else "")
           + f", version {turn.version_start}, ended by {turn.finish_reason}, "
           f"{len(turn.prompt_ids)} + {len(turn.response_ids)} tokens")
    for message in turn.messages:
        yield f"  {message['role']:>9}: {short(message['content'], 400)}"
    yield f"  {'reply':>9}: {short(reply(turn), 1000)}"
    for message in turn.next_state:
        yield f"  {'then ' + message['role']:>9}: {short(message['content'], 400)}"
    yield (f"  votes {turn.votes}, score {shown(turn.score)}, r {shown(turn.r)}, hint "
           f"{short(turn.hint, 200) or 'none'}"
           + (f" (not used: {turn.hint_skip})" if turn.hint_skip else ""))
    yield from (f"  valid hint: {short(hint, 200)}" for hint in turn.hints if len(turn.hints) > 1)
    yield ""
    yield from rows(list(tokens(turn, decoder(cfg.get("model", "")))), left=2)
    if turn.teacher_logp is None and turn.distil:
        yield "T was not recorded: by --topk the teacher's whole distribution is used instead"


# --------------------------------------------------------------------------------- two runs


def differences(a, b):
    """Rows of (name, a, b, b - a) for the names of both dicts."""
    for key in dict.fromkeys([*a, *b]):
        x, y = a.get(key), b.get(key)
        both = is_number(x) and is_number(y)
        yield [key, cell(x), cell(y), f"{y - x:+.3g}" if both else ""]


def cell(value):
    return "-" if value is None else number(value) if is_number(value) else short(str(value), 40)


def compare(folders, configs):
    """Knobs that differ, then the figures of summary.json, then the last updates."""
    names = [f"{f.parent.name}/{f.name}" if folders[0].name == folders[1].name else f.name
             for f in folders]
    differ = differing(configs)
    parts = [("knobs that differ", [{k: c.get(k) for k in differ} for c in configs]),
             ("summary.json", [flatten(read_json(f / "summary.json", {})) for f in folders]),
             ("metrics.jsonl, mean of the last three updates",
              [{k.removesuffix("_last3"): v for k, v in last3(read_metrics(f)).items()
                if k != "time_last3"} for f in folders])]
    for title, (a, b) in parts:
        yield f"\n{paint(title, 1)}"
        yield from rows([["", *names, "difference"], *differences(a, b)]) if a or b else ["none"]


# --------------------------------------------------------------------------------------- main


def config_of(folder):
    config = read_json(folder / "config.json")
    if config is None:
        raise Missing(f"{folder}: no run directory (no config.json) there")
    return config


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--turn", metavar="ID", help="one turn, token by token")
    parser.add_argument("--compare", type=Path, metavar="RUN", help="figures of both, side by side")
    parser.add_argument("-n", type=int, default=3, help="how many best and worst turns [3]")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        cfg = config_of(args.run)
        if args.compare:
            both = [args.run.resolve(), args.compare.resolve()]
            lines = compare(both, [cfg, config_of(args.compare)])
        elif args.turn:
            lines = one_turn(args.run, cfg, args.turn)
        else:
            lines = overview(args.run, cfg, max(1, args.n))
        for line in lines:
            print(line)
    except Missing as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
