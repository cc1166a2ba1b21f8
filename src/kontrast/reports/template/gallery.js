"use strict";
// The map of the images and the neighbors of a few of them. Each picture is cut out of one sprite.

const COLORS = 10;

class Gallery {
  constructor(data, runName, image) {
    Object.assign(this, data, { runName, image, cut: new Map() });
    this.labelled = this.points.some((point) => isNumber(point.label));
  }

  className(label) {
    return isNumber(label) ? this.classes?.[label] ?? `class ${label}` : "";
  }

  tileAddress(tile) {
    if (!this.cut.has(tile)) {
      const canvas = element("canvas", { width: this.tile, height: this.tile });
      const [left, top] = [(tile % this.columns) * this.tile, Math.floor(tile / this.columns) * this.tile];
      canvas.getContext("2d").drawImage(this.image, left, top, this.tile, this.tile, 0, 0, this.tile, this.tile);
      this.cut.set(tile, canvas.toDataURL());
    }
    return this.cut.get(tile);
  }

  picture(entry) {
    const label = this.className(entry.label);
    return element("img", { src: this.tileAddress(entry.tile), alt: label ? `${label}: ${entry.name}` : entry.name, title: entry.name, width: this.tile, height: this.tile });
  }
}

// The classes that are picked and the image that is pointed at; every map listens to changes.
class Choice {
  constructor(gallery) {
    const counts = new Map();
    for (const point of gallery.points) if (isNumber(point.label)) counts.set(point.label, (counts.get(point.label) || 0) + 1);
    this.classes = [...counts].sort((a, b) => a[0] - b[0]).map(([label, count]) => ({ label, count, name: gallery.className(label) }));
    this.few = this.classes.length <= COLORS;
    this.listeners = [];
    // Nobody can distinguish a hundred colors: beyond ten classes, only the picked ones have one, initially the six largest.
    this.picked = this.few ? [] : [...this.classes].sort((a, b) => b.count - a.count).slice(0, 6).map((one) => one.label);
  }

  color(label) {
    if (!isNumber(label)) return this.classes.length ? "var(--dim)" : "var(--c0)";
    const place = this.few ? this.classes.findIndex((one) => one.label === label) : this.picked.indexOf(label);
    return place < 0 ? "var(--dim)" : `var(--c${place % COLORS})`;
  }

  muted(label) {
    return this.picked.length > 0 && !this.picked.includes(label);
  }

  named(label) {
    return this.picked.length ? this.picked.includes(label) : this.few;
  }

  toggle(label) {
    this.picked = this.picked.includes(label) ? this.picked.filter((one) => one !== label) : [...this.picked, label].slice(-COLORS);
    this.tell();
  }

  clear() {
    this.picked = [];
    this.tell();
  }

  tell(looked) {
    for (const listener of this.listeners) listener(looked);
  }
}

function classLegend(choice) {
  const list = element("div", { class: "legend" });
  const clear = element("button", { type: "button", text: "all", onclick: () => choice.clear() });
  const buttons = choice.classes.map(({ label, count, name }) => {
    const swatch = element("i", { class: "swatch" });
    const button = element("button", { type: "button", onclick: () => choice.toggle(label) }, swatch, name, element("small", { text: String(count) }));
    list.append(button);
    return { label, name, button, swatch };
  });
  const update = () => {
    clear.hidden = choice.picked.length === 0;
    clear.textContent = choice.few ? "show all" : "clear";
    for (const { label, button, swatch } of buttons) {
      button.setAttribute("aria-pressed", String(choice.picked.includes(label)));
      swatch.style.background = choice.color(label);
    }
  };
  choice.listeners.push((looked) => looked || update());
  update();
  const side = element("div", { class: "side" }, element("div", { class: "headed" }, element("h3", { text: "Classes" }), clear));
  if (!choice.few) {
    side.append(element("input", { type: "search", placeholder: `find among ${choice.classes.length}`, "aria-label": "Find a class", oninput: (event) => {
      const wanted = event.target.value.toLowerCase();
      for (const { name, button } of buttons) button.hidden = !name.toLowerCase().includes(wanted);
    } }));
  }
  side.append(list);
  return side;
}

function mapFigure(gallery, choice, several) {
  const title = several ? gallery.runName : gallery.labelled ? "Do the classes separate, although training saw no labels?" : "Are similar images close together?";
  const pictures = element("button", { type: "button", "aria-pressed": String(!gallery.labelled), text: "pictures" });
  const box = element("div", { class: "canvas" });
  const figure = element("figure", { class: "plot map" },
    element("div", { class: "headed" }, element("h3", { text: title }),
      element("div", { class: "actions" }, pictures, csvButton(`map-${gallery.runName}`, title, () => mapRows(gallery)))),
    element("p", { class: "quiet", text: `${gallery.points.length.toLocaleString("en-US")} images placed by ${gallery.method || "projection"}${several ? "." : "; distances are meaningful, the axes are not."}` }),
    box);
  const map = { gallery, choice, box, pictures: !gallery.labelled, at: -1 };
  whenSized(box, (width) => drawMap(map, width));
  pictures.addEventListener("click", () => {
    map.pictures = !map.pictures;
    pictures.setAttribute("aria-pressed", String(map.pictures));
    drawMap(map, map.width);
  });
  choice.listeners.push((looked) => (looked ? echo(map, looked) : map.width && drawMap(map, map.width)));
  return figure;
}

function mapRows(gallery) {
  return [["name", "class", "x", "y"], ...gallery.points.map((point) => [point.name, gallery.className(point.label), point.x, point.y])];
}

function drawMap(map, width) {
  const { gallery, choice, box } = map;
  const height = Math.round(Math.min(width * 0.8, Math.max(320, width * 0.66), 580));
  const root = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "application",
    "aria-label": `Map of ${gallery.points.length} images. Use the arrow keys to move between images.` });
  const reach = (axis) => [Math.min(...gallery.points.map((p) => p[axis])), Math.max(...gallery.points.map((p) => p[axis]))];
  const fit = ([low, high], size) => (value) => (high > low ? 22 + ((value - low) / (high - low)) * (size - 44) : size / 2);
  const [x, y] = [fit(reach("x"), width), fit(reach("y"), height)];
  map.width = width;
  map.places = gallery.points.map((point) => [x(point.x), y(point.y)]);
  const order = gallery.points.map((_, i) => i).sort((a, b) => choice.muted(gallery.points[b].label) - choice.muted(gallery.points[a].label));
  const radius = Math.max(2.1, Math.min(4.2, (width / 190) * Math.sqrt(1000 / Math.max(250, gallery.points.length))));
  for (const i of order) root.append(dot(map, i, radius));
  for (const { label, name } of choice.classes) {
    if (!choice.named(label)) continue;
    const [left, top] = middle(map, label);
    root.append(shape("text", { class: "class halo", x: left, y: top, text: name.length > 24 ? `${name.slice(0, 23)}…` : name }));
  }
  map.ring = shape("g", { "pointer-events": "none" });
  map.tip = element("div", { class: "tip preview", hidden: true });
  map.spoken = element("div", { class: "sr", "aria-live": "polite" });
  root.append(map.ring);
  box.replaceChildren(root, map.tip, map.spoken);
  listen(map, root);
}

function dot(map, i, radius) {
  const { gallery, choice } = map, point = gallery.points[i], [left, top] = map.places[i];
  const muted = choice.muted(point.label) ? " muted" : "";
  if (!map.pictures) return shape("circle", { class: `point${muted}`, cx: left.toFixed(1), cy: top.toFixed(1), r: radius.toFixed(1), style: { fill: choice.color(point.label) } });
  const size = Math.max(13, radius * 5);
  return shape("image", { class: muted, href: gallery.tileAddress(point.tile), x: left - size / 2, y: top - size / 2, width: size, height: size });
}

// The position of a class name: the member nearest to the median, so that it is on the class and not between two parts of it.
function middle({ gallery, places }, label) {
  const members = places.filter((_, i) => gallery.points[i].label === label);
  const median = [0, 1].map((axis) => members.map((place) => place[axis]).sort((a, b) => a - b)[members.length >> 1]);
  return members.reduce((best, place) => (Math.hypot(place[0] - median[0], place[1] - median[1]) < Math.hypot(best[0] - median[0], best[1] - median[1]) ? place : best));
}

function listen(map, root) {
  const follow = (event) => {
    const frame = root.getBoundingClientRect();
    const near = nearestPlace(map, [event.clientX - frame.left, event.clientY - frame.top], 34);
    if (near >= 0) look(map, near);
    else leave(map);
  };
  root.addEventListener("pointermove", follow);
  root.addEventListener("pointerdown", follow);
  root.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && leave(map));
  root.addEventListener("blur", () => leave(map));
  root.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") leave(map);
    if (!way) return;
    event.preventDefault();
    look(map, map.at < 0 ? nearestPlace(map, [map.width / 2, root.clientHeight / 2], Infinity) : step(map, way));
  });
}

function nearestPlace(map, [left, top], within) {
  let best = -1, least = within;
  map.places.forEach((place, i) => {
    const far = Math.hypot(place[0] - left, place[1] - top) + (map.choice.muted(map.gallery.points[i].label) ? 12 : 0);
    if (far < least) [best, least] = [i, far];
  });
  return best;
}

// The next point in a direction: near, and not far from the straight line.
function step(map, way) {
  const from = map.places[map.at];
  let best = map.at, least = Infinity;
  map.places.forEach((place, i) => {
    const [dx, dy] = [place[0] - from[0], place[1] - from[1]];
    const ahead = dx * way[0] + dy * way[1], aside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
    if (ahead > 0.5 && ahead + 2.5 * aside < least) [best, least] = [i, ahead + 2.5 * aside];
  });
  return best;
}

function look(map, i) {
  if (i < 0 || (i === map.at && !map.tip.hidden)) return;
  map.at = i;
  const point = map.gallery.points[i], [left, top] = map.places[i], label = map.gallery.className(point.label);
  map.ring.replaceChildren(shape("circle", { class: "ring", cx: left, cy: top, r: map.pictures ? 13 : 7.5 }));
  map.tip.replaceChildren(map.gallery.picture(point));
  if (label) map.tip.append(element("span", {}, element("i", { class: "swatch", style: { background: map.choice.color(point.label) } }), element("b", { text: label })));
  map.tip.append(element("span", { class: "quiet", text: point.name }));
  placeTip(map.tip, map.box, left, top);
  map.spoken.textContent = label ? `${label}, ${point.name}` : point.name;
  map.choice.tell({ map, name: point.name });
}

// Mark the same image on the maps of the other runs.
function echo(map, { map: source, name }) {
  if (map === source || !map.ring) return;
  const i = map.gallery.points.findIndex((point) => point.name === name);
  map.ring.replaceChildren(...(i < 0 ? [] : [shape("circle", { class: "ring", cx: map.places[i][0], cy: map.places[i][1], r: 7.5 })]));
}

function leave(map) {
  if (map.tip.hidden) return;
  map.ring.replaceChildren();
  map.tip.hidden = true;
  map.choice.tell({ map, name: null });
}

function neighborList(gallery) {
  const list = element("ol", { class: "queries" });
  for (const query of gallery.queries) {
    const label = gallery.className(query.label);
    const near = element("ol", { class: "near" });
    for (const other of query.neighbours) near.append(neighbor(gallery, query, other));
    list.append(element("li", { class: "query" },
      element("div", {}, gallery.picture(query), label ? element("span", { class: "cut", title: label, text: label }) : null,
        element("span", { class: "cut quiet", title: query.name, text: query.name })), near));
  }
  return list;
}

function neighbor(gallery, query, other) {
  const known = isNumber(query.label) && isNumber(other.label), right = query.label === other.label;
  const label = gallery.className(other.label);
  const badge = known ? element("span", { class: "badge", role: "img", "aria-label": right ? "same class" : "other class", text: right ? "✓" : "✕" }) : null;
  return element("li", { class: known ? (right ? "right" : "wrong") : "" },
    element("div", { class: "frame" }, gallery.picture(other), badge),
    label ? element("span", { class: "cut", title: label, text: label }) : null,
    element("span", { class: "cut", title: "cosine similarity", text: isNumber(other.similarity) ? other.similarity.toFixed(2) : "" }));
}

function neighborRows(gallery) {
  const rows = [["query", "query class", "rank", "neighbor", "neighbor class", "cosine"]];
  for (const query of gallery.queries) {
    query.neighbours.forEach((other, i) => rows.push([query.name, gallery.className(query.label), i + 1, other.name, gallery.className(other.label), other.similarity]));
  }
  return rows;
}

function neighborSentence(gallery) {
  const where = gallery.neighbours_from === "train" ? "training images" : "other images";
  const pairs = gallery.queries.flatMap((query) => query.neighbours.map((other) => [query.label, other.label])).filter(([a, b]) => isNumber(a) && isNumber(b));
  const drawn = `Random queries${pairs.length ? " from each class" : ""} and their nearest ${where} by cosine similarity, nearest first.`;
  if (!pairs.length) return drawn;
  return `${pairs.filter(([a, b]) => a === b).length} of the ${pairs.length} neighbors shown have the class of their query (✓). ${drawn}`;
}
