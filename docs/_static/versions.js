/* Fill the menu of the versions from versions.js in the root of the site. */
document.addEventListener("DOMContentLoaded", () => {
  for (const list of document.querySelectorAll(".versions ul")) {
    for (const { name, version } of window.kontrastVersions ?? []) {
      const link = document.createElement("a");
      link.href = `${list.dataset.root}/${version}/index.html`;
      link.textContent = name;
      const item = document.createElement("li");
      item.append(link);
      list.append(item);
    }
  }
});
