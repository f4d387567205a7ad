"""What an operator's Prometheus and Grafana are given: dashboards, alert rules, what to scrape; one source.

`python -m kvrelay.monitoring FOLDER` writes them; deploy/monitoring is what it wrote. Starts nothing, measures nothing.
"""

from kvrelay.monitoring.files import files

__all__ = ["files"]
