"""The alerts for Prometheus Operator: `python dev/alert_rules.py` writes the PrometheusRule.

Its rules are those of deploy/prometheus/alerts.yaml. With `--check` nothing is written, and the
exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).resolve().parents[1]
ALERTS = Path("deploy/prometheus/alerts.yaml")
RULE = Path("deploy/kubernetes/components/prometheus-operator/rule.yaml")
HEAD = f"""\
# Written by dev/alert_rules.py. Edit {ALERTS}, then run it again.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: service
spec:
"""


def rule(alerts: str) -> str:
    """Return the PrometheusRule with the groups of a rule file of Prometheus."""
    return HEAD + indent(alerts, "  ")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    wanted = rule((ROOT / ALERTS).read_text("utf-8"))
    if not check:
        (ROOT / RULE).write_text(wanted, "utf-8")
    elif (ROOT / RULE).read_text("utf-8") != wanted:
        sys.exit(f"{RULE} differs from {ALERTS}: run `python dev/alert_rules.py`")


if __name__ == "__main__":
    main()
