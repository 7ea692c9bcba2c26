"""The observability profile: its queries name what is exported, its targets what listens."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from headwater.telemetry.catalogue import METRICS, SERVICES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "observability"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "headwater.json"

# What PromQL itself has, as far as our queries use it; anything else in a query is a metric.
WORDS = {
    *("and", "or", "by", "sum", "rate", "changes", "histogram_quantile", "label_values"),
}
# Labels that Prometheus adds, and what it makes up itself.
TARGET_LABELS = {"job", "instance", "le"}
MADE_BY_PROMETHEUS = {"up"}


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("rules.yaml")["groups"] for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [variable["query"] for variable in dashboard["templating"]["list"]]


def labels_of(query: str) -> set[str]:
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", query)
    return set(matched) | {label.strip() for group in grouped for label in group.split(",")}


def metrics_of(query: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby\s*\([^)]*\)", " ", query)
    bare = re.sub(r"label_values\(([^,]*),[^)]*\)", r"\1", bare)
    return set(re.findall(r"[a-zA-Z_][a-zA-Z0-9_:]*", bare)) - WORDS


def exported() -> dict[str, set[str]]:
    """Labels by series name."""
    return {
        series: {label.replace(".", "_") for label in metric.attributes}
        for metric in METRICS.values()
        for series in metric.series_names
    }


ALERTS = [rule["expr"] for rule in rules()]
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


@pytest.mark.parametrize("query", [*ALERTS, *dashboard_queries()])
def test_queries_name_what_is_exported(query: str) -> None:
    series = exported()
    metrics = metrics_of(query)
    assert metrics, query
    unknown = metrics - series.keys() - RECORDED - MADE_BY_PROMETHEUS
    assert not unknown
    known_labels = set().union(TARGET_LABELS, *(series.get(name, set()) for name in metrics))
    assert labels_of(query) <= known_labels


def test_a_query_of_something_else_would_be_found() -> None:
    query = 'sum by (le) (rate(headwater_nonsense_bucket{node="1"}[5m])) / up'
    assert metrics_of(query) == {"headwater_nonsense_bucket", "up"}
    assert labels_of(query) == {"le", "node"}


def test_legends_and_annotations_name_labels_that_there_are() -> None:
    labels = set().union(TARGET_LABELS, *exported().values(), {"service"})
    texts = [DASHBOARD.read_text(encoding="utf-8"), (FOLDER / "rules.yaml").read_text()]
    legends = re.findall(r"\{\{(\w+)\}\}", texts[0])
    annotated = re.findall(r"\$labels\.(\w+)", texts[1])
    assert legends
    assert annotated
    assert {*legends, *annotated} <= labels


def test_alerts_say_what_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "remedy"}


def test_the_dashboard_is_what_its_code_writes() -> None:
    written = runpy.run_path(str(FOLDER / "dashboard.py"))["text"]()
    assert DASHBOARD.read_text(encoding="utf-8") == written, (
        "run: python docker/observability/dashboard.py"
    )


def test_every_process_is_scraped_where_it_listens() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    jobs = {job["job_name"]: job for job in read("prometheus.yaml")["scrape_configs"]}
    for name, job in jobs.items():
        [[target]] = [each["targets"] for each in job["static_configs"]]
        host, _, port = target.rpartition(":")
        environment = services[host]["environment"]
        if name == "gateway":
            listen, offset = environment["HEADWATER_GATEWAY_METRICS_LISTEN"], 0
        else:
            listen = environment["HEADWATER_TELEMETRY_PROMETHEUS_LISTEN"]
            offset = SERVICES.index(name)
        assert host == name
        assert listen.startswith("0.0.0.0:")
        assert int(port) == int(listen.rpartition(":")[2]) + offset


def test_the_collector_is_where_traces_are_sent_and_sends_them_on() -> None:
    collector = read("collector.yaml")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert f"#OTLP_ENDPOINT=http://collector:{port}\n" in example
    assert "collector" in services
    host = collector["exporters"]["otlp/jaeger"]["endpoint"].rpartition(":")[0]
    assert host in services
    for pipeline in collector["service"]["pipelines"].values():
        assert set(pipeline["exporters"]) <= collector["exporters"].keys()
        assert set(pipeline["processors"]) <= collector["processors"].keys()
    sources = yaml.safe_load(
        (FOLDER / "grafana/provisioning/datasources/headwater.yaml").read_text(encoding="utf-8")
    )["datasources"]
    for source in sources:
        assert re.fullmatch(r"http://(\w+):\d+", source["url"])[1] in services  # type: ignore[index]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)
def test_prometheus_takes_them_and_alerts_fire(tmp_path: Path) -> None:
    def promtool(*arguments: str) -> None:
        result = subprocess.run(
            ["promtool", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr

    for name in ("prometheus.yaml", "rules.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    shutil.copy(ROOT / "tests" / "data" / "firing_alerts.yaml", tmp_path)
    promtool("check", "config", "prometheus.yaml")
    promtool("check", "rules", "rules.yaml")
    promtool("test", "rules", "firing_alerts.yaml")
    for query in dashboard_queries():
        if not query.startswith("label_values"):
            filled = query.replace("$__rate_interval", "1m").replace("$model", ".*")
            (tmp_path / "one.yaml").write_text(
                json.dumps({"groups": [{"name": "g", "rules": [{"record": "r", "expr": filled}]}]})
            )
            promtool("check", "rules", "one.yaml")
