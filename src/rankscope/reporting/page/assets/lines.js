/* Curves over depth: band, float floor, lines to compare with, a logarithmic axis. */

const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const colourOf = (one, index) => `var(--${one.colour || `c${index % 7}`})`;
const dashOf = (index) => DASHES[Math.floor(index / 7) % 4];
const DIRECT_LABELS = 8;

function lineDomain(view, log) {
  const values = view.series.flatMap((one) => [...one.y, ...one.low, ...one.high]).filter((v) => known(v) && (!log || v > 0));
  let range = extent(values);
  if (!range) return null;
  let [low, high] = range;
  const guides = view.guides.filter((guide) => known(guide.value) && (!log || guide.value > 0));
  for (const guide of guides) {
    const near = guide.kind === "floor" ? log && (low < 30 * guide.value || view.series.some((one) => one.floor.length)) : guide.kind !== "collapse";
    if (near) { low = Math.min(low, guide.value); high = Math.max(high, guide.value); }
  }
  if (log) {
    const pad = (high / low) ** 0.06 || 1.2;
    return [Math.min(low / pad, low * 0.8), Math.max(high * pad, high * 1.15)];
  }
  if (view.form === "power") return low === high ? [low - 1, high + 1] : [low - 0.05 * (high - low), high + 0.05 * (high - low)];
  if (low >= 0 && high <= 1.0001) return [0, Math.max(1, high) * 1.03];
  if (low >= 0) return [0, high * 1.1 || 1];
  const pad = 0.08 * (high - low) || 0.5;
  return [low - pad, high + pad];
}

function drawLines(plot, view, state) {
  const width = plot.clientWidth;
  const log = state.log === undefined ? view.log : state.log && view.form !== "power";
  const domain = lineDomain(view, log);
  if (!domain) { plot.append(el("div", { class: "empty" }, `Undefined at every ${view.xlabel || "block"}.`)); return; }
  const direct = view.series.length > 1 && view.series.length <= DIRECT_LABELS && width > 620;
  const longest = Math.max(...view.series.map((one) => one.name.length));
  const margin = { left: 58, right: direct ? Math.min(190, 30 + longest * 7.4) : 18, top: 16, bottom: 42 };
  const height = Math.round(Math.max(230, Math.min(370, width * 0.46)));
  const box = frame(plot, width, height, margin, `${view.metric} by ${view.xlabel || "block"}`);
  const make = log ? logScale : view.form === "power" ? powerScale : linearScale;
  const y = make(domain[0], domain[1], box.bottom, margin.top, 6);
  const blocks = [...new Set(view.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const inner = blocks.length > 1 ? 10 : (box.right - margin.left) / 2;
  const x = (block) => margin.left + inner + ((block - blocks[0]) / (blocks[blocks.length - 1] - blocks[0] || 1)) * (box.right - margin.left - 2 * inner);
  yAxis(box, y);
  drawGuides(box, view, y, log, domain);
  xAxis(box, blocks, x, view.xlabel || "block");
  for (let i = view.series.length - 1; i >= 0; i -= 1) drawSeries(box, view.series[i], i, x, y, domain, log);
  drawMoments(box, view, x);
  if (direct) labelEnds(box, view, x, y);
  crosshair(plot, box, view, blocks, x, y, state.names);
}

function drawGuides(box, view, y, log, domain) {
  const taken = [];
  for (const guide of view.guides) {
    if (!known(guide.value) || (log && guide.value <= 0) || guide.value < domain[0] || guide.value > domain[1]) continue;
    if (guide.kind === "floor" && !log) continue;
    const at = y.at(guide.value);
    if (guide.kind === "floor") {
      draw(box.svg, "rect", { x: box.margin.left, y: at, width: box.right - box.margin.left, height: Math.max(0, box.bottom - at), fill: "var(--floor-bg)", opacity: 0.75 });
    }
    const dash = { null: "6 4", floor: "", collapse: "1 4", level: "2 4" }[guide.kind];
    draw(box.svg, "line", { x1: box.margin.left, x2: box.right, y1: at, y2: at, stroke: guide.kind === "floor" ? "var(--floor)" : "var(--faint)", "stroke-dasharray": dash, "stroke-width": 1.2 });
    let words = at - 5;
    if (guide.kind === "floor" && box.bottom - at > 18) words = at + 15;
    if (taken.some((other) => Math.abs(other - words) < 14)) words = at + 15;
    if (words < 10) words = at + 15;
    if (words > box.bottom - 2) words = at - 5;
    taken.push(words);
    const left = guide.kind === "floor";
    draw(box.svg, "text", { x: left ? box.margin.left + 6 : box.right - 4, y: words, "text-anchor": left ? "start" : "end", style: `font-size:11.5px;paint-order:stroke;stroke:${left ? "var(--floor-bg)" : "var(--card)"};stroke-width:4px;stroke-linejoin:round` }, guide.label);
  }
}

/* Moments on the axis that somebody should see: a line with words beside it. */
function drawMoments(box, view, x) {
  const moments = (view.when || []).map(([at, words]) => [x(at), `${words}, ${view.xlabel || "block"} ${at}`]);
  for (const [left] of moments) draw(box.svg, "line", { x1: left, x2: left, y1: box.margin.top, y2: box.bottom, stroke: "var(--down)", "stroke-dasharray": "4 3", "stroke-width": 1.4 });
  moments.forEach(([left, words], i) => {
    const turned = left > (box.margin.left + box.right) / 2;
    // Beside all lines that are close, so that none crosses the words.
    const close = moments.map(([other]) => other).filter((other) => Math.abs(other - left) < 60);
    draw(box.svg, "text", { x: turned ? Math.min(...close) - 5 : Math.max(...close) + 5, y: box.bottom - 6 - 15 * i, "text-anchor": turned ? "end" : "start", style: "font-size:11.5px;paint-order:stroke;stroke:var(--card);stroke-width:4px" }, words);
  });
}

function drawSeries(box, one, index, x, y, domain, log) {
  const colour = colourOf(one, index);
  const height = (value) => (log && value <= 0 ? box.bottom : y.at(Math.max(domain[0], value)));
  const runs = [];
  one.x.forEach((block, i) => {
    if (!known(one.y[i])) { runs.push([]); return; }
    if (!runs.length) runs.push([]);
    runs[runs.length - 1].push(i);
  });
  for (const run of runs.filter((part) => part.length)) {
    if (run.length === 1) {
      const i = run[0];
      if (known(one.low[i])) draw(box.svg, "line", { x1: x(one.x[i]), x2: x(one.x[i]), y1: height(one.low[i]), y2: height(one.high[i]), stroke: colour, "stroke-width": 6, opacity: 0.22 });
    } else {
      const upper = run.map((i) => `${x(one.x[i]).toFixed(1)},${height(one.high[i]).toFixed(1)}`);
      const lower = run.map((i) => `${x(one.x[i]).toFixed(1)},${height(one.low[i]).toFixed(1)}`).reverse();
      if (one.low.length) draw(box.svg, "polygon", { points: [...upper, ...lower].join(" "), fill: colour, opacity: 0.16 });
      draw(box.svg, "polyline", { points: run.map((i) => `${x(one.x[i]).toFixed(1)},${height(one.y[i]).toFixed(1)}`).join(" "), fill: "none", stroke: colour, "stroke-width": 2.2, "stroke-linejoin": "round", "stroke-dasharray": dashOf(index) });
    }
  }
  if (one.x.length > 64) return;
  one.x.forEach((block, i) => {
    if (!known(one.y[i])) return;
    const hollow = one.floor.includes(i) || (log && one.y[i] <= 0);
    draw(box.svg, "circle", { cx: x(block), cy: height(one.y[i]), r: 3.6, fill: hollow ? "var(--card)" : colour, stroke: hollow ? colour : "var(--card)", "stroke-width": hollow ? 1.8 : 1.2 });
  });
}

/* Names at the ends of lines, moved apart where ends meet. */
function labelEnds(box, view, x, y) {
  const ends = [];
  view.series.forEach((one, index) => {
    let last = one.y.length - 1;
    while (last >= 0 && !known(one.y[last])) last -= 1;
    if (last >= 0) ends.push({ index, colour: colourOf(one, index), name: one.name, at: Math.max(box.margin.top, Math.min(box.bottom, y.at(one.y[last] || 0) || box.bottom)) });
  });
  ends.sort((a, b) => a.at - b.at);
  for (let i = 1; i < ends.length; i += 1) ends[i].at = Math.max(ends[i].at, ends[i - 1].at + 16);
  const over = ends.length ? ends[ends.length - 1].at - (box.bottom + 2) : 0;
  if (over > 0) for (let i = ends.length - 1; i >= 0; i -= 1) ends[i].at = Math.min(ends[i].at, box.bottom + 2 - (ends.length - 1 - i) * 16);
  for (const end of ends) {
    draw(box.svg, "line", { x1: box.right + 4, x2: box.right + 16, y1: end.at, y2: end.at, stroke: end.colour, "stroke-width": 3, "stroke-dasharray": dashOf(end.index) });
    draw(box.svg, "text", { x: box.right + 21, y: end.at + 4, class: "strong" }, end.name);
  }
}

function crosshair(plot, box, view, blocks, x, y, names) {
  const line = draw(box.svg, "line", { class: "cross", y1: box.margin.top, y2: box.bottom, visibility: "hidden" });
  const hint = readout(plot);
  const nearest = (left) => {
    let best = 0;
    blocks.forEach((block, i) => { if (Math.abs(x(block) - left) < Math.abs(x(blocks[best]) - left)) best = i; });
    return best;
  };
  const show = (index) => {
    const block = blocks[index];
    line.setAttribute("x1", x(block));
    line.setAttribute("x2", x(block));
    line.setAttribute("visibility", "visible");
    const lines = [];
    view.series.forEach((one, i) => {
      const at = one.x.indexOf(block);
      if (at < 0) return;
      const value = view.form === "power" ? powerWords(one.y[at]) : number(one.y[at]);
      const band = known(one.low[at]) && one.low[at] !== one.high[at] ? ` (${view.form === "power" ? powerWords(one.low[at]) : number(one.low[at])} to ${view.form === "power" ? powerWords(one.high[at]) : number(one.high[at])})` : "";
      lines.push([colourOf(one, i), `${one.name ? `${one.name} ` : ""}${value}${band}${one.floor.includes(at) ? ", at the float floor" : ""}`]);
    });
    hint.show(x(block), box.height / 2, `${view.xlabel || "block"} ${block}`, lines.slice(0, 12));
  };
  walk(plot, blocks.length, nearest, show, () => { hint.hide(); line.setAttribute("visibility", "hidden"); });
}

const powerWords = (exponent) => (known(exponent) ? (exponent > -3 && exponent < 3 ? number(10 ** exponent) : power(exponent.toFixed(1))) : "undefined");

function lineTable(view) {
  const blocks = [...new Set(view.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const isBanded = view.series.some((one) => one.low.length);
  const head = [view.xlabel || "block", ...view.series.flatMap((one) => [one.name || view.metric.replaceAll("_", " "), ...(isBanded ? view.band || ["10%", "90%"] : [])])];
  const words = view.form === "power" ? (v) => (known(v) ? v.toFixed(3) : "undefined") : number;
  const rows = blocks.map((block) => [block, ...view.series.flatMap((one) => {
    const at = one.x.indexOf(block);
    const shown = at < 0 ? ["", "", ""] : [words(one.y[at]) + (one.floor.includes(at) ? "*" : ""), words(one.low[at]), words(one.high[at])];
    return isBanded ? shown : shown.slice(0, 1);
  })]);
  return { head, rows };
}

function lineLegend(view, width) {
  if (view.series.length < 2 || (view.series.length <= DIRECT_LABELS && width > 620)) return [];
  return view.series.map((one, index) => ({ name: one.name, colour: colourOf(one, index), dash: dashOf(index) }));
}

/* A curve of a few pixels for a card. */
function sparkline(view) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ width: 62, height: 22, viewBox: "0 0 62 22", "aria-hidden": "true" })) svg.setAttribute(key, value);
  const one = view.series[0];
  const values = one.y.map((v) => (view.log && known(v) ? Math.log10(Math.max(v, 1e-300)) : v));
  const range = extent(values);
  if (!range) return svg;
  const middle = (range[0] + range[1]) / 2;
  const span = Math.max(range[1] - range[0], 0.25 * Math.max(Math.abs(range[0]), Math.abs(range[1])), 1e-300);
  const points = values.map((v, i) => (known(v) ? `${(2 + (58 * i) / Math.max(1, values.length - 1)).toFixed(1)},${(11 - ((v - middle) / span) * 17).toFixed(1)}` : null)).filter(Boolean);
  draw(svg, "polyline", { points: points.join(" "), fill: "none", stroke: "var(--c0)", "stroke-width": 1.8, "stroke-linejoin": "round" });
  if (points.length) { const [cx, cy] = points[points.length - 1].split(","); draw(svg, "circle", { cx, cy, r: 2.2, fill: "var(--c0)" }); }
  return svg;
}
