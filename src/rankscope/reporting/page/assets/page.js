/* The page: switches, cards, sliders, explanations, light and dark. */

Object.assign(KINDS, {
  lines: { draw: drawLines, table: lineTable, legend: lineLegend },
  bars: { draw: drawBars, table: barTable },
  waterfall: { draw: drawWaterfall, table: waterfallTable, legend: waterfallLegend },
  heat: { draw: drawHeat, table: heatTable },
  matrix: { draw: drawMatrix, table: matrixTable },
  timeline: { draw: drawTimeline, table: timelineTable },
});
const MOST_ROWS = 400;
const MOST_CARDS = 8;
const redraws = [];
const factOf = new Map([...document.querySelectorAll(".fact[data-name]")].map((node) => [node.dataset.name, node]));

function termFor(metric) {
  const words = metric.replaceAll("_", " ");
  if (!factOf.has(metric)) return el("strong", {}, words);
  return el("button", { type: "button", class: "term", "data-term": metric, "aria-describedby": factOf.get(metric).id }, words);
}

function setUp(figure, chart) {
  const part = (name) => figure.querySelector(`.${name}`);
  const [controls, cards, shown, plot, legend, numbers] = ["controls", "cards", "shown", "plot", "legend", "live-numbers"].map(part);
  const state = { key: [...(chart.views[0] || { key: [] }).key], log: undefined };
  const fields = [];

  const matching = (key, fixed) => chart.views.find((view) => view.key.every((word, i) => word === key[i]))
    || chart.views.find((view) => view.key[fixed] === key[fixed]) || chart.views[0];

  const choose = (index, value) => {
    const wanted = [...state.key];
    wanted[index] = value;
    state.key = [...matching(wanted, index).key];
    state.log = undefined;
    show();
  };

  const show = () => {
    if (plot.clientWidth < 60) return; // not laid out; the observer calls again
    const view = matching(state.key, 0);
    const kind = KINDS[chart.kind];
    plot.replaceChildren();
    plot.style.height = "";
    plot.setAttribute("tabindex", "0");
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${chart.title}: arrow keys read the values`);
    legend.replaceChildren();
    fields.forEach((field, i) => field && field(view.key[i]));
    kind.draw(plot, view, state, legend, chart);
    const entries = kind.legend ? kind.legend(view, plot.clientWidth) : [];
    entries.forEach((entry) => legend.append(el("span", {}, swatch(entry), entry.name)));
    const where = chart.choices.map((choice, i) => (i && choice.options.length > 1 && choice.name !== chart.slider ? (choice.options.find(([value]) => value === view.key[i]) || ["", view.key[i]])[1] : null)).filter(Boolean);
    shown.replaceChildren(termFor(view.metric), where.length ? ` · ${where.join(" · ")}` : "");
    for (const card of cards.children) card.setAttribute("aria-pressed", String(card.dataset.value === view.key[0]));
    if (numbers.open) fill(numbers, kind.table(view));
  };

  chart.choices.forEach((choice, index) => {
    if (choice.options.length < 2) { fields.push(null); return; }
    fields.push(choice.name === chart.slider ? slider(figure, choice, (value) => choose(index, value)) : list(controls, choice, (value) => choose(index, value)));
  });
  if (chart.kind === "lines" && chart.views.some((view) => view.form !== "power")) logSwitch(controls, state, () => matching(state.key, 0), show, fields);
  if (chart.cards && chart.choices[0].options.length > 2) makeCards(cards, chart, (value) => choose(0, value));
  numbers.addEventListener("toggle", () => { if (numbers.open) fill(numbers, KINDS[chart.kind].table(matching(state.key, 0))); });
  show();
  redraws.push(show);
  let last = plot.clientWidth;
  new ResizeObserver(() => { if (Math.abs(plot.clientWidth - last) > 1) { last = plot.clientWidth; show(); } }).observe(plot);
}

function swatch(entry) {
  const mark = el("i", { "aria-hidden": "true" });
  mark.style.cssText = entry.block === undefined
    ? `display:inline-block;width:1.4rem;border-top:3px ${entry.dash ? "dashed" : "solid"} ${entry.colour}`
    : `display:inline-block;width:.85rem;height:.85rem;border-radius:3px;background:${entry.colour};opacity:${entry.block}`;
  return mark;
}

function list(controls, choice, choose) {
  const select = el("select", { "aria-label": choice.name });
  for (const [value, label] of choice.options) {
    const option = el("option", {}, label);
    option.value = value;
    select.append(option);
  }
  select.addEventListener("change", () => choose(select.value));
  controls.append(el("label", {}, choice.name, select));
  return (value) => { select.value = value; };
}

function slider(figure, choice, choose) {
  const input = el("input", { type: "range", min: 0, max: choice.options.length - 1, step: 1, "aria-label": choice.name });
  const output = el("output", {});
  const play = el("button", { type: "button", class: "quiet" }, "Play");
  input.addEventListener("input", () => choose(choice.options[Number(input.value)][0]));
  let timer = 0;
  play.addEventListener("click", () => {
    if (timer) { clearInterval(timer); timer = 0; play.textContent = "Play"; return; }
    if (Number(input.value) === choice.options.length - 1) input.value = -1;
    play.textContent = "Stop";
    timer = setInterval(() => {
      input.value = Number(input.value) + 1;
      choose(choice.options[Number(input.value)][0]);
      if (Number(input.value) === choice.options.length - 1) { clearInterval(timer); timer = 0; play.textContent = "Play"; }
    }, 600);
  });
  figure.querySelector(".plot").before(el("div", { class: "slide" }, input, output, play));
  return (value) => {
    const at = choice.options.findIndex((option) => option[0] === value);
    input.value = Math.max(0, at);
    output.textContent = (choice.options[at] || ["", ""])[1];
    input.setAttribute("aria-valuetext", output.textContent);
  };
}

function logSwitch(controls, state, view, show, fields) {
  const box = el("input", { type: "checkbox" });
  box.addEventListener("change", () => { state.log = box.checked; show(); });
  const label = el("label", {}, box, "log axis");
  controls.append(label);
  fields.push(() => { label.hidden = view().form === "power"; box.checked = state.log === undefined ? view().log : state.log; });
}

function makeCards(cards, chart, choose) {
  for (const [value, label] of chart.choices[0].options.slice(0, MOST_CARDS)) {
    const view = chart.views.find((one) => one.key[0] === value);
    const ends = view.series[0].y.filter(known);
    const words = ends.length ? (ends.length > 1 ? `${number(ends[0])} →\u00a0${number(ends[ends.length - 1])}` : number(ends[0])) : "undefined";
    const card = el("button", { type: "button", "aria-pressed": "false" }, el("span", { class: "name" }, label), el("span", { class: "value" }, words), sparkline(view));
    card.dataset.value = value;
    card.addEventListener("click", () => choose(value));
    cards.append(card);
  }
}

function fill(numbers, table) {
  const head = el("tr", {}, ...table.head.map((word) => el("th", { scope: "col" }, String(word))));
  const rows = table.rows.slice(0, MOST_ROWS).map((row) => el("tr", {}, ...row.map((word, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, String(word)))));
  numbers.querySelector(".scroll").replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

/* Explanations: on hover and on focus, with Escape to close; the pointer may move onto them. */
function explanations() {
  const tip = document.getElementById("tip");
  let timer = 0;
  const hide = () => { tip.hidden = true; };
  const show = (term) => {
    const fact = factOf.get(term.dataset.term);
    if (!fact) return;
    clearTimeout(timer);
    tip.replaceChildren(...[...fact.childNodes].map((node) => node.cloneNode(true)));
    tip.className = "fact";
    tip.hidden = false;
    const at = term.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
    const below = at.bottom + tip.offsetHeight + 12 < window.innerHeight || at.top < tip.offsetHeight + 12;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${(below ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + window.scrollY}px`;
  };
  const later = () => { clearTimeout(timer); timer = setTimeout(hide, 180); };
  const termAt = (event) => event.target instanceof Element && event.target.closest(".term");
  document.addEventListener("pointerover", (event) => { const term = termAt(event); if (term) show(term); else if (tip.contains(event.target)) clearTimeout(timer); });
  document.addEventListener("pointerout", (event) => { if (termAt(event) || tip.contains(event.target)) later(); });
  document.addEventListener("focusin", (event) => { const term = termAt(event); if (term) show(term); else hide(); });
  document.addEventListener("focusout", (event) => { if (termAt(event)) later(); });
  document.addEventListener("click", (event) => { const term = termAt(event); if (term) show(term); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}

function themes() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const remember = (name) => { try { localStorage.setItem("rankscope-theme", name); } catch (error) { button.title = String(error.message); } };
  const recall = () => { try { return localStorage.getItem("rankscope-theme"); } catch (error) { return null; } };
  const set = (name) => {
    if (name) root.dataset.theme = name; else delete root.dataset.theme;
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(isDark()));
    redraws.forEach((redraw) => redraw());
  };
  button.addEventListener("click", () => { const name = isDark() ? "light" : "dark"; remember(name); set(name); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set(root.dataset.theme));
  let before;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme; set("light"); });
  window.addEventListener("afterprint", () => set(before));
  set(recall() || undefined);
}

function copies() {
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre").textContent;
      try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
      catch (error) { getSelection().selectAllChildren(button.parentElement.querySelector("pre")); button.textContent = "Selected"; }
    });
  }
}

const charts = JSON.parse(document.getElementById("charts").textContent);
for (const figure of document.querySelectorAll("figure[data-chart]")) setUp(figure, charts[Number(figure.dataset.chart)]);
explanations();
themes();
copies();
