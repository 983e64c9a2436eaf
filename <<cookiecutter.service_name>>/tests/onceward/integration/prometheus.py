"""What Prometheus makes of the service's metrics: its own tool judges, by the service's rules."""

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.servers.processes import ROOT
from tests.servers.programs import program

RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
TEXT = RULES.read_text("utf-8")
ALERTS = re.findall(r"- alert: (\w+)", TEXT)
JOB = re.findall(r'job="([^"]+)"', TEXT)[0]

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(scrape: str) -> Series:
    """Return the samples of a scrape, as Prometheus stores them for the service's job."""
    return {
        (one.name, tuple(sorted((one.labels | {"job": JOB}).items()))): one.value
        for family in text_string_to_metric_families(scrape)
        for one in family.samples
        if one.name.startswith("pipeline_")
    }


def together(*scrapes: str) -> str:
    """Return the scrapes of several processes as one, in which each is an instance."""
    return "\n".join(
        re.sub(r"^(pipeline_\w+)\{", rf'\1{{instance="{number}",', one, flags=re.MULTILINE)
        for number, one in enumerate(scrapes)
    )


def check(
    folder: Path,
    scrapes: Sequence[str],
    *,
    firing: Iterable[str] = (),
    quiet: Iterable[str] = (),
    minutes: int = 40,
) -> None:
    """Check what fires if the last scrape stays as it is for some minutes, after the others.

    Each of the others lasts for ten. Nearly all alerts wait for less than forty.
    """
    (folder / RULES.name).write_text(TEXT, "utf-8")
    found = [series(one) for one in scrapes]
    lasting = [10] * (len(found) - 1) + [minutes]
    values = {
        one: " ".join(
            f"{each[one]:f}x{times - 1}" if one in each else f"_x{times}"
            for each, times in zip(found, lasting, strict=True)
        )
        for one in {one for each in found for one in each}
    }
    expected = [(name, 1) for name in firing] + [(name, 0) for name in quiet]
    test = {
        "rule_files": [RULES.name],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {
                        "series": name
                        + "{"
                        + ",".join(f"{key}={json.dumps(value)}" for key, value in labels)
                        + "}",
                        "values": written,
                    }
                    for (name, labels), written in values.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'(count(ALERTS{{alertname="{name}",alertstate="firing"}})'
                        " or vector(0)) > bool 0",
                        "eval_time": f"{sum(lasting) - 1}m",
                        "exp_samples": [{"labels": "{}", "value": value}],
                    }
                    for name, value in expected
                ],
            }
        ],
    }
    path = folder / "rehearsal.yaml"
    path.write_text(json.dumps(test), "utf-8")
    done = subprocess.run(
        [program("promtool"), "test", "rules", path], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
