"use strict";
// Placement: ranks on nodes, coloured by their place on an axis of the layout.
page.placement = (() => {
  const { element, at } = page;
  // Tol's light colours, on which black text is readable.
  const COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00", "#dddddd"];

  function build() {
    const section = page.section("placement", "Placement and layout");
    const runs = page.runs.filter((run) => run.placement);
    if (!runs.length) {
      section.append(element("p", { textContent: "The layout is not known: the configuration cannot be read." }));
      return;
    }
    const choose = page.choice(runs.map((run, index) => [index, run.name]));
    const axis = page.choice([], { id: "placement-axis" });
    const text = element("p", {});
    const drawn = element("div", { className: "scroll" });
    const draw = () => fill(drawn, text, runs[choose.value], Number(axis.value));
    const begin = () => {
      const { axes } = runs[choose.value].placement;
      axis.replaceChildren(...axes.map((one, i) => element("option", { value: i, textContent: `${one.name} (${one.size})` })));
      axis.selectedIndex = Math.max(0, axes.findIndex((one) => one.size > 1));
      draw();
    };
    choose.onchange = begin;
    axis.onchange = draw;
    section.append(element("p", { className: "controls" },
      runs.length > 1 ? page.labelled("run", choose) : null, page.labelled("colour by axis", axis)), text, drawn);
    page.whenSeen(drawn, begin);
  }

  function fill(drawn, text, run, index) {
    const { ranks, nodes, axes } = run.placement;
    text.textContent = `${ranks} ranks on ${nodes.length || "?"} ${nodes.length === 1 ? "node" : "nodes"}: ${run.placement.text}. ` +
      "A cell has the rank and its index on the axis; ranks with the same index have the same colour.";
    const places = axes.map((axis) => at(axis.places));
    const shown = Math.min(ranks, places[index].length);
    const each = Math.max(1, Math.ceil(ranks / Math.max(1, nodes.length)));
    const rows = [];
    for (let first = 0; first < shown; first += each) {
      const row = element("tr", {}, element("th", { scope: "row", textContent: nodes[first / each] ?? `node ${first / each}` }));
      for (let rank = first; rank < Math.min(first + each, shown); rank++) row.append(cell(rank, places, axes, index));
      rows.push(row);
    }
    drawn.replaceChildren(element("table", { className: "placement" }, element("tbody", {}, ...rows)));
    if (shown < ranks) drawn.append(element("p", { textContent: `The first ${shown} ranks are shown.` }));
  }

  function cell(rank, places, axes, index) {
    const place = places[index][rank];
    const named = axes.map((axis, i) => words(axis, places[i][rank]));
    const made = element("td", { title: named.filter(Boolean).join(", ") },
      element("b", { textContent: rank }), element("small", { textContent: named[index] }));
    if (place >= 0) made.style.background = COLOURS[place % COLOURS.length];
    return made;
  }

  // A rank's place on an axis; empty for a rank of another role.
  const words = (axis, place) => (place < 0 ? "" : axis.labels ? axis.labels[place] : `${axis.name} ${place}`);

  return { build };
})();
