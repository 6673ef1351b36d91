"use strict";
// Builds the page; keys; printing.
(() => {
  const { element } = page;
  const KEYS = [
    ["/", "filter metrics"], ["f", "search samples"], ["s, S", "smooth more, less"], ["h", "over steps or hours"],
    ["0", "whole range"], ["1 – 9", "show or hide a run"], ["[, ]", "timeline: step before, after"],
    ["{, }", "distributions: step before, after"],
    ["?", "show or hide this list"], ["Esc", "leave a field"],
  ];
  const MOUSE = "Drag over a curve to zoom, double-click for the whole range. Marks on the curves show their texts at the cursor.";

  function frame() {
    const names = page.runs.map((run) => run.name).join(", ");
    document.title = `rlhpc: ${names}`;
    const skip = element("a", { className: "skip", href: "#curves", textContent: "to the curves" });
    const written = element("p", { className: "remark", textContent: `Written ${page.time(page.written)}. Press ? for keys.` });
    const help = element("div", { id: "help", hidden: true }, page.table(["key", ""], KEYS), element("p", { textContent: MOUSE }));
    const header = element("header", {}, skip, element("h1", { textContent: names }), written, help);
    document.body.append(header, element("nav", { "aria-label": "sections" }), element("main", {}));
  }

  function press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
    if (event.key === "Escape") document.activeElement.blur();
    if (typing && event.target.type !== "range") return;
    const bar = page.curves.controls();
    const actions = {
      "/": () => bar.filter.focus(),
      f: () => document.getElementById("search")?.focus(),
      s: () => page.curves.smoothBy(0.1),
      S: () => page.curves.smoothBy(-0.1),
      h: () => { bar.axis.selectedIndex = 1 - bar.axis.selectedIndex; bar.axis.onchange(); },
      0: page.curves.reset,
      "[": () => page.timeline.move(-1),
      "]": () => page.timeline.move(1),
      "{": () => page.distributions.move(-1),
      "}": () => page.distributions.move(1),
      "?": () => { const help = document.getElementById("help"); help.hidden = !help.hidden; },
    };
    if (/^[1-9]$/.test(event.key)) document.getElementById(`run-${event.key - 1}`)?.click();
    else if (Object.hasOwn(actions, event.key)) {
      actions[event.key]();
      event.preventDefault();
    }
  }

  async function begin() {
    await page.load();
    frame();
    page.tables.runs();
    page.curves.build();
    page.distributions.build();
    page.timeline.build();
    page.events.build();
    page.placement.build();
    page.tables.prediction();
    page.samplesBrowser.build();
    page.tables.settings();
    addEventListener("keydown", press);
    addEventListener("beforeprint", () => { page.showAll(); page.curves.fit(); page.distributions.fit(); });
    requestAnimationFrame(() => requestAnimationFrame(() => {
      document.documentElement.dataset.drawn = String(Math.round(performance.now()));
    }));
  }

  begin().catch((error) => {
    document.body.append(element("p", { className: "failed", textContent: `This page cannot be shown: ${error}. It needs a browser of 2023 or newer.` }));
    throw error;
  });
})();
