"use strict";
// Draws a plot (reports/curves.py describes its form): lines with bands, or bars. Hover, touch and arrow keys read its values.

const LINES = 8;
const DASHES = ["", "6 4", "2 3"];
const runColor = (run) => `var(--l${(run ?? 0) % LINES})`;
const runDash = (run) => DASHES[Math.floor((run ?? 0) / LINES) % DASHES.length];

function plotFigure(plot) {
  const many = plot.series.length > 1;
  const box = element("div", { class: "canvas" });
  const figure = element("figure", { class: "plot" },
    element("div", { class: "headed" }, element("h3", { text: plot.title }),
      csvButton(plot.id || plot.title, plot.title, () => plotRows(plot))),
    element("p", { class: "quiet", text: [plot.of ? `${plot.of}:` : "", plot.note].filter(Boolean).join(" ") }),
    box);
  if (many && plot.series.some((one) => one.run === null || one.run === undefined)) {
    plot.series.forEach((one, i) => (one.run = i));
    figure.insertBefore(lineLegend(plot.series.map((one) => one.name), () => {}), box);
  }
  whenSized(box, (width) => drawPlot(box, plot, width));
  return figure;
}

function plotRows(plot) {
  const rows = [["series", plot.x.label, plot.y.label, "low", "high"]];
  for (const one of plot.series) one.x.forEach((x, i) => rows.push([one.name, x, one.y[i], one.low?.[i], one.high?.[i]]));
  return rows;
}

function scales(plot, width, height) {
  const all = (key) => plot.series.flatMap((one) => one[key] || []).filter(isNumber);
  const xs = all("x"), ys = [...all("y"), ...all("low"), ...all("high"), ...(plot.references || []).map((line) => line.y)];
  const log = Boolean(plot.y.log) && Math.min(...ys) > 0;
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (plot.x.zero) x0 = Math.min(0, x0);
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  if (plot.kind === "bars" || plot.y.zero) [y0, y1] = [Math.min(0, y0), Math.max(0, y1)];
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.1, y1 + (Math.abs(y1) || 1) * 0.1];
  const room = (y1 - y0) * 0.06;
  const below = (plot.references || []).length > 1 ? 2.2 * room : room;  // space for a label under the lowest dashed line
  if (!log) [y0, y1] = [y0 === 0 ? 0 : y0 - below, y1 + room];
  if (plot.y.format === "percent") [y0, y1] = [Math.max(0, y0), Math.min(1, y1)];
  const yTicks = log ? logTicks(y0, y1) : ticks(y0, y1, 4);
  const format = plot.y.format === "percent" ? (value) => `${Number((100 * value).toFixed(1))}%` : formatNumber;
  const left = Math.max(34, 10 + 6.9 * Math.max(...yTicks.map((value) => format(value).length)));
  const inner = { left, right: width - 10, top: 24, bottom: height - 34 };
  const half = plot.kind === "bars" && xs.length > 1 ? (x1 - x0) / (new Set(xs).size - 1) / 2 : 0;
  const x = (value) => inner.left + ((value - x0 + half) / (x1 - x0 + 2 * half)) * (inner.right - inner.left);
  const level = log ? (value) => Math.log(value / y0) / Math.log(y1 / y0) : (value) => (value - y0) / (y1 - y0);
  const y = (value) => inner.bottom - level(value) * (inner.bottom - inner.top);
  return { inner, x, y, x0, x1, yTicks, format, half };
}

function drawPlot(box, plot, width) {
  const height = 218;
  const scale = scales(plot, width, height);
  const { inner, x, y } = scale;
  const root = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
    "aria-label": `${plot.title}. Use the arrow keys to read the values.` });
  for (const value of scale.yTicks) {
    root.append(shape("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(value), y2: y(value) }),
      shape("text", { x: inner.left - 8, y: y(value) + 4, "text-anchor": "end", text: scale.format(value) }));
  }
  for (const value of ticks(scale.x0, scale.x1, Math.max(2, Math.floor(width / 55)), plot.x.whole)) {
    root.append(shape("line", { class: "axis", x1: x(value), x2: x(value), y1: inner.bottom, y2: inner.bottom + 4 }),
      shape("text", { x: Math.min(x(value), width - 3.6 * formatNumber(value).length), y: inner.bottom + 17, "text-anchor": "middle", text: formatNumber(value) }));
  }
  root.append(shape("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }),
    shape("text", { x: inner.left - 8, y: 11, "text-anchor": "start", dx: -scale.inner.left + 8, text: plot.y.label + (plot.y.log ? ", log scale" : "") }),
    shape("text", { x: inner.right, y: height - 2, "text-anchor": "end", text: plot.x.label }));
  plot.series.forEach((one, place) => root.append(plot.kind === "bars" ? bars(one, place, plot, scale) : line(one, scale)));
  root.append(...references(plot.references || [], scale));
  const cursor = shape("g", { "pointer-events": "none" });
  const tip = element("div", { class: "tip", hidden: true });
  const spoken = element("div", { class: "sr", "aria-live": "polite" });
  root.append(cursor);
  box.replaceChildren(root, tip, spoken);
  readOut(box, root, cursor, tip, spoken, plot, scale);
}

function line(one, { x, y }) {
  const group = shape("g", { "data-run": one.run ?? 0 });
  const good = one.x.map((_, i) => i).filter((i) => isNumber(one.y[i]));
  if (one.low && one.high && good.length) {
    const upper = good.map((i) => `${x(one.x[i]).toFixed(1)},${y(one.high[i]).toFixed(1)}`);
    const lower = good.map((i) => `${x(one.x[i]).toFixed(1)},${y(one.low[i]).toFixed(1)}`).reverse();
    group.append(shape("polygon", { class: "band", points: [...upper, ...lower].join(" "), style: { fill: runColor(one.run) } }));
  }
  let path = "";
  one.x.forEach((value, i) => {
    if (isNumber(one.y[i])) path += `${i > 0 && isNumber(one.y[i - 1]) ? "L" : "M"}${x(value).toFixed(1)} ${y(one.y[i]).toFixed(1)}`;
  });
  group.append(shape("path", { class: "line", d: path, style: { stroke: runColor(one.run), strokeDasharray: runDash(one.run) } }));
  if (good.length <= 12) {
    for (const i of good) group.append(shape("circle", { cx: x(one.x[i]), cy: y(one.y[i]), r: 2.8, style: { fill: runColor(one.run) } }));
  }
  return group;
}

function bars(one, place, plot, { x, y, half, inner }) {
  const group = shape("g", { "data-run": one.run ?? 0 });
  const step = half ? x(2 * half) - x(0) : (inner.right - inner.left) / 2;
  const wide = (step * 0.86) / plot.series.length;
  one.x.forEach((value, i) => {
    if (!isNumber(one.y[i])) return;
    const top = Math.min(y(0), y(one.y[i]));
    group.append(shape("rect", { x: x(value) - (wide * plot.series.length) / 2 + place * wide, y: top, width: Math.max(0.5, wide),
      height: Math.abs(y(0) - y(one.y[i])), style: { fill: runColor(one.run) } }));
  });
  return group;
}

// The positions of the labels of dashed lines, from the top down: above the line, else below it, else at the nearest position that is inside the plot
// and free of lines and other labels. They are sorted, so that the labels keep the order of their lines.
function labelPlaces(lines, bottom) {
  const [up, down] = [10, 3];
  const taken = lines.map((y) => [y - 1, y + 1]);
  const free = (place) => place - up > 0 && place + down < bottom && taken.every(([top, end]) => end < place - up || place + down < top);
  const further = Array.from({ length: 100 }, (_, i) => [-6 - i, 14 + i]).flat();
  for (const y of lines) {
    const place = y + ([-5, 13, ...further].find((by) => free(y + by)) ?? -5);
    taken.push([place - up, place + down]);
  }
  return taken.slice(lines.length).map(([top]) => top + up).sort((a, b) => a - b);
}

function references(marks, { inner, y, format }) {
  const sorted = [...marks].sort((a, b) => b.y - a.y);
  const places = labelPlaces(sorted.map((mark) => y(mark.y)), inner.bottom);
  return [...sorted.map((mark) => shape("line", { class: "reference", x1: inner.left, x2: inner.right, y1: y(mark.y), y2: y(mark.y) })),
    ...sorted.map((mark, i) => shape("text", { class: "halo", x: inner.right - 2, y: places[i], "text-anchor": "end", text: `${mark.label} ${format(mark.y)}` }))];
}

// Shows the values at the nearest x of any series, by pointer or by arrow keys.
function readOut(box, root, cursor, tip, spoken, plot, scale) {
  const places = [...new Set(plot.series.flatMap((one) => one.x))].filter(isNumber).sort((a, b) => a - b);
  const exact = plot.y.format === "percent" ? formatPercent : formatNumber;
  let at = -1;
  function show(index) {
    at = Math.max(0, Math.min(places.length - 1, index));
    const value = places[at];
    const rows = plot.series.map((one) => ({ one, i: nearestIndex(one.x, value) }))
      .filter(({ one, i }) => i >= 0 && isNumber(one.y[i]) && Math.abs(one.x[i] - value) <= (places.at(-1) - places[0]) / 50);
    cursor.replaceChildren(shape("line", { class: "hair", x1: scale.x(value), x2: scale.x(value), y1: scale.inner.top, y2: scale.inner.bottom }));
    tip.replaceChildren(element("b", { text: `${plot.x.label} ${formatNumber(value)}` }));
    for (const { one, i } of rows) {
      if (plot.kind !== "bars") cursor.append(shape("circle", { cx: scale.x(one.x[i]), cy: scale.y(one.y[i]), r: 4, style: { fill: runColor(one.run) } }));
      const label = plot.series.length > 1 ? one.name : plot.y.label;
      const swatch = element("span", {}, plot.series.length > 1 ? element("i", { class: "swatch", style: { background: runColor(one.run) } }) : null, label);
      tip.append(element("div", { class: "row" }, swatch, element("span", { text: exact(one.y[i]) })));
    }
    placeTip(tip, box, scale.x(value), scale.inner.top + 40);
    spoken.textContent = tip.innerText.replaceAll("\n", ", ");
  }
  function hide() {
    cursor.replaceChildren();
    tip.hidden = true;
  }
  function follow(event) {
    const left = event.clientX - root.getBoundingClientRect().left;
    show(nearestIndex(places.map(scale.x), left));
  }
  root.addEventListener("pointermove", follow);
  root.addEventListener("pointerdown", follow);
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    show(at < 0 ? 0 : at + step);
  });
}

function nearestIndex(values, target) {
  let best = -1;
  values.forEach((value, i) => {
    if (isNumber(value) && (best < 0 || Math.abs(value - target) < Math.abs(values[best] - target))) best = i;
  });
  return best;
}

// A legend of runs: pressing a run calls picked(run), pressing it again calls picked(null).
function lineLegend(names, picked) {
  const buttons = names.map((name, run) => {
    const stroke = element("i", { class: "dash", style: { borderTopColor: runColor(run), borderTopStyle: runDash(run) ? "dashed" : "solid" } });
    return element("button", { type: "button", "aria-pressed": "false", onclick: (event) => {
      const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
      for (const button of buttons) button.setAttribute("aria-pressed", "false");
      event.currentTarget.setAttribute("aria-pressed", String(on));
      picked(on ? run : null);
    } }, stroke, name);
  });
  return element("div", { class: "legend" }, ...buttons);
}
