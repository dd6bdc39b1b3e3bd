"""What a run prints, and how it exits, where its input is wrong or its machine fails: a table.

    python scripts/faults.py                    # all of them, a minute or two of a processor; markdown
    python scripts/faults.py --only disk cache  # those whose names have one of these words
    python scripts/faults.py --write            # all, into scripts/README.md

Each is a small training by the command line in a process of its own, in a folder of its own. Right is: one line for
each mistake and exit code 2 before any work; or a run that goes on, with one warning at most for the fault; or, where
the fault is met on the way and cannot be passed over, one line and exit code 1. A traceback is always wrong. Exit code
1 where one of them is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aottrain.cli import main as command_line  # noqa: E402
from scripts.faults_of_machines import MACHINE  # noqa: E402
from scripts.forking import forked  # noqa: E402

SMALL = (
    "recipe.model.num_layers=1", "recipe.model.width=16", "recipe.model.num_heads=2", "recipe.model.context=16",
    "data.batch_size=4", "trainer.steps=4", "trainer.save_every=2", "trainer.eval_every=0", "trainer.eval_batches=1",
    "trainer.sample_bytes=0", "trainer.num_threads=1", "measure.memory=false", "lr_schedule.warmup_steps=1",
    "decisions=default",
)  # fmt: skip
CSV = ("logger=csv",)
EAGER = ("engine=eager",)
_LONGEST_S = 300
_SHOWN = 150
README = Path(__file__).resolve().with_name("README.md")
_BEGIN, _END = "<!-- faults -->\n", "<!-- end of faults -->\n"


@dataclass(frozen=True)
class Printed:
    """What a process left."""

    code: int
    text: str

    @property
    def mistakes(self) -> list[str]:
        """Lines of what was refused."""
        head, found, rest = self.text.rpartition("in the configuration\n")
        if found:
            return [line.strip() for line in rest.splitlines() if line.startswith("  ")]
        lines = self.text.splitlines()
        return [line.removeprefix("aottrain: ") for line in lines if re.match(r"aottrain: (?!\d)", line)]

    @property
    def warnings(self) -> list[str]:
        words = r"warning|going on without|passing over|no generated kernels|memory ran out|cannot|without kernels"
        return [line for line in self.text.splitlines() if re.search(words, line)]


WRONG = """
trainer.stesp=3 | trainer.steps=-1 | trainer.steps=ten | trainer.steps=1.5 | trainer.precision=int8 | seed=-1
seed=x | optimizer=adm | optimizer.lr=0 | optimizer.lr=nan | optimizer.beta1=1 | optimizer.target=os:system
optimizer.target=nowhere:Class | lr_schedule=cos | lr_schedule.warmup_steps=-1 | lr_schedule.total_steps=1
partition.budget=2 | partition.budget=6gigs | partition.budget=1kB | partition=min_cut partition.budget=0.5
partition=policy | kernel=cuda | kernel.target=nowhere:f | kernel=custom | engine=jax | engine.backend=nvfuser
data=csv | data.path=nowhere.txt | data.path=empty.txt | data.path=empty | data.path=short.txt | data=tokens
data=tokens data.path=short.txt data.dtype=uint64 | data=arrays data.path=bad.npz | data=arrays data.path=bad.csv
data=images data.path=short.txt recipe=resnet | data.path=bad.jsonl data.key=body | data.tokenizer=nowhere.json
data.batch_size=0 | data.batch_size=true | data.held_out=1 | data.order=sorted
data.x=[a] data.path=short.txt data=arrays | recipe=gpt | recipe.target=nowhere | recipe.target=broken_recipe
recipe.target=empty_recipe | recipe.model.depth=3 | recipe.model.num_heads=3 | recipe.model.dropout=1
recipe.model.vocab_size=10 | recipe=custom | size=gpt9 | device=tpu | device=cuda:7 | resume=nowhere
resume=short.txt | resume=empty | resume=auto resume_override=[lr] steps=1 | adapter=lora adapter.base=nowhere
adapter=lora adapter.modules=[nothing] | trainer.freeze=[nothing] | optimizer.lr_factors=[head]
trainer.keep_every=3 | trainer.save=later | trainer.patience=2 trainer.eval_every=0 | logger=neptune
logger.mode=live | logger=wandb logger.project= | task=trian | task=eval | task=export export.run=nowhere
task=compare compare.engines=[] | task=pareto pareto.budgets=[2] | decisions=nowhere | profile=all | --dry-run
-m seed=1,x | seed=1,2 | -m sweep.search=optuna seed=1 | hydra.run.dir=short.txt/x | hydra/launcher=joblib | =3
train | verify.share=0
"""

FILES = {
    "empty.txt": b"",
    "short.txt": b"too short",
    "bad.npz": b"PK\x03\x04 not an archive",
    "bad.csv": b"a,b\n1,x\n2\n",
    "bad.jsonl": b'{"text": "a"}\n{"text": \n',
    "broken_recipe.py": b"raise ValueError('planted')\n",
    "empty_recipe.py": b"",
}


def run(arguments: list[str], fault: Callable[[], object] = lambda: None) -> Printed:
    """The command line in a fork of this process, which has imported all, after the fault has been planted there."""
    output = Path("output.txt")
    with contextlib.suppress(FileNotFoundError):
        output.unlink()

    def call() -> int:
        signal.alarm(_LONGEST_S)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        replaced = fault()
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        return command_line(arguments if replaced is None else replaced(arguments))

    pid = forked(call, str(output))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Printed(code, output.read_text(encoding="utf-8", errors="replace"))


def judged_input(printed: Printed) -> str:
    """What is wrong with how wrong input was answered."""
    if "Traceback" in printed.text:
        return "traceback"
    if printed.code != 2:
        return f"exit code {printed.code}, not 2"
    return "" if printed.mistakes else "no line says what is wrong"


def judged_fault(printed: Printed, codes: tuple[int, ...]) -> str:
    if "Traceback" in printed.text:
        return "traceback"
    if printed.code not in codes:
        return f"exit code {printed.code}, not {' or '.join(map(str, codes))}"
    if printed.code in (1, 2) and len(printed.mistakes) != 1:
        return f"{len(printed.mistakes)} lines say what is wrong"
    if printed.code == 0 and len(set(printed.warnings)) > 1:
        return f"{len(printed.warnings)} warnings"
    return ""


def row(what: str, printed: Printed, wrong: str) -> str:
    lines = printed.mistakes if printed.code else list(dict.fromkeys(printed.warnings))
    lines = [line.replace(f"{os.getcwd()}/", "").replace(os.path.relpath(os.getcwd(), "/"), "") for line in lines]
    shown = [line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..." for line in lines]
    said = "<br>".join(f"`{line}`".replace("|", "\\|") for line in shown) or "nothing"
    what = f"`{what}`".replace("|", "\\|")
    return f"| {what} | {printed.code} | {said} |" + (f" **WRONG: {wrong}**" if wrong else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("AOTTRAIN_CACHE_DIR", str(Path.home() / ".cache" / "aottrain"))
    wrong, counts, told = [], [], []
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        with contextlib.redirect_stdout(io.StringIO()):
            command_line([*SMALL, *CSV, "hydra.run.dir=warm"])  # forks have all modules then
        shutil.rmtree("warm")
        for file, content in FILES.items():
            Path(file).write_bytes(content)
        Path("empty").mkdir()
        lines = [line.strip() for line in WRONG.replace("\n", " | ").split(" | ") if line.strip()]
        tables: list[tuple[str, list[tuple[str, Callable[[], tuple[Printed, str]]]]]] = [
            ("Wrong input", [(line, _input(line)) for line in lines]),
            ("A machine that fails", [(title, _fault(each)) for title, each in MACHINE.items()]),
        ]
        for title, tries in tables:
            tries = [each for each in tries if any(word in each[0] for word in given.only)]
            told.append(f"\n| {title} | exit code | says |\n|---|---|---|")
            print(told[-1])
            for what, attempt in tries:
                printed, problem = attempt()
                told.append(row(what, printed, problem))
                print(told[-1], flush=True)
                if problem:
                    wrong.append(what)
                    print(printed.text[-1500:], file=sys.stderr)
            counts.append(f"{len(tries)} of {title.lower()}")
    told.append(f"\n{', '.join(counts)}; {len(wrong)} wrong{': ' + '; '.join(wrong) if wrong else ''}")
    print(told[-1])
    if given.write:
        head, _, rest = README.read_text(encoding="utf-8").partition(_BEGIN)
        table = "\n".join(told).strip()
        README.write_text(f"{head}{_BEGIN}{table}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")
    return 1 if wrong else 0


def _input(line: str) -> Callable[[], tuple[Printed, str]]:
    def attempt() -> tuple[Printed, str]:
        own = [*(() if "logger" in line or line.startswith("-") else CSV), *line.split()]
        keys = {text.partition("=")[0] for text in own}
        other = "recipe=" in line or "recipe.target" in line or "size" in line or "task=" in line
        small = [text for text in SMALL if text.partition("=")[0] not in keys and not (other and "recipe." in text)]
        printed = run([*small, *own])
        shutil.rmtree("outputs", ignore_errors=True)
        return printed, judged_input(printed)

    return attempt


def _fault(fault: object) -> Callable[[], tuple[Printed, str]]:
    def attempt() -> tuple[Printed, str]:
        shutil.rmtree("run", ignore_errors=True)
        engine = (f"kernel={fault.kernel}",) if fault.engine == "aot" else EAGER
        logger = () if fault.logger == "wandb" else CSV
        for _ in range(fault.before):
            run([*SMALL, *CSV, *EAGER, "hydra.run.dir=run"])
        ended = fault.prepare() if fault.prepare else None
        try:
            more = [*SMALL, *engine, *logger, *fault.arguments]
            if not any(text.startswith("hydra.run.dir") for text in fault.arguments):
                more.append("hydra.run.dir=run")
            printed = run(more, fault.plant)
        finally:
            if ended is not None:
                ended()
        return printed, judged_fault(printed, fault.codes)

    return attempt


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
