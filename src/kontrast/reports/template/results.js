"use strict";
// The results beside their controls: one table of bars per probe, with intervals and numbers.

function resultGroup(group, runs) {
  const several = runs.length > 1;
  const whole = group.rows.filter((row) => !row.single);
  const trained = whole.filter((row) => row.features === "trained");
  const rows = several && trained.length ? trained : group.rows;
  const body = element("tbody");
  for (const row of rows) body.append(resultRow(row, group, several, runs));
  const how = [...new Set(whole.map((row) => row.protocol).filter(Boolean))];
  const tested = Math.max(0, ...group.rows.map((row) => row.n || 0));
  const intervals = group.rows.some((row) => isNumber(row.low)) ? `whiskers: 95% interval over ${[...new Set(rows.map((row) => row.over))].join(" or ")}` : "";
  const chance = isNumber(group.chance) ? `dashed: chance, ${formatPercent(group.chance)}` : "";
  const note = [tested ? `${tested.toLocaleString("en-US")} test images` : "", intervals, chance, how.length === 1 ? how[0] : ""];
  const title = `Accuracy, ${group.title}`;
  const lead = several ? null : trained[0];
  if (lead && isNumber(lead.top5)) note.push(`top-5 of the trained encoder ${formatPercent(lead.top5)}`);
  if (lead && isNumber(lead.mean_per_class)) note.push(`mean over classes ${formatPercent(lead.mean_per_class)}`);
  return element("div", { class: "probe" },
    element("div", { class: "headed" }, element("h3", { text: title }), csvButton(group.probe, title, () => resultRows(group, runs))),
    element("table", { class: "bars" }, element("caption", { class: "sr", text: title }), body),
    several && trained.length < whole.length ? pinKey(group) : null,
    element("p", { class: "quiet", text: note.filter(Boolean).join(" · ") }),
    group.classes ? classDetails(group) : null);
}

// Accuracy by class, folded up.
function classDetails(group) {
  const { columns, rows } = group.classes;
  const label = `Accuracy by class, ${group.title}`;
  return element("details", {}, element("summary", { class: "quiet", text: "by class" }),
    csvButton(`${group.probe}-classes`, label, () => [columns, ...rows]),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      element("table", { class: "table" }, element("thead", {}, element("tr", {}, ...columns.map((text) => element("th", { scope: "col", text })))),
        element("tbody", {}, ...rows.map(([first, ...rest]) => element("tr", {}, element("th", { scope: "row", text: first }), ...rest.map((text) => element("td", { text }))))))));
}

function resultRow(row, group, several, runs) {
  const track = element("div", { class: "track" }, element("div", { class: "bar", style: { width: `${100 * row.accuracy}%` } }));
  if (several) track.firstChild.style.background = runColor(row.run);
  if (isNumber(group.chance)) track.append(element("div", { class: "chance", style: { left: `${100 * group.chance}%` } }));
  if (isNumber(row.low) && isNumber(row.high)) {
    track.append(element("div", { class: "whisker", style: { left: `${100 * row.low}%`, width: `${100 * (row.high - row.low)}%` } }));
  }
  const controls = several ? group.rows.filter((other) => other.run === row.run && other.features !== "trained" && !other.single) : [];
  for (const control of controls) {
    const label = `${control.label} ${formatPercent(control.accuracy)}`;
    track.append(element("div", { class: `pin ${control.features}`, title: label, role: "img", "aria-label": label, style: { left: `${100 * control.accuracy}%` } }));
  }
  const name = several ? runs[row.run].name : row.label;
  return element("tr", { class: row.single ? "single" : row.features === "trained" && !several ? "lead-row" : "" },
    element("th", { scope: "row" }, element("span", { class: "name", title: name, text: name })),
    element("td", {}, track),
    element("td", {}, element("span", { class: "value", text: formatPercent(row.accuracy) }),
      rangeText(row)));
}

function rangeText(row) {
  if (!isNumber(row.low) || !isNumber(row.high)) return null;
  return element("span", { class: "range", text: `${(100 * row.low).toFixed(1)}–${(100 * row.high).toFixed(1)}` });
}

function pinKey(group) {
  const labels = new Map(group.rows.filter((row) => row.features !== "trained").map((row) => [row.features, row.label]));
  const line = element("p", { class: "quiet pins" });
  for (const [features, label] of labels) line.append(element("span", {}, element("i", { class: `pin key ${features}` }), label));
  return line;
}

function resultRows(group, runs) {
  const rows = [["run", "probe", "features", "seed", "accuracy", "low", "high", "interval over", "test images", "top-5", "mean over classes", "protocol"]];
  for (const row of group.rows) rows.push([runs[row.run].name, group.probe, row.features, row.over === "seeds" ? "mean" : row.seed, row.accuracy, row.low, row.high, row.over, row.n, row.top5, row.mean_per_class, row.protocol]);
  return rows;
}

// One row per run: the accuracy of every probe beside both controls.
function resultTable(data) {
  const columns = data.results.flatMap((group) => ["trained", "starting weights", "untrained", "pixels"].map((features) => ({ group, features })))
    .filter(({ group, features }) => group.rows.some((row) => row.features === features));
  const words = { trained: "", "starting weights": ", starting weights", untrained: ", untrained", pixels: ", raw pixels" };
  const head = element("tr", {}, element("th", { scope: "col", text: "run" }), element("th", { scope: "col", text: "setup" }));
  for (const { group, features } of columns) head.append(element("th", { scope: "col", text: group.title + words[features] }));
  const body = element("tbody");
  data.runs.forEach((run, place) => {
    const line = element("tr", {}, element("th", { scope: "row", text: run.name }), element("td", { class: "what", text: run.summary + (run.finished ? "" : " (unfinished)") }));
    for (const { group, features } of columns) {
      const row = group.rows.find((one) => one.run === place && one.features === features && !one.single);
      line.append(element("td", {}, row ? formatPercent(row.accuracy) : "–", row ? rangeText(row) : null));
    }
    body.append(line);
  });
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Results side by side" },
    element("table", { class: "table" }, element("thead", {}, head), body));
}
