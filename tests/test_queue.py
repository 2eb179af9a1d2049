"""The line between judging and training: order, age, overload, lease and commit."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing.managers import BaseManager
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import main
from judge import SampleQueue
from proxy import Policy, Turn, TurnLog, load_turns

ME = threading.get_ident()  # the owner of a lease taken in this thread


class Line(SampleQueue):
    """A SampleQueue with a clock that stands still, and turns made on the spot."""

    def __init__(self, path=os.devnull, **cfg):
        base = dict(batch_size=2, steps=0, sync_every=1, max_staleness=4, schedule="greedy",
                    window=4, max_wait=0, at_least_one=True)
        self.now, self.made = 100.0, {}
        cfg = SimpleNamespace(**base | cfg)
        super().__init__(cfg, TurnLog(path), Policy("base"), lambda: self.now)

    def make(self, name, **fields):
        turn = self.made[name] = Turn(name, fields.pop("session", "s"), **fields)
        self.log.write(turn, "reply")
        return turn

    def add(self, *names, **fields):
        """Turns that enter judging."""
        return [self.enter(self.make(name, **fields)) for name in names]

    def judge(self, *names, reason=None, score=1):
        for name in names:
            self.now += 1
            turn = self.made[name]
            turn.score, turn.votes = score, [score]
            self.resolve(turn, reason)

    def got(self, n=2):
        """Ids of a lease."""
        return [t["id"] for t in self.lease(n)["turns"]]

    def done(self, ids, step=None):
        self.commit(self.updates + 1 if step is None else step, dict.fromkeys(ids, "trained"))

    def fates(self):
        return {name: t.fate for name, t in self.made.items()}


# -------------------------------------------------------------------------------------------- order


def test_greedy_trains_in_the_order_of_judging():
    """The original's way: whoever is judged first; an unjudged head holds nobody up."""
    line = Line()
    line.add("a", "b", "c", "d")
    line.judge("d")
    assert line.got() == [], "no batch yet, and the lone sample is not lost"
    line.judge("b", "c")
    assert line.got() == ["d", "b"]


def test_fifo_trains_in_the_order_of_entering():
    """An unresolved turn at the head holds up all behind it; a dropped one closes up."""
    line = Line(schedule="fifo")
    line.add("a", "b", "c", "d")
    line.judge("d", "c", "b")
    assert line.got() == []
    line.judge("a", reason="score_0")
    assert line.got() == ["b", "c"]


def test_windowed_takes_resolved_turns_among_the_first_places():
    """W = 3: the fourth place waits until one before it is gone; leased places do not count."""
    line = Line(schedule="windowed", window=3)
    line.add("a", "b", "c", "d", "e")
    line.judge("d", "c")
    assert line.got() == [], "only c is within the window"
    line.judge("a", reason="no_hint")
    assert line.got() == ["c", "d"]
    line.judge("b", "e")
    assert line.got() == ["b", "e"], "leased places are not in the way"


# ------------------------------------------------------------------------------ age, overload, wait


def test_age_is_checked_at_dequeue():
    """G1: limit 1, version 5: turns of versions 5 and 4 are kept, 3 is dropped, though all were
    young when they came in."""
    line = Line(max_staleness=1)
    for name, version in (("old", 3), ("edge", 4), ("new", 5)):
        line.add(name, version_start=version)
    line.judge("old", "edge", "new")
    line.updates = 5
    assert line.got() == ["edge", "new"]
    assert line.fates() == {"old": "stale", "edge": None, "new": None}


@pytest.mark.parametrize(("limit", "kept"), [(0, ["new"]), (-1, ["old", "new"])])
def test_staleness_limits_at_the_ends(limit, kept):
    """0 trains only turns of the served version; -1 trains any age."""
    line = Line(max_staleness=limit)
    line.add("old", version_start=0)
    line.add("new", version_start=7)
    line.judge("old", "new")
    line.updates = 7
    assert line.got(len(kept)) == kept


def test_stale_turns_are_dropped_only_when_judged_and_free():
    """A turn in judging is left to its judge, a leased one to the trainer that has it."""
    line = Line(max_staleness=0)
    line.add("leased", "judging")
    line.judge("leased")
    assert line.got(1) == ["leased"]
    line.updates = 3
    assert line.got(1) == [] and line.fates() == {"leased": None, "judging": None}
    line.release(ME)
    line.judge("judging")
    assert line.got(1) == [] and set(line.fates().values()) == {"stale"}


def test_overload():
    """Once (eta + 1) batches are judging or waiting, further turns are dropped as `overload`;
    places that are leased do not count."""
    line = Line(max_staleness=1)
    assert line.add("a", "b", "c", "d", "e") == [True] * 4 + [False]
    assert line.full() and line.fates()["e"] == "overload"
    line.judge("a", "b")
    assert line.full()
    assert line.got() == ["a", "b"] and not line.full()
    assert line.add("f") == [True]
    assert not Line(max_staleness=-1, batch_size=1).full()


def test_max_wait_trains_a_smaller_batch():
    """After S seconds without a new sample the batch is trained as it is; an empty one is skipped;
    a sample that comes starts the wait anew, and so does a step."""
    line = Line(max_wait=10, batch_size=3)
    assert line.quiet() == 0 and line.got(3) == []
    line.add("a", "b", "c", "d")
    line.now += 50
    assert line.got(3) == [], "nothing to train: skipped"
    line.judge("a")
    line.now += 9
    line.judge("b")
    line.now += 10
    assert line.got(3) == []
    line.now += 1
    assert line.got(3) == ["a", "b"]
    line.done(["a", "b"])
    line.judge("c")
    assert line.quiet() == 0 and line.got(3) == []


# --------------------------------------------------------------------------------- lease and commit


def test_lease_commit_release():
    """G5: a lease is held until its commit; after a release the same turns come again in the same
    order, and turns of others stay where they are."""
    line = Line()
    line.add("a", "b", "c", "d", "e")
    line.judge("a", "b", "c", "d", "e")
    assert line.got() == ["a", "b"]
    assert line.depths() == {"judging": 0, "ready": 3, "leased": 2}
    line.release(ME + 1)
    assert line.got() == ["c", "d"], "a lease is nobody else's"
    line.release(ME)
    assert line.got() == ["a", "b"] and line.fates()["a"] is None
    line.done(["a", "b"])
    line.release(ME)
    assert line.got() == ["c", "d"]
    assert line.fates() == dict(a="trained", b="trained", c=None, d=None, e=None)
    assert line.made["a"].step == line.updates == 1


def test_commit_may_drop_turns():
    """A turn of the lease that could not be trained gets its own reason."""
    line = Line()
    line.add("a", "b")
    line.judge("a", "b")
    line.got()
    line.commit(1, {"a": "trained", "b": "too_long"})
    assert line.fates() == {"a": "trained", "b": "too_long"} and not line.places


def test_stop_leases_nothing():
    """When main closes the line the trainer is told to stop; what waits stays for close_all."""
    line = Line()
    line.add("a", "b")
    line.judge("a", "b")
    line.closing = True
    assert line.lease(2) == {"turns": [], "window": None, "stop": True}
    line.log.close_all("run_ended")
    assert line.fates() == {"a": "run_ended", "b": "run_ended"}


def test_window_counts_every_judged_turn_once():
    """reward_mean is over all judged turns since the last step, dropped ones too. Those judged
    between lease and commit belong to the next step. Once a bug: commit wiped them unseen."""
    line = Line()
    line.add("a", "b", "c", "d", "e", "f")
    line.judge("a", "b", score=1)
    line.judge("c", reason="score_0", score=0)
    line.judge("d", reason="unscored", score=None)
    window = line.lease(2)["window"]
    assert (window["judged"], window["reward_mean"]) == (4, 2 / 3)
    assert window["dropped"] == {"score_0": 1, "unscored": 1}
    assert window["votes"] == {"plus": 2, "zero": 1, "minus": 0, "invalid": 1}
    line.judge("e", score=-1)
    line.judge("f", reason="score_0", score=0)
    line.done(["a", "b"])
    assert line.window()["judged"] == 2 and line.window()["reward_mean"] == -0.5
    assert line.window()["dropped"] == {"score_0": 1}, "and 'trained' is no drop"


def test_window_survives_a_release():
    """Numbers of a lease that died are shown with the next one, with what came since."""
    line = Line()
    line.add("a", "b", "c")
    line.judge("a", "b")
    line.got()
    line.judge("c", reason="score_0", score=0)
    line.release(ME)
    window = line.lease(2)["window"]
    assert window["judged"] == 3 and window["dropped"] == {"score_0": 1}
    line.done(["a", "b"])
    assert line.window()["judged"] == 0 and line.window()["dropped"] == {}


def test_at_least_one_knows_effective_sessions():
    """--at-least-one asks whether a turn of the session judged before gave a sample; a dropped one
    or another session does not count."""
    line = Line()
    line.add("a", "b", session="s")
    line.add("c", session="other")
    line.judge("a", reason="score_0")
    assert line.effective == set()
    line.judge("b")
    assert line.effective == {"s"}


def test_at_least_one_is_one_also_for_turns_judged_at_once():
    """Two turns of a session are judged at the same time, both as the first: one is kept. Once a
    bug: both were."""
    line = Line()
    line.add("a", "b", session="s", r=0)
    line.add("c", session="other", r=0)
    line.judge("a", "b", "c", score=0)
    assert line.fates() == {"a": None, "b": "score_0", "c": None}


def test_feedback_is_accepted_until_the_lease():
    """A judged turn goes back to judging with its feedback; a leased, trained or unknown one is too
    late; a turn judged twice is counted once."""
    line = Line()
    line.add("a", "b", "c")
    line.judge("a", "b")
    place = line.reopen("a", {"score": -1})
    assert place["turn"].feedback == {"score": -1} and not place["again"]
    assert line.got() == [] and line.depths() == {"judging": 2, "ready": 1, "leased": 0}
    line.judge("a")
    assert line.window()["judged"] == 2
    assert line.got() == ["b", "a"]
    assert line.reopen("a", {"score": 1}) is None and line.reopen("unknown", {}) is None
    line.judge("a"), line.judge("b", reason="late")
    assert line.depths()["leased"] == 2, "a late judge cannot take a leased turn away"


# ----------------------------------------------------------------------------- random interleavings


class AnyOrder(RuleBasedStateMachine):
    """Users, judges, a trainer that dies and feedback, in any order. `fate` is what each turn must
    have become; `where` is our own, naive, account of the line."""

    @initialize(schedule=st.sampled_from(["greedy", "fifo", "windowed"]), limit=st.integers(-1, 2),
                max_wait=st.sampled_from([0, 3]))
    def begin(self, schedule, limit, max_wait):
        self.line = Line(schedule=schedule, window=3, max_staleness=limit, max_wait=max_wait)
        self.where = {}  # id -> judging | ready | leased, in the order of entering
        self.fate, self.ready_at, self.n, self.again = {}, {}, 0, set()

    def those(self, *states):
        return [i for i, state in self.where.items() if state in states]

    def gone(self, i, fate):
        assert i not in self.fate, "one fate each"
        self.fate[i] = fate
        del self.where[i]

    @rule(behind=st.integers(0, 2))
    def enter(self, behind):
        self.n, name, limit = self.n + 1, f"t{self.n}", self.line.cfg.max_staleness
        full = limit >= 0 and len(self.those("judging", "ready")) >= 2 * (limit + 1)
        self.where[name] = "judging"
        entered = self.line.add(name, version_start=max(0, self.line.updates - behind))
        assert entered == [not full]
        if full:
            self.gone(name, "overload")

    @precondition(lambda self: self.those("judging"))
    @rule(data=st.data(), reason=st.sampled_from([None, None, "score_0", "no_hint"]))
    def judged(self, data, reason):
        i = data.draw(st.sampled_from(self.those("judging")))
        self.line.judge(i, reason=reason)
        if i in self.again:
            self.again.remove(i)
        elif reason:
            self.gone(i, reason)
        else:
            self.where[i], self.ready_at[i] = "ready", self.line.now

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def feedback(self, data):
        i = data.draw(st.sampled_from(list(self.where)))
        accepted = self.line.reopen(i, {"score": 1}) is not None
        assert accepted == (self.where[i] != "leased")
        if accepted:
            if self.where[i] == "judging":
                self.again.add(i)
            self.where[i] = "judging"

    def expected(self, n=2):
        """The turns that the order rules allow, from our own account."""
        free, cfg = self.those("judging", "ready"), self.line.cfg
        ready = [i for i in free if self.where[i] == "ready"]
        if cfg.schedule == "greedy":
            return sorted(ready, key=self.ready_at.get)[:n]
        if cfg.schedule == "windowed":
            return [i for i in free[:3] if i in ready][:n]
        head = next((k for k, i in enumerate(free) if i not in ready), len(free))
        return free[:min(head, n)]

    @precondition(lambda self: not self.those("leased"))
    @rule()
    def lease(self):
        limit = self.line.cfg.max_staleness
        for i in self.those("ready"):
            if 0 <= limit < self.line.updates - self.line.made[i].version_start:
                self.gone(i, "stale")
        want, wait = self.expected(), self.line.cfg.max_wait
        if len(want) < 2 and not (wait and self.line.quiet() > wait):
            want = []
        assert self.line.got() == want
        self.where |= dict.fromkeys(want, "leased")

    @precondition(lambda self: self.those("leased"))
    @rule()
    def commit(self):
        ids = self.those("leased")
        self.line.done(ids)
        for i in ids:
            self.gone(i, "trained")

    @precondition(lambda self: self.those("leased"))
    @rule()
    def crash(self):
        self.where |= dict.fromkeys(self.those("leased"), "ready")
        self.line.release(ME)

    @rule(seconds=st.integers(1, 5))
    def tick(self, seconds):
        self.line.now += seconds

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "line"):
            return
        states = Counter(self.where.values())
        assert self.line.depths() == {k: states[k] for k in ("judging", "ready", "leased")}
        assert {i: t.fate for i, t in self.line.made.items() if t.fate} == self.fate

    def teardown(self):
        if not hasattr(self, "line"):
            return
        self.line.log.close_all("run_ended")
        self.line.log.file.close()
        assert sum(self.line.log.fates.values()) == self.line.log.turns == self.n
        assert all(t.fate for t in self.line.made.values())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.__doc__ = "G5: no turn lost, none trained twice, one fate each; order rules hold."
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None,
                                 database=None, suppress_health_check=[HealthCheck.too_slow])


# --------------------------------------------------------------------- over the real manager socket


def trainer(env, do):
    """A process with the trainer's link to main: leases 4, says so, then waits or commits."""
    code = f"sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_queue as t; t.{do}()"
    return subprocess.Popen([sys.executable, "-c", f"import sys; {code}"], env=os.environ | env,
                            stdout=subprocess.PIPE, text=True, cwd=main.HERE)


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def connected():
    BaseManager.register("queue")
    manager = BaseManager(os.environ["OPENCLAW_QUEUE"], bytes.fromhex(os.environ["OPENCLAW_KEY"]))
    manager.connect()
    return manager.queue()


def lease_and_hang():
    queue = connected()
    print(json.dumps([t["id"] for t in queue.lease(4)["turns"]]), flush=True)
    signal.pause()


def commit_and_hang():
    queue = connected()
    queue.commit(1, {t["id"]: "trained" for t in queue.lease(4)["turns"]})
    print(json.dumps([t["id"] for t in queue.lease(4)["turns"]]), flush=True)
    signal.pause()


def train_all():
    queue, step = connected(), 1
    while turns := queue.lease(4)["turns"]:
        step += 1
        queue.commit(step, {t["id"]: "trained" for t in turns})
    print(json.dumps(queue.status()), flush=True)


def test_trainer_killed_twice(tmp_path):
    """G5: 20 turns in; the trainer is killed in mid-step, another one after a commit and in its
    next step, a third trains the rest: 20 fates out, no turn lost or trained twice. A blocking
    get() would have lost the turns that were on their way to the dead process. Once a bug: the
    server in use was the library's own, which never said that a connection had ended, so leased
    turns stayed leased."""
    line = Line(tmp_path / "turns.jsonl", max_staleness=9)
    server, env = main.serve_line(line, tmp_path)
    assert os.stat(env["OPENCLAW_QUEUE"]).st_mode & 0o777 == 0o600
    names = [f"t{i}" for i in range(20)]
    line.add(*names)
    line.judge(*names)
    for do, held in (("lease_and_hang", names[:4]), ("commit_and_hang", names[4:8])):
        child = trainer(env, do)
        assert json.loads(child.stdout.readline()) == held
        assert line.depths()["leased"] == 4
        child.kill()
        child.wait()
        until(lambda: not line.depths()["leased"])
    last = trainer(env, "train_all")
    assert json.loads(last.communicate(timeout=20)[0])["ready"] == 0
    fates = load_turns(tmp_path / "turns.jsonl")
    assert {i: t.fate for i, t in fates.items()} == dict.fromkeys(names, "trained")
    assert [t.step for t in fates.values()] == [k for k in range(1, 6) for _ in range(4)]
    events = [json.loads(x)["event"] for x in open(tmp_path / "turns.jsonl")]
    assert events.count("fate") == 20 == line.log.fates["trained"]
