"use strict";
// Timeline of a step: phases and waits of every rank as bars.
page.timeline = (() => {
  const { element, at, format } = page;
  // Tol's muted colours, for phases.
  const COLOURS = ["#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499", "#777777"];
  const LEFT = 64; // pixels for the names of ranks
  const BOTTOM = 20; // for the axis
  const state = { run: null, step: 0, ranks: [], end: 0 };
  let canvas = null;
  let parts = null;

  const colour = (kind) => COLOURS[kind % COLOURS.length];

  // Spans of a step by rank.
  function ranksOf(step) {
    const [counts, kinds, gaps, lasts, waits] = ["counts", "kinds", "gaps", "lasts", "waits"].map((key) => at(step[key]));
    let next = 0;
    return Array.from(counts, (count) => {
      let time = 0;
      return Array.from({ length: count }, () => {
        const begin = time + gaps[next];
        time = begin + lasts[next];
        const span = { kind: kinds[next], begin: begin * step.unit, end: time * step.unit, wait: waits[next] * step.unit };
        next += 1;
        return span;
      });
    });
  }

  function build() {
    const runs = page.runs.filter((run) => run.timeline);
    const section = page.section("timeline", "Timeline of a step");
    if (!runs.length) {
      section.append(element("p", { textContent: "No timeline was recorded." }));
      return;
    }
    state.run = runs[0];
    const choose = page.choice(runs.map((run, index) => [index, run.name]));
    choose.onchange = () => { state.run = runs[choose.value]; state.step = state.run.timeline.steps.length - 1; draw(); };
    const slider = element("input", { type: "range", min: 0, id: "timeline-step", "aria-label": "step" });
    slider.oninput = () => { state.step = Number(slider.value); draw(); };
    const title = element("output", {});
    const button = (text, change) => element("button", { type: "button", textContent: text, onclick: () => move(change) });
    section.append(element("p", { className: "controls" },
      runs.length > 1 ? page.labelled("run", choose) : null, button("◀", -1), slider, button("▶", 1), title));
    const legend = element("p", { className: "legend" });
    canvas = element("canvas", { id: "timeline-bars", role: "img", "aria-label": "phases of every rank; the table below has the numbers" });
    const tip = element("p", { className: "readout", textContent: " " });
    const numbers = element("div", {});
    parts = { slider, title, legend, tip, numbers, section };
    section.append(legend, canvas, tip, numbers);
    canvas.onmousemove = tell;
    canvas.onmouseleave = () => { tip.textContent = " "; };
    state.step = state.run.timeline.steps.length - 1;
    addEventListener("resize", () => requestAnimationFrame(draw));
    page.whenSeen(canvas, draw);
  }

  function move(change) {
    if (!parts) return;
    const last = state.run.timeline.steps.length - 1;
    state.step = Math.min(last, Math.max(0, state.step + change));
    draw();
  }

  const rowHeight = () => Math.max(5, Math.min(20, Math.floor(900 / state.ranks.length)));

  function draw() {
    const { steps, phases } = state.run.timeline;
    const step = steps[state.step];
    state.ranks = ranksOf(step);
    state.end = Math.max(...state.ranks.map((spans) => Math.max(0, ...spans.map((span) => span.end))), 1e-9);
    parts.slider.max = steps.length - 1;
    parts.slider.value = state.step;
    parts.title.textContent = `${step.phase} step ${step.step}, ${format(state.end)} s, ${state.ranks.length} ranks`;
    legend(phases);
    bars();
    table(phases);
  }

  function legend(phases) {
    const item = (text, background) => {
      const box = element("span", { className: "box" });
      if (background) box.style.background = background;
      else box.classList.add("wait");
      return element("span", {}, box, text);
    };
    parts.legend.replaceChildren(...phases.map((name, kind) => item(name, colour(kind))), item("waiting for other ranks, drawn at the end of its phase", null));
  }

  function bars() {
    const ratio = devicePixelRatio;
    const wide = Math.max(300, parts.section.clientWidth - 4);
    const each = rowHeight();
    const high = each * state.ranks.length + BOTTOM;
    canvas.width = wide * ratio;
    canvas.height = high * ratio;
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = `${Math.min(11, each)}px sans-serif`;
    const place = (seconds) => LEFT + (seconds / state.end) * (wide - LEFT - 4);
    const every = Math.ceil(11 / each); // names of ranks that do not overlap
    state.ranks.forEach((spans, rank) => {
      const top = rank * each;
      context.fillStyle = "#333";
      if (rank % every === 0) context.fillText(`rank ${rank}`, 2, top + Math.min(each, 13) - 1);
      for (const span of spans) {
        const left = place(span.begin);
        context.fillStyle = colour(span.kind);
        context.fillRect(left, top, Math.max(0.5, place(span.end) - left), each - 1);
        if (span.wait > 0) waits(context, place(span.end - span.wait), place(span.end), top, each - 1);
      }
    });
    axis(context, place, high);
  }

  // White with slanted lines.
  function waits(context, left, right, top, high) {
    context.fillStyle = "rgba(255, 255, 255, 0.75)";
    context.fillRect(left, top, right - left, high);
    context.save();
    context.beginPath();
    context.rect(left, top, right - left, high);
    context.clip();
    context.strokeStyle = "#555";
    context.lineWidth = 0.7;
    context.beginPath();
    for (let x = left - high; x < right; x += 6) {
      context.moveTo(x, top + high);
      context.lineTo(x + high, top);
    }
    context.stroke();
    context.restore();
  }

  function axis(context, place, high) {
    const rough = state.end / 8;
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    context.fillStyle = "#333";
    context.font = "11px sans-serif";
    for (let seconds = 0; seconds <= state.end; seconds += tick) {
      context.fillRect(place(seconds), high - BOTTOM, 1, 4);
      context.fillText(`${format(seconds)} s`, place(seconds) + 2, high - 5);
    }
  }

  function tell(event) {
    const rank = Math.floor(event.offsetY / rowHeight());
    const wide = canvas.clientWidth - LEFT - 4;
    const seconds = ((event.offsetX - LEFT) / wide) * state.end;
    const span = (state.ranks[rank] ?? []).find((one) => one.begin <= seconds && seconds <= one.end);
    if (!span) return;
    const name = state.run.timeline.phases[span.kind];
    parts.tip.textContent = `rank ${rank}: ${name}, ${format(span.end - span.begin)} s, ` +
      `of which ${format(span.wait)} s waiting; from ${format(span.begin)} to ${format(span.end)} s`;
  }

  // Seconds of each phase: mean and maximum over the ranks.
  function table(phases) {
    const rows = [];
    phases.forEach((name, kind) => {
      const sums = state.ranks.map((spans) => spans.filter((span) => span.kind === kind));
      if (!sums.some((spans) => spans.length)) return;
      const total = (value) => sums.map((spans) => spans.reduce((sum, span) => sum + value(span), 0));
      const busy = total((span) => span.end - span.begin - span.wait);
      const wait = total((span) => span.wait);
      rows.push([name, ...statistics(busy), ...statistics(wait)]);
    });
    const head = ["phase", "busy, mean s", "maximum s", "on rank", "waiting, mean s", "maximum s", "on rank"];
    parts.numbers.replaceChildren(page.table(head, rows));
  }

  function statistics(values) {
    const most = Math.max(...values);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    return [format(mean), format(most), String(values.indexOf(most))];
  }

  return { build, move };
})();
