"use strict";
(() => {
  const { $, make, bytes, bars, open } = window.kvthaw;
  const fetched = []; // bytes brought from the host, at each look
  let model = null;
  let turns = []; // the conversation, for models with a chat template
  let about = ""; // the document that it is about
  let abort = null;
  let shown = null; // the answer whose recalls are shown: its id, and what it recalled

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
    $("ask").hidden = false;
    try {
      [model] = (await json("v1/models")).data;
      const contexts = await json("v1/contexts").catch(() => ({ data: [] }));
      const kept = contexts.data.map(({ id, tokens }) => make("option", { value: id }, `${id} (${tokens.toLocaleString("en")} tokens)`));
      $("context").replaceChildren($("context").options[0], ...kept);
      $("title").textContent = `kvthaw: ${model.id}`;
      $("status").textContent = `up to ${model.max_model_len.toLocaleString("en")} tokens`;
      await look();
    } catch (error) {
      $("status").textContent = error.message;
    }
  }

  /** Show the bytes by place that the server's metrics have. */
  async function look() {
    const text = await (await answered(await ask("metrics"))).text();
    const place = (name) => Number(text.match(new RegExp(`^kvthaw:kv_bytes\\{.*place="${name}".*\\} (.*)$`, "m"))?.[1] ?? 0);
    fetched.push(Number(text.match(/^kvthaw:fetched_bytes\{.*\} (.*)$/m)?.[1] ?? 0));
    const moved = fetched.map((sum, i) => Math.max(0, sum - (fetched[i - 1] ?? sum))).slice(-60);
    const places = ["device", "host", "prefix"].map((name) => `${name} ${bytes(place(name))}`).join(", ");
    $("bytes").replaceChildren(make("p", {}, `${places}, fetched in all ${bytes(fetched.at(-1))}`), bars(moved, moved.length - 1));
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
    const question = $("question").value;
    const said = make("div", { className: "turn answer" });
    $("turns").append(make("div", { className: "turn" }, question), said);
    const before = turns.length;
    [$("send").disabled, $("stop").hidden] = [true, false];
    abort = new AbortController();
    const clock = setInterval(() => look().catch(() => {}), 1000);
    try {
      const [path, body] = request(question);
      let id = null;
      for await (const chunk of chunks(await answered(await ask(path, body, abort.signal)))) {
        if (chunk.error) throw new Error(chunk.error.message);
        ({ id } = chunk);
        const [choice] = chunk.choices;
        said.append(choice?.delta?.content ?? choice?.text ?? "");
      }
      if (model.chat_template) turns.push({ role: "assistant", content: said.textContent });
      $("question").value = "";
      await show(id);
      await look();
    } catch (error) {
      turns.length = before;
      said.classList.add("error");
      said.append(error.name === "AbortError" ? " (stopped)" : error.message);
    } finally {
      clearInterval(clock);
      [$("send").disabled, $("stop").hidden] = [false, true];
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
  $("beside").addEventListener("submit", compare);
  $("stop").addEventListener("click", () => abort?.abort());
  $("key").addEventListener("change", connect);
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("context").addEventListener("change", () => { $("document").hidden = $("context").value !== ""; });
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    if (file) [$("document").value, $("context").value, $("document").hidden] = [await file.text(), "", false];
  });
  connect();
})();
