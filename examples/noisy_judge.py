"""A stand-in for a judge model that errs as often as you say: --judge llm --extra this file.

A 135M model cannot judge (as its own judge it gave no verdict at all in 139 of 139 turns), and of a
large one nobody knows how often it is wrong. Here each vote is the word list's, which simulated
users speak, turned around with probability NOISE, independently of the others. The hint is the
user's own correction in one of three wordings, so that several votes give several hints.

    python main.py --simulate concise --steps 8 --max-wait 60 --judge llm --votes 3 \\
      --extra examples/noisy_judge.py
"""

import random

from judge import JUDGES, lexicon_votes, vote_counts

NOISE = 0.3  # how often a single vote is wrong; no source, a value with room on both sides
WORDINGS = ("{}", "The user has a wish about the form of the answer: {} It holds from the first "
            "word on.", "{} What goes beyond that will be sent back.")


def noisy_votes(http, cfg, turn):
    """-> (score votes, hint votes), as many as a judge model would be asked for. The dice depend on
    the seed and the turn alone, so that threads do not change them."""
    dice = random.Random(f"{cfg.seed} {turn.id}")
    [score], [(verdict, hint)] = lexicon_votes(http, cfg, turn)
    n_score, n_hint = vote_counts(cfg)

    def wrong():
        return dice.random() < NOISE

    def hint_vote():
        says = -verdict if wrong() else verdict
        text = hint or "Answer as you did before."  # what a judge invents when there was approval
        return (1, dice.choice(WORDINGS).format(text)) if says == 1 else (-1, "")

    return ([-score if wrong() else score for _ in range(n_score)],
            [hint_vote() for _ in range(n_hint)])


JUDGES["llm"] = noisy_votes
