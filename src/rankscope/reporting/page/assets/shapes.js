/* Bars, waterfalls, maps of heads and matrices of tokens. */

function drawBars(plot, view) {
  const range = extent([0, ...view.y, ...view.low, ...view.high]);
  if (!extent(view.y)) { plot.append(el("div", { class: "empty" }, "Undefined at every length.")); return; }
  const width = plot.clientWidth;
  const box = frame(plot, width, Math.round(Math.max(220, Math.min(320, width * 0.4))), { left: 58, right: 14, top: 14, bottom: 42 }, `${view.metric} by ${view.xlabel}`);
  const pad = 0.06 * (range[1] - range[0] || 1);
  const y = linearScale(range[0] < 0 ? range[0] - pad : 0, range[1] + pad, box.bottom, box.margin.top, 5);
  const step = (box.right - box.margin.left) / view.x.length;
  const x = (index) => box.margin.left + step * (index + 0.5);
  const thick = Math.max(1, Math.min(46, step * 0.64));
  yAxis(box, y);
  const marks = view.y.map((value, i) => {
    if (!known(value)) return null;
    const bar = draw(box.svg, "rect", { x: x(i) - thick / 2, width: thick, y: Math.min(y.at(value), y.at(0)), height: Math.max(1, Math.abs(y.at(value) - y.at(0))), rx: Math.min(3, thick / 4), fill: "var(--c0)" });
    if (step > 60) draw(box.svg, "text", { x: x(i), y: y.at(Math.max(0, value)) - 6, "text-anchor": "middle", class: "strong" }, number(value));
    if (view.low[i] !== view.high[i] && known(view.low[i]) && thick > 4) draw(box.svg, "line", { x1: x(i), x2: x(i), y1: y.at(view.low[i]), y2: y.at(view.high[i]), stroke: "var(--ink)", "stroke-width": 1.4 });
    return bar;
  });
  draw(box.svg, "line", { class: "axis", x1: box.margin.left, x2: box.right, y1: y.at(0), y2: y.at(0) });
  const isNamed = typeof view.x[0] === "string";
  xAxis(box, isNamed ? [] : view.x, (value) => x(view.x.indexOf(value)), view.xlabel);
  if (isNamed) view.x.forEach((name, i) => {
    // A name that is wider than its place is in two lines.
    const middle = name.length * 7 < step ? -1 : name.indexOf(" ", name.length / 2 - 4);
    (middle < 0 ? [name] : [name.slice(0, middle), name.slice(middle + 1)]).forEach((part, row) => draw(box.svg, "text", { x: x(i), y: box.bottom + 16 + 14 * row, "text-anchor": "middle" }, part));
  });
  const hint = readout(plot);
  const dim = (chosen) => marks.forEach((bar, i) => bar && bar.setAttribute("opacity", chosen < 0 || i === chosen ? 1 : 0.45));
  walk(plot, view.x.length, (left) => Math.max(0, Math.min(view.x.length - 1, Math.floor((left - box.margin.left) / step))), (i) => {
    dim(i);
    const lines = [["var(--c0)", `${number(view.y[i])} (${number(view.low[i])} to ${number(view.high[i])})`]];
    if (view.counts[view.x[i]]) lines.push(["", `${number(Number(view.counts[view.x[i]]))} paths`]);
    hint.show(x(i), box.height / 2, `${view.xlabel} ${view.x[i]}`, lines);
  }, () => { dim(-1); hint.hide(); });
}

const barTable = (view) => ({ head: [view.xlabel, view.metric.replaceAll("_", " "), "10%", "90%"], rows: view.x.map((v, i) => [v, number(view.y[i]), number(view.low[i]), number(view.high[i])]) });

const WHO_OPACITY = [1, 0.55, 0.3, 0.75];

function drawWaterfall(plot, view) {
  const steps = view.steps.filter((step) => known(step.from) && known(step.to));
  if (!steps.length) { plot.append(el("div", { class: "empty" }, "Undefined in every block.")); return; }
  const least = 7 * steps.length + 80;
  const width = Math.max(plot.clientWidth, Math.min(least, 3600));
  const holder = width > plot.clientWidth ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Ledger, scrolls sideways" }) : plot;
  if (holder !== plot) plot.append(holder);
  const [low, high] = extent(steps.flatMap((step) => [step.from, step.to]));
  const pad = Math.max(0.08 * (high - low), 0.004);
  const box = frame(holder, width, Math.round(Math.max(240, Math.min(360, plot.clientWidth * 0.42))), { left: 62, right: 14, top: 14, bottom: 42 }, `Ledger of ${view.metric}`);
  const y = powerScale(low - pad, high + pad, box.bottom, box.margin.top, 5);
  const wide = (box.right - box.margin.left) / steps.length;
  const x = (index) => box.margin.left + wide * index;
  const people = [...new Set(steps.map((step) => step.who))];
  const blocks = [...new Set(steps.map((step) => step.block))];
  yAxis(box, y);
  blocks.forEach((block, order) => {
    const first = steps.findIndex((step) => step.block === block);
    const count = steps.filter((step) => step.block === block).length;
    if (order % 2) box.svg.insertBefore(draw(box.svg, "rect", { x: x(first), y: box.margin.top, width: wide * count, height: box.bottom - box.margin.top, fill: "var(--grid)", opacity: 0.42 }), box.svg.firstChild);
  });
  const middles = new Map(blocks.map((block) => [block, x(steps.findIndex((s) => s.block === block)) + (wide * steps.filter((s) => s.block === block).length) / 2]));
  const marks = steps.map((step, i) => {
    const down = step.to < step.from;
    const thick = Math.max(1.5, Math.min(34, wide * 0.72));
    if (i) draw(box.svg, "line", { x1: x(i) - wide / 2, x2: x(i) + wide / 2, y1: y.at(step.from), y2: y.at(step.from), stroke: "var(--faint)", "stroke-width": 1 });
    return draw(box.svg, "rect", { x: x(i) + (wide - thick) / 2, width: thick, y: Math.min(y.at(step.from), y.at(step.to)), height: Math.max(1.5, Math.abs(y.at(step.from) - y.at(step.to))), rx: 2, fill: down ? "var(--down)" : "var(--up)", "fill-opacity": WHO_OPACITY[people.indexOf(step.who) % 4], stroke: down ? "var(--down)" : "var(--up)" });
  });
  xAxis(box, blocks, (block) => middles.get(block), "block");
  const hint = readout(plot);
  const dim = (chosen) => marks.forEach((bar, i) => bar.setAttribute("opacity", chosen < 0 || i === chosen ? 1 : 0.4));
  walk(plot, steps.length, (left) => Math.max(0, Math.min(steps.length - 1, Math.floor((left + holder.scrollLeft * (holder !== plot) - box.margin.left) / wide))), (i) => {
    const step = steps[i];
    dim(i);
    const change = step.to - step.from;
    hint.show(x(i) + wide / 2 - holder.scrollLeft * (holder !== plot), box.height / 2, `block ${step.block}, ${step.who}`, [
      [change < 0 ? "var(--down)" : "var(--up)", `${change < 0 ? "down" : "up"} ${change.toFixed(3)} decades, × ${number(10 ** change)}`],
      ["", `${number(10 ** step.from)} → ${number(10 ** step.to)}`],
      ["", `over sequences ${known(step.low) ? step.low.toFixed(3) : "–"} to ${known(step.high) ? step.high.toFixed(3) : "–"}`],
    ]);
  }, () => { dim(-1); hint.hide(); });
}

function waterfallLegend(view) {
  const people = [...new Set(view.steps.map((step) => step.who))];
  const drawn = view.steps.filter((step) => known(step.from) && known(step.to));
  const ways = [["brings tokens together", "var(--down)", (step) => step.to < step.from], ["parts them", "var(--up)", (step) => step.to >= step.from]];
  const seen = (who) => ways.filter(([, , is]) => drawn.some((step) => (who === null || step.who === who) && is(step)));
  const both = (colours) => (colours.length === 2 ? `linear-gradient(90deg, ${colours[0]} 50%, ${colours[1]} 50%)` : colours[0]);
  return [...seen(null).map(([name, colour]) => ({ name, colour, block: 1 })),
    ...people.filter((who) => seen(who).length).map((who) => ({ name: who, colour: both(seen(who).map(([, colour]) => colour)), block: WHO_OPACITY[people.indexOf(who) % 4] }))];
}

const waterfallTable = (view) => ({ head: ["block", "part", "before", "after", "decades"], rows: view.steps.map((s) => [s.block, s.who, known(s.from) ? number(10 ** s.from) : "undefined", known(s.to) ? number(10 ** s.to) : "undefined", known(s.from) && known(s.to) ? (s.to - s.from).toFixed(4) : ""]) });

const isDark = () => getComputedStyle(document.documentElement).colorScheme.includes("dark");
const SEQUENTIAL = { light: ["#f1f4f8", "#bcd4e8", "#5fa2d0", "#1d6aa8", "#08305c"], dark: ["#1a2a38", "#1f4f78", "#2f82b8", "#72bce8", "#eaf6ff"] };
const DIVERGING = { light: ["#0b4f86", "#5fa2d0", "#f4f2ee", "#eb9a63", "#a13d00"], dark: ["#7cc0ee", "#2b6a9a", "#23282f", "#a4552a", "#ffb37f"] };

function mix(stops, share) {
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  const parts = [0, 1, 2].map((k) => {
    const [a, b] = [stops[i], stops[i + 1]].map((hex) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16));
    return Math.round(a + (b - a) * (at - i));
  });
  return `rgb(${parts.join(",")})`;
}

function palette(low, high) {
  const mode = isDark() ? "dark" : "light";
  if (low < 0) {
    const size = Math.max(-low, high);
    return { colour: (v) => mix(DIVERGING[mode], 0.5 + v / (2 * size)), low: -size, high: size, stops: DIVERGING[mode] };
  }
  return { colour: (v) => mix(SEQUENTIAL[mode], (v - low) / (high - low || 1)), low, high, stops: SEQUENTIAL[mode] };
}

function scaleBar(low, high, stops, words, mark, markWords) {
  const bar = el("span", {}, number(low));
  const strip = el("i", { "aria-hidden": "true" });
  strip.style.cssText = `display:inline-block;width:8.5rem;height:.7rem;border-radius:3px;position:relative;background:linear-gradient(90deg,${stops.join(",")})`;
  const isMarked = known(mark) && mark >= 0 && mark <= 1;
  if (isMarked) { const line = el("i", {}); line.style.cssText = `position:absolute;left:${100 * mark}%;top:-2px;bottom:-2px;border-left:2px solid ${isDark() ? "#ffb37f" : "#a13d00"}`; strip.append(line); }
  bar.append(strip, number(high));
  return [bar, ...[words, isMarked ? markWords : ""].filter(Boolean).map((said) => el("span", {}, said))];
}

function surface(plot, width, height, left, top) {
  const canvas = el("canvas", { role: "img" });
  const scale = Math.max(2, window.devicePixelRatio || 1);
  Object.assign(canvas, { width: width * scale, height: height * scale });
  canvas.style.cssText = `width:${width}px;height:${height}px;position:absolute;left:${left}px;top:${top}px`;
  plot.append(canvas);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { canvas, pen };
}

function drawHeat(plot, view, state, legend) {
  const [rowName, columnName] = view.names || ["head", "block"];
  const level = (value) => (view.log && known(value) ? Math.log10(Math.max(value, 1e-300)) : value);
  const range = extent(view.values.flat().map(level));
  if (!range) { plot.append(el("div", { class: "empty" }, `Undefined for every ${rowName}.`)); return; }
  // The declared range of the metric, so that colours mean the same in every report; a log scale begins at a decade.
  const [least, most] = (view.range || []).map((end) => (known(end) && known(level(end)) ? level(end) : null));
  range[0] = view.log ? Math.floor(range[0]) : known(least) ? least : range[0];
  range[1] = known(most) ? most : range[1];
  const [columns, rows] = [view.columns.length, view.rows.length];
  const width = plot.clientWidth;
  const margin = { left: 58, right: 6, top: 6, bottom: 42 };
  const wide = Math.min(96, (width - margin.left - margin.right) / columns);
  const tall = Math.max(rows > 40 ? 6 : 11, Math.min(26, Math.max(wide * 0.62, 11), 420 / rows));
  const box = frame(plot, width, margin.top + tall * rows + margin.bottom, { ...margin, right: width - margin.left - wide * columns }, `${view.metric} by ${columnName} and ${rowName}`);
  const { canvas, pen } = surface(plot, wide * columns, tall * rows, margin.left, margin.top);
  canvas.setAttribute("aria-label", `Map of ${view.metric.replaceAll("_", " ")}, ${rows} ${rowName}s by ${columns} ${columnName}s`);
  const shade = shades(range, view);
  const gap = wide > 7 && tall > 7 ? 1.5 : 0;
  view.values.forEach((row, i) => row.forEach((value, j) => {
    pen.fillStyle = known(value) ? shade.colour(level(value)) : isDark() ? "#3a3f46" : "#d8d5cf";
    pen.beginPath();
    pen.roundRect(j * wide, i * tall, wide - gap, tall - gap, gap ? 2.5 : 0);
    pen.fill();
    if (!known(value) && gap) { pen.fillStyle = isDark() ? "#14171b" : "#ffffff"; pen.fillRect(j * wide + wide / 2 - 3, i * tall + tall / 2 - 1.2, 5, 1.4); }
  }));
  const every = Math.ceil(14 / tall);
  view.rows.forEach((head, i) => { if (i % every === 0) draw(box.svg, "text", { x: margin.left - 8, y: margin.top + tall * (i + 0.5) + 4, "text-anchor": "end" }, i === 0 ? `${rowName} ${head}` : head); });
  xAxis(box, view.columns, (block) => margin.left + wide * (view.columns.indexOf(block) + 0.5), columnName);
  ring(pen, view.marks || [], wide, tall);
  legend.replaceChildren(...scaleBar(view.log ? 10 ** shade.low : shade.low, view.log ? 10 ** shade.high : shade.high, shade.stops, known(view.collapse) ? `dark: alike (${number(view.collapse)})` : "", known(view.threshold) ? (level(view.threshold) - range[0]) / (range[1] - range[0] || 1) : null, `collapsed at ${short(view.threshold)}`));
  const hint = readout(plot);
  walk(plot, rows * columns, (left, top) => {
    const [j, i] = [Math.floor((left - margin.left) / wide), Math.floor((top - margin.top) / tall)];
    return j >= 0 && j < columns && i >= 0 && i < rows ? i * columns + j : -1;
  }, (index) => {
    const [i, j] = [Math.floor(index / columns), index % columns];
    hint.show(margin.left + wide * (j + 0.5), margin.top + tall * (i + 0.5), `${columnName} ${view.columns[j]}, ${rowName} ${view.rows[i]}`, [["", number(view.values[i][j])], ...(view.marks || []).filter((mark) => mark[0] === i && mark[1] === j).map((mark) => ["var(--down)", mark[2]])]);
  }, () => hint.hide());
}

/* One direction of colours where a metric has an end at which tokens are alike: dark there, in both themes. */
function shades([low, high], view) {
  if (!view.log && low < 0 && !known(view.collapse)) return palette(low, high);
  const mode = isDark() ? "dark" : "light";
  const [lowest, highest] = view.log ? [10 ** low, 10 ** high] : [low, high];
  const alikeAtLow = known(view.collapse) && view.collapse - lowest <= highest - view.collapse;
  const darkFirst = isDark();
  const stops = alikeAtLow === darkFirst ? SEQUENTIAL[mode] : [...SEQUENTIAL[mode]].reverse();
  return { colour: (v) => mix(stops, (v - low) / (high - low || 1)), low, high, stops };
}

function ring(pen, marks, wide, tall) {
  pen.lineWidth = 2;
  pen.strokeStyle = isDark() ? "#ffb37f" : "#a13d00";
  for (const [i, j] of marks) {
    pen.beginPath();
    pen.ellipse((j + 0.5) * wide, (i + 0.5) * tall, Math.max(4, wide / 2), Math.max(4, tall / 2), 0, 0, 2 * Math.PI);
    pen.stroke();
  }
}

const heatTable = (view) => ({ head: [(view.names || ["head"])[0], ...view.columns.map((block) => `${(view.names || ["", "block"])[1]} ${block}`)], rows: view.rows.map((head, i) => [head, ...view.values[i].map(number)]) });

function decoded(view) {
  if (!view.cells) view.cells = Int8Array.from(atob(view.data), (letter) => letter.charCodeAt(0));
  return view.cells;
}

function drawMatrix(plot, view, state, legend) {
  const cells = decoded(view);
  const n = view.size;
  const side = Math.min(plot.clientWidth, 460);
  plot.style.height = `${side}px`;
  const { canvas, pen } = surface(plot, side, side, 0, 0);
  canvas.setAttribute("aria-label", `Cosines between ${n} tokens, mean of pairs ${number(view.mean)}`);
  const stops = DIVERGING[isDark() ? "dark" : "light"];
  const size = side / n;
  for (let i = 0; i < n; i += 1) for (let j = 0; j < n; j += 1) {
    const level = cells[i * n + j];
    pen.fillStyle = level === -128 ? (isDark() ? "#3a3f46" : "#d8d5cf") : mix(stops, 0.5 + level / 254);
    pen.fillRect(j * size, i * size, Math.ceil(size) + 0.3, Math.ceil(size) + 0.3);
  }
  legend.replaceChildren(...scaleBar(-1, 1, stops, `mean of pairs ${number(view.mean)}`));
  const hint = readout(plot);
  const name = (i) => `${view.positions[i]}${view.labels[i] ? ` ${view.labels[i]}` : ""}`;
  walk(plot, n * n, (left, top) => (left < side && top < side && left >= 0 && top >= 0 ? Math.floor(top / size) * n + Math.floor(left / size) : -1), (index) => {
    const [i, j] = [Math.floor(index / n), index % n];
    const level = cells[index];
    hint.show((j + 0.5) * size, (i + 0.5) * size, `tokens ${view.positions[i]} and ${view.positions[j]}`, [["", view.labels.length ? `“${view.labels[i]}” and “${view.labels[j]}”` : name(i)], ["", level === -128 ? "undefined" : `cosine ${(level / 127).toFixed(2)}`]]);
  }, () => hint.hide());
}

const matrixTable = (view) => ({ head: ["token", ...view.positions], rows: view.positions.map((p, i) => [p, ...view.positions.map((_, j) => { const level = decoded(view)[i * view.size + j]; return level === -128 ? "undefined" : (level / 127).toFixed(2); })]) });

/* One bar per alarm, from the step at which it was raised to the one at which it was over. */
function drawTimeline(plot, view) {
  const tall = 34;
  const box = frame(plot, plot.clientWidth, tall * view.bars.length + 46, { left: 14, right: 14, top: 4, bottom: 42 }, "Alarms by step");
  const [first, last] = [view.steps[0], view.steps[view.steps.length - 1]];
  const x = (step) => box.margin.left + ((step - first) / (last - first || 1)) * (box.right - box.margin.left);
  xAxis(box, view.steps, x, "step");
  const words = ([, from, to, cause]) => `step ${from}${to === null ? " on" : ` to ${to}`}, cause: ${cause === "unknown" ? "not found" : cause}`;
  view.bars.forEach((bar, i) => {
    const [name, from, to] = bar;
    const left = Math.min(x(from), box.right - 4);
    const label = draw(box.svg, "text", { x: box.margin.left, y: box.margin.top + tall * i + 13 });
    draw(label, "tspan", { class: "strong" }, name);
    label.append(` ${words(bar)}`);
    draw(box.svg, "rect", { x: left, y: box.margin.top + tall * i + 18, width: Math.max(4, x(to === null ? last : to) - left), height: 8, rx: 2, fill: to === null ? "var(--down)" : "var(--faint)" });
  });
  const hint = readout(plot);
  const at = (left, top) => Math.max(0, Math.min(view.bars.length - 1, Math.floor((top - box.margin.top) / tall)));
  walk(plot, view.bars.length, at, (i) => hint.show(x(view.bars[i][1]), box.margin.top + tall * i, view.bars[i][0], [["", words(view.bars[i])]]), () => hint.hide());
}

const timelineTable = (view) => ({ head: ["alarm", "from step", "to step", "cause"], rows: view.bars.map(([name, from, to, cause]) => [name, from, to === null ? "" : to, cause]) });
