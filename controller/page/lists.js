// What stands beside the map: figures, requests, workers, the last events. Rows are changed where they stand, so that a
// reader, a focus or a selection is not torn away four times a second.

const MOST_ROWS = 100;
const number = (value) => value.toLocaleString("en");
const element = (id) => document.getElementById(id);

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function figure(id, text, about = "") {
  const node = element(id), small = node.querySelector("small") ?? node.appendChild(document.createElement("small"));
  if (node.firstChild === small) node.prepend("");
  if (node.firstChild.data !== text) node.firstChild.data = text;
  put(small, about);
}

const percent = (part, whole) => whole ? `${Math.round(100 * part / whole)} %` : "–";

// --- figures

const history = [];  // [seconds, tokens per second] of the last minute

export function showFigures(event) {
  const sum = (name) => event.workers.reduce((total, worker) => total + worker[name], 0);
  const {rates, totals} = event, known = (rate) => rate === null ? "–" : number(Math.round(rate));
  figure("m-output", known(rates.output_tokens_per_s), `${number(totals.output_tokens)} in all`);
  figure("m-prompt", known(rates.prompt_tokens_per_s), `${number(totals.prompt_tokens)} in all`);
  figure("m-running", number(sum("running")), sum("sequences") > sum("running") ? `${number(sum("sequences"))} sequences` : "");
  const waiting = sum("waiting") + event.homeless;
  figure("m-waiting", number(waiting), sum("swapped") ? `${sum("swapped")} swapped` : "");
  const hits = rates.hit_rate === null ? percent(totals.cached_tokens, totals.prompt_tokens) : `${Math.round(100 * rates.hit_rate)} %`;
  figure("m-hits", hits, rates.hit_rate === null ? "since the start" : "of the last prompts");
  figure("m-slots", percent(sum("filled_slots"), sum("owned_slots")), `${number(sum("owned_slots"))} owned`);
  const swaps = sum("preempted_by_swap"), recomputes = sum("preempted_by_recompute");
  figure("m-preempted", number(swaps + recomputes), swaps + recomputes ? `${swaps} by swap` : "");
  document.title = `Kilburn · ${sum("running")} running${waiting ? `, ${waiting} waiting` : ""}`;
  drawSpark(event.at, rates.output_tokens_per_s ?? 0);
}

function drawSpark(at, rate) {
  history.push([at, rate]);
  while (history.length > 2 && history[0][0] < at - 60) history.shift();
  const most = Math.max(...history.map(([, value]) => value), 1);
  const points = history.map(([when, value]) => `${(120 - 2 * (at - when)).toFixed(1)},${(27 - 25 * value / most).toFixed(1)}`);
  element("spark").querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  element("spark").querySelector(".area").setAttribute("d", `M${points[0].split(",")[0]},28L${points.join("L")}L120,28Z`);
}

// --- a table whose rows are kept by key

class Rows {
  constructor(body, makeRow) {
    this.body = body;
    this.makeRow = makeRow;
    this.rows = new Map();
  }

  show(entries, fill, none) {
    const wanted = new Set(entries.map(([key]) => key));
    for (const [key, row] of this.rows) if (!wanted.has(key)) { row.remove(); this.rows.delete(key); }
    this.empty?.remove();
    this.empty = undefined;
    let before = null;
    for (const [key, value] of entries) {
      let row = this.rows.get(key);
      if (!row) { row = this.makeRow(key, value); this.rows.set(key, row); }
      fill(row, value);
      const at = before ? before.nextSibling : this.body.firstChild;
      if (row !== at) this.body.insertBefore(row, at);
      before = row;
    }
    if (!entries.length && none) {
      this.empty = this.body.insertRow();
      const cell = this.empty.insertCell();
      cell.className = "none";
      cell.colSpan = this.body.closest("table").tHead.rows[0].cells.length;
      cell.textContent = none;
    }
  }
}

// --- requests

// Who runs, by place; who waits, by turn: first those that ran before; named prefixes last.
function place(row) {
  if (row.state === "running") return [0, row.priority, row.arrival];
  if (row.state === "pinned") return [3, 0, row.arrival];
  return [row.has_started ? 1 : 2, row.turn, row.arrival];
}

function inLine(a, b) {
  const [x, y] = [place(a), place(b)];
  return x[0] - y[0] || x[1] - y[1] || x[2] - y[2];
}

export class Requests {
  constructor(pick) {
    this.rows = new Rows(element("request-rows"), (id, row) => {
      const tr = document.createElement("tr"), head = document.createElement("th"), button = document.createElement("button");
      head.scope = "row";
      button.type = "button";
      button.className = "pick";
      button.textContent = row.kind === "prefix" ? `prefix ${id}` : String(id);
      button.setAttribute("aria-label", `${row.kind} ${id}: show its blocks`);
      button.addEventListener("click", () => pick(id));
      head.append(button);
      tr.append(head);
      for (let i = 0; i < 7; i++) tr.insertCell().className = i > 0 && i < 6 ? "n" : "";
      tr.cells[1].append("", document.createElement("span"));
      return tr;
    });
  }

  show(known, picked, ours) {
    const sorted = [...known.requests.values()].sort(inLine), more = sorted.length - MOST_ROWS;
    this.rows.show(sorted.slice(0, MOST_ROWS).map((row) => [row.id, row]), (tr, row) => {
      const [head, state, ...cells] = tr.cells, button = head.firstChild;
      button.setAttribute("aria-pressed", String(picked === row.id));
      head.classList.toggle("ours", ours.has(row.id));
      tr.dataset.state = row.state;
      this.progress(state, row);
      const blocks = row.host_blocks ? `${number(row.host_blocks)} on host` : number(row.blocks);
      const texts = [number(row.prompt_tokens), number(row.generated_tokens), blocks, number(row.cached_tokens), number(row.preemptions), row.wait];
      texts.forEach((text, i) => put(cells[i], text));
    }, "None at the moment.");
    put(element("request-more"), more > 0 ? `and ${number(more)} more` : "");
  }

  // A prompt that is still being computed shows how far it is.
  progress(cell, row) {
    const [text, bar] = cell.childNodes, isPrompt = row.state === "running" && row.computed_tokens < row.prompt_tokens;
    const many = row.sequences > 1 ? `, ${row.sequences} sequences` : "";
    const words = isPrompt ? `prompt ${Math.floor(100 * row.computed_tokens / row.prompt_tokens)} %` : row.state;
    if (text.data !== words + many) text.data = words + many;
    bar.className = isPrompt ? "bar" : "";
    if (!isPrompt) bar.replaceChildren();
    else {
      if (!bar.firstChild) bar.append(document.createElement("i"));
      bar.firstChild.style.width = `${100 * row.computed_tokens / row.prompt_tokens}%`;
    }
  }
}

// --- workers and events

export class Workers {
  constructor() {
    this.rows = new Rows(element("worker-rows"), () => {
      const tr = document.createElement("tr"), head = document.createElement("th");
      head.scope = "row";
      tr.append(head);
      for (const name of ["n", "", "n", "n", "n"]) tr.insertCell().className = name;
      return tr;
    });
  }

  show(event) {
    this.rows.show(event.workers.map((worker) => [worker.lease, worker]), (tr, worker) => {
      const heard = worker.heard_s < 2 ? "now" : `${worker.heard_s.toFixed(1)} s ago`;
      const lease = worker.ranks > 1 ? `${worker.lease} (${worker.ranks} ranks)` : String(worker.lease);
      [worker.name, lease, worker.state, heard, number(worker.beats), number(worker.steps)].forEach((text, i) => put(tr.cells[i], text));
    }, "No worker is here.");
    const broken = event.laws_broken ? `, ${event.laws_broken} laws broken` : "";
    put(element("lease-count"), `${event.leases_began} ${event.leases_began === 1 ? "lease" : "leases"} began, ${event.leases_ended} ended${broken}`);
  }
}

function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ago` : `${Math.floor(seconds / 3600)} h ago`;
}

export class Notes {
  constructor() {
    this.items = new Map();
  }

  show(known) {
    const list = element("note-rows"), wanted = new Set(known.notes.map((note) => note.number));
    for (const [key, item] of this.items) if (!wanted.has(key)) { item.remove(); this.items.delete(key); }
    for (const note of known.notes) {
      let item = this.items.get(note.number);
      if (!item) {
        item = document.createElement("li");
        const time = document.createElement("time"), words = document.createElement("span"), kind = document.createElement("b");
        kind.textContent = note.kind;
        words.append(kind, ` ${note.text}`);
        item.append(time, words);
        list.prepend(item);
        this.items.set(note.number, item);
      }
      put(item.firstChild, ago((performance.now() - note.at) / 1000));
    }
  }
}
