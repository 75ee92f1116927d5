"""`SchedulerConfig` as code written for vLLM up to 0.15 calls it.

In 0.16.0 `max_model_len` and `is_encoder_decoder` are init-only arguments without a default, so
speculators 0.3.0's `SchedulerConfig(max_num_seqs=…, max_model_len=…, …)` is a validation error.
The values filled in are those of vLLM's own `SchedulerConfig.default_factory`. Code that gives
both arguments is not affected.
"""

import dataclasses
import functools
from types import ModuleType

from compat import registry
from compat.importing import when_imported

NAME = "scheduler_config"
CONFIG = "vllm.config.scheduler"
DEFAULTS = {"max_model_len": 8192, "is_encoder_decoder": False}


def needed() -> bool:
    """Whether the installed vLLM demands one of the two arguments."""
    from importlib import import_module

    return bool(_demanded(import_module(CONFIG).SchedulerConfig))


def apply() -> None:
    when_imported(CONFIG, _patch)


def _demanded(config_class: type) -> list[str]:
    """Those of the two arguments that have no default, as pydantic and dataclasses see the class."""
    fields = config_class.__dataclass_fields__
    missing = dataclasses.MISSING
    return [name for name in DEFAULTS if name in fields and fields[name].default is missing and fields[name].default_factory is missing]


def _patch(module: ModuleType) -> None:
    config_class = module.SchedulerConfig
    demanded = _demanded(config_class)
    if not demanded:
        return
    registry.expect(NAME, config_class.__post_init__, ["self", "max_model_len", "is_encoder_decoder"])
    validate = config_class.__init__

    @functools.wraps(validate)
    def __init__(self, *args, **fields):
        if not args:
            fields = {name: DEFAULTS[name] for name in demanded} | fields
        validate(self, *args, **fields)

    registry.replace(config_class, "__init__", __init__, NAME)


SHIM = registry.Shim(
    name=NAME,
    of="vllm",
    patches=(f"{CONFIG}.SchedulerConfig.__init__",),
    why="code written for vLLM up to 0.15 constructs it without max_model_len or is_encoder_decoder",
    upstream="speculators 0.4.0 passes both; no vLLM release takes the old call again",
    needed=needed,
    apply=apply,
)
