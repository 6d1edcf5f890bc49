// The page can be read without any of this.
"use strict";

// Contents stand open beside the text, and closed above it on a narrow window.
const contents = document.querySelector("details.contents");
const wide = matchMedia("(min-width: 68rem)");
const place = () => { contents.open = wide.matches; };
wide.addEventListener("change", place);
place();

// A table is copied as lines of cells with tabs between, as spreadsheets take them.
const said = document.createElement("p");
said.className = "unseen";
said.setAttribute("role", "status");
document.querySelector("main").append(said);

const lines = (table) =>
  [...table.rows]
    .map((row) => [...row.cells].map((cell) => cell.innerText.trim()).join("\t"))
    .join("\n");

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard for this page: the older way
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

for (const region of document.querySelectorAll(".data > .scroll")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy " + region.getAttribute("aria-label").split(":")[0]);
  button.addEventListener("click", async () => {
    await copy(lines(region.querySelector("table")));
    button.textContent = "Copied";
    said.textContent = "Table copied";
    setTimeout(() => { button.textContent = "Copy"; said.textContent = ""; }, 2000);
  });
  region.before(button);
}

// The contents show where the reader is.
const links = new Map(
  [...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const titles = [...document.querySelectorAll("main :is(h3, h4)[id]")].filter((h) => links.has(h.id));
let current = null;

function mark() {
  const passed = titles.filter((title) => title.getBoundingClientRect().top < 120);
  const link = passed.length ? links.get(passed.at(-1).id) : null;
  if (link === current) return;
  current?.removeAttribute("aria-current");
  link?.setAttribute("aria-current", "true");
  current = link;
  if (!link || !wide.matches) return;
  const part = link.closest("details.part");
  for (const other of document.querySelectorAll("details.part")) other.open = other === part;
  const box = document.querySelector("nav");
  const at = link.offsetTop - box.clientHeight / 2;
  box.scrollTo({ top: at });
}

let waiting = false;
addEventListener("scroll", () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; mark(); });
}, { passive: true });
mark();
