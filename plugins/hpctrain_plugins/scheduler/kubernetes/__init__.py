"""Kubernetes: a TrainJob of Kubeflow Trainer v2, an MPIJob, or an indexed Job, through kubectl."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from hpctrain.api import Field, JobState, Launch, Options, Scheduler, UsageError, hookimpl
from hpctrain.toolkit.scripts import Line, asked, told_by
from hpctrain_plugins.scheduler.kubernetes.manifests import (
    JobPlace,
    config_map,
    indexed_job,
    mpi_job,
    train_job,
    volume_claim,
)

_RESOURCES = {"TrainJob": "trainjobs.trainer.kubeflow.org", "MPIJob": "mpijobs.kubeflow.org", "Job": "jobs.batch"}
# the label of a job's pods that has its name
_PODS = {
    "trainjobs.trainer.kubeflow.org": "jobset.sigs.k8s.io/jobset-name",
    "mpijobs.kubeflow.org": "training.kubeflow.org/job-name",
    "jobs.batch": "batch.kubernetes.io/job-name",
}
_MAKERS = {"TrainJob": train_job, "MPIJob": mpi_job, "Job": indexed_job}
# characters of a name, to which hash, job, index and service add: 63 is the limit of a label
_LONGEST = 40


class Toleration(Options):
    """A taint of nodes that the pods accept, in Kubernetes' own words."""

    key: Line | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: Line | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: int | None = Field(default=None, ge=0)  # noqa: N815


class Extra(Options):
    """Options that Kubernetes takes besides, in its own words."""

    metadata: dict[str, Any] = Field(default={}, description="of the job, such as labels")
    pod: dict[str, Any] = Field(default={}, description="of each pod's spec, such as priorityClassName")
    container: dict[str, Any] = Field(default={}, description="of each container, such as imagePullPolicy")


class KubernetesOptions(Options):
    image: Line = Field(description="container image that has hpctrain; for TrainJob and MPIJob also Open MPI and sshd")
    claim: Line = Field(description="PersistentVolumeClaim for the run's files, which all pods can write to")
    claim_size: Line | None = Field(
        default=None, description='make the claim, of this size, such as "500Gi"; else it exists'
    )
    mount: Line = Field(
        default="/work", description="where the claim is mounted; relative paths of the job start there"
    )
    kind: Literal["TrainJob", "MPIJob", "Job"] = Field(
        default="TrainJob",
        description="TrainJob (Kubeflow Trainer v2), MPIJob (v2beta1), or an indexed Job without an operator",
    )
    namespace: Line | None = Field(default=None, description="namespace (default: kubectl's)")
    memory: Line | None = Field(
        default=None,
        description='memory of each node, or of each rank of a Job, such as "64Gi": requested, and the limit (default: 4 GiB for '
        "each rank are requested, without a limit)",
    )
    gpus_per_rank: int = Field(default=0, ge=0, description="GPUs of each rank")
    gpu: Line = Field(default="nvidia.com/gpu", description="the resource that gpus_per_rank counts")
    user: int = Field(default=1000, ge=1, description="user and group id of the ranks, as the image has it; never root")
    queue: Line | None = Field(default=None, description="Kueue's local queue, which admits the job")
    node_selector: dict[str, Line] = Field(default={}, description="labels that the nodes must have")
    tolerations: list[Toleration] = Field(default=[], description="taints of nodes that the pods accept")
    pull_secrets: list[Line] = Field(default=[], description="Secrets with which the nodes pull the image")
    extra: Extra = Field(
        default=Extra(), description="more of Kubernetes' own keys: tables metadata, pod and container"
    )
    secrets: list[Line] = Field(
        default=[],
        description="Secrets whose keys become environment variables: of all ranks of a Job, of node 0's ranks of a TrainJob "
        "(loggers run on rank 0)",
    )
    restarts: int = Field(
        default=10, ge=0, description="how often the job may start again, also after it has saved and stopped"
    )


class Kubernetes(Scheduler):
    """kubectl: a TrainJob with the MPI policy, on request an MPIJob or an indexed Job; the run's files are on a volume claim."""

    name = "kubernetes"
    Options = KubernetesOptions
    options: KubernetesOptions
    script_name = "submit.yaml"

    def render(self, launch: Launch) -> str:
        import yaml

        self._refuse(launch)
        options, name = self.options, _name(launch)
        place = JobPlace(name, options.namespace, launch, options)
        documents = [volume_claim(place)] if options.claim_size else []
        documents += [config_map(place), *_MAKERS[options.kind](place)]

        class Dumper(yaml.SafeDumper):  # type: ignore[misc]
            """Writes texts of several lines, such as the job file, as they are."""

            def ignore_aliases(self, data: Any) -> bool:
                return True

        def written(dumper: Any, value: str) -> Any:
            return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

        Dumper.add_representer(str, written)
        text = str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, explicit_start=True, width=120))
        if [*yaml.safe_load_all(text)] != documents:
            raise UsageError("the job has a text that YAML does not give back as it is, such as control characters")
        return f"# Written by `hpctrain submit`.\n{text}"

    def submit(self, script: Path, launch: Launch) -> list[str]:
        id = f"{_RESOURCES[self.options.kind]}/{_name(launch)}"
        # one that has ended; applying the same again would start nothing
        self._kubectl("delete", id, "--ignore-not-found")
        self._kubectl("apply", "--filename", str(script))
        return [id]

    def state(self, id: str) -> JobState:
        _refuse_other_objects(id)
        shown = asked(["kubectl", *self._namespace(), "get", id, "--ignore-not-found", "--output", "json"])
        if not shown:
            return JobState(
                "unknown", "Kubernetes has no such job any more" if shown == "" else "kubectl cannot reach it"
            )
        state = _state(json.loads(shown).get("status") or {})
        return replace(state, detail=self._unschedulable(id)) if state == JobState("pending") else state

    def _unschedulable(self, id: str) -> str:
        """Why the scheduler finds no node for the job's pods; empty if it does not say so."""
        kind, _, name = id.partition("/")
        shown = asked(
            ["kubectl", *self._namespace(), "get", "pods", f"--selector={_PODS[kind]}={name}", "--output", "json"]
        )
        found = [
            one.get("message") or "no message"
            for pod in (json.loads(shown).get("items") or [] if shown else [])
            for one in pod.get("status", {}).get("conditions") or []
            if one.get("reason") == "Unschedulable"
        ]
        return f"(Unschedulable: {' '.join(found[0].split())})" if found else ""

    def cancel(self, id: str, directory: Path) -> None:
        _refuse_other_objects(id)
        self._kubectl("delete", id, "--wait=false")

    def _kubectl(self, *words: str) -> None:
        told_by(["kubectl", *self._namespace(), *words], f"kubectl {words[0]} was refused")

    def _namespace(self) -> list[str]:
        return [f"--namespace={self.options.namespace}"] if self.options.namespace else []

    def _refuse(self, launch: Launch) -> None:
        """Raises UsageError for what Kubernetes can't do."""
        if launch.after:
            raise UsageError("--after: Kubernetes starts no job after another one; submit it when the first is done")
        if self.options.secrets and self.options.kind == "MPIJob":
            raise UsageError(
                "[scheduler.kubernetes] secrets: the ranks of an MPIJob start over ssh, which passes no variables on; expected "
                'kind = "TrainJob" or "Job"'
            )
        own = {"env", "envFrom"} & self.options.extra.container.keys()
        if own and self.options.kind != "Job":
            raise UsageError(
                f"[scheduler.kubernetes] extra.container: found {', '.join(sorted(own))}, but the ranks of a {self.options.kind} "
                "start over ssh, which passes no variables on; expected variables of libraries in [environment] and all others in "
                'the image, or kind = "Job"'
            )
        import tomli

        output = PurePosixPath(tomli.loads(launch.runs[0].text)["job"]["output_dir"])
        mount = PurePosixPath(self.options.mount)
        if ".." in output.parts or (output.is_absolute() and mount not in output.parents):
            raise UsageError(
                f"[job] output_dir: found {output}, expected a path in the volume claim, relative or below {mount}: else the "
                "checkpoints would be lost with the pods"
            )


def _refuse_other_objects(id: str) -> None:
    """Raises UsageError for an id that is no job's: a run's directory may be crafted."""
    kind, _, name = id.partition("/")
    if kind not in _RESOURCES.values() or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise UsageError(
            f"found the id {id!r}, expected one of {', '.join(_RESOURCES.values())} with a name behind a slash"
        )


def _name(launch: Launch) -> str:
    """The job's name for Kubernetes. The hash keeps runs of one name in two directories apart."""
    letters = "".join(one if one.isascii() and one.isalnum() else "-" for one in launch.name.lower())
    mark = sha256(str(launch.runs[0].directory).encode()).hexdigest()[:6]
    return (
        f"{letters[:_LONGEST].strip('-') or 'job'}-{mark}"
        if letters[0].isalpha()
        else f"job-{letters[:_LONGEST]}-{mark}"
    )


def _state(status: dict[str, Any]) -> JobState:
    """The state by the conditions, which the three kinds name alike but for MPIJob's Succeeded."""
    true = {one["type"]: one for one in status.get("conditions") or [] if one.get("status") == "True"}
    if "Complete" in true or "Succeeded" in true:
        return JobState("done")
    if "Failed" in true:
        return JobState("failed", f"({true['Failed'].get('reason', 'no reason')})")
    pods = [status, *(status.get("jobsStatus") or []), *(status.get("replicaStatuses") or {}).values()]
    if "Running" in true or any(one.get("ready") for one in pods):
        return JobState("running")
    return JobState("pending", "(Suspended)" if "Suspended" in true else "")


@hookimpl
def hpctrain_scheduler() -> list[type[Scheduler]]:
    return [Kubernetes]
