"""``deploy/kubernetes``: what is rendered is valid, hangs together, and starts real engines."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from outrider.cli import app as cli
from outrider.ops.deploy import capabilities
from outrider.ops.deploy.render import render
from outrider.ops.deploy.spec import parse
from tests.support.manifests import (
    DEPLOY,
    FOLDERS,
    KUBERNETES,
    STEPS,
    Object,
    built,
    container,
    needs_kubectl,
    objects,
    of_kind,
    one,
    problems,
)

pytestmark = needs_kubectl
PAIRS = ("overlays/staging", "overlays/production")
SERVING = ("overlays/dev", *PAIRS)
TRACKS = ("speculative", "plain")
SPECULATION = "--speculative-config"


def scaled_by_hpa(to: Path) -> Path:
    """Production with the other way to scale."""
    shutil.copytree(KUBERNETES, to, dirs_exist_ok=True)
    file = to / "overlays" / "production" / "kustomization.yaml"
    file.write_text(file.read_text("utf-8").replace("scaling/keda", "scaling/hpa"), "utf-8")
    return file.parent


def arguments(deployment: Object) -> dict[str, str]:
    """The flags of an engine with their values."""
    words = [word for word in container(deployment)["args"] if word.startswith("--")]
    return dict(word.split("=", 1) for word in words)


def selects(selector: dict[str, str], deployment: Object) -> bool:
    return selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_object_follows_its_schema(folder: str) -> None:
    found = objects(folder)
    assert found
    assert [line for each in found for line in problems(each)] == []


def test_production_can_scale_by_a_horizontal_pod_autoscaler(tmp_path: Path) -> None:
    found = objects(scaled_by_hpa(tmp_path / "kubernetes"))
    assert [line for each in found for line in problems(each)] == []
    assert len(of_kind(found, "HorizontalPodAutoscaler")) == 2
    assert not of_kind(found, "ScaledObject")


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "replicas"), "2"),
        ("Deployment", ("spec", "template", "spec", "container"), []),
        ("Service", ("spec", "ports", 0, "port"), "http"),
        ("ScaledObject", ("spec", "maxReplicas"), 3),
        ("ScaledObject", ("spec", "minReplicaCount"), "1"),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "interval"), 15),
    ],
)
def test_the_schemas_refuse_what_a_cluster_would(
    kind: str, path: tuple[str | int, ...], value: object
) -> None:
    thing: Any = copy.deepcopy(of_kind(objects("overlays/production"), kind)[0])
    assert problems(thing) == []
    *above, last = path
    place = thing
    for step in above:
        place = place[step]
    place[last] = value
    assert problems(thing)


def write_base(engine: str, folder: Path) -> None:
    """Write the kustomize base that ``deploy render`` makes for an engine."""
    document = {"engine": engine, "target": {"model": "org/target"}, "service": {"replicas": 2}}
    for name, text in render(parse(document), "kustomize").files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


@pytest.mark.parametrize("engine", capabilities.ENGINES)
def test_what_deploy_render_writes_follows_the_schemas(engine: str, tmp_path: Path) -> None:
    write_base(engine, tmp_path)
    assert [line for each in objects(tmp_path) for line in problems(each)] == []


@pytest.mark.parametrize("folder", SERVING)
def test_probes_are_those_of_the_engine(folder: str) -> None:
    for deployment in of_kind(objects(folder), "Deployment"):
        pod = container(deployment)
        image, _, version = pod["image"].partition(":")
        engine = capabilities.find("outrider" if image == "outrider" else "vllm", version)
        paths = [
            pod[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
        ]
        assert paths == [engine.alive, engine.alive, engine.ready]
        assert pod["image"] == engine.image
        # Half an hour for weights, which a fixed delay would add to every start.
        startup = pod["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] >= 1800
        assert not any("initialDelaySeconds" in pod[name] for name in pod if name.endswith("Probe"))


@pytest.mark.parametrize("folder", SERVING)
def test_streams_can_end_before_a_pod_is_killed(folder: str) -> None:
    for deployment in of_kind(objects(folder), "Deployment"):
        pod = container(deployment)
        sleep, seconds = pod["lifecycle"]["preStop"]["exec"]["command"]
        assert sleep == "sleep"
        drain = float(arguments(deployment)["--shutdown-timeout"])
        grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > float(seconds) + drain
        # While it sleeps the Services must have noticed.
        assert float(seconds) >= 10
        rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxUnavailable": 0, "maxSurge": 1}


@pytest.mark.parametrize("folder", SERVING)
def test_engines_are_started_with_options_that_they_have(folder: str) -> None:
    for deployment in of_kind(objects(folder), "Deployment"):
        given = arguments(deployment)
        if container(deployment)["image"].startswith("outrider:"):
            command, *flags = container(deployment)["args"]
            assert command == "serve"
            done = CliRunner().invoke(cli, ["config", *flags])
            assert done.exit_code == 0, done.output
            continue
        assert container(deployment)["command"] == ["vllm", "serve"]
        recorded = capabilities.schema("vllm")
        assert set(given) <= set(recorded["options"])
        speculation = json.loads(given.get(SPECULATION, "{}"))
        assert set(speculation) <= set(recorded["nested"]["speculative_config"])


@pytest.mark.parametrize("folder", PAIRS)
def test_only_the_speculative_track_drafts(folder: str) -> None:
    found = objects(folder)
    plain = container(one(found, "Deployment", "engine-plain"))["args"]
    speculative = container(one(found, "Deployment", "engine-speculative"))["args"]
    (more,) = set(speculative) - set(plain)
    assert more.startswith(SPECULATION)
    assert set(plain) < set(speculative)
    assert json.loads(more.partition("=")[2])["num_speculative_tokens"] > 0


@pytest.mark.parametrize("folder", PAIRS)
def test_gpus_are_those_of_the_tensor_parallel_size(folder: str) -> None:
    for deployment in of_kind(objects(folder), "Deployment"):
        limits = container(deployment)["resources"]["limits"]
        size = arguments(deployment).get("--tensor-parallel-size", "1")
        assert limits["nvidia.com/gpu"] == int(size)
        volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("folder", [*SERVING, "models", "guard"])
def test_pods_keep_to_the_restricted_standard_and_write_to_volumes_alone(folder: str) -> None:
    found = objects(folder)
    for workload in of_kind(found, "Deployment") + of_kind(found, "Job"):
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is (folder == "guard")
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container(workload)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for namespace in of_kind(found, "Namespace"):
        labels = namespace["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_hub_token_is_seen_by_the_job_that_fetches_and_by_nobody_else() -> None:
    job = one(objects("models"), "Job", "fetch-models")
    volumes = {each["name"]: each for each in job["spec"]["template"]["spec"]["volumes"]}
    assert volumes["hub-token"]["secret"]["defaultMode"] == 0o440
    assert all("ecret" not in built(KUBERNETES / folder) for folder in SERVING)
    # What it fetches is what the engines read, which may not write there.
    fetched = (KUBERNETES / "models" / "models.txt").read_text("utf-8").split("\n")
    names = {line.split()[0] for line in fetched if line}
    for folder in PAIRS:
        for deployment in of_kind(objects(folder), "Deployment"):
            words = " ".join(container(deployment)["args"])
            read = {found.strip('"') for found in re.findall(r"/models/([\w./-]+)", words)}
            assert read
            assert read <= names
            mounts = {each["name"]: each for each in container(deployment)["volumeMounts"]}
            assert mounts["models"]["readOnly"] is True
            assert mounts["models"]["mountPath"] == "/models"


def test_volumes_that_are_claimed_exist() -> None:
    claims = {
        claim["metadata"]["name"] for claim in of_kind(objects("models"), "PersistentVolumeClaim")
    }
    for folder in PAIRS:
        for deployment in of_kind(objects(folder), "Deployment"):
            pod = deployment["spec"]["template"]["spec"]
            used = {
                v["persistentVolumeClaim"]["claimName"]
                for v in pod["volumes"]
                if "persistentVolumeClaim" in v
            }
            assert used <= claims
            mounted = {each["name"] for each in container(deployment)["volumeMounts"]}
            assert mounted == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("folder", SERVING)
def test_what_selects_pods_selects_those_of_one_deployment(folder: str) -> None:
    found = objects(folder)
    deployments = of_kind(found, "Deployment")
    for kind, path in (
        ("Service", ("spec", "selector")),
        ("PodDisruptionBudget", ("spec", "selector", "matchLabels")),
        ("NetworkPolicy", ("spec", "podSelector", "matchLabels")),
    ):
        things = of_kind(found, kind)
        assert len(things) == len(deployments)
        for thing in things:
            selector: Any = thing
            for step in path:
                selector = selector[step]
            chosen = [d["metadata"]["name"] for d in deployments if selects(selector, d)]
            assert chosen == [thing["metadata"]["name"]]
    for deployment in deployments:
        for spread in deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]:
            assert selects(spread["labelSelector"]["matchLabels"], deployment)


@pytest.mark.parametrize("folder", PAIRS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_shares_the_traffic_between_the_tracks(folder: str, step: int) -> None:
    (route,) = objects(f"route/{step}")
    (rule,) = route["spec"]["rules"]
    weights = {each["name"]: each["weight"] for each in rule["backendRefs"]}
    assert weights == {"engine-speculative": step, "engine-plain": 100 - step}
    services = {each["metadata"]["name"]: each for each in of_kind(objects(folder), "Service")}
    for backend in rule["backendRefs"]:
        ports = [port["port"] for port in services[backend["name"]]["spec"]["ports"]]
        assert backend["port"] in ports
    # An upgrade must not undo what the guard did.
    assert not of_kind(objects(folder), "HTTPRoute")


def test_the_steps_differ_in_their_weights_alone() -> None:
    routes = [objects(f"route/{step}")[0] for step in STEPS]
    for route in routes:
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            del backend["weight"]
    assert all(route == routes[0] for route in routes)


def test_a_scaled_deployment_says_nothing_of_replicas(tmp_path: Path) -> None:
    for folder in ("overlays/production", scaled_by_hpa(tmp_path / "kubernetes")):
        found = objects(folder)
        deployments = {each["metadata"]["name"]: each for each in of_kind(found, "Deployment")}
        scalers = of_kind(found, "ScaledObject") + of_kind(found, "HorizontalPodAutoscaler")
        assert {each["spec"]["scaleTargetRef"]["name"] for each in scalers} == set(deployments)
        assert not any("replicas" in each["spec"] for each in deployments.values())


def test_the_guard_may_change_its_route_and_nothing_else() -> None:
    found = objects("guard")
    (role,) = of_kind(found, "Role")
    rights = {
        (resource, verb): rule.get("resourceNames")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    (route,) = objects("route/5")
    assert rights == {
        ("httproutes", "get"): [route["metadata"]["name"]],
        ("httproutes", "patch"): [route["metadata"]["name"]],
        ("leases", "get"): ["outrider-guard"],
        ("leases", "update"): ["outrider-guard"],
        ("leases", "create"): None,
    }
    (binding,) = of_kind(found, "RoleBinding")
    (account,) = of_kind(found, "ServiceAccount")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    pod = one(found, "Deployment", "guard")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]


def test_the_guard_is_scraped() -> None:
    found = objects("guard")
    (monitor,) = of_kind(found, "PodMonitor")
    guard = one(found, "Deployment", "guard")
    assert selects(monitor["spec"]["selector"]["matchLabels"], guard)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [each["name"] for each in container(guard)["ports"]]


def test_the_guard_takes_its_policy() -> None:
    policies = pytest.importorskip("outrider.ops.guard.policy", reason="needs outrider ops guard")
    policy = policies.read(KUBERNETES / "guard" / "policy.toml")
    (route,) = objects("route/5")
    assert policy.traffic.route == route["metadata"]["name"]
    names = [each["name"] for each in route["spec"]["rules"][0]["backendRefs"]]
    assert [policy.traffic.engine, policy.traffic.standby] == names
    assert [policy.engine.url, policy.standby.url] == [f"http://{name}" for name in names]
    production = objects("overlays/production")
    (namespace,) = of_kind(production, "Namespace")
    for labels, track in ((policy.source.engine, TRACKS[0]), (policy.source.standby, TRACKS[1])):
        matched = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert matched == {"namespace": namespace["metadata"]["name"], "track": track}
    assert policy.traffic.namespace == policy.lease.namespace == namespace["metadata"]["name"]
    assert policy.lease.name == "outrider-guard"
    # What it mounts is where it looks.
    guard = container(one(objects("guard"), "Deployment", "guard"))
    mounts = [each["mountPath"] for each in guard["volumeMounts"]]
    assert policy.folder in mounts
    assert guard["args"][:3] == ["ops", "guard", "run"]
    assert policy.listen.endswith(f":{guard['ports'][0]['containerPort']}")


def queries() -> list[str]:
    """All texts that name metrics; those of the adapter are selectors."""
    found = objects("overlays/production")
    texts = [s["spec"]["triggers"][0]["metadata"]["query"] for s in of_kind(found, "ScaledObject")]
    adapter = yaml.safe_load((KUBERNETES / "scaling/hpa/adapter.yaml").read_text("utf-8"))
    texts += [rule["seriesQuery"] for rule in adapter["rules"]["custom"]]
    example = yaml.safe_load((DEPLOY / "examples/argo-analysis.yaml").read_text("utf-8"))
    texts += [m["provider"]["prometheus"]["query"] for m in example["spec"]["metrics"]]
    return texts


def test_metrics_that_scale_are_on_a_live_server(server: Any, client: Any) -> None:
    from urllib.request import urlopen

    client.completions.create(model="tiny", prompt="def", max_tokens=8)
    named = set(re.findall(r"(?:vllm|outrider)[:_][a-z_]+", " ".join(queries())))
    assert "vllm:num_requests_waiting" in named
    live = urlopen(f"{server.url}/metrics").read().decode()
    assert {name for name in named if not re.search(rf"(?m)^{name}[{{ ]", live)} == set()


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")
def test_prometheus_understands_the_queries(tmp_path: Path) -> None:
    texts = [re.sub(r"\{\{[^}]*\}\}", "some", each) for each in queries()]
    rules = [{"record": f"query:{i}", "expr": each} for i, each in enumerate(texts)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), "utf-8")
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(texts)} rules found" in done.stdout


def test_the_autoscaler_asks_for_the_name_that_the_adapter_gives(tmp_path: Path) -> None:
    adapter = yaml.safe_load((KUBERNETES / "scaling/hpa/adapter.yaml").read_text("utf-8"))
    names = {rule["name"]["as"] for rule in adapter["rules"]["custom"]}
    scalers = of_kind(objects(scaled_by_hpa(tmp_path / "k")), "HorizontalPodAutoscaler")
    asked = {s["spec"]["metrics"][0]["pods"]["metric"]["name"] for s in scalers}
    assert asked == names


def test_scaling_reads_the_labels_that_monitoring_gives() -> None:
    found = objects("overlays/production")
    (monitor,) = of_kind(found, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    given = {each["targetLabel"] for each in endpoint["relabelings"]}
    for scaler in of_kind(found, "ScaledObject"):
        query = scaler["spec"]["triggers"][0]["metadata"]["query"]
        labels = dict(re.findall(r'(\w+)="([^"]*)"', query))
        assert set(labels) == {"namespace", *given}
        assert labels["namespace"] == scaler["metadata"]["namespace"]
        assert scaler["metadata"]["name"] == f"engine-{labels['track']}"
    assert all(
        selects(monitor["spec"]["selector"]["matchLabels"], d) for d in of_kind(found, "Deployment")
    )


def test_the_example_for_argo_follows_its_schema() -> None:
    example = yaml.safe_load((DEPLOY / "examples/argo-analysis.yaml").read_text("utf-8"))
    assert problems(example) == []


def test_the_alerts_are_a_prometheus_rule() -> None:
    pytest.importorskip("outrider.ops.alerts.rules", reason="needs outrider ops alerts")
    done = CliRunner().invoke(cli, ["ops", "alerts", "rules", "--format", "kubernetes"])
    assert done.exit_code == 0, done.output
    (rule,) = yaml.safe_load_all(done.stdout)
    assert rule["kind"] == "PrometheusRule"
    assert problems(rule) == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("checkov"), reason="needs checkov: pip install checkov")
def test_checkov_finds_nothing_but_the_exceptions(tmp_path: Path) -> None:
    rendered, bases = tmp_path / "rendered", tmp_path / "bases"
    rendered.mkdir()
    for folder in FOLDERS:
        text = built(KUBERNETES / folder)
        (rendered / f"{folder.replace('/', '-')}.yaml").write_text(text, "utf-8")
    for engine in capabilities.ENGINES:
        write_base(engine, bases / engine)
        (rendered / f"{engine}.yaml").write_text(built(bases / engine), "utf-8")
    command = [
        "checkov", "--config-file", KUBERNETES / "checkov.yaml", "--directory", rendered,
        "--skip-download", "--output", "json",
    ]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    report = json.loads(done.stdout)
    failed = report["results"]["failed_checks"]
    assert [(each["check_id"], each["resource"]) for each in failed] == []
    assert report["summary"]["passed"] > 400
