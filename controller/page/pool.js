// One pool, drawn: a pixel for each block on a small canvas, scaled up without smoothing, with gaps drawn over it. So
// the cost of a change is that of its blocks, and 100,000 of them are one image.
//
//   .base   cells        .over   the cursor        .tip   what the block under the cursor is

import {CACHED, MOST_REFS, PINNED, QUARANTINED} from "./feed.js";

const LEVELS = [1, 2, 3, 5, 9];  // tables of a block that are told apart, each up to the next
const FRESH_EVENTS = 2;          // how long a block that was just taken stands out
const STATES = [
  ["free", "free", ["free"]], ["cached", "cached", ["cached"]],
  ["owned", "owned", ["owned-1"]], ["shared", "of which shared", ["owned-2", "owned-3", "owned-5", "owned-9"]],
  ["pinned", "of which pinned", ["pinned-1", "pinned-2", "pinned-3"]],
  ["quarantined", "quarantined", ["quarantined"]],
];

export function stateOf(cell) {
  const state = cell & ~PINNED;
  return state === 0 ? "free" : state === CACHED ? "cached" : state === QUARANTINED ? "quarantined" : "owned";
}

// How many blocks are in which state, and of which shared and pinned.
export function count(cells) {
  const by = new Uint32Array(256);
  for (const cell of cells) by[cell]++;
  const found = {free: 0, cached: 0, owned: 0, shared: 0, pinned: 0, quarantined: 0};
  by.forEach((number, cell) => {
    found[stateOf(cell)] += number;
    if (stateOf(cell) === "owned" && (cell & ~PINNED) > 1) found.shared += number;
    if (cell & PINNED) found.pinned += number;
  });
  return found;
}

// --- colours

const styles = getComputedStyle(document.documentElement);
const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});

function rgb(name) {
  probe.fillStyle = styles.getPropertyValue(`--${name}`).trim();
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

const mixed = (a, b, share) => a.map((part, i) => Math.round(part * (1 - share) + b[i] * share));
const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;

// 3 x 256 colours by cell: as it is, just taken, and dimmed because another request is looked at.
export function palette() {
  const paper = rgb("paper"), fresh = rgb("fresh"), colours = new Uint32Array(768);
  for (let cell = 0; cell < 256; cell++) {
    const state = stateOf(cell), level = LEVELS.findLast((least) => least <= (cell & ~PINNED)) ?? 1;
    const colour = rgb(state !== "owned" ? state : `${cell & PINNED ? "pinned" : "owned"}-${level}`);
    colours[cell] = packed(colour);
    colours[256 + cell] = packed(mixed(colour, fresh, 0.45));
    colours[512 + cell] = packed(mixed(colour, paper, 0.78));
  }
  return colours;
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");

// --- the view

export class PoolView {
  // `on` has: owners(key, block), rowOf(id), pick(id or null), say(text)
  constructor(pool, on) {
    this.on = on;
    this.root = document.getElementById("pool-template").content.cloneNode(true).firstElementChild;
    this.frame = this.root.querySelector(".canvas");
    this.base = this.root.querySelector(".base");
    this.over = this.root.querySelector(".over");
    this.tip = this.root.querySelector(".tip");
    this.small = document.createElement("canvas");
    this.cursor = 0;
    this.isShown = false;  // the cursor
    this.mask = null;
    this.colours = palette();
    this.key = pool.key;
    this.legend();
    this.frame.addEventListener("keydown", (event) => this.pressed(event));
    this.frame.addEventListener("focus", () => { this.show(this.cursor); this.on.say(this.words()); });
    this.frame.addEventListener("blur", () => this.hide());
    this.frame.addEventListener("pointermove", (event) => this.pointed(event));
    this.frame.addEventListener("pointerdown", (event) => this.pointed(event));
    this.frame.addEventListener("pointerleave", () => { if (document.activeElement !== this.frame) this.hide(); });
    this.frame.addEventListener("click", () => this.choose());
    new ResizeObserver(() => this.layout()).observe(this.root);
  }

  legend() {
    const body = this.root.querySelector(".legend tbody");
    this.counts = {};
    for (const [state, words, swatches] of STATES) {
      const row = body.insertRow(), head = document.createElement("th");
      head.scope = "row";
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.setAttribute("aria-hidden", "true");
      for (const name of swatches) swatch.append(Object.assign(document.createElement("i"), {className: `c-${name}`}));
      head.append(swatch, words);
      row.append(head);
      this.counts[state] = [row.insertCell(), row.insertCell(), row];
      this.counts[state][1].className = "share";
    }
  }

  recolour() {
    this.colours = palette();
    this.layout();
  }

  update(pool, mask) {
    const isNew = this.cells !== pool.cells;
    this.pool = pool;
    this.cells = pool.cells;
    this.mask = mask;
    if (isNew) this.fresh = new Uint8Array(this.cells.length);
    this.age(pool.changed);
    const {name, block_size, bytes_per_block} = pool.worker, tier = pool.tier ? "host" : "device";
    this.title = `${name}, ${tier} pool`;
    const heading = this.root.querySelector("h3"), number = this.cells.length.toLocaleString("en");
    const about = `${number} blocks of ${block_size} tokens, ${size(bytes_per_block * this.cells.length)}`;
    if (this.about !== about) {
      this.about = about;
      heading.replaceChildren(`${name} · ${tier}`, Object.assign(document.createElement("small"), {textContent: about}));
      this.frame.setAttribute("aria-label", `${this.title}: ${about}`);
      this.root.querySelector("caption").textContent = `Blocks of ${this.title} by state`;
      this.layout();
    }
    const counts = count(this.cells);
    for (const [state, [cell, share, row]] of Object.entries(this.counts)) {
      cell.textContent = counts[state].toLocaleString("en");
      share.textContent = `${(100 * counts[state] / this.cells.length).toFixed(counts[state] ? 1 : 0)} %`;
      row.hidden = (state === "quarantined" || (pool.tier && state === "pinned")) && counts[state] === 0;
      row.style.display = row.hidden ? "none" : "";
    }
    this.draw();
    if (this.isShown) this.show(this.cursor);
  }

  age(changed) {
    this.hasFresh = false;
    for (let i = 0; i < this.fresh.length; i++) if (this.fresh[i] && --this.fresh[i]) this.hasFresh = true;
    if (calm.matches || !changed) return;
    for (const {first, cells, before} of changed) {
      for (let i = 0; i < cells.length; i++) {
        if (cells[i] !== before[i] && stateOf(cells[i]) === "owned" && stateOf(before[i]) !== "owned") {
          this.fresh[first + i] = FRESH_EVENTS;
          this.hasFresh = true;
        }
      }
    }
  }

  // Cells as large as fit into the width and a height that leaves the rest of the page in sight; but large enough to
  // be told apart, so that a pool of very many is taller.
  layout() {
    if (!this.cells || !this.root.clientWidth) return;
    const dpr = window.devicePixelRatio || 1, number = Math.max(this.cells.length, 1);
    const width = Math.floor(this.frame.clientWidth * dpr), most = Math.floor(Math.min(innerHeight * 0.55, 480) * dpr);
    let side = Math.floor(20 * dpr);
    while (side > Math.round(1.5 * dpr) && Math.ceil(number / Math.floor(width / side)) * side > most) side--;
    this.side = side;
    this.columns = Math.min(Math.max(Math.floor(width / this.side), 1), number);
    this.rows = Math.ceil(number / this.columns);
    this.dpr = dpr;
    this.small.width = this.columns;
    this.small.height = this.rows;
    for (const canvas of [this.base, this.over]) {
      canvas.width = this.columns * this.side;
      canvas.height = this.rows * this.side;
      canvas.dataset.side = this.side;
      canvas.dataset.columns = this.columns;
      canvas.style.width = `${canvas.width / dpr}px`;
      canvas.style.height = `${canvas.height / dpr}px`;
    }
    this.draw();
    if (this.isShown) this.show(this.cursor);
  }

  draw() {
    if (!this.columns) return;
    const {cells, mask, fresh, colours, side} = this, small = this.small.getContext("2d");
    const image = small.createImageData(this.columns, this.rows), pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < cells.length; i++) {
      pixels[i] = colours[cells[i] + (mask && !mask[i] ? 512 : fresh[i] ? 256 : 0)];
    }
    small.putImageData(image, 0, 0);
    const base = this.base.getContext("2d");
    base.imageSmoothingEnabled = false;
    base.clearRect(0, 0, this.base.width, this.base.height);
    base.drawImage(this.small, 0, 0, this.base.width, this.base.height);
    const gap = side >= 9 * this.dpr ? Math.max(Math.round(1.5 * this.dpr), 1) : side >= 4 ? 1 : 0;
    if (!gap) return;
    for (let column = 1; column <= this.columns; column++) base.clearRect(column * side - gap, 0, gap, this.base.height);
    for (let row = 1; row <= this.rows; row++) base.clearRect(0, row * side - gap, this.base.width, gap);
  }

  // --- the cursor

  pressed(event) {
    const last = this.cells.length - 1, column = this.cursor % this.columns;
    const moves = {
      ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, Home: -column,
      End: this.columns - 1 - column, PageDown: 10 * this.columns, PageUp: -10 * this.columns,
    };
    if (event.key in moves) {
      const far = event.ctrlKey && {Home: 0, End: last}[event.key];
      const to = far === false || far === undefined ? this.cursor + moves[event.key] : far;
      this.show(Math.min(Math.max(to, 0), last));
      this.on.say(this.words());
    } else if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key === "Escape") this.on.pick(null);
    else return;
    event.preventDefault();
  }

  pointed(event) {
    const box = this.base.getBoundingClientRect(), side = this.side / this.dpr;
    const column = Math.floor((event.clientX - box.left) / side), row = Math.floor((event.clientY - box.top) / side);
    const block = row * this.columns + column;
    if (column >= 0 && column < this.columns && row >= 0 && block < this.cells.length) this.show(block);
    else this.hide();
  }

  choose() {
    const [owner] = this.on.owners(this.key, this.cursor);
    this.on.pick(owner ?? null);
    this.on.say(owner === undefined ? `${this.words()} No request holds it.` : `Showing the blocks of request ${owner}.`);
  }

  // What a block is, in one sentence.
  words() {
    const [what, who] = this.facts();
    return `Block ${this.cursor}: ${what}. ${who}`;
  }

  facts() {
    const cell = this.cells[this.cursor], state = stateOf(cell), refs = cell & ~PINNED;
    if (state !== "owned") {
      return [state, {free: "Nothing is in it.", cached: "Kept for whoever begins the same way.",
        quarantined: "Out of use until the lease ends."}[state]];
    }
    const many = `${refs}${refs === MOST_REFS ? " or more" : ""}`;
    const what = refs === 1 ? "owned" : `shared by ${many} tables`;
    const names = this.on.owners(this.key, this.cursor).map((id) => this.on.rowOf(id)?.kind === "prefix" ? `prefix ${id}` : `request ${id}`);
    const listed = names.length > 6 ? `${names.slice(0, 6).join(", ")} and ${names.length - 6} more` : names.join(", ");
    return [`${what}${cell & PINNED ? ", pinned" : ""}`, listed ? `Held by ${listed}.` : "Held by what a step reads."];
  }

  show(block) {
    this.cursor = block;
    this.isShown = true;
    const over = this.over.getContext("2d"), side = this.side, ring = Math.max(2 * this.dpr, 2);
    const x = (block % this.columns) * side, y = Math.floor(block / this.columns) * side;
    over.clearRect(0, 0, this.over.width, this.over.height);
    const grown = Math.max(side, 5 * this.dpr), left = x + (side - grown) / 2, top = y + (side - grown) / 2;
    over.lineWidth = ring;
    over.strokeStyle = styles.getPropertyValue("--ink");
    over.strokeRect(left, top, grown, grown);
    const [what, who] = this.facts(), bold = document.createElement("b"), more = document.createElement("span");
    bold.textContent = `Block ${block}`;
    more.textContent = who;
    this.tip.replaceChildren(bold, ` ${what}`, more);
    this.tip.hidden = false;
    const cx = x / this.dpr, cy = y / this.dpr, wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
    const room = this.frame.clientWidth - wide;
    this.tip.style.left = `${Math.max(Math.min(cx + 14, room), 0)}px`;
    this.tip.style.top = `${cy > high + 12 ? cy - high - 8 : cy + side / this.dpr + 10}px`;
  }

  hide() {
    this.isShown = false;
    this.tip.hidden = true;
    this.over.getContext("2d").clearRect(0, 0, this.over.width, this.over.height);
  }
}

function size(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return `${number < 10 && unit ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}
