// What the dots say, below the chart: for pointers, and for keys once a chart has the focus. The page works without.
for (const figure of document.querySelectorAll("figure")) {
  const out = figure.querySelector(".readout");
  for (const svg of figure.querySelectorAll("svg[role=img]")) {
    const dots = () => [...svg.querySelectorAll(".dot")]
      .filter((dot) => dot.getClientRects().length)
      .sort((a, b) => a.x.baseVal.value - b.x.baseVal.value);
    let shown = -1;
    const tell = (dot) => { out.textContent = dot ? dot.textContent : ""; };
    if (!svg.querySelector(".dot")) continue;
    svg.tabIndex = 0;
    svg.addEventListener("pointermove", (event) => {
      const far = (dot) => {
        const box = dot.getBoundingClientRect();
        return Math.hypot(box.x + box.width / 2 - event.clientX, box.y + box.height / 2 - event.clientY);
      };
      tell(dots().sort((a, b) => far(a) - far(b))[0]);
    });
    svg.addEventListener("pointerleave", () => tell(null));
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const all = dots();
      if (!by || !all.length) return;
      event.preventDefault();
      shown = (shown + by + all.length) % all.length;
      tell(all[shown]);
    });
  }
}
