"use strict";
(() => {
  const { $, make, bytes, bars, open, point, rows, piece } = window.kvthaw;
  const BEST = 3; // passages that are told below an answer
  let model = null;
  let turns = []; // the conversation, for models with a chat template
  let about = ""; // the document that it is about
  let abort = null;
  let shown = null; // the answer whose recalls are shown: its id, and what it recalled
  const fetched = []; // bytes brought from the host, at each look

  const number = (n) => n.toLocaleString("en");
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
      const contexts = await json("v1/contexts").catch(() => ({ data: [] }));
      const kept = contexts.data.map(({ id, tokens }) => make("option", { value: id }, `${id} (${number(tokens)} tokens, kept)`));
      $("context").replaceChildren($("context").options[0], ...kept);
      if (kept.length) $("context").value = kept[0].value;
      choose();
      $("title").textContent = model.id;
      document.title = `${model.id} – kvthaw`;
      $("status").textContent = `up to ${number(model.max_model_len)} tokens`;
    } catch (error) {
      $("title").textContent = "kvthaw";
      $("status").textContent = error.message;
    }
  }

  function choose() {
    $("own").hidden = $("context").value !== "";
  }

  /** Show the bytes by place that the server's metrics have. */
  async function look() {
    const text = await (await answered(await ask("metrics"))).text();
    const place = (name) => Number(text.match(new RegExp(`^kvthaw:kv_bytes\\{.*place="${name}".*\\} (.*)$`, "m"))?.[1] ?? 0);
    fetched.push(Number(text.match(/^kvthaw:fetched_bytes\{.*\} (.*)$/m)?.[1] ?? 0));
    const moved = fetched.map((sum, i) => Math.max(0, sum - (fetched[i - 1] ?? sum))).slice(-60);
    const places = `On the device ${bytes(place("device"))}, on the host ${bytes(place("host"))}, kept prompts ${bytes(place("prefix"))}.`;
    const heading = make("h2", {}, "Bytes of KV");
    $("bytes").replaceChildren(heading, make("p", {}, `${places} Fetched so far: ${bytes(fetched.at(-1))}.`), bars(moved, moved.length - 1));
  }

  function request(question) {
    const document = $("context").value ? "" : $("document").value;
    const common = { max_tokens: Number($("limit").value), temperature: 0, stream: true, recall: $("exact").checked ? "exact" : "selected" };
    if ($("context").value) common.context = $("context").value;
    if (!model.chat_template) return ["v1/completions", { ...common, prompt: (document && `${document}\n`) + question }];
    if (about !== $("context").value + document) turns = [];
    about = $("context").value + document;
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

  async function send(event) {
    event.preventDefault();
    const question = $("question").value.trim();
    if (!question || abort) return;
    const said = make("div", { className: "turn answer waiting" });
    $("turns").append(make("div", { className: "turn asked" }, question), said);
    const before = turns.length;
    [$("send").disabled, $("stop").hidden, $("question").value] = [true, false, ""];
    abort = new AbortController();
    const begun = performance.now();
    const times = [];
    try {
      const [path, body] = request(question);
      let id = null;
      for await (const chunk of chunks(await answered(await ask(path, body, abort.signal)))) {
        if (chunk.error) throw new Error(chunk.error.message);
        ({ id } = chunk);
        const [choice] = chunk.choices;
        const more = choice?.delta?.content ?? choice?.text ?? "";
        if (more) times.push(performance.now() - begun);
        said.append(more);
      }
      said.classList.remove("waiting");
      if (model.chat_template) turns.push({ role: "assistant", content: said.textContent });
      await show(id);
      said.after(tell(times, shown.data));
      await look();
    } catch (error) {
      turns.length = before;
      const stopped = error.name === "AbortError";
      said.classList.remove("waiting");
      said.classList.toggle("error", !stopped);
      said.append(stopped ? " (stopped)" : error.message);
      $("question").value ||= question;
    } finally {
      abort = null;
      [$("send").disabled, $("stop").hidden, $("fresh").hidden] = [false, true, false];
      $("question").focus({ preventScroll: true });
    }
  }

  /** What an answer took, how many rows its steps read, and the passages that it recalled most. */
  function tell(times, data) {
    const [run] = data.runs;
    const each = times.length > 1 ? (times.at(-1) - times[0]) / (times.length - 1) : NaN;
    const spent = `First token after ${seconds(times[0] ?? 0)}${Number.isFinite(each) ? `, then ${seconds(each)} per token` : ""}.`;
    const read = rows();
    const what = Number.isFinite(read)
      ? `${run.name}: each head chose ${number(Math.round(read))} of ${number(data.answer)} rows per token.`
      : `Full attention: each head read all ${number(data.answer)} rows${run.full ? ` (${run.full})` : ""}.`;
    const list = (run.passages ?? []).slice(0, BEST).map(([from, to, share]) => {
      const words = piece(from, to).replace(/\s+/g, " ").trim();
      const button = make("button", { type: "button" }, words, make("small", {}, ` ${Math.round(100 * share)} % of heads`));
      button.addEventListener("click", () => point(from));
      return make("li", {}, button);
    });
    const box = make("div", { className: "told" }, make("small", {}, `${spent} ${what}`));
    if (list.length) box.append(make("ol", { ariaLabel: "Passages that the answer came from" }, ...list));
    return box;
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
  $("context").addEventListener("change", choose);
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (file) [$("document").value, $("context").value, $("own").hidden] = [await file.text(), "", false];
  });
  connect();
})();
