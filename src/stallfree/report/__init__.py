"""Renders measurements as text and as pages, from plain data: the JSON of a report or a simulation."""

from stallfree.report.document import chart_library
from stallfree.report.page import report_page
from stallfree.report.simulation import run_data, simulation_page
from stallfree.report.terminal import render_report

__all__ = ["chart_library", "render_report", "report_page", "run_data", "simulation_page"]
