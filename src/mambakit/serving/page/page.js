import { Conversations, events, figures, readJson } from "./conversation.js";

const SETTINGS = "mambakit.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const $ = (id) => document.getElementById(id);
const conversations = new Conversations(localStorage);
let running = null;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function say(text) {
  $("status").textContent = text;
}

function complain(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function draw() {
  const { current, all } = conversations;
  $("conversations").replaceChildren(
    ...all.map((one) => {
      const name = one.title || "Empty conversation";
      const open = element("button", { type: "button", textContent: name, title: name, onclick: () => choose(one.id) });
      open.setAttribute("aria-current", String(one === current));
      const drop = element("button", { type: "button", textContent: "×", onclick: () => remove(one.id) });
      drop.setAttribute("aria-label", `Delete ${name}`);
      return element("li", {}, open, drop);
    }),
  );
  $("messages").replaceChildren(...current.messages.map(drawMessage));
  $("messages").scrollTop = $("messages").scrollHeight;
}

function drawMessage(message, place) {
  const shown = element(
    "article",
    { className: message.role },
    element("h3", { textContent: message.role }),
    element("p", { className: "content", textContent: message.content }),
    element("p", { className: "figures", textContent: message.figures ?? "" }),
  );
  const actions = element("div", { className: "actions" });
  if (place === conversations.current.messages.length - 1) {
    const name = message.role === "assistant" ? "Regenerate" : "Answer";
    actions.append(element("button", { type: "button", className: "again", textContent: name, onclick: again }));
  }
  const branch = element("button", { type: "button", className: "branch", textContent: "Branch from here" });
  branch.onclick = () => {
    halt();
    conversations.branch(place + 1);
    draw();
    say("A branch with the messages up to here.");
    $("prompt").focus();
  };
  actions.append(branch);
  shown.append(actions);
  return shown;
}

function choose(id) {
  halt();
  conversations.choose(id);
  draw();
  say("Conversation opened.");
  $("prompt").focus();
}

function remove(id) {
  halt();
  conversations.remove(id);
  draw();
  say("Conversation deleted.");
  $("new").focus();
}

function halt() {
  running?.abort();
}

function body(messages) {
  const system = $("system").value.trim();
  const asked = { stream: true, stream_options: { include_usage: true } };
  asked.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  for (const name of NUMBERS) {
    const value = $(name).valueAsNumber;
    if (Number.isFinite(value)) asked[name] = value;
  }
  return asked;
}

async function answer() {
  const conversation = conversations.current;
  const stop = new AbortController();
  const sent = conversation.messages.map(({ role, content }) => ({ role, content }));
  const message = { role: "assistant", content: "" };
  running = stop;
  conversation.messages.push(message);
  draw();
  const shown = $("messages").lastElementChild;
  const content = shown.querySelector(".content");
  $("send").disabled = true;
  $("stop").disabled = false;
  $("messages").setAttribute("aria-busy", "true");
  complain("");
  say("Answering.");
  let count = 0;
  let began = 0;
  let usage = null;
  let last = "The answer is complete.";
  const measure = () => figures(usage?.completion_tokens ?? count, (performance.now() - began) / 1000, usage);
  let timer = 0;
  let pause = 0;
  // However fast tokens come and however long the text is, drawing it takes a tenth of the time.
  const show = () => {
    const start = performance.now();
    content.textContent = message.content;
    shown.querySelector(".figures").textContent = measure();
    const log = $("messages");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
    timer = 0;
    pause = Math.max(20, 10 * (performance.now() - start));
  };
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body(sent)), signal: stop.signal };
    for await (const event of events(await fetch("/v1/chat/completions", options))) {
      usage = event.usage ?? usage;
      const added = event.choices[0]?.delta?.content;
      if (!added) continue;
      began ||= performance.now();
      count += 1;
      message.content += added;
      timer ||= setTimeout(show, pause);
    }
  } catch (error) {
    last = stop.signal.aborted ? "Stopped." : "The answer failed.";
    if (!stop.signal.aborted) complain(error.message);
  }
  clearTimeout(timer);
  message.figures = began ? measure() : "";
  if (!message.content) conversation.messages.splice(conversation.messages.indexOf(message), 1);
  conversations.save();
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  draw();
  $("messages").setAttribute("aria-busy", "false");
  say(message.figures ? `${last} ${message.figures}.` : last);
}

function send() {
  const text = $("prompt").value;
  if (!text.trim() || running) return;
  const { current } = conversations;
  current.title ||= text.trim().slice(0, 60);
  current.messages.push({ role: "user", content: text });
  conversations.save();
  $("prompt").value = "";
  $("prompt").focus();
  answer();
}

function again() {
  if (running) return;
  const { messages } = conversations.current;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  $("prompt").focus();
  answer();
}

function restoreSettings() {
  const kept = readJson(localStorage.getItem(SETTINGS)) ?? {};
  for (const name of [...NUMBERS, "system"]) if (name in kept) $(name).value = kept[name];
  // A key is for as long as the tab is open.
  $("key").value = sessionStorage.getItem("mambakit.key") ?? "";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("change", () => {
  localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries([...NUMBERS, "system"].map((name) => [name, $(name).value]))));
  sessionStorage.setItem("mambakit.key", $("key").value);
  showModel();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") halt();
});
$("stop").addEventListener("click", () => {
  halt();
  $("prompt").focus();
});
$("new").addEventListener("click", () => {
  halt();
  if (conversations.current.messages.length) conversations.begin();
  draw();
  say("New conversation.");
  $("prompt").focus();
});

async function showModel() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    const known = await response.json();
    complain(response.ok ? "" : known.error.message);
    $("model").textContent = known.data?.[0]?.id ?? "";
  } catch {
    complain("The server does not answer.");
  }
}

restoreSettings();
draw();
showModel();
$("prompt").focus();
