// A slider over a list of texts: a native range input, so that keyboard and screen reader know it.
function render({ model, el }) {
  el.classList.add("ddplab-slider");
  const input = document.createElement("input");
  const label = document.createElement("label");
  const shown = document.createElement("output");
  input.type = "range";
  input.id = `ddplab-slider-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  label.htmlFor = shown.htmlFor = input.id;

  function refresh() {
    const texts = model.get("texts");
    const text = texts[model.get("index")] ?? "";
    label.textContent = model.get("label");
    input.min = 0;
    input.max = Math.max(0, texts.length - 1);
    input.step = 1;
    input.value = model.get("index");
    input.setAttribute("aria-valuetext", text);
    shown.textContent = text;
  }

  input.addEventListener("input", () => {
    model.set("index", Number(input.value));
    model.save_changes(); // while the kernel computes, only the latest place is kept
    refresh();
  });
  for (const name of ["label", "texts", "index"]) model.on(`change:${name}`, refresh);
  refresh();
  el.append(label, shown, input);

  // A figure in a tab that is not open has no size; it takes one when its tab is opened.
  const opened = new ResizeObserver(() => window.dispatchEvent(new Event("resize")));
  opened.observe(el);
  return () => opened.disconnect();
}

export default { render };
