"""Arithmetic word problems for the simulated users, written for this project (from no dataset).

A problem is a template with numbers: `{who}` is a name, `{a} {b} {c}` are numbers of the problem's
level, `{k} {m}` are small ones. The steps compute the answer from them; r1, r2 ... are the results
of the steps before. Numbers are drawn until every result is a positive whole number.

`PROBLEMS` is what users ask about while the model learns, `HELD_OUT_PROBLEMS` is asked before and
after: other templates, not only other numbers. Keep both fixed: numbers of different runs compare
only on the same list. Run it alone to read some:  python examples/problems.py
"""
import operator
import random
from dataclasses import dataclass

NAMES = ["Ada", "Ben", "Chen", "Dana", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun", "Kofi",
         "Lena", "Marta", "Nils", "Olga", "Pablo"]
LEVELS = [(2, 12), (13, 60), (61, 300)]  # a, b, c
SMALL = (2, 9)                           # k, m

TRAIN = [  # text, steps
    ("{who} picks {a} apples and buys {b} more. How many apples does {who} have now?", ["a + b"]),
    ("A baker has {a} rolls and sells {b} of them. How many rolls are left?", ["a - b"]),
    ("There are {k} shelves with {a} books on each. How many books are there?", ["k * a"]),
    ("{who} shares {a} marbles equally among {k} friends. How many marbles does each friend get?",
     ["a / k"]),
    ("A bus carries {a} people. At a stop {b} of them get off and {c} others get on. How many "
     "people are on the bus now?", ["a - b", "r1 + c"]),
    ("{who} buys {k} boxes with {a} pencils each and gives {b} pencils away. How many pencils are "
     "left?", ["k * a", "r1 - b"]),
    ("A farmer has {a} hens and {b} ducks. Each bird gets {k} spoons of corn. How many spoons of "
     "corn does the farmer need?", ["a + b", "r1 * k"]),
    ("{who} saves {a} coins each week for {k} weeks and then spends {b} coins. How many coins are "
     "left?", ["a * k", "r1 - b"]),
    ("A ticket costs {k} euros. On Monday {a} people came, on Tuesday {b} fewer. How many euros "
     "were paid on Tuesday?", ["a - b", "r1 * k"]),
    ("{who} has {a} stickers, loses {b} and puts the others on {k} pages, the same number on each. "
     "How many stickers are on one page?", ["a - b", "r1 / k"]),
    ("A train ride takes {a} minutes, the wait {b} minutes and the walk home {c} minutes. How many "
     "minutes is that in all?", ["a + b", "r1 + c"]),
    ("{who} reads {k} pages a day for {m} days. The book has {a} pages. How many pages are left to "
     "read?", ["k * m", "a - r1"]),
    ("A shop has {k} bags with {a} oranges each and {m} bags with {b} lemons each. {c} of these "
     "fruits are bad. How many are good?", ["k * a", "m * b", "r1 + r2", "r3 - c"]),
    ("{who} bakes {a} biscuits, eats {b} and packs the others into boxes of {k}. Each box is sold "
     "for {m} coins. How many coins does {who} get?", ["a - b", "r1 / k", "r2 * m"]),
    ("A group of {a} children and {b} adults fills {k} boats, each with the same number of people. "
     "How many people are in one boat?", ["a + b", "r1 / k"]),
    ("A tank holds {a} litres of water. It loses {k} litres an hour for {m} hours, then {b} litres "
     "are poured in. How many litres are in the tank?", ["k * m", "a - r1", "r2 + b"]),
]
HELD_OUT = [
    ("{who} walks {a} steps in the morning and {b} steps in the evening. How many steps is that?",
     ["a + b"]),
    ("A library has {a} films and lends out {b}. How many films are still there?", ["a - b"]),
    ("A theatre has {a} rows with {k} seats each. How many seats does it have?", ["a * k"]),
    ("A rope of {a} metres is cut into {k} equal pieces. How many metres long is each piece?",
     ["a / k"]),
    ("A gardener plants {a} tulips and {b} roses, but {c} of the flowers wilt. How many flowers "
     "are left?", ["a + b", "r1 - c"]),
    ("{who} earns {a} coins an hour, works for {k} hours and pays {b} coins for the way home. How "
     "many coins does {who} keep?", ["a * k", "r1 - b"]),
    ("A post office has {a} parcels, receives {b} more and loads all of them onto {k} vans, the "
     "same number onto each. How many parcels are in one van?", ["a + b", "r1 / k"]),
    ("{who} fills {k} jars with {a} beans each and {m} jars with {b} beans each. How many beans "
     "are in the jars?", ["k * a", "m * b", "r1 + r2"]),
]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True)
class Problem:
    text: str
    steps: tuple     # (x, operator, y, result)
    difficulty: int  # number of steps + level of the numbers

    @property
    def answer(self):
        return self.steps[-1][-1]

    def solution(self, slip=0):
        """As a pupil would write it; `slip` is added to the last result."""
        *first, (x, op, y, answer) = self.steps
        lines = [f"{x} {op} {y} = {result}" for x, op, y, result in first]
        return (", then ".join([*lines, f"{x} {op} {y} = {answer + slip}"])
                + f". The answer is {answer + slip}.")


def work(steps, numbers):
    """['a + b', 'r1 * k'], {a: 2, b: 3, k: 4} -> ((2, '+', 3, 5), (5, '*', 4, 20)), or None where
    a result is not a positive whole number."""
    known, done = dict(numbers), []
    for i, step in enumerate(steps, 1):
        x, op, y = step.split()
        result = OPERATORS[op](known[x], known[y])
        if result < 1 or result != int(result):
            return None
        known[f"r{i}"] = int(result)
        done.append((known[x], op, known[y], int(result)))
    return tuple(done)


def draw(rng, template, level):
    text, steps = template
    while True:
        numbers = {x: rng.randint(*LEVELS[level]) for x in "abc"}
        numbers |= {x: rng.randint(*SMALL) for x in "km"}
        done = work(steps, numbers)
        if done:
            return Problem(text.format(who=rng.choice(NAMES), **numbers), done,
                           len(steps) + level + 1)


def make(templates, count, seed):
    """`count` different problems, templates and then levels in turn."""
    rng, out = random.Random(f"{seed}-problems"), {}
    while len(out) < count:
        round_, i = divmod(len(out), len(templates))
        problem = draw(rng, templates[i], round_ % len(LEVELS))
        out.setdefault(problem.text, problem)
    return list(out.values())


PROBLEMS, HELD_OUT_PROBLEMS = make(TRAIN, 192, seed=0), make(HELD_OUT, 32, seed=0)

if __name__ == "__main__":
    for one in PROBLEMS[::12]:
        print(f"[{one.difficulty}] {one.text}\n    {one.solution()}")
