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
