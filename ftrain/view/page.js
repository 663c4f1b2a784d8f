// The read-out under the pointer. Everything else on the page is there without scripts.
"use strict";
const plots = JSON.parse(document.getElementById("plots").textContent);
for (const svg of document.querySelectorAll("svg.plot")) {
  const curves = plots[svg.dataset.plot] || {};
  const out = document.querySelector(`output[data-plot="${svg.dataset.plot}"]`);
  const cursor = svg.querySelector("line.cursor");
  const box = svg.viewBox.baseVal;
  const left = +svg.dataset.left, right = box.width - +svg.dataset.right;
  const low = +svg.dataset.low, high = +svg.dataset.high;
  svg.addEventListener("pointermove", (event) => {
    const at = (event.clientX - svg.getBoundingClientRect().left) * box.width / svg.clientWidth;
    const x = low + (Math.min(Math.max(at, left), right) - left) / (right - left) * (high - low);
    const told = [];
    for (const [name, points] of Object.entries(curves)) {
      let near = points[0];
      for (const point of points) if (Math.abs(point[0] - x) < Math.abs(near[0] - x)) near = point;
      told.push(`${name} ${near[1].toPrecision(5)} at ${Math.round(near[0]).toLocaleString("en")}`);
    }
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
    cursor.style.visibility = "visible";
    out.textContent = told.join("; ");
  });
  svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; out.textContent = ""; });
}
