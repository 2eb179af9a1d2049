// The live page. One event stream brings everything; a turn that is opened is fetched by itself.
// KEEP: prompts and replies are hostile. They become text nodes, never markup.
"use strict";

const $ = (selector, root = document) => root.querySelector(selector);

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.includes("-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((c) => c !== null && c !== undefined)); // strings become text
  return node;
}

const num = (x, digits = 2) => (typeof x === "number" ? x.toFixed(digits) : "–");
const signed = (x, digits = 2) => (typeof x === "number" && x > 0 ? "+" : "") + num(x, digits);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

let config = {}, status = {}, rows = [];
const turns = new Map(); // id -> {brief, item, box}
const followed = new Map(); // id of a turn of our own talk -> the element that shows its fate

// ------------------------------------------------------------------------------ from the server

/** Server-sent events of a fetch: the one reader of the page's stream and of chat answers. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message", data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) yield [name, data];
    }
  }
}

/** A fetch whose refusal is an Error with the server's own sentence. */
async function ask(path, body, signal) {
  const options = body === undefined ? { signal } : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    signal,
  };
  const response = await fetch(path, options);
  if (response.ok) return response;
  let sentence = `the server answered ${response.status}`;
  try { sentence = (await response.json()).error.message; } catch { /* not one of ours */ }
  const error = new Error(sentence);
  error.status = response.status;
  if (error.status === 401 && path !== "/login") showLogin();
  throw error;
}

let open = null, heard = 0; // the AbortController of the stream; when it last said something

async function connect() {
  if (open || document.hidden) return; // a page that nobody sees takes no stream
  const mine = open = new AbortController();
  let wait = 2000;
  heard = Date.now();
  try {
    const response = await ask("/events", undefined, mine.signal);
    $("#login").hidden = true;
    $("main").hidden = false;
    link("live");
    for await (const [name, data] of eventsOf(response)) {
      heard = Date.now();
      HEARD[name]?.(JSON.parse(data));
    }
    link("the server ended the connection", true);
  } catch (error) {
    if (error.status === 401) wait = 0;
    else if (!document.hidden) link(error.status ? error.message : "no connection", true);
  }
  open = open === mine ? null : open;
  if (wait) setTimeout(connect, wait);
}

function link(text, off = false) {
  if ($("#link").textContent !== text) $("#link").textContent = text;
  $("#link").classList.toggle("off", off);
}

setInterval(() => { // a status comes each second: silence is a connection that died unseen
  if (open && Date.now() - heard > 15_000) open.abort();
}, 5000);

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) connect();
  else if (open) { open.abort(); open = null; link("asleep", true); }
});

function showLogin() {
  $("main").hidden = true;
  if (!$("#login").hidden) return;
  link("locked", true);
  $("#login").hidden = false;
  $("#key").focus();
}

$("#login").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("#login .error").textContent = "";
  try {
    await ask("/login", { key: $("#key").value });
    $("#key").value = "";
    connect();
  } catch (error) {
    $("#login .error").textContent = error.message;
    $("#key").select();
  }
});

const HEARD = {
  hello(data) { // a new stream tells everything again
    const other = data.run !== config.run;
    config = data;
    rows = [];
    const rank = config.lora_rank ? `LoRA rank ${config.lora_rank}` : "full weights";
    $("#run").textContent =
      `${config.mode} · ${config.model} · ${rank} · judge: ${config.judge}` +
      (config.simulate ? ` · simulated users: ${config.simulate}` : "");
    if (!other) return; // what is open stays open
    for (const turn of turns.values()) turn.item.remove();
    turns.clear();
    held.clear();
    for (const chart of CHARTS) { // of another run; the new one's come with its first update
      chart.plot?.destroy();
      chart.plot = null;
    }
    drawCharts();
    drawNumbers();
  },
  rows(data) {
    rows = rows.concat(data).slice(-2000);
    drawCharts();
    drawNumbers();
  },
  turns: (data) => data.forEach(heardTurn),
  status(data) { status = data; drawLoops(); },
};

// ---------------------------------------------------------------------------------- the four loops

function loop(id, big, small, busy) {
  const card = $(`#${id}`);
  card.classList.toggle("busy", Boolean(busy));
  if ($("b", card).textContent !== big) $("b", card).textContent = big;
  if ($("p", card).textContent !== small) $("p", card).textContent = small;
}

function drawLoops() {
  const s = status, batch = config.batch_size, step = s.updates ?? 0;
  loop("serve", s.accepting ? `v${s.version}` : "closed",
    `${s.open} open, ${s.waiting} await a reaction`, s.open);
  loop("judge", String(s.judging ?? 0), s.judging === 1 ? "turn being judged" : "turns being judged", s.judging);
  loop("train", `step ${step}`, `${s.leased ? `training ${s.leased}, next ` : ""}batch ${s.ready ?? 0}/${batch}`,
    s.leased);
  Object.assign($("#train progress"), { max: batch, value: Math.min(s.ready ?? 0, batch) });
  const behind = step - s.version;
  loop("sync", s.swapping ? `→ v${step}` : behind > 0 ? `${behind} behind` : "in step",
    s.swapping ? (config.lora_rank ? "loading; nobody waits" : "paused: weights are being swapped")
      : behind > 0 ? "not served yet" : "users get the newest", s.swapping);
  const fates = { ...s.fates }, trained = fates.trained ?? 0;
  delete fates.trained;
  const rest = Object.entries(fates).sort((a, b) => b[1] - a[1]).map(([k, n]) => `${k} ${n}`);
  $("#fates").textContent = `${plural(s.turns, "turn")}: ${trained} trained` +
    (rest.length ? `; not trained: ${rest.join(", ")}` : "");
}

// -------------------------------------------------------------------------------------- the curves

const CHARTS = [
  { title: "Reward", about: "mean score of all judged turns, -1 to 1", digits: 2, range: [-1, 1],
    keys: { reward_mean: "" } },
  { title: "Reply length", about: "tokens", digits: 0, range: [0, null], keys: { reply_tokens: "tokens" } },
  { title: "Hint rate", about: "share of judged turns with a correction", digits: 2, range: [0, 1],
    keys: { hint_rate: "" } },
  { title: "logp gap", about: "engine against trainer, per token", digits: 3, range: [0, null],
    keys: { logp_gap: "canary", logp_gap_turns: "current", logp_gap_stale: "older" } },
  { title: "Clip share", about: "of trained tokens", digits: 3, range: [0, null], keys: { clip_frac: "" } },
  { title: "Staleness", about: "updates between sampling and training", digits: 1, range: [0, null],
    keys: { age_mean: "mean", age_max: "max" } },
];
const DASHES = [undefined, [10, 6], [3, 5]];

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function makeChart(chart) {
  const keys = Object.entries(chart.keys);
  chart.values = keys.map(() => el("b"));
  const legend = keys.map(([, name], i) =>
    el("span", { className: `key s${i}` }, el("i"), name ? `${name} ` : null, chart.values[i]));
  chart.box = el("div", { className: "plot" });
  chart.figure = el("figure", {}, el("figcaption", { title: chart.about },
    chart.name = el("strong", {}, chart.title), ...legend), chart.box);
  $("#charts").append(chart.figure);
  new ResizeObserver(() => {
    const { clientWidth: width, clientHeight: height } = chart.box;
    if (chart.plot && width) chart.plot.setSize({ width, height });
    else if (rows.length) drawCharts();
  }).observe(chart.box);
}

function plotOf(chart, data) {
  const size = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const axis = {
    stroke: style("--soft"), font: `${Math.round(size * 0.78)}px system-ui, sans-serif`,
    grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false }, gap: 6,
  };
  const [low, high] = chart.range;
  const top = (max) => high ?? (max > 0 ? max * 1.08 : 1);
  return new uPlot({
    width: chart.box.clientWidth, height: chart.box.clientHeight, legend: { show: false },
    padding: [10, 12, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: "step" } },
    scales: { x: { time: false, range: (u, a, b) => (a === b ? [a - 1, b + 1] : [a, b]) },
              y: { range: (u, min, max) => [low, top(max)] } },
    axes: [{ ...axis, size: size * 1.45, gap: 10, space: size * 3, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000] },
           { ...axis, size: size * (chart.digits > 2 ? 2.9 : 2.5), space: size * 1.7 }],
    series: [{}, ...Object.keys(chart.keys).map((_, i) => ({
      stroke: style(`--series-${i}`), width: 3, dash: DASHES[i], spanGaps: true,
      points: { show: data[0].length < 40, size: 8, fill: style(`--series-${i}`) },
    }))],
    hooks: { setCursor: [(u) => values(chart, u.cursor.idx)] },
  }, data, chart.box);
}

/** The figures beside a title: of the update under the pointer, else of the last one. */
function values(chart, at) {
  const pointed = rows[at];
  chart.name.textContent = pointed ? `${chart.title}, step ${pointed.step}` : chart.title;
  Object.keys(chart.keys).forEach((key, i) => {
    const row = pointed ?? rows.findLast((r) => typeof r[key] === "number");
    chart.values[i].textContent = row ? num(row[key], chart.digits) : "–";
  });
}

function drawCharts() {
  for (const chart of CHARTS) {
    if (!chart.figure) makeChart(chart);
    const data = [rows.map((r) => r.step),
      ...Object.keys(chart.keys).map((key) => rows.map((r) => r[key] ?? null))];
    const many = rows.length >= 40;
    if (chart.plot && chart.many !== many) { chart.plot.destroy(); chart.plot = null; }
    chart.many = many;
    if (!rows.length || !chart.box.clientWidth) {
      if (!chart.plot) chart.box.replaceChildren(el("p", { className: "empty" }, "no update yet"));
    } else if (chart.plot) chart.plot.setData(data);
    else {
      chart.box.replaceChildren();
      chart.plot = plotOf(chart, data);
    }
    values(chart, chart.plot?.cursor.idx);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of CHARTS) { chart.plot?.destroy(); chart.plot = null; } // a canvas keeps its colours
  drawCharts();
});

function drawNumbers() {
  if (!$("#numbers").open) return;
  const keys = CHARTS.flatMap((c) => Object.keys(c.keys).map((k) => [k, c.digits]));
  const head = el("tr", {}, ...["step", "version", "judged", ...keys.map(([k]) => k)].map(
    (k) => el("th", { scope: "col" }, k)));
  const body = rows.slice(-30).reverse().map((r) => el("tr", {},
    ...[r.step, r.version, r.judged].map((x) => el("td", {}, num(x, 0))),
    ...keys.map(([k, digits]) => el("td", {}, num(r[k], digits)))));
  $("#numbers table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...body));
}
$("#numbers").addEventListener("toggle", drawNumbers);

// --------------------------------------------------------------------------------------- the turns

const FATES = {
  trained: "trained", no_next_state: "nobody reacted", side: "side turn, served only",
  no_hint: "no hint in the reaction", score_0: "score 0 teaches nothing", unscored: "no valid vote",
  cut: "cut by the limit", render: "its prompt could not be reproduced", too_long: "too long to train",
  stale: "too old when its turn came", overload: "the trainer was behind",
  not_chosen: "another reply to the same question was kept",
  constrained: "not sampled from the policy alone", client_sampling: "the client's own sampling",
  ids_mismatch: "ids and log-probs do not match", bad_logp: "a log-prob was missing or infinite",
  empty: "no token", no_answer: "ended before its answer began", aborted: "the client went away",
  refused: "the engine refused it", engine_error: "the engine failed",
  judge_error: "judging failed", run_ended: "the run ended first",
};
const STATES = { waiting: "waits for a reaction", judging: "being judged", judged: "judged, in line" };

function stateOf(turn) {
  if (!turn.fate) return STATES[turn.state];
  return turn.fate === "trained" ? `trained in step ${turn.step}`
    : `not trained: ${FATES[turn.fate] ?? turn.fate}`;
}

const KEPT = 200; // turns on the page
const held = new Map(); // news that waits while the list is held

function heardTurn(brief) {
  follow(brief);
  const known = turns.get(brief.id);
  if (known) return showTurn(known, brief);
  if ($("#hold").getAttribute("aria-pressed") === "true") {
    held.set(brief.id, brief);
    if (held.size > KEPT) held.delete(held.keys().next().value);
    $("#hold").textContent = `Go on (${held.size} new)`;
    return;
  }
  addTurn(brief);
}

$("#hold").addEventListener("click", () => {
  const hold = $("#hold").getAttribute("aria-pressed") !== "true";
  $("#hold").setAttribute("aria-pressed", hold);
  $("#hold").textContent = hold ? "Go on" : "Hold the list";
  if (!hold) held.forEach(addTurn);
  held.clear();
});

function addTurn(brief) {
  const box = el("div", { className: "detail", id: `detail-${brief.id}`, hidden: true });
  const button = el("button", {
    type: "button", "aria-expanded": "false", "aria-controls": box.id });
  const turn = { button, box, item: el("li", { className: "turn" }, button, box) };
  button.addEventListener("click", () => {
    box.hidden = !box.hidden;
    button.setAttribute("aria-expanded", String(!box.hidden));
    if (!box.hidden) loadDetail(turn);
  });
  turns.set(brief.id, turn);
  $("#turns").prepend(turn.item);
  $("#no-turns").hidden = true;
  showTurn(turn, brief);
  if (turns.size > KEPT) {
    const [id, oldest] = turns.entries().next().value;
    oldest.item.remove();
    turns.delete(id);
  }
}

function showTurn(turn, brief) {
  const text = JSON.stringify(brief);
  if (turn.text === text) return;
  Object.assign(turn, { brief, text });
  const score = brief.score === undefined ? null : brief.score === null
    ? el("span", {}, "unscored")
    : el("span", { className: ["bad", "", "good"][brief.score + 1] }, `score ${signed(brief.score, 0)}`);
  turn.button.replaceChildren(
    el("span", { className: "asked" }, brief.asked || "(nothing)"),
    el("span", { className: "short" }, brief.reply || "(no text)"),
    el("span", { className: "chips" },
      el("span", {}, `v${brief.version}`), el("span", {}, plural(brief.tokens, "token")), score,
      brief.hint ? el("span", {}, "hint") : null,
      el("span", { className: brief.fate === "trained" ? "good" : "" }, stateOf(brief))));
  if (!turn.box.hidden) loadDetail(turn);
}

async function loadDetail(turn) {
  const asked = turn.asked = (turn.asked ?? 0) + 1;
  try {
    const response = await ask(`/events/turns/${encodeURIComponent(turn.brief.id)}`);
    const data = await response.json();
    if (asked === turn.asked) showDetail(turn.box, data, turn.brief); // else a newer answer comes
  } catch (error) {
    turn.box.replaceChildren(el("p", { className: "error" }, error.message));
  }
}

function part(title, ...content) {
  return el("div", {}, el("h4", {}, title), ...content);
}

function showDetail(box, turn, brief) {
  const were = new Set([...box.querySelectorAll("details[open]")].map((d) => d.dataset.name));
  const fold = (name, title, make) => {
    const node = el("details", {}, el("summary", {}, title));
    node.dataset.name = name;
    node.addEventListener("toggle", () => {
      if (node.open && node.childElementCount === 1) node.append(make());
    });
    node.open = were.has(name);
    return node;
  };
  const said = turn.next_state.map((m) => el("p", { className: "said" }, `${m.role}: ${m.content}`));
  const last = turn.messages.findLast((m) => m.role === "user") ?? turn.messages.at(-1);
  box.replaceChildren(...[
    part("Prompt", el("pre", {}, last?.content ?? ""),
      turn.messages.length > 1
        ? fold("prompt", `all ${turn.messages.length} messages`, () => messages(turn.messages)) : null),
    part("Reply", reasoning(turn.reply), tokenView(turn), calls(turn.reply)),
    said.length ? part("What came next", ...said) : null,
    turn.judged_at ? part("Judged", el("p", {}, ...judgement(turn))) : null,
    turn.hint ? part(turn.hint_skip ? `Hint, not used: ${turn.hint_skip}` : "Hint", el("p", {}, turn.hint)) : null,
    turn.hints.length > 1 ? fold("hints", `${turn.hints.length} valid hints`,
      () => el("div", {}, ...turn.hints.map((h) => el("p", { className: "message" }, h)))) : null,
    part("Fate", el("p", { className: turn.fate === "trained" ? "good" : "" },
      `${stateOf(brief)}${turn.fate && turn.fate !== "trained" ? ` (${turn.fate})` : ""}`)),
    fold("table", "Log-probs per token", () => tokenTable(turn)),
    el("p", { className: "soft" }, facts(turn)),
  ].filter(Boolean));
}

function messages(all) {
  return el("div", {}, ...all.map((m) => el("div", { className: "message" },
    el("h4", {}, m.role), el("pre", {}, m.content), calls(m))));
}

function reasoning(reply) {
  return reply.reasoning_content
    ? el("pre", { className: "soft" }, reply.reasoning_content) : null;
}

function calls(message) {
  const found = message.tool_calls ?? [];
  return found.length ? el("pre", {}, found.map(
    (c) => `calls ${c.function.name} with ${c.function.arguments}`).join("\n")) : null;
}

function judgement(turn) {
  const votes = turn.votes.map((v) => (v === null ? "invalid" : signed(v, 0))).join(", ") || "none";
  const hints = turn.hint_votes.map((v) => (v === null ? "invalid" : v[0] === 1 ? "yes" : "no"));
  const kind = ["bad", "", "good"][(turn.score ?? 0) + 1];
  return [
    `votes ${votes} → `,
    el("span", { className: kind }, turn.score === null ? "unscored" : `score ${signed(turn.score, 0)}`),
    hints.length ? ` · can a hint be drawn from it: ${hints.join(", ")}` : null,
    turn.feedback.score !== undefined ? ` · a thumb was given: ${signed(turn.feedback.score, 0)}` : null,
  ];
}

function facts(turn) {
  const versions = turn.version_start === turn.version_end
    ? `v${turn.version_start}` : `v${turn.version_start} to v${turn.version_end}`;
  return `session ${turn.session} · ${versions} · ended by ${turn.finish_reason} · ` +
    `${num(turn.finished - turn.created, 1)} s · temperature ${turn.sampling.temperature} · ` +
    new Date(turn.finished * 1000).toLocaleTimeString();
}

// Advantage -> colour: blue is pushed up, orange is pushed down. Opacity grows with the root, so
// that small ones are seen beside those at the bound.
function shade(a) {
  if (typeof a !== "number" || a === 0) return "";
  const bound = Math.max(1, config.opd_clip * config.w_opd);
  const opacity = 0.08 + 0.6 * Math.sqrt(Math.min(1, Math.abs(a) / bound));
  return `rgba(${style(a > 0 ? "--up" : "--down")}, ${opacity.toFixed(3)})`;
}

const wordOf = (tokens, i) => tokens.text[i] ?? `⟨${tokens.id[i]}⟩`;

function tokenView(turn) {
  const t = turn.tokens, n = t.id.length;
  if (!n) return el("pre", {}, turn.reply.content || "(no token)");
  const about = el("p", { className: "about", "aria-live": "polite" },
    "Point at a token, or walk with the arrow keys.");
  const spans = t.id.map((_, i) => {
    const word = wordOf(t, i), span = el("span", {}, word || "·");
    if (!word || /^<\|.*\|>$|^<\/?s>$/.test(word)) span.className = "special";
    span.style.backgroundColor = shade(t.advantage?.[i]);
    span.dataset.i = i;
    return span;
  });
  let now = -1;
  const show = (i) => {
    if (i < 0 || i >= n) return;
    spans[now]?.classList.remove("now");
    spans[now = i].classList.add("now");
    const told = [`${JSON.stringify(wordOf(t, i))} · token ${i + 1} of ${n}`];
    if (t.advantage) told.push(`advantage ${signed(t.advantage[i])}`);
    if (t.teacher) told.push(`teacher ${num(t.teacher[i])}`);
    if (t.prox) told.push(`student ${num(t.prox[i])}`);
    told.push(`sampled at ${num(t.rollout[i])}`);
    about.textContent = told.join(" · ");
  };
  const text = el("div", { className: "tokens", tabIndex: 0, role: "group",
    "aria-label": "The reply, token by token; arrow keys walk" }, ...spans);
  for (const kind of ["pointerover", "click"]) {
    text.addEventListener(kind, (e) => e.target.dataset.i && show(Number(e.target.dataset.i)));
  }
  text.addEventListener("keydown", (e) => {
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: n - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    show(to);
  });
  const why = t.advantage ? el("div", { className: "scale" },
    el("span", { className: "plus" }, "made more likely"),
    el("span", { className: "minus" }, "made less likely"))
    : el("p", { className: "soft" }, unshaded(turn));
  return el("div", {}, text, why, about);
}

function unshaded(turn) {
  if (turn.fate && turn.fate !== "trained") return "No colours: it is not trained.";
  if (config.topk && turn.distil) {
    return "No colours: --topk distils whole distributions, without an advantage per token.";
  }
  return turn.distil ? "The colours come with the training step: the teacher has not scored it yet."
    : turn.fate ? "No advantage is in the record of this turn." : "No colours before it is judged.";
}

function tokenTable(turn) {
  const t = turn.tokens;
  const columns = [["sampled", t.rollout], ["student", t.prox], ["teacher", t.teacher],
    ["difference", t.teacher && t.prox && t.teacher.map((x, i) => x - t.prox[i])],
    ["advantage", t.advantage]].filter(([, values]) => values);
  const head = el("tr", {}, el("th", { scope: "col" }), el("th", { scope: "col", className: "word" }, "token"),
    ...columns.map(([name]) => el("th", { scope: "col" }, name)));
  const body = t.id.map((_, i) => el("tr", {}, el("td", {}, String(i + 1)),
    el("td", { className: "word" }, JSON.stringify(wordOf(t, i))),
    ...columns.map(([name, values]) => el("td", {},
      (/diff|adv/.test(name) ? signed : num)(values[i], 3)))));
  return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Log-probs per token" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

// ---------------------------------------------------------------------------------------- the chat

let talk = [], session = "", speaking = null;

function newTalk() {
  speaking?.abort();
  talk = [];
  followed.clear();
  session = `page-${[...crypto.getRandomValues(new Uint8Array(4))].map((b) => b.toString(16).padStart(2, "0")).join("")}`;
  $("#log").replaceChildren();
  $("#chat > .error").textContent = "";
}
newTalk();
$("#new").addEventListener("click", () => { newTalk(); $("#text").focus(); });

$("#text").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
    e.preventDefault();
    $("#say").requestSubmit();
  }
});

$("#say").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (speaking) { speaking.abort(); return; }
  const text = $("#text").value.trim();
  if (!text) return;
  $("#text").value = "";
  $("#chat > .error").textContent = "";
  const question = el("article", { className: "user" }, text), answer = el("article");
  $("#log").append(question, answer);
  talk.push({ role: "user", content: text });
  const mine = talk;
  speaking = new AbortController();
  $("#say button").textContent = "Stop";
  $("#log").setAttribute("aria-busy", "true"); // read out when it is complete
  try {
    const reply = await listen(answer, speaking.signal);
    mine.push({ role: "assistant", content: reply.content });
    answer.append(reactions(reply.id));
  } catch (error) {
    if (error.name === "AbortError") { // what was said so far stays, as the model would see it
      mine.push({ role: "assistant", content: answer.lastChild?.data ?? "" }); // no thoughts
      answer.append(el("div", { className: "after" }, "stopped; not trained"));
    } else if (mine === talk) {
      mine.pop();
      question.remove();
      answer.remove();
      if (!$("#text").value) $("#text").value = text; // nothing typed is lost
      $("#chat > .error").textContent = error.message;
    }
  } finally {
    speaking = null;
    $("#say button").textContent = "Send";
    $("#log").setAttribute("aria-busy", "false");
    scrollDown();
  }
});

/** Streams one answer into `box` -> {id, content}. */
async function listen(box, signal) {
  const response = await ask("/v1/chat/completions",
    { model: config.served_name, messages: talk, session_id: session, stream: true }, signal);
  const thoughts = el("span", { className: "thinking" }), words = document.createTextNode("");
  box.append(thoughts, words);
  let id = null, finished = false;
  for await (const [, data] of eventsOf(response)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    id = chunk.id;
    const choice = chunk.choices[0];
    thoughts.append(choice?.delta.reasoning_content ?? "");
    words.data += choice?.delta.content ?? "";
    finished ||= Boolean(choice?.finish_reason);
    scrollDown();
  }
  if (!finished) throw new Error("the answer broke off");
  return { id, content: words.data };
}

function scrollDown() {
  $("#log").scrollTop = $("#log").scrollHeight;
}

function reactions(id) {
  const fate = el("span", {}, STATES.waiting), after = el("div", { className: "after" });
  for (const [score, sign, name] of [[1, "👍 good", "Good reply"], [-1, "👎 bad", "Bad reply"]]) {
    const button = el("button", {
      type: "button", "aria-label": name, "aria-pressed": "false" }, sign);
    button.addEventListener("click", async () => {
      try {
        await ask("/v1/feedback", { turn: id, score });
        for (const b of after.querySelectorAll("button")) b.setAttribute("aria-pressed", String(b === button));
      } catch (error) { fate.textContent = error.message; }
    });
    after.append(button);
  }
  after.append(fate);
  followed.set(id, fate);
  if (turns.has(id)) follow(turns.get(id).brief);
  return after;
}

/** What becomes of our own turns is shown beside them. */
function follow(brief) {
  const fate = followed.get(brief.id);
  if (!fate) return;
  const score = typeof brief.score === "number" ? `score ${signed(brief.score, 0)}, ` : "";
  fate.textContent = `${score}${brief.hint ? "a hint, " : ""}${stateOf(brief)}`;
}

drawCharts();
connect();
