"""Environment variables whose names begin with EAGLE3_: settings, and those that something else here reads.

Any other such name is a slip of the pen (`EAGLE3_TRAIN_LEARNING_RATE`, with one underscore), and what it
says would count for nothing without a word. So it is refused, like an unknown key anywhere else.
"""

import difflib
import re
from collections.abc import Collection, Mapping

ENVIRONMENT_PREFIX = "EAGLE3_"

# What is no setting, and who reads it. Each is known everywhere: a shell that sets one for compose may also start the job.
OTHERS = {
    "EAGLE3_WEBHOOK": "URL that is told how a run ends; `rental.webhook_variable` can name another variable",
    "EAGLE3_HOME": "entrypoints/local: where environments lie",
    "EAGLE3_KIND": "entrypoints/local: cpu or gpu",
    "EAGLE3_PYTHON": "entrypoints/local: the Python to use",
    "EAGLE3_HEALTHY_MINUTES": "entrypoints/healthy: a container is healthy while something was written within so many minutes",
    "EAGLE3_DATA": "docker-compose.yml: the volume or folder behind /data",
    "EAGLE3_IMAGE": "docker-compose.yml, managed-spot.yaml: the GPU image",
    "EAGLE3_CPU_IMAGE": "docker-compose.yml: the CPU image",
    "EAGLE3_S3_IMAGE": "docker-compose.yml: the image of the local S3",
    "EAGLE3_BASE_IMAGE": "docker-compose.yml: what the GPU image is built on",
    "EAGLE3_CPU_BASE_IMAGE": "docker-compose.yml: what the CPU image is built on",
    "EAGLE3_REVISION": "docker-compose.yml: the commit that an image is labelled with",
    "EAGLE3_JOB": "managed-spot.yaml: the job to run",
    "EAGLE3_STATUS": "given to rental.on_finish: done, no_go, failed or interrupted",
    "EAGLE3_EXIT_CODE": "given to rental.on_finish",
    "EAGLE3_RUN_DIR": "given to rental.on_finish",
    "EAGLE3_PUBLISHED": "given to rental.on_finish: where the head is, empty where nowhere",
}
# What Kubernetes puts into every container for a Service, which may well be called eagle3-something.
SERVICE = re.compile(r"_(SERVICE_HOST|(SERVICE_)?PORT(_[A-Z0-9_]+)?)$")


def settings_in(environment: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Dotted key -> name of the variable that sets it, sorted by name. known: every settable key."""
    names = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and "__" in name)
    keys = {name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): name for name in names}
    return {key: name for key, name in keys.items() if _is_setting(key, known)}


def unknown_in(environment: Mapping[str, str], known: Collection[str], also: Collection[str] = ()) -> list[str]:
    """A clause for each variable of ours that nothing reads, with the nearest name that something does.

    also: names that are read besides `OTHERS`, such as that of the webhook.
    """
    read = {*settings_in(environment, known).values(), *OTHERS, *also}
    ours = (name for name in sorted(environment) if name.startswith(ENVIRONMENT_PREFIX) and not SERVICE.search(name))
    return [f"{name} is no setting and nothing reads it{_nearest(name, known)}" for name in ours if name not in read]


def _is_setting(key: str, known: Collection[str]) -> bool:
    """Whether it is a key, a table of keys (`generate.thinking`), or one within a value (`prompts.domains.x`)."""
    return "." in key and any(key == each or each.startswith(f"{key}.") or key.startswith(f"{each}.") for each in known)


def _nearest(name: str, known: Collection[str]) -> str:
    """` (did you mean …?)`; compared without the prefix, which would make any two names alike."""
    names = [key.upper().replace(".", "__") for key in known] + [other.removeprefix(ENVIRONMENT_PREFIX) for other in OTHERS]
    match = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX).upper(), names, n=1, cutoff=0.6)
    return f" (did you mean {ENVIRONMENT_PREFIX}{match[0]}?)" if match else ""
