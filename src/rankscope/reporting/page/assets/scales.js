"use strict";
/* Numbers, scales and the few drawing words that every chart shares. Text always goes through textContent. */

/* How each kind of chart is drawn; scripts add theirs. */
const KINDS = {};
const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function draw(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);
const SUPERSCRIPTS = { "-": "⁻", ".": "·", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => "10" + [...String(exponent)].map((letter) => SUPERSCRIPTS[letter] || letter).join("");

/* Three significant digits, as the tables of rankscope write them. */
function number(value) {
  if (!known(value)) return "undefined";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 999.5) {
    const exponent = Math.floor(Math.log10(size));
    if (size >= 999.5 && size < 1e6) return Math.round(value).toLocaleString("en");
    return `${(value / 10 ** exponent).toFixed(2)}·${power(exponent)}`;
  }
  return value.toFixed(size < 0.09995 ? 4 : size < 0.9995 ? 3 : size < 9.995 ? 2 : 1);
}

const short = (value) => {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e5) return power(Math.round(Math.log10(size)));
  return String(Number(value.toPrecision(4)));
};

function niceTicks(low, high, count) {
  const span = high - low || 1;
  const raw = span / Math.max(1, count);
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * base).find((size) => span / size <= count) || 10 * base;
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return ticks;
}

/* A scale: where a value lies between two ends, its ticks, and how a tick reads. */
function linearScale(low, high, from, to, count) {
  const at = (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  return { at, low, high, ticks: niceTicks(low, high, count).map((tick) => [tick, short(tick)]) };
}

function logScale(low, high, from, to, count) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const at = (value) => from + ((Math.log10(Math.max(value, low)) - a) / (b - a || 1)) * (to - from);
  const step = Math.max(1, Math.ceil((b - a) / count));
  const ticks = [];
  for (let exponent = Math.ceil(a - 1e-9); exponent <= b + 1e-9; exponent += step) {
    ticks.push([10 ** exponent, exponent >= -2 && exponent <= 3 ? String(Number((10 ** exponent).toPrecision(3))) : power(exponent)]);
  }
  if (ticks.length < 2) return { at, low, high, ticks: niceTicks(low, high, 4).filter((t) => t > 0).map((t) => [t, short(t)]) };
  return { at, low, high, ticks };
}

function powerScale(low, high, from, to, count) {
  const scale = linearScale(low, high, from, to, count);
  const near = high - low < 1.5 && low > -3 && high < 5;
  scale.ticks = near
    ? niceTicks(10 ** low, 10 ** high, count).filter((tick) => tick > 0).map((tick) => [Math.log10(tick), short(tick)])
    : scale.ticks.map(([tick]) => [tick, power(Number(tick.toPrecision(6)))]);
  return scale;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (known(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return low <= high ? [low, high] : null;
}

/* The frame of a chart: an SVG of the given size with grid lines, ticks, and the name of the x axis. */
function frame(plot, width, height, margin, label) {
  const svg = draw(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  return { svg, width, height, margin, right: width - margin.right, bottom: height - margin.bottom };
}

function yAxis(box, scale) {
  for (const [value, words] of scale.ticks) {
    const y = Math.round(scale.at(value)) + 0.5;
    draw(box.svg, "line", { class: "tick", x1: box.margin.left, x2: box.right, y1: y, y2: y });
    draw(box.svg, "text", { x: box.margin.left - 8, y: y + 4, "text-anchor": "end" }, words);
  }
}

function xAxis(box, values, at, label) {
  draw(box.svg, "line", { class: "axis", x1: box.margin.left, x2: box.right, y1: box.bottom + 0.5, y2: box.bottom + 0.5 });
  for (const value of labelled(box, values, at)) draw(box.svg, "text", { x: at(value), y: box.bottom + 18, "text-anchor": "middle" }, value);
  draw(box.svg, "text", { x: (box.margin.left + box.right) / 2, y: box.height - 2, "text-anchor": "middle" }, label);
}

/* Values that get a label: round ones of a row without gaps, otherwise as many as find room. */
function labelled(box, values, at) {
  const wide = Math.max(38, 8 * String(values[values.length - 1]).length + 14);
  const room = Math.max(1, Math.floor((box.right - box.margin.left) / wide));
  const size = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find((count) => values.length / count <= room) || 1000;
  if (values.every((value, i) => typeof value === "number" && value === values[0] + i)) return values.filter((value) => size === 1 || value % size === 0);
  let last = -Infinity;
  return values.filter((value) => { const free = at(value) - last >= wide; if (free) last = at(value); return free; });
}

/* A readout beside the pointer; also spoken, because keys can move it. */
function readout(plot) {
  const box = el("div", { class: "hint" });
  box.hidden = true;
  plot.append(box);
  return {
    show(x, y, title, lines) {
      box.replaceChildren(el("b", {}, title));
      for (const [colour, words] of lines) {
        const line = el("div", {});
        if (colour) line.append(Object.assign(el("i", {}), { style: `background:${colour}` }));
        line.append(words);
        box.append(line);
      }
      box.hidden = false;
      const room = plot.clientWidth;
      box.style.left = `${Math.max(0, x + 14 + box.offsetWidth > room ? x - 14 - box.offsetWidth : x + 14)}px`;
      box.style.top = `${Math.max(0, y - box.offsetHeight / 2)}px`;
      document.getElementById("live").textContent = `${title}: ${lines.map((line) => line[1]).join("; ")}`;
    },
    hide() { box.hidden = true; },
  };
}

/* Let pointer and arrow keys walk over positions 0..count-1. */
function walk(plot, count, nearest, show, hide) {
  let at = -1;
  const go = (index) => { at = Math.max(0, Math.min(count - 1, index)); show(at); };
  plot.onpointermove = (event) => {
    const box = plot.getBoundingClientRect();
    const index = nearest(event.clientX - box.left, event.clientY - box.top);
    if (index >= 0) go(index); else hide();
  };
  plot.onpointerleave = hide;
  plot.onblur = hide;
  plot.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) { go(at + step); event.preventDefault(); }
    if (event.key === "Escape") hide();
  };
}
