// A command to copy: a text field that cannot be edited, a button, and what the command leaves out.
function render({ model, el }) {
  el.classList.add("ddplab-command");
  const label = document.createElement("label");
  const field = document.createElement("input");
  const button = document.createElement("button");
  const note = document.createElement("span");
  field.type = "text";
  field.readOnly = true;
  field.id = `ddplab-command-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  label.htmlFor = field.id;
  button.type = "button";
  note.setAttribute("role", "status");

  function refresh() {
    label.textContent = model.get("label");
    field.value = model.get("line");
    button.textContent = "Copy";
    note.textContent = model.get("note");
  }

  async function copy() {
    try {
      await navigator.clipboard.writeText(field.value);
      return true;
    } catch {
      field.select(); // where a page has no clipboard, as over plain HTTP from another machine
      return document.execCommand("copy");
    }
  }

  button.addEventListener("click", async () => {
    button.textContent = (await copy()) ? "Copied" : "Select it and press Ctrl-C";
  });
  for (const name of ["label", "line", "note"]) model.on(`change:${name}`, refresh);
  refresh();
  el.append(label, field, button, note);
}

export default { render };
