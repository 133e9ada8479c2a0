"use strict";
(() => {
  const BLOCK = 256; // tokens of a block of text, which is painted when it comes into view
  const LEVELS = 8;
  const $ = (id) => document.getElementById(id);
  const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–");
  const bytes = (n) => {
    const unit = n > 0 ? Math.min(4, Math.floor(Math.log2(n) / 10)) : 0;
    return `${(n / 2 ** (10 * unit)).toFixed(unit && n < 100 * 2 ** (10 * unit) ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };

  /** Make an element; strings among its children are text, never markup. */
  function make(tag, props = {}, ...children) {
    const element = Object.assign(document.createElement(tag), props);
    element.append(...children);
    return element;
  }

  // Data

  async function ints({ n, planes, data }) {
    const packed = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const flat = new Uint8Array(await new Response(stream).arrayBuffer());
    const values = new Uint32Array(n);
    for (let p = 0; p < planes; p++) for (let i = 0; i < n; i++) values[i] |= flat[p * n + i] << (8 * p);
    return values;
  }

  /** Positions that are in one of two sorted sets and not in the other. */
  function differ(a, b) {
    const out = [];
    let i = 0;
    let j = 0;
    while (i < a.length || j < b.length) {
      if (j >= b.length || a[i] < b[j]) out.push(a[i++]);
      else if (i >= a.length || b[j] < a[i]) out.push(b[j++]);
      else { i++; j++; }
    }
    return Uint32Array.from(out);
  }

  function common(a, b) {
    let n = 0;
    for (let i = 0, j = 0; i < a.length && j < b.length;) {
      const [left, right] = [a[i], b[j]];
      n += left === right;
      i += left <= right;
      j += right <= left;
    }
    return n;
  }

  /** Sets by layer, head and step; each is packed as its difference to the one before, or to the same of `beside`. */
  async function sets(packed, steps, beside) {
    const [counts, gaps] = await Promise.all([ints(packed.counts), ints(packed.gaps)]);
    const out = [];
    let at = 0;
    counts.forEach((count, s) => {
      const changed = gaps.slice(at, (at += count));
      for (let i = 1; i < count; i++) changed[i] += changed[i - 1];
      out.push(differ(beside ? beside[s] : s % steps ? out[s - 1] : [], changed));
    });
    return out;
  }

  async function read(data) {
    const lengths = await ints(data.lengths);
    const ends = new Uint32Array(lengths.length + 1);
    lengths.forEach((length, i) => { ends[i + 1] = ends[i] + length; });
    const view = { ...data, ends, tokens: lengths.length, steps: lengths.length - data.answer, series: [] };
    view.piece = (from, to = from + 1) => data.text.slice(ends[from], ends[to]);
    for (const run of data.runs) {
      run.sets = run.selected ? await sets(run.selected, view.steps) : [];
      view.series.push({ run, name: run.name, sets: run.sets });
      if (run.exact) {
        run.best = await sets(run.exact, view.steps, run.sets);
        run.shares = await ints(run.mass); // by step, layer and head
        view.series.push({ run, name: `exact top-k of ${run.name}`, sets: run.best });
      }
    }
    return view;
  }

  // State: the view, the chosen token of the answer (-1: all), the layer and head that filter (-1: all)

  let view = null;
  let panes = [];
  const chosen = { token: -1, layer: -1, head: -1 };

  /** Visit the sets of the filter and of a step (-1: all steps): index of the set, layer's place, head, step. */
  function visit(run, look, filter = chosen) {
    run.layers.forEach((layer, l) => {
      if (filter.layer >= 0 && filter.layer !== layer) return;
      for (let h = 0; h < run.heads; h++) {
        if (filter.head >= 0 && filter.head !== h) continue;
        const [from, to] = chosen.token < 0 ? [0, view.steps] : [chosen.token, chosen.token + 1];
        for (let t = from; t < to; t++) look((l * run.heads + h) * view.steps + t, l, h, t);
      }
    });
  }

  function heat(series) {
    const counts = new Float32Array(Math.ceil(view.tokens / series.run.grain));
    visit(series.run, (s) => { for (const at of series.sets[s]) counts[at]++; });
    return counts;
  }

  /** What the filter's sets have in common with the exact top-k, and the attention mass that they cover. */
  function quality(run, filter) {
    let [rows, shared, best, mass, n] = [0, 0, 0, 0, 0];
    visit(run, (s, l, h, t) => {
      if (!run.sets[s].length) return;
      n++;
      rows += run.sets[s].length;
      if (!run.best) return;
      best += run.best[s].length;
      shared += common(run.sets[s], run.best[s]);
      mass += run.shares[(t * run.layers.length + l) * run.heads + h] / 255;
    }, filter);
    return { rows: rows / n, recall: run.best ? shared / best : NaN, mass: run.best ? mass / n : NaN };
  }

  // The columns with the document

  class Pane {
    constructor(place) {
      const root = $("pane").content.firstElementChild.cloneNode(true);
      for (const part of ["series", "sum", "text", "map", "legend"]) this[part] = root.querySelector(`.${part}`);
      this.root = root;
      view.series.forEach((series, i) => this.series.append(make("option", { value: i, textContent: series.name })));
      this.series.value = Math.min(place, view.series.length - 1);
      this.series.addEventListener("change", render);
      this.blocks = [];
      const cuts = [0, view.document, view.answer, view.tokens];
      for (let part = 0; part < 3; part++) {
        const paragraph = make("p", { className: ["", "question", "answered"][part] });
        this.text.append(paragraph);
        for (let at = cuts[part]; at < cuts[part + 1]; at += BLOCK) {
          const block = make("span");
          this.blocks.push({ block, from: at, to: Math.min(at + BLOCK, cuts[part + 1]), painted: null });
          block.textContent = view.piece(at, this.blocks.at(-1).to);
          paragraph.append(block);
        }
      }
      this.seen = new Set();
      const byElement = new Map(this.blocks.map((each) => [each.block, each]));
      this.observer = new IntersectionObserver((entries) => {
        for (const { target, isIntersecting } of entries) {
          const each = byElement.get(target);
          if (isIntersecting) this.seen.add(each); else this.seen.delete(each);
          if (isIntersecting) this.paint(each);
        }
      }, { root: this.text, rootMargin: "300px" });
      this.blocks.forEach(({ block }) => this.observer.observe(block));
      this.text.addEventListener("scroll", () => this.drawMap());
      const jump = (event) => { if (event.buttons) this.show((event.offsetY / this.map.clientHeight) * view.tokens); };
      this.map.addEventListener("pointerdown", jump);
      this.map.addEventListener("pointermove", jump);
    }

    get shown() { return view.series[this.series.value]; }

    update() {
      this.heat = heat(this.shown);
      this.most = this.heat.reduce((a, b) => Math.max(a, b), 0);
      this.mean = this.heat.reduce((a, b) => a + b, 0) / Math.max(1, this.heat.length);
      const { run, sets } = this.shown;
      this.spots = chosen.token < 0 && chosen.layer < 0 && sets === run.sets && run.passages?.length ? run.passages : null;
    }

    /** How strongly a token is marked: by the rank of its passage, or by how often it was recalled beyond the mean. */
    level(token) {
      if (this.spots) {
        const rank = this.spots.findIndex(([from, to]) => from <= token && token < to);
        return rank < 0 ? 0 : Math.max(3, LEVELS - 2 - rank);
      }
      const count = this.heat[Math.floor(token / this.shown.run.grain)];
      return count > this.mean ? Math.ceil((LEVELS * (count - this.mean)) / (this.most - this.mean)) : 0;
    }

    refresh() {
      const other = panes.find((pane) => pane !== this);
      this.other = other && other.shown !== this.shown ? other : null;
      this.version = {};
      this.seen.forEach((each) => this.paint(each));
      this.sum.textContent = view.live ? "answering …" : !this.most ? "all tokens read" : `${this.heat.reduce((n, count) => n + (count > 0), 0).toLocaleString("en")} ${this.shown.run.grain > 1 ? "groups" : "tokens"} recalled by some head`;
      this.legend.textContent = this.spots
        ? "Marked: the passages that heads recalled while the answer said their words."
        : view.live ? "Passages are marked as the answer recalls them." : !this.most ? "Every head read all tokens, so nothing is marked."
        : "Shade: how much more often than the average token it was recalled.";
      this.drawMap();
    }

    /** Show the heat of a block: a span for each run of tokens that look alike. */
    paint(each) {
      if (each.painted === this.version) return;
      each.painted = this.version;
      const look = (t) => {
        const level = this.level(t);
        return `${level ? `h${level}` : ""}${level && this.other && !this.other.level(t) ? " only" : ""}`;
      };
      const parts = [];
      for (let from = each.from, to; from < each.to; from = to) {
        const name = look(from);
        for (to = from + 1; to < each.to && look(to) === name; to++);
        parts.push(name ? make("span", { className: name }, view.piece(from, to)) : view.piece(from, to));
      }
      each.block.replaceChildren(...parts);
    }

    show(token) {
      const each = this.blocks.findLast(({ from }) => from <= token) ?? this.blocks[0];
      const within = ((token - each.from) / (each.to - each.from)) * each.block.offsetHeight;
      this.text.scrollTop = each.block.offsetTop + within - this.text.clientHeight / 3;
    }

    drawMap() {
      const { clientWidth: width, clientHeight: height } = this.map;
      const draw = this.map.getContext("2d");
      [this.map.width, this.map.height] = [width, height];
      draw.fillStyle = getComputedStyle(this.map).color;
      for (let y = 0; y < height; y++) {
        const from = Math.floor((y / height) * view.tokens);
        let most = 0;
        for (let i = from; i < Math.min(view.tokens, Math.max(from + 1, ((y + 1) / height) * view.tokens)); i++) most = Math.max(most, this.level(i));
        draw.globalAlpha = most / LEVELS;
        draw.fillRect(0, y, width, 1);
      }
      const token = (y) => {
        const each = this.blocks.findLast(({ block }) => block.offsetTop <= y) ?? this.blocks[0];
        return each.from + (Math.min(1, (y - each.block.offsetTop) / each.block.offsetHeight) || 0) * (each.to - each.from);
      };
      const top = (token(this.text.scrollTop) / view.tokens) * height;
      const bottom = (token(this.text.scrollTop + this.text.clientHeight) / view.tokens) * height;
      draw.globalAlpha = 1;
      draw.strokeStyle = getComputedStyle(this.text).color;
      draw.strokeRect(0.5, top + 0.5, width - 1, Math.max(2, bottom - top - 1));
    }
  }

  // Answer, grid, facts

  /** Let arrow keys move among the children of a box, in rows of so many. */
  function roving(box, columns) {
    box.onkeydown = (event) => {
      const items = [...box.children];
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = items[Math.min(items.length - 1, Math.max(0, items.indexOf(document.activeElement) + step))];
      next.focus();
      if (box.id === "answer") next.click();
    };
  }

  function listAnswer() {
    const items = [];
    for (let t = 0; t < view.steps; t++) {
      const piece = view.piece(view.answer + t);
      const item = make("span", { textContent: piece.replace(/\n/g, "⏎") || "·" });
      item.setAttribute("role", "option");
      item.addEventListener("click", () => { chosen.token = chosen.token === t ? -1 : t; render(); });
      items.push(item);
    }
    $("answer").replaceChildren(...items);
    roving($("answer"), () => 8);
  }

  function markAnswer() {
    [...$("answer").children].forEach((item, t) => {
      item.setAttribute("aria-selected", t === chosen.token);
      item.tabIndex = t === Math.max(0, chosen.token) ? 0 : -1;
      item.classList.toggle("differs", view.runs.some((run) => run.said && run.said[t] !== view.runs[0].said[t]));
    });
  }

  function drawGrid() {
    const layers = [...new Set(view.runs.flatMap((run) => run.layers))].sort((a, b) => a - b);
    const heads = Math.max(0, ...view.runs.map((run) => run.heads));
    const { run } = panes[0].shown;
    const cell = (layer, head, text) => {
      const button = make("button", { type: "button", tabIndex: -1, textContent: text });
      const pressed = chosen.layer === layer && chosen.head === head;
      button.setAttribute("aria-pressed", pressed);
      button.addEventListener("click", () => {
        Object.assign(chosen, pressed ? { layer: -1, head: -1 } : { layer, head });
        const place = [...$("grid").children].indexOf(button);
        render();
        $("grid").children[place].focus();
      });
      return button;
    };
    const cells = [];
    for (const layer of layers) {
      const heading = cell(layer, -1, layer);
      heading.setAttribute("aria-label", `layer ${layer}`);
      cells.push(heading);
      for (let head = 0; head < heads; head++) {
        const found = quality(run, { layer, head });
        const share = run.best ? found.recall : found.rows / Math.max(1, view.tokens / run.grain);
        const button = cell(layer, head, run.best && Number.isFinite(share) ? Math.round(100 * share) : "");
        button.style.setProperty("--share", Number.isFinite(share) ? share : 0);
        button.title = `layer ${layer}, KV head ${head}: ${describe(run, found)}`;
        button.setAttribute("aria-label", button.title);
        cells.push(button);
      }
    }
    if (cells.length) cells[0].tabIndex = 0;
    $("grid").style.setProperty("--columns", heads + 1);
    $("grid").replaceChildren(...cells);
    $("grid-hint").textContent = cells.length
      ? `Rows are layers, columns KV heads${run.best ? "; numbers: percent of the exact top-k recalled" : ""}. Choose one to filter.`
      : "Every layer attended to all tokens: nothing had to be recalled.";
    roving($("grid"), () => heads + 1);
  }

  function describe(run, found) {
    if (!Number.isFinite(found.rows)) return "nothing recalled";
    const unit = run.grain > 1 ? `groups of ${run.grain} tokens` : "tokens";
    const exact = run.best ? `; ${percent(found.recall)} of the exact top-k; attention mass covered ${percent(found.mass)}` : "";
    return `${found.rows.toFixed(1)} ${unit} a head${exact}`;
  }

  function tellFacts() {
    const t = chosen.token;
    const what = t < 0 ? "All tokens" : `Token ${t + 1} of ${view.steps}, “${view.piece(view.answer + t)}”`;
    const filter = chosen.layer < 0 ? "" : chosen.head < 0 ? `, layer ${chosen.layer}` : `, layer ${chosen.layer}, KV head ${chosen.head}`;
    const lines = view.runs.map((run) => {
      const other = t >= 0 && run.said && run.said[t] !== view.runs[0].said[t] ? `; would have said “${run.said[t]}”` : "";
      return make("li", {}, make("b", {}, run.name), `: ${describe(run, quality(run))}${other}`);
    });
    $("facts").replaceChildren(make("p", {}, what + filter), make("ul", {}, ...lines));
  }

  function bars(values, current) {
    const most = Math.max(1, ...values);
    return make("div", { className: "bars" }, ...values.map((value, i) => {
      const bar = make("i", { title: bytes(value), className: i === current ? "now" : "" });
      bar.style.height = `${Math.max(2, (100 * value) / most)}%`;
      return bar;
    }));
  }

  function tellBytes() {
    const parts = view.runs.filter((run) => run.places).flatMap((run) => {
      const { device, host, fetched } = run.places;
      const at = chosen.token < 0 ? view.steps - 1 : chosen.token;
      const moved = fetched.map((sum, t) => (t ? sum - fetched[t - 1] : 0));
      const now = `device ${bytes(device[at])}, host ${bytes(host[at])}, fetched for ${chosen.token < 0 ? "the last" : "this"} token ${bytes(moved[at])}`;
      return [make("p", {}, make("b", {}, run.name), `: ${now}`), bars(moved, at)];
    });
    $("bytes").replaceChildren(...(parts.length ? [make("h2", {}, "Bytes by place"), ...parts] : []));
  }

  function render() {
    panes.forEach((pane) => pane.update());
    panes.forEach((pane) => pane.refresh());
    markAnswer();
    drawGrid();
    tellFacts();
    tellBytes();
  }

  async function open(data) {
    view = await read(data);
    Object.assign(chosen, { token: -1, layer: -1, head: -1 });
    panes.forEach((pane) => pane.observer.disconnect());
    const second = view.runs.length > 1 ? view.series.findIndex(({ run }) => run === view.runs[1]) : 1;
    panes = (view.series.length > 1 ? [0, second] : [0]).map((place) => new Pane(place));
    $("panes").replaceChildren($("empty"), ...panes.map((pane) => pane.root));
    listAnswer();
    render();
    if (view.live) return;
    const grain = Math.max(...view.runs.map((run) => run.grain));
    const count = (n, what) => (n ? `${n.toLocaleString("en")} tokens of ${what}, ` : "");
    $("status").textContent = `${count(view.document, view.answer > view.document ? "document" : "prompt")}` +
      `${count(view.answer - view.document, "question")}${view.steps} of answer${grain > 1 ? `; positions in groups of ${grain}` : ""}`;
    const [best] = view.runs[0].passages ?? [];
    if (best) panes[0].show(best[0]);
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && view) { Object.assign(chosen, { token: -1, layer: -1, head: -1 }); render(); }
  });
  addEventListener("resize", () => panes.forEach((pane) => pane.drawMap()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panes.forEach((pane) => pane.drawMap()));

  /** Mark the passages of an answer that goes on, and show the best one where it has changed. */
  function mark(passages) {
    const { run } = panes[0].shown;
    const before = run.passages?.[0]?.[0];
    run.passages = passages;
    panes[0].update();
    panes[0].refresh();
    if (passages.length && passages[0][0] !== before) panes[0].show(passages[0][0]);
  }

  /** Show a token in the document. */
  function point(token) {
    panes[0].show(token);
    panes[0].root.scrollIntoView({ block: "nearest" });
  }

  /** How many rows a head chose in a step, on average; NaN where nothing was chosen. */
  const rows = () => quality(view.runs[0], { token: -1, layer: -1, head: -1 }).rows;

  window.kvthaw = { $, make, bytes, bars, open, mark, point, rows, piece: (from, to) => view.piece(from, to) };
  const embedded = $("data");
  if (embedded) {
    const data = JSON.parse(embedded.textContent);
    $("title").textContent = data.title;
    $("closer").open = true;
    open(data).catch((error) => { $("status").textContent = `The page cannot be shown: ${error.message}`; });
  }
})();
