"""The manifests, as Python values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.api import Launch

Manifest = dict[str, Any]

_JOB = "/etc/hpctrain"
# the file into which Trainer and the MPI operator put the hosts
_HOSTS = "/etc/mpi/hostfile"
_SSH = "/home/mpiuser/.ssh"
_SSHD = ["/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config"]
# thousandths of a CPU and GiB that are requested for each rank if the job does not say: little more than its start needs, as the
# pods of a larger guess may fit on no node
_RANK_CPU, _RANK_MEMORY = 500, 1
# resources that mpirun alone needs
_LAUNCHER = {"cpu": "1", "memory": "1Gi"}
_QUEUE = "kueue.x-k8s.io/queue-name"
_PORT = 29400
# seconds before sshd is probed
_PATIENCE = 5


@dataclass(frozen=True)
class JobPlace:
    """A job's name and namespace, with what it is to run. options: KubernetesOptions."""

    name: str
    namespace: str | None
    launch: Launch
    options: Any

    def metadata(self, name: str | None = None) -> Manifest:
        """`metadata` of an object."""
        own = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": name or self.name, **own, "labels": {"app.kubernetes.io/managed-by": "hpctrain"}}

    @property
    def of_job(self) -> Manifest:
        """`metadata` of the job itself, which Kueue admits."""
        queue = {} if self.options.queue is None else {"labels": {_QUEUE: self.options.queue}}
        return merged(merged(self.metadata(), queue), self.options.extra.metadata)

    def container(self, ranks: int, name: str = "node", command: list[str] | None = None) -> Manifest:
        """A container with the volumes; resources of `ranks` ranks, 0 for an mpirun alone."""
        mounts = [
            {"name": "run", "mountPath": self.options.mount},
            {"name": "job", "mountPath": _JOB},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        own = {
            "name": name,
            "image": self.options.image,
            **({} if command is None else {"command": command}),
            "workingDir": self.options.mount,
            **(
                {"envFrom": [{"secretRef": {"name": one}} for one in self.options.secrets]}
                if self.options.secrets
                else {}
            ),
            "resources": self._resources(ranks),
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": mounts,
        }
        extra = self.options.extra.container
        for words in {"command", "args"} & extra.keys():  # one command line does not go on with another
            own.pop(words, None)
        return merged(own, extra)

    def pod(self, container: Manifest, **more: Any) -> Manifest:
        """A pod's `spec`, which the Pod Security Standard "restricted" admits. The ranks get as long to save as the job says."""
        volumes = [
            {"name": "run", "persistentVolumeClaim": {"claimName": self.options.claim}},
            {"name": "job", "configMap": {"name": self.name}},
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory"},
            },  # the default of 64 MB is too small for MPI and data workers
        ]
        options, user = self.options, self.options.user
        where = {
            "nodeSelector": options.node_selector,
            "tolerations": [one.model_dump(exclude_none=True) for one in options.tolerations],
            "imagePullSecrets": [{"name": one} for one in options.pull_secrets],
        }
        own = {
            "terminationGracePeriodSeconds": self.launch.save_seconds,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **{key: value for key, value in where.items() if value},
        }  # fmt: skip
        return merged({**more, **own, "containers": [container], "volumes": volumes}, options.extra.pod)

    @property
    def deadline(self) -> Manifest:
        return {} if self.launch.seconds is None else {"activeDeadlineSeconds": self.launch.seconds}

    @property
    def run(self) -> list[str]:
        """The command of a rank."""
        return ["hpctrain", "run", f"{_JOB}/job.toml"]

    @property
    def mpirun(self) -> list[str]:
        ranks = self.launch.nodes * self.launch.ranks_per_node
        # Kubernetes fills in $(NAME) in commands
        environment = [f"{name}={text}".replace("$(", "$$(") for name, text in self.launch.environment.items()]
        return [
            *(["env", *environment] if environment else []),
            "mpirun",
            "--hostfile",
            _HOSTS,
            "-n",
            str(ranks),
            *self.run,
        ]

    def _resources(self, ranks: int) -> Manifest:
        """Requests of all; limits of what the job says, as a default that is too small would end the ranks."""
        if not ranks:
            return {"requests": _LAUNCHER, "limits": _LAUNCHER}
        cpus, memory, gpus = self.launch.cpus_per_rank, self.options.memory, self.options.gpus_per_rank
        limits = {
            **({"cpu": str(cpus * ranks)} if cpus else {}),
            **({"memory": memory} if memory else {}),
            **({self.options.gpu: str(gpus * ranks)} if gpus else {}),
        }
        requests = {"cpu": f"{_RANK_CPU * ranks}m", "memory": f"{_RANK_MEMORY * ranks}Gi"} | limits
        return {"requests": requests, **({"limits": limits} if limits else {})}


def merged(below: Manifest, above: Mapping[str, Any]) -> Manifest:
    """`above` over `below`: tables key by key, lists one after the other."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            found[key] = merged(old, value)
        else:
            found[key] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value
    return found


def volume_claim(place: JobPlace) -> Manifest:
    """The claim for the run's files."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": place.options.claim_size}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": place.metadata(place.options.claim),
        "spec": spec,
    }


def config_map(place: JobPlace) -> Manifest:
    """The job file."""
    data = {"job.toml": place.launch.runs[0].text}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": place.metadata(), "data": data}


def train_job(place: JobPlace) -> list[Manifest]:
    """A TrainJob of Kubeflow Trainer v2, with a runtime of its own: the MPI policy, and the volumes. The launcher is node 0."""
    launch, api = place.launch, "trainer.kubeflow.org/v1alpha1"
    probe = {"readinessProbe": {"tcpSocket": {"port": 2222}, "initialDelaySeconds": _PATIENCE}}
    first = place.container(launch.ranks_per_node)
    other = place.container(launch.ranks_per_node, command=_SSHD) | probe
    step = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
    jobs = [
        {"name": "launcher", "template": {**step, "spec": _once(place.pod(first, restartPolicy="Never"))}},
        {"name": "node", "template": {"spec": _once(place.pod(other, restartPolicy="Never"))}},
    ]
    policy = {
        "numProcPerNode": launch.ranks_per_node,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": _SSH,
        "runLauncherAsNode": True,
    }
    set_spec = {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "failurePolicy": {"maxRestarts": place.options.restarts},
        "replicatedJobs": jobs,
    }
    runtime = {
        "apiVersion": api, "kind": "TrainingRuntime", "metadata": place.metadata(),
        "spec": {"mlPolicy": {"numNodes": launch.nodes, "mpi": policy}, "template": {"spec": set_spec}},
    }  # fmt: skip
    trainer = {"numNodes": launch.nodes, "numProcPerNode": launch.ranks_per_node, "command": place.mpirun}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": place.name}
    spec = {"runtimeRef": reference, "trainer": trainer, **place.deadline}
    return [runtime, {"apiVersion": api, "kind": "TrainJob", "metadata": place.of_job, "spec": spec}]


def _once(pod: Manifest) -> Manifest:
    """A Job that fails with its pod, so that the set starts again as a whole: the other pods hold ranks of the old start."""
    return {"backoffLimit": 0, "template": {"spec": pod}}


def mpi_job(place: JobPlace) -> list[Manifest]:
    """An MPIJob v2beta1 of the MPI operator. The launcher runs no rank."""
    launch = place.launch
    launcher = place.pod(place.container(0, "launcher", place.mpirun), restartPolicy="OnFailure")
    worker = place.pod(place.container(launch.ranks_per_node, "worker", _SSHD))
    spec = {
        "slotsPerWorker": launch.ranks_per_node,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": _SSH,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": place.options.restarts, **place.deadline},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": {"spec": launcher}},
            "Worker": {"replicas": launch.nodes, "template": {"spec": worker}},
        },
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": place.of_job, "spec": spec}]


def indexed_job(place: JobPlace) -> list[Manifest]:
    """An indexed Job: a pod for each rank, whose variables are torchrun's, and a headless Service that gives rank 0 a name."""
    ranks = place.launch.nodes * place.launch.ranks_per_node
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    told = {
        "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": place.name,
        "MASTER_ADDR": f"{place.name}-0.{place.name}", "MASTER_PORT": str(_PORT),
        "HOME": place.options.mount,  # the ranks recognize each other by a file in the home directory
    }  # fmt: skip
    env: list[Manifest] = [{"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}]
    env += [{"name": name, "value": value} for name, value in told.items()]
    pod = place.pod(
        merged({"env": env}, place.container(1, "rank", place.run)), subdomain=place.name, restartPolicy="Never"
    )
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    stopped = {"action": "Ignore", "onExitCodes": {"containerName": "rank", "operator": "In", "values": [75]}}
    spec = {
        "completionMode": "Indexed", "completions": ranks, "parallelism": ranks,
        "backoffLimit": place.options.restarts * ranks,  # of pods, and one that fails takes all ranks along
        "podFailurePolicy": {"rules": [disrupted, stopped]},
        **place.deadline, "template": {"metadata": {"labels": {"hpctrain-job": place.name}}, "spec": pod},
    }  # fmt: skip
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"hpctrain-job": place.name}}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": place.metadata(), "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": place.of_job, "spec": spec},
    ]
