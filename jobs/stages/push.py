"""Push: the packaged head to its destination, verified, its manifest last."""

from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.storage.bucket import publish
from jobs.storage.files import write_json_atomically

NAME = "push"
SETTINGS = ("push.uri", "push.endpoint_url")


def inputs(context: Context) -> list[Path]:
    return [context.path / "head" / "manifest.json"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "published.json"]


def destination(context: Context) -> str:
    return context.settings.push.uri or (context.path / "published").as_uri()


def run(context: Context) -> dict[str, Any]:
    uri = destination(context)
    done = publish(
        context.path / "head", uri, context.settings.push, state=context.path / "push-state.json",
        progress=lambda sent, total: context.progress(sent / 1e6, total / 1e6, "MB"), should_stop=context.should_stop,
        # A run may replace what it published itself (a redone training), never another run's head.
        replace=context.run.ledger["published"] == uri,
    )  # fmt: skip
    context.run.ledger["published"] = uri
    write_json_atomically(context.path / "published.json", {"uri": uri, "manifest": done.manifest_sha256})
    return {"files": done.files, "bytes": done.bytes_sent, "uri": uri}
