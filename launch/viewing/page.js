"use strict";
// The whole page. All text of a run is written with textContent: a model may say anything.

const PAGES = ["run", "groups", "trajectory", "actors", "talk"];
const OF_A_STEP = ["groups", "trajectory"];
const view = document.getElementById("view");
const state = { page: "run", runs: [], run: 0, data: [], kind: "step", step: null, row: 0, groups: [], colour: "logprob", beside: null };

async function ask(path) {
  const response = await fetch("api/" + path);
  const answer = await response.json();
  if (!response.ok) throw new Error(detail(answer));
  return answer;
}

// -- where we are: in the address, so that a page can be kept and the browser's way back works ----------

function place() {
  return `#${[state.page, state.run, state.kind, state.step ?? "", state.row].join("/")}`;
}

function go(changes) {
  Object.assign(state, changes);
  if (location.hash !== place()) history.pushState(null, "", place());
  draw();
}

function readPlace() {
  const [page, run, kind, step, row] = location.hash.slice(1).split("/");
  if (PAGES.includes(page)) {
    Object.assign(state, { page, run: Number(run) || 0, kind: kind === "eval" ? "eval" : "step", step: step ? Number(step) : null, row: Number(row) || 0 });
  }
}

// -- data -------------------------------------------------------------------------------------------------

async function load(number) {
  const known = state.data[number] || { records: [], file: "" };
  const news = await ask(`runs/${number}?after=${known.records.length}&file=${known.file}`);
  const before = news.file === known.file ? known.records : [];
  state.data[number] = { ...known, ...news, records: before.concat(news.records) };
}

function steps() {
  const known = state.data[state.run].steps;
  return [...known.step.map((step) => ["step", step]), ...known.eval.map((step) => ["eval", step])].sort((one, other) => one[1] - other[1] || (one[0] < other[0] ? 1 : -1));
}

function chooseStep() {
  const present = steps();
  if (!present.some(([kind, step]) => kind === state.kind && step === state.step) && present.length) {
    [state.kind, state.step] = present[present.length - 1];
  }
}

// -- Run --------------------------------------------------------------------------------------------------

function drawRun() {
  const sections = [];
  if (state.runs.length > 1) {
    sections.push(element("p", {}, state.runs.map((name, index) => element("span", { textContent: `● ${name}   `, style: { color: COLOURS[index % COLOURS.length] } }))));
  }
  const alarms = state.data[state.run].alarms;
  if (alarms.length) sections.push(element("details", { open: true, className: "alarms" }, [element("summary", { textContent: `${alarms.length} alarms` }), ...alarms.toReversed().map((each) => element("p", { className: "error", textContent: `update ${each.step}: ${each.text}` }))]));
  return [...sections, ...curves(state.data.map(({ records }) => records), state.run), settings()];
}

// Asked for when they are opened; they stay open while the curves move.
function settings() {
  const data = state.data[state.run];
  const text = element("pre", { textContent: data.settings || "" });
  const box = element("details", { open: Boolean(data.settings) }, [element("summary", { textContent: "Settings" }), text]);
  box.addEventListener("toggle", async () => {
    data.settings = box.open ? await (await fetch(`api/runs/${state.run}/settings`)).text() : "";
    text.textContent = data.settings || "This run has kept no settings.";
  });
  return box;
}

// -- Groups -----------------------------------------------------------------------------------------------

function drawGroups() {
  const members = state.groups.flatMap((group) => group.members);
  if (!members.length) return [element("p", { textContent: "No trajectories are kept here: run.trajectories_kept says of how many updates." })];
  const rewards = members.map((each) => each.reward);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const wanted = state.filter || "";
  const sorted = [...state.groups].filter((group) => JSON.stringify(group).toLowerCase().includes(wanted.toLowerCase()));
  const mean = (group) => group.members.reduce((sum, each) => sum + each.reward, 0) / group.members.length;
  const orders = { "as trained": () => 0, "lowest reward": (one, other) => mean(one) - mean(other), "highest reward": (one, other) => mean(other) - mean(one), longest: (one, other) => Math.max(...other.members.map((each) => each.tokens)) - Math.max(...one.members.map((each) => each.tokens)) };
  sorted.sort(orders[state.order || "as trained"]);
  const filter = element("input", { type: "search", placeholder: "task, ending, fate, error", value: wanted, "aria-label": "Filter the groups" });
  filter.addEventListener("change", () => go({ filter: filter.value }));
  const order = element("select", { "aria-label": "Order" }, Object.keys(orders).map((name) => element("option", { textContent: name, selected: name === state.order })));
  order.addEventListener("change", () => go({ order: order.value }));
  const rows = sorted.map((group) => element("div", { className: "group" }, [
    element("div", { className: "task", textContent: group.task }),
    element("div", { className: "cells" }, group.members.map((each) => {
      const share = high > low ? (each.reward - low) / (high - low) : 0.5;
      const used = ["trained", "evaluated"].includes(each.fate);
      const failed = Boolean(each.error);
      const cell = element("button", { className: `cell${used ? "" : " unused"}${failed ? " failed" : ""}`, textContent: `${shown(each.reward)}${each.success ? " ✓" : ""}${used ? "" : " ✕"}`, title: `${each.success ? "success" : "no success"} by ${each.judged_by}, ${each.fate}, ${each.ended_by}, ${each.turns} turns${each.fork}, ${each.tokens} tokens ${each.error}`, style: { backgroundColor: `color-mix(in srgb, #2f9e5b ${Math.round(share * 60)}%, var(--card))` } });
      cell.addEventListener("click", () => go({ page: "trajectory", row: each.row }));
      return cell;
    }).concat([element("span", { className: "role", textContent: [...new Set(group.members.map((each) => each.fate))].join(", ") })])),
  ]));
  return [element("div", { className: "tools" }, [filter, order, element("span", { className: "numbers", textContent: `${members.length} trajectories, mean reward ${shown(rewards.reduce((sum, each) => sum + each, 0) / rewards.length)}, ✓ success ${shown(members.filter((each) => each.success).length / members.length)} by ${[...new Set(members.map((each) => each.judged_by))].join(", ")}` })]), histogram(rewards), ...rows];
}

function histogram(rewards) {
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const bins = Array(12).fill(0);
  for (const reward of rewards) bins[Math.min(11, Math.floor((12 * (reward - low)) / (high - low || 1)))] += 1;
  const picture = drawn("svg", { viewBox: "0 0 300 60", width: 300, height: 60, role: "img", "aria-label": `Histogram of the rewards from ${shown(low)} to ${shown(high)}` });
  bins.forEach((count, index) => picture.append(drawn("rect", { x: index * 25, width: 22, y: 48 - (44 * count) / Math.max(...bins), height: (44 * count) / Math.max(...bins), fill: COLOURS[0] })));
  picture.append(drawn("text", { x: 0, y: 59, "font-size": 10, fill: "currentColor" }, shown(low)), drawn("text", { x: 297, y: 59, "font-size": 10, "text-anchor": "end", fill: "currentColor" }, shown(high)));
  return picture;
}

// -- Trajectory -------------------------------------------------------------------------------------------

function message(each) {
  const text = typeof each.content === "string" ? each.content : JSON.stringify(each.content ?? "");
  const body = [element("div", { className: "role", textContent: each.role }), element("pre", { textContent: text })];
  if (each.tool_calls) body.push(element("details", {}, [element("summary", { textContent: `${each.tool_calls.length} tool call(s)` }), element("pre", { textContent: JSON.stringify(each.tool_calls, null, 1) })]));
  const box = element("div", { className: `message ${each.role}` }, body);
  if (each.role !== "system") return box;
  return element("details", {}, [element("summary", { className: "role", textContent: "system" }), box]);
}

function tokens(turn) {
  if (state.colour === "none" || !turn.tokens.length) return [];
  const values = { logprob: turn.logprobs.map((each) => Math.max(0, 1 + each / 5)), version: turn.versions, advantage: turn.tokens.map(() => turn.advantage ?? 0) }[state.colour];
  const [low, high] = state.colour === "logprob" ? [0, 1] : [Math.min(...values), Math.max(...values)];
  return [element("div", { className: "tokens" }, turn.tokens.map((text, index) => {
    const share = (values[index] - low) / (high - low || 1);
    const tint = state.colour === "advantage" ? (values[index] < 0 ? "#c8483c" : "#2f9e5b") : state.colour === "version" ? COLOURS[(turn.versions[index] || 0) % COLOURS.length] : "#d98324";
    const strength = state.colour === "logprob" ? 70 * (1 - share) : 35;
    return element("span", { textContent: text, title: `log-probability ${shown(turn.logprobs[index])}, version ${turn.versions[index] ?? "–"}`, style: { backgroundColor: `color-mix(in srgb, ${tint} ${Math.round(strength)}%, transparent)` } });
  }))];
}

function conversation(each) {
  const turns = each.turns.map((turn, index) => {
    const said = turn.messages.map(message);
    if (!turn.messages.some((one) => one.role === "assistant")) said.push(message({ role: "assistant", content: turn.text }));
    const sign = turn.advantage > 0 ? "good" : turn.advantage < 0 ? "bad" : "";
    return element("div", { className: "turn" }, [
      element("div", { className: "numbers" }, [element("div", { textContent: `turn ${index + 1}` }), element("div", { textContent: `reward ${shown(turn.reward)}` }), element("div", { className: sign, textContent: turn.advantage === null ? "" : `advantage ${shown(turn.advantage)}` }), element("div", { textContent: `${turn.tokens.length} tokens` })]),
      element("div", {}, [...said, ...tokens(turn)]),
    ]);
  });
  const facts = [["task", JSON.stringify(each.task)], ["reward", shown(each.reward)], ["success", `${each.success ? "yes" : "no"}, by ${each.judged_by}`], ["ending", each.ended_by], ["fate", each.fate], ...Object.entries(each.metrics).map(([name, value]) => [name, shown(value)])];
  const table = element("table", {}, [element("tbody", {}, facts.map(([name, value]) => element("tr", {}, [element("td", { className: "role", textContent: name }), element("td", { textContent: value })])))]);
  return element("article", {}, [element("h2", { textContent: each.rollout_id }), table, ...(each.error ? [element("p", { className: "error", textContent: each.error })] : []), ...turns]);
}

// Asked for when it is opened: all files of the run are looked through.
function sameTask(path) {
  const box = element("details", { className: "same" }, [element("summary", { textContent: "The same task over the course of training" })]);
  box.addEventListener("toggle", async () => {
    const byStep = new Map();
    for (const each of await ask(`${path}/same`)) {
      const name = `${each.kind === "eval" ? "evaluation" : "update"} ${each.step}`;
      byStep.set(name, [...(byStep.get(name) || []), each]);
    }
    const rows = [...byStep].map(([name, members]) => element("div", { className: "group" }, [element("div", { className: "task", textContent: name }), element("div", { className: "cells" }, members.map((each) => {
      const cell = element("button", { className: "cell", textContent: shown(each.reward), title: each.fate });
      cell.addEventListener("click", () => go({ kind: each.kind, step: each.step, row: each.row, beside: null }));
      return cell;
    }))]));
    box.replaceChildren(box.firstChild, ...rows);
  }, { once: true });
  return box;
}

async function drawTrajectory() {
  if (!state.groups.length) return drawGroups();
  const path = (row) => `runs/${state.run}/${state.kind}/${state.step}/${row}`;
  const group = state.groups.find((each) => each.members.some((member) => member.row === state.row)) || state.groups[0];
  const cells = group.members.map((each) => {
    const cell = element("button", { className: "cell", textContent: shown(each.reward), "aria-pressed": String(each.row === state.row), title: `${each.fate}, ${each.ended_by}. With Shift: side by side` });
    cell.addEventListener("click", (event) => (event.shiftKey ? go({ beside: each.row }) : go({ row: each.row, beside: null })));
    return cell;
  });
  const colours = element("select", { "aria-label": "Colour of the tokens" }, ["logprob", "version", "advantage", "none"].map((name) => element("option", { textContent: name, selected: name === state.colour })));
  colours.addEventListener("change", () => go({ colour: colours.value }));
  const rows = [state.row, ...(state.beside === null || state.beside === state.row ? [] : [state.beside])];
  const whole = await Promise.all(rows.map((row) => ask(path(row))));
  return [element("div", { className: "tools" }, [element("span", { textContent: "Its group:" }), ...cells, element("label", {}, ["Tokens by ", colours])]), sameTask(path(state.row)), element("div", { className: "members" }, whole.map(conversation))];
}

// -- Actors -----------------------------------------------------------------------------------------------

const actors = { run: null, source: null, look: null };

function watchActors() {
  const wanted = state.page === "actors" ? state.run : null;
  if (wanted === actors.run) return;
  if (actors.source) actors.source.close();
  Object.assign(actors, { run: wanted, source: null, look: null });
  if (wanted === null) return;
  const source = new EventSource(`api/runs/${wanted}/actors`);
  actors.source = source;
  source.onmessage = (event) => {
    actors.look = JSON.parse(event.data);
    if (actors.look.end) source.close();
    if (state.page === "actors") view.replaceChildren(...drawActors());
  };
}

function table(caption, head, rows) {
  const cells = (kind, texts) => element("tr", {}, texts.map((text) => element(kind, { textContent: text })));
  return element("section", { className: "table" }, [element("h2", { textContent: caption }), element("table", {}, [element("thead", {}, [cells("th", head)]), element("tbody", {}, rows.map((row) => cells("td", row)))])]);
}

const since = (seconds) => `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;

function drawActors() {
  const look = actors.look;
  if (!look) return [element("p", { textContent: "Asking the parts of the run …" })];
  if (look.end) {
    const again = element("button", { textContent: "Look again" });
    again.addEventListener("click", () => { actors.run = null; draw(); });
    return [element("p", { className: "verdict", textContent: look.end }), again];
  }
  const now = look.state;
  const roles = new Map();
  for (const each of now.processes) {
    const name = `${each.host}/${each.role}`;
    roles.set(name, [...(roles.get(name) || []), `${each.pid}${each.stopped ? " (stopped)" : ""}`]);
  }
  const parts = [
    element("p", { className: "verdict", textContent: now.verdict }),
    table("Loop", ["does", "for", "something moved", "updates", "driver"], [[now.activity, since(now.seconds), `${since(now.idle_seconds)} ago`, String(now.num_updates), `${now.pid} on ${now.host}`]]),
  ];
  parts.push(table("Last progress", ["result", "when"], Object.entries(now.progress).map(([name, seconds]) => [name, `${since(seconds)} ago`])));
  if (now.fleet) parts.push(table("Fleet", ["environment", "actors up", "in play", "waiting requests", "lost so far"], [[now.fleet.env_class, `${now.fleet.num_ready} of ${now.fleet.num_actors}`, String(now.rollouts.length), String(now.fleet.num_waiting), String(now.fleet.num_lost)]]));
  if (now.stream) parts.push(element("p", {}, [`Stream: ${now.stream[0]} of ${now.stream[1]} trajectories wait there; the loop has the others `, element("meter", { max: now.stream[1], value: now.stream[0] })]));
  parts.push(table("Replicas of the policy server", ["replica", "version", "requests", "answered", "last poll"], Object.entries(now.replicas).map(([name, each]) => [name, String(each.version), String(each.num_running), String(each.num_answered), `${since(each.silent_seconds)} ago`])));
  parts.push(table("Rollouts in play", ["rollout", "node", "waits for", "for", "age"], now.rollouts.map((each) => [each.id, each.host, each.waits_for, since(each.waiting_seconds), since(each.seconds)])));
  parts.push(table("Processes", ["node", "role", "process ids"], [...roles].map(([name, pids]) => [...name.split("/"), pids.join(" ")])));
  for (const each of [...now.unanswered.map((part) => `No answer: ${part}`), ...now.errors]) parts.push(element("p", { className: "error", textContent: each }));
  if (now.failures.length) parts.push(element("h2", { textContent: "The youngest failure of each rollout actor" }));
  for (const each of now.failures) parts.push(element("details", {}, [element("summary", { textContent: `Actor ${each.actor} on ${each.node}, ${since(each.seconds)} ago, rollout ${each.rollout_id}: ${each.error.split("\n")[0]}` }), element("pre", { className: "error", textContent: each.error })]));
  return parts;
}

// -- Talk -------------------------------------------------------------------------------------------------

const talk = { models: [], model: "", said: [], draft: "", asking: null };

async function drawTalk() {
  if (!talk.models.length) {
    talk.models = await ask("models");
    talk.model = talk.models[0];
  }
  const models = element("select", { id: "model", "aria-label": "Who is asked" }, talk.models.map((name) => element("option", { textContent: name, selected: name === talk.model })));
  models.addEventListener("change", () => { talk.model = models.value; });
  const box = element("textarea", { id: "box", rows: 3, value: talk.draft, placeholder: "Say something. Enter sends, Shift+Enter makes a new line.", "aria-label": "Your message" });
  box.addEventListener("input", () => { talk.draft = box.value; });
  box.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); say(); } });
  const send = element("button", { id: "send", textContent: talk.asking ? "Stop" : "Send" });
  send.addEventListener("click", () => (talk.asking ? talk.asking.abort() : say()));
  const fresh = element("button", { textContent: "New conversation" });
  fresh.addEventListener("click", () => { talk.said = []; draw(); });
  const log = element("div", { id: "said", "aria-live": "polite" }, talk.said.map(saying));
  return [element("div", { className: "tools" }, [models, fresh]), log, box, send];
}

function saying(each) {
  const steps = each.steps.map((step) => element("details", { open: true }, [element("summary", { textContent: `step ${step.number}` }), message({ role: "assistant", content: step.text }), message({ role: "tool", content: step.observation })]));
  const told = each.error ? [element("p", { className: "error", textContent: each.error })] : each.content || !each.waits ? [message(each)] : [element("p", { className: "role", textContent: "…" })];
  return element("div", {}, [...steps, ...told, ...(each.recorded && !each.waits ? [thumbs(each)] : [])]);
}

// Feedback on an answer that the server has recorded. It stays as it was given first.
function thumbs(each) {
  const buttons = each.judged ? [] : [["up", "👍"], ["down", "👎"]].map(([thumb, sign]) => {
    const button = element("button", { textContent: sign, title: `This answer was ${thumb === "up" ? "good" : "bad"}`, "aria-label": `Thumb ${thumb}` });
    button.addEventListener("click", () => judge(each, thumb));
    return button;
  });
  return element("p", { className: "thumbs" }, [...buttons, each.verdict ?? ""]);
}

async function judge(each, thumb) {
  const body = JSON.stringify({ answer_id: each.id, thumb });
  const response = await fetch("api/feedback", { method: "POST", headers: { "content-type": "application/json" }, body });
  each.judged = response.ok;
  each.verdict = response.ok ? `Thumb ${thumb}, kept.` : detail(await response.json());
  showTalk(false);
}

async function say() {
  if (talk.asking || !talk.draft.trim()) return;
  talk.said.push({ role: "user", content: talk.draft, steps: [] });
  // An agent has instructions of its own and plays an episode for one message.
  const heard = talk.model.startsWith("agent/") ? talk.said.slice(-1) : talk.said.filter((each) => each.content);
  const answer = { role: "assistant", content: "", steps: [], waits: true };
  talk.said.push(answer);
  talk.draft = "";
  talk.asking = new AbortController();
  showTalk(true);
  try {
    const body = JSON.stringify({ model: talk.model, messages: heard.map(({ role, content }) => ({ role, content })) });
    const response = await fetch("api/talk", { method: "POST", headers: { "content-type": "application/json" }, body, signal: talk.asking.signal });
    if (!response.ok) throw new Error(detail(await response.json()));
    for await (const part of events(response)) {
      if (part.error) throw new Error(part.error.message);
      if (part.step) answer.steps.push(part.step);
      answer.id = part.id;
      answer.recorded = part.recorded;
      answer.content += part.choices?.[0]?.delta?.content ?? "";
      showTalk(false);
    }
  } catch (error) {
    answer.error = error.name === "AbortError" ? "Stopped." : error.message;
  }
  answer.waits = false;
  talk.asking = null;
  showTalk(true);
}

const detail = (answer) => (typeof answer.detail === "string" ? answer.detail : JSON.stringify(answer.detail));

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

// While an answer comes, only the conversation is drawn anew: somebody may be typing the next message.
async function showTalk(whole) {
  if (state.page !== "talk") return;
  if (whole) { await draw(); document.getElementById("box")?.focus(); } else document.getElementById("said")?.replaceChildren(...talk.said.map(saying));
}

// -- the page ---------------------------------------------------------------------------------------------

let drawing = 0;

async function draw() {
  const mine = ++drawing;
  const label = document.getElementById("state");
  try {
    chooseStep();
    for (const page of PAGES) document.getElementById(`show-${page}`).setAttribute("aria-pressed", String(state.page === page));
    document.getElementById("step-label").hidden = !OF_A_STEP.includes(state.page);
    document.getElementById("run").replaceChildren(...state.runs.map((name, index) => element("option", { textContent: name, value: String(index), selected: index === state.run })));
    document.getElementById("step").replaceChildren(...steps().map(([kind, step]) => element("option", { textContent: kind === "eval" ? `evaluation ${step}` : `update ${step}`, value: `${kind}/${step}`, selected: kind === state.kind && step === state.step })));
    state.groups = !OF_A_STEP.includes(state.page) || state.step === null ? [] : await ask(`runs/${state.run}/${state.kind}/${state.step}`);
    watchActors();
    const typing = document.activeElement === filter;
    const parts = await { run: drawRun, groups: drawGroups, trajectory: drawTrajectory, actors: drawActors, talk: drawTalk }[state.page]();
    if (mine !== drawing) return; // something else was asked for meanwhile
    view.replaceChildren(...parts);
    if (typing) filter.focus(); // the curves have moved meanwhile
    const records = state.data[state.run].records;
    label.textContent = records.length ? `step ${records.at(-1).step}` : "";
  } catch (error) {
    if (mine === drawing) view.replaceChildren(element("p", { className: "error", textContent: error.message }));
  }
}

function move(by) {
  const present = steps();
  const at = present.findIndex(([kind, step]) => kind === state.kind && step === state.step);
  const [kind, step] = present[Math.max(0, Math.min(present.length - 1, at + by))] || [state.kind, state.step];
  go({ kind, step, row: 0, beside: null });
}

function moveRow(by) {
  const rows = state.groups.flatMap((group) => group.members.map((each) => each.row)).sort((one, other) => one - other);
  const at = rows.indexOf(state.row);
  go({ row: rows[Math.max(0, Math.min(rows.length - 1, at + by))] ?? 0, beside: null });
}

function moveBeside() {
  const members = (state.groups.find((each) => each.members.some((one) => one.row === state.row)) || { members: [] }).members;
  const others = members.map((each) => each.row).filter((row) => row !== state.row);
  if (others.length) go({ beside: others[(others.indexOf(state.beside) + 1) % others.length] });
}

const KEYS = {
  1: () => go({ page: "run" }),
  2: () => go({ page: "groups" }),
  3: () => go({ page: "trajectory" }),
  4: () => go({ page: "actors" }),
  5: () => go({ page: "talk" }),
  ArrowLeft: () => move(-1),
  ArrowRight: () => move(1),
  j: () => moveRow(1),
  k: () => moveRow(-1),
  b: () => moveBeside(),
  c: () => go({ colour: { logprob: "version", version: "advantage", advantage: "none", none: "logprob" }[state.colour] }),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
});
window.addEventListener("popstate", () => { readPlace(); draw(); });
for (const page of PAGES) document.getElementById(`show-${page}`).addEventListener("click", () => go({ page }));
document.getElementById("run").addEventListener("change", (event) => go({ run: Number(event.target.value), step: null, row: 0, beside: null }));
document.getElementById("step").addEventListener("change", (event) => {
  const [kind, step] = event.target.value.split("/");
  go({ kind, step: Number(step), row: 0, beside: null });
});

async function begin() {
  readPlace();
  state.runs = await ask("runs");
  state.run = Math.min(state.run, state.runs.length - 1);
  await Promise.all(state.runs.map((_, index) => load(index)));
  await draw();
  state.runs.forEach((_, index) => {
    const changes = new EventSource(`api/runs/${index}/changes`);
    changes.onmessage = async () => {
      const before = state.data[index].records.length;
      try {
        await load(index);
      } catch (error) { // the program that shows the page has ended
        document.getElementById("state").textContent = error.message;
        return;
      }
      // Somebody reads a trajectory, or types: only curves move by themselves.
      if (state.page === "run" && state.data[index].records.length !== before) draw();
    };
  });
}

begin();
