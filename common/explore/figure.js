// A figure of Plotly. Plotly's own widget is five megabytes; a page gets it once, from the widget
// "Plotly" below, and every figure waits for it here instead of bringing it along.
const shared = (globalThis.ddplabPlotly ??= (() => {
  const waiting = {};
  waiting.code = new Promise((resolve) => (waiting.arrived = resolve));
  return waiting;
})());
const ANSWER_MS = 5000;

// Asks the kernel for what the figure shows by now: changes since it was made have not been drawn.
const shownByNow = (model) =>
  new Promise((resolve) => {
    const heard = (message) => message.figure === "shown" && done();
    const done = () => {
      model.off("msg:custom", heard);
      resolve();
    };
    model.on("msg:custom", heard);
    model.send({ figure: "show" });
    setTimeout(done, ANSWER_MS); // a page without its kernel shows what it has
  });

export default () => {
  let made; // one figure for a model, however often it is shown
  return {
    initialize({ model }) {
      const code = model.get("code");
      if (!code) return; // a figure
      const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
      shared.arrived(import(address).finally(() => URL.revokeObjectURL(address)));
    },

    async render(context) {
      if (context.model.get("code")) return;
      made ??= (async () => {
        const { default: plotly } = await shared.code;
        await shownByNow(context.model);
        const figure = plotly();
        figure.initialize(context);
        return figure;
      })();
      return (await made).render(context);
    },
  };
};
