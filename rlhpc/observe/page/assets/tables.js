"use strict";
// The runs in a table; prediction beside measurement; settings with their defaults.
page.tables = (() => {
  const { element, format } = page;

  function runs() {
    const section = page.section("runs", "Runs");
    const rows = page.runs.map((run, index) => {
      const phases = Object.entries(run.done).map(([phase, step]) => `${phase} ${step}` + (run.totals[phase] ? ` of ${run.totals[phase]}` : ""));
      const seconds = run.last === null ? null : run.last - run.began;
      const last = run.marks.filter(([kind]) => ["end", "failure", "requeue"].includes(page.kinds[kind])).at(-1);
      const state = last && (run.last === null || last[1] >= run.last) ? last[4] : "no verdict since its last step";
      return [
        [toggle(run, index)], phases.join(", ") || "no step yet", seconds === null ? "–" : page.duration(seconds),
        run.last === null ? "–" : page.time(run.last), state, page.links(run.files),
      ];
    });
    section.append(page.table(["run", "steps", "first to last step", "last step at", "state", "files"], rows, { className: "runs" }));
  }

  function toggle(run, index) {
    const box = element("input", { type: "checkbox", checked: true, id: `run-${index}` });
    box.onchange = () => { run.shown = box.checked; page.curves.showRun(index); page.curves.redrawMarks(); };
    const line = element("span", { className: "swatch", "aria-hidden": "true" });
    line.style.borderTopColor = run.colour;
    line.style.borderTopStyle = run.dash.length ? "dashed" : "solid";
    return element("label", {}, box, line, element("b", { textContent: run.name }));
  }

  function prediction() {
    const section = page.section("prediction", "Predicted and measured");
    for (const run of page.runs) {
      const block = element("div", {}, element("h3", { textContent: run.name }));
      if (run.predicted.length) {
        const rows = run.predicted.map(([name, unit, predicted, measured]) => [
          name, unit, format(predicted), format(measured),
          predicted && measured ? `${format(measured / predicted)} ×` : "–", bar(predicted, measured),
        ]);
        block.append(page.table(["", "unit", "predicted", "measured", "measured / predicted", ""], rows, { className: "numbers" }));
      }
      block.append(element("p", { className: "remark", textContent: run.prediction }));
      section.append(block);
    }
  }

  // Two bars, the longer one over the whole width.
  function bar(predicted, measured) {
    const most = Math.max(predicted ?? 0, measured ?? 0);
    const one = (value, name) => {
      const made = element("i", { className: name, title: name });
      made.style.width = `${most > 0 ? (100 * (value ?? 0)) / most : 0}%`;
      return made;
    };
    return [element("span", { className: "bars" }, one(predicted, "predicted"), one(measured, "measured"))];
  }

  function settings() {
    const section = page.section("settings", "Configuration");
    const rows = page.settings;
    const which = page.choice([["changed", "different from the default"], ["runs", "different between runs"], ["all", "all"]], { id: "settings-which" });
    if (page.runs.length > 1) which.value = "runs";
    const filter = element("input", { type: "search", placeholder: "part of a key or value" });
    const count = element("output", {});
    const body = element("div", {});
    const fill = () => {
      const found = rows.filter((row) => wanted(row, which.value) && row.join(" ").toLowerCase().includes(filter.value.toLowerCase()));
      const cells = found.map(([key, standard, ...values]) => [key, standard ?? "–", ...values.map((value) => [value === standard ? element("span", { className: "same", textContent: value }) : value ?? "–"])]);
      body.replaceChildren(page.table(["key", "default", ...page.runs.map((run) => run.name)], cells, { className: "settings" }));
      count.textContent = `${found.length} of ${rows.length} keys`;
    };
    which.onchange = fill;
    filter.oninput = fill;
    section.append(element("p", { className: "controls" }, page.labelled("keys", which), page.labelled("search", filter), count), body);
    page.whenSeen(body, fill);
  }

  function wanted([, standard, ...values], which) {
    if (which === "runs") return new Set(values).size > 1;
    return which === "all" || values.some((value) => value !== standard && value !== null);
  }

  return { runs, prediction, settings };
})();
