"use strict";
// Distributions: histograms over the steps as heat maps, and those of one step as bars.
page.distributions = (() => {
  const { element, at, format } = page;
  // From few to many, ever darker: readable with every kind of colour vision, and in print without colour.
  const SHADES = [[222, 235, 247], [86, 160, 211], [0, 92, 150], [0, 32, 66]];
  const HIGH = 140; // pixels of a heat map
  const state = { run: null, step: 0, steps: [], found: [] };
  let parts = null;

  // Histograms of a run: for each quantity, one for each step or null.
  function unpacked(run) {
    return run.distributions.histograms.map((one) => {
      const [lows, highs, values, bins, counts] = ["lows", "highs", "values", "bins", "counts"].map((key) => at(one[key]));
      let next = 0;
      const steps = Array.from(bins, (count, i) => {
        const first = next;
        next += count;
        return count ? { low: lows[i], high: highs[i], values: values[i], counts: counts.subarray(first, next) } : null;
      });
      const known = steps.filter((step) => step);
      const low = Math.min(...known.map((step) => step.low));
      const high = Math.max(...known.map((step) => step.high));
      return { name: one.name, log: one.log, steps, low, high };
    });
  }

  function colour(share) {
    const place = share * (SHADES.length - 1);
    const below = Math.min(SHADES.length - 2, Math.floor(place));
    const mixed = SHADES[below].map((value, i) => Math.round(value + (SHADES[below + 1][i] - value) * (place - below)));
    return `rgb(${mixed.join(", ")})`;
  }

  const edge = (one, value) => format(one.log ? 10 ** value : value);
  const range = (one, step, bin) => {
    const bound = (place) => edge(one, step.low + ((step.high - step.low) * place) / step.counts.length);
    if (!one.log) return `${bound(bin)} to ${bound(bin + 1)}`;
    if (bin === 0) return `below ${bound(1)}`;
    return bin === step.counts.length - 1 ? `above ${bound(bin)}` : `${bound(bin)} to ${bound(bin + 1)}`;
  };

  function build() {
    const runs = page.runs.filter((run) => run.distributions);
    const section = page.section("distributions", "Distributions");
    if (!runs.length) {
      section.append(element("p", { textContent: "No histograms were recorded." }));
      return;
    }
    const choose = page.choice(runs.map((run, index) => [index, run.name]));
    choose.onchange = () => begin(runs[choose.value]);
    const slider = element("input", { type: "range", min: 0, id: "distributions-step", "aria-label": "step of the bars" });
    slider.oninput = () => { state.step = Number(slider.value); draw(); };
    const button = (text, name, change) => element("button", { type: "button", textContent: text, "aria-label": name, onclick: () => move(change) });
    const title = element("p", { className: "readout", "aria-live": "polite" });
    const drawn = element("div", { className: "charts" });
    parts = { slider, title, drawn };
    section.append(element("p", { className: "controls" }, runs.length > 1 ? page.labelled("run", choose) : null,
      button("◀", "step before", -1), slider, button("▶", "step after", 1)), title, drawn);
    addEventListener("resize", () => requestAnimationFrame(fit));
    page.whenSeen(drawn, () => begin(runs[0]));
  }

  function begin(run) {
    state.run = run;
    state.found = unpacked(run);
    state.steps = at(run.distributions.steps);
    state.step = state.steps.length - 1;
    parts.figures = state.found.map(figure);
    parts.drawn.replaceChildren(...parts.figures.map((one) => one.figure));
    draw();
  }

  function figure(one) {
    const map = element("canvas", { role: "img", "aria-label": `${one.name} over the steps; the table has the numbers of one step` });
    map.onclick = (event) => {
      state.step = Math.min(state.steps.length - 1, Math.floor((event.offsetX / map.clientWidth) * state.steps.length));
      draw();
    };
    const bars = element("div", { className: "columns", role: "img" });
    const label = element("small", {});
    const numbers = element("details", {}, element("summary", { textContent: "numbers" }), element("div", {}));
    const ends = element("small", { textContent:
      `steps ${state.steps[0]} to ${state.steps.at(-1)}; ${edge(one, one.low)} (bottom) to ${edge(one, one.high)} (top)${one.log ? ", logarithmic" : ""}` });
    const made = element("figure", { className: "distribution" }, element("h4", { textContent: one.name }), map, ends, bars, label, numbers);
    made.dataset.histogram = one.name;
    return { figure: made, map, bars, label, numbers: numbers.lastChild };
  }

  function move(change) {
    if (!parts) return;
    if (!state.run) page.showAll();
    state.step = Math.min(state.steps.length - 1, Math.max(0, state.step + change));
    draw();
  }

  // Draws again at the present width.
  function fit() {
    if (state.run) draw();
  }

  function draw() {
    parts.slider.max = state.steps.length - 1;
    parts.slider.value = state.step;
    const step = state.steps[state.step];
    parts.slider.setAttribute("aria-valuetext", `step ${step}`);
    parts.title.textContent = `${state.run.name}, rl step ${step}: bars; over the steps: the darker, the more values, ` +
      "relative to the fullest bin of the step.";
    state.found.forEach((one, index) => {
      heatMap(one, parts.figures[index].map);
      bars(one, parts.figures[index]);
    });
  }

  // One column for each step; a frame around the chosen one.
  function heatMap(one, canvas) {
    const ratio = devicePixelRatio;
    const wide = Math.max(200, canvas.parentElement.clientWidth - 10);
    canvas.width = wide * ratio;
    canvas.height = HIGH * ratio;
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${HIGH}px`;
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    const left = (column) => Math.round((column * canvas.width) / one.steps.length);
    const top = (value) => Math.round(canvas.height * (1 - (value - one.low) / (one.high - one.low)));
    one.steps.forEach((step, column) => {
      if (!step) return;
      const most = step.counts.reduce((found, count) => Math.max(found, count), 1);
      const each = (step.high - step.low) / step.counts.length;
      step.counts.forEach((count, bin) => {
        if (!count) return;
        const upper = Math.min(canvas.height - 1, top(step.low + each * (bin + 1)));
        context.fillStyle = colour(count / most);
        context.fillRect(left(column), upper, Math.max(1, left(column + 1) - left(column)), Math.max(1, top(step.low + each * bin) - upper));
      });
    });
    context.strokeStyle = "#d55e00";
    context.lineWidth = 2 * ratio;
    context.strokeRect(left(state.step), 0, Math.max(2, left(state.step + 1) - left(state.step)), canvas.height);
  }

  function bars(one, part) {
    const step = one.steps[state.step];
    const counts = Array.from(step?.counts ?? []);
    const most = Math.max(1, ...counts);
    part.bars.replaceChildren(...counts.map((count, bin) => {
      const bar = element("i", { title: `${range(one, step, bin)}: ${format(count)}` });
      bar.style.height = `${(100 * count) / most}%`;
      return bar;
    }));
    part.label.textContent = step
      ? `step ${state.steps[state.step]}: ${edge(one, step.low)} (left) to ${edge(one, step.high)} (right), ${format(step.values)} values`
      : `step ${state.steps[state.step]}: no values`;
    part.bars.setAttribute("aria-label", `${one.name}, ${part.label.textContent}`);
    part.numbers.replaceChildren(page.table([one.name, "values"], counts.map((count, bin) => [range(one, step, bin), format(count)])));
  }

  return { build, move, fit };
})();
