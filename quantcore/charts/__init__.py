"""Charts as SVG without any library, for HTML reports and for notebooks."""
