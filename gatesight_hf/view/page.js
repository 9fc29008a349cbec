"use strict";
// Texts of the document reach the page through textContent alone.

const ROW = 28; // pixels, as in the styles
const SPARE = 3; // rows drawn above and below what is seen
const SIDES = 5; // pixels of a token beside its text
const BARS = 100; // of the strip above a text
const $ = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const css = (share) => `${(100 * share).toFixed(2)}%`;

async function unpacked(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function made(parent, tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

/** What a token looks like: characters without a shape, or that turn text around, get one. */
function shape(text) {
  if (text === "") return "∅";
  return text
    .replace(/\r?\n|[\r\u0085\u2028\u2029]/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "◌");
}

// -- data -------------------------------------------------------------------------------------------------------------

/** One method's arrays; an entry is kept if its level is at most that of its head at the kept fraction. */
class Method {
  constructor(about, arrays, sizes) {
    Object.assign(this, about, arrays, sizes);
    const heads = this.layers * this.heads;
    this.bound = new Uint8Array(this.steps * heads);
    for (let head = 0; head < heads; head++) {
      const counts = Array.from({ length: this.steps }, (_, step) => this.kept[step * heads + head]);
      const distinct = new Map([...new Set(counts)].sort((a, b) => a - b).map((count, i) => [count, i]));
      counts.forEach((count, step) => (this.bound[step * heads + head] = distinct.get(count)));
    }
  }

  keeps(step, head, token) {
    return this.levels[head * this.length + token] <= this.bound[step * this.layers * this.heads + head];
  }

  /** Share of the given heads that keep a token, and its mean percentile. */
  look(step, heads, token) {
    let kept = 0, sum = 0;
    for (const head of heads) {
      kept += this.keeps(step, head, token);
      sum += this.percentiles[head * this.length + token];
    }
    return { share: kept / heads.length, percentile: sum / heads.length };
  }

  count(step, head) {
    return this.kept[step * this.layers * this.heads + head];
  }

  /** Kept share of each of the document's parts. */
  density(step, heads, parts) {
    const kept = new Float64Array(parts), all = new Float64Array(parts);
    const part = Uint8Array.from({ length: this.length }, (_, token) => Math.floor((token * parts) / this.length));
    for (const p of part) all[p] += heads.length;
    for (const head of heads) {
      const bound = this.bound[step * this.layers * this.heads + head], start = head * this.length;
      for (let token = 0; token < this.length; token++) kept[part[token]] += this.levels[start + token] <= bound;
    }
    return kept.map((n, p) => n / all[p]);
  }
}

async function read() {
  const packed = JSON.parse($("data").textContent);
  const about = JSON.parse(new TextDecoder().decode(await unpacked(packed.about)));
  const { layers, heads, fractions, tokens } = about;
  const sizes = { layers: layers.length, heads, steps: fractions.length, length: tokens.length };
  const methods = [];
  for (const [i, arrays] of packed.methods.entries()) {
    const [levels, percentiles, kept] = await Promise.all(
      [arrays.levels, arrays.percentiles, arrays.kept].map(unpacked));
    const view = new DataView(kept);
    methods.push(new Method(about.methods[i], {
      levels: new Uint8Array(levels),
      percentiles: new Uint8Array(percentiles),
      kept: Int32Array.from({ length: kept.byteLength / 4 }, (_, n) => view.getInt32(4 * n, true)),
    }, sizes));
  }
  $("data").remove();
  return { ...about, ...sizes, layerIndices: layers, methods, shapes: tokens.map(shape) };
}

// -- lines ------------------------------------------------------------------------------------------------------------

/** Breaks tokens into rows of a width, as the browser would; every row has the same height, whatever is drawn. */
class Lines {
  constructor() {
    this.context = document.createElement("canvas").getContext("2d");
    this.widths = new Map();
    this.starts = [0];
  }

  break(tokens, shapes, width, font) {
    if (this.context.font !== font) this.widths.clear();
    this.context.font = font;
    this.starts = [];
    let used = Infinity;
    shapes.forEach((text, token) => {
      let size = this.widths.get(text);
      if (size === undefined) this.widths.set(text, (size = this.context.measureText(text).width + SIDES + 0.5));
      if (used + size > width || (token && /[\n\u2028\u2029]/.test(tokens[token - 1]))) {
        this.starts.push(token);
        used = 0;
      }
      used += size;
    });
  }

  of(token) {
    let low = 0, high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= token) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  end(row, length) {
    return row + 1 < this.starts.length ? this.starts[row + 1] : length;
  }
}

// -- the page ---------------------------------------------------------------------------------------------------------

class Page {
  constructor(data) {
    this.data = data;
    this.step = nearest(data.fractions, data.answeredAt ?? 0.1);
    this.layer = this.head = -1; // the mean over all
    this.cursor = 0;
    this.lines = new Lines();
    this.width = 0;
    document.title = $("title").textContent = data.title;
    $("about").textContent = [
      data.model, `${number(data.length)} tokens`, counted(data.layers, "attention layer"),
      `${counted(data.heads, "KV head")} each`,
    ].filter(Boolean).join(" · ");
    document.querySelector("main").hidden = false;
    this.makeControls();
    this.panels = data.methods.map((method, i) => this.makePanel(method, i));
    this.makeQuestions();
    new ResizeObserver(() => this.resize()).observe(this.panels[0].text);
    this.resize();
    this.change();
  }

  // -- once --

  makeControls() {
    const { data } = this, fraction = $("fraction");
    Object.assign(fraction, { min: 0, max: data.steps - 1, value: this.step });
    fraction.addEventListener("input", () => { this.step = Number(fraction.value); this.soon(); });
    for (const [id, all, names] of [
      ["layer", "all (mean)", data.layerIndices.map((layer, i) => `${i} (layer ${layer})`)],
      ["head", "all (mean)", Array.from({ length: data.heads }, (_, i) => String(i))],
    ]) {
      [all, ...names].forEach((name, i) => { made($(id), "option", "", name).value = i - 1; });
      $(id).addEventListener("change", () => { this[id] = Number($(id).value); this.change(); });
    }
    $("goto").max = data.length;
    $("goto").addEventListener("change", () => {
      const wanted = Math.floor(Number($("goto").value));
      if (wanted >= 1) this.move(Math.min(wanted, data.length) - 1);
    });
    for (let i = 0; i < 10; i++) made($("ramp"), "span", `t k4 r${i}`);
  }

  makePanel(method, i) {
    const section = made($("panels"), "section", "panel");
    const title = made(section, "h2", "", method.name);
    title.id = `method-${i}`;
    section.setAttribute("aria-labelledby", title.id);
    const summary = made(section, "p", "summary");
    const strip = made(section, "div", "strip");
    strip.setAttribute("aria-hidden", "true"); // the keys and "go to token" lead anywhere
    strip.title = "Kept share along the document";
    const bars = Array.from({ length: Math.min(BARS, method.length) }, () => made(strip, "i"));
    const seen = made(strip, "b");
    strip.addEventListener("click", (event) => {
      const box = strip.getBoundingClientRect();
      this.move(Math.min(method.length - 1, Math.floor(((event.clientX - box.left) / box.width) * method.length)));
    });
    const text = made(section, "div", "text");
    text.tabIndex = 0;
    for (const [name, value] of Object.entries({
      role: "listbox", "aria-label": `Tokens, ${method.name}`, "aria-describedby": "keys",
    })) text.setAttribute(name, value);
    const rows = made(text, "div", "rows");
    rows.setAttribute("role", "none");
    const panel = { method, i, summary, bars, seen, text, rows, first: -1, last: -1 };
    text.addEventListener("keydown", (event) => this.key(event));
    text.addEventListener("scroll", () => this.scrolled(panel), { passive: true });
    rows.addEventListener("click", (event) => {
      const token = event.target.closest("[data-token]");
      if (token) this.move(Number(token.dataset.token));
    });
    return panel;
  }

  makeQuestions() {
    const { answered, answeredAt, fractions } = this.data;
    if (!answered.length) return;
    $("answered").hidden = false;
    $("answered-note").textContent = `Answered at kept fraction ${answeredAt}.`;
    $("answered-at").textContent = `Show ${fractions[nearest(fractions, answeredAt)].toFixed(2)}`;
    $("answered-at").addEventListener("click", () => { this.step = nearest(fractions, answeredAt); this.change(); });
    for (const { question, answers } of answered) {
      const item = made($("questions"), "li", "", question), list = made(item, "dl");
      for (const [name, answer] of answers) {
        const pair = made(list, "div");
        made(pair, "dt", "", name);
        made(pair, "dd", "", answer === "" ? "(nothing)" : answer);
      }
    }
  }

  // -- at every change --

  /** Flat numbers of the heads that are shown. */
  heads() {
    const { layers, heads } = this.data, shown = [];
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        const wanted = (this.layer < 0 || this.layer === layer) && (this.head < 0 || this.head === head);
        if (wanted) shown.push(layer * heads + head);
      }
    }
    return shown;
  }

  /** Change with the next frame, once for all events until then. */
  soon() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.change(); });
  }

  change() {
    const { data, step } = this, heads = this.heads(), shown = data.fractions[step].toFixed(2);
    $("fraction").value = step;
    $("fraction").setAttribute("aria-valuetext", `kept fraction ${shown}`);
    $("fraction-shown").textContent = shown;
    for (const panel of this.panels) {
      const { method } = panel, kept = heads.reduce((sum, head) => sum + method.count(step, head), 0);
      const entries = heads.length * data.length, share = percent(kept / entries);
      panel.summary.textContent =
        `${number(kept)} of ${number(entries)} entries kept (${share}) · allocation: ${method.allocation}`;
      const density = method.density(step, heads, panel.bars.length);
      panel.bars.forEach((bar, i) => { bar.style.height = css(density[i]); });
      this.draw(panel, true);
    }
    this.tell();
    this.tabulate();
  }

  tabulate() {
    const { data, step } = this, table = $("counts");
    for (const part of table.children) part.replaceChildren();
    const { tHead, tBodies: [body], tFoot } = table;
    const line = (part, name) => {
      const row = made(part, "tr");
      made(row, "th", "", name).scope = part === tHead ? "col" : "row";
      return row;
    };
    const titles = line(tHead, "Attention layer");
    for (const { name } of data.methods) made(titles, "th", "", name).scope = "col";
    for (let layer = 0; layer < data.layers; layer++) {
      const row = line(body, `${layer} (layer ${data.layerIndices[layer]})`);
      for (const method of data.methods) {
        const counts = Array.from({ length: data.heads }, (_, head) => method.count(step, layer * data.heads + head));
        const most = Math.max(...counts), cell = made(row, "td");
        made(cell, "span", "kept", number(most));
        made(cell, "small", "", counts.every((count) => count === most)
          ? percent(most / data.length) : `by head: ${counts.map(number).join(", ")}`);
      }
    }
    const row = line(tFoot, "Achieved fraction");
    for (const method of data.methods) made(row, "td", "achieved", method.achieved[step].toFixed(4));
    const guarded = Math.min(data.length, data.prefix + data.suffix);
    const notes = [
      `At kept fraction ${data.fractions[step].toFixed(2)}; where heads keep different numbers, the fullest head's.`,
    ];
    if (guarded) notes.push(`Protected tokens (${number(guarded)}) are in the counts, not in the achieved fraction.`);
    $("counts-note").textContent = notes.join(" ");
  }

  // -- tokens --

  resize() {
    const { text } = this.panels[0], style = getComputedStyle(text);
    const width = text.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (width === this.width) return this.panels.forEach((panel) => this.draw(panel));
    const top = this.lines.starts[Math.floor(text.scrollTop / ROW)] ?? 0;
    this.width = width;
    this.lines.break(this.data.tokens, this.data.shapes, width, style.font);
    for (const panel of this.panels) {
      panel.rows.style.height = `${this.lines.starts.length * ROW}px`;
      panel.text.scrollTop = this.lines.of(top) * ROW;
      this.draw(panel, true);
    }
  }

  scrolled(panel) {
    for (const other of this.panels) {
      if (Math.abs(other.text.scrollTop - panel.text.scrollTop) >= 1) other.text.scrollTop = panel.text.scrollTop;
    }
    this.draw(panel);
  }

  /** Put the rows that are seen on the page, if they are not there. */
  draw(panel, anew = false) {
    const { text, rows } = panel, { lines, data } = this, { length } = data;
    const first = Math.max(0, Math.floor(text.scrollTop / ROW) - SPARE);
    const last = Math.min(lines.starts.length, Math.ceil((text.scrollTop + text.clientHeight) / ROW) + SPARE);
    const [left, right] = [text.scrollTop, text.scrollTop + text.clientHeight]
      .map((pixels) => (lines.starts[Math.floor(pixels / ROW)] ?? length) / length);
    panel.seen.style.left = css(left);
    panel.seen.style.width = css(right - left);
    if (!anew && first === panel.first && last === panel.last) return;
    Object.assign(panel, { first, last });
    const heads = this.heads(), drawn = document.createDocumentFragment();
    for (let row = first; row < last; row++) {
      const line = made(drawn, "div", "row");
      line.setAttribute("role", "none");
      line.style.top = `${row * ROW}px`;
      const end = lines.end(row, length);
      for (let token = lines.starts[row]; token < end; token++) this.drawToken(panel, line, heads, token);
    }
    rows.replaceChildren(drawn);
    this.mark(panel);
  }

  drawToken(panel, line, heads, token) {
    const { share, percentile } = panel.method.look(this.step, heads, token), { data } = this;
    const kept = share === 0 ? 0 : share === 1 ? 4 : Math.min(3, Math.ceil(4 * share));
    const guarded = token < data.prefix || token >= data.length - data.suffix;
    const name = `t r${Math.min(9, Math.floor(percentile / 10))} k${kept}${guarded ? " p" : ""}`;
    const element = made(line, "span", name, data.shapes[token]);
    element.id = `token-${panel.i}-${token}`;
    element.dataset.token = token;
    for (const [attribute, value] of Object.entries({
      role: "option", "aria-setsize": data.length, "aria-posinset": token + 1, "aria-selected": token === this.cursor,
      "aria-label": `${data.shapes[token]}, ${kept === 4 ? "kept" : kept ? "kept in some heads" : "evicted"}`,
    })) element.setAttribute(attribute, value);
  }

  // -- the cursor --

  mark(panel) {
    panel.rows.querySelector(".cursor")?.classList.remove("cursor");
    const token = $(`token-${panel.i}-${this.cursor}`);
    token?.classList.add("cursor");
    if (token) panel.text.setAttribute("aria-activedescendant", token.id);
    else panel.text.removeAttribute("aria-activedescendant");
  }

  key(event) {
    const { lines, cursor, data } = this, row = lines.of(cursor), last = data.length - 1;
    const page = Math.max(1, Math.floor(this.panels[0].text.clientHeight / ROW) - 1);
    const inRow = (to) => {
      const wanted = Math.max(0, Math.min(lines.starts.length - 1, to));
      return Math.min(lines.starts[wanted] + cursor - lines.starts[row], lines.end(wanted, data.length) - 1);
    };
    const whole = event.ctrlKey || event.metaKey;
    const target = {
      ArrowLeft: cursor - 1, ArrowRight: cursor + 1, ArrowUp: inRow(row - 1), ArrowDown: inRow(row + 1),
      PageUp: inRow(row - page), PageDown: inRow(row + page),
      Home: whole ? 0 : lines.starts[row], End: whole ? last : lines.end(row, data.length) - 1,
    }[event.key];
    if (target === undefined || event.altKey) return;
    event.preventDefault();
    this.move(Math.max(0, Math.min(last, target)));
  }

  move(token) {
    this.cursor = token;
    const top = this.lines.of(token) * ROW;
    for (const panel of this.panels) {
      const { text } = panel, lowest = top + ROW + 12 - text.clientHeight;
      if (text.scrollTop > top) text.scrollTop = top;
      else if (text.scrollTop < lowest) text.scrollTop = lowest;
      this.draw(panel);
      panel.rows.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
      this.mark(panel);
      $(`token-${panel.i}-${token}`)?.setAttribute("aria-selected", "true");
    }
    this.tell();
  }

  /** The status line. */
  tell() {
    const { data, cursor, step } = this, shown = this.heads(), all = data.layers * data.heads;
    const guarded = cursor < data.prefix || cursor >= data.length - data.suffix;
    const lines = data.methods.map((method) => {
      const { percentile } = method.look(step, shown, cursor), where = [];
      let count = 0;
      for (let layer = 0; layer < data.layers; layer++) {
        const kept = Array.from({ length: data.heads }, (_, head) => head)
          .filter((head) => method.keeps(step, layer * data.heads + head, cursor));
        const names = kept.length === data.heads ? "all" : kept.join(", ");
        if (kept.length) where.push(`layer ${data.layerIndices[layer]}: ${names}`);
        count += kept.length;
      }
      const some = count ? `kept in ${count} of ${all} heads (${where.join("; ")})` : "evicted in all heads";
      const state = count === all ? "kept in all heads" : some;
      return `${method.name}: score percentile ${Math.round(percentile)}, ${state}`;
    });
    const place = `Token ${number(cursor + 1)} of ${number(data.length)}`;
    const head = `${place}: “${data.shapes[cursor]}”${guarded ? ", protected" : ""}`;
    $("status").textContent = [head, ...lines].join("\n");
  }
}

const counted = (count, name) => `${number(count)} ${name}${count === 1 ? "" : "s"}`;

function nearest(fractions, wanted) {
  const apart = fractions.map((fraction) => Math.abs(fraction - wanted));
  return apart.indexOf(Math.min(...apart));
}

read().then((data) => new Page(data)).catch((error) => {
  $("about").textContent = `The page's data cannot be read by this browser: ${error.message}`;
});
