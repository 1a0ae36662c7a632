// The feed: server-sent events read with fetch (EventSource cannot send a key), applied to what is known.
//
//   connect --> whole --> change --> change --> ... lost: wait, connect, whole
//
// `Known` holds what the events so far add up to. Cells are bytes (see core/block_map.py), tables Int32Arrays.

export const CACHED = 61, QUARANTINED = 62, PINNED = 64, MOST_REFS = 60;

function bytes(base64) {
  const text = atob(base64), found = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) found[i] = text.charCodeAt(i);
  return found;
}

export class Known {
  constructor() {
    this.latest = null;
    this.columns = [];
    this.pools = new Map();     // "lease/tier" -> {worker, tier, cells, changed: [[start, end)...] or null for all}
    this.requests = new Map();  // id -> row by column
    this.tables = new Map();    // "request.sequence" -> {request, lease, tier, blocks}
    this.notes = [];
  }

  // Throws where an event does not fit what went before.
  apply(event) {
    if (event.whole) {
      this.columns = event.columns;
      this.pools.clear(); this.requests.clear(); this.tables.clear(); this.notes = [];
    } else if (!this.latest || event.number !== this.latest.number + 1) {
      throw new Error(`event ${event.number} is not the next one`);
    }
    this.applyPools(event.workers);
    for (const id of event.ended) this.requests.delete(id);
    for (const row of event.requests) {
      this.requests.set(row[0], Object.fromEntries(this.columns.map((name, i) => [name, row[i]])));
    }
    for (const [request, sequence, lease, tier, kept, packed] of event.tables) {
      this.applyTable(`${request}.${sequence}`, request, lease, tier, kept, packed);
    }
    const now = performance.now();
    for (const note of event.notes) this.notes.push({...note, at: now - note.ago_s * 1000});
    this.notes = this.notes.slice(-50);
    this.latest = event;
  }

  applyPools(workers) {
    const pools = new Map();
    for (const worker of workers) {
      for (const [tier, all, runs] of [[0, "cells", "runs"], [1, "host_cells", "host_runs"]]) {
        const key = `${worker.lease}/${tier}`;
        let pool = this.pools.get(key);
        if (worker[all] !== undefined) pool = {key, tier, cells: bytes(worker[all]), changed: null};
        else pool.changed = worker[runs].map(([first, packed]) => {
          const cells = bytes(packed), before = pool.cells.slice(first, first + cells.length);
          pool.cells.set(cells, first);
          return {first, cells, before};
        });
        pool.worker = worker;
        pools.set(key, pool);
      }
    }
    this.pools = pools;
  }

  applyTable(key, request, lease, tier, kept, packed) {
    if (lease === 0) {
      this.tables.delete(key);
      return;
    }
    const added = new Int32Array(bytes(packed).buffer), blocks = new Int32Array(kept + added.length);
    if (kept) blocks.set(this.tables.get(key).blocks.subarray(0, kept));
    blocks.set(added, kept);
    this.tables.set(key, {request, lease, tier, blocks});
  }

  // The requests whose tables hold a block.
  owners(poolKey, block) {
    const found = new Set();
    for (const table of this.tables.values()) {
      if (`${table.lease}/${table.tier}` === poolKey && table.blocks.includes(block)) found.add(table.request);
    }
    return [...found].sort((a, b) => a - b);
  }

  // A byte for each block of a pool: 1 where one of these requests holds it.
  held(poolKey, size, requests) {
    const mask = new Uint8Array(size);
    for (const table of this.tables.values()) {
      if (`${table.lease}/${table.tier}` === poolKey && requests.has(table.request)) {
        for (const block of table.blocks) mask[block] = 1;
      }
    }
    return mask;
  }
}

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// Each data line of a stream of server-sent events.
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

export async function ask(path, key, options = {}) {
  const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
  const response = await fetch(path, {...options, headers, credentials: "omit", cache: "no-store"});
  if (!response.ok) {
    let message = `the server answered ${response.status}`;
    try { message = (await response.json()).error.message; } catch { /* not ours: the status must do */ }
    throw new Refused(response.status, message);
  }
  return response;
}

// Follows the feed while the page can be seen. `on` has: event(known), state(word, text), refused(status, message).
export class Follower {
  constructor(on) {
    this.on = on;
    this.key = "";
    this.turn = 0;  // a new one voids whatever the last was doing
    document.addEventListener("visibilitychange", () => document.hidden ? this.stop() : this.start());
  }

  stop() {
    this.turn++;
    this.abort?.abort();
  }

  async start() {
    this.stop();
    const turn = this.turn;
    for (let wait_ms = 500; turn === this.turn; wait_ms = Math.min(wait_ms * 2, 8000)) {
      try {
        this.abort = new AbortController();
        const response = await ask("/map/events", this.key, {signal: this.abort.signal});
        const known = new Known();
        for await (const line of lines(response)) {
          if (turn !== this.turn) return;
          if (line === "[DONE]") break;
          known.apply(JSON.parse(line));
          wait_ms = 250;
          try { this.on.event(known); } catch (error) { reportError(error); }  // a fault of the page, not of the feed
        }
      } catch (error) {
        if (turn !== this.turn) return;
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          this.on.refused(error.status, error.message);
          return;
        }
      }
      if (turn !== this.turn) return;
      this.abort.abort();
      this.on.state("bad", "no connection; trying again");
      await new Promise((resume) => setTimeout(resume, wait_ms));
    }
  }
}
