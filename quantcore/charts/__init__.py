"""Charts as SVG, without any library: for reports in HTML and for notebooks."""
