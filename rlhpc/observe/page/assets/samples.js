"use strict";
// Browser of samples: search, filters, order.
page.samplesBrowser = (() => {
  const { element, format } = page;
  const KIND = 0, STEP = 1, NAME = 2, REWARD = 3, STATE = 4, PROMPT = 5, RESPONSE = 6, EXPECTED = 7;
  const MORE = 40; // samples shown at a time
  const OPEN = 600; // characters of a text that is not folded
  const ORDERS = {
    "newest first": (a, b) => b.row[STEP] - a.row[STEP],
    "oldest first": (a, b) => a.row[STEP] - b.row[STEP],
    "lowest reward": (a, b) => (a.row[REWARD] ?? Infinity) - (b.row[REWARD] ?? Infinity),
    "highest reward": (a, b) => (b.row[REWARD] ?? -Infinity) - (a.row[REWARD] ?? -Infinity),
    "longest response": (a, b) => b.row[RESPONSE].length - a.row[RESPONSE].length,
  };
  let all = [];
  let parts = null;

  function build() {
    const section = page.section("samples", "Samples");
    all = page.runs.flatMap((run, index) => page.rows[index].map((row) => ({ run, row, text: null })));
    for (const run of page.runs) {
      if (!run.unread) continue;
      const text = `${run.name}: samples of ${run.unread} training steps are not on this page; rlhpc report or rlhpc samples shows them.`;
      section.append(element("p", { className: "remark", textContent: text }));
    }
    if (!all.length) {
      section.append(element("p", { textContent: "No samples of validations." }));
      return;
    }
    const values = (get) => [...new Set(all.map(get))].filter((value) => value !== "");
    const any = (options) => page.choice([["", "all"], ...options.map((value) => [value, value])]);
    const search = element("input", { type: "search", id: "search", placeholder: "words in prompt or response" });
    const run = any(values((one) => one.run.name));
    const kind = any(values((one) => one.row[KIND]));
    const name = any(values((one) => one.row[NAME]));
    const step = any(values((one) => String(one.row[STEP])).sort((a, b) => b - a));
    const order = page.choice(Object.keys(ORDERS).map((text) => [text, text]));
    const wrong = element("input", { type: "checkbox" });
    const count = element("output", { id: "found" });
    const list = element("div", { id: "sample-list" });
    const more = element("button", { type: "button", textContent: "show more" });
    parts = { search, run, kind, name, step, order, wrong, count, list, more, shown: MORE };
    for (const control of [run, kind, name, step, order, wrong]) control.onchange = restart;
    let pending = 0;
    search.oninput = () => { clearTimeout(pending); pending = setTimeout(restart, 120); };
    more.onclick = () => { parts.shown += MORE; fill(); };
    section.append(element("p", { className: "controls" }, page.labelled("search", search),
      page.runs.length > 1 ? page.labelled("run", run) : null, kind.length > 2 ? page.labelled("of", kind) : null,
      name.length > 2 ? page.labelled("set or source", name) : null, page.labelled("step", step),
      page.labelled("order", order), page.labelled("wrong only", wrong), count), list, more);
    page.whenSeen(list, fill);
  }

  function restart() {
    parts.shown = MORE;
    fill();
  }

  function matches(one, words) {
    const { run, row } = one;
    if (parts.run.value && run.name !== parts.run.value) return false;
    if (parts.kind.value && row[KIND] !== parts.kind.value) return false;
    if (parts.name.value && row[NAME] !== parts.name.value) return false;
    if (parts.step.value && String(row[STEP]) !== parts.step.value) return false;
    if (parts.wrong.checked && !row[STATE].startsWith("wrong")) return false;
    one.text ??= row.slice(PROMPT, EXPECTED + 1).join("\n").toLowerCase();
    return words.every((word) => one.text.includes(word));
  }

  function fill() {
    const words = parts.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = all.filter((one) => matches(one, words)).sort(ORDERS[parts.order.value]);
    parts.list.replaceChildren(...found.slice(0, parts.shown).map(shown));
    parts.count.textContent = `${found.length} of ${all.length}`;
    parts.more.hidden = found.length <= parts.shown;
  }

  function shown({ run, row }) {
    const words = [row[KIND], `step ${row[STEP]}`, row[NAME], row[REWARD] === null ? "" : `reward ${format(row[REWARD])}`, row[STATE]];
    const title = element("h4", {}, words.filter(Boolean).join(" | "));
    if (page.runs.length > 1) {
      const name = element("b", { textContent: `${run.name} ` });
      name.style.color = run.colour;
      title.prepend(name);
    }
    const made = element("article", { className: `sample ${row[STATE].split(" ")[0]}` }, title);
    const texts = [["prompt", row[PROMPT]], ["response", row[RESPONSE]], ["expected", row[EXPECTED]]];
    for (const [label, text] of texts) if (text) made.append(folded(label, text));
    return made;
  }

  // A text with its label; a long one is folded.
  function folded(label, text) {
    if (text.length <= OPEN) return element("div", { className: "text" }, element("span", { className: "label", textContent: label }), element("pre", { textContent: text }));
    const beginning = element("span", { className: "label", textContent: `${label}, ${text.length} characters: ` });
    const summary = element("summary", {}, beginning, element("span", { className: "begin", textContent: `${text.slice(0, 200)} …` }));
    return element("details", {}, summary, element("pre", { textContent: text }));
  }

  return { build };
})();
