"""Whether a step is planned alike without memory for its weights, by task=plan, and by a run: of every recipe.

    python scripts/same_plans.py                            # some minutes of one processor
    python scripts/same_plans.py --only shard --only gcn    # cases whose name has one of these
    python scripts/same_plans.py --processes 3

A case is a recipe, `none` or `shard`, a kernel and a budget. It is planned three times: of fake tensors; as task=plan
does, under `shard` for processes that are imagined; and by the trainer's own preparation, under `shard` in processes
that gloo connects. Compared is all that a report says but for when and where it was made: both halves of the program,
what is saved and what is recomputed with the reasons, the predicted peak with its timeline, the collectives in their
order. What each of several processes prints stands beside the others, too. A line for each case; exit code 1 where one
differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from aottrain.config.extensions.recipes import recipe_names  # noqa: E402
from aottrain.ir.settings.decisions import SOURCES  # noqa: E402

MODES, KERNELS, BUDGETS = ("none", "shard"), ("aten", "cpp"), ("1.0", "0.4")
FAKE, PLANNED, RUN = "of fake tensors", "by task=plan", "by a run"
# Of a report what hangs on when and where it was made.
_OWN_LINES = re.compile(r"same_plans\.py:\d+")  # of this file, where no line of the model's is nearer
OF_THE_RUN = {"stages", "decisions", "guards", "machine", "traffic", "kernel_records", "diagrams"}


def configured(case: str, size: int) -> Any:
    """The run's configuration, as the command line gives it."""
    from hydra import initialize_config_dir

    from aottrain.cli.compose import Composer
    from aottrain.cli.usage import config_folder
    from aottrain.cli.values import HYDRA_BASE
    from aottrain.config.reading import read_model

    recipe, mode, kernel, budget = case.split("/")
    given = [f"recipe={recipe}", f"kernel={kernel}", f"partition.budget={budget}", "decisions=default", "device=cpu"]
    given += ["trainer.num_threads=1", f"data.batch_size={2 * size}", "verify.steps=0", f"parallel={mode}"]
    with initialize_config_dir(str(config_folder()), job_name="aottrain", **HYDRA_BASE):
        job, mistakes = Composer("config", []).check(given, look=False)
    if job is None or mistakes:
        raise SystemExit(f"{case}: {', '.join(map(str, mistakes))}")
    config, _ = read_model(job.config)
    return config


def of_fake_tensors(config: Any, world: Any) -> Any:
    """Weights are on the meta device, and in parts there under `shard`."""
    import torch

    from aottrain.compiler.absent.planning import plan_step, trace_step
    from aottrain.config.extensions.recipes import recipe_of
    from aottrain.data.parts import PartBatches
    from aottrain.tasks.building.build import build_batches
    from aottrain.tasks.building.model import build_model, model_options
    from aottrain.tasks.planning.rows import _options, _state, _without_memory
    from aottrain.trainer.engines import LossModule
    from aottrain.trainer.parallel.shards import Shards
    from aottrain.trainer.preparing import start_streams

    recipe, options = recipe_of(config.recipe), model_options(config)
    start_streams(config.seed, None)
    batches = build_batches(config, recipe, options, torch.device("cpu"))
    if world.size > 1:
        batches = PartBatches(batches, world.rank, world.size)
    model = _without_memory(partial(build_model, recipe, options, config))
    shards = Shards(model, world) if world.mode == "shard" else None
    module = LossModule(model, recipe.loss, config.trainer.precision, getattr(recipe, "weight", None), world).train()
    module.shards = shards
    held = _state(config, module, batches.at(1)).optimizer
    over = world.copies_group if world.num_copies > 1 else None
    asked = dataclasses.replace(_options(config), reserved_bytes=held, reduce_over=over)
    return plan_step(trace_step(module, batches.at(1)[0], asked, None), asked).report


def of_a_job(config: Any, world: Any, runs: bool) -> Any:
    """Weights are there. runs: as a run prepares its first step, which it takes; else as task=plan has it."""
    from aottrain.tasks.building.build import build_job
    from aottrain.trainer.preparing import prepare

    job = build_job(config, world=world)
    if runs:
        prepare(job)
        return job.step.report.graphs[-1]
    return job.step.call.prepare(*job.batches.at(1)[0])


def told(report: Any) -> dict[str, str]:
    """By field of the report, a hash where it is long."""
    fields = sorted({field.name for field in dataclasses.fields(report)} - OF_THE_RUN)
    texts = {name: _OWN_LINES.sub("", repr(getattr(report, name))) for name in fields}
    # The first process decides, and the others take its record.
    texts = {name: text.replace(SOURCES["record"], SOURCES["model"]) for name, text in texts.items()}
    return {
        name: text if len(text) < 40 else f"{hashlib.sha256(text.encode()).hexdigest()[:12]} of {len(text)} characters"
        for name, text in texts.items()
    }


def plan(kind: str, case: str, size: int) -> dict[str, str]:
    """What is told of the plan, or the error in the place of one, which is alike as well."""
    import torch

    from aottrain.errors import AottrainError
    from aottrain.trainer.parallel.link import assume_link, take_link
    from aottrain.trainer.parallel.world import imagined, joined

    config = configured(case, size)
    torch.set_num_threads(1)
    with ExitStack() as inside:
        try:
            if kind == RUN:
                world, config = inside.enter_context(joined(config))
                take_link(world, config, "default", torch.device("cpu"))
            else:
                of = None if config.parallel.name == "none" else size
                world = inside.enter_context(imagined(dataclasses.replace(config.parallel, world=of)))
                assume_link(world, config.parallel)
            return told(of_fake_tensors(config, world) if kind == FAKE else of_a_job(config, world, kind == RUN))
        except AottrainError as error:
            return {"error": str(error)}


def planned(kind: str, cases: list[str], size: int, num_processes: int, timeout_s: float) -> Iterator[tuple[str, Any]]:
    """(case, what is told) of each process that plans these cases."""
    from tests.parallel.groups import run_together

    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(ROOT / "scripts" / "same_plans.py"), "--processes", str(size), "--as", kind, *cases]
        ended = run_together(arguments, Path(folder), num_processes, timeout_s)
    for number, each in enumerate(ended):
        if each.code:
            print(f"{kind}, process {number} ended with code {each.code}: {each.err}", file=sys.stderr)
        yield from (json.loads(line) for line in each.out.splitlines() if line.startswith("["))


def differing(cases: list[str], size: int, timeout_s: float) -> Iterator[tuple[str, str]]:
    """(case, which fields differ, and between whom) of each; "" where none does."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = {case: [] for case in cases}
    for mode, kind in itertools.product(MODES, (FAKE, PLANNED, RUN)):
        own = [case for case in cases if case.split("/")[1] == mode]
        count = size if kind == RUN and mode != "none" else 1
        # Several processes meet once: one that ended a case earlier would meet the others before they ended it.
        for some in [[case] for case in own] if count > 1 else [own] if own else []:
            for case, fields in planned(kind, some, size, count, timeout_s):
                found[case].append((kind, fields))
            for case in some if kind == RUN else ():
                missing = 2 + count - len(found[case])
                yield case, f"{missing} of {2 + count} plans are missing" if missing else difference(found[case])


def difference(sides: list[tuple[str, dict[str, str]]]) -> str:
    first, of_first = sides[0]
    for other, fields in sides[1:]:
        names = [name for name in {**of_first, **fields} if of_first.get(name) != fields.get(name)]
        if names:
            pairs = [f"{name}: {of_first.get(name)} | {fields.get(name)}" for name in names]
            return f"{first} | {other}: {'; '.join(pairs)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="cases whose name has this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds, of all cases of one kind together")
    parser.add_argument("--as", dest="kind", help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        for case in options.cases:
            print(json.dumps([case, plan(options.kind, case, options.processes)]), flush=True)
        return 0
    cases = ["/".join(case) for case in itertools.product(recipe_names(), MODES, KERNELS, BUDGETS)]
    cases = [case for case in cases if not options.only or any(part in case for part in options.only)]
    wrong = 0
    for case, text in differing(cases, options.processes, options.timeout):
        wrong += bool(text)
        print(f"{case}: {text or 'alike'}", flush=True)
    print(f"{len(cases) - wrong} of {len(cases)} cases alike, {options.processes} processes under shard")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
