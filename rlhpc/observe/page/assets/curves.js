"use strict";
// Curves of all metrics over the step or the time, with smoothing, zoom and marks.
page.curves = (() => {
  const { element, at, summed, format } = page;
  const FIRST = ["reward", "validation", "training", "response", "perf"]; // groups; the others follow by name
  const LEADING = ["reward/mean", "validation/reward_mean", "loss", "entropy", "kl", "grad_norm"]; // of their groups
  const NEAR = 5; // pixels between the cursor and a mark whose text is shown
  const charts = [];
  const state = { smoothing: 0, hours: false, range: null, source: null };

  // Charts by group: [{group, phase, name}].
  function names() {
    const found = new Map();
    for (const run of page.runs) {
      for (const { phase, name } of run.curves) found.set(`${phase} ${name}`, { phase, name });
    }
    const all = [...found.values()].map((one) => ({ ...one, group: groupOf(one) }));
    const place = (list, text) => (list.includes(text) ? list.indexOf(text) : list.length);
    return all.sort((a, b) => place(FIRST, a.group) - place(FIRST, b.group) || a.group.localeCompare(b.group) ||
      place(LEADING, a.name) - place(LEADING, b.name) || a.name.localeCompare(b.name));
  }

  function groupOf({ phase, name }) {
    if (phase === "sft") return "warm-up";
    return name.includes("/") ? name.split("/")[0] : "training";
  }

  // Points of a run's curve: x, y, and what smoothing takes instead if the curve is thinned.
  function points(run, phase, name) {
    const curve = run.curves.find((one) => one.phase === phase && one.name === name);
    if (!curve) return { x: [], y: [], mx: [], my: [], each: 1, bad: 0, thin: false };
    const x = summed(curve.x);
    const y = at(curve.y);
    const thin = curve.mx !== undefined;
    const more = { each: curve.each ?? 1, bad: curve.bad ?? 0, thin };
    return { x, y, mx: thin ? summed(curve.mx) : x, my: thin ? at(curve.my) : y, ...more };
  }

  // Exponential moving average without the bias of its beginning. `each`: steps between two values.
  function smoothed(values, each) {
    const keep = state.smoothing ** each;
    let sum = 0;
    let weight = 0;
    return Array.from(values, (value) => {
      sum = sum * keep + value * (1 - keep);
      weight = weight * keep + 1 - keep;
      return sum / weight;
    });
  }

  // Hours since the run's first record at each step.
  function hoursAt(run, phase, steps) {
    const known = run.hours[phase];
    if (!known) return Array.from(steps);
    run.known ??= {};
    const { x, y } = (run.known[phase] ??= { x: summed(known.x), y: at(known.y) });
    let next = 0;
    return Array.from(steps, (step) => {
      while (next < x.length - 1 && x[next] < step) next++;
      const before = Math.max(0, next - 1);
      const span = x[next] - x[before];
      return span > 0 ? y[before] + ((step - x[before]) / span) * (y[next] - y[before]) : y[next];
    });
  }

  const places = (run, phase, steps) => (state.hours ? hoursAt(run, phase, steps) : Array.from(steps));

  // A second line: the smoothed values, or the means of bins over the range of their values.
  const hasSecond = (one) => state.smoothing > 0 || one.thin;

  // One x for all series: each run as it is, then each run's second line.
  function dataOf(chart) {
    const raw = chart.points.map((one, i) => [places(page.runs[i], chart.phase, one.x), Array.from(one.y)]);
    const smooth = chart.points.map((one, i) => {
      if (!hasSecond(one)) return [[], []];
      return [places(page.runs[i], chart.phase, one.mx), smoothed(one.my, one.each)];
    });
    return uPlot.join([...raw, ...smooth]);
  }

  function seriesOf(chart) {
    const line = (run, more) => ({
      label: run.name, stroke: run.colour, dash: run.dash, spanGaps: true, show: run.shown,
      value: (_, value) => format(value), ...more,
    });
    const few = (u, index) => u.data[index].length < 60;
    return [
      { label: state.hours ? "hours" : "step", value: (_, value) => format(value) },
      ...page.runs.map((run, i) => {
        const faint = hasSecond(chart.points[i]);
        return line(run, { width: faint ? 1 : 1.3, points: { show: few, size: 4 }, alpha: faint ? 0.3 : 1, class: faint ? "behind" : "only" });
      }),
      ...page.runs.map((run, i) => line(run, { width: 1.6, points: { show: false }, class: hasSecond(chart.points[i]) ? "only" : "behind" })),
    ];
  }

  // Values of a legend: of the nearest point of each run, for runs have points at different steps.
  function nearest(u, series, index) {
    const values = u.data[series];
    for (let away = 0; away < 40; away++) {
      for (const place of [index - away, index + away]) {
        if (values[place] !== null && values[place] !== undefined) return place;
      }
    }
    return index;
  }

  function make(chart) {
    chart.points = page.runs.map((run) => points(run, chart.phase, chart.name));
    const options = {
      width: width(chart), height: 210, series: seriesOf(chart),
      scales: { x: { time: false }, y: { range: rangeOf } },
      axes: [{ size: 30, space: 60 }, { size: 58, values: (_, ticks) => ticks.map(format) }],
      cursor: {
        sync: { key: "step" }, drag: { x: true, y: false, setScale: false }, dataIdx: nearest,
        bind: {
          mousedown: (u, target, handle) => (event) => { state.source = chart; return handle(event); },
          dblclick: () => () => { reset(); return null; },
        },
      },
      hooks: {
        setSelect: [(u) => zoom(u, chart)],
        draw: [(u) => drawMarks(u, chart)],
        setCursor: [(u) => tell(u, chart)],
      },
    };
    const bad = chart.points.reduce((sum, one) => sum + one.bad, 0);
    const remark = bad ? element("em", { textContent: ` ${bad} not finite` }) : "";
    chart.box.querySelector("h4").replaceChildren(chart.name, remark);
    chart.plot = new uPlot(options, dataOf(chart), chart.box);
    if (state.range) chart.plot.setScale("x", state.range);
  }

  // Room above and below; a constant curve is in the middle.
  function rangeOf(_, least, most) {
    if (least === null || most === null) return [0, 1];
    const size = Math.max(Math.abs(least), Math.abs(most));
    const room = most - least > size * 1e-9 ? (most - least) * 0.07 : size * 0.1 || 1;
    return [least - room, most + room];
  }

  const width = (chart) => Math.max(240, chart.box.clientWidth - 8);

  // All charts show the range that the user has chosen in one of them; uPlot copies the selection by its pixels.
  function zoom(u, chart) {
    const { left, width: wide } = u.select;
    if (wide <= 0 || state.source !== chart) return;
    state.range = { min: u.posToVal(left, "x"), max: u.posToVal(left + wide, "x") };
    for (const { plot } of charts) {
      if (!plot) continue;
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      plot.setScale("x", state.range);
    }
  }

  function reset() {
    state.range = null;
    redraw(true);
  }

  function redraw(rescale = false) {
    for (const chart of charts) {
      if (!chart.plot) continue;
      chart.plot.setData(dataOf(chart), rescale || !state.range);
      if (state.range && !rescale) chart.plot.setScale("x", state.range);
    }
  }

  // Makes the charts again, for what uPlot does not change in place.
  function remake() {
    for (const chart of charts) {
      if (!chart.plot) continue;
      chart.plot.destroy();
      make(chart);
    }
  }

  // Marks of the runs and kinds that are shown, with their x.
  function* marksOf(chart) {
    for (const run of page.runs) {
      if (!run.shown) continue;
      for (const [kind, time, phase, step, text] of run.marks) {
        const name = page.kinds[kind];
        if (phase !== chart.phase || !page.kindsShown.has(name)) continue;
        yield { name, text, run, x: state.hours ? (time - run.began) / 3600 : step };
      }
    }
  }

  function drawMarks(u, chart) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
    ctx.clip();
    ctx.font = `${10 * devicePixelRatio}px sans-serif`;
    ctx.textAlign = "center";
    for (const { name, x } of marksOf(chart)) {
      const left = Math.round(u.valToPos(x, "x", true));
      ctx.strokeStyle = ctx.fillStyle = page.KIND_COLOURS[name];
      ctx.globalAlpha = 0.55;
      ctx.setLineDash(name === "checkpoint" ? [2, 5] : [4, 2]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.fillText(page.KIND_SIGNS[name], left, bbox.top + 9 * devicePixelRatio);
    }
    ctx.restore();
  }

  // Shows the texts of the marks under the cursor.
  function tell(u, chart) {
    const near = [];
    if (u.cursor.left >= 0) {
      for (const mark of marksOf(chart)) {
        if (Math.abs(u.valToPos(mark.x, "x") - u.cursor.left) > NEAR) continue;
        const whose = page.runs.length > 1 ? `${mark.run.name}: ` : "";
        near.push(`${page.KIND_SIGNS[mark.name]} ${whose}${mark.text}`);
      }
    }
    chart.tip.textContent = near.slice(0, 4).join("\n");
    chart.tip.hidden = !near.length || !chart.box.matches(":hover"); // other charts have the same cursor
  }

  function controls(section) {
    const smooth = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smoothing" });
    const shown = element("output", { textContent: "0" });
    smooth.oninput = () => smoothTo(Number(smooth.value));
    const axis = page.choice([["step", "step"], ["hours", "hours"]], { id: "axis" });
    axis.onchange = () => { state.hours = axis.value === "hours"; state.range = null; remake(); };
    const filter = element("input", { type: "search", id: "filter", placeholder: "part of a name" });
    filter.oninput = () => filterBy(filter.value);
    const all = element("button", { type: "button", textContent: "whole range", onclick: reset });
    const bar = element("p", { className: "controls" },
      page.labelled("smoothing", smooth), shown, page.labelled("over", axis), page.labelled("metrics", filter), all);
    section.append(bar);
    return { smooth, shown, axis, filter };
  }

  let bar = null;

  function smoothTo(value) {
    const before = state.smoothing;
    state.smoothing = Math.min(0.99, Math.max(0, Math.round(value * 100) / 100));
    bar.smooth.value = state.smoothing;
    bar.shown.textContent = String(state.smoothing);
    if (!before !== !state.smoothing) remake();
    else redraw();
  }

  function filterBy(text) {
    const words = text.toLowerCase().split(/\s+/);
    for (const chart of charts) {
      const name = `${chart.group} ${chart.name}`.toLowerCase();
      chart.box.hidden = !words.every((word) => name.includes(word));
    }
    for (const grid of document.querySelectorAll(".charts")) {
      grid.parentElement.hidden = [...grid.children].every((box) => box.hidden);
    }
  }

  function build() {
    const section = page.section("curves", "Curves");
    bar = controls(section);
    let grid = null;
    let last = null;
    for (const chart of names()) {
      if (chart.group !== last) {
        last = chart.group;
        grid = element("div", { className: "charts" });
        section.append(element("div", {}, element("h3", { textContent: last }), grid));
      }
      chart.tip = element("div", { className: "tip", hidden: true });
      chart.box = element("figure", { className: "chart" }, element("h4", { textContent: chart.name }), chart.tip);
      chart.box.dataset.metric = chart.name;
      grid.append(chart.box);
      charts.push(chart);
      page.whenSeen(chart.box, () => make(chart));
    }
    if (!charts.length) section.append(element("p", { textContent: "No step is done yet." }));
    let pending = 0;
    addEventListener("resize", () => {
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(fit);
    });
  }

  function fit() {
    for (const chart of charts) if (chart.plot) chart.plot.setSize({ width: width(chart), height: 210 });
  }

  // Shows or hides a run everywhere.
  function showRun(index) {
    const { shown } = page.runs[index];
    for (const { plot } of charts) {
      if (!plot) continue;
      plot.setSeries(1 + index, { show: shown });
      plot.setSeries(1 + page.runs.length + index, { show: shown });
    }
  }

  function redrawMarks() {
    for (const { plot } of charts) if (plot) plot.redraw(false);
  }

  const smoothBy = (change) => smoothTo(state.smoothing + change);
  return { charts, build, showRun, redrawMarks, reset, fit, smoothBy, controls: () => bar };
})();
