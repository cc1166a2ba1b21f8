"use strict";
// Builds the page from its data. A section appears only if there is something to show.

// File names may contain bytes that are not text, which are shown as replacement characters.
const shown = (key, value) => (typeof value === "string" && value.toWellFormed ? value.toWellFormed() : value);
const data = JSON.parse(document.getElementById("data").textContent, shown);
const page = document.getElementById("page");
const contents = element("nav", { "aria-label": "Contents" });

function section(id, title, lead, ...children) {
  contents.append(element("a", { href: `#${id}`, text: title }));
  return element("section", { id }, element("h2", { text: title }), lead ? element("p", { class: "lead", text: lead }) : null, ...children);
}

function header() {
  const mark = shape("svg", { width: 27, height: 18, viewBox: "0 0 27 18", "aria-hidden": "true" },
    shape("circle", { cx: 9, cy: 9, r: 7.5, style: { fill: "var(--accent)" } }),
    shape("circle", { cx: 18, cy: 9, r: 7.5, style: { fill: "none", stroke: "var(--ink)", strokeWidth: "1.6" } }));
  const several = data.runs.length > 1;
  const text = element("div", {}, element("h1", { text: data.title }), element("p", { class: "verdict", text: data.verdict }),
    several || !data.runs.length ? null : element("p", { class: "quiet", text: data.runs[0].summary }));
  for (const problem of data.study?.problems || []) text.append(element("p", { class: "note", text: problem }));
  for (const run of data.runs) {
    for (const problem of run.problems) text.append(element("p", { class: "note", text: several ? `${run.name}: ${problem}` : problem }));
  }
  const results = element("div", {}, ...data.results.map((group) => resultGroup(group, data.runs)));
  page.replaceChildren(element("div", { class: "top" }, element("div", { class: "mark" }, mark, "kontrast"), contents),
    element("div", { class: data.results.length ? "hero" : "hero alone" }, text, data.results.length ? results : null));
}

function tableParts(table) {
  return [
    element("div", { class: "headed", style: { marginTop: "1.8rem" } }, element("h3", { text: table.title }), csvButton(table.title, table.title, () => [table.columns, ...table.rows])),
    table.note ? element("p", { class: "quiet", text: table.note }) : null,
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": table.title },
      element("table", { class: "table" }, element("thead", {}, element("tr", {}, ...table.columns.map((text) => element("th", { scope: "col", text })))),
        element("tbody", {}, ...table.rows.map(([first, ...rest]) => element("tr", {}, element("th", { scope: "row", text: first }), ...rest.map((text) => element("td", { text }))))))),
  ];
}

function transferSection() {
  const parts = data.runs.flatMap((run) => run.transfer.flatMap((table) => [
    ...tableParts(data.runs.length > 1 ? { ...table, title: `${table.title}, ${run.name}` } : table),
    table.picture ? element("figure", {}, element("img", { src: table.picture, alt: table.picture_note, style: { maxWidth: "100%" } }),
      element("figcaption", { class: "quiet", text: table.picture_note })) : null,
  ]));
  if (parts.length) page.append(section("transfer", "Transfer", "What the encoder does in other tasks, next to the same encoder with random weights.", ...parts));
}

function studySection() {
  const { kind, tables, plots } = data.study;
  const made = tables.flatMap(tableParts);
  page.append(section("study", kind[0].toUpperCase() + kind.slice(1), "", plots.length ? element("div", { class: "plots" }, ...plots.map(plotFigure)) : null, ...made));
}

function curveSection() {
  const shaded = data.curves.some((plot) => plot.series.some((one) => one.low));
  const lead = "Point at a curve to read its values." + (shaded ? " Each point of a shaded line is the mean over several steps; the shade spans their minimum and maximum." : "");
  const grid = element("div", { class: "plots" }, ...data.curves.map(plotFigure));
  if (data.runs.length === 1) return page.append(section("training", "Training", lead, grid));
  const legend = lineLegend(data.runs.map((run) => run.name), (picked) => {
    for (const group of grid.querySelectorAll("[data-run]")) group.classList.toggle("faint", picked !== null && group.dataset.run !== String(picked));
  });
  const lengths = data.curves.flatMap((plot) => plot.series.map((one) => one.x.at(-1)));
  if (Math.max(...lengths) > 1.5 * Math.min(...lengths)) {
    legend.append(element("button", { type: "button", "aria-pressed": "false", text: "align by progress", onclick: (event) => {
      const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", String(on));
      grid.replaceChildren(...(on ? data.curves.map(asShare) : data.curves).map(plotFigure));
    } }));
  }
  page.append(section("training", "Training", lead, legend, grid));
}

// Stretches runs of different lengths to the same width.
function asShare(plot) {
  const series = plot.series.map((one) => ({ ...one, x: one.x.map((x) => (100 * x) / (one.x.at(-1) || 1)) }));
  return { ...plot, x: { label: "% of the run", zero: true, whole: true }, series };
}

// One row per number and one column per run, with one explanation per row.
function numbersTable() {
  if (!data.numbers.length) return null;
  const looked = [...new Set(data.numbers.map((entry) => entry.run))];
  const names = [...new Set(data.numbers.map((entry) => entry.name))];
  const found = (name, run) => data.numbers.find((entry) => entry.name === name && entry.run === run);
  const note = (name) => data.numbers.find((entry) => entry.name === name).note;
  const rows = names.map((name) => element("tr", {}, element("th", { scope: "row", text: name }),
    ...looked.map((run) => element("td", { text: formatNumber(found(name, run)?.value) })), element("td", { class: "quiet", text: note(name) })));
  const heads = ["number", ...looked.map((run) => (data.runs.length > 1 ? data.runs[run].name : "value")), "meaning"];
  const listed = () => [["run", "number", "value", "meaning"], ...data.numbers.map((entry) => [data.runs[entry.run].name, entry.name, entry.value, entry.note])];
  return element("div", { class: "numbers" }, element("div", { class: "headed" }, element("h3", { text: "The lens in numbers" }), csvButton("lens", "The lens in numbers", listed)),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The lens in numbers" }, element("table", { class: "table" },
      element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { scope: "col", text })))), element("tbody", {}, ...rows))));
}

async function loadGalleries() {
  const loaded = [];
  for (const run of data.runs) {
    if (!run.gallery) continue;
    const image = new Image();
    image.src = run.gallery.sprite;
    await image.decode();
    loaded.push(new Gallery(run.gallery, run.name, image));
  }
  return loaded;
}

function mapSection(galleries) {
  const several = galleries.length > 1;
  const choice = new Choice(galleries[0]);
  const maps = element("div", { class: several ? "maps several" : "maps" }, ...galleries.map((gallery) => mapFigure(gallery, choice, several)));
  if (choice.classes.length) maps.append(classLegend(choice));
  else maps.style.gridTemplateColumns = several ? "" : "minmax(0, 1fr)";
  page.append(section("map", "Map", several ? "Point at an image to see it and to find it on the other maps. Distances are meaningful, the axes are not."
    : `Point at an image, touch it or use the arrow keys to see it.${choice.classes.length ? " Select classes to highlight them." : ""}`, maps));
}

function neighborSection(galleries) {
  const asked = galleries.filter((gallery) => gallery.queries.length);
  if (!asked.length) return;
  const sentence = element("p", { class: "lead" });
  const place = element("div");
  const actions = element("div", { class: "actions" });
  const show = (gallery) => {
    sentence.textContent = neighborSentence(gallery);
    place.replaceChildren(neighborList(gallery));
    actions.replaceChildren(csvButton(`neighbors-${gallery.runName}`, "Neighbors", () => neighborRows(gallery)));
  };
  const tabs = element("div", { class: "legend" });
  asked.forEach((gallery, i) => tabs.append(element("button", { type: "button", "aria-pressed": String(i === 0), text: gallery.runName, onclick: (event) => {
    for (const tab of tabs.children) tab.setAttribute("aria-pressed", String(tab === event.currentTarget));
    show(gallery);
  } })));
  show(asked[0]);
  const made = section("neighbors", "Neighbors", "", sentence, asked.length > 1 ? tabs : null, place);
  made.insertBefore(element("div", { class: "headed" }, made.firstChild, actions), made.firstChild);
  page.append(made);
}

function factList(run) {
  const list = element("dl");
  for (const [label, value] of run.facts) list.append(element("dt", { text: label }), element("dd", { class: label === "command" ? "code" : "", text: value }));
  return list;
}

function recipeSection() {
  if (!data.runs.length) return;
  if (data.runs.length === 1) {
    const [run] = data.runs;
    const facts = element("div", {}, element("h2", { text: "Run" }), element("p", { class: "lead", text: run.finished ? "What was run, on which machine, and for how long." : "This run has not finished." }), factList(run));
    const recipe = section("recipe", "Recipe", "Every setting, as resolved for this run.", element("pre", { tabindex: 0, text: run.recipe || "The folder contains no recipe.toml." }));
    page.append(element("div", { class: "split" }, recipe, element("section", { id: "run" }, ...facts.children)));
    return;
  }
  const head = element("tr", {}, element("th", { scope: "col", text: "setting" }), ...data.runs.map((run) => element("th", { scope: "col", text: run.name })));
  const rows = data.differences.map(([key, ...values]) => element("tr", {}, element("th", { scope: "row", text: key }), ...values.map((value) => element("td", { text: value || "–" }))));
  const table = rows.length ? element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Settings that differ" },
    element("table", { class: "table" }, element("thead", {}, head), element("tbody", {}, ...rows))) : null;
  page.append(section("recipe", "Recipes", rows.length ? "The settings in which the runs differ; the complete recipes are below." : "The recipes do not differ.", table,
    ...data.runs.map((run) => element("details", {}, element("summary", { text: run.name }),
      element("div", { class: "split" }, element("pre", { tabindex: 0, text: run.recipe || "The folder contains no recipe.toml." }), factList(run))))));
}

async function build() {
  header();
  if (data.study) studySection();
  if (data.runs.length > 1 && data.results.length) page.append(section("table", "Side by side", "", resultTable(data)));
  if (data.classifier) classifierSection(data.classifier);
  transferSection();
  if (data.curves.length) curveSection();
  const galleries = await loadGalleries();
  if (galleries.length && galleries[0].points.length) mapSection(galleries);
  neighborSection(galleries);
  await textSections();
  if (data.lens.length || data.numbers.length) {
    page.append(section("lens", "Lens", "Properties of the representation itself, independent of any probe.",
      data.lens.length ? element("div", { class: "plots" }, ...data.lens.map(plotFigure)) : null,
      weightsGrid(data.weights, data.runs), numbersTable()));
  }
  recipeSection();
  page.append(element("footer", {}, element("p", { class: "quiet", text: "Made by kontrast. This page is self-contained and loads nothing from the network." })));
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
  document.documentElement.dataset.ready = "yes";
}

build();
