// A figure of Plotly. Plotly's own widget is five megabytes; a page gets it once, from the widget
// "Plotly" below, and every figure waits for it here instead of bringing it along.
const shared = (globalThis.ddplabPlotly ??= (() => {
  const waiting = {};
  waiting.code = new Promise((resolve) => (waiting.arrived = resolve));
  return waiting;
})());

export default () => {
  let figure; // one for a model, however often it is shown
  return {
    initialize({ model }) {
      const code = model.get("code");
      if (!code) return; // a figure
      const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
      shared.arrived(import(address).finally(() => URL.revokeObjectURL(address)));
    },

    async render(context) {
      if (context.model.get("code")) return;
      const { default: plotly } = await shared.code;
      if (!figure) {
        figure = plotly();
        figure.initialize(context);
      }
      return figure.render(context);
    },
  };
};
