"""What needs a Docker engine: the image, the compose files and Docker Compose as development stack.

`make test-docker` runs it. Without an engine, tests/test_deploy.py follows the steps of the
Dockerfile and checks the files that Compose merges.
"""

import re
import shlex
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from servers.network import keep_or_pick
from servers.sources import docker_answers

from tests.baked import BakedProject
from tests.programs import lacking

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1_800)]  # with all images that are pulled

PORTS = {
    "consumer": "SERVICE_CONSUMER_PORT",
    "relay": "SERVICE_RELAY_PORT",
    "postgres": "STACK_POSTGRES_PORT",
    "kafka": "STACK_KAFKA_PORT",
    "prometheus": "PROMETHEUS_PORT",
    "grafana": "GRAFANA_PORT",
}
"""Variables that choose the ports of the containers' services."""
PATIENCE = 180.0
SCAN = (
    '{"scanner": "JFK", "number": 1, "parcel_id": "N1", "place": "JFK",'
    ' "scanned_at": "2026-01-01T12:00:00Z"}'
)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """A Docker engine with Compose. Without it the test is skipped, and fails where CI is set."""
    if not docker_answers():
        lacking("no Docker engine answers, or it has no Docker Compose")


@pytest.fixture(scope="module")
def image(default_project: BakedProject) -> Iterator[str]:
    """The image of a service, built by the engine as the Dockerfile says."""
    tag = f"test-{uuid4().hex[:12]}"
    default_project.run("docker", "build", "--file", "deploy/Dockerfile", "--tag", tag, ".")
    yield tag
    default_project.run("docker", "image", "rm", "--force", tag)


def test_the_image_runs_without_root_and_without_a_writable_file(
    image: str, default_project: BakedProject
) -> None:
    run = ("docker", "run", "--rm", "--read-only", "--cap-drop=ALL")

    assert "Usage: service" in default_project.run(*run, image, "--help")
    entry = ("--entrypoint", "sh", image, "-c", "id -u; touch /opt/app/x 2>&1 || true")
    said = default_project.run(*run, *entry)
    assert said.startswith("10001\n")
    assert "Read-only file system" in said


def test_the_ci_image_lists_its_packages_and_its_provenance(
    default_project: BakedProject, tmp_path: Path
) -> None:
    ci = default_project.read(".github/workflows/ci.yaml")
    [build] = re.findall(r"- run: (docker buildx build .* --sbom=true .*)", ci)
    archive, builder = tmp_path / "image.tar", f"test-{uuid4().hex[:12]}"
    default_project.run("docker", "buildx", "create", "--name", builder)
    try:
        command = shlex.split(build.replace("dest=image.tar", f"dest={archive}"))
        default_project.run(*command, BUILDX_BUILDER=builder)
    finally:
        default_project.run("docker", "buildx", "rm", "--force", builder)

    said = b""
    with tarfile.open(archive) as tar:
        for blob in tar:
            if blob.size < 100_000 and (file := tar.extractfile(blob)):
                said += file.read()
    kinds = re.findall(rb'"in-toto\.io/predicate-type": ?"https://(\w+)\.dev/', said)
    assert set(kinds) == {b"spdx", b"slsa"}


@dataclass(frozen=True)
class Composed:
    """The containers of both compose files, on ports that were free."""

    project: BakedProject
    name: str
    """Of the project, to Docker Compose."""
    ports: dict[str, int]

    def compose(self, *arguments: str) -> str:
        """Run Docker Compose, and return what it wrote."""
        files = ("-f", "deploy/compose.yaml", "-f", "deploy/compose.service.yaml")
        ports = {PORTS[service]: str(port) for service, port in self.ports.items()}
        return self.project.run("docker", "compose", "-p", self.name, *files, *arguments, **ports)

    def wait_for(self, service: str, path: str) -> None:
        """Wait until a service answers; fail with the logs if it does not."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.ports[service]}{path}").close()
                return
            time.sleep(1)
        pytest.fail(self.compose("logs", "--tail=30"), pytrace=False)


@pytest.fixture(scope="module")
def composed(default_project: BakedProject) -> Iterator[Composed]:
    """All that the compose files start."""
    ports = dict(zip(PORTS, keep_or_pick([], len(PORTS)), strict=True))
    it = Composed(default_project, f"test-{uuid4().hex[:12]}", ports)
    try:
        it.compose("up", "--build", "--detach")
        yield it
    finally:
        it.compose("down", "--volumes")


def test_the_service_of_compose_handles_a_message_and_is_observed(composed: Composed) -> None:
    for service in ("consumer", "relay"):
        composed.wait_for(service, "/health/ready")
    servers = {
        "PIPELINE_DATABASE_URL": "postgresql+asyncpg://service:service@127.0.0.1:"
        f"{composed.ports['postgres']}/service",
        "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": f"127.0.0.1:{composed.ports['kafka']}",
    }
    sending = (sys.executable, "dev/send.py", "scans", "scan.recorded.v1", SCAN)

    said = composed.project.run(*sending, "--key", "N1", "--watch", "parcel-events", **servers)

    assert "\npublished " in said
    composed.wait_for("prometheus", "/-/ready")
    composed.wait_for("grafana", "/api/health")


def test_compose_is_the_development_stack(default_project: BakedProject, tmp_path: Path) -> None:
    stack = (sys.executable, "dev/stack.py", "--state", str(tmp_path / "stack"))
    try:
        assert "using Docker Compose" in default_project.run(*stack, "up")
        assert default_project.run(*stack, "status").count(" serves ") == 2
        default_project.run(*stack, "down")
        default_project.run(*stack, "run", "--", "true")
    finally:
        default_project.run(*stack, "down", "--purge")
