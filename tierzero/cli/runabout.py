"""run.json: what a run was to be, written as it begins, for the report."""

from __future__ import annotations

from typing import Any

import tierzero as tz
from tierzero.cli.config import Config
from tierzero.cli.task import Task
from tierzero.planning.planned import Plan


def describe_run(config: Config, task: Task, plan: Plan, tiers: tz.Tiers, run_id: str) -> dict[str, Any]:
    """Sizes and budgets in bytes; `step_bytes` is what a step moves by the analytic table, all its micro-batches."""
    micro = config.train.accumulate
    return {
        "id": run_id,
        "model": task.describe(),
        "params": plan.params,
        "units": plan.units,
        "dtype": config.train.dtype,
        "steps": config.train.steps,
        "tokens_per_step": micro * config.data.batch * config.data.sequence,
        "accumulate": micro,
        "device_budget": plan.device_budget,
        "host_budget": plan.host_budget,
        "host_needed": plan.host_needed,
        "stores": [str(store) for store in config.stores],
        "nvme_tbw": tiers.rated_bytes(),
        "step_bytes": {
            "nvme_read": plan.state_nvme + micro * (plan.step_nvme_read - plan.state_nvme),
            "nvme_written": plan.step_nvme_written,
            "h2d": micro * plan.step_h2d,
            "d2h": micro * plan.step_d2h,
        },
        "native": plan.native,
        "version": tz.__version__,
    }
