"""Simulated users: personas, their problems, what they ask next, and what is counted of a talk."""

import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine, Late, Refuse, say

import main

sys.path.append(str(Path(main.__file__).parent / "examples"))

import allocation
import personas
import problems
import simulated_user as users
from personas import PERSONAS

from judge import TOKENS, correction, lexicon_score

LATER = PERSONAS["drifting"].later
WORDS = "word " * 75

# ---------------------------------------------------------------------------------------- personas


@pytest.mark.parametrize(("check", "reply", "finish", "good"), [
    (personas.is_concise, "word " * 25, "stop", True),
    (personas.is_concise, "word " * 26, "stop", False),
    (personas.is_concise, "Short, but cut", "length", False),
    (personas.is_concise, "", "stop", False),
    (personas.is_natural, "She has 5 + 7 = 12 apples, so 12 is my answer.", "stop", True),
    (personas.is_natural, "First I take 9 - 4 = 5. Then 5 * 2 = 10.", "length", True),
    (personas.is_natural, "It takes 3 steps a day - or 2 * 3 a week.", "stop", True),
    (personas.is_natural, "The sum is\n18.\nThat is all.", "stop", True),
    (personas.is_natural, " \n", "stop", False),
    (personas.is_natural, "The answer is **12**.", "stop", False),
    (personas.is_natural, "The answer is __12__.", "stop", False),
    (personas.is_natural, "Well:\n1. Add the numbers.", "stop", False),
    (personas.is_natural, "  2) Subtract.", "stop", False),
    (personas.is_natural, "So:\n- 5 apples", "stop", False),
    (personas.is_natural, "So:\n * 5 apples", "stop", False),
    (personas.is_natural, "• 5 apples", "stop", False),
    (personas.is_natural, "It is \\boxed{12}.", "stop", False),
    (personas.is_natural, "STEP 1: add.", "stop", False),
    (personas.is_natural, "In step 2 we add.", "stop", False),
    (personas.is_detailed, WORDS, "length", True),
    (personas.is_detailed, WORDS[5:], "stop", False),
    (personas.is_detailed, "", "stop", False),
    (personas.is_warm, "WELL DONE, Ada!", "stop", True),
    (personas.is_warm, "I am proud\nof you.", "stop", True),
    (personas.is_warm, "Don’t worry about the slip.", "stop", True),
    (personas.is_warm, "The answer is 12. Correct.", "stop", False),
    (personas.is_warm, "He keeps up the wonderfulness.", "stop", False),  # whole words only
    (personas.has_two_sentences, "Rain is water. It falls from clouds.", "stop", True),
    (personas.has_two_sentences, "Is it rain? Yes, it is! And it is", "length", True),
    (personas.has_two_sentences, "Rain is water that falls.", "stop", False),
    (personas.has_two_sentences, "Rain is water. It falls from", "length", False),
    (personas.has_two_sentences, "Well. Rain is water. Yes.", "stop", False),
    (personas.has_two_sentences, "1. Rain is 2.5 mm. 2.", "stop", False),
    (personas.has_two_sentences, "", "stop", False),
])
def test_checks_by_hand(check, reply, finish, good):
    """The verdict is all that the reactions rest on; each rule has both sides here."""
    assert check(reply, finish) is good


def test_which_persona_has_which_check():
    assert {n: p.check.__name__ for n, p in PERSONAS.items()} == {
        "concise": "is_concise", "student": "is_natural", "assistant_teacher": "is_detailed",
        "teacher": "is_warm", "drifting": "is_concise"}
    assert LATER.check is personas.has_two_sentences and len(PERSONAS) == 5
    assert all(personas.is_warm(f"Ada, {x}!", "stop") for x in personas.WARM)


@pytest.mark.parametrize("persona", [*PERSONAS.values(), LATER], ids=[*PERSONAS, "later"])
def test_the_lexicon_understands_every_phrase(persona):
    """A phrase scored the wrong way would train the opposite; a complaint must leave a usable
    hint, which is the wish alone, without the complaint."""
    assert persona.pleased and len(persona.complaints) >= 4
    for phrase in persona.pleased:
        assert lexicon_score(phrase) == 1, phrase
    for phrase in [*persona.complaints, "No. " + persona.hint]:
        hint = correction(phrase)
        assert lexicon_score(phrase) == -1, phrase
        assert len(TOKENS.findall(hint)) >= 4 and phrase != hint and phrase.endswith(hint), phrase
    assert correction("No. " + persona.hint) == persona.hint


@pytest.mark.parametrize("name", PERSONAS)
def test_nothing_held_out_is_a_training_question(name):
    p = PERSONAS[name]
    assert len(set(p.questions)) == len(p.questions) >= 100 and len(set(p.held_out)) == 32
    assert not set(p.questions) & set(p.held_out)


# ---------------------------------------------------------------------------------------- problems


def test_problems_are_the_same_every_time():
    """Numbers of different runs compare only on the same list."""
    again = problems.make(problems.TRAIN, 192, seed=0)
    assert again == problems.PROBLEMS != problems.make(problems.TRAIN, 192, seed=1)
    assert problems.PROBLEMS[5].text == (
        "Pablo buys 2 boxes with 8 pencils each and gives 5 pencils away. How many pencils are "
        "left?")
    assert problems.PROBLEMS[5].answer == 11


def shape(text):
    """The text without numbers and names: what is left is the template."""
    text = re.sub(r"\d+|\{\w\}", "#", text)
    return re.sub("|".join([*problems.NAMES, r"\{who\}"]), "@", text)


def test_held_out_templates_are_others():
    """The same text with other numbers would measure memory."""
    train, held_out = ({shape(p.text) for p in many}
                       for many in (problems.PROBLEMS, problems.HELD_OUT_PROBLEMS))
    assert not train & held_out
    assert train == {shape(t) for t, _ in problems.TRAIN} and len(train) == 16
    assert held_out == {shape(t) for t, _ in problems.HELD_OUT} and len(held_out) == 8


def test_answers_are_right():
    """Worked again from the written solution, which uses every number of the text and no other."""
    for problem in problems.PROBLEMS + problems.HELD_OUT_PROBLEMS:
        results, given = [], [int(x) for x in re.findall(r"\d+", problem.text)]
        for x, op, y, result in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.solution()):
            assert eval(f"{x} {op} {y}") == int(result) > 0, problem
            for number in (int(x), int(y)):
                (given if number in given else results).remove(number)
            results.append(int(result))
        assert results == [problem.answer] and not given, problem
        assert problem.solution().endswith(f"= {problem.answer}. The answer is {problem.answer}.")
        slip = problem.answer + 3
        assert problem.solution(3).endswith(f"= {slip}. The answer is {slip}.")


def test_work_refuses_what_is_no_whole_number():
    steps = ["a - b", "r1 / k"]
    assert problems.work(steps, {"a": 9, "b": 3, "k": 2}) == ((9, "-", 3, 6), (6, "/", 2, 3))
    assert problems.work(steps, {"a": 9, "b": 4, "k": 2}) is None
    assert problems.work(steps, {"a": 4, "b": 4, "k": 2}) is None


def test_difficulty_grows_with_steps_and_numbers():
    by_hand = {0: 2, 12: 5, 16: 3, 32: 4, 44: 7}  # template 0 and 12 (4 steps), levels 1, 2, 3
    assert {i: problems.PROBLEMS[i].difficulty for i in by_hand} == by_hand
    student = PERSONAS["student"]
    assert student.difficulty[student.questions[44]] == 7


def test_graders_see_right_and_wrong_solutions():
    """Of every template: else the template alone would tell whether the solution is right."""
    kinds = {}
    for problem, question in zip(problems.PROBLEMS, PERSONAS["teacher"].questions, strict=True):
        assert problem.text in question
        right = question.endswith(problem.solution())
        assert right or f" = {problem.answer}." not in question
        kinds.setdefault(shape(problem.text), set()).add(right)
    assert all(kind == {True, False} for kind in kinds.values())
    assert "Solution" not in PERSONAS["student"].questions[0]


# -------------------------------------------------------------------------------------- allocation


def history(**known):
    """history(a='+-') -> questions with those tries behind them"""
    h = allocation.History(list(known), seed=0)
    for question, tries in known.items():
        for one in tries:
            h.ask(question)
            h.saw(question, one == "+")
    return h


def talk(rule, h, asks, good):
    """Ask one at a time; good(question) is the reply's verdict -> the questions asked."""
    asked = []
    for question in itertools.islice(rule(h), asks):
        h.ask(question)
        h.saw(question, good(question))
        asked.append(question)
    return asked


def test_default_order_and_reactions_are_pinned(tmp_path):
    """Runs of different versions compare only if the same seed asks and says the same."""
    args = users.parse_args(["--run-dir", str(tmp_path)])
    shared = users.Shared(args, PERSONAS[args.persona])
    assert [shared.next_question() for _ in range(3)] == [
        (0, "How can I tell whether an e-mail is a scam?"), (1, "How old can trees get?"),
        (2, "How do rainbows form?")]
    assert [users.reaction(shared, n, "", "", n % 2 == 1) for n in range(4)] == [
        "That is too long. Answer briefly, in one short sentence.", "Perfect, thank you!",
        "No, too long. Just answer in one short sentence.", "Thank you, short and clear."]


def test_uniform_asks_all_in_every_lap():
    asked = talk(allocation.uniform, history(a="", b="", c=""), 12, lambda q: q == "a")
    laps = [asked[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(lap) == ["a", "b", "c"] for lap in laps) and len(set(map(tuple, laps))) > 1


def test_curriculum_goes_from_easy_to_hard():
    h = history(a="", b="", c="", d="")
    h.difficulty = {"a": 3, "b": 1, "c": 2, "d": 4}
    assert talk(allocation.curriculum, h, 8, lambda q: False) == list("bcad" * 2)


def test_curriculum_without_difficulty_follows_pass_rates():
    """The first lap knows nothing and is uniform's; the second has seen who passes."""
    order = talk(allocation.uniform, history(a="", b="", c=""), 3, lambda q: False)
    asked = talk(allocation.curriculum, history(a="", b="", c=""), 6, lambda q: q == order[2])
    assert asked == [*order, order[2], order[0], order[1]] or \
        asked == [*order, order[2], order[1], order[0]]


def test_pass_rates_by_hand():
    h = history(a="", b="+", c="--+", d="-" * 20 + "+" * 8)
    assert [h.beta(q) for q in "abcd"] == [(1, 1), (2, 1), (2, 3), (9, 1)]  # d: the last 8 only
    assert [h.hardness(q) for q in "ab"] == [1 / 2, 1 / 3]


def test_boundary_prefers_rates_near_one_half():
    """'half' must win against always and never, and the unknown must still be tried."""
    h = history(always="+" * 8, half="+-" * 4, never="-" * 8, new="")
    counts = Counter(itertools.islice(allocation.boundary(h), 400))
    assert counts["half"] > counts["new"] > max(counts["always"], counts["never"])
    assert counts["half"] > 200 and counts["new"] > 20


def test_reinforce_ada_asks_again_until_a_success_or_the_cap():
    """hard never passes: CAP times in its lap, and CAP more when its turn comes again. slow passes
    at its third try; easy at once."""
    tries = Counter()

    def good(q):
        tries[q] += 1
        return q == "easy" or q == "slow" and tries[q] == 3
    asked = talk(allocation.reinforce_ada, history(hard="", easy="", slow=""), 8, good)
    assert Counter(asked) == {"hard": 4, "slow": 3, "easy": 1}
    assert [q for q, _ in itertools.groupby(asked)] == list(dict.fromkeys(asked))  # in a row
    assert allocation.CAP == 4

    stuck = talk(allocation.reinforce_ada, history(hard="", easy=""), 10, lambda q: q == "easy")
    assert Counter(stuck) == {"hard": 8, "easy": 2}


def test_reinforce_ada_waits_for_the_reply():
    """With several users a question whose reply is still to come is not asked a second time, and
    one whose request failed has not failed."""
    h = history(a="-", b="", c="")
    rule = allocation.reinforce_ada(h)
    h.ask("a")
    assert h.failing() is None and next(rule) in "abc"
    h.saw("a", None)
    assert h.failing() == "a" and h.failed["a"] == 1 and next(rule) == "a"
    h.ask("a")
    h.saw("a", True)
    assert h.failing() is None


def test_every_rule_goes_on_for_ever():
    for name, rule in allocation.ALLOCATIONS.items():
        asked = talk(rule, history(a="", b=""), 50, lambda q: q == "a")
        assert len(asked) == 50 and set(asked) == {"a", "b"}, name
    assert list(allocation.ALLOCATIONS) == ["uniform", "curriculum", "boundary", "reinforce-ada"]


# ------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize(("goods", "sessions"), [
    ("", None), ("++", None), ("+++", 3), ("+-++-+++", 8), ("-++-++", None), ("++.+", 4),
    ("-+++" + "+" * 5, 4), ("-.+.+.+", 7)])
def test_sessions_to_three_by_hand(goods, sessions):
    """The first streak of three counts. '.': no reply, so no row; it breaks no streak."""
    rows = [{"n": n, "good": c == "+"} for n, c in enumerate(goods) if c != "."]
    assert users.sessions_to_three(rows) == sessions


def test_sessions_to_three_goes_by_question_and_not_by_reply():
    rows = [{"n": n, "good": n != 1} for n in (0, 2, 3, 1, 4)]  # the reply to 1 came late
    assert users.sessions_to_three(rows) == 5
    assert users.sessions_to_three([r for r in rows if r["n"] >= 2], first=2) == 3


class Talk:
    """A whole run of the users' script in this process, against the real proxy."""

    def __init__(self, server, monkeypatch, *flags, persona="concise"):
        folder = server.path.parent
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        short = replace(PERSONAS[persona], held_out=PERSONAS[persona].held_out[:2])
        monkeypatch.setitem(PERSONAS, persona, short)
        args = users.parse_args([
            "--base-url", f"http://127.0.0.1:{server.cfg.port}/v1", "--run-dir", str(folder),
            "--persona", persona, "--users", "2", "--held-out-samples", "1", "--no-wait", *flags])
        self.server, self.shared = server, users.Shared(args, short)
        users.run(self.shared)
        users.write_report(self.shared)
        users.say_result(self.shared)
        self.report = json.loads((folder / "users.json").read_text())

    def reactions(self):
        """{n: what the user said to the first reply}"""
        turns = [t for t in self.server.turns() if t.next_state]
        return {int(t.session.rsplit("-", 1)[1]): t.next_state[-1]["content"] for t in turns}


SHORT, LONG = "Rain is water that falls.", "Rain is water. It falls from clouds. " * 5


def test_a_talk_is_recorded(server, engine, monkeypatch, capsys):
    """Questions whose reply is too long are bad, all others good, and the record says which."""
    asked = PERSONAS["concise"].questions
    order = talk(allocation.uniform, allocation.History(asked), 8, lambda q: True)
    engine.script = lambda body: say(
        LONG if body["messages"][0]["content"] in (order[0], order[2]) else SHORT)
    server.policy.version = 3
    report = Talk(server, monkeypatch, "--max-turns", "8").report
    assert [(r["n"], r["good"], r["words"], r["version"]) for r in report["talk"]] == [
        (n, n not in (0, 2), 35 if n in (0, 2) else 5, 3) for n in range(8)]
    turns = {t.id: t for t in server.turns()}
    assert [turns[r["id"]].session for r in report["talk"]] == [f"concise-0-{n}" for n in range(8)]
    assert report["sessions_to_three"] == 6 and report["drift"] is None
    assert report["allocation"] == "uniform" and "worded" not in report
    assert (report["held_out"]["before"], report["held_out"]["after"]) == (1.0, 1.0)
    assert not [key for key in report["held_out"] if "later" in key]
    assert "three good first replies in a row: 6" in capsys.readouterr().out


def test_a_failed_request_leaves_no_row(server, engine, monkeypatch):
    refused = [Refuse(500, {"error": {"message": "no"}})]
    engine.script = lambda body: refused if "rainbows" in str(body) else say(SHORT)
    run = Talk(server, monkeypatch, "--max-turns", "4", "--allocation", "reinforce-ada")
    assert [r["n"] for r in run.report["talk"]] == [0, 1, 3] and run.report["asked"] == 4
    assert run.report["requests"]["failed"] == 1 and run.report["sessions_to_three"] == 4
    assert not any(run.shared.history.waiting.values())


def test_drift(server, engine, monkeypatch, capsys):
    """One short sentence pleases until question 3 and displeases from then on."""
    engine.script = lambda body: say(SHORT)
    users.prompt_ids.cache_clear()
    run = Talk(server, monkeypatch, "--max-turns", "7", "--score-url", engine.url,
               "--score-model", "base", persona="drifting")
    report, held_out = run.report, run.report["held_out"]
    assert [r["good"] for r in report["talk"]] == [True] * 3 + [False] * 4
    first = PERSONAS["drifting"]
    for n, said in run.reactions().items():
        assert said in (first.pleased if n < 3 else LATER.complaints)
    assert len(run.reactions()) == 7
    assert report["drift"] == {"at": 3, "came": True, "from": first.hint, "to": LATER.hint,
                               "sessions_to_three": None}
    assert report["sessions_to_three"] == 3
    assert [held_out[k] for k in ("before", "after", "before_later", "after_later")] == [1, 1, 0, 0]
    hinted = [t.messages[0]["content"] for t in server.turns() if "held-out-hinted" in t.session]
    assert sum(x.endswith(first.hint) for x in hinted) == 2
    assert sum(x.endswith(LATER.hint) for x in hinted) == 2
    assert {k for k in held_out if "nll" in k and held_out[k] == 1.0} == {
        f"nll_{phase}{later}" for phase in ("before", "after", "hinted_base")
        for later in ("", "_later")}
    scored = {body["messages"][0]["content"] for path, body in engine.calls if path == "/tokenize"}
    assert scored == {users.with_hint(q, hint) for q in first.held_out[:2]
                      for hint in (first.hint, LATER.hint)}  # each wish under its own hinted base
    assert "result after_later: 0 of 2 good" in capsys.readouterr().out


def test_drift_counts_anew(server, engine, monkeypatch):
    """Two sentences that are also concise: good under both wishes, each with a count of its own."""
    engine.script = lambda body: say("Rain is water. It falls from clouds.")
    run = Talk(server, monkeypatch, "--max-turns", "8", "--drift-at", "5", persona="drifting")
    assert run.report["sessions_to_three"] == run.report["drift"]["sessions_to_three"] == 3
    assert run.reactions()[4] in PERSONAS["drifting"].pleased
    assert run.reactions()[5] in LATER.pleased


def test_a_change_that_did_not_come_is_said(server, engine, monkeypatch):
    """A run may end by --steps before it."""
    engine.script = lambda body: say(SHORT)
    report = Talk(server, monkeypatch, "--max-turns", "2", "--drift-at", "1",
                  persona="drifting").report
    assert report["drift"]["came"] is True
    shared = users.Shared(users.parse_args(["--run-dir", "x", "--persona", "drifting"]),
                          PERSONAS["drifting"])
    shared.asked = 150  # questions 0 to 149: still the first wish
    users.sum_up(shared)
    assert shared.report["drift"]["at"] == 150 and shared.report["drift"]["came"] is False


# ----------------------------------------------------------------------- a model words the reaction


def worded_talk(server, monkeypatch, script, persona="concise", stop=False):
    """A talk of four questions beside a user model -> (the talk, the model's requests)"""
    with FakeEngine() as model:
        model.script = script
        if stop:
            model.server.shutdown()
            model.server.server_close()
        run = Talk(server, monkeypatch, "--max-turns", "4", "--user-url", f"{model.url}/v1",
                   "--user-model", "base", persona=persona)
        return run, model.requests


def test_a_model_words_the_reaction(server, engine, monkeypatch):
    """It is told wish, reply and the rule's verdict; what it thinks aloud stays unsaid."""
    asked = PERSONAS["concise"].questions
    order = talk(allocation.uniform, allocation.History(asked), 4, lambda q: True)
    engine.script = lambda body: say(
        LONG if body["messages"][0]["content"] == order[1] else SHORT)
    run, requests = worded_talk(server, monkeypatch, lambda body: say(
        "<think>hm</think>\nAlas." if "is not content" in str(body) else "Fine."))
    assert run.reactions() == {0: "Fine.", 1: "Alas.", 2: "Fine.", 3: "Fine."}
    assert run.report["worded"] == {"model": 4, "canned": 0}
    (told,) = [r["messages"] for r in requests if "is not content" in r["messages"][0]["content"]]
    assert PERSONAS["concise"].hint in told[0]["content"] and told[0]["role"] == "system"
    assert order[1] in told[1]["content"] and LONG.strip() in told[1]["content"]
    assert [r["good"] for r in run.report["talk"]] == [True, False, True, True]


@pytest.mark.parametrize(("script", "reason"), [
    (lambda body: [Refuse(500, {"error": {"message": "no"}})], "InternalServerError"),
    (lambda body: [Refuse(200, "not JSON at all")], "AttributeError"),
    (lambda body: [Refuse(200, {"choices": []})], "IndexError"),
    (lambda body: [Refuse(200, {"error": "busy"})], "TypeError"),
    (lambda body: say("  "), "an empty message"),
    (lambda body: say("I am not", finish="length"), "cut by the limit"),
    (lambda body: [Late(3), *say("Too late.")], "APITimeoutError"),
    (None, "APIConnectionError"),
], ids=["500", "text", "no-choice", "no-choices", "empty", "cut", "late", "gone"])
def test_a_model_that_fails_is_replaced_and_counted(server, engine, monkeypatch, capsys, script,
                                                    reason):
    """The talk goes on in canned words, and the count shows that the model said nothing."""
    monkeypatch.setattr(users, "USER_TIMEOUT", 0.2 if reason == "APITimeoutError" else 20)
    engine.script = lambda body: say(SHORT)
    run, _ = worded_talk(server, monkeypatch, script, stop=script is None)
    assert set(run.reactions()) == {0, 1, 2, 3}
    assert set(run.reactions().values()) <= set(PERSONAS["concise"].pleased)
    assert run.report["worded"] == {"model": 0, "canned": 4}
    assert run.report["requests"]["failed"] == 0  # those count what the policy was asked
    shown = capsys.readouterr()
    assert shown.err.count("canned reaction") == 4 and reason in shown.err
    assert "reactions worded by: model 0, canned 4" in shown.out


def test_the_model_gets_its_own_key(monkeypatch):
    monkeypatch.setenv("USER_KEY", "user-secret")
    monkeypatch.setenv("OPENCLAW_API_KEY", "proxy-secret")
    args = users.parse_args(["--run-dir", "x", "--user-url", "http://x/v1", "--user-model", "m"])
    shared = users.Shared(args, PERSONAS["concise"])
    assert (shared.client.api_key, shared.user_llm.api_key) == ("proxy-secret", "user-secret")
    assert "secret" not in json.dumps(shared.report)
    monkeypatch.delenv("USER_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "another")  # the client would take it if it got none
    assert users.Shared(args, PERSONAS["concise"]).user_llm.api_key == "none"
    args.user_url = ""
    assert not users.Shared(args, PERSONAS["concise"]).user_llm


# --------------------------------------------------------------------------------- flags, and main


@pytest.mark.parametrize(("flags", "words"), [
    (["--persona", "nobody"], "choose one of concise, student, assistant_teacher, teacher"),
    (["--allocation", "best"], "choose one of uniform, curriculum"),
    (["--persona", "assistant_teacher", "--max-tokens", "96"], "use at least 128"),
    (["--user-url", "http://x/v1"], "belong together"),
    (["--user-model", "m"], "belong together"),
    (["--drift-at", "5"], "concise does not change its wish"),
    (["--persona", "drifting", "--max-turns", "0"], "needs --drift-at or --max-turns"),
    (["--persona", "drifting", "--drift-at", "-1"], "needs --drift-at"),
    (["--persona", "drifting", "--max-turns", "9", "--drift-at", "9"], "must be below"),
])
def test_wrong_flags_are_refused_with_a_sentence(capsys, flags, words):
    with pytest.raises(SystemExit):
        users.parse_args(["--run-dir", "x", *flags])
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("flags", [
    ["--persona", "assistant_teacher", "--max-tokens", "128"],
    ["--persona", "assistant_teacher", "--max-tokens", "0"],  # not known
    ["--persona", "drifting", "--max-turns", "0", "--drift-at", "20"]])
def test_right_flags_are_taken(flags):
    users.parse_args(["--run-dir", "x", *flags])


def test_a_change_comes_half_way_by_default():
    args = users.parse_args(["--run-dir", "x", "--persona", "drifting", "--max-turns", "41"])
    assert args.drift_at == 20


@pytest.fixture
def parse(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return main.parse


def test_main_passes_all_of_it_on(parse, tmp_path):
    """A knob that main swallowed would be an ablation of nothing."""
    cfg = parse(["--simulate", "drifting", "--max-turns", "40", "--drift-at", "7", "--allocation",
                 "boundary", "--user-url", "http://x/v1", "--user-model", "m", "--seed", "5",
                 "--max-tokens", "64", "--users", "3", "--held-out", "1", "--lockstep",
                 "--run-dir", str(tmp_path)])
    cfg.engine_url = "http://engine"
    command = main.users_command(SimpleNamespace(cfg=cfg, run_dir=tmp_path))
    args = vars(users.parse_args([str(x) for x in command[2:]]))
    assert args | {
        "persona": "drifting", "max_turns": 40, "drift_at": 7, "allocation": "boundary",
        "user_url": "http://x/v1", "user_model": "m", "seed": 5, "max_tokens": 64, "users": 3,
        "held_out_samples": 1, "lockstep": True, "run_dir": str(tmp_path), "extra": None,
        "score_url": "http://engine", "check": False, "no_wait": False} == args


def test_main_lets_the_script_check(parse):
    """Before the engine starts, with the script's own sentence."""
    main.check_persona(parse(["--simulate", "teacher", "--max-turns", "9", "--allocation",
                              "reinforce-ada"]))
    with pytest.raises(main.Problem, match="--max-tokens 96 cuts off: use at least 128"):
        main.check_persona(parse(["--simulate", "assistant_teacher", "--max-turns", "9"]))


EXTRA = """
from simulated_user import ALLOCATIONS, PERSONAS, Persona
PERSONAS["shouter"] = Persona(
    questions=["What is rust?"], held_out=["What is snow?"],
    check=lambda reply, finish_reason: reply.isupper(),
    pleased=["Thanks, LOUD enough."], complaints=["No, too quiet. Answer in capital letters."],
    hint="Answer in capital letters.")
ALLOCATIONS["first"] = lambda history: iter(history.questions[:1] * 9)
"""


def test_a_file_adds_a_persona_and_a_rule(parse, tmp_path):
    """The script runs as __main__: the rows must land in the tables that it reads."""
    (tmp_path / "extra.py").write_text(EXTRA)
    flags = ["--simulate", "shouter", "--steps", "1", "--extra", str(tmp_path / "extra.py")]
    main.check_persona(parse([*flags, "--allocation", "first"]))
    with pytest.raises(main.Problem, match="choose one of uniform.*reinforce-ada, first$"):
        main.check_persona(parse([*flags, "--allocation", "last"]))


@pytest.mark.parametrize("flags", [["--allocation", "boundary"], ["--drift-at", "5"],
                                   ["--user-url", "http://x/v1"]])
def test_live_users_choose_themselves(parse, flags):
    with pytest.raises(main.Problem, match="of --simulate only"):
        parse(flags)
    parse([*flags, "--simulate", "concise", "--steps", "1"])


def test_help_lists_the_personas():
    text = main.Config.__dataclass_fields__["simulate"].metadata["help"]
    assert text.endswith(", ".join(PERSONAS))
    assert main.Config.__dataclass_fields__["allocation"].metadata["help"].endswith(
        ", ".join(allocation.ALLOCATIONS))


def test_summary_has_the_count_of_sessions(parse, server, monkeypatch):
    cfg = parse(["--run-dir", str(server.path.parent), "--simulate", "concise", "--steps", "1"])
    (server.path.parent / "users.json").write_text(json.dumps({"sessions_to_three": 17}))
    monkeypatch.setattr(main, "show_end", lambda *_: None)
    main.finish(SimpleNamespace(
        cfg=cfg, log=server.log, run_dir=server.path.parent, phase=lambda name: None, phases={},
        ended=True, requests={"failed": 0}, policy=server.policy,
        line=SimpleNamespace(updates=0), started=0))
    summary = json.loads((server.path.parent / "summary.json").read_text())
    assert summary["sessions_to_three"] == 17 and summary["held_out"] is None
