"""From a preset to a report: stages, executed notebooks, HTML and PDF."""
