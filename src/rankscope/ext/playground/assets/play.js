/* The player of one picture: draws the sphere and the lens, moves the cursor of the curve. Runs once; listens to `value`. */
const SVG = "http://www.w3.org/2000/svg";
const STEP = 260;
const TILT = 0.95;
const still = window.matchMedia("(prefers-reduced-motion: reduce)");
let shown = null;
let timer = 0;

function node(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

/* Seen from in front of and above the sphere, turned around its axis. */
function seen(x, y, z, turn) {
  const across = x * Math.cos(turn) - y * Math.sin(turn);
  const away = x * Math.sin(turn) + y * Math.cos(turn);
  const up = z * Math.sin(TILT) + away * Math.cos(TILT);
  const near = z * Math.cos(TILT) - away * Math.sin(TILT);
  return [100 * across, -100 * up, near];
}

function ring(points, parent, turn, name) {
  let front = "", back = "", last = null;
  for (const [x, y, z] of points) {
    const [a, b, near] = seen(x, y, z, turn);
    if (last) {
      const piece = `M${last[0].toFixed(1)} ${last[1].toFixed(1)}L${a.toFixed(1)} ${b.toFixed(1)}`;
      if (near >= 0) front += piece; else back += piece;
    }
    last = [a, b];
  }
  node("path", { d: back, class: `${name} back` }, parent);
  node("path", { d: front, class: name }, parent);
}

function globe(parent, turn) {
  const circle = (f) => Array.from({ length: 61 }, (_, i) => f((i * Math.PI) / 30));
  for (const angle of [30, 60, 90, 120, 150]) {
    const a = (angle * Math.PI) / 180;
    ring(circle((t) => [Math.sin(a) * Math.cos(t), Math.sin(a) * Math.sin(t), Math.cos(a)]), parent, turn, "wire");
  }
  for (let m = 0; m < 6; m += 1) {
    const a = (m * Math.PI) / 6;
    ring(circle((t) => [Math.sin(t) * Math.cos(a), Math.sin(t) * Math.sin(a), Math.cos(t)]), parent, turn, "wire");
  }
}

/* Hue by place in the sequence. */
function hue(index, count) {
  return count > 1 ? Math.round(250 - (290 * index) / (count - 1) + 360) % 360 : 250;
}

class Player {
  constructor(root) {
    this.root = root;
    this.frames = JSON.parse(root.dataset.frames).frames;
    this.count = this.frames[0].s.length / 3;
    this.turn = 0.5;
    this.at = 0;
    this.sphere = root.querySelector(".sphere");
    this.lens = root.querySelector(".lens");
    this.slider = root.querySelector(".layer");
    this.button = root.querySelector(".run");
    this.slider.addEventListener("input", () => { const wanted = Number(this.slider.value); this.stop(); this.show(wanted); });
    this.button.addEventListener("click", () => (timer ? this.stop() : this.play()));
    this.sphere.addEventListener("pointerdown", (event) => this.drag(event));
    this.prepare();
    this.show(0);
  }

  prepare() {
    this.sphere.replaceChildren();
    node("circle", { r: 100, class: "ground" }, this.sphere);
    this.wires = node("g", {}, this.sphere);
    this.trails = node("g", {}, this.sphere);
    this.dots = node("g", {}, this.sphere);
    this.lens.replaceChildren();
    node("circle", { r: 52, class: "glass" }, this.lens);
    node("path", { d: "M-52 0H52M0 -52V52", class: "wire" }, this.lens);
    this.marks = node("g", {}, this.lens);
    for (let i = 0; i < this.count; i += 1) {
      const style = `--h:${hue(i, this.count)}`;
      node("path", { class: "trail", style }, this.trails);
      node("circle", { class: "token", style, r: 3.6 }, this.dots);
      node("circle", { class: "token", style, r: 2.2 }, this.marks);
    }
    this.globe();
  }

  globe() {
    this.wires.replaceChildren();
    globe(this.wires, this.turn);
  }

  /* The state at a block, or on the way between two. */
  show(at) {
    this.at = at;
    const from = this.frames[Math.floor(at)], to = this.frames[Math.ceil(at)], t = at - Math.floor(at);
    const passed = this.frames.slice(0, Math.ceil(at));
    for (let i = 0; i < this.count; i += 1) {
      const p = [0, 1, 2].map((k) => (1 - t) * from.s[3 * i + k] + t * to.s[3 * i + k]);
      const size = Math.hypot(...p) || 1;
      const [x, y, near] = seen(p[0] / size, p[1] / size, p[2] / size, this.turn);
      const dot = this.dots.children[i];
      dot.setAttribute("cx", x.toFixed(1));
      dot.setAttribute("cy", y.toFixed(1));
      dot.setAttribute("class", near >= 0 ? "token" : "token back");
      const way = passed.map((frame) => seen(...[0, 1, 2].map((k) => frame.s[3 * i + k] / 1000), this.turn));
      const path = [...way, [x, y]].map(([u, v]) => `${u.toFixed(1)} ${v.toFixed(1)}`).join("L");
      this.trails.children[i].setAttribute("d", `M${path}`);
      const mark = this.marks.children[i];
      [["cx", 0], ["cy", 1]].forEach(([name, k]) => {
        mark.setAttribute(name, (((1 - t) * from.l[2 * i + k] + t * to.l[2 * i + k]) * 0.047).toFixed(1));
      });
    }
    this.say(Math.round(at));
    this.point(at);
  }

  say(block) {
    const frame = this.frames[block], words = block ? `after block ${block - 1}` : "first tokens";
    this.slider.value = String(block);
    this.slider.setAttribute("aria-valuetext", words);
    this.root.querySelector(".where").textContent = words;
    this.root.querySelector(".angle").innerHTML = frame.a;
    this.root.querySelector(".zoom").innerHTML = frame.m;
  }

  point(at) {
    for (const chart of this.root.querySelectorAll("svg.curve")) {
      const left = Number(chart.dataset.left), right = Number(chart.dataset.right);
      const x = left + ((right - left) * at) / (this.frames.length - 1);
      const line = chart.querySelector(".cursor");
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
  }

  play() {
    const last = this.frames.length - 1;
    if (this.at >= last) this.show(0);
    this.button.textContent = "Pause";
    const from = this.at;
    let start = null;
    const step = (now) => {
      if (!this.root.isConnected) { timer = 0; return; }
      start ??= now;
      const passed = from + (now - start) / STEP;
      const eased = Math.floor(passed) + Math.min(1, (passed % 1) * 1.6);
      const at = Math.min(last, still.matches ? Math.floor(passed) : eased);
      this.show(at);
      if (at < last) timer = requestAnimationFrame(step); else this.stop();
    };
    timer = requestAnimationFrame(step);
  }

  stop() {
    cancelAnimationFrame(timer);
    timer = 0;
    this.button.textContent = "Play";
    this.show(Math.round(this.at));
  }

  drag(event) {
    const start = event.clientX, turn = this.turn;
    const move = (now) => { this.turn = turn + (now.clientX - start) / 120; this.globe(); this.show(this.at); };
    const end = () => { window.removeEventListener("pointermove", move); window.removeEventListener("pointerup", end); };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end);
  }
}

function begin(moving) {
  cancelAnimationFrame(timer);
  timer = 0;
  const root = element.querySelector(".play[data-frames]");
  if (!root) { shown = null; return; }
  shown = new Player(root);
  if (moving && !still.matches) shown.play(); else shown.show(shown.frames.length - 1);
}

begin(true);
watch("value", () => begin(true));
