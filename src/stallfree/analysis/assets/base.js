"use strict";
// What all pages share: their data, the colours of the style sheet, and charts that follow them.

const DATA = JSON.parse(document.getElementById("data").textContent);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// A layout in the page's own colours. `margin` is fixed, so that the place of a value can be computed.
function layout(margin, more) {
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, fixedrange: true, automargin: false };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, autosize: true,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
    margin, hoverlabel: { namelength: -1 }, ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

const OPTIONS = { displayModeBar: false, responsive: true, showTips: false };

// Draws now, and again when the scheme of colours changes.
function draw(makeAll) {
  makeAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", makeAll);
}
