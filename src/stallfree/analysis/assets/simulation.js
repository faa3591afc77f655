"use strict";
// The state of a pipeline at an instant, from its log of events. Knows no page.

const MAKING = ["load", "prep", "gather", "fetch"];

// A run with what is asked for at every instant worked out once.
function prepare(run) {
  const several = new Set(run.events.map((event) => event[5])).size > 1;
  const events = run.events.map(([start, end, actor, what, batch, epoch]) =>
    ({ start, end, actor, what, key: epoch + ":" + batch, label: several ? epoch + "/" + batch : String(batch) }));
  const whats = new Set(events.map((event) => event.what));
  const makers = MAKING.filter((what) => what !== "fetch" || !(whats.has("prep") || whats.has("load") || whats.has("gather")));
  const instants = new Set([0, run.seconds]);
  for (const event of events) for (const at of [event.start, event.end]) if (at <= run.seconds) instants.add(at);
  const trained = events.filter((event) => event.what === "compute").map((event) => event.end).sort((a, b) => a - b);
  return {
    ...run, events, whats, trained, batches: batchesOf(events, makers),
    instants: [...instants].sort((a, b) => a - b), actors: actorsOf(events),
  };
}

// When each batch became ready and by whom, was taken from the queue, lay on the device, was used.
function batchesOf(events, makers) {
  const batches = new Map();
  for (const event of events) {
    if (!batches.has(event.key)) batches.set(event.key, { label: event.label, ready: -1, by: "", copied: -1, used: Infinity, taken: Infinity });
    const batch = batches.get(event.key);
    if (makers.includes(event.what) && event.end > batch.ready) [batch.ready, batch.by] = [event.end, event.actor];
    if (event.what === "copy") [batch.taken, batch.copied] = [event.start, event.end];
    if (event.what === "compute") batch.used = event.start;
  }
  for (const batch of batches.values()) batch.taken = Math.min(batch.taken, batch.used);
  return [...batches.values()].sort((a, b) => a.ready - b.ready);
}

// Those who make batches, in the order of their numbers, then the copy and the device.
function actorsOf(events) {
  const last = { copy: 1, device: 2 };
  return [...new Set(events.map((event) => event.actor))].sort((a, b) =>
    (last[a] ?? 0) - (last[b] ?? 0) || a.localeCompare(b, "en", { numeric: true }));
}

// Who does what at the instant `at`, what waits where.
function stateAt(run, at) {
  const doing = new Map(run.actors.map((actor) => [actor, []]));
  for (const event of run.events) {
    if (event.start > at) break; // they are in the order of their starts
    if (at < event.end) doing.get(event.actor).push(event);
  }
  const ready = run.batches.filter((batch) => 0 <= batch.ready && batch.ready <= at && at < batch.taken);
  const places = run.queue ?? ready.length;
  const held = new Map(ready.slice(places).map((batch) => [batch.by, batch.label]));
  const onDevice = run.batches.filter((batch) => 0 <= batch.copied && batch.copied <= at && at < batch.used);
  return { doing, queue: ready.slice(0, places), held, onDevice, trained: countUpTo(run.trained, at) };
}

function countUpTo(sorted, at) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= at) low = middle + 1; else high = middle;
  }
  return low;
}

// What began or ended at an instant, in words.
function newsAt(run, at) {
  const ended = run.events.filter((event) => event.end === at).map((event) => `${event.actor} ends ${event.what} ${event.label}`);
  const begun = run.events.filter((event) => event.start === at).map((event) => `${event.actor} begins ${event.what} ${event.label}`);
  return [...ended, ...begun].join("; ");
}

const RUNS = DATA.runs.map(prepare);
const MARGIN = { l: 76, r: 12, t: 8, b: 34 };
const WHOLE = [60, 30, 20, 10, 5]; // seconds that the whole run may take on the screen
const byId = (id) => document.getElementById(id);

let run = RUNS[DATA.shown];
let now = 0;
let playing = false;
let lastFrame = 0;
let nextFrame = 0;
let drawnPage = "";

function element(tag, classes, text) {
  const made = document.createElement(tag);
  made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

function seconds(value) {
  const decimals = Math.min(9, Math.max(0, 3 - Math.floor(Math.log10(run.seconds))));
  return value.toFixed(decimals) + " s";
}

// ---- boxes

function fillBox(box, who, events, held, at) {
  const main = events.find((event) => event.what !== "fetch") ?? events[0];
  const others = events.filter((event) => event !== main);
  let holds = main ? `${main.what} ${main.label}` : held !== undefined ? `waits with ${held}` : "idle";
  if (others.length) holds += ", " + others.map((event) => `${event.what} ${event.label}`).join(", ");
  if (box.dataset.holds !== holds) {
    box.dataset.holds = holds;
    box.classList.toggle("idle", !main && held === undefined);
    box.style.setProperty("--tone", main ? `var(--${main.what})` : "var(--line)");
    box.replaceChildren(...(who ? [element("span", "who", who)] : []), element("span", "holds", holds), element("span", "done"));
  }
  const share = main && main.end > main.start ? (at - main.start) / (main.end - main.start) : 0;
  box.lastElementChild.style.width = 100 * share + "%";
}

function makeBoxes() {
  const makers = run.actors.filter((actor) => actor !== "copy" && actor !== "device");
  byId("loaders").replaceChildren(...makers.map((actor) => {
    const box = element("li", "box");
    box.dataset.actor = actor;
    return box;
  }));
  byId("copy-part").hidden = !run.actors.includes("copy");
  byId("queue-size").textContent = run.queue === null ? "" : `of ${run.queue}`;
}

function showState(at) {
  const state = stateAt(run, at);
  for (const box of byId("loaders").children) {
    const actor = box.dataset.actor;
    fillBox(box, actor, state.doing.get(actor), state.held.get(actor), at);
  }
  const over = run.depth === null ? [] : state.onDevice.slice(run.depth);
  fillBox(byId("copy"), "", state.doing.get("copy") ?? [], over[0]?.label, at);
  fillBox(byId("device"), "", state.doing.get("device") ?? [], undefined, at);
  const staged = state.onDevice.slice(0, run.depth ?? undefined);
  byId("waiting").textContent = staged.length ? `On the device, next: ${staged.map((batch) => batch.label).join(", ")}` : "";
  showQueue(state.queue);
}

function showQueue(batches) {
  const shown = batches.slice(0, 24).map((batch) => element("li", "full", batch.label));
  const empty = Math.max(0, Math.min(run.queue ?? 0, 24) - shown.length);
  for (let place = 0; place < empty; place++) shown.push(element("li", "", ""));
  if (batches.length > 24) shown.push(element("li", "full", `+${batches.length - 24}`));
  if (!shown.length) shown.push(element("li", "", "–"));
  const signature = shown.map((item) => item.textContent).join(",");
  const queue = byId("queue");
  if (queue.dataset.holds !== signature) {
    queue.dataset.holds = signature;
    queue.replaceChildren(...shown);
  }
}

// ---- Gantt chart

// Lanes, so that what an actor does at once does not cover itself: fetches lie below what it does with their samples.
function addLanes(events, first) {
  const free = [];
  for (const event of events) {
    let lane = free.findIndex((end) => end <= event.start);
    if (lane < 0) lane = free.push(0) - 1;
    free[lane] = event.end;
    event.lane = first + lane;
  }
  return first + free.length;
}

function makeLanes() {
  run.lanes = new Map(run.actors.map((actor) => {
    const own = run.events.filter((event) => event.actor === actor);
    return [actor, addLanes(own.filter((event) => event.what === "fetch"), addLanes(own.filter((event) => event.what !== "fetch"), 0))];
  }));
}

// What a log says, as text: charts take some HTML.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

// The part of the run that is on the chart: all of it if that can be read, else one page of it.
function pageAt(at) {
  const batches = byId("gantt").clientWidth < 480 ? 14 : 40;
  const length = Math.max(1, run.trained.length) <= 1.3 * batches ? run.seconds : run.seconds * batches / run.trained.length;
  const start = Math.min(Math.floor(at / length), Math.ceil(run.seconds / length) - 1) * length;
  return [start, start + length];
}

function drawGantt(force) {
  const [from, to] = pageAt(now);
  const signature = `${RUNS.indexOf(run)} ${from} ${to}`;
  if (!force && signature === drawnPage) return;
  drawnPage = signature;
  const rows = new Map(run.actors.map((actor, row) => [actor, row]));
  const visible = run.events.filter((event) => event.start < to && event.end > from);
  const traces = [...run.whats].map((what) => {
    const own = visible.filter((event) => event.what === what);
    const height = (event) => 0.84 / run.lanes.get(event.actor);
    return {
      type: "bar", orientation: "h", name: plain(what), showlegend: false,
      base: own.map((event) => event.start), x: own.map((event) => event.end - event.start),
      y: own.map((event) => rows.get(event.actor) - 0.42 + (event.lane + 0.5) * height(event)), width: own.map(height),
      text: own.map((event) => plain(event.label)), textposition: "inside", insidetextanchor: "middle", textangle: 0,
      textfont: { color: colour("on") }, constraintext: "both",
      marker: { color: colour(what), line: { color: colour("card"), width: 1 } },
      customdata: own.map((event) => [plain(event.actor), event.start, event.end]),
      hovertemplate: `%{customdata[0]}: ${plain(what)} %{text}<br>%{customdata[1]:.4~s}s to %{customdata[2]:.4~s}s<extra></extra>`,
    };
  });
  const lanes = [...run.lanes.values()].reduce((sum, count) => sum + Math.max(1, count * 0.7), 0);
  byId("gantt").style.height = Math.round(Math.max(160, Math.min(900, 42 + 34 * lanes))) + "px";
  Plotly.react("gantt", traces, layout(MARGIN, {
    barmode: "overlay", uniformtext: { minsize: 9, mode: "hide" },
    xaxis: { range: [from, to], tickformat: "~s", ticksuffix: "s", nticks: byId("gantt").clientWidth < 480 ? 4 : 8, tickangle: 0 },
    yaxis: { range: [run.actors.length - 0.5, -0.5], tickvals: [...rows.values()], ticktext: [...rows.keys()].map((name) => plain(name.slice(0, 11))), showgrid: false },
  }), OPTIONS);
  byId("gantt-caption").textContent = `From ${seconds(from)} to ${seconds(Math.min(to, run.seconds))} of ${seconds(run.seconds)}; the line is now.`;
  byId("gantt").setAttribute("aria-label", `Gantt chart of ${run.actors.join(", ")}: ${visible.length} events. ${byId("gantt-caption").textContent}`);
}

function showCursor(at) {
  const [from, to] = pageAt(at);
  const width = byId("gantt").clientWidth - MARGIN.l - MARGIN.r;
  byId("cursor").style.transform = `translateX(${MARGIN.l + width * (at - from) / (to - from) - 1}px)`;
}

function showLegend() {
  byId("legend").replaceChildren(...[...run.whats].map((what) => {
    const item = element("li", "");
    const patch = element("i", "");
    patch.style.background = `var(--${what})`;
    item.append(patch, what);
    return item;
  }));
}

// ---- time

function show(at) {
  now = Math.min(run.seconds, Math.max(0, at));
  const slider = byId("slider");
  slider.value = Math.round(1000 * now / run.seconds);
  slider.setAttribute("aria-valuetext", seconds(now));
  byId("time").textContent = `${seconds(now)} of ${seconds(run.seconds)}`;
  byId("time").dataset.seconds = now;
  RUNS.forEach((other, index) => { byId("count-" + index).textContent = countUpTo(other.trained, now); });
  showState(now);
  drawGantt(false);
  showCursor(now);
  if (!playing) byId("news").textContent = newsAt(run, now);
}

function setPlaying(wanted) {
  playing = wanted;
  byId("play").disabled = wanted;
  byId("pause").disabled = !wanted;
  cancelAnimationFrame(nextFrame);
  if (!wanted) return;
  byId("news").textContent = "";
  if (now >= run.seconds) show(0);
  lastFrame = performance.now();
  nextFrame = requestAnimationFrame(frame);
}

function frame(time) {
  const passed = Math.min(0.25, Math.max(0, time - lastFrame) / 1000); // no jump after the page was hidden
  lastFrame = time;
  show(now + passed * run.seconds / Number(byId("speed").value));
  if (now < run.seconds) nextFrame = requestAnimationFrame(frame);
  else setPlaying(false);
}

function step(forward) {
  setPlaying(false);
  const next = forward ? run.instants.find((at) => at > now) : run.instants.findLast((at) => at < now);
  if (next !== undefined) show(next);
}

function times(factor) {
  const slower = factor >= 1;
  return `${Number((slower ? factor : 1 / factor).toPrecision(2))} times ${slower ? "slower" : "faster"}`;
}

function choose(index) {
  run = RUNS[index];
  const chosen = byId("speed").value || "20";
  byId("speed").replaceChildren(...WHOLE.map((length) => {
    const option = element("option", "", `all in ${length} s (${times(length / run.seconds)})`);
    option.value = length;
    return option;
  }));
  byId("speed").value = chosen;
  makeBoxes();
  makeLanes();
  showLegend();
  show(now);
}

byId("play").addEventListener("click", () => setPlaying(true));
byId("pause").addEventListener("click", () => { setPlaying(false); show(now); });
byId("step").addEventListener("click", () => step(true));
byId("back").addEventListener("click", () => step(false));
byId("slider").addEventListener("input", (event) => { setPlaying(false); show(run.seconds * event.target.value / 1000); });
for (const choice of document.getElementsByName("run")) choice.addEventListener("change", () => choose(Number(choice.value)));
addEventListener("resize", () => { drawGantt(true); showCursor(now); });
choose(DATA.shown);
draw(() => drawGantt(true));
