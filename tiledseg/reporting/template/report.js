"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const one = (selector, root = document) => root.querySelector(selector);

one("#theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

for (const heading of all(".sortable thead th")) {
  heading.addEventListener("click", () => {
    const table = heading.closest("table"), body = table.tBodies[0];
    const column = heading.cellIndex;
    const descending = column === 0 ? heading.ariaSort === "ascending" : heading.ariaSort !== "descending";
    for (const other of all("thead th", table)) other.ariaSort = "none";
    heading.ariaSort = descending ? "descending" : "ascending";
    const value = (row) => Number(row.cells[column].dataset.value);
    const rows = [...body.rows].sort((a, b) => (descending ? value(b) - value(a) : value(a) - value(b)));
    body.append(...rows);
  });
}

const cell = one("#cell");
for (const td of all(".matrix td[data-words]")) {
  for (const event of ["mouseenter", "focus", "click"]) {
    td.addEventListener(event, () => { cell.textContent = td.dataset.words; });
  }
}

const chosen = one("#diagram");
if (chosen) {
  chosen.addEventListener("change", () => {
    for (const diagram of all(".diagram")) diagram.hidden = diagram.dataset.diagram !== chosen.value;
  });
}

const slider = one("#moment");
if (slider) {
  const moments = JSON.parse(one("#moments").textContent);
  const changing = all("img[data-pictures]").map((image) => [image, image.dataset.pictures.split(" ")]);
  const show = (number) => {
    slider.value = number;
    one("#when").textContent = moments[slider.value];
    for (const [image, pictures] of changing) image.src = pictures[slider.value];
  };
  slider.addEventListener("input", () => show(slider.value));
  one("#before").addEventListener("click", () => show(Number(slider.value) - 1));
  one("#after").addEventListener("click", () => show(Number(slider.value) + 1));
  show(slider.max);
}

const large = one("#large");
for (const picture of all(".picture")) {
  picture.addEventListener("click", () => {
    const image = one("img", picture);
    one("img", large).src = image.src;
    one("img", large).alt = image.alt;
    one("p", large).textContent = `${image.alt}: ${one("figcaption", picture.closest("figure")).textContent}`;
    large.showModal();
  });
}
large.addEventListener("click", () => large.close());

for (const chart of all(".chart")) {
  const svg = one("svg", chart), cursor = one(".cursor", svg), output = one("output", chart);
  const places = all("[data-places]", chart).flatMap((key) =>
    JSON.parse(key.dataset.places).map(([x, y, words]) => [x, y, `${key.textContent}, ${words}`]));
  const look = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = null, least = Infinity;
    for (const place of places) {
      const far = (place[0] - at.x) ** 2 + 0.3 * (place[1] - at.y) ** 2;
      if (far < least) [least, best] = [far, place];
    }
    cursor.setAttribute("cx", best[0]);
    cursor.setAttribute("cy", best[1]);
    cursor.removeAttribute("hidden");
    output.textContent = best[2];
  };
  svg.addEventListener("pointermove", look);
  svg.addEventListener("pointerdown", look);
}
