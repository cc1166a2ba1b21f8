"use strict";
// Texts and the images that they find, nearest first, with the image that each text belongs to.

function textList(gallery) {
  const list = element("ol", { class: "queries" });
  for (const query of gallery.queries) {
    const near = element("ol", { class: "near" });
    for (const hit of query.hits) near.append(textHit(gallery, hit));
    list.append(element("li", { class: "query" },
      element("div", {}, gallery.picture(query), element("span", { class: "cut", title: "the place of its own image", text: `place ${query.rank}` })),
      element("div", {}, element("p", { class: "quiet", text: `“${query.name}”` }), near)));
  }
  return list;
}

function textHit(gallery, hit) {
  const badge = element("span", { class: "badge", role: "img", "aria-label": hit.right ? "has this caption" : "has other captions", text: hit.right ? "✓" : "✕" });
  return element("li", { class: hit.right ? "right" : "wrong" },
    element("div", { class: "frame" }, gallery.picture(hit), badge),
    element("span", { class: "cut", title: "cosine similarity", text: hit.similarity.toFixed(2) }));
}

function textRows(gallery) {
  const rows = [["text", "place of its image", "rank", "image", "has this caption", "cosine"]];
  for (const query of gallery.queries) query.hits.forEach((hit, i) => rows.push([query.name, query.rank, i + 1, hit.name, hit.right ? "yes" : "no", hit.similarity]));
  return rows;
}

async function textSections() {
  for (const run of data.runs) {
    if (!run.retrieval) continue;
    const image = new Image();
    image.src = run.retrieval.sprite;
    await image.decode();
    const gallery = new Gallery({ ...run.retrieval, points: [] }, run.name, image);
    const several = data.runs.filter((one) => one.retrieval).length > 1;
    const lead = `Captions of test images, evenly spaced, and the images that they find among ${run.retrieval.images.toLocaleString("en-US")}, nearest first (✓: an image with this caption). Beside each, its own image and that image's place.`;
    page.append(section(several ? `texts-${data.runs.indexOf(run)}` : "texts", several ? `Texts: ${run.name}` : "Texts", lead,
      element("div", { class: "actions" }, csvButton(`texts-${run.name}`, "Texts", () => textRows(gallery))),
      textList(gallery), element("div", { class: "plots" }, plotFigure(run.retrieval.plot))));
  }
}
