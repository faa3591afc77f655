"use strict";
// The charts of a report, from the JSON in the page.

const PARTS = [["compute", "compute"], ["copy", "copy"], ["prep_stall", "prep stall"], ["fetch_stall", "fetch stall"]];
const PART_COLOURS = { compute: "compute", copy: "copy", prep_stall: "prep", fetch_stall: "fetch" };

function percent(share) {
  return (100 * share).toFixed(share > 0 && share < 0.00995 ? 1 : 0) + "%";
}

function drawEpoch() {
  const runs = ["warm", "cold"].filter((run) => DATA.shares[run]);
  const traces = PARTS.map(([part, name]) => ({
    type: "bar", orientation: "h", name, y: runs, x: runs.map((run) => DATA.shares[run][part]),
    text: runs.map((run) => (DATA.shares[run][part] < 0.07 ? "" : percent(DATA.shares[run][part]))), textposition: "inside", insidetextanchor: "middle",
    textangle: 0, textfont: { color: colour("on") }, constraintext: "none",
    marker: { color: colour(PART_COLOURS[part]), line: { color: colour("card"), width: 1 } },
    hovertemplate: `%{y}: ${name} %{x:.1%}<extra></extra>`,
  }));
  Plotly.react("chart-epoch", traces, layout({ l: 48, r: 24, t: 8, b: 62 }, {
    barmode: "stack", bargap: 0.25, uniformtext: { minsize: 10, mode: "hide" },
    xaxis: { range: [0, 1], tickformat: ".0%", tickvals: [0, 0.25, 0.5, 0.75, 1] }, yaxis: { showgrid: false },
    legend: { orientation: "h", x: 0, y: -0.22, traceorder: "normal", itemclick: false, itemdoubleclick: false },
  }), OPTIONS);
}

// An axis that shows every value of all lines: from 0, or in powers of ten where some are far above the throughput.
function rateAxis(lines) {
  const known = (values) => values.filter((value) => value !== null && value > 0);
  const all = known(lines.flat());
  const top = Math.max(...all);
  if (top <= 3 * Math.max(...known(lines[0]))) return { range: [0, 1.12 * top], tickformat: "~s" };
  const range = [Math.log10(Math.min(...all)) - 0.1, Math.log10(top) + 0.1];
  return { type: "log", range, tickformat: "~s", dtick: range[1] - range[0] > 1.5 ? 1 : "D2" };
}

function drawCurve(name, lines, mark, label, xaxis, mode) {
  const curve = DATA.curve;
  const chart = document.getElementById("chart-" + name);
  if (!chart) return; // not measured
  const traces = lines.map(([key, tone, dash]) => ({
    type: "scatter", mode: key === "throughput" ? mode : "lines", name: key, x: curve.x, y: curve[key],
    line: { color: colour(tone), width: key === "throughput" ? 4 : 2, dash }, marker: { size: 8 }, connectgaps: false,
    hovertemplate: `${key}: %{y:,.4~g} samples/s at ${label}<extra></extra>`,
  })).reverse(); // the throughput is drawn last, on top
  const at = curve[mark];
  const place = at === null ? null : xaxis.type === "log" ? Math.log10(at) : at;
  Plotly.react(chart, traces, layout({ l: 56, r: 16, t: 26, b: lines.length > 1 ? 84 : 48 }, {
    showlegend: lines.length > 1,
    legend: { orientation: "h", x: 0, y: -0.22, traceorder: "reversed", itemclick: false, itemdoubleclick: false },
    xaxis, yaxis: { ...rateAxis(lines.map(([key]) => curve[key])), title: { text: "samples/s", standoff: 6 } },
    shapes: place === null ? [] : [{
      type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: colour("accent"), width: 2, dash: "dot" },
    }],
    annotations: place === null ? [] : [{
      x: place, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, xanchor: "auto",
      text: chart.dataset.mark, font: { color: colour("accent"), size: 13 },
    }],
  }), OPTIONS);
}

draw(() => {
  drawEpoch();
  drawCurve("cache", [["throughput", "ink"], ["F", "fetch", "dash"], ["P", "prep", "dash"], ["G", "compute", "dash"]],
    "best", "%{x:.0%} cached", { range: [-0.01, 1.01], tickformat: ".0%", title: { text: "share of the samples cached", standoff: 6 } }, "lines");
});
