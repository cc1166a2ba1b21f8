"use strict";
// A saved classifier: which labels it confuses, and the images that it is least sure of.

function classifierSection({ labels, measured, matrix, mistakes, uncertain }) {
  const lead = matrix.length || mistakes.length ? `Measured ${measured}.` : "";
  page.append(section("classifier", "Classifier", lead, confusionTable(labels, matrix), mistakeTable(mistakes), uncertainList(uncertain)));
}

function confusionTable(labels, matrix) {
  if (!matrix.length) return null;
  const rows = matrix.map((counts, i) => {
    const all = counts.reduce((a, b) => a + b, 0);
    return element("tr", {}, element("th", { scope: "row", text: labels[i] }), ...counts.map((count, j) => element("td", {
      text: count || "", class: i === j ? "right" : "", title: `${labels[i]} taken for ${labels[j]}: ${count} of ${all}`,
      style: count ? { background: `color-mix(in srgb, var(${i === j ? "--accent" : "--wrong"}) ${Math.round((45 * count) / all)}%, transparent)` } : {},
    })));
  });
  const listed = () => [["label", ...labels], ...matrix.map((counts, i) => [labels[i], ...counts])];
  return element("div", { class: "numbers" }, element("div", { class: "headed" }, element("h3", { text: "Confusion matrix" }), csvButton("confusion", "Confusion matrix", listed)),
    element("p", { class: "quiet", text: "A row for each true label, a column for each predicted one, in images." }),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Confusion matrix" }, element("table", { class: "table confusion" },
      element("thead", {}, element("tr", {}, element("th", {}), ...labels.map((text) => element("th", { scope: "col", text })))), element("tbody", {}, ...rows))));
}

function mistakeTable(mistakes) {
  if (!mistakes.length) return null;
  const rows = mistakes.map(([label, taken, count]) => element("tr", {}, element("th", { scope: "row", text: label }), element("td", { text: taken }), element("td", { text: count })));
  return element("div", { class: "numbers" }, element("h3", { text: "Most frequent mistakes" }), element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Most frequent mistakes" },
    element("table", { class: "table" }, element("thead", {}, element("tr", {}, ...["label", "taken for", "images"].map((text) => element("th", { scope: "col", text })))), element("tbody", {}, ...rows))));
}

function uncertainList(uncertain) {
  if (!uncertain.length) return null;
  const tiles = uncertain.map(({ file, image, guesses }) => element("li", {}, element("div", { class: "frame" }, element("img", { src: image, alt: file, title: file })),
    ...guesses.map(([label, p]) => element("span", { class: "cut", title: file, text: `${formatPercent(p)} ${label}` }))));
  const listed = () => [["file", "label", "probability"], ...uncertain.flatMap(({ file, guesses }) => guesses.map(([label, p]) => [file, label, p]))];
  return element("div", { class: "numbers" }, element("div", { class: "headed" }, element("h3", { text: "Most uncertain images" }), csvButton("uncertain", "Most uncertain images", listed)),
    element("p", { class: "quiet", text: "Label these next: the classifier learns most from images that it is unsure of." }), element("ol", { class: "near unsure" }, ...tiles));
}
