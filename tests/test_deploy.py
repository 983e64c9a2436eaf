"""How a generated service is deployed: the image's own steps, and the manifests against schemas."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, cast

import asyncpg  # type: ignore[import-untyped]
import pytest
import yaml
from jsonschema import ValidationError  # type: ignore[import-untyped]

from tests.baked import RAW, BakedProject, Template, features
from tests.custom_resources import trigger_parameters, validate
from tests.programs import require

pytestmark = [pytest.mark.full, pytest.mark.integration]

DOCKERFILE = "deploy/Dockerfile"
BIN = Path(sys.prefix) / "bin"
URL = "PIPELINE_DATABASE_URL"
WRITABLE = 'mount --bind "$0" /opt && cd "$1" && exec bash -euc "$2"'
READ_ONLY = """
mount --bind "$0" /opt && mount -o remount,bind,ro /opt && mount -o remount,bind,ro / || exit
if mountpoint -q /tmp; then mount -o remount,bind,ro /tmp || exit; fi
cd "$1" && user=${2%:*} group=${2#*:} && shift 2
exec unshare --user --map-user="$user" --map-group="$group" "$@"
"""
"""As Kubernetes has it: another user without capabilities, and nothing to write to."""


@dataclass
class Stage:
    """What a Dockerfile has said between one FROM and the next."""

    files: Path
    """What lies in the stage's /opt."""
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    words: dict[str, str] = field(default_factory=dict)
    """Instructions that only say something, such as CMD."""


@dataclass
class Image:
    """What the Dockerfile of a service makes, by its own steps, without Docker.

    Everything of ours is below /opt, which is a folder of the test in the namespace of mounts in
    which a step runs. The base image is this machine with an environment of Python.
    """

    context: Path
    home: Path
    stages: dict[str, Stage] = field(default_factory=dict)

    def build(self) -> None:
        """Follow the steps. A step that fails fails the test, with what it said."""
        subprocess.run([sys.executable, "-m", "venv", self.home / "python"], check=True)
        text = (self.context / DOCKERFILE).read_text("utf-8")
        text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
        for line in filter(str.strip, text.splitlines()):
            word, _, rest = line.partition(" ")
            self._follow(word, rest.strip())

    def _follow(self, word: str, rest: str) -> None:
        match word:
            case "FROM":
                name = rest.partition(" AS ")[2]
                files = self.home / f"stage-{len(self.stages)}"
                files.mkdir()
                self.stages[name] = Stage(files, self._base())
            case "ARG":
                name, _, default = rest.partition("=")
                self.last.arguments[name] = default
            case "ENV":
                known = {**self.last.arguments, "PATH": self.last.environment["PATH"]}
                for name, value in re.findall(r"(\w+)=(\S+)", rest):
                    text = re.sub(r"\$(\w+)", lambda found: known[found[1]], value)
                    self.last.environment[name] = text
            case "WORKDIR":
                self.last.folder = rest
                self.at(self.last, rest).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(rest)
            case "RUN":
                command = ["bash", "-euc", WRITABLE, self.last.files, self.last.folder, rest]
                self._in_namespace(command, self.last.environment)
            case _:
                self.last.words[word] = rest

    def _base(self) -> dict[str, str]:
        """Return what the base image says, and where packages come from on this machine."""
        path = f"{self.home / 'python' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        return {"HOME": str(self.home / "nobody"), "PATH": path, **pip}

    def _copy(self, rest: str) -> None:
        source, target = rest.split(" ")[-2:]
        to = self.at(self.last, target)
        if stage := re.match(r"--from=(\w+) ", rest):
            shutil.copytree(self.at(self.stages[stage[1]], source), to, symlinks=True)
            return
        # .dockerignore lets nothing through but what it names.
        rules = (self.context / ".dockerignore").read_text("utf-8").splitlines()
        assert "*" in rules
        assert f"!{source}" in rules, f".dockerignore keeps {source} out"
        if (self.context / source).is_dir():
            ignore = shutil.ignore_patterns(*(r[3:] for r in rules if r.startswith("**/")))
            shutil.copytree(self.context / source, to, ignore=ignore)
        else:
            shutil.copy(self.context / source, to)

    @property
    def last(self) -> Stage:
        return list(self.stages.values())[-1]

    def at(self, stage: Stage, path: str) -> Path:
        """Return where a path of a stage is on this machine."""
        return stage.files / (Path(stage.folder) / path).relative_to("/opt")

    def _in_namespace(self, command: list[Any], environment: dict[str, str]) -> None:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", *command],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs something in the image, as it is run in production."""
        namespace = ["unshare", "--user", "--map-root-user", "--mount"]
        stage = self.last
        where = [str(stage.files), stage.folder, stage.words["USER"]]
        return [*namespace, "bash", "-c", READ_ONLY, *where, *command]

    def run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            self.command(*command),
            env=self.last.environment | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def image(default_project: BakedProject) -> Iterator[Image]:
    """The service's image, from a clone that was made with the umask 077."""
    # Not in pytest's folder, whose path goes into every script of an environment and may be long.
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        clone = Path(folder, "clone")
        shutil.copytree(default_project.path, clone, symlinks=True)
        for path in (clone, *clone.rglob("*")):
            path.chmod(path.stat().st_mode & 0o700)
        made = Image(clone, Path(folder))
        made.build()
        yield made


@pytest.fixture
async def settings(image: Image) -> dict[str, str]:
    """The settings of an installation: a database of its own, and the brokers."""
    name = f"deploy_{uuid.uuid4().hex[:8]}"
    url = os.environ[URL]
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {n: v for n, v in os.environ.items() if n == "PIPELINE_KAFKA_BOOTSTRAP_SERVERS"}
    return given | {URL: f"{url.rpartition('/')[0]}/{name}", "PIPELINE_HEALTH_PORT": str(port)}


def test_nothing_in_the_image_can_be_written_and_nobody_is_root(image: Image) -> None:
    tell = "id -u; grep CapEff /proc/self/status; touch /opt/app/x /tmp/x 2>&1 || true"
    said = image.run("sh", "-c", tell)

    assert said.startswith("10001\n")
    assert re.search(r"CapEff:\s+0{16}\n", said)
    assert said.count("Read-only file system") == 2


def test_every_user_can_read_all_files_of_the_image(image: Image) -> None:
    # Not as that user: the namespace maps the owner of the files to it.
    needed = {True: 0o555, False: 0o444}
    paths = [path for path in image.last.files.rglob("*") if not path.is_symlink()]
    wrong = [one for one in paths if needed[one.is_dir()] & ~one.stat().st_mode]

    assert len(paths) > 1_000
    assert wrong == []


@pytest.mark.parametrize(
    "name", ["alembic.ini", "migrations", "migrations/env.py", "migrations/versions"]
)
@pytest.mark.parametrize("command", ["migrate", "run", "doctor"])
def test_a_file_that_the_user_cannot_read_is_named(image: Image, name: str, command: str) -> None:
    path = image.last.files / "app" / name
    mode = path.stat().st_mode
    settings = {URL: "postgresql+asyncpg://a@127.0.0.1:1/a"}
    settings |= {"PIPELINE_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    path.chmod(0)
    try:
        done = subprocess.run(
            image.command("service", command),
            env=image.last.environment | settings,
            capture_output=True,
            text=True,
        )
    finally:
        path.chmod(mode)

    assert done.returncode == 1
    assert done.stderr == (
        f"{name} can't be read by the user 10001, who runs this: chmod -R a+rX {name}\n"
    )


def test_compose_reads_mounted_files_as_their_owner(together: dict[str, dict[str, Any]]) -> None:
    mounting = {
        name
        for name, service in together.items()
        if any(volume["type"] == "bind" for volume in service.get("volumes", []))
    }

    assert mounting == {"collector", "prometheus", "grafana"}
    assert {together[name].get("user") for name in mounting} == {"0"}


def test_the_image_holds_the_service_and_no_more(
    image: Image, default_project: BakedProject
) -> None:
    held = {path.name for path in (image.last.files / "app").iterdir()}
    [source] = (image.last.files / "service" / "lib").glob("python*/site-packages/onceward")

    assert held == {"alembic.ini", "migrations"}
    assert {path.name for path in image.last.files.iterdir()} == {"app", "service"}
    assert (source / "runtime.py").read_text("utf-8") == default_project.read(
        "src/onceward/runtime.py"
    )
    assert "Usage: service" in image.run("service", "--help")


def test_the_command_completes_what_is_typed(image: Image) -> None:
    asked = {
        "_SERVICE_COMPLETE": "complete_bash",
        "COMP_WORDS": "service dead re",
        "COMP_CWORD": "2",
    }

    assert image.run("service", **asked).split() == ["redrive"]


def test_the_image_migrates_serves_is_found_healthy_and_stops_in_order(
    image: Image, settings: dict[str, str]
) -> None:
    words = image.last.words
    entry, default = json.loads(words["ENTRYPOINT"]), json.loads(words["CMD"])
    check = json.loads(words["HEALTHCHECK"].partition(" CMD ")[2])
    image.run(*entry, "migrate", **settings)
    image.run(*entry, "topics", "create", **settings)
    process = subprocess.Popen(
        image.command(*entry, *default),
        env=image.last.environment | settings,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_until_ready(int(settings["PIPELINE_HEALTH_PORT"]))
        image.run(*check, **settings)
        process.send_signal(signal.Signals[words["STOPSIGNAL"]])
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()

    assert process.returncode == 0, said
    assert "has stopped" in said
    unhealthy = subprocess.run(
        image.command(*check), env=image.last.environment | settings, capture_output=True
    )
    assert unhealthy.returncode == 1


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5)
            return
        time.sleep(0.2)
    pytest.fail("the image's command did not become ready")


def test_the_dockerfile_passes_its_linter(default_project: BakedProject) -> None:
    default_project.run(BIN / "hadolint", DOCKERFILE)


def test_no_secret_is_written_into_the_image(default_project: BakedProject) -> None:
    said = default_project.read(DOCKERFILE)

    assert not re.search(r"password|secret=|token|DATABASE_URL", said, re.IGNORECASE)


def bases(project: BakedProject) -> list[str]:
    """Return the images that the Dockerfile begins with, which are not stages of its own."""
    begins = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", project.read(DOCKERFILE), re.MULTILINE)
    stages = {stage for _, stage in begins}
    return [image for image, _ in begins if image not in stages]


def test_one_command_pins_the_base_of_all_stages_by_its_digest(
    default_project: BakedProject, tmp_path: Path
) -> None:
    project = BakedProject(tmp_path / "service", default_project.answers)
    for name in ("deploy", "requirements"):
        shutil.copytree(default_project.path / name, project.path / name)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(default_project.path / name, project.path)
    [base] = bases(project)
    tag = base.partition("@")[0]
    # Written out, as Dependabot reads no ARG.
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", tag)

    docker = tmp_path / "docker"
    asked = f"buildx imagetools inspect --format {{{{.Manifest.Digest}}}} {tag}"
    for digit in "ab":  # the second time it has one already
        digest = f"sha256:{digit * 64}"
        docker.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] && echo {digest}\n', "utf-8")
        docker.chmod(0o755)
        said = project.run("make", "pin-image", PATH=f"{tmp_path}:{os.environ['PATH']}")
        assert f"FROM {tag}@{digest} AS base\n" in said
        assert bases(project) == [f"{tag}@{digest}"]
    project.run(BIN / "hadolint", DOCKERFILE)
    assert not (project.path / f"{DOCKERFILE}.old").exists()


def built(project: BakedProject, folder: str) -> list[dict[str, Any]]:
    """Return the objects that kustomize makes of a folder of manifests."""
    return list(yaml.safe_load_all(project.run(require("kustomize"), "build", folder)))


@pytest.fixture(scope="module")
def production(default_project: BakedProject) -> list[dict[str, Any]]:
    """The objects of the overlay for production."""
    return built(default_project, "deploy/kubernetes/production")


REPLICAS = "  - name: consumer\n    count: 3\n  - name: relay\n    count: 2\n"
"""What the component keda says to take out of the overlay."""


@pytest.fixture(scope="module")
def with_components(
    default_project: BakedProject, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The objects of that overlay with all that waits in it as a comment."""
    return with_all_components(default_project, tmp_path_factory.mktemp("manifests"))


def with_all_components(project: BakedProject, folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a service's overlay with all that waits in it as a comment."""
    copy = folder / "kubernetes"
    shutil.copytree(project.path / "deploy" / "kubernetes", copy)
    overlay = copy / "production" / "kustomization.yaml"
    said = overlay.read_text("utf-8").replace(REPLICAS, "")
    overlay.write_text(re.sub(r"^  # - ", "  - ", said, flags=re.MULTILINE), "utf-8")
    return built(project, str(copy / "production"))


def optional() -> list[str]:
    """Return the features that files in deploy/ have conditions for, or belong to."""
    files = [path.read_text("utf-8") for path in (RAW / "deploy").rglob("*") if path.is_file()]
    return [
        name
        for name, paths in features().items()
        if any(f"cookiecutter.{name} ==" in text for text in files)
        or any(path.startswith("deploy/") for path in paths)
    ]


@pytest.fixture(
    scope="module",
    params=product(("yes", "no"), repeat=len(optional())),
    ids="-".join,
)
def combined(
    request: pytest.FixtureRequest, template: Template, tmp_path_factory: pytest.TempPathFactory
) -> BakedProject:
    """A service for each combination of these features."""
    answers = dict(zip(optional(), request.param, strict=True))
    return template.bake(tmp_path_factory.mktemp("combined"), **answers)


def test_features_that_share_files_are_found() -> None:
    assert {"http_api", "personal_data", "operations_page", "object_store"} <= set(optional())


@pytest.fixture(scope="module")
def all_objects(
    combined: BakedProject, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The objects of its overlay with all components."""
    return with_all_components(combined, tmp_path_factory.mktemp("manifests"))


def test_objects_of_combined_features_fit_the_schemas(all_objects: list[dict[str, Any]]) -> None:
    for each in all_objects:
        validate(each)


def test_every_process_that_handles_or_reads_messages_has_their_keys(
    combined: BakedProject, all_objects: list[dict[str, Any]]
) -> None:
    given = secrets(all_objects)
    deployed = [each["metadata"]["name"] for each in all_objects if each["kind"] == "Deployment"]
    composed_ones = composed(combined)

    is_api = combined.answers["http_api"] == "yes"
    assert set(deployed) == {"consumer", "relay", "operator", *(["api"] if is_api else [])}
    expected = combined.answers["personal_data"] == "yes"
    for name in deployed:
        assert ("PIPELINE_PERSONAL_KEYS" in given[name]) == expected, name
    for name in long_lived(composed_ones):
        environment = composed_ones[name]["environment"]
        assert ("PIPELINE_PERSONAL_KEYS" in environment) == expected, name


def test_every_process_with_metrics_is_scraped(
    combined: BakedProject, all_objects: list[dict[str, Any]]
) -> None:
    config = yaml.safe_load(combined.read("deploy/compose/prometheus.yaml"))
    [scraped] = config["scrape_configs"]
    targets = scraped["static_configs"][0]["targets"]
    assert sorted(targets) == sorted(f"{name}:8080" for name in long_lived(composed(combined)))

    pods = workloads(all_objects)
    with_metrics = {
        name
        for name, pod in pods.items()
        if any(port["name"] == "health" for port in pod["spec"]["containers"][0].get("ports", []))
    }
    service = of_kind(all_objects, "Service", "metrics")
    assert {name for name, pod in pods.items() if _matches(service, pod)} == with_metrics
    assert with_metrics == set(long_lived(composed(combined)))


def long_lived(services: dict[str, dict[str, Any]]) -> list[str]:
    """Return the processes of the service that Compose restarts."""
    return [name for name, one in services.items() if one.get("restart") == "unless-stopped"]


def test_combined_features_are_sent_requests_only_if_they_have_an_api(
    combined: BakedProject, all_objects: list[dict[str, Any]]
) -> None:
    [policy] = [each["spec"] for each in all_objects if each["kind"] == "NetworkPolicy"]
    open_ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    is_api = combined.answers["http_api"] == "yes"
    assert (8000 in open_ports) == is_api
    assert ("EXPOSE 8000" in combined.read(DOCKERFILE)) == is_api


def workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod templates of deployments and jobs, by their names."""
    specs = {
        each["metadata"]["name"]: each["spec"]
        for each in objects
        if each["kind"] in ("CronJob", "Deployment", "Job")
    }
    return {
        name: spec.get("jobTemplate", {}).get("spec", spec)["template"]
        for name, spec in specs.items()
    }


@pytest.mark.parametrize("folder", ["base", "production"])
def test_the_manifests_fit_the_schemas_of_kubernetes(
    default_project: BakedProject, folder: str
) -> None:
    objects = built(default_project, f"deploy/kubernetes/{folder}")

    assert len(objects) == 8
    for each in objects:
        validate(each)


def test_processes_have_longer_to_end_than_the_setting_gives_them(
    production: list[dict[str, Any]],
) -> None:
    [grace] = re.findall(
        r"shutdown_grace: Seconds = ([\d.]+)", (RAW / "src/onceward/settings.py").read_text("utf-8")
    )
    [settings] = [each["data"] for each in production if each["kind"] == "ConfigMap"]
    pods = workloads(production)

    assert float(settings["PIPELINE_SHUTDOWN_GRACE"]) == float(grace)
    for name in ("consumer", "relay"):
        assert pods[name]["spec"]["terminationGracePeriodSeconds"] >= float(grace) + 15


def test_every_container_goes_without_root_and_without_a_writable_file(
    with_components: list[dict[str, Any]], image: Image
) -> None:
    user, group = map(int, image.last.words["USER"].split(":"))
    for pod in workloads(with_components).values():
        assert pod["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": group,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert pod["spec"]["automountServiceAccountToken"] is False
        [container] = pod["spec"]["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        # Of what is written, only temporary files, which schemas of Protobuf need.
        temporary = {"name": "temporary", "emptyDir": {"sizeLimit": "64Mi"}}
        assert temporary in pod["spec"]["volumes"]
        assert {"name": "temporary", "mountPath": "/tmp"} in container["volumeMounts"]


def secrets(objects: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return by workload which variables come from which key of a secret."""
    assert not [each for each in objects if each["kind"] == "Secret"]
    return {
        name: {
            e["name"]: e["valueFrom"]["secretKeyRef"]["key"]
            for e in pod["spec"]["containers"][0]["env"]
            if "valueFrom" in e
        }
        for name, pod in workloads(objects).items()
    }


PASSWORD = {"PIPELINE_KAFKA_USER": "user", "PIPELINE_KAFKA_PASSWORD": "password"}
"""The settings whose values are in the secret `kafka`, and its keys."""


def test_secrets_are_named_and_never_written(production: list[dict[str, Any]]) -> None:
    assert secrets(production) == {
        "consumer": PASSWORD | {URL: "url"},
        "relay": PASSWORD | {URL: "url"},
        "migration": PASSWORD | {URL: "migration-url"},
    }


def test_production_connects_by_tls_with_secrets_that_the_page_creates(
    production: list[dict[str, Any]],
) -> None:
    [settings] = [each["data"] for each in production if each["kind"] == "ConfigMap"]
    created = dict(re.findall(r"create secret generic (\w+) (.+)", DEPLOYING))

    assert settings["PIPELINE_DATABASE_TLS"] == "true"
    assert settings["PIPELINE_KAFKA_SECURITY_PROTOCOL"] == "SASL_SSL"
    for pod in workloads(production).values():
        [container] = pod["spec"]["containers"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        mounted = {
            e["name"]: e["secret"]["secretName"] for e in pod["spec"]["volumes"] if "secret" in e
        }
        named = {
            each["valueFrom"]["secretKeyRef"]["name"]
            for each in container["env"]
            if "valueFrom" in each
        }
        assert created.keys() == named | set(mounted.values())
        for server in ("DATABASE", "KAFKA"):
            folder, _, file = settings[f"PIPELINE_{server}_CA_FILE"].rpartition("/")
            [volume] = [name for name, path in mounts.items() if path == folder]
            assert f"--from-file={file}" in created[mounted[volume]].split()


def test_the_components_fit_the_schemas_and_reach_every_workload(
    with_components: list[dict[str, Any]],
) -> None:
    for each in with_components:
        validate(each)
        assert each["metadata"]["namespace"] == "parcel-tracker"
    [policy] = [each["spec"] for each in with_components if each["kind"] == "NetworkPolicy"]
    [settings] = [each for each in with_components if each["kind"] == "ConfigMap"]
    images = set()
    for pod in workloads(with_components).values():
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        [container] = pod["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in pod["spec"]["volumes"]}
        for name, value in settings["data"].items():
            assert name.endswith("_FILE") == value.startswith(f"{mounts['certificates']}/")
        images.add(container["image"])
    assert len(images) == 1


COMPONENTS = sorted(one.name for one in (RAW / "deploy/kubernetes/components").iterdir())


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_fits_without_the_others(
    component: str, default_project: BakedProject, tmp_path: Path
) -> None:
    objects = with_component(default_project, component, tmp_path)

    for each in objects:
        validate(each)
    images = {pod["spec"]["containers"][0]["image"] for pod in workloads(objects).values()}
    assert len(images) == 1
    assert images != {"parcel-tracker"}


def with_component(project: BakedProject, name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a service's overlay with this component alone."""
    copy = folder / "kubernetes"
    shutil.copytree(project.path / "deploy" / "kubernetes", copy)
    overlay = copy / "production" / "kustomization.yaml"
    before, _, after = overlay.read_text("utf-8").partition("  - ../components/tls\n")
    overlay.write_text(f"{before}  - ../components/{name}\n{after}", "utf-8")
    return built(project, str(copy / "production"))


def of_kind(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """Return the object of this kind and name."""
    [found] = [e for e in objects if (e["kind"], e["metadata"]["name"]) == (kind, name)]
    return found


def test_a_mistake_in_an_object_of_an_operator_is_found(
    with_components: list[dict[str, Any]],
) -> None:
    scaled = of_kind(with_components, "ScaledObject", "consumer")
    with pytest.raises(ValidationError, match="minReplicas"):
        validate(scaled | {"spec": scaled["spec"] | {"minReplicas": 2}})


def setting(name: str) -> str:
    """Return the default of a setting of the engine."""
    text = (RAW / "src/onceward/settings.py").read_text("utf-8")
    [found] = re.findall(rf"\n    {name}: .* = \"?([\w.]+)", text)
    return str(found)


def test_the_autoscaler_uses_the_groups_lag_and_never_scales_to_zero(
    with_components: list[dict[str, Any]],
) -> None:
    scaled = of_kind(with_components, "ScaledObject", "consumer")["spec"]
    deployment = of_kind(with_components, "Deployment", scaled["scaleTargetRef"]["name"])["spec"]
    trigger, *queries = scaled["triggers"]
    [settings] = [each["data"] for each in with_components if each["kind"] == "ConfigMap"]
    told = trigger["metadata"]

    assert "replicas" not in deployment, "a release would set them"
    assert 1 < scaled["minReplicaCount"] < scaled["maxReplicaCount"]
    assert "idleReplicaCount" not in scaled
    # Two polls see the offsets that were committed in between.
    assert scaled["pollingInterval"] > float(setting("offset_commit_interval"))
    assert trigger["useCachedMetrics"]
    assert told["bootstrapServersFromEnv"] in settings
    assert told["consumerGroup"] == "parcel-tracker"
    assert told["offsetResetPolicy"] == setting("consumer_start")
    assert [one["type"] for one in queries] == ["postgresql"] * len(queries)


@pytest.mark.parametrize("name", ["consumer", "relay"])
def test_the_autoscaler_counts_what_waits_in_postgresql_as_the_operator(
    with_components: list[dict[str, Any]], name: str
) -> None:
    known = trigger_parameters("postgresql")
    scaled = of_kind(with_components, "ScaledObject", name)["spec"]
    deployment = of_kind(with_components, "Deployment", scaled["scaleTargetRef"]["name"])["spec"]
    asked = [one for one in scaled["triggers"] if one["type"] == "postgresql"]

    assert asked
    assert "replicas" not in deployment, "a release would set them"
    assert 1 < scaled["minReplicaCount"] < scaled["maxReplicaCount"]
    for trigger in asked:
        told, reference = trigger["metadata"], trigger["authenticationRef"]["name"]
        for parameter in told:
            assert "triggerMetadata" in known[parameter].places, parameter
        assert int(told["targetQueryValue"]) < int(re.findall(r"LIMIT (\d+)", told["query"])[-1])
        given = of_kind(with_components, "TriggerAuthentication", reference)["spec"]
        [secret] = given["secretTargetRef"]
        assert "authParams" in known[secret["parameter"]].places
        assert f"The secret `{secret['name']}` has the key `{secret['key']}`" in DEPLOYING


def test_the_autoscaler_connects_as_the_consumers_do(
    with_components: list[dict[str, Any]], default_project: BakedProject, tmp_path: Path
) -> None:
    known = trigger_parameters("kafka")
    [trigger, *_] = of_kind(with_components, "ScaledObject", "consumer")["spec"]["triggers"]
    reference = trigger["authenticationRef"]["name"]
    given = of_kind(with_components, "TriggerAuthentication", reference)["spec"]
    pod = workloads(with_components)["consumer"]["spec"]
    [container] = pod["containers"]
    told = trigger["metadata"]

    for name, value in told.items():
        parameter = known[name.removesuffix("FromEnv")]
        place = "resolvedEnv" if name.endswith("FromEnv") else "triggerMetadata"
        assert place in parameter.places, name
        assert not parameter.values or value in parameter.values
    mechanism = re.search(
        r'kafka_sasl_mechanism: .*\n +"([\w-]+)"\n',
        (RAW / "src/onceward/server_settings.py").read_text("utf-8"),
    )
    assert mechanism
    assert told["tls"] == "enable"
    assert told["sasl"].replace("_", "") == mechanism[1].lower().replace("-", "")
    for one in (*given["env"], *given["secretTargetRef"]):
        assert "authParams" in known[one["parameter"]].places
    assert {one["name"] for one in given["env"]} <= {one["name"] for one in container["env"]}
    [authority] = given["secretTargetRef"]
    mounted = {one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    assert authority["name"] in mounted

    alone = with_component(default_project, "keda", tmp_path)
    [trigger, *_] = of_kind(alone, "ScaledObject", "consumer")["spec"]["triggers"]
    assert not {"tls", "sasl"} & trigger["metadata"].keys()


def test_the_operator_scrapes_all_processes_as_the_job_that_the_rules_select(
    with_components: list[dict[str, Any]],
) -> None:
    monitor = of_kind(with_components, "ServiceMonitor", "service")["spec"]
    rules = of_kind(with_components, "PrometheusRule", "service")["spec"]
    [endpoint] = monitor["endpoints"]
    selected = [
        each
        for each in with_components
        if each["kind"] == "Service" and _selector_of(monitor) <= _labels(each)
        if endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}
    ]

    [service] = selected
    job = service["metadata"]["labels"][monitor["jobLabel"]]
    assert set(re.findall(r'job="([^"]+)"', json.dumps(rules).replace('\\"', '"'))) == {job}
    pods = workloads(with_components)
    scraped = {name for name, pod in pods.items() if _matches(service, pod)}
    assert scraped == {"consumer", "relay"}


def _selector_of(monitor: dict[str, Any]) -> Set[tuple[str, str]]:
    return cast(dict[str, str], monitor["selector"]["matchLabels"]).items()


def _labels(each: dict[str, Any]) -> Set[tuple[str, str]]:
    return cast(dict[str, str], each["metadata"]["labels"]).items()


def test_the_rules_of_the_operator_are_those_of_prometheus_and_stay_so(
    with_components: list[dict[str, Any]], default_project: BakedProject, tmp_path: Path
) -> None:
    rules = of_kind(with_components, "PrometheusRule", "service")["spec"]
    assert rules == yaml.safe_load(default_project.read("deploy/prometheus/alerts.yaml"))

    for name in ("deploy", "dev"):
        shutil.copytree(default_project.path / name, tmp_path / name)
    copy = BakedProject(tmp_path, default_project.answers)
    write = (sys.executable, "-B", "dev/alert_rules.py")
    copy.run(*write, "--check")
    alerts = tmp_path / "deploy/prometheus/alerts.yaml"
    alerts.write_text(alerts.read_text("utf-8").replace("> 300", "> 600"), "utf-8")
    refused = subprocess.run([*write, "--check"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "run `python dev/alert_rules.py`" in refused.stderr
    copy.run(*write)
    copy.run(*write, "--check")
    assert "> 600" in copy.read("deploy/kubernetes/components/prometheus-operator/rule.yaml")


def test_processes_of_a_deployment_are_spread_if_possible_and_start_anyway(
    with_api: list[dict[str, Any]],
) -> None:
    pods = workloads(with_api)
    for name in ("api", "consumer", "relay"):
        spread = pods[name]["spec"]["topologySpreadConstraints"]
        assert [one["topologyKey"] for one in spread] == [
            "topology.kubernetes.io/zone",
            "kubernetes.io/hostname",
        ]
        for one in spread:
            assert one["whenUnsatisfiable"] == "ScheduleAnyway"
            wanted = one["labelSelector"]["matchLabels"].items()
            labels = {each: pod["metadata"]["labels"].items() for each, pod in pods.items()}
            assert [each for each, has in labels.items() if wanted <= has] == [name]


def test_with_components_each_process_has_the_role_that_is_its_own(
    with_components: list[dict[str, Any]],
) -> None:
    assert secrets(with_components) == {
        "consumer": PASSWORD | {URL: "url"},
        "relay": PASSWORD | {URL: "relay-url"},
        "migration": PASSWORD | {URL: "migration-url"},
        "operator": PASSWORD | {URL: "operator-url", "PIPELINE_PAGE_TOKEN": "token"},
        "retention": PASSWORD | {URL: "retention-url"},
    }


def test_what_the_jobs_say_works_in_the_image(
    with_components: list[dict[str, Any]], image: Image, settings: dict[str, str]
) -> None:
    jobs = workloads(with_components)
    [migration] = jobs["migration"]["spec"]["containers"]
    [retention] = jobs["retention"]["spec"]["containers"]
    image.run("service", *migration["args"], **settings)
    image.run(*retention["command"], *retention["args"], **settings)


def test_every_pod_is_selected_by_its_own_workload_alone(
    production: list[dict[str, Any]], image: Image
) -> None:
    pods = workloads(production)
    selected = {
        (each["kind"], each["metadata"]["name"]): {
            name
            for name, pod in pods.items()
            if _selector(each).items() <= pod["metadata"]["labels"].items()
        }
        for each in production
        if each["kind"] in ("Deployment", "PodDisruptionBudget", "Service")
    }

    assert selected == {
        **{
            (kind, n): {n}
            for kind in ("Deployment", "PodDisruptionBudget")
            for n in ("consumer", "relay")
        },
        ("Service", "metrics"): {"consumer", "relay"},
    }


@pytest.fixture(scope="module")
def with_api(template: Template, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The objects of the overlay of a service with an HTTP API, and its network policy."""
    project = template.bake(tmp_path_factory.mktemp("with_api"), http_api="yes")
    return with_component(project, "network", tmp_path_factory.mktemp("manifests"))


def test_a_service_with_an_http_api_deploys_it_beside_the_others(
    with_api: list[dict[str, Any]],
) -> None:
    for each in with_api:
        validate(each)
    pods = workloads(with_api)
    [container] = pods["api"]["spec"]["containers"]
    [consumer] = pods["consumer"]["spec"]["containers"]
    [service] = [e for e in with_api if (e["kind"], e["metadata"]["name"]) == ("Service", "api")]
    [policy] = [each["spec"] for each in with_api if each["kind"] == "NetworkPolicy"]
    [scaled] = [
        each["spec"]["replicas"]
        for each in with_api
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "api")
    ]

    assert scaled == 2
    assert container["args"] == ["api"]
    alike = ("livenessProbe", "readinessProbe", "securityContext", "volumeMounts")
    assert {name: container[name] for name in alike} == {name: consumer[name] for name in alike}
    assert {name: pod for name, pod in pods.items() if _matches(service, pod)}.keys() == {"api"}
    [http] = [one for one in container["ports"] if one["name"] == "http"]
    assert service["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    assert {"ports": [{"port": http["containerPort"]}]} in policy["ingress"]


def _matches(service: dict[str, Any], pod: dict[str, Any]) -> bool:
    return bool(_selector(service).items() <= pod["metadata"]["labels"].items())


def _selector(each: dict[str, Any]) -> dict[str, str]:
    selector = each["spec"]["selector"]
    labels: dict[str, str] = selector.get("matchLabels", selector)
    return labels


def test_probes_ask_what_the_service_answers_on_the_port_of_the_image(
    production: list[dict[str, Any]], image: Image
) -> None:
    port = int(image.last.words["EXPOSE"])
    assert image.last.environment["PIPELINE_HEALTH_PORT"] == str(port)
    for name in ("consumer", "relay"):
        [container] = workloads(production)[name]["spec"]["containers"]
        assert container["ports"] == [{"name": "health", "containerPort": port}]
        asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")}
        assert asked == {
            "liveness": {"path": "/health/live", "port": "health"},
            "readiness": {"path": "/health/ready", "port": "health"},
        }


def test_settings_in_the_manifests_exist(with_components: list[dict[str, Any]]) -> None:
    modules = (RAW / f"src/onceward/{name}.py" for name in ("settings", "server_settings"))
    known = "".join(module.read_text("utf-8") for module in modules)
    [settings] = [each["data"] for each in with_components if each["kind"] == "ConfigMap"]
    for name in settings:
        assert f"    {name.removeprefix('PIPELINE_').lower()}: " in known, name


COMPOSE = ("deploy/compose.yaml", "deploy/compose.service.yaml")


def composed(project: BakedProject) -> dict[str, dict[str, Any]]:
    """Return the services of both compose files, as Docker Compose merges them."""
    files = [option for name in COMPOSE for option in ("--file", name)]
    compose = require("docker-compose")
    merged = json.loads(project.run(compose, *files, "config", "--format", "json"))
    services: dict[str, dict[str, Any]] = merged["services"]
    return services


@pytest.fixture(scope="module")
def together(default_project: BakedProject) -> dict[str, dict[str, Any]]:
    """The services of both compose files."""
    return composed(default_project)


@pytest.fixture(scope="module", params=["no", "yes"])
def project(
    request: pytest.FixtureRequest, template: Template, tmp_path_factory: pytest.TempPathFactory
) -> BakedProject:
    """A service without and with what files for compose and CI have conditions for."""
    optional = ("engine_tests", "http_api", "personal_data")
    return template.bake(
        tmp_path_factory.mktemp("project"), **dict.fromkeys(optional, request.param)
    )


SCHEMAS = {
    "deploy/compose.yaml": ["vendor.compose-spec"],
    "deploy/compose.service.yaml": ["vendor.compose-spec"],
    ".github/workflows/ci.yaml": ["vendor.github-workflows"],
    ".github/dependabot.yml": ["vendor.dependabot"],
    ".gitlab-ci.yml": ["vendor.gitlab-ci", "--data-transform", "gitlab-ci"],
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_for_compose_or_ci_has_what_its_schema_allows(
    project: BakedProject, tmp_path: Path, name: str
) -> None:
    check = [str(BIN / "check-jsonschema"), "--builtin-schema", *SCHEMAS[name]]
    project.run(*check, name)

    key = re.search(r"^ +(image|runs-on|interval|script):", project.read(name), re.MULTILINE)
    assert key
    misspelt = tmp_path / Path(name).name
    misspelt.write_text(project.read(name).replace(f"{key[1]}:", f"{key[1]}e:"), "utf-8")
    done = subprocess.run([*check, misspelt], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout


def test_compose_brings_up_all_of_it(together: dict[str, dict[str, Any]]) -> None:
    assert set(together) == {
        *("postgres", "kafka", "migration", "topics", "consumer", "relay"),
        *("collector", "prometheus", "grafana"),
    }
    for name, service in together.items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", []))
        for other in service.get("depends_on", {}):
            assert other in together


def test_compose_serves_an_http_api_as_it_runs_the_consumer(project: BakedProject) -> None:
    services = composed(project)
    if project.answers["http_api"] == "no":
        assert "api" not in services
        return
    other = {"command", "ports", "networks"}
    api, consumer = (
        {name: value for name, value in services[one].items() if name not in other}
        for one in ("api", "consumer")
    )

    assert api == consumer
    assert api["environment"]["PIPELINE_PERSONAL_KEYS"]


def test_compose_mounts_files_that_exist(together: dict[str, dict[str, Any]]) -> None:
    mounted = [
        Path(volume["source"])
        for service in together.values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
    ]

    assert len(mounted) == 6
    for path in mounted:
        assert path.exists(), path


def test_the_rules_that_prometheus_reads_are_mounted(
    default_project: BakedProject, together: dict[str, dict[str, Any]]
) -> None:
    config = yaml.safe_load(default_project.read("deploy/compose/prometheus.yaml"))
    [scraped] = config["scrape_configs"]

    rules = str(default_project.path / "deploy" / "prometheus")
    assert any(
        (mount["source"], mount["target"]) == (rules, "/etc/prometheus/rules")
        for mount in together["prometheus"]["volumes"]
    )
    for name in config["rule_files"]:
        there = name.replace("rules/", "deploy/prometheus/", 1)
        assert (default_project.path / there).exists(), there
    for target in scraped["static_configs"][0]["targets"]:
        assert target.partition(":")[0] in together


def test_prometheus_can_read_its_configuration_and_the_rules(
    default_project: BakedProject, tmp_path: Path
) -> None:
    deploy = default_project.path / "deploy"
    shutil.copytree(deploy / "prometheus", tmp_path / "rules")
    config = shutil.copy(deploy / "compose" / "prometheus.yaml", tmp_path / "prometheus.yml")
    promtool = require("promtool")

    assert "1 rule files found" in default_project.run(promtool, "check", "config", config)
    text = Path(config).read_text("utf-8")
    Path(config).write_text(text.replace("job_name:", "job_nam:"), "utf-8")
    done = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True)
    assert done.returncode != 0
    assert "job_nam" in done.stderr


def test_the_service_of_compose_reaches_the_listener_that_kafka_has_for_it(
    together: dict[str, dict[str, Any]],
) -> None:
    kafka = together["kafka"]["environment"]
    for name in ("migration", "topics", "consumer", "relay"):
        service = together[name]
        assert (service["read_only"], service["tmpfs"]) == (True, ["/tmp"])
        assert service["cap_drop"] == ["ALL"]
        address = service["environment"]["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"]
        assert f"INSIDE://{address}" in kafka["KAFKA_ADVERTISED_LISTENERS"].split(",")
        assert f"INSIDE://:{address.partition(':')[2]}" in kafka["KAFKA_LISTENERS"].split(",")


def test_compose_gives_processes_as_long_to_end_as_kubernetes(
    together: dict[str, dict[str, Any]], production: list[dict[str, Any]]
) -> None:
    for name in ("consumer", "relay"):
        grace = workloads(production)[name]["spec"]["terminationGracePeriodSeconds"]
        assert together[name]["stop_grace_period"] == f"{grace}s"


def test_a_setting_of_the_service_itself_reaches_its_processes_as_the_read_me_says(
    template: Template, output: Path
) -> None:
    project = template.bake(output, worked_example="none")
    said = " ".join(project.read("README.md").split())
    [(manifest, block)] = re.findall(
        r"Kubernetes gets them from `literals` in `(\S+)`.* Compose from `(\S+)`", said
    )
    for name, place, line in (
        (manifest, r"literals:\n", "      - TARIFF=high\n"),
        (COMPOSE[-1], rf"{block}: .*\n", "  TARIFF: high\n"),
    ):
        text, count = re.subn(rf"(?m)^( *{place})", rf"\1{line}", project.read(name))
        assert count == 1, name
        (project.path / name).write_text(text, "utf-8")

    objects = built(project, "deploy/kubernetes/production")
    having = {
        each["metadata"]["name"]
        for each in objects
        if each["kind"] == "ConfigMap" and each["data"].get("TARIFF") == "high"
    }
    for name, pod in workloads(objects).items():
        given = pod["spec"]["containers"][0]["envFrom"]
        assert having & {one["configMapRef"]["name"] for one in given}, name
    services = composed(project)
    assert long_lived(services)
    for name in long_lived(services):
        assert services[name]["environment"]["TARIFF"] == "high", name


def test_both_files_for_ci_run_what_the_service_has(project: BakedProject) -> None:
    github = project.read(".github/workflows/ci.yaml")
    gitlab = project.read(".gitlab-ci.yml")

    nightly = ["test-engine"] if project.answers["engine_tests"] == "yes" else []
    for said in (github, gitlab):
        made = sorted(re.findall(r"make ([\w-]+)", said))
        assert made == sorted(["check", "test", "schema-check", *nightly])
        assert bool(re.search("== .schedule", said)) == bool(nightly)
        has_engine = project.answers["engine"] == "source"
        assert bool(re.search(r"- (run: )?python dev/engine.py --strict\n", said)) == has_engine
        assert re.search(r"pip install pip-audit==\d+\.\d+\.\d+\n", said)
        assert "pip-audit --require-hashes --requirement requirements/base.txt\n" in said
    assert " --sbom=true --provenance=mode=max --output=type=oci,dest=image.tar .\n" in github
    assert " --opt attest:sbom= --opt attest:provenance=mode=max\n" in gitlab
    assert '"$(command -v python)" dev/programs.py test\n' in github
    for used in re.findall(r"uses: (.*)", github):
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used)
    [tag] = set(re.findall(r"python:(\d+\.\d+\.\d+)", gitlab + project.read(DOCKERFILE)))
    assert f'python-version: "{tag.rpartition(".")[0]}"' in github


DEPLOYING, RELEASES, SCALING = (
    (RAW / "docs" / f"{name}.md").read_text("utf-8")
    for name in ("deploying", "releases", "scaling")
)


def test_the_release_that_the_page_describes_migrates_before_processes_change(
    default_project: BakedProject,
    production: list[dict[str, Any]],
    with_components: list[dict[str, Any]],
) -> None:
    release = RELEASES.partition("\n## A release\n")[2].partition("```sh\n")[2].partition("```")[0]
    build, _, first, wait, *_ = release.splitlines()
    later = re.search(r"component notin \(([a-z,]+)\)", first)
    assert later
    deployed = [e["metadata"]["name"] for e in with_components if e["kind"] == "Deployment"]

    assert sorted(later[1].split(",")) == sorted([*deployed, "api"]), "api: if the service has one"
    for each in with_components:
        label = each["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        assert (label in deployed) == (each["kind"] == "Deployment")
    assert "job/migration" in wait
    assert built(default_project, build.split()[2]) == production


def test_the_page_counts_connections_as_the_engine_does(image: Image) -> None:
    count = (
        "from onceward.servers.database import create_engine;"
        "from onceward.settings import Settings;"
        "print(create_engine(Settings(), name='').pool.size())"
    )
    url = "postgresql+asyncpg://a@b/c"
    given = {URL: url, "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": "a:1"}
    most = int(image.run("python", "-c", count, **given))

    assert f": {most} by default" in SCALING
    assert f"3 consumers and 2 relays take {5 * most} at most, and {7 * most} while" in SCALING


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(DEPLOYING, id="deploying"),
        pytest.param(RELEASES, id="releases"),
        pytest.param(SCALING, id="scaling"),
    ],
)
def test_commands_of_the_page_are_shell_and_name_files_that_exist(
    default_project: BakedProject, page: str
) -> None:
    named = re.findall(r"deploy/[\w./-]+[a-zA-Z]", page)
    assert named
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        default_project.run("bash", "-n", "-c", block)
    for name in named:
        assert (default_project.path / name).exists(), name
