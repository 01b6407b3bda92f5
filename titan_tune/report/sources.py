"""How a report calls what a figure is from: measured by a probe, or predicted by a dry run. Pure."""

from __future__ import annotations

from titan_tune.domain.probe import Origin
from titan_tune.report.analysis import Effect, Point
from titan_tune.report.data import ReportData
from titan_tune.report.dry_runs import what_it_is


def noun(data: ReportData) -> str:
    """What the runs of the study are."""
    return "dry run" if data.all_dry_runs else "probe"


def figures(data: ReportData) -> str:
    """Where the throughputs of the study are from."""
    if data.all_dry_runs:
        return "predicted by dry runs"
    return "measured, or predicted by a dry run where it says so" if data.has_dry_runs else "measured"


def source_tags(data: ReportData) -> tuple[str, ...]:
    """The same as tags."""
    if data.all_dry_runs:
        return (str(Origin.DRY_RUN),)
    return (str(Origin.MEASURED), str(Origin.DRY_RUN)) if data.has_dry_runs else (str(Origin.MEASURED),)


def preposition(data: ReportData) -> str:
    """Whether the job ran ``on`` its hardware, or was only simulated ``for`` it."""
    return "for" if data.all_dry_runs else "on"


def interval_name(origin: Origin) -> str:
    """What the interval of a throughput is."""
    return "assumed interval" if origin is Origin.DRY_RUN else "95 % interval"


def interval_heading(data: ReportData) -> str:
    """The same over a column."""
    return "interval" if data.has_dry_runs and not data.all_dry_runs else interval_name(_origin(data))


def titles(data: ReportData) -> dict[str, str]:
    """Headings that depend on what the runs were."""
    if data.all_dry_runs:
        return {
            "configurations": "Every configuration, by dry run",
            "predictions": "Formula against dry run",
            "trend": "Every dry run",
            "method": "How the dry runs were made",
        }
    mixed = data.has_dry_runs
    return {
        "configurations": f"Every {'configuration, measured or by dry run' if mixed else 'measured configuration'}",
        "predictions": "Predicted against measured and dry run" if mixed else "Predicted against measured",
        "trend": "Every probe and dry run" if mixed else "Every measured probe",
        "method": "How it was measured",
    }


def no_configuration(data: ReportData) -> str:
    """What stands for an empty table of configurations."""
    return "No dry run gave a throughput." if data.all_dry_runs else "No configuration was measured."


def dry_run_note(data: ReportData) -> str:
    """What a dry run is, where there were any."""
    return what_it_is(data.method.dry_runs) if data.method.dry_runs else ""


def point_source(point: Point, *, memory: bool) -> str:
    """What a figure beside a prediction is from."""
    if point.origin is Origin.MEASURED:
        return str(point.origin)
    return "ranks that ran" if memory else str(point.origin)


def effect_step(effect: Effect) -> str:
    """From which label to which, and that it is of dry runs."""
    mark = f" ({effect.origin})" if effect.origin is Origin.DRY_RUN else ""
    return f"{effect.before} → {effect.after}{mark}"


def _origin(data: ReportData) -> Origin:
    return Origin.DRY_RUN if data.all_dry_runs else Origin.MEASURED
