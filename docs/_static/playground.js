/* The playground of concepts/law.md: points on a circle, and what an objective does to one of them.

   One point is the anchor q. The others are its positives and its negatives, which get no gradient, as the keys of a
   teacher and the rows of a bank. All formulas are those of kontrast.objectives; tests/docs/test_playground.py compares
   the numbers. The numbers are in `data-state` of the element with the id "playground", as JSON. */
(() => {
  "use strict";

  const SVG = "http://www.w3.org/2000/svg";
  const RADIUS = 150;
  const OBJECTIVES = {
    "nt-xent": { title: "NT-Xent", settings: ["temperature"] },
    dcl: { title: "DCL", settings: ["temperature"] },
    cacr: { title: "CACR", settings: ["t_plus", "t_minus"] },
    jcl: { title: "JCL", settings: ["temperature", "covariance_weight"] },
  };
  const SETTINGS = {
    temperature: { label: "temperature τ", least: 0.05, most: 2, step: 0.05 },
    t_plus: { label: "t⁺, sharpness of attraction", least: 0, most: 5, step: 0.1 },
    t_minus: { label: "t⁻, sharpness of repulsion", least: 0, most: 5, step: 0.1 },
    covariance_weight: { label: "λ, weight of the variance", least: 0, most: 10, step: 0.1 },
  };
  const COUNTS = { positives: { least: 1, most: 5 }, negatives: { least: 2, most: 12 } };

  // Formulas. s: cosines; a result has one attraction and repulsion weight and one slope dL/ds per point.

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const mean = (values) => sum(values) / values.length;

  function logSumExp(values) {
    const most = Math.max(...values);
    return most + Math.log(sum(values.map((value) => Math.exp(value - most))));
  }

  function softmax(values) {
    const total = logSumExp(values);
    return values.map((value) => Math.exp(value - total));
  }

  function points(attraction, repulsion, slope) {
    return slope.map((value, k) => ({ attraction: attraction[k], repulsion: repulsion[k], slope: value }));
  }

  function softmaxLoss(near, far, temperature, withPositives) {
    const scaled = [...(withPositives ? near : []), ...far].map((s) => s / temperature);
    const shares = softmax(scaled);
    const pull = near.map(() => 1 / near.length);
    const push = withPositives ? shares.splice(0, near.length) : near.map(() => 0);
    return {
      attraction: -mean(near) / temperature,
      repulsion: logSumExp(scaled),
      positives: points(pull, push, pull.map((w, k) => (push[k] - w) / temperature)),
      negatives: points(far.map(() => 0), shares, shares.map((w) => w / temperature)),
    };
  }

  function cacr(near, far, { t_plus, t_minus }) {
    const [pulled, pushed] = [near, far].map((cosines) => cosines.map((s) => 2 - 2 * s));
    const pull = softmax(pulled.map((c) => t_plus * c));
    const push = softmax(pushed.map((c) => -t_minus * c));
    const [attraction, repulsion] = [sum(pull.map((w, k) => w * pulled[k])), -sum(push.map((w, j) => w * pushed[j]))];
    const inward = pull.map((w, k) => -2 * w * (1 + t_plus * (pulled[k] - attraction)));
    const outward = push.map((w, j) => 2 * w * (1 - t_minus * (pushed[j] + repulsion)));
    return {
      attraction,
      repulsion,
      positives: points(pull, near.map(() => 0), inward),
      negatives: points(far.map(() => 0), push, outward),
    };
  }

  function jcl(near, far, { temperature, covariance_weight }) {
    const logits = near.map((s) => s / temperature);
    const middle = mean(logits);
    const variance = mean(logits.map((l) => (l - middle) ** 2));
    const scaled = far.map((s) => s / temperature);
    const both = [middle + (covariance_weight / 2) * variance, logSumExp(scaled)];
    const [joint, others] = softmax(both);
    const pull = near.map(() => 1 / near.length);
    const push = logits.map((l) => (joint * (1 + covariance_weight * (l - middle))) / near.length);
    const away = softmax(scaled).map((w) => others * w);
    return {
      attraction: -middle,
      repulsion: logSumExp(both),
      positives: points(pull, push, pull.map((w, k) => (push[k] - w) / temperature)),
      negatives: points(far.map(() => 0), away, away.map((w) => w / temperature)),
    };
  }

  function terms(name, near, far, settings) {
    if (name === "cacr") return cacr(near, far, settings);
    if (name === "jcl") return jcl(near, far, settings);
    return softmaxLoss(near, far, settings.temperature, name === "nt-xent");
  }

  /* The terms of the loss, and its gradient with respect to the anchor, which stays on the circle. */
  function evaluate({ objective, settings, anchor, positives, negatives }) {
    const cosines = (angles) => angles.map((angle) => Math.cos(angle - anchor));
    const result = terms(objective, cosines(positives), cosines(negatives), settings);
    const along = (angles, found) => sum(angles.map((angle, k) => found[k].slope * Math.sin(angle - anchor)));
    result.loss = result.attraction + result.repulsion;
    result.turn = along(positives, result.positives) + along(negatives, result.negatives); // dL/d(angle of the anchor)
    result.gradient = [-Math.sin(anchor) * result.turn, Math.cos(anchor) * result.turn];
    return result;
  }

  // Elements

  function element(name, attributes = {}, ...children) {
    const drawn = ["svg", "g", "circle", "line", "text", "path"].includes(name);
    const made = drawn ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const place = (angle, radius = RADIUS) => [radius * Math.cos(angle), -radius * Math.sin(angle)];
  const degrees = (angle) => Math.round((angle * 180) / Math.PI);
  const within = (angle) => Math.atan2(Math.sin(angle), Math.cos(angle));
  const signed = (value) => (Number(value.toFixed(3)) || 0).toFixed(3).replace("-", "−"); // no negative zero

  class Playground {
    constructor(root) {
      this.root = root;
      this.start = JSON.parse(root.dataset.start);
      this.settings = { ...this.start.settings };
      this.build();
      this.reset();
    }

    reset() {
      const { anchor, positives, negatives, objective } = this.start;
      Object.assign(this, { anchor, positives: [...positives], negatives: [...negatives], objective });
      this.settings = { ...this.start.settings };
      this.select.value = objective;
      this.showSettings();
      this.draw();
    }

    get state() {
      const { objective, settings, anchor, positives, negatives } = this;
      return { objective, settings, anchor, positives, negatives };
    }

    build() {
      const frame = { viewBox: "-196 -196 392 392", role: "group", "aria-label": "Points on a circle" };
      this.picture = element("svg", frame);
      this.back = element("g", { "aria-hidden": "true" });
      this.front = element("g");
      this.picture.append(element("circle", { class: "rim", r: RADIUS }), this.back, this.front);
      this.select = element("select", { "aria-label": "Objective" });
      for (const [name, { title }] of Object.entries(OBJECTIVES)) {
        this.select.append(element("option", { value: name }, title));
      }
      this.select.addEventListener("change", () => {
        this.objective = this.select.value;
        this.showSettings();
        this.draw();
      });
      this.sliders = element("div", { class: "sliders" });
      this.numbers = element("output", { class: "numbers", "aria-live": "polite" });
      this.table = element("tbody");
      const names = ["point", "cosine", "attraction", "repulsion", "pull"];
      const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
      const table = element("table", {}, element("thead", {}, head), this.table);
      const side = element("div", { class: "controls" }, element("label", {}, "objective ", this.select));
      side.append(this.sliders, this.counters(), this.buttons(), this.numbers, table);
      this.root.replaceChildren(this.picture, side);
    }

    showSettings() {
      this.sliders.replaceChildren(...OBJECTIVES[this.objective].settings.map((key) => this.slider(key)));
    }

    slider(key) {
      const { label, least, most, step } = SETTINGS[key];
      const given = { type: "range", min: least, max: most, step, value: this.settings[key], name: key };
      const input = element("input", given);
      const shown = element("span", { class: "value" }, String(this.settings[key]));
      input.addEventListener("input", () => {
        this.settings[key] = Number(input.value);
        shown.textContent = input.value;
        this.draw();
      });
      return element("label", {}, element("span", {}, label), input, shown);
    }

    counters() {
      const row = element("div", { class: "counters" });
      for (const kind of ["positives", "negatives"]) {
        const change = (by) => () => this.changeCount(kind, by);
        const buttons = [this.button("−", change(-1), `fewer ${kind}`), this.button("+", change(1), `more ${kind}`)];
        row.append(element("span", {}, kind, ...buttons));
      }
      return row;
    }

    buttons() {
      const follow = this.button("follow the gradient", () => this.follow(40));
      follow.classList.add("main");
      const one = this.button("one step", () => this.step());
      return element("div", { class: "buttons" }, follow, one, this.button("start again", () => this.reset()));
    }

    button(text, action, label = text) {
      const made = element("button", { type: "button", "aria-label": label }, text);
      made.addEventListener("click", action);
      return made;
    }

    changeCount(kind, by) {
      const { least, most } = COUNTS[kind];
      const angles = this[kind];
      if (by < 0 && angles.length > least) angles.pop();
      const apart = kind === "positives" ? 0.3 : 0.7;
      if (by > 0 && angles.length < most) angles.push(within(angles[angles.length - 1] + apart));
      this.draw();
    }

    /* Turn the anchor against the gradient, by at most a tenth of a radian. */
    step() {
      const turn = Math.max(-0.1, Math.min(0.1, -0.05 * evaluate(this.state).turn));
      this.anchor = within(this.anchor + turn);
      this.draw();
    }

    follow(steps) {
      if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
        for (let n = 0; n < steps; n += 1) this.step();
      } else if (steps > 0) {
        this.step();
        requestAnimationFrame(() => this.follow(steps - 1));
      }
    }

    // Drawing

    draw() {
      const result = evaluate(this.state);
      this.root.dataset.state = JSON.stringify({ ...result, ...this.state });
      this.drawForces(result);
      this.drawPoints();
      this.write(result);
    }

    drawForces(result) {
      const from = place(this.anchor);
      this.back.replaceChildren();
      for (const kind of ["positives", "negatives"]) {
        this[kind].forEach((angle, k) => {
          const { attraction, repulsion } = result[kind][k];
          const [x, y] = place(angle);
          const width = 0.5 + 9 * Math.min(Math.abs(attraction - repulsion), 1.5);
          const line = { class: attraction > repulsion ? "pull" : "push", x1: from[0], y1: from[1], x2: x, y2: y };
          this.back.append(element("line", { ...line, "stroke-width": width }));
        });
      }
      const length = 70 * (1 - Math.exp(-Math.abs(result.turn)));
      if (length < 3) return;
      const way = this.anchor - (Math.sign(result.turn) * Math.PI) / 2; // along the circle, against the gradient
      const start = place(this.anchor, RADIUS + 20);
      const [dx, dy] = place(way, length);
      const [left, right] = [place(way + 2.6, 10), place(way - 2.6, 10)];
      const tip = `M${start} l${[dx, dy]} m${left} l${left.map((v) => -v)} l${right}`;
      this.back.append(element("path", { class: "step", d: tip }));
    }

    drawPoints() {
      const all = [];
      for (const kind of ["positives", "negatives"]) this[kind].forEach((angle, k) => all.push([kind, k, angle]));
      all.push(["anchor", 0, this.anchor]); // the last is on top
      const old = [...this.front.children];
      const same = old.length === all.length && all.every(([kind, k], n) => old[n].dataset.point === `${kind} ${k}`);
      if (!same) this.front.replaceChildren(...all.map(([kind, k]) => this.point(kind, k)));
      all.forEach(([, , angle], n) => {
        const drawn = this.front.children[n];
        drawn.setAttribute("transform", `translate(${place(angle)})`);
        drawn.setAttribute("aria-valuenow", degrees(angle));
        drawn.setAttribute("aria-valuetext", `${degrees(angle)} degrees`);
      });
    }

    point(kind, k) {
      const mark = { anchor: "q", positives: "+", negatives: "−" }[kind] + (kind === "anchor" ? "" : k + 1);
      const label = kind === "anchor" ? "anchor" : `${kind === "positives" ? "positive" : "negative"} ${k + 1}`;
      const slider = { tabindex: 0, role: "slider", "aria-label": label, "aria-valuemin": -180, "aria-valuemax": 180 };
      const made = element("g", { class: `point ${kind}`, "data-point": `${kind} ${k}`, ...slider });
      made.append(element("circle", { r: 22, class: "grip" }), element("circle", { r: 13 }), element("text", {}, mark));
      const move = (angle) => this.move(kind, k, angle);
      made.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: 1, ArrowUp: 1, ArrowRight: -1, ArrowDown: -1 }[event.key];
        if (!by) return;
        event.preventDefault();
        move(this.angleOf(kind, k) + (by * (event.shiftKey ? 15 : 3) * Math.PI) / 180);
      });
      made.addEventListener("pointerdown", (event) => {
        made.setPointerCapture(event.pointerId);
        made.focus({ preventScroll: true });
        event.preventDefault();
      });
      made.addEventListener("pointermove", (event) => {
        if (made.hasPointerCapture(event.pointerId)) move(this.angleAt(event));
      });
      return made;
    }

    angleAt(event) {
      const { left, top, width, height } = this.picture.getBoundingClientRect();
      return Math.atan2(top + height / 2 - event.clientY, event.clientX - left - width / 2);
    }

    angleOf(kind, k) {
      return kind === "anchor" ? this.anchor : this[kind][k];
    }

    move(kind, k, angle) {
      if (kind === "anchor") this.anchor = within(angle);
      else this[kind][k] = within(angle);
      this.draw();
    }

    write(result) {
      const size = Math.hypot(...result.gradient);
      const parts = [["loss", result.loss], ["attraction", result.attraction], ["repulsion", result.repulsion]];
      const texts = parts.map(([name, value]) => `${name} ${signed(value)}`);
      this.numbers.replaceChildren(
        element("b", {}, texts[0]), ` = ${texts[1]} + ${texts[2]}`, element("br"),
        `gradient (${result.gradient.map((value) => signed(value)).join(", ")}), length ${signed(size)}`,
      );
      const rows = [];
      for (const kind of ["positives", "negatives"]) {
        result[kind].forEach(({ attraction, repulsion, slope }, k) => {
          const cosine = Math.cos(this[kind][k] - this.anchor);
          const cells = [cosine, attraction, repulsion, -slope].map((value) => element("td", {}, signed(value)));
          const name = (kind === "positives" ? "+" : "−") + (k + 1);
          rows.push(element("tr", { class: kind }, element("th", { scope: "row" }, name), ...cells));
        });
      }
      this.table.replaceChildren(...rows);
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.getElementById("playground");
    if (root) new Playground(root);
  });
})();
