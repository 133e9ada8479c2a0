"use strict";
(() => {
  const { $, make, bytes, bars, open, mark, point, rows, piece } = window.kvthaw;
  const BEST = 3; // passages that are told below an answer
  const LOOK = 1200; // milliseconds between two looks at what an answer recalls
  let model = null;
  let turns = []; // the conversation, for models with a chat template
  let about = ""; // the document that it is about
  let abort = null;
  let wake = () => {}; // ends the wait before the next look
  let streams = false; // whether an answer comes whose document is shown meanwhile
  let shown = null; // the answer whose recalls are shown: its id, and what it recalled
  const fetched = []; // bytes brought from the host, at each look

  const number = (n) => n.toLocaleString("en");
  const titled = (method) => (method === "full" ? "full attention" : method);
  const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

  function ask(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
    return fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  }

  async function answered(response) {
    if (response.ok) return response;
    const said = await response.json().catch(() => ({}));
    if (response.status === 401) $("key-row").hidden = false;
    throw new Error(said.error?.message ?? `the server answered ${response.status}`);
  }

  const json = async (path) => (await answered(await ask(path))).json();

  async function connect() {
    [$("source").hidden, $("ask").hidden] = [false, false];
    try {
      [model] = (await json("v1/models")).data;
      await list();
      const ways = model.methods.map((name) => make("option", { value: name }, titled(name)));
      const { value } = $("second");
      $("second").replaceChildren($("second").options[0], ...ways);
      [$("second").value, $("second-row").hidden] = [value, true];
      $("title").textContent = model.id;
      document.title = `${model.id} – kvthaw`;
      $("status").textContent = `up to ${number(model.max_model_len)} tokens`;
    } catch (error) {
      $("title").textContent = "kvthaw";
      $("status").textContent = error.message;
    }
  }

  /** Show the documents that are kept. wanted: the one to choose; without it the first where none is chosen. */
  async function list(wanted) {
    const { data } = await json("v1/contexts").catch(() => ({ data: [] }));
    const before = wanted ?? (chosen() || data[0]?.id || "");
    const item = (id, what, ...more) => {
      const radio = make("input", { type: "radio", name: "context", value: id, checked: id === before });
      radio.addEventListener("change", choose);
      return make("li", {}, make("label", {}, radio, make("span", {}, id || "Another text"), make("small", {}, what)), ...more);
    };
    const kept = data.map(({ id, tokens, status }) => {
      const drop = make("button", { type: "button", className: "drop", ariaLabel: `Delete ${id}`, title: `Delete ${id}` }, "✕");
      drop.addEventListener("click", () => remove(id));
      return item(id, status === "completed" ? `${number(tokens)} tokens, kept` : `${number(tokens)} tokens, being read`, drop);
    });
    $("contexts").replaceChildren(...kept, item("", "paste it, or open a file"));
    if (!chosen()) $("contexts").querySelector('[value=""]').checked = true;
    choose();
  }

  const chosen = () => document.querySelector('[name="context"]:checked')?.value ?? "";

  function choose() {
    $("own").hidden = chosen() !== "";
  }

  async function remove(id) {
    if (!confirm(`Delete ${id}? The server reads the text again if you need it later.`)) return;
    try {
      const headers = $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {};
      await answered(await fetch(`v1/contexts/${encodeURIComponent(id)}`, { method: "DELETE", headers }));
      await list("");
    } catch (error) {
      $("status").textContent = error.message;
    }
  }

  /** Keep the pasted text under a name, so that the next question about it need not wait for it. */
  async function keep() {
    const [name, text] = [$("name").value.trim(), $("document").value];
    if (!name || !text.trim() || !$("name").checkValidity()) {
      $("status").textContent = text.trim() ? "Give it a name of letters, digits, dots and dashes." : "There is no text to keep.";
      return;
    }
    [$("keep").disabled, $("status").textContent] = [true, `Reading ${name} …`];
    try {
      await answered(await ask("v1/contexts", { name, document: text }));
      await list(name);
      $("status").textContent = `${name} is kept.`;
    } catch (error) {
      $("status").textContent = error.message;
    } finally {
      $("keep").disabled = false;
    }
  }

  /** Show the bytes by place that the server's metrics have. */
  async function look() {
    const text = await (await answered(await ask("metrics"))).text();
    const place = (name) => Number(text.match(new RegExp(`^kvthaw:kv_bytes\\{.*place="${name}".*\\} (.*)$`, "m"))?.[1] ?? 0);
    fetched.push(Number(text.match(/^kvthaw:fetched_bytes\{.*\} (.*)$/m)?.[1] ?? 0));
    const moved = fetched.map((sum, i) => Math.max(0, sum - (fetched[i - 1] ?? sum))).slice(-60);
    const places = `On the device ${bytes(place("device"))}, on the host ${bytes(place("host"))}, kept prompts ${bytes(place("prefix"))}.`;
    const heading = make("h2", {}, "Bytes of KV on the server now");
    $("bytes").replaceChildren(heading, make("p", {}, `${places} Fetched so far: ${bytes(fetched.at(-1))}.`), bars(moved, moved.length - 1));
  }

  function request(question) {
    const [context, text] = [chosen(), $("document").value];
    const document = context ? "" : text;
    const common = { max_tokens: Number($("limit").value), temperature: 0, stream: true, recall: $("exact").checked ? "exact" : "selected" };
    common.stream_options = { include_usage: true, continuous_usage_stats: true };
    if (context) common.context = context;
    if (!model.chat_template) return ["v1/completions", { ...common, prompt: (document && `${document}\n`) + question }];
    if (about !== context + document) turns = [];
    about = context + document;
    const content = document && !turns.length ? `${document}\n\n${question}` : question;
    turns.push({ role: "user", content });
    return ["v1/chat/completions", { ...common, messages: [...turns] }];
  }

  /** Yield the chunks of a stream of events. */
  async function* chunks(response) {
    let rest = "";
    for await (const part of lines(response.body.pipeThrough(new TextDecoderStream()))) {
      rest += part;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith("data: {")) yield JSON.parse(event.slice(6));
      }
    }
  }

  async function* lines(stream) {
    const reader = stream.getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  }

  /** How far an element's end is below what is seen of the conversation, in pixels. In wide windows the form covers the end. */
  function below(element) {
    return element.getBoundingClientRect().bottom - Math.min(innerHeight, $("ask").getBoundingClientRect().top) + 8;
  }

  /** Change an element. If its end was in view, keep it there. */
  function grow(element, change) {
    const followed = below(element) < 48;
    change();
    if (followed) reveal(element);
  }

  function reveal(element) {
    const hidden = below(element);
    if (hidden > 0) scrollBy({ top: hidden, behavior: "instant" });
  }

  /** A place for an answer that streams: its text, and a line below that tells how fast it comes. */
  class Answering {
    constructor(heading) {
      [this.text, this.line] = [make("div", { className: "turn answer waiting" }), make("small", { className: "live" })];
      this.box = make("div", { className: "one" }, ...(heading ? [make("h3", {}, heading)] : []), this.text, this.line);
      [this.begun, this.times] = [performance.now(), []];
    }

    /** The mean time of a token after the first, in milliseconds; NaN before there are two. */
    get each() {
      return this.times.length > 1 ? (this.times.at(-1) - this.times[0]) / (this.times.length - 1) : NaN;
    }

    add(piece) {
      if (!piece) return;
      this.times.push(performance.now() - this.begun);
      grow(this.box, () => this.text.append(piece));
      if (Number.isFinite(this.each)) this.line.textContent = `${(1000 / this.each).toFixed(1)} tokens per second`;
    }

    /** End it. rows: read per head and token, of so many; NaN where all were. */
    tell(name, rows, all, why = "", passages = []) {
      this.text.classList.remove("waiting");
      const speed = Number.isFinite(this.each) ? `, then ${(1000 / this.each).toFixed(1)} tokens per second` : "";
      const whole = all * model.kv_bytes_per_token;
      const left = (1 - rows / all) * whole * this.times.length;
      const read = Number.isFinite(rows)
        ? `${name}: each head chose ${number(Math.round(rows))} of ${number(all)} rows per token. ` +
          `${bytes((rows / all) * whole)} of ${bytes(whole)} of KV per token; ${bytes(left)} were left unread.`
        : `${name}: each head read all ${number(all)} rows per token, ${bytes(whole)} of KV${why && `: ${why}. Options, “Answer beside it”, has methods that recall`}.`;
      const words = make("small", {}, `First token after ${seconds(this.times[0] ?? 0)}${speed}. ${read}`);
      grow(this.box, () => {
        this.line.remove();
        this.box.append(make("div", { className: "told" }, words, ...passages));
      });
    }

    fail(error) {
      const stopped = error.name === "AbortError";
      this.text.classList.remove("waiting");
      this.text.classList.toggle("error", !stopped);
      this.text.append(stopped ? " (stopped)" : error.message);
    }
  }

  async function send(event) {
    event.preventDefault();
    const question = $("question").value.trim();
    if (!question || abort) return;
    const second = $("second").value;
    const first = new Answering(second && titled(model.method));
    const answers = make("div", { className: "answers" }, first.box);
    $("turns").append(make("div", { className: "turn asked" }, question), answers);
    reveal(answers);
    const before = turns.length;
    [$("send").disabled, $("stop").hidden, $("question").value] = [true, false, ""];
    abort = new AbortController();
    let now = first;
    try {
      const [path, body] = request(question);
      let [id, following] = [null, null];
      streams = true;
      for await (const chunk of chunks(await answered(await ask(path, body, abort.signal)))) {
        if (chunk.error) throw new Error(chunk.error.message);
        ({ id } = chunk);
        const [choice] = chunk.choices;
        first.add(choice?.delta?.content ?? choice?.text ?? "");
        following ??= follow(id, () => streams);
      }
      streams = false;
      wake();
      await following;
      if (model.chat_template) turns.push({ role: "assistant", content: first.text.textContent });
      await show(id);
      const { data } = shown;
      const [run] = data.runs;
      first.tell(run.full ? "Full attention" : run.name, rows(), data.answer, run.full, evidence(run.passages));
      await look();
      if (second) {
        now = new Answering(titled(second));
        grow(answers, () => answers.append(now.box));
        await beside(now, id, second);
      }
    } catch (error) {
      if (now === first) turns.length = before;
      now.fail(error);
      if (now === first) $("question").value ||= question;
    } finally {
      streams = false;
      abort = null;
      [$("send").disabled, $("stop").hidden, $("fresh").hidden] = [false, true, false];
      $("question").focus({ preventScroll: true });
    }
  }

  /** Have another method answer what an answer was to, once that has ended, so that the two take no time from each other. */
  async function beside(place, id, method) {
    const way = method === "full" ? { method } : { method, budget: Number($("second-budget").value) };
    let told = null;
    for await (const part of chunks(await answered(await ask(`v1/recalls/${id}/answers`, way, abort.signal)))) {
      if (part.error) throw new Error(part.error.message);
      if (part.name) told = part;
      else place.add(part.text);
    }
    if (told) place.tell(told.name, told.rows ?? NaN, told.tokens, "", evidence(told.passages));
  }

  /** The passages that an answer came from, as a list that shows them in the document. */
  function evidence(passages) {
    const list = (passages ?? []).slice(0, BEST).map(([from, to, share]) => {
      const words = piece(from, to).replace(/\s+/g, " ").trim();
      const button = make("button", { type: "button" }, words, make("small", {}, ` ${Math.round(100 * share)} % of heads`));
      button.addEventListener("click", () => point(from));
      return make("li", {}, button);
    });
    const hint = make("small", {}, "What it recalled: first the passages with runs of the answer's words, then those that most heads chose.");
    return list.length ? [...(list.length > 1 ? [make("div", {}, hint)] : []), make("ol", { ariaLabel: "Passages that the answer recalled" }, ...list)] : [];
  }

  /** Show the document of an answer that streams, and mark in it what the answer recalls, until it has ended. */
  async function follow(id, goes) {
    let told = await json(`v1/recalls/${id}/passages?text=true`).catch(() => null);
    if (!told || !goes()) return;
    await open({ ...told, live: true, runs: [{ name: model.method, layers: [], heads: 0, grain: 1, passages: told.passages }] });
    while (told && goes()) {
      mark(told.passages);
      await new Promise((done) => { wake = done; setTimeout(done, LOOK); });
      told = goes() && (await json(`v1/recalls/${id}/passages`).catch(() => null));
    }
  }

  async function show(id) {
    shown = { id, data: await json(`v1/recalls/${id}`) };
    const { value } = $("method");
    $("method").replaceChildren(...shown.data.methods.map((name) => make("option", { value: name, textContent: name })));
    if (value) $("method").value = value;
    $("beside").hidden = false;
    await open(shown.data);
  }

  /** Send the answer's tokens through another method or budget, and show what they recall there in the second column. */
  async function compare(event) {
    event.preventDefault();
    const { id, data } = shown;
    $("compare").disabled = true;
    try {
      const way = { method: $("method").value, budget: Number($("budget").value) };
      data.runs[1] = await (await answered(await ask(`v1/recalls/${id}/runs`, way))).json();
      if (shown.data === data) await open(data);
    } catch (error) {
      $("status").textContent = error.message;
    } finally {
      $("compare").disabled = false;
    }
  }

  $("ask").addEventListener("submit", send);
  $("source").addEventListener("submit", (event) => { event.preventDefault(); connect(); });
  $("beside").addEventListener("submit", compare);
  $("stop").addEventListener("click", () => abort?.abort());
  $("fresh").addEventListener("click", () => {
    [turns, $("fresh").hidden] = [[], true];
    $("turns").replaceChildren();
    $("question").focus();
  });
  $("key").addEventListener("change", connect);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("keep").addEventListener("click", keep);
  $("second").addEventListener("change", () => { $("second-row").hidden = ["", "full"].includes($("second").value); });
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (!file) return;
    $("document").value = await file.text();
    $("name").value ||= file.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9._-]+/g, "-");
  });
  connect();
})();
