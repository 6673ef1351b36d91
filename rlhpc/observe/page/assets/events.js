"use strict";
// Events of all runs, with links to logs; the kinds chosen here are marks on the curves.
page.events = (() => {
  const { element } = page;
  const MOST = 1000; // rows

  function build() {
    const section = page.section("events", "Events");
    const all = page.runs.flatMap((run) => run.marks.map((mark) => [run, ...mark]));
    if (!all.length) {
      section.append(element("p", { textContent: "Nothing has happened yet." }));
      return;
    }
    all.sort((a, b) => b[2] - a[2]);
    const rows = element("div", {});
    const present = page.kinds.filter((_, kind) => all.some((mark) => mark[1] === kind));
    section.append(element("p", { className: "controls" }, ...present.map((kind) => toggle(kind, () => fill(rows, all)))), rows);
    page.whenSeen(rows, () => fill(rows, all));
  }

  function toggle(kind, changed) {
    const box = element("input", { type: "checkbox", checked: true });
    box.onchange = () => {
      if (box.checked) page.kindsShown.add(kind);
      else page.kindsShown.delete(kind);
      changed();
      page.curves.redrawMarks();
    };
    return element("label", {}, box, sign(kind), kind);
  }

  function sign(kind) {
    const made = element("span", { className: "sign", textContent: page.KIND_SIGNS[kind], "aria-hidden": "true" });
    made.style.color = page.KIND_COLOURS[kind];
    return made;
  }

  function fill(rows, all) {
    const shown = all.filter((mark) => page.kindsShown.has(page.kinds[mark[1]]));
    const several = page.runs.length > 1;
    const cells = shown.slice(0, MOST).map(([run, kind, time, phase, step, text, logs]) => {
      const name = page.kinds[kind];
      const first = [page.time(time), ...(several ? [run.name] : []), `${phase} ${step}`];
      return [...first, [sign(name), name], text, page.links(logs)];
    });
    const head = ["time", ...(several ? ["run"] : []), "after step", "event", "", "logs"];
    rows.replaceChildren(page.table(head, cells, { className: "events" }));
    if (shown.length > MOST) rows.append(element("p", { textContent: `${shown.length - MOST} older events are not shown.` }));
  }

  return { build };
})();
