"""Metrics for Prometheus: `observer` counts what happens, `collectors` has the kinds of figures."""

from proxy.metrics.observer import CONTENT_TYPE, MOST_STEP_METRICS, LastStep, Metrics, Stored

__all__ = ["CONTENT_TYPE", "MOST_STEP_METRICS", "LastStep", "Metrics", "Stored"]
