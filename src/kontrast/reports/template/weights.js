"use strict";
// The weights of one query (CACR, figure 6): its views with the pull on each, and the negatives that it pushes most and least.

function weightsFigure(entry, runName) {
  const most = (some) => Math.max(...some.map((one) => one.weight));
  const rows = [["its views, with their share of the pull", entry.positives, most(entry.positives)],
    ["other images pushed most", entry.hardest, most(entry.hardest)], ["other images pushed least, at the same scale", entry.easiest, most(entry.hardest)]];
  const title = weightsTitle(entry);
  return element("figure", { class: "weights" },
    element("div", { class: "headed" }, element("h3", { text: title }), csvButton(`weights-${entry.query.name}`, title, () => weightRows(entry))),
    runName ? element("p", { class: "quiet", text: runName }) : null,
    element("div", { class: "query" },
      element("div", {}, element("img", { src: entry.query.view, alt: "the query's view" }), element("span", { class: "cut", text: "the query" }),
        element("span", { class: "cut quiet", title: entry.query.name, text: entry.query.name })),
      element("div", {}, ...rows.filter(([, some]) => some.length).map(([text, some, greatest]) => element("div", { class: "share" },
        element("p", { class: "quiet", text }), element("ol", { class: "near" }, ...some.map((one) => weightTile(one, greatest))))))));
}

function weightTile(one, greatest) {
  return element("li", {}, element("div", { class: "frame" }, element("img", { src: one.image, alt: one.name || "a view of the query", title: one.name || "" })),
    element("div", { class: "weight", style: { width: `${(100 * one.weight) / (greatest || 1)}%` } }), element("span", { class: "cut", text: shareText(one.weight) }));
}

const shareText = (value) => (value >= 0.0005 ? formatPercent(value) : `${(100 * value).toPrecision(1)}%`);

function weightsTitle(entry) {
  const pull = Math.max(...entry.positives.map((one) => one.weight));
  const push = entry.hardest.length ? `; the nearest other image gets ${shareText(entry.hardest[0].weight)} of the push` : "";
  return `The farthest of ${entry.positives.length} views gets ${formatPercent(pull)} of the pull${push}`;
}

function weightRows(entry) {
  const rows = [["query", "what", "rank", "image", "weight"]];
  for (const what of ["positives", "hardest", "easiest"]) entry[what].forEach((one, i) => rows.push([entry.query.name, what, i + 1, one.name || `view ${i + 2}`, one.weight]));
  return rows;
}

function weightsGrid(all, runs) {
  if (!all.length) return null;
  return element("div", { class: "numbers" }, element("h3", { text: "What a query pulls and what it pushes away" }), element("p", { class: "quiet", text: all[0].note }),
    element("div", { class: "weighed" }, ...all.map((entry) => weightsFigure(entry, runs.length > 1 ? runs[entry.run].name : ""))));
}
