// Conversations, kept in the browser so that a reload shows them, and answers as they stream in.

const KEPT = "mambakit.conversations";
const MOST = 100;

export class Conversations {
  constructor(storage) {
    this.storage = storage;
    const known = readJson(storage.getItem(KEPT));
    this.all = Array.isArray(known?.all) ? known.all : [];
    this.current = this.all.find((one) => one.id === known?.current) ?? this.all[0] ?? this.begin();
  }

  begin(messages = [], title = "") {
    this.current = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title, messages };
    this.all.unshift(this.current);
    this.all.length = Math.min(this.all.length, MOST);
    this.save();
    return this.current;
  }

  // A new conversation that shares the first messages of this one.
  branch(count) {
    const { messages, title } = this.current;
    return this.begin(structuredClone(messages.slice(0, count)), `${title} (branch)`);
  }

  choose(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
    this.save();
  }

  remove(id) {
    this.all = this.all.filter((one) => one.id !== id);
    if (this.current.id === id) this.current = this.all[0] ?? this.begin();
    this.save();
  }

  save() {
    try {
      this.storage.setItem(KEPT, JSON.stringify({ all: this.all, current: this.current.id }));
    } catch {
      // No room: it is shown all the same, until the next reload.
    }
  }
}

export function readJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// The events of a stream, one object each. What the server says of an error is thrown.
export async function* events(response) {
  if (!response.ok) {
    const problem = readJson(await response.text());
    throw new Error(problem?.error?.message ?? `the server answers ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

export function figures(count, seconds, usage) {
  const parts = [`${count} tokens`];
  if (seconds > 0 && count > 1) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens per second`);
  if (usage) parts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens reused`);
  return parts.join(", ");
}
