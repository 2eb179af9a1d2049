"""Clients that people have, unchanged, against the real proxy in front of the fake engine.

Every client holds the same talks: two questions, and a tool round. What counts: each answer has
status 200, the client sees the engine's reply, and each turn gets the next state that its user or
its tool gave, word for word. Only openai has to be installed; the others' tests are skipped where
their library is missing. requirements-clients.txt has them all (`make test-clients`).
"""

import asyncio
import json

import openai
import pytest
from fake_engine import call_deltas, say

RAIN, RAIN_SAID = "What is rain?", "Water that falls from clouds to the ground."
SHORTER, SHORTER_SAID = "Too long. Three words at most.", "Falling water."
OSLO, OSLO_SAID = "Do I need an umbrella in Oslo?", "No, it is sunny in Oslo."
THANKS, THANKS_SAID = "Thanks, perfect.", "You are welcome."
WEATHER = "Sunny, 21 °C."
LOOK = ("get_weather", {"city": "Oslo"})
TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}},
                   "required": ["city"], "additionalProperties": False}}}

# litellm's own types make pydantic say so when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning")

CHAT = (RAIN_SAID, SHORTER_SAID)  # what the engine says in each talk
TOOL_ROUND = (LOOK, OSLO_SAID, THANKS_SAID)


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    assert city == "Oslo"
    return WEATHER


def user(words):
    return {"role": "user", "content": words}


def script(engine, *replies):
    """The engine's replies in order: words, or (tool, arguments) of a call."""
    def answer(body):
        reply = replies[len(engine.requests) - 1]
        if isinstance(reply, str):
            return say(reply)
        return call(*reply)

    engine.script = answer


def call(name, arguments, id="call_1"):
    """A reply that is one tool call, its JSON as tight as models write it."""
    arguments = json.dumps(arguments, separators=(",", ":"))
    return say(deltas=call_deltas(0, name, arguments, id), finish="tool_calls")


@pytest.fixture(autouse=True)
def by_themselves(monkeypatch):
    """No library calls home or goes round by a web proxy, whatever the tester's settings are."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID",
                 "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched on import


@pytest.fixture
def server(make_server):
    """The running proxy; `url` for clients, (path, status, type) of all that it answered."""
    server = make_server()
    server.url, server.answered = f"http://127.0.0.1:{server.cfg.port}/v1", []
    app = server.web.application

    def watched(environ, start_response):
        def start(status, headers, *more):
            kind = dict(headers)["Content-Type"].split(";")[0]
            server.answered.append((environ["PATH_INFO"], int(status[:3]), kind))
            return start_response(status, headers, *more)
        return app(environ, start)

    server.web.application = watched
    return server


def said(turn):
    """What a reply says: its words, or (tool, arguments) of its call."""
    calls = [c["function"] for c in turn.reply.get("tool_calls") or []]
    assert len(calls) <= 1
    return (calls[0]["name"], json.loads(calls[0]["arguments"])) if calls else turn.reply["content"]


def served(n, streamed=False):
    kind = "text/event-stream" if streamed else "application/json"
    return [("/v1/chat/completions", 200, kind)] * n


def check(server, streamed, replies, reactions):
    """Every request was answered, and reply i got exactly reaction i; the last one waits."""
    assert server.answered == served(len(replies), streamed)
    turns = server.turns()
    assert [said(t) for t in turns] == list(replies)
    assert server.fates() == {None: len(replies)} and len({t.session for t in turns}) == 1
    assert [t.id for t in server.paired] == [t.id for t in turns[:-1]]
    assert [[(m["role"], m["content"]) for m in t.next_state] for t in server.paired] == reactions
    assert len(server.sessions.keys) == 1


def check_chat(server, streamed):
    check(server, streamed, CHAT, [[("user", SHORTER)]])


def check_tool_round(server, streamed):
    check(server, streamed, TOOL_ROUND, [[("tool", WEATHER)], [("user", THANKS)]])
    sent = server.engine.requests
    assert sent[0]["tools"][0]["function"]["name"] == "get_weather"
    (made,) = sent[1]["messages"][-2]["tool_calls"]
    assert made["id"] == sent[1]["messages"][-1]["tool_call_id"] == "call_1"
    assert all(t.tools for t in server.turns())


# ------------------------------------------------------------------------------------------ openai


def create(client, **body):
    return client.chat.completions.create(**body).choices[0].message


def read(client, **body):
    """The message as a program puts it together that reads the chunks itself."""
    return joined(list(client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **body)))


def joined(events):
    assert [bool(e.usage) for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage.completion_tokens > 1 and not events[-1].choices
    deltas = [e.choices[0].delta for e in events[:-1]]
    message = {"role": "assistant", "content": "".join(d.content or "" for d in deltas) or None}
    pieces = [c for d in deltas for c in d.tool_calls or []]
    reasons = [e.choices[0].finish_reason for e in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls" if pieces else "stop"]
    if pieces:
        arguments = "".join(c.function.arguments or "" for c in pieces)
        message["tool_calls"] = [{"id": pieces[0].id, "type": "function", "function": {
            "name": pieces[0].function.name, "arguments": arguments}}]
    return message


def helped(client, **body):
    with client.chat.completions.stream(**body) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


def awaited(talk):
    """An async way of asking as a plain one; the client lives as long as the question."""
    def ask(client, **body):
        async def run():
            async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0,
                                          timeout=20) as client_async:
                return await talk(client_async, **body)
        return asyncio.run(run())
    return ask


async def create_async(client, **body):
    return (await client.chat.completions.create(**body)).choices[0].message


async def read_async(client, **body):
    stream = await client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **body)
    return joined([event async for event in stream])


async def helped_async(client, **body):
    async with client.chat.completions.stream(**body) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0].message


WAYS = {"create": create, "stream": read, "stream helper": helped,
        "async create": awaited(create_async), "async stream": awaited(read_async),
        "async stream helper": awaited(helped_async)}


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def streamed(way):
    return "stream" in way


@pytest.fixture
def ask(way, server):
    """ask(messages, ...) -> the assistant's message, as the client hands it out."""
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        yield lambda messages, **more: WAYS[way](client, model="policy", messages=messages, **more)


def content(message):
    return message["content"] if isinstance(message, dict) else message.content


def test_openai_chat(server, engine, ask, streamed):
    """Protects: each way of the official client to ask, its message sent back as it came."""
    script(engine, *CHAT)
    first = ask([user(RAIN)])
    second = ask([user(RAIN), first, user(SHORTER)])
    assert (content(first), content(second)) == CHAT
    check_chat(server, streamed)


def test_openai_tool_round(server, engine, ask, streamed):
    """Protects: a call, its result as its turn's next state, the answer and the reaction to it."""
    script(engine, *TOOL_ROUND)
    talk = [user(OSLO)]
    talk.append(ask(talk, tools=[TOOL]))
    (made,) = talk[-1]["tool_calls"] if isinstance(talk[-1], dict) else [
        c.model_dump() for c in talk[-1].tool_calls]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == LOOK
    talk.append({"role": "tool", "tool_call_id": made["id"], "content": WEATHER})
    talk.append(ask(talk, tools=[TOOL]))
    assert content(talk[-1]) == OSLO_SAID
    talk.append(user(THANKS))
    assert content(ask(talk, tools=[TOOL])) == THANKS_SAID
    check_tool_round(server, streamed)


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_openai_stream_without_usage(server, engine, options):
    """Protects: usage is sent only if asked for, and the pairing does not depend on it."""
    script(engine, *CHAT)
    talk = [user(RAIN)]
    more = {"stream_options": options} if options else {}
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        for reply in CHAT:
            events = list(client.chat.completions.create(model="policy", messages=talk,
                                                         stream=True, **more))
            assert not any(e.usage for e in events) and all(e.choices for e in events)
            assert "".join(e.choices[0].delta.content or "" for e in events) == reply
            talk += [{"role": "assistant", "content": reply}, user(SHORTER)]
    check_chat(server, streamed=True)


# ---------------------------------------------------------------------------------- openai-agents


def agents_talk(server, words, streamed):
    """Each of `words` after what was said so far -> the agent's answers."""
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)

    async def talk():
        client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=20)
        agent = agents.Agent(
            name="Helper", instructions="Help.", tools=[agents.function_tool(get_weather)],
            model=agents.OpenAIChatCompletionsModel(model="policy", openai_client=client))
        history, answers = [], []
        async with client:
            for message in words:
                history.append(user(message))
                if streamed:
                    result = agents.Runner.run_streamed(agent, history)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, history)
                answers.append(result.final_output)
                history = result.to_input_list()
        return answers

    return asyncio.run(talk())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_openai_agents_chat(server, engine, streamed):
    """Protects: the Agents SDK on a base URL of one's own."""
    script(engine, *CHAT)
    assert agents_talk(server, [RAIN, SHORTER], streamed) == list(CHAT)
    check_chat(server, streamed)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_openai_agents_tool_round(server, engine, streamed):
    """Protects: the SDK calls the tool itself; result and thanks are the next states."""
    script(engine, *TOOL_ROUND)
    assert agents_talk(server, [OSLO, THANKS], streamed) == [OSLO_SAID, THANKS_SAID]
    check_tool_round(server, streamed)


# ------------------------------------------------------------------------------- langchain-openai


def langchain(server, streamed, tools=()):
    """-> ask(messages), with ChatOpenAI behind it."""
    library = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = library.ChatOpenAI(base_url=server.url, api_key="none", model="policy", max_retries=0,
                               timeout=20)
    model = model.bind_tools(tools) if tools else model
    return (lambda talk: sum_chunks(model.stream(talk))) if streamed else model.invoke


def sum_chunks(chunks):
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_langchain_chat(server, engine, streamed):
    """Protects: ChatOpenAI's own messages in the history."""
    ask = langchain(server, streamed)
    script(engine, *CHAT)
    first = ask([("user", RAIN)])
    second = ask([("user", RAIN), first, ("user", SHORTER)])
    assert (first.content, second.content) == CHAT
    check_chat(server, streamed)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_langchain_tool_round(server, engine, streamed):
    """Protects: a bound tool, run by langchain, its ToolMessage as next state."""
    tools = pytest.importorskip("langchain_core.tools", reason="langchain-openai is not installed")
    tool = tools.tool(get_weather)
    ask = langchain(server, streamed, [tool])
    script(engine, *TOOL_ROUND)
    talk = [("user", OSLO)]
    talk.append(ask(talk))
    (made,) = talk[-1].tool_calls
    assert (made["name"], made["args"]) == LOOK
    talk.append(tool.invoke(made))
    talk.append(ask(talk))
    assert talk[-1].content == OSLO_SAID
    assert ask([*talk, ("user", THANKS)]).content == THANKS_SAID
    check_tool_round(server, streamed)


# ------------------------------------------------------------------------------------- smolagents


def smol_model(server):
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed")
    return smolagents, smolagents.OpenAIServerModel(model_id="policy", api_base=server.url,
                                                    api_key="none")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_smolagents_model(server, engine, streamed):
    """Protects: smolagents' model, whose contents are lists of parts."""
    smolagents, model = smol_model(server)
    script(engine, *CHAT)

    def ask(talk):
        talk = [smolagents.ChatMessage(role=role, content=[{"type": "text", "text": words}])
                for role, words in talk]
        if streamed:
            return "".join(d.content or "" for d in model.generate_stream(talk))
        return model.generate(talk).content

    first = ask([("user", RAIN)])
    second = ask([("user", RAIN), ("assistant", first), ("user", SHORTER)])
    assert (first, second) == CHAT
    check_chat(server, streamed)


def smol_agent(server, engine, kind, *steps):
    """An agent of this kind, run on OSLO and THANKS -> its answers."""
    smolagents, model = smol_model(server)
    engine.script = lambda body: steps[len(engine.requests) - 1]
    agent = getattr(smolagents, kind)(tools=[smolagents.tool(get_weather)], model=model,
                                      verbosity_level=0)
    return [agent.run(OSLO), agent.run(THANKS, reset=False)]


def check_constrained(server):
    """All three turns were served and are not trained. (smolagents keeps "Calling tools: ..." in
    place of a reply, so it would not be found again either.)"""
    assert server.answered == served(3)
    assert server.fates() == {"constrained": 3} and not server.paired and server.idle()
    assert WEATHER in server.engine.requests[1]["messages"][-1]["content"]


def test_smolagents_tool_calling_agent(server, engine):
    """Protects: it forces tool calls (tool_choice "required"), so it is served, never trained."""
    calls = [LOOK, ("final_answer", {"answer": OSLO_SAID}),
             ("final_answer", {"answer": THANKS_SAID})]
    steps = [call(*c, id=f"call_{i}") for i, c in enumerate(calls)]
    assert smol_agent(server, engine, "ToolCallingAgent", *steps) == [OSLO_SAID, THANKS_SAID]
    assert all(r["tool_choice"] == "required" for r in engine.requests)
    check_constrained(server)


def test_smolagents_code_agent(server, engine):
    """Protects: a stop string ends each of its replies, so it is served, never trained."""
    steps = [say(f"Thought.\n<code>\n{line}\n", stop_reason="</code>")
             for line in ("print(get_weather('Oslo'))", f"final_answer({OSLO_SAID!r})",
                          f"final_answer({THANKS_SAID!r})")]
    assert smol_agent(server, engine, "CodeAgent", *steps) == [OSLO_SAID, THANKS_SAID]
    assert all("</code>" in r["stop"] for r in engine.requests)
    check_constrained(server)


# ---------------------------------------------------------------------------------------- litellm


def litellm_ask(server, streamed, **more):
    """-> ask(messages), the message as litellm makes it."""
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")

    def ask(talk):
        answer = litellm.completion(model="openai/policy", api_base=server.url, api_key="none",
                                    messages=talk, stream=streamed, max_retries=0, timeout=20,
                                    **more)
        answer = litellm.stream_chunk_builder(list(answer), talk) if streamed else answer
        return answer.choices[0].message

    return ask


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_litellm_chat(server, engine, streamed):
    """Protects: litellm's `openai/` route; its message sent back as it came."""
    ask = litellm_ask(server, streamed)
    script(engine, *CHAT)
    first = ask([user(RAIN)])
    second = ask([user(RAIN), first, user(SHORTER)])
    assert (first.content, second.content) == CHAT
    check_chat(server, streamed)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_litellm_tool_round(server, engine, streamed):
    """Protects: the same with a tool."""
    ask = litellm_ask(server, streamed, tools=[TOOL])
    script(engine, *TOOL_ROUND)
    talk = [user(OSLO)]
    talk.append(ask(talk))
    (made,) = talk[-1].tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == LOOK
    talk.append({"role": "tool", "tool_call_id": made.id, "content": WEATHER})
    talk.append(ask(talk))
    assert talk[-1].content == OSLO_SAID
    assert ask([*talk, user(THANKS)]).content == THANKS_SAID
    check_tool_round(server, streamed)


# -------------------------------------------------------------------------------------------- llm


def llm_conversation(server, monkeypatch, tmp_path):
    """A conversation of the `llm` tool, with the model set up as its manual says."""
    llm = pytest.importorskip("llm", reason="llm is not installed")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: claw\n  model_name: policy\n  api_base: {server.url}\n"
        "  supports_tools: true\n")
    return llm.get_model("claw").conversation()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_llm_chat(server, engine, monkeypatch, tmp_path, streamed):
    """Protects: the `llm` tool's conversations."""
    talk = llm_conversation(server, monkeypatch, tmp_path)
    script(engine, *CHAT)
    assert tuple(talk.prompt(w, stream=streamed).text() for w in (RAIN, SHORTER)) == CHAT
    check_chat(server, streamed)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_llm_tool_round(server, engine, monkeypatch, tmp_path, streamed):
    """Protects: its chain of tool calls."""
    talk = llm_conversation(server, monkeypatch, tmp_path)
    script(engine, *TOOL_ROUND)
    answers = [talk.chain(w, tools=[get_weather], stream=streamed).text() for w in (OSLO, THANKS)]
    assert answers == [OSLO_SAID, THANKS_SAID]
    check_tool_round(server, streamed)
