"""proxy.py: what clients may send, what the engine gets, what is recorded and how turns are paired.

The names A1, B2, D9 ... are the rows of the list of failures that people reported of such systems.
"""

import json
import math
import socket
import threading
import time
from pathlib import Path

import openai
import pytest
from conftest import until
from fake_engine import CUT, DONE, MISSING, Late, Refuse, call_deltas, error, say
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import proxy

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "openclaw_turns.json").read_text())
HI = [{"role": "user", "content": "Hi."}]
SAID = {"role": "assistant", "content": "Hello there."}  # what the fake engine says if not told
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def user(content):
    return {"role": "user", "content": content}


def calling(arguments, name="ls", content=None, id="c1"):
    return {"role": "assistant", "content": content, "tool_calls": [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]}


def refused(answer, status, *words):
    """The answer is an error of this status in OpenAI's shape, and says these words."""
    got, _, body = answer
    assert got == status, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert all(w in body["error"]["message"] for w in words), body


def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.cfg.port}/v1", api_key="none",
                         max_retries=0, timeout=20)


# ------------------------------------------------------------------------- A: what is let through


def test_a1_client_cannot_override_what_training_needs(server, engine):
    """Protects: the engine gets our model, n, log-probs and ids, and nothing that is not on the
    list. Once: role developer answered 400, n=3 mixed three replies into one turn."""
    server.ask({"role": "developer", "content": "One word."}, user("Sky colour?"), store=True, n=3,
               logprobs=False, return_token_ids=False, model="other", stream_options=None,
               echo=True, prompt_logprobs=5, stop_token_ids=[1], ignore_eos=True, best_of=2,
               use_beam_search=True, logits_processors=["x"], truncate_prompt_tokens=1, priority=-9,
               allowed_token_ids=[5], add_generation_prompt=False, metadata={"a": 1}, user="me")
    (sent,) = engine.requests
    assert [m["role"] for m in sent["messages"]] == ["system", "user"]
    assert sent.keys() == {*proxy.SAMPLING, "messages", "model", "max_tokens", "n", "stream",
                           "stream_options", "logprobs", "return_token_ids"}
    assert (sent["model"], sent["n"], sent["logprobs"]) == ("base", 1, True)
    assert sent["return_token_ids"] is True and sent["stream"] is True


@pytest.mark.parametrize("role, engine_role", [
    ("developer", "system"), ("function", "tool"), ("system", "system"), ("tool", "tool")])
def test_a1_roles_are_mapped_before_rendering(server, engine, role, engine_role):
    """Protects: roles that chat templates do not know. Once: 400 for `developer` and `function`."""
    server.ask({"role": role, "content": "x", "name": "ls"}, user("Hi."))
    assert engine.requests[0]["messages"][0] == {"role": engine_role, "content": "x", "name": "ls"}


@pytest.mark.parametrize("content, text", [
    ([{"type": "text", "text": "Add "}, {"type": "text", "text": "2 and 3"}], "Add 2 and 3"),
    ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
    ([{"text": "no type"}, " and a string"], "no type and a string"),
    ([{"type": "refusal", "refusal": "No."}], "No."),
    ("Grüße 你好 👍", "Grüße 你好 👍"), ([], "")])
def test_a2_parts_are_joined(server, engine, content, text):
    """Protects: lists of parts become the string that every template takes. Once: a crash in it."""
    server.ask(user(content), user("?"))
    assert engine.requests[0]["messages"][0]["content"] == text


@pytest.mark.parametrize("content, said", [
    ([{"type": "image_url", "image_url": {"url": "data:,"}}], "image_url"),
    ([{"type": "text", "text": "Look:"}, {"type": "input_image"}], "input_image"),
    ([{"type": "input_audio"}], "input_audio"), ([{"type": "file"}], "file"),
    ([{"type": ["text"]}], "type"), ([{"type": {}}], "type"), ([{"type": None}], "type"),
    ([5], "part"), ([None], "part"), ([["text"]], "part"),
    ([{"type": "text", "text": 5}], "string"),
    ([{"type": "text"}, {"type": "text", "text": None}], "string"),
    (7, "content"), (True, "content"), ({"type": "text", "text": "x"}, "content"),
    (None, "content")])
def test_a2_unservable_content_is_the_clients_mistake(server, engine, content, said):
    """Protects: 400 with the reason. Once: 500 for a part that is no object, or its type no
    string."""
    refused(server.post({"messages": [user(content)]}), 400, said)
    assert not engine.requests


def test_a2_null_content_beside_tool_calls(server, engine):
    """Protects: the normal shape of a tool round. Once: null content crashed the template."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "a.txt"}
    server.ask(user("List."), calling("{}"), result)
    sent = engine.requests[0]["messages"]
    assert sent[1]["content"] == "" and sent[1]["tool_calls"][0]["function"]["name"] == "ls"
    assert sent[2] == result


@pytest.mark.parametrize("arguments, meant", [
    ('{"path":"a.txt"}', {"path": "a.txt"}), ("[]", {}), ("", {}), ("  ", {}), ("null", {}),
    (None, {}), ({}, {}), ({"path": "a.txt"}, {"path": "a.txt"}), ('{"a": "ü\\n"}', {"a": "ü\n"})])
def test_a3_tool_arguments_are_decoded_once(server, engine, arguments, meant):
    """Protects: the engine gets one JSON object. Once: 500 or a string encoded twice."""
    server.ask(user("Go."), calling(arguments), {"role": "tool", "content": "ok"})
    sent = engine.requests[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(sent, str) and json.loads(sent) == meant


@pytest.mark.parametrize("arguments", [
    "{oops", "[1]", '"text"', "5", 5, True, [1], '{"a": 1', "[" * 100_000,
    '{"a":' * 500 + "1" + "}" * 500])
def test_a3_broken_tool_arguments_are_400(server, arguments):
    """Protects: never a 500 for what is in a history. Once: a RecursionError for nested
    brackets."""
    refused(server.post({"messages": [user("Go."), calling(arguments)]}), 400, "arguments")


@pytest.mark.parametrize("calls", ["x", 5, {"a": 1}, [None], ["x"], [{}], [{"function": "ls"}],
                                   [{"function": {"name": 5}}], [{"function": {}}]])
def test_a3_broken_tool_calls_are_400(server, calls):
    """Protects: never a 500 for what is in a history."""
    refused(server.post({"messages": [{"role": "assistant", "tool_calls": calls}, user("?")]}), 400,
            "tool_calls")


@pytest.mark.parametrize("options, shown", [
    (None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)])
def test_a5_usage_in_streams_exactly_as_asked(server, options, shown):
    """Protects: one usage chunk with no choices before [DONE] if asked for, else no trace of it;
    its totals are those of the whole answer. Once: missing or in the wrong chunk."""
    events = server.stream({"messages": HI, "stream_options": options})
    assert events.pop() == "[DONE]"
    if shown:
        last = events.pop()
        assert last["choices"] == [] and last["usage"] == server.ask("Hi.")["usage"]
        assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        assert all(e["usage"] is None for e in events)
    assert all(e["choices"] for e in events) and shown == any("usage" in e for e in events)


TWO_CALLS = [{"content": "Let me look."}, *call_deltas(0, "ls", '{"path": "ü b"}', "call_a"),
             *call_deltas(1, "read", '{"path": "c.txt"}', "call_b")]


def test_a6_two_tool_calls_rebuilt_by_the_official_client(server, engine):
    """Protects: deltas with index, and id, type, name first; one finish_reason; the same message
    with and without a stream. Once: calls lost in streams, and agents stopped early."""
    engine.script = lambda body: say(deltas=TWO_CALLS, finish="tool_calls")
    calls, text, reasons = {}, "", []
    for event in client(server).chat.completions.create(model="policy", messages=HI, stream=True,
                                                        tools=[TOOL]):
        choice = event.choices[0]
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] * bool(choice.finish_reason)
        for call in choice.delta.tool_calls or []:
            if call.index not in calls:
                assert call.type == "function" and call.function.name
            mine = calls.setdefault(call.index, [call.id, call.function.name, ""])
            mine[2] += call.function.arguments or ""
    assert calls == {0: ["call_a", "ls", '{"path": "ü b"}'],
                     1: ["call_b", "read", '{"path": "c.txt"}']}
    assert (text, reasons) == ("Let me look.", ["tool_calls"])
    whole = client(server).chat.completions.create(model="policy", messages=HI, tools=[TOOL])
    assert whole.choices[0].finish_reason == "tool_calls"
    assert [[c.id, c.function.name, c.function.arguments]
            for c in whole.choices[0].message.tool_calls] == list(calls.values())


def test_a6_a_stream_ends_with_one_reason_and_done(server):
    """Protects: the role first, exactly one non-null finish_reason, then [DONE]."""
    events = server.stream({"messages": HI})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "stop"
    assert sum(bool(e["choices"][0]["finish_reason"]) for e in events[:-1]) == 1
    assert events[-1] == "[DONE]" and len({e["id"] for e in events[:-1]}) == 1


BROKEN = {
    "cut after one chunk": [*say()[:2], CUT],
    "cut before any chunk": [CUT],
    "DONE without a finish_reason": [*say()[:2], DONE],
    "an error event": [*say()[:2], error("out of memory", 500, "InternalServerError"), DONE],
    "an error event that is a string": [*say()[:2], {"error": "out of memory"}, DONE],
    "not JSON": [*say()[:2], "data: {oops\n\n", DONE],
    "the end, silently": say()[:2],
}


@pytest.mark.parametrize("steps", BROKEN.values(), ids=BROKEN)
def test_a6_an_upstream_failure_never_looks_like_success(server, engine, steps):
    """Protects: no [DONE], no finish_reason and no sample; without a stream a 502. Once: an engine
    that died had sent [DONE], and half a reply was trained."""
    engine.script = lambda body: json_copy(steps)
    status, _, text = server.post({"messages": HI, "stream": True})
    if status == 200:
        assert "[DONE]" not in text and '"finish_reason": "' not in text and '"error"' in text
        with pytest.raises(openai.APIError):
            list(client(server).chat.completions.create(model="policy", messages=HI, stream=True))
    else:
        assert status == 502
    refused(server.post({"messages": HI}), 502, "engine")
    assert set(server.fates()) == {"engine_error"} and server.idle() and not server.sessions.keys


def test_a6_a_whole_reply_without_its_count(server, engine):
    """Protects: success is a finish_reason, so the reply is delivered; without the engine's count
    it is not trained."""
    engine.script = lambda body: json_copy([*say()[:4], CUT])
    assert server.stream({"messages": HI})[-1] == "[DONE]"
    assert server.fates() == {"ids_mismatch": 1} and server.idle()


def json_copy(steps):
    return [json.loads(json.dumps(s)) if isinstance(s, dict) else s for s in steps]


@pytest.mark.parametrize("status, body, shown", [
    (400, error("too many tools"), 400), (404, error("no such model", 404), 404),
    (500, error("boom", 500), 502), (503, "no server is available", 502),
    (400, {"detail": "old style"}, 400), (400, {"error": "a string"}, 400), (500, "", 502),
    (422, [1, 2], 422), (400, "null", 400)])
@pytest.mark.parametrize("stream", [False, True])
def test_a6_engine_refusals_keep_their_status(server, engine, status, body, shown, stream):
    """Protects: the engine's 4xx reaches the client as such, everything else is a 502."""
    engine.script = lambda _: [Refuse(status, body)]
    refused(server.post({"messages": HI, "stream": stream}), shown)
    assert server.idle() and sum(server.fates().values()) == 1


def test_a6_engine_that_is_not_there(server, engine):
    """Protects: a connection refused is a 502 in OpenAI's shape and frees its place."""
    server.server.pool.netloc = "127.0.0.1:9"
    refused(server.post({"messages": HI}), 502)
    assert server.idle()


@pytest.mark.parametrize("spelling", ["reasoning", "reasoning_content"])
def test_a7_thinking_apart_from_the_answer(server, engine, spelling):
    """Protects: either spelling read, one emitted, ids of both kept; a history with either spelling
    reaches the engine under its own. Once: thinking glued to the answer, or lost in histories."""
    engine.script = lambda body: say(deltas=[
        {spelling: "2+2 "}, {spelling: "is 4."}, {"content": "4"}])
    events = server.stream({"messages": HI})
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "2+2 is 4."
    assert "".join(d.get("content", "") for d in deltas) == "4"
    reply = server.ask("Hi.")["choices"][0]["message"]
    assert reply == {"role": "assistant", "content": "4", "reasoning_content": "2+2 is 4."}
    echo = {"role": "assistant", "content": "4", spelling: "2+2 is 4."}
    server.ask(user("Hi."), echo, user("Sure?"))
    assert engine.requests[-1]["messages"][1]["reasoning"] == "2+2 is 4."
    assert len(server.turns()[0].response_ids) == 4 and len(server.paired) == 1


@pytest.mark.parametrize("kept", ["<think>2+2</think>\n\nFour.", "Four.", "2+2</think>Four.",
                                  "<thinking>x</thinking> Four. "])
def test_a7_thinking_in_the_text_does_not_disturb_pairing(server, engine, kept):
    """Protects: what a client keeps of the thinking is no part of what was said."""
    engine.script = lambda body: say("<think>2+2</think>\n\nFour.")
    server.ask("2+2?")
    server.ask("2+2?", kept, "Thanks.")
    assert [t.next_state[0]["content"] for t in server.paired] == ["Thanks."]


def test_a7_thinking_without_an_answer_is_not_trained(server, engine):
    """Protects: a reply that only thinks has nothing a user could react to."""
    engine.script = lambda body: say("<think>For ever", finish="length")
    server.ask("2+2?")
    engine.script = lambda body: say(deltas=[{"reasoning": "Hm."}], finish="length")
    server.ask("2+3?")
    assert server.fates() == {"no_answer": 2}


def test_a8_max_tokens_of_the_whole_window(make_server, engine):
    """Protects: a wish for the whole window is clamped, a prompt that is too long is a 400 that
    says so, the window is told. Once: every request of such a client failed."""
    server = make_server(max_model_len=4096)
    for key in ("max_tokens", "max_completion_tokens"):
        server.ask("w " * 3000, **{key: 4096})
        server.ask("w", **{key: 10**9})
    assert all(r["max_tokens"] == 4095 for r in engine.requests)
    refused(server.post({"messages": [user("w " * 4096)]}), 400, "4096", "tokens")
    (model,) = client(server).models.list().data
    assert (model.id, model.max_model_len) == ("policy", 4096)


def test_a8_max_tokens_default_and_preference(server, engine):
    """Protects: no wish means the run's limit; the newer name wins; null is no wish."""
    for more, want in (({}, 96), ({"max_tokens": None}, 96), ({"max_tokens": 5}, 5),
                       ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
                       ({"max_tokens": 5, "max_completion_tokens": None}, 5)):
        server.ask("Hi.", **more)
        assert engine.requests[-1]["max_tokens"] == want


def leave_after(server, body, events):
    """Send a request, read so many events, close the socket."""
    data = json.dumps(body).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.cfg.port)) as s:
        s.sendall(head.encode() + data)
        got = b""
        while got.count(b"data: ") < events:
            got += s.recv(4096)
        if not events:
            until(lambda: server.engine.requests)
            time.sleep(0.1)


SLOW = {"before the headers": [Late(8), *say()], "before the first chunk": [8, *say()],
        "after the role": [say()[0], 8, *say()[1:]], "mid-stream": [*say()[:3], 8, *say()[3:]]}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", SLOW)
def test_a10_a_client_that_leaves_frees_the_engine(server, engine, when, stream):
    """Protects: the engine sees its client go within a second wherever it was, and nothing is
    trained. Once: the user pressed stop and the GPU went on."""
    engine.script = lambda body: json_copy(SLOW[when])
    seen = 2 if stream and when == "mid-stream" else 0
    leave_after(server, {"messages": HI, "stream": stream}, seen)
    assert until(lambda: engine.cancelled, 1.5)
    assert until(server.idle) and until(lambda: server.fates() == {"aborted": 1})
    assert not server.sessions.keys and server.server.requests["failed"] == 0


def test_a10_a_client_that_leaves_a_talking_engine(server, engine):
    """Protects: the same while chunks keep coming."""
    engine.script = lambda body: [say()[0], *[s for _ in range(300) for s in (say()[1], 0.02)]]
    leave_after(server, {"messages": HI, "stream": True}, 3)
    assert until(lambda: engine.cancelled, 1.5) and until(lambda: server.fates() == {"aborted": 1})
    assert server.idle()


def test_a11_a_slow_engine_loses_nothing(server, engine):
    """Protects: one second of silence between chunks. Once: a read timeout closed the response and
    the rest of the reply was missing without an error."""
    steps = say("One two three.")
    engine.script = lambda body: json_copy([*steps[:2], 1.0, *steps[2:]])
    assert server.ask("Hi.")["choices"][0]["message"]["content"] == "One two three."
    assert server.turns()[0].response_ids == [10, 11, 12, 2]


def test_a11_replies_stream_as_the_engine_makes_them(server, engine):
    """Protects: the first word arrives long before the last. Once: finished answers were
    replayed."""
    engine.script = lambda body: json_copy([*say()[:2], 0.6, *say()[2:]])
    start, seen = time.monotonic(), []
    for event in client(server).chat.completions.create(model="policy", messages=HI, stream=True):
        if event.choices and event.choices[0].delta.content:
            seen.append(time.monotonic() - start)
    assert seen[-1] - seen[0] > 0.3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_top_logprobs_as_asked(server, engine, stream):
    """Protects: a client that asks for log-probs gets them, others see none of ours."""
    def seen(**more):
        if not stream:
            return server.ask("Hi.", **more)["choices"][0]["logprobs"]
        events = server.stream({"messages": HI, **more})[:-1]
        found = [x for e in events for x in (e["choices"][0]["logprobs"] or {}).get("content", ())]
        return {"content": found} if found else None

    assert seen() is None and seen(logprobs=False) is None
    assert "top_logprobs" not in engine.requests[-1]
    assert [t["logprob"] for t in seen(logprobs=True)["content"]] == [-0.5] * 3
    assert all(len(t["top_logprobs"]) == 2 for t in seen(logprobs=True, top_logprobs=2)["content"])


# ------------------------------------------------------------------------------------- B: tokens


@pytest.mark.parametrize("reply, fate", [
    (dict(), None),
    (dict(ids=[*range(7)], usage={"completion_tokens": 12}), "ids_mismatch"),  # counts 12, sends 7
    (dict(ids=[1, 2, 3], logp=[-1.0, -1.0]), "ids_mismatch"),
    (dict(ids=[1, 2], logp=[-1.0, -1.0, -1.0]), "ids_mismatch"),
    (dict(ids=[], logp=[]), "empty"),
    (dict(ids=[1, 2], logp=[]), "ids_mismatch"),
    (dict(prompt_ids=[]), "ids_mismatch"),
    (dict(text="", finish="stop"), "no_answer"),
    (dict(text=" \n ", finish="stop"), "no_answer"),
    (dict(finish="length"), None), (dict(finish="abort"), "aborted"),
    (dict(finish="error"), "aborted"), (dict(finish="content_filter"), "aborted"),
    (dict(stop_reason="there"), "constrained"), (dict(stop_reason=2), None)])
@pytest.mark.parametrize("stream", [False, True])
def test_b1_b7_what_is_trusted(server, engine, reply, fate, stream):
    """Protects: ids, log-probs and the engine's count agree, or the turn is refused with its
    reason; the reply is delivered all the same. A fired stop string is no end of the policy's own.
    Once: ids lost under a tool parser, and aborted replies trained with an invented end token."""
    engine.script = lambda body: say(**reply)
    if stream:
        events = server.stream({"messages": HI})
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    else:
        text = server.ask("Hi.")["choices"][0]["message"]["content"]
    assert text == reply.get("text", "Hello there.")
    assert [t.fate for t in server.turns()] == [fate]
    assert len(server.sessions.keys) == (fate is None)


@pytest.mark.parametrize("ids, finish", [
    ([5, 6, 2], "stop"), ([5, 6], "length"), ([5, 6, 2], "length"), ([2, 2, 2], "stop")])
def test_b7_ids_as_the_engine_sent_them(server, engine, ids, finish):
    """Protects: no end token invented or taken off. Once: a cut reply learnt to end, pad == eos
    lost the real end."""
    engine.script = lambda body: say("Yes.", ids=ids, finish=finish)
    server.ask("Hi.")
    (turn,) = server.turns()
    assert (turn.response_ids, turn.finish_reason, turn.fate) == (ids, finish, None)
    assert turn.completion_tokens == len(turn.rollout_logp) == len(ids)


@pytest.mark.parametrize("logp, fate", [
    ([-0.1, None, 0.0, math.nan, -2.0], "bad_logp"), ([-0.1, None], "bad_logp"),
    ([-0.1, math.nan], "bad_logp"), ([-math.inf, -1.0], "bad_logp"), ([-9999.0, -1.0], "bad_logp"),
    ([MISSING, -1.0], "bad_logp"), ([-0.1, "-0.2"], "bad_logp"), ([0.0, -1e-30, -50.0], None),
    ([0.0], None)])
def test_b5_missing_logprobs_drop_the_turn(server, engine, logp, fate):
    """Protects: null, NaN, missing and vLLM's -9999 are no numbers to train on; a true 0.0 is one.
    Once: null became 0.0, which is probability 1."""
    engine.script = lambda body: say("Yes.", ids=[*range(5, 5 + len(logp))], logp=logp)
    assert server.ask("Hi.")["choices"][0]["message"]["content"] == "Yes."
    (turn,) = server.turns()
    assert turn.fate == fate and len(turn.rollout_logp) == len(logp)


def test_b2_every_sampling_field_is_explicit(make_server, engine):
    """Protects: nothing is left for vLLM to fill from the model's generation_config.json; the run's
    temperature is the policy's. Once: an unset top_p made the old log-probs another policy's."""
    server = make_server(temperature=0.7)
    answer = server.post({"messages": HI})
    sent = {k: engine.requests[0][k] for k in proxy.SAMPLING}
    assert sent == {**proxy.SAMPLING, "temperature": 0.7}
    assert answer[1]["X-Sampling"] == "run" and server.said == []
    assert server.turns()[0].sampling["temperature"] == 0.7


@pytest.mark.parametrize("asked", [
    {"temperature": 0.2}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"seed": 7},
    {"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.2},
    {"temperature": 0}, {"temperature": 0.2, "top_p": 0.1}])
def test_b2_clients_habits(make_server, asked):
    """Protects: `ignore` replaces a client's sampling, says so once, and trains; `respect` serves
    it as asked, untrained. Once: a habitual temperature made all turns of a client untrainable."""
    server = make_server()
    for _ in range(2):
        _, headers, _ = server.post({"messages": HI, **asked}, {"X-Session-Id": "s"})
        assert headers["X-Sampling"] == "run"
    sent = server.engine.requests[-1]
    assert {k: sent[k] for k in proxy.SAMPLING} == proxy.SAMPLING and "seed" not in sent
    assert server.fates() == {None: 2} and len(server.said) == 1
    polite = make_server(client_sampling="respect")
    _, headers, _ = polite.post({"messages": HI, **asked})
    assert headers["X-Sampling"] == "client" and server.engine.requests[-1].items() >= asked.items()
    assert polite.fates() == {"client_sampling": 1}
    polite.post({"messages": HI, "temperature": 1.0, "top_p": 1})  # the run's own values
    assert polite.fates()[None] == 1


@pytest.mark.parametrize("asked, trained", [
    ({"response_format": SCHEMA}, False), ({"response_format": {"type": "json_object"}}, False),
    ({"structured_outputs": {"choice": ["a"]}}, False), ({"logit_bias": {"5": 1}}, False),
    ({"bad_words": ["x"]}, False), ({"min_tokens": 3}, False),
    ({"tools": [TOOL], "tool_choice": "required"}, False),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "ls"}}}, False),
    ({"response_format": {"type": "text"}}, True), ({"response_format": None}, True),
    ({"logit_bias": {}}, True), ({"bad_words": []}, True), ({"min_tokens": 0}, True),
    ({"tools": [TOOL], "tool_choice": "auto"}, True),
    ({"tools": [TOOL], "tool_choice": "none"}, True),
    ({"tools": [TOOL], "tool_choice": None, "parallel_tool_calls": None}, True),
    ({"tools": [], "tool_choice": "auto"}, True), ({"tools": None, "tool_choice": "auto"}, True),
    ({"tools": [], "tool_choice": "required", "parallel_tool_calls": True}, True),
    ({"stop": ["\n\n"]}, True), ({"stop": "never said"}, True),
    ({"reasoning_effort": "low"}, True)])
def test_b2_constrained_decoding_is_served_and_not_trained(server, engine, asked, trained):
    """Protects: log-probs under a grammar or a forced choice are not the policy's own. Once:
    trained. An empty list of tools is no tools, where the engine would refuse a tool choice."""
    server.ask("Hi.", **asked)
    assert server.fates() == {None if trained else "constrained": 1}
    if not asked.get("tools"):
        assert not {"tools", "tool_choice", "parallel_tool_calls"} & engine.requests[0].keys()


def test_the_policys_key_goes_to_its_engine(make_server, engine, monkeypatch):
    """POLICY_KEY, for an engine at --policy-url; its URL may be https and have a path."""
    monkeypatch.setenv("POLICY_KEY", "k-1")
    server = make_server()
    assert server.post({"messages": [{"role": "user", "content": "What is rain?"}]})[0] == 200
    assert engine.keys == {"Bearer k-1"}
    there = proxy.Connections(proxy.Endpoint("https://gate:8443/engine", "", "k-2"), 5)
    assert there.kind is proxy.http.client.HTTPSConnection and there.netloc == "gate:8443"
    assert there.path == "/engine/v1/chat/completions"
    assert there.headers["Authorization"] == "Bearer k-2"
    alone = proxy.Connections(proxy.Endpoint("http://127.0.0.1:1", ""), 5)
    assert "Authorization" not in alone.headers


def test_b3_engine_scores_are_cut_by_lengths(server, engine):
    """Protects: the teacher's log-probs are those of the response, by position, at every length and
    for ids that are 0 or repeat. Once: shifted by one against the student."""
    import urllib3

    engine.score = lambda model, ids: [-float(i) for i in range(len(ids))]
    where = (urllib3.PoolManager(), proxy.Endpoint(engine.url, "base"))
    assert proxy.engine_logp(*where, [7] * 10, [0, 7, 2, 7, 0]) == [-10, -11, -12, -13, -14]
    assert proxy.engine_logp(*where, [7] * 17, [4, 4, 4]) == [-17, -18, -19]
    assert engine.calls[-1][1]["max_tokens"] == 1 and "temperature" not in engine.calls[-1][1]


def test_b3_versions_of_a_turn(make_server, engine):
    """Protects: version_start and the engine's model name are read together when forwarded; under
    LoRA a stream keeps its adapter, with full weights version_end shows a swap in its middle."""
    for rank, end in ((16, 1), (0, 2)):
        server = make_server(lora_rank=rank)
        engine.models = {"base": None, "v1": "a", "v2": "b"}
        server.policy.publish(1, "v1")

        def swapping(body, server=server):
            yield say()[0]
            assert dict(server.policy.open) == {"v1": 1}
            server.policy.publish(2, "v2")
            yield from say()[1:]

        engine.script = lambda body: list(swapping(body))
        server.ask("Hi.")
        assert engine.requests[-1]["model"] == "v1"
        assert (server.turns()[0].version_start, server.turns()[0].version_end) == (1, end)


# ---------------------------------------------------------------------------------- D: sessions


def next_words(server):
    """(session, what the reply was, [(role, words)] of its next state) of every paired turn."""
    return [(t.reply["content"], [(m["role"], m["content"]) for m in t.next_state])
            for t in server.paired]


def echo(engine):
    """The engine's reply names the last words it was given."""
    engine.script = lambda body: say(f"Re: {body['messages'][-1]['content']}")


def test_d1_plain_client_trains_without_headers(server, engine):
    """Protects: a turn is main unless said otherwise; three turns give two pairs. Once: without
    headers nothing ever trained, silently."""
    echo(engine)
    talk = client(server).chat.completions
    history = []
    for words in ("A", "B", "C"):
        history.append(user(words))
        reply = talk.create(model="gpt-4", messages=history, temperature=0.7).choices[0].message
        history.append({"role": "assistant", "content": reply.content})
    assert next_words(server) == [("Re: A", [("user", "B")]), ("Re: B", [("user", "C")])]
    assert all(t.kind == "main" for t in server.turns()) and len(server.sessions.keys) == 1
    assert len({t.session for t in server.turns()}) == 1


def test_d2_interleaved_chats_without_headers(server, engine):
    """Protects: sessions are derived from what was said. Once: all clients were merged into one."""
    echo(engine)
    server.ask("Cats?")
    server.ask("Dogs?")
    server.ask("Cats?", "Re: Cats?", "More cats.")
    server.ask("Dogs?", "Re: Dogs?", "More dogs.")
    assert next_words(server) == [("Re: Cats?", [("user", "More cats.")]),
                                  ("Re: Dogs?", [("user", "More dogs.")])]
    cats, dogs, more_cats, more_dogs = [t.session for t in server.turns()]
    assert (cats, dogs) == (more_cats, more_dogs) and cats != dogs


def test_d4_rewritten_history_closes_unscored(server, engine):
    """Protects: a summary in place of the reply is no reaction to it. Once: it was scored as
    one."""
    echo(engine)
    ours = {"X-Session-Id": "s"}
    server.post({"messages": [user("A")]}, ours)
    server.post({"messages": [{"role": "system", "content": "x"}, user("Summary so far"),
                              user("next")]}, {**ours, "X-Session-Done": "1"})
    assert not server.paired and server.fates() == {"no_next_state": 2}


def test_d5_resend_gives_one_sample(server, engine):
    """Protects: of a body sent twice, the reply that the client kept is paired, the other one
    expires as not chosen. Once: both were counted."""
    replies = iter(["one", "two", "three"])
    engine.script = lambda body: say(next(replies))
    server.ask("A")
    server.ask("A")
    server.ask("A", "two", "B")
    assert next_words(server) == [("two", [("user", "B")])]
    server.sessions.expire(time.monotonic() + 4000)
    assert [t.fate for t in server.turns()] == ["not_chosen", None, "no_next_state"]


def test_d5_equal_replies_and_a_resent_follow_up(server):
    """Protects: also with equal replies a follow-up pairs once, however often it is sent. Once: the
    second time it was given to the sibling."""
    for _ in range(2):
        server.ask("A")
    for _ in range(2):
        server.ask("A", "Hello there.", "B")
    assert next_words(server) == [("Hello there.", [("user", "B")])]
    server.ask("A", "Hello there.", "C")  # other words: somebody else's
    assert len(server.paired) == 2 and len({t.id for t in server.paired}) == 2


@pytest.mark.parametrize("compaction", [False, True])
def test_d9_sliding_window(server, engine, compaction):
    """Protects: twelve turns of a client that keeps four exchanges: eleven pairs, also when what
    slides out is replaced by a summary. Once: the first cut history ended all pairing."""
    echo(engine)
    history = []
    for i in range(12):
        kept = history[-8:] + [user(f"Question {i}")]
        head = [{"role": "system", "content": f"Summary {i}"}] if compaction else []
        reply = server.ask(*head, *kept)["choices"][0]["message"]
        history = [*kept, {"role": "assistant", "content": reply["content"]}]
    assert next_words(server) == [(f"Re: Question {i}", [("user", f"Question {i + 1}")])
                                  for i in range(11)]


def test_d10_the_reply_decides(server, engine):
    """Protects: three people with the same first words and different replies, all three paired.
    Once: the first one's reaction went to another's reply."""
    replies = iter("abcdef")
    engine.script = lambda body: say(next(replies))
    for _ in range(3):
        server.ask("Hello")
    for reply in "bca":
        server.ask("Hello", reply, f"to {reply}")
    assert next_words(server) == [(r, [("user", f"to {r}")]) for r in "bca"]


def test_d10_an_equal_session_id_is_preferred(server):
    """Protects: with the same words and the same reply, the session id tells two people apart."""
    for s in ("anna", "bert"):
        server.post({"messages": HI}, {"X-Session-Id": s})
    server.post({"messages": [*HI, SAID, user("B")]}, {"X-Session-Id": "bert"})
    assert [t.session for t in server.paired] == ["bert"]


@pytest.mark.parametrize("ids", [("anna", "bert"), (None, None)])
def test_d10_a_reaction_that_comes_again_takes_no_strangers_turn(server, engine, ids):
    """Protects: two people with equal words and replies. Bert's follow-up is refused and sent
    again, and stands in the history of his next request: Anna's turn waits for her own words. Once:
    it got Bert's."""
    anna, bert = ({"X-Session-Id": x} for x in ids)
    for one in (anna, bert):
        server.post({"messages": HI}, one)
    follow_up = {"messages": [*HI, SAID, user("Bert: wrong")]}
    server.policy.accepting = False
    refused(server.post(follow_up, bert), 503)
    server.policy.accepting = True
    engine.script = lambda body: say("Cut", stop_reason="x")  # not trained, so it does not wait
    server.post(follow_up, bert)
    server.post({"messages": [*follow_up["messages"], {"role": "assistant", "content": "Cut"},
                              user("Bert: again")]}, bert)
    server.post({"messages": [*HI, SAID, user("Anna: great")]}, anna)
    assert [t.next_state[0]["content"] for t in server.paired] == ["Bert: wrong", "Anna: great"]
    assert ids[0] is None or [t.session for t in server.paired] == ["bert", "anna"]


def test_d10_two_people_say_the_same(server):
    """Protects: with session ids equal words to equal replies are two people's reactions."""
    for _ in range(2):
        for one in ("anna", "bert"):
            server.post({"messages": HI}, {"X-Session-Id": one})
        for one in ("anna", "bert"):
            server.post({"messages": [*HI, SAID, user("Thanks")]}, {"X-Session-Id": one})
    assert [t.session for t in server.paired] == ["anna", "bert"] * 2


@pytest.mark.parametrize("made, echoed", [
    ("", "{}"), ("", ""), ("null", "{}"), ("[]", "{}"), ('{"x": 1.0}', '{"x":1}'),
    ('{"x": [1e3, {"y": 2.0}]}', '{"x":[1000,{"y":2}]}'), ('{"b": 1, "a": 2}', '{"a":2,"b":1}')])
def test_a_tool_call_pairs_however_the_client_writes_it_again(server, engine, made, echoed):
    """Protects: arguments are compared by what they mean. Once: a call without arguments, or with
    1.0, which JavaScript writes as 1, never got its result."""
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    engine.script = lambda body: say(deltas=call_deltas(0, "ls", made), finish="tool_calls")
    server.ask("Go.", tools=tools)
    engine.script = lambda body: say("Done.")
    server.ask(user("Go."), calling(echoed), {"role": "tool", "tool_call_id": "c1",
                                              "content": "a.txt"}, tools=tools)
    assert [t.next_state[0]["content"] for t in server.paired] == ["a.txt"]


def test_a_message_that_cannot_be_shown_costs_no_place(make_server):
    """Protects: what fails before a request is served gives its place back. Once: a screen that
    cannot print a session's name took one place for ever with each request."""
    server = make_server(max_requests=1)

    def fails(text):
        raise UnicodeEncodeError("latin-1", text, 0, 1, "no such letter")

    server.hooks.say = fails
    for i in range(3):
        assert server.post({"messages": HI, "temperature": 0.2, "session_id": f"会话{i}"})[0] == 500
    assert server.post({"messages": HI})[0] == 200 and server.idle()


def test_half_an_emoji_is_no_reason_to_fail(server, engine):
    """Protects: text that UTF-8 cannot carry is served, and its turn is judged like any other."""
    server.ask("Hi \ud83d there")
    assert engine.requests[0]["messages"][0]["content"] == "Hi ? there"


def refuse_busy(server):
    server.hooks.overloaded = lambda: True


def refuse_starting(server):
    server.policy.accepting = False


@pytest.mark.parametrize("refuse, status", [(refuse_busy, 429), (refuse_starting, 503)])
def test_d11_reaction_is_kept_with_a_refused_request(make_server, engine, refuse, status):
    """Protects: pairing comes before admission and a retry pairs nothing twice. Once: the reaction
    was lost with the 429."""
    server = make_server(overload="429")
    server.ask("A")
    follow_up = {"messages": [user("A"), SAID, user("B")]}
    refuse(server)
    for _ in range(2):
        answer = server.post(follow_up)
        refused(answer, status)
        assert int(answer[1]["Retry-After"]) > 0
    server.hooks.overloaded, server.policy.accepting = lambda: False, True
    assert server.post(follow_up)[0] == 200
    assert next_words(server) == [("Hello there.", [("user", "B")])]
    assert server.server.requests["rejected"] == 2 and len(engine.requests) == 2


def test_d8_ten_thousand_sessions_leave_nothing(tmp_path):
    """Protects: idle expiry frees every map. Once: they grew for ever."""
    log = proxy.TurnLog(tmp_path / "turns.jsonl")
    sessions = proxy.Sessions(log, timeout=3600)  # far above what a slow machine needs for the loop
    for i in range(10_000):
        turn = proxy.Turn(f"t{i}", f"s{i}", messages=[user(f"Q{i % 50}")],
                          reply={"role": "assistant", "content": f"A{i}"})
        log.write(turn, "reply")
        sessions.wait(turn)
    for i in range(20):  # some are chosen, which marks their siblings
        sessions.pair([user(f"Q{i}"), {"role": "assistant", "content": f"A{i}"}, user("ok")], None)
    sessions.touch("only aborted turns")
    sessions.expire()
    assert len(sessions.keys) == 9_980
    sessions.expire(time.monotonic() + 3601)
    state = (sessions.waiting, sessions.history, sessions.keys, sessions.seen, sessions.latest,
             sessions.not_chosen)
    assert not any(state), [len(s) for s in state]
    assert log.fates == {"no_next_state": 6_000, "not_chosen": 3_980}


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "True", "YES"])
@pytest.mark.parametrize("where", ["header", "body"])
def test_session_done(server, word, where):
    """Protects: the end of a session closes what waits in it, and only there."""
    server.post({"messages": HI, "session_id": "other"})
    server.post({"messages": HI}, {"X-Session-Id": "s"})
    done = {"X-Session-Done": word} if where == "header" else {}
    server.post({"messages": [user("Bye.")], "session_id": "s",
                 **({} if done else {"session_done": word})}, done)
    assert [t.fate for t in server.turns()] == [None, "no_next_state", "no_next_state"]
    assert set(server.sessions.seen) == {"other"}


@pytest.mark.parametrize("word", ["0", "false", "no", "off", ""])
def test_session_not_done(server, word):
    """Protects: a falsy word does not end a session."""
    server.post({"messages": HI, "session_done": word}, {"X-Session-Done": word})
    assert server.fates() == {None: 1}


def test_side_turns_are_forwarded_only(server, engine):
    """Protects: a side turn is served as asked, never trained and never a next state."""
    server.ask("A")
    body = {"messages": [user("A"), SAID, user("Title?")]}
    for headers, more in (({"X-Turn-Type": "side"}, {}), ({}, {"turn_type": "side"}),
                          ({"X-Turn-Type": "SIDE"}, {"temperature": 0.1})):
        assert server.post({**body, **more}, headers)[0] == 200
    assert engine.requests[-1]["temperature"] == 0.1
    assert not server.paired and server.fates() == {None: 1, "side": 3}


def test_all_new_messages_are_the_next_state(server, engine):
    """Protects: two parallel tool results and the user's words are one next state, with roles.
    Once: only the last message counted."""
    calls = [*call_deltas(0, "ls", "{}"), *call_deltas(1, "ls", "{}")]
    engine.script = lambda body: say(deltas=calls, finish="tool_calls")
    server.ask("Go.")
    both = {"role": "assistant", "tool_calls": [*calling("{}", id="a")["tool_calls"],
                                                *calling("{ }", id="b")["tool_calls"]]}
    server.ask(user("Go."), both, {"role": "tool", "content": "x", "tool_call_id": "a"},
               {"role": "tool", "content": "y", "tool_call_id": "b"}, user("And?"))
    assert next_words(server) == [(None, [("tool", "x"), ("tool", "y"), ("user", "And?")])]


@pytest.mark.parametrize("wrapped", [
    "<system-reminder>Be brief.</system-reminder>",
    "<environment_details>\nx\n</environment_details>",
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> cut off", " \n "])
def test_a_context_block_is_no_reaction(server, wrapped):
    """Protects: the turn goes on waiting for its user's own words."""
    server.ask("A")
    server.ask("A", "Hello there.", wrapped)
    assert not server.paired
    server.ask("A", "Hello there.", f"Thanks. {wrapped}")
    assert next_words(server) == [("Hello there.", [("user", "Thanks.")])]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_behind_the_words_may_change(server, role):
    """Protects: agents put the time or their state behind the user's words, and send it only once.
    Once: it was taken for what the reply answers, and no turn of such a client paired."""
    for history in ([user("A")], [user("A"), SAID, user("B")], [user("A"), SAID, user("B"), SAID,
                                                                user("C")]):
        server.ask(*history, {"role": role, "content": f"It is 12:0{len(history)}."})
    assert [t.next_state for t in server.paired] == [[user("B")], [user("C")]]


def test_pairing_survives_white_space_and_unicode(server, engine):
    """Protects: clients trim, reflow and normalise line ends of what they keep."""
    engine.script = lambda body: say("  Größe:\r\n 5 \n\n👍 ")
    server.ask("Wie groß?\n")
    server.ask(" Wie  groß?", "Größe: 5 👍", "Danke 你好")
    assert next_words(server)[0][1] == [("user", "Danke 你好")]


def play(server, engine, rounds):
    replies = iter([r["reply"] for r in rounds])

    def script(body):
        reply = next(replies)
        deltas = [{"content": reply["content"]}]
        for i, c in enumerate(reply.get("tool_calls", ())):
            deltas += call_deltas(i, c["function"]["name"], c["function"]["arguments"], c["id"])
        return say(deltas=deltas, finish="tool_calls" if len(deltas) > 1 else "stop")

    engine.script = script
    for r in rounds:
        assert server.stream(r["request"])[-1] == "[DONE]"


def test_openclaw_chat_pairs(server, engine):
    """Protects: what the real OpenClaw agent sends, whose context block vanishes from its
    histories. A strict prefix match pairs none of its turns."""
    play(server, engine, FIXTURE["chat"])
    assert next_words(server) == [("Paris is the capital of France.",
                                   [("user", "No, shorter please.")])]
    assert {"openclaw_context", "timestamp", "runtime_line"} == set(server.turns()[0].stripped)
    assert len(server.said) == 1 and "not counted as the user's words" in server.said[0]


def test_openclaw_tool_round_pairs(server, engine):
    """Protects: a tool call with a rewritten id and newly serialised arguments pairs, and the next
    state is the tool's result, not the context block behind it."""
    play(server, engine, FIXTURE["tool_round"])
    assert next_words(server) == [("Let me look.", [("tool", '"README.md"\n"notes/"')])]


def test_long_white_space_is_cheap():
    """Protects: normalising is linear in a message's length. Once: 100,000 newlines took
    minutes."""
    start = time.monotonic()
    for text in ("x" + "\n" * 100_000 + "x", "\nRuntime: agent=" * 5_000 + "\nx", "[" * 100_000,
                 "<think>" * 20_000, "<system-reminder>" * 20_000 + "x"):
        proxy.strip_wrappers(text)
        proxy.visible(text)
    assert time.monotonic() - start < 20


# ---------------------------------------------------------------------------------- the doors


@pytest.mark.parametrize("sent, status", [
    (None, 401), ("Bearer wrong", 401), ("Bearer ", 401), ("Bearer sécret", 401), ("x", 401),
    ("Bearer secret-key", 200), ("Bearer secret-keyx", 401), ("bearer secret-key", 200)])
def test_key(make_server, sent, status):
    """Protects: with a key nobody comes in without it, wherever it listens; /healthz stays open."""
    server = make_server(api_key="secret-key")
    headers = {"Authorization": sent.encode() if sent else None, "Host": "my.gpu.box"}
    answer = server.post({"messages": HI}, headers)
    assert answer[0] == server.request("GET", "/v1/models", headers=headers)[0] == status
    assert status == 200 or refused(answer, 401) is None
    assert server.request("GET", "/healthz")[0] == 200


@pytest.mark.parametrize("headers, status", [
    ({"Host": "localhost"}, 200), ({"Host": "127.0.0.1:80"}, 200), ({"Host": "[::1]:1"}, 200),
    ({"Host": "LOCALHOST:30000"}, 200), ({"Host": "evil.example"}, 403),
    ({"Host": "localhost.evil.example"}, 403), ({"Host": "evil.example://localhost"}, 403),
    ({"Host": ""}, 403), ({"Host": "127.0.0.1.evil.example:80"}, 403), ({"Host": "0.0.0.0"}, 403),
    ({"Host": "evil.example/localhost"}, 403), ({"Host": "localhost@evil.example"}, 403),
    ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
    ({"Host": "localhost:30000", "Origin": "http://localhost:30000"}, 200),
    ({"Host": "localhost:30000", "Origin": "http://localhost:8000"}, 403),
    ({"Host": "localhost", "Origin": "http://localhost.evil.example"}, 403),
    ({"Content-Type": "text/plain"}, 415), ({"Content-Type": None}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": "multipart/form-data; boundary=application/json"}, 415),
    ({"Content-Type": "application/json; charset=utf-8"}, 200)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
def test_no_web_page_can_post_turns(server, headers, status, path):
    """Protects: without a key only programs on this machine come in: loopback names, no foreign
    page, no content type that a browser sends unasked. Once: any page could post turns to a local
    server."""
    body = {"messages": HI, "turn": "in line", "score": 1}
    answer = server.post(body, headers, path)
    assert answer[0] == status, answer
    assert status == 200 or refused(answer, status) is None


def test_body_size(make_server):
    """Protects: a body above the limit is a 413 in OpenAI's shape, one below it is read whole."""
    server = make_server(max_body_mb=1, max_model_len=1 << 20)
    server.engine.window = 1 << 20
    refused(server.post({"messages": [user("x" * (1 << 20))]}), 413, "1 MiB")
    assert server.post({"messages": [user("x" * ((1 << 20) - 1000))]})[0] == 200
    assert server.ask("Still here?")


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"messages":' * 5000,
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}",
    b'{"messages":[{"role":"user","content":"a"}],"tools":' + b'[{"a":' * 450 + b"1" + b"}]" * 450
    + b"}"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
def test_broken_bodies(server, body, path):
    """Protects: what is not a JSON object, or is nested beyond use, is a 400. Once: a
    RecursionError while it was written out again, with the request's place lost."""
    refused(server.post(body, path=path), 400)
    assert server.idle()


def test_other_paths_and_methods(server):
    """Protects: OpenAI's error shape everywhere."""
    refused(server.request("GET", "/v1/completions"), 404)
    refused(server.request("GET", "/v1/chat/completions"), 405)
    refused(server.request("DELETE", "/v1/models"), 405)


def test_an_error_of_ours_has_openais_shape(server):
    """Protects: also a bug answers in the client's language, and without its details."""
    server.hooks.health = lambda: 1 / 0
    refused(server.request("GET", "/healthz"), 500)


@pytest.mark.parametrize("key, values", {
    "messages": [None, [], {}, "Hi.", 5, [None], ["Hi."], [[]], [{}], [{"role": 5, "content": "x"}],
                 [{"role": ["user"], "content": "x"}], [{"role": "robot", "content": "x"}],
                 [{"role": "user"}], [{"role": "tool"}],
                 [{"role": "user", "content": "x", "name": 5}],
                 [{"role": "tool", "content": "x", "tool_call_id": {}}]],
    "max_tokens": [0, -1, "x", True, 1.5, [], math.nan, math.inf],
    "max_completion_tokens": [0, -5, "10", False, {}],
    "temperature": ["hot", -0.1, 2.1, True, [], math.nan, -math.inf, 10**400],
    "top_p": [-0.1, 1.1, "x"], "top_k": [-2, "x", True], "min_p": [2],
    "seed": [1.5, "x", True, 10**30],
    "repetition_penalty": [0, "x"], "presence_penalty": [3], "frequency_penalty": [-3, {}],
    "stop": [5, {}, [5], [None], True], "tools": [{}, "x", 5, True], "tool_choice": [5, []],
    "stream": ["yes", 1, []], "stream_options": [True, "x", []], "response_format": ["json", []],
    "structured_outputs": ["x", []], "logit_bias": [[], 5], "bad_words": ["x", {}],
    "min_tokens": ["x", 1.5], "chat_template_kwargs": ["x", []], "parallel_tool_calls": ["x", 1],
    "reasoning_effort": [5, {}], "include_reasoning": ["no", 0],
    "session_id": [{}, [], 1.5, "x" * 257, "a\nb", "a\x1b[2J", "\ud800"],
    "turn_type": [{}, [], "x" * 300], "session_done": [{}, [], 1.5, "x" * 300]}.items())
def test_wrong_values_are_the_clients_mistake(server, engine, key, values):
    """Protects: 400 before anything is forwarded, admitted or paired. Once: a wrong session_done
    was seen after admission, and every such request took a place for ever."""
    for value in values:
        body = {"messages": HI, key: value}
        refused(server.post(body), 400)
    assert not engine.requests and server.idle() and server.turns() == []


def test_wrong_top_logprobs(server):
    """Protects: the range is checked here, not in the engine."""
    for value in (-1, 21, "x", True, 1.5):
        refused(server.post({"messages": HI, "logprobs": True, "top_logprobs": value}), 400)
    assert server.post({"messages": HI, "top_logprobs": 99})[0] == 200  # no logprobs: no meaning


@pytest.mark.parametrize("session", ["a b", 7, True, "你好 👍", "naïve", "x" * 256, 'a"b;c=d'])
@pytest.mark.parametrize("stream", [False, True])
def test_session_ids_of_every_kind(server, session, stream):
    """Protects: a session id that HTTP headers cannot carry is kept, and told in a form they can.
    Once: the answer's header broke the whole answer."""
    status, headers, _ = server.post({"messages": HI, "session_id": session, "stream": stream})
    assert status == 200 and headers["X-Session-Id"].isascii()
    assert server.turns()[0].session == str(session) and server.idle()


NAMES = st.text(max_size=5) | st.sampled_from(
    "type text role content function name arguments id tool_calls include_usage refusal".split())
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["", "user", "tool", "{", "[]", "\x00", "\ud800", "text", "\n", 10**30]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(NAMES, x, max_size=3), max_leaves=8)
KEYS = sorted({*proxy.PASSED, *proxy.SAMPLING, *(
    "messages max_tokens max_completion_tokens seed stream stream_options logprobs top_logprobs "
    "session_id turn_type session_done model n turn score text hint").split()})
PART = st.dictionaries(st.sampled_from(["type", "text", "refusal"]), st.just("text") | JUNK)
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries(
    {"name": st.text() | JUNK, "arguments": JUNK})})
MESSAGE = st.fixed_dictionaries({
    "role": st.sampled_from(["user", "assistant", "tool", "system"]),
    "content": st.text() | st.lists(PART | JUNK, max_size=3)}, optional={
    "tool_calls": JUNK | st.lists(CALL, max_size=2),
    "name": JUNK, "tool_call_id": JUNK, "reasoning": JUNK, "reasoning_content": JUNK})


def test_no_body_is_ever_our_error(server):
    """Protects: whatever is posted, the answer is 200 or a 4xx in OpenAI's shape, no place is lost
    and the server lives on."""
    @settings(max_examples=400, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    @given(st.lists(MESSAGE, max_size=3) | JUNK,
           st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4),
           st.sampled_from(["/v1/chat/completions"] * 3 + ["/v1/feedback"]))
    def post(messages, more, path):
        answer = server.post({"messages": messages, **more}, path=path)
        assert answer[0] == 200 or refused(answer, answer[0]) is None
        assert answer[0] in (200, 400, 404, 409), answer

    post()
    assert server.idle() and server.ask("Hi.")


# -------------------------------------------------------------------- refusals, feedback, health


def in_threads(n, work):
    out = []
    threads = [threading.Thread(target=lambda: out.append(work())) for _ in range(n)]
    [t.start() for t in threads]
    return threads, out


def test_too_many_requests(make_server, engine):
    """Protects: above max_requests 429 with Retry-After at once, /healthz answers meanwhile, and
    the places come back."""
    server = make_server(max_requests=2)
    engine.script = lambda body: json_copy([say()[0], 0.8, *say()[1:]])
    threads, answers = in_threads(2, lambda: server.post({"messages": HI}))
    assert until(lambda: len(engine.requests) == 2)
    answer = server.post({"messages": HI})
    refused(answer, 429, "2 requests")
    assert answer[1]["Retry-After"]
    health = server.request("GET", "/healthz")[2]
    assert health["open"] == 2 and health["requests"]["rejected"] == 1
    [t.join() for t in threads]
    assert [a[0] for a in answers] == [200, 200] and server.idle()
    with pytest.raises(openai.RateLimitError):
        server.hooks.overloaded = lambda: True
        server.cfg.overload = "429"
        client(server).chat.completions.create(model="policy", messages=HI)


def test_many_clients_at_once(make_server, engine):
    """Protects: replies, ids and pairs of forty clients in eight threads are not mixed."""
    server = make_server(max_requests=40)
    engine.script = lambda body: json_copy(
        [s for x in say(f"Re: {body['messages'][-1]['content']}") for s in (x, 0.005)])
    names = iter(range(40))

    def talk():
        i = next(names)
        history = [user(f"Q{i}")]
        for k in range(3):
            reply = server.ask(*history)["choices"][0]["message"]["content"]
            assert reply == f"Re: {history[-1]['content']}"
            history += [{"role": "assistant", "content": reply}, user(f"Q{i}.{k}")]
        return i

    threads, done = in_threads(40, talk)
    [t.join() for t in threads]
    assert len(done) == 40 and len(server.paired) == 80 and server.idle()
    assert all(t.next_state[0]["content"].split(".")[0] in t.messages[0]["content"]
               for t in server.paired)


def test_swapping_holds_or_rejects(make_server):
    """Protects: `hold` forwards while weights are swapped (the paused engine holds), `reject`
    answers 503, and LoRA pauses nothing."""
    for overrides, status in (({"lora_rank": 0}, 200), ({"lora_rank": 0, "pause": "reject"}, 503),
                              ({"lora_rank": 16, "pause": "reject"}, 200)):
        server = make_server(**overrides)
        server.policy.begin_swap()
        answer = server.post({"messages": HI})
        assert answer[0] == status and (status == 200 or answer[1]["Retry-After"])


def test_overload_serve_keeps_serving(make_server):
    """Protects: by default users are served also when the trainer is behind."""
    server = make_server(overload="serve")
    server.hooks.overloaded = lambda: True
    assert server.ask("Hi.")


def test_feedback(server):
    """Protects: a thumb or a comment ends the waiting of its turn, by turn id or by session."""
    def rate(body):
        return server.post(body, path="/v1/feedback")

    turns = [server.post({"messages": [user(f"Q{i}")], "session_id": f"s{i}"})[2]["id"]
             for i in range(5)]
    assert rate({"turn": turns[0], "score": 1})[2] == {"turn": turns[0], "applied": True}
    assert rate({"session_id": "s1", "score": -1, "text": "Too long."})[0] == 200
    assert rate({"turn": turns[2], "hint": "Give the unit, please."})[0] == 200
    assert rate({"turn": turns[3], "score": 0})[0] == 200
    assert [t.feedback for t in server.paired] == [
        {"score": 1}, {"score": -1, "text": "Too long."}, {"hint": "Give the unit, please."},
        {"score": 0}]
    assert [t.next_state[0]["content"] for t in server.paired] == [
        "👍", "Too long.", "Give the unit, please.", ""]
    assert server.turns()[1].feedback["text"] == "Too long."
    refused(rate({"turn": turns[0], "score": 1}), 409)  # the judge has it, and it says no
    assert rate({"turn": "in line", "score": 1})[0] == 200 and len(server.late) == 2
    for bad in ({}, {"turn": turns[4]}, {"score": 1}, {"turn": turns[4], "score": 2},
                {"turn": turns[4], "score": "good"}, {"turn": turns[4], "score": True},
                {"turn": turns[4], "text": 5}, {"turn": 5, "score": 1},
                {"turn": turns[4], "text": ""}, {"turn": turns[4], "hint": "", "text": None},
                {"session_id": "none", "score": 1}, {"session_id": {}, "score": 1},
                {"turn": turns[4], "score": []}):
        refused(rate(bad), 400)
    assert turns[4] in server.sessions.keys


def test_health_and_models(server):
    """Protects: `accepting` is false until version 0 has passed its check; what waits is shown."""
    server.policy.accepting = False
    health = server.request("GET", "/healthz")[2]
    assert health == {"accepting": False, "version": 0, "swapping": False, "open": 0, "waiting": 0,
                      "requests": {"ok": 0, "failed": 0, "rejected": 0}}
    refused(server.post({"messages": HI}), 503, "not ready")
    server.policy.accepting = True
    server.ask("Hi.")
    server.policy.publish(3, "v3")
    health = server.request("GET", "/healthz")[2]
    assert (health["version"], health["waiting"], health["requests"]["ok"]) == (3, 1, 1)


def test_turn_log(server):
    """Protects: turns.jsonl is private, merges into whole turns, and gives each turn one fate."""
    server.ask("A")
    server.ask("A", "Hello there.", "B")
    assert server.path.stat().st_mode & 0o777 == 0o600
    first, second = server.turns()
    assert first.next_state == [user("B")] and first.rollout_logp == [-0.5] * 3
    turn = server.paired[0]
    assert server.log.close(turn, "trained", 4) and not server.log.close(turn, "stale")
    server.log.close_all("run_ended")
    assert [(t.fate, t.step) for t in server.turns()] == [("trained", 4), ("run_ended", None)]
    assert server.log.fates.total() == server.log.turns == 2


def test_tools_without_a_parser_are_no_error(make_server, engine):
    """Protects: an agent that sends tools is answered by a model whose calls nobody can parse; vLLM
    would refuse tool_choice auto."""
    server = make_server(tool_parser="")
    for extra in ({}, {"tool_choice": "auto"}):
        assert server.post({"messages": HI, "tools": [TOOL], **extra})[0] == 200
        assert engine.requests[-1]["tool_choice"] == "none" and engine.requests[-1]["tools"]


# ------------------------------------------------------------- what OpenClaw does after a failure

STAMP = "[Mon 2026-11-30 21:4{} UTC] "
RUNTIME = "Runtime: agent=main | session=agent:main:explicit:s | host=vm | os=Linux"
RETRY = ("[Queued user message from a previous active turn; preserved as context only. Continue "
         "with the active prompt.]\n{}\n\nContinue the current task from the existing transcript, "
         "preserving completed work. Do not restart the task or repeat completed actions.")


def test_openclaw_retry_is_paired(server, engine):
    """After a refusal the agent wraps the words for its retry and later shows them plain again.
    Once a loss: the reply to a retry was never paired."""
    engine.script = lambda body: say("Re: M1" if len(body["messages"]) == 1 else "Re: M2")
    first = user(STAMP.format(1) + "M1 What is rain?\n\n" + RUNTIME)
    server.ask(first)
    one = [first, {"role": "assistant", "content": "Re: M1"}]
    server.ask(*one, user(STAMP.format(3) + RETRY.format("M2 No, shorter.")))
    server.ask(*one, user(STAMP.format(2) + "M2 No, shorter."),
               {"role": "assistant", "content": "Re: M2"}, user(STAMP.format(4) + "M3 Thanks."))
    assert [[m["content"] for m in t.next_state] for t in server.paired] == [
        ["M2 No, shorter."], ["M3 Thanks."]]
    assert len({t.session for t in server.turns()}) == 1
    assert "openclaw_retry" in server.turns()[1].stripped


def test_strangers_with_the_same_last_line_and_reply(server, engine):
    """Long prompts often end in the same line, and short replies are alike: the whole words tell
    the turns apart. Once a bug: only the last line was looked at, and B's words judged A's turn."""
    engine.script = lambda body: say("Yes.")
    asked = {name: user(f"Document {name}: ...\nAnswer yes or no.") for name in "AB"}
    for message in asked.values():
        server.ask(message)
    for _ in range(2):  # a retry must not take the other's turn either
        server.ask(asked["B"], {"role": "assistant", "content": "Yes."}, user("Wrong, look again."))
    assert [t.messages for t in server.paired] == [[asked["B"]]]


def test_openclaw_merged_messages_are_paired(server, engine):
    """A message that got no answer is later merged with the next one, as parts. Once a loss: the
    parts ran into each other, for the model as well, and the words were others than before."""
    engine.script = lambda body: say("Two.")
    server.ask(user(STAMP.format(1) + "M1 What is rain?\n\n" + RUNTIME),
               user(STAMP.format(2) + "M2 Hello?"))
    merged = [STAMP.format(1) + "M1 What is rain?", "M2 Hello?", RUNTIME]
    server.ask(user([{"type": "text", "text": x} for x in merged]),
               {"role": "assistant", "content": "Two."}, user(STAMP.format(3) + "M3 No, shorter."))
    assert [t.next_state[0]["content"] for t in server.paired] == ["M3 No, shorter."]
    assert "rain?\nM2 Hello?\nRuntime" in engine.requests[1]["messages"][0]["content"]
