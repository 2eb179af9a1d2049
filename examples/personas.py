"""Who the simulated users are: what they ask, what they wish for, what they say about a reply.

The wish is checked by a rule, never by a model. Only its form is checked: whether a solution is
right is nobody's wish here, so a policy may please a user with nonsense. Look at the turns.

Phrases are for the lexicon judge as for any other: a complaint says that the reply is bad, then
states the wish as a plain instruction, which is the hint in hindsight.

    concise            everyday questions, at most 25 words
    student            has homework done that must not look machine-made
    assistant_teacher  has solutions commented, in detail
    teacher            has homework commented, in a warm tone
    drifting           concise at first; from --drift-at on, at least two sentences
"""
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from problems import HELD_OUT_PROBLEMS, PROBLEMS
from questions import HELD_OUT, QUESTIONS


@dataclass(frozen=True)
class Persona:
    questions: list[str]
    held_out: list[str]                 # asked before and after, never in between
    check: Callable[[str, str], bool]   # (reply, finish_reason) -> is this reply good?
    pleased: list[str]                  # what the user says to a good reply
    complaints: list[str]               # and to a bad one: the wish, as a plain instruction
    hint: str                           # the wish; only the measurement of the hinted base uses it
    difficulty: dict = field(default_factory=dict)  # question -> number, for --allocation
    needs_tokens: int = 0               # the smallest --max-tokens that allows a good reply
    later: "Persona | None" = None      # whose wish and phrases count from --drift-at on


def is_concise(reply, finish_reason):
    """Good = ends by itself, is not empty and has at most 25 words."""
    return finish_reason == "stop" and 0 < len(reply.split()) <= 25


MACHINE_MADE = re.compile(
    r"\*\*|__\w|<b>"                      # bold
    r"|^\s*(\d+[.)]|[-*•+])[ \t]+\S"      # numbered or bulleted list
    r"|\\boxed"
    r"|\bstep\s*\d", re.IGNORECASE | re.MULTILINE)


def is_natural(reply, finish_reason):
    """Good = is not empty and has no bold, no list, no \\boxed and no 'Step 1'."""
    return bool(reply.strip()) and not MACHINE_MADE.search(reply)


DETAILED = 75  # words, as a client has no tokenizer; about 100 tokens (1.1 to 1.5 tokens a word)


def is_detailed(reply, finish_reason):
    """Good = at least 75 words, which are about 100 tokens."""
    return len(reply.split()) >= DETAILED


WARM = ["well done", "good job", "great job", "nice job", "good work", "great work", "nice work",
        "excellent work", "good effort", "great effort", "good try", "nice try", "keep it up",
        "keep going", "keep up the", "proud of you", "you can be proud", "don't worry",
        "you are doing great", "you're doing great", "wonderful", "happy to see", "glad to see"]
WARM_PHRASE = re.compile(rf"\b({'|'.join(WARM)})\b", re.IGNORECASE)


def is_warm(reply, finish_reason):
    """Good = contains one of the phrases of WARM."""
    return bool(WARM_PHRASE.search(" ".join(reply.replace("’", "'").split())))


def has_two_sentences(reply, finish_reason):
    """Good = at least two sentences of three words or more that end as sentences do."""
    sentences = re.split(r"(?<=[.!?])\s+", reply.strip())
    return sum(s[-1:] in (".", "!", "?") and len(s.split()) >= 3 for s in sentences) >= 2


def asks(task, problems, handed_in=False):
    """-> {question: difficulty}. handed_in: with a pupil's solution, three of seven with a slip in
    their last result (7: every template gets both kinds)."""
    slips = (0, 1, 0, -1, 0, 10, 0)
    return {f"{task}\nProblem: {p.text}"
            + f"\nSolution: {p.solution(slips[i % len(slips)])}" * handed_in: p.difficulty
            for i, p in enumerate(problems)}


def on_problems(task, handed_in=False, **wish):
    questions = asks(task, PROBLEMS, handed_in)
    return Persona(questions=list(questions), difficulty=questions,
                   held_out=list(asks(task, HELD_OUT_PROBLEMS, handed_in)), **wish)


PERSONAS = {
    "concise": Persona(
        questions=QUESTIONS, held_out=HELD_OUT, check=is_concise,
        pleased=[
            "Thanks, that is exactly what I wanted.",
            "Perfect, thank you!",
            "Great, that is just the right length. Thanks.",
            "Thank you, short and clear.",
            "Good answer, thanks.",
        ],
        complaints=[
            "That is too long. Answer briefly, in one short sentence.",
            "No, that is too long. Please answer briefly, in one short sentence.",
            "Too long! Just answer in one short sentence.",
            "No, I did not ask for a lecture. Answer briefly, in one short sentence, please.",
            "This is much too long for me. Just answer briefly, in one short sentence.",
            "No, too long. Just answer in one short sentence.",
        ],
        hint="Answer briefly, in one short sentence."),
    "student": on_problems(
        "Solve this homework for me.", check=is_natural,
        pleased=[
            "Thanks, I can hand that in.",
            "Perfect, that reads like my own work.",
            "Great, just as I would write it. Thank you.",
            "Thank you, that looks natural.",
        ],
        complaints=[
            "No, that looks machine-made. Write it as plain sentences in one paragraph.",
            "No, my teacher would notice. Answer in one plain paragraph, in whole sentences.",
            "That isn't my style. Write plain sentences in one paragraph, without bold or lists.",
            "I asked for homework. Answer in one plain paragraph, without bold or lists.",
        ],
        hint="Write plain sentences in one paragraph, without bold or lists."),
    "assistant_teacher": on_problems(
        "Comment on this student's solution.", handed_in=True, check=is_detailed,
        needs_tokens=128,  # 75 words at 1.5 tokens each, and some
        pleased=[
            "Thanks, that is detailed enough.",
            "Perfect, every line is covered.",
            "Great, that will help the student. Thank you.",
            "Thank you, a thorough comment.",
        ],
        complaints=[
            f"That is too short. Write a detailed comment of at least {DETAILED} words.",
            f"No, too short. Comment on every line in detail, in at least {DETAILED} words.",
            f"Too vague! Explain each step in detail, in at least {DETAILED} words.",
            f"No, that is not helpful. Write a detailed comment of at least {DETAILED} words.",
        ],
        hint=f"Write a detailed comment of at least {DETAILED} words."),
    "teacher": on_problems(
        "Write a comment for my student about this homework.", handed_in=True, check=is_warm,
        pleased=[
            "Thanks, that is a kind comment.",
            "Perfect, my student will like that.",
            "Great, that is the tone I want. Thank you.",
            "Thank you, warm and clear.",
        ],
        complaints=[
            'No, that sounds cold. Be friendly and begin with praise such as "Well done".',
            'That is too formal. Be warm and begin with praise such as "Good job".',
            "No, my student would lose heart. Be friendly and begin with warm words of praise.",
            'That is not nice to read. Be friendly and begin with praise such as "Well done".',
        ],
        hint='Be friendly and begin with praise such as "Well done".'),
}

PERSONAS["drifting"] = replace(PERSONAS["concise"], later=replace(
    PERSONAS["concise"], check=has_two_sentences,
    pleased=[
        "Thanks, now I understand it.",
        "Perfect, that is enough detail.",
        "Great, that explains it. Thank you.",
        "Thank you, that was helpful.",
    ],
    complaints=[
        "That is too short. Answer in at least two full sentences.",
        "No, too short. Explain it in at least two full sentences, please.",
        "Too short! Give me at least two full sentences.",
        "No, I want to understand it. Answer in two or three full sentences.",
    ],
    hint="Answer in at least two full sentences."))
