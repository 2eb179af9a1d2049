"""What do simulated users ask next? Rules for spending questions where they teach something.

A rule is a generator: it reads the history of the talk and yields the next question, for ever. Live
users decide themselves what they ask; these rules are for simulated ones only.

    uniform        all questions in a seeded order, again and again
    curriculum     the same laps, each from easy to hard
    boundary       where the estimated pass rate is near one half
    reinforce-ada  again where every try so far failed, else as uniform

The figures to compare them by: the share of turns that give a gradient (nonzero_grad_frac in
metrics.jsonl) and trained turns over judged ones. Which turns teach depends on the mode: opd learns
from complaints only, rl from every scored turn. Several users talk at once, so all but `uniform`
depend on when replies come: with --users 1 a run asks the same again.

reinforce-ada is after Reinforce-Ada (Xiong et al. 2025, arXiv 2510.04996), which samples a prompt
in rounds within one batch until it has enough signal. Simplified: one try at a time, spread over
the talk and over policy versions; it ends at the first success or at CAP failures; no groups of
equal size, no balance of good and bad, no baseline. Our scores are raw, so a failed try is not
without gradient as it is in a group where all failed.

Add a rule: a row in ALLOCATIONS, also from a file given as --extra
(`from simulated_user import ALLOCATIONS`).
"""
import itertools
import random
from collections import Counter, deque

RECENT = 8  # tries that count for a pass rate: older ones are of a policy long gone
CAP = 4     # tries in a row of one question that keeps failing


class History:
    """What was asked and how it went. The caller holds the lock."""

    def __init__(self, questions, difficulty=None, seed=0):
        self.questions, self.difficulty, self.seed = list(questions), difficulty or {}, seed
        self.rng = random.Random(f"{seed}-allocation")
        self.recent = {q: deque(maxlen=RECENT) for q in self.questions}  # was the reply good?
        self.failed = Counter()   # question -> failures since its last success
        self.waiting = Counter()  # question -> asked, and no reply yet

    def ask(self, question):
        self.waiting[question] += 1

    def saw(self, question, good):
        """good None: the request failed, so nothing is known."""
        self.waiting[question] -= 1
        if good is not None:
            self.recent[question].append(good)
            self.failed[question] = 0 if good else self.failed[question] + 1

    def beta(self, question):
        """The pass rate as Beta(1 + good, 1 + bad): flat before the first try."""
        tries = self.recent[question]
        return 1 + sum(tries), 1 + len(tries) - sum(tries)

    def hardness(self, question):
        """The question's own difficulty; one without: 1 - its pass rate so far (mean of beta)."""
        good, bad = self.beta(question)
        return self.difficulty.get(question, bad / (good + bad))

    def failing(self):
        """A question whose tries all failed, fewer than CAP (2 CAP ... when its turn came again)
        of them, and nobody is waiting for its reply; or None."""
        return next((q for q, n in self.failed.items() if n % CAP and not self.waiting[q]), None)

    def laps(self):
        for lap in itertools.count():
            order = list(self.questions)
            random.Random(f"{self.seed}-{lap}").shuffle(order)
            yield order


def uniform(history):
    for order in history.laps():
        yield from order


def curriculum(history):
    """min() keeps the first of equals, so ties stay in the lap's order. Questions without a
    difficulty: the first lap is uniform's, the later ones know pass rates."""
    for left in history.laps():
        while left:
            left.remove(easiest := min(left, key=history.hardness))
            yield easiest


def boundary(history):
    """Thompson's way: draw each pass rate from its Beta, ask where the draw is nearest to 1/2. Few
    tries give wide draws, so what is unknown is tried too."""
    def distance(question):
        return abs(history.rng.betavariate(*history.beta(question)) - 0.5)
    while True:
        yield min(history.questions, key=distance)


def reinforce_ada(history):
    for fresh in uniform(history):
        while (again := history.failing()) is not None:
            yield again
        yield fresh


ALLOCATIONS = {"uniform": uniform, "curriculum": curriculum, "boundary": boundary,
               "reinforce-ada": reinforce_ada}
