// A box to try a chat: the page as any client of the API. What the server calls the request comes in a header, so that
// its blocks can be shown on the map while it runs.

import {Refused, ask, lines} from "./feed.js";

const element = (id) => document.getElementById(id);

export class Chat {
  // `on` has: key(), model(), began(ids), ended(ids), refused(status, message)
  constructor(on) {
    this.on = on;
    this.messages = [];
    this.form = element("chat-form");
    this.log = element("chat-log");
    this.input = element("chat-input");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.abort) this.form.requestSubmit();
      }
    });
    element("chat-clear").addEventListener("click", () => {
      this.abort?.abort();
      this.messages = [];
      this.log.replaceChildren();
      this.input.focus();
    });
  }

  line(kind, text) {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = text;
    this.log.append(line);
    this.log.scrollTop = this.log.scrollHeight;
    return line;
  }

  async send() {
    const text = this.input.value.trim();
    if (!text) return;
    this.input.value = "";
    const messages = this.messages, abort = this.abort = new AbortController();
    messages.push({role: "user", content: text});
    this.line("me", text);
    const answer = this.line("it", "");
    element("chat-send").textContent = "Stop";
    this.log.setAttribute("aria-busy", "true");  // read out once, when it is whole
    let ids = [];
    try {
      ids = await this.stream(messages, answer, abort.signal);
      messages.push({role: "assistant", content: answer.textContent});
    } catch (error) {
      if (!answer.textContent) { answer.remove(); messages.pop(); }
      else messages.push({role: "assistant", content: answer.textContent});
      if (error.name === "AbortError") this.line("about", "stopped");
      else this.line("wrong", error.message);
      if (error instanceof Refused && error.status === 401) this.on.refused(401, error.message);
    } finally {
      this.log.removeAttribute("aria-busy");
      element("chat-send").textContent = "Send";
      this.abort = null;
      this.on.ended(ids);
    }
  }

  async stream(messages, answer, signal) {
    const body = {
      model: this.on.model(), messages, stream: true, stream_options: {include_usage: true},
      max_tokens: Math.max(Number(element("chat-tokens").value) || 128, 1),
    };
    const begun = performance.now();
    const response = await ask("/v1/chat/completions", this.on.key(), {
      method: "POST", body: JSON.stringify(body), headers: {"Content-Type": "application/json"}, signal,
    });
    const ids = (response.headers.get("X-Kilburn-Requests") ?? "").split(",").filter(Boolean).map(Number);
    this.on.began(ids);
    let usage = null;
    for await (const line of lines(response)) {
      if (line === "[DONE]") break;
      const chunk = JSON.parse(line);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      answer.append(chunk.choices[0]?.delta.content ?? "");
      if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    }
    const seconds = (performance.now() - begun) / 1000, cached = usage?.prompt_tokens_details.cached_tokens;
    const name = ids.length ? `request ${ids.join(", ")}: ` : "";
    if (usage) this.line("about", `${name}${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, ${cached} of ${usage.prompt_tokens} prompt tokens cached`);
    return ids;
  }
}
