"""Schemas of manifests: those of Kubernetes, and those of operators, from their own modules."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import yaml

from tests.programs import GoSource

KUBERNETES = "1.34"
"""Whose schemas manifests must fit. `kubernetes-validate` does kubeconform's work: it has the
schemas in a wheel that is pinned as all else is, where the latter fetches them when it runs."""


KEDA = GoSource(
    "github.com/kedacore/keda/v2",
    "v2.20.2",
    "h1:SR60v8uIcelbveS8n/1jcl8tLdBBIbHMxmdOHw8tKqA=",
)
PROMETHEUS_OPERATOR = GoSource(
    "github.com/prometheus-operator/prometheus-operator",
    "v0.92.1",
    "h1:rHWuFo6SVya4FBSCNg2DCzyc4xAv54zk3eDTzp5mQZc=",
)
DEFINITIONS = {
    "keda.sh": (KEDA, "config/crd/bases"),
    "monitoring.coreos.com": (PROMETHEUS_OPERATOR, "example/prometheus-operator-crd"),
}
"""The folders of custom resource definitions, by their API group."""


def validate(manifest: Mapping[str, Any]) -> None:
    """Raise an error unless the object fits its schema, in which fields are named that exist.

    Rules that a definition has in CEL are not evaluated.
    """
    group, _, version = manifest["apiVersion"].rpartition("/")
    if group not in DEFINITIONS:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    # Draft 4 has limits as OpenAPI 3.0, in which definitions are written.
    schema = _schema(group, manifest["kind"], version)
    jsonschema.Draft4Validator(schema).validate(manifest)


@cache
def _schema(group: str, kind: str, version: str) -> dict[str, Any]:
    """Return the schema of a kind."""
    source, folder = DEFINITIONS[group]
    path = source.folder() / folder / f"{group}_{kind.lower()}s.yaml"
    versions = yaml.safe_load(path.read_text("utf-8"))["spec"]["versions"]
    [schema] = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == version]
    return _closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without room for fields that it does not name; the server drops those."""
    closed = dict(schema)
    if "properties" in schema:
        closed["properties"] = {n: _closed(one) for n, one in schema["properties"].items()}
        closed["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    for name in ("items", "additionalProperties"):
        if isinstance(one := schema.get(name), dict):
            closed[name] = _closed(one)
    return closed


@dataclass(frozen=True)
class Parameter:
    """A parameter of a trigger of KEDA."""

    places: frozenset[str]
    """Where it may be given: `triggerMetadata`, `resolvedEnv` (by the name of a variable, as
    `…FromEnv`), `authParams`."""
    values: frozenset[str]
    """Those it may have; none: any."""


def trigger_parameters(scaler: str) -> dict[str, Parameter]:
    """Return the parameters of a trigger, from KEDA's source: the definition takes any."""
    source = (KEDA.folder() / "pkg" / "scalers" / f"{scaler}_scaler.go").read_text("utf-8")
    return {
        name: Parameter(
            frozenset(places.split(";")), frozenset(filter(None, (values or "").split(";")))
        )
        for name, places, values in re.findall(
            r'`keda:"name=(\w+),\s*order=([\w;]+)'
            r'(?:,\s*(?!enum)\w+(?:=[^,"]*)?)*(?:,\s*enum=([^,"]+))?',
            source,
        )
    }
