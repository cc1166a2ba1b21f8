"use strict";
// The weights that one query gives (CACR, figure 6): its own views with the pull on each, and the negatives pushed most and least.

function weightsFigure(told, runName) {
  const most = (some) => Math.max(...some.map((one) => one.weight));
  const rows = [["views of it, by their share of the pull", told.positives, most(told.positives)],
    ["other images pushed most", told.hardest, most(told.hardest)], ["other images pushed least, on the same scale", told.easiest, most(told.hardest)]];
  const title = weightsTitle(told);
  return element("figure", { class: "weights" },
    element("div", { class: "headed" }, element("h3", { text: title }), csvButton(`weights-${told.query.name}`, title, () => weightRows(told))),
    runName ? element("p", { class: "quiet", text: runName }) : null,
    element("div", { class: "query" },
      element("div", {}, element("img", { src: told.query.view, alt: "the query's view" }), element("span", { class: "cut", text: "the query" }),
        element("span", { class: "cut quiet", title: told.query.name, text: told.query.name })),
      element("div", {}, ...rows.filter(([, some]) => some.length).map(([text, some, greatest]) => element("div", { class: "share" },
        element("p", { class: "quiet", text }), element("ol", { class: "near" }, ...some.map((one) => weightTile(one, greatest))))))));
}

function weightTile(one, greatest) {
  return element("li", {}, element("div", { class: "frame" }, element("img", { src: one.image, alt: one.name || "a view of the query", title: one.name || "" })),
    element("div", { class: "weight", style: { width: `${(100 * one.weight) / (greatest || 1)}%` } }), element("span", { class: "cut", text: shareText(one.weight) }));
}

const shareText = (value) => (value >= 0.0005 ? formatPercent(value) : `${(100 * value).toPrecision(1)}%`);

function weightsTitle(told) {
  const pull = Math.max(...told.positives.map((one) => one.weight));
  const push = told.hardest.length ? `; the nearest other image gets ${shareText(told.hardest[0].weight)} of the push` : "";
  return `The farthest of ${told.positives.length} views gets ${formatPercent(pull)} of the pull${push}`;
}

function weightRows(told) {
  const rows = [["query", "what", "rank", "image", "weight"]];
  for (const what of ["positives", "hardest", "easiest"]) told[what].forEach((one, i) => rows.push([told.query.name, what, i + 1, one.name || `view ${i + 2}`, one.weight]));
  return rows;
}

function weightsGrid(all, runs) {
  if (!all.length) return null;
  return element("div", { class: "numbers" }, element("h3", { text: "Whom a query pulls and whom it pushes" }), element("p", { class: "quiet", text: all[0].note }),
    element("div", { class: "weighed" }, ...all.map((told) => weightsFigure(told, runs.length > 1 ? runs[told.run].name : ""))));
}
