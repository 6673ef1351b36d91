"use strict";
// What all parts of the page share: elements, packed data, numbers as text, runs and their state.
const page = (() => {
  // Okabe's and Ito's colours, distinct for every kind of colour vision; dashes tell runs apart without colour.
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444"];
  const DASHES = [[], [8, 3], [3, 3], [10, 3, 2, 3]];
  const KIND_COLOURS = {
    attempt: "#0072b2", end: "#009e73", failure: "#d55e00", requeue: "#e69f00",
    checkpoint: "#777777", alert: "#cc3311", note: "#aa3377",
  };
  const KIND_SIGNS = {
    attempt: "▶", end: "■", failure: "✖", requeue: "↻", checkpoint: "◆", alert: "▲", note: "✎",
  };
  let numbers = new Float32Array(0);

  // An element with properties and children. Texts become text nodes, never markup.
  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name.includes("-") || name === "role" || name === "scope") made.setAttribute(name, value);
      else made[name] = value;
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  async function unpacked(id) {
    const text = atob(document.getElementById(id).textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }

  // The numbers are packed as four planes: the first byte of each, then the second, and so on.
  function joined(planes) {
    const count = planes.length / 4;
    const bytes = new Uint8Array(planes.length);
    for (let plane = 0; plane < 4; plane++) {
      const begin = plane * count;
      for (let i = 0; i < count; i++) bytes[4 * i + plane] = planes[begin + i];
    }
    return new Float32Array(bytes.buffer);
  }

  async function load() {
    const [texts, planes] = await Promise.all([unpacked("texts"), unpacked("numbers")]);
    numbers = joined(new Uint8Array(planes));
    const data = JSON.parse(new TextDecoder().decode(texts));
    Object.assign(page, data);
    page.runs.forEach((run, index) => {
      run.colour = COLOURS[index % COLOURS.length];
      run.dash = DASHES[index % DASHES.length];
      run.shown = true;
    });
    page.kindsShown = new Set(page.kinds);
  }

  const at = ([begin, count]) => numbers.subarray(begin, begin + count);

  // Sums of differences.
  function summed(place) {
    const found = Float64Array.from(at(place));
    for (let i = 1; i < found.length; i++) found[i] += found[i - 1];
    return found;
  }

  function format(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return String(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  }

  const time = (seconds) => new Date(seconds * 1000).toLocaleString();

  function duration(seconds) {
    const minutes = Math.round(seconds / 60);
    if (minutes < 1) return `${Math.round(seconds)} s`;
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  // A link to a file beside the page. Only relative paths are links.
  function link([title, path]) {
    if (!path.startsWith("./")) return document.createTextNode(title);
    return element("a", { textContent: title, href: path });
  }

  function links(all) {
    return all.flatMap((one, index) => (index ? [" · ", link(one)] : [link(one)]));
  }

  // A section of the page with its heading; `contents` is called when it is first seen.
  const waiting = new Map();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) show(entry.target);
  }, { rootMargin: "300px" });

  function show(target) {
    const contents = waiting.get(target);
    waiting.delete(target);
    watcher.unobserve(target);
    if (contents) contents();
  }

  function whenSeen(target, contents) {
    waiting.set(target, contents);
    watcher.observe(target);
  }

  // Shows what was not seen yet, for printing.
  function showAll() {
    for (const target of [...waiting.keys()]) show(target);
  }

  function section(id, title) {
    const heading = element("h2", { textContent: title });
    const made = element("section", { id, "aria-label": title }, heading);
    document.querySelector("main").append(made);
    document.querySelector("nav").append(element("a", { href: `#${id}`, textContent: title }));
    return made;
  }

  function table(head, rows, properties = {}) {
    const cells = (tag) => (value) => {
      const cell = element(tag, tag === "th" ? { scope: "col" } : {});
      cell.append(...(Array.isArray(value) ? value : [value ?? ""]));
      return cell;
    };
    const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cells("td")))));
    const first = element("thead", {}, element("tr", {}, ...head.map(cells("th"))));
    return element("div", { className: "scroll" }, element("table", properties, first, body));
  }

  function labelled(text, control) {
    return element("label", {}, text, " ", control);
  }

  function choice(options, properties = {}) {
    const made = element("select", properties);
    options.forEach(([value, text]) => made.append(element("option", { value, textContent: text })));
    return made;
  }

  return {
    COLOURS, KIND_COLOURS, KIND_SIGNS, element, load, at, summed, format, time, duration, link, links,
    whenSeen, showAll, section, table, labelled, choice,
  };
})();
