// The page, put together: the feed drives the pools and the lists; one request may be picked, and its blocks shown.

import {Chat} from "./chat.js";
import {Follower} from "./feed.js";
import {Notes, Requests, Workers, put, showFigures} from "./lists.js";
import {PoolView} from "./pool.js";

const KEY = "kilburn-key";
const element = (id) => document.getElementById(id);
const say = (text) => put(element("spoken"), text);

let known = null;
let picked = null;           // a request whose blocks are looked at
let patience = 0;            // events until a picked request must have been seen
const ours = new Set();      // requests of the chat box
const views = new Map();     // pools by key

const requests = new Requests((id) => pick(picked === id ? null : id));
const workers = new Workers(), notes = new Notes();

function pick(id) {
  picked = id;
  patience = 8;
  if (known) show(known);
}

const onPool = {
  owners: (key, block) => known.owners(key, block),
  rowOf: (id) => known.requests.get(id),
  pick, say,
};

function showPools() {
  const wanted = new Map([...known.pools].filter(([, pool]) => pool.cells.length));
  for (const [key, view] of views) if (!wanted.has(key)) { view.root.parentNode.remove(); views.delete(key); }
  element("no-pools").hidden = wanted.size > 0;
  // A request that holds nothing yet dims nothing.
  const looked = picked !== null && [...known.tables.values()].some((table) => table.request === picked) ? new Set([picked]) : null;
  for (const [key, pool] of wanted) {
    let view = views.get(key);
    if (!view) {
      view = new PoolView(pool, onPool);
      views.set(key, view);
      place(view.root, pool);
    }
    view.update(pool, looked && known.held(key, pool.cells.length, looked));
  }
}

// The two tiers of a worker stand side by side.
function place(root, pool) {
  const id = `worker-${pool.worker.lease}`;
  let row = element(id);
  if (!row) {
    row = document.createElement("div");
    row.id = id;
    row.className = "worker";
    element("pools").append(row);
  }
  row.append(root);
  row.classList.toggle("two", row.childElementCount > 1);
}

function show(now) {
  known = now;
  const event = known.latest;
  if (known.requests.has(picked)) patience = 0;
  else if (patience-- <= 0) picked = null;
  put(element("model"), event.model);
  state(...(event.trouble ? ["bad", event.trouble] : ["good", "ready"]));
  element("key").hidden = true;
  document.querySelector("main").hidden = false;
  showPools();
  showFigures(event);
  requests.show(known, picked, ours);
  workers.show(event);
  notes.show(known);
}

function state(word, text) {
  element("status").dataset.state = word;
  put(element("status-text"), text);
}

function refused(status, message) {
  sessionStorage.removeItem(KEY);
  state("bad", "a key is needed");
  put(element("key-reason"), status === 403
    ? "This key may ask the model, but the map shows everybody's requests: it wants an operator's key (a line TENANT:KEY:admin in the file of keys)."
    : follower.key ? `That key was not accepted: ${message}.` : "This server wants a key.");
  element("key").hidden = false;
  document.querySelector("main").hidden = true;
  element("key-input").focus();
}

const follower = new Follower({event: show, state, refused});
follower.key = sessionStorage.getItem(KEY) ?? "";

element("key").addEventListener("submit", (event) => {
  event.preventDefault();
  follower.key = element("key-input").value.trim();
  element("key-input").value = "";
  sessionStorage.setItem(KEY, follower.key);
  follower.start();
});

new Chat({
  key: () => follower.key,
  model: () => known?.latest.model ?? "",
  began: (ids) => { ids.forEach((id) => ours.add(id)); if (ids.length) pick(ids[0]); },
  ended: (ids) => { if (ids.includes(picked)) pick(null); },
  refused,
});

for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)"]) {
  matchMedia(query).addEventListener("change", () => { for (const view of views.values()) view.recolour(); });
}

follower.start();
