/* Many models: small multiples, one panel per model on one scale, from its first block to its last; sortable tables. */

const PANEL = { wide: 172, narrow: 120, tall: 138, left: 44, top: 26, bottom: 22, gap: 16 };

function drawMultiples(plot, view, state) {
  const log = state.log === undefined ? view.log : state.log;
  const domain = lineDomain(view, log);
  if (!domain) { plot.append(el("div", { class: "empty" }, "Undefined in every model.")); return; }
  const width = plot.clientWidth;
  const columns = Math.max(1, Math.min(view.series.length, Math.floor((width - PANEL.left) / (width < 500 ? PANEL.narrow : PANEL.wide))));
  const wide = Math.min(300, (width - PANEL.left) / columns);
  const box = frame(plot, width, Math.ceil(view.series.length / columns) * PANEL.tall, { left: 0, right: 0, top: 0, bottom: 0 }, `${view.metric} of ${view.series.length} models`);
  const panels = view.series.map((one, i) => panelOf(box, one, i, columns, wide, domain, log));
  const ring = draw(box.svg, "rect", { fill: "none", stroke: "var(--accent)", "stroke-width": 1.5, rx: 6, visibility: "hidden" });
  const hint = readout(plot);
  walk(plot, panels.length, (left, top) => {
    const [j, i] = [Math.floor((left - PANEL.left) / wide), Math.floor(top / PANEL.tall)];
    const index = i * columns + j;
    return j >= 0 && j < columns && index >= 0 && index < panels.length ? index : -1;
  }, (index) => {
    const panel = panels[index];
    for (const [key, value] of Object.entries({ x: panel.left - 6, y: panel.top - 20, width: panel.right - panel.left + 12, height: panel.bottom - panel.top + 38, visibility: "visible" })) ring.setAttribute(key, value);
    hint.show((panel.left + panel.right) / 2, (panel.top + panel.bottom) / 2, view.series[index].name, wordsOf(view.series[index]));
  }, () => { hint.hide(); ring.setAttribute("visibility", "hidden"); });
}

function wordsOf(one) {
  const at = one.x.map((block, i) => [block, one.y[i]]).filter((point) => known(point[1]));
  if (!at.length) return [["", "undefined in every block"]];
  const least = at.reduce((a, b) => (b[1] < a[1] ? b : a));
  return [["var(--c0)", `${number(at[0][1])} → ${number(at[at.length - 1][1])} over ${one.x.length} blocks`], ["", `least ${number(least[1])} at block ${least[0]}`]];
}

function panelOf(box, one, index, columns, wide, domain, log) {
  const [column, row] = [index % columns, Math.floor(index / columns)];
  const left = PANEL.left + column * wide, top = row * PANEL.tall + PANEL.top;
  const right = left + wide - PANEL.gap, bottom = (row + 1) * PANEL.tall - PANEL.bottom;
  const y = (log ? logScale : linearScale)(domain[0], domain[1], bottom, top, 3);
  const [first, last] = [one.x[0], one.x[one.x.length - 1]];
  const x = (block) => (first === last ? (left + right) / 2 : left + 3 + ((block - first) / (last - first)) * (right - left - 6));
  for (const [value, words] of y.ticks) {
    const at = Math.round(y.at(value)) + 0.5;
    draw(box.svg, "line", { class: "tick", x1: left, x2: right, y1: at, y2: at });
    if (column === 0) draw(box.svg, "text", { x: left - 7, y: at + 4, "text-anchor": "end" }, words);
  }
  draw(box.svg, "line", { class: "axis", x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 });
  const room = Math.floor((right - left) / 6.6);
  draw(box.svg, "text", { x: left, y: top - 8, class: "strong" }, one.name.length > room ? `${one.name.slice(0, room - 1)}…` : one.name);
  draw(box.svg, "text", { x: right, y: bottom + 14, "text-anchor": "end" }, last);
  panelLine(box, one, x, (value) => (log && value <= 0 ? bottom : y.at(Math.max(domain[0], value))), log);
  return { left, right, top, bottom };
}

function panelLine(box, one, x, height, log) {
  const points = (values, order) => order.map((i) => `${x(one.x[i]).toFixed(1)},${height(values[i]).toFixed(1)}`);
  const there = one.x.map((_, i) => i).filter((i) => known(one.y[i]));
  const banded = there.filter((i) => known(one.low[i]) && known(one.high[i]));
  if (banded.length > 1) draw(box.svg, "polygon", { points: [...points(one.high, banded), ...points(one.low, [...banded].reverse())].join(" "), fill: "var(--c0)", opacity: 0.17 });
  draw(box.svg, "polyline", { points: points(one.y, there).join(" "), fill: "none", stroke: "var(--c0)", "stroke-width": 1.9, "stroke-linejoin": "round" });
  for (const i of there) {
    const hollow = one.floor.includes(i) || (log && one.y[i] <= 0);
    if (hollow || there.length === 1 || i === there[there.length - 1]) draw(box.svg, "circle", { cx: x(one.x[i]), cy: height(one.y[i]), r: 2.6, fill: hollow ? "var(--card)" : "var(--c0)", stroke: "var(--c0)", "stroke-width": 1.4 });
  }
}

const multipleTable = (view) => {
  const most = Math.max(...view.series.map((one) => one.x.length));
  return { head: ["model", ...Array.from({ length: most }, (_, i) => `block ${i}`)], rows: view.series.map((one) => [one.name, ...one.y.map((value, i) => number(value) + (one.floor.includes(i) ? "*" : ""))]) };
};

/* Tables whose heads sort: numbers by their value, anything else by its words, what is missing last. */
function sortables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const keyOf = (row, column, numeric) => {
      const cell = row.cells[column];
      if (numeric) return cell.dataset.order === undefined ? null : Number(cell.dataset.order);
      return cell.textContent.trim() || null;
    };
    const compare = (a, b, turned) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
      return turned ? -order : order;
    };
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const words = head.textContent.trim();
      const button = el("button", { type: "button", class: "sort", "aria-label": `Sort by ${words}` }, "↕");
      head.append(" ", button);
      button.addEventListener("click", () => {
        const turned = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) { other.removeAttribute("aria-sort"); other.querySelector(".sort").textContent = "↕"; }
        head.setAttribute("aria-sort", turned ? "descending" : "ascending");
        button.textContent = turned ? "↓" : "↑";
        const numeric = [...body.rows].some((row) => row.cells[column].dataset.order !== undefined);
        const rows = [...body.rows].map((row) => [keyOf(row, column, numeric), row]);
        rows.sort((a, b) => compare(a[0], b[0], turned)).forEach(([, row]) => body.append(row));
      });
    });
  }
}

KINDS.multiples = { draw: drawMultiples, table: multipleTable };
sortables();
