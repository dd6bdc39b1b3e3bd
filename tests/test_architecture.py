"""The shape of the code, checked: who imports whom, where private torch may be used, how long files and functions are.

Every check is a function of a tree's root, so that each has a test which plants a violation and sees it caught.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
CODE = ("aottrain", "recipes", "scripts", "conf")
MAX_FILE_LINES = 400
MAX_MODULES = 12
MAX_FUNCTION_LINES = 80
LONG_FUNCTION_LINES = 40

PRIVATE_TORCH_MODULES = {
    "aottrain/compiler/capture/capture.py",
    "aottrain/compiler/capture/recording.py",
    "aottrain/compiler/joint/analysis.py",
    "aottrain/compiler/joint/joint.py",
    "aottrain/compiler/joint/functional.py",
    "aottrain/compat.py",
    "aottrain/compat_checkpoint.py",
    "aottrain/compat_dispatch.py",
    "aottrain/compat_distributed.py",
    "aottrain/compat_dynamo.py",
    "aottrain/compat_dynamo_inputs.py",
    "aottrain/peers.py",
    "aottrain/trainer/reliability/profile.py",  # torch.cuda.memory's snapshots, which are documented under these names
}
# The one place that runs a peer's compiler on our graphs, for kernel=inductor.
PEER = "aottrain/peers.py"
# What this project replaces: using it would make the compiler a wrapper around torch's own.
# What a choice is made by is measured in one place; the others only tell a person how long something took.
CLOCKS = {
    "aottrain/measure/stopwatch.py",
    "aottrain/compiler/stages.py",
    "aottrain/metrics/mlflow_sink.py",
    "aottrain/metrics/throughput.py",
    "aottrain/trainer/parallel/meeting.py",
    "aottrain/trainer/parallel/pieces.py",
    "aottrain/trainer/parallel/watch.py",
    "aottrain/trainer/preparing.py",
    "aottrain/trainer/progress.py",
    "aottrain/toolchain/ending.py",  # how long it waits
    "aottrain/trainer/reliability/sentinel.py",
}
CLOCK = re.compile(
    r"(?:time\.(?:time|perf_counter|monotonic|process_time|thread_time|clock_gettime)(?:_ns)?|timeit(?:\..*)?"
    r"|torch\.utils\.benchmark(?:\..*)?|datetime(?:\.datetime)?\.(?:now|utcnow))"
)
FORBIDDEN_TORCH = (
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "functorch.compile",
)
# In pieces, so that this file passes its own checks.
UNFINISHED = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b")
UNFINISHED_NAMES = {"NotImplemented" + "Error", "x" + "fail"}
MACHINE_ROOTS = ["home", "root", "work", "Users", "opt", "mnt", "tmp"]
MACHINE_PATH = re.compile(r"(?<![\w.$}/~:-])/(?:" + "|".join(MACHINE_ROOTS) + r")/\w")


def files(root: Path, *folders: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path


def parse(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain that starts at a name, "" for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, by statement or `import_module`, and of every attribute chain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def is_private_torch(name: str) -> bool:
    # torch.ops.aten._softmax is an operator's public name, whatever its first letter.
    if not name.startswith("torch.") or name.startswith("torch.ops."):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_torch_uses(root: Path) -> list[str]:
    found = []
    for path in files(root, "aottrain", "recipes", "scripts"):
        where = path.relative_to(root).as_posix()
        if where not in PRIVATE_TORCH_MODULES:
            names = {(line, name) for line, name in used_names(parse(path)) if is_private_torch(name)}
            found += [f"{where}:{line}: {name}" for line, name in sorted(names)]
    return found


def forbidden_torch_uses(root: Path) -> list[str]:
    found = []
    for path in files(root, "aottrain", "recipes", "scripts"):
        if path.relative_to(root).as_posix() == PEER:
            continue
        for line, name in used_names(parse(path)):
            if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN_TORCH):
                found.append(f"{path.relative_to(root)}:{line}: {name}")
    return found


def clock_reads(root: Path) -> list[str]:
    """Modules in which a choice could hang on a time that is in no record of decisions."""
    found = []
    for path in files(root, "aottrain", "recipes"):
        where = path.relative_to(root).as_posix()
        if where not in CLOCKS:
            found += [f"{where}:{line}: {name}" for line, name in used_names(parse(path)) if CLOCK.fullmatch(name)]
    return found


def choices_by_the_environment(root: Path) -> list[str]:
    """The environment says in one place that nothing is measured."""
    paths = (path for path in files(root, "aottrain", "recipes") if path.name != "decisions.py")
    return [str(path.relative_to(root)) for path in paths if '"AOTTRAIN_RATES"' in path.read_text(encoding="utf-8")]


def unnamed_encodings(root: Path) -> list[str]:
    """Text files that are read or written in whatever encoding the machine is set to: not every one has letters."""
    found = []
    for path in files(root, "aottrain", "recipes"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and is_text_file_call(node):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)[:60]}")
    return found


def is_text_file_call(call: ast.Call) -> bool:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if "encoding" in named or dotted(call.func) in ("os.open", "self.open"):
        return False
    if method in ("read_text", "write_text"):
        return True
    if method != "open" and dotted(call.func) != "open":
        return False
    position = 0 if method else 1
    mode = named.get("mode") or (call.args[position] if len(call.args) > position else ast.Constant("r"))
    return isinstance(mode, ast.Constant) and "b" not in str(mode.value)


def long_files(root: Path) -> list[str]:
    lengths = (
        (path, len(path.read_text(encoding="utf-8").splitlines()))
        for path in files(root, *CODE, suffixes=(".py", ".sh", ".yaml"))
    )
    return [f"{path.relative_to(root)}: {lines} lines" for path, lines in lengths if lines > MAX_FILE_LINES]


def full_folders(root: Path) -> list[str]:
    """What stands beside `__init__.py`, one subject for each folder."""
    modules = Counter(path.parent for path in files(root, "aottrain") if path.name != "__init__.py")
    return [f"{path.relative_to(root)}: {count} modules" for path, count in modules.items() if count > MAX_MODULES]


def function_lengths(root: Path) -> list[tuple[int, str]]:
    lengths = []
    for path in files(root, *CODE):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                lengths.append((lines, f"{path.relative_to(root)}:{node.lineno}: {node.name}"))
    return sorted(lengths, reverse=True)


def long_functions(root: Path) -> list[str]:
    return [f"{where}: {lines} lines" for lines, where in function_lengths(root) if lines > MAX_FUNCTION_LINES]


def unfinished_work(root: Path) -> list[str]:
    found = []
    for path in files(root, *CODE, "tests", ".ci", suffixes=(".py", ".sh", ".yaml", ".toml", "")):
        if not path.is_file():
            continue
        where, text = path.relative_to(root), path.read_text(encoding="utf-8")
        found += [
            f"{where}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if UNFINISHED.search(line)
        ]
        if path.suffix == ".py":
            found += [f"{where}:{line}: {what}" for line, what in unfinished_nodes(ast.parse(text))]
    return found


def unfinished_nodes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in UNFINISHED_NAMES:
            yield node.lineno, name
        if isinstance(node, ast.Call) and dotted(node.func) == "pytest.skip" and not (node.args or node.keywords):
            yield node.lineno, "a skip without a reason"
        if isinstance(node, ast.Attribute) and dotted(node) == "pytest.mark.skip":
            yield node.lineno, "a test that never runs"


def machine_paths(root: Path) -> list[str]:
    found = []
    paths = [*files(root, *CODE, "tests", ".ci", suffixes=(".py", ".sh", ".yaml", "")), root / "README.md"]
    for path in (*paths, root / "pyproject.toml"):
        if path.is_file():
            lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            found += [
                f"{path.relative_to(root)}:{number}: {line.strip()}"
                for number, line in lines
                if MACHINE_PATH.search(line)
            ]
    return found


def dataclass_fields(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(mark) for mark in node.decorator_list):
            yield from (
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            )


def yaml_keys(node: object, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in ("hydra", "defaults", "_target_"):
                yield str(key)
                yield from yaml_keys(value)


def dead_keys(root: Path) -> list[str]:
    """YAML keys that no dataclass has, and configuration fields that nothing outside aottrain/config reads."""
    config = root / "aottrain/config/run.py"
    sections = [path for name in ("run", "parallel", "tasks") if (path := config.with_stem(name)).exists()]
    recipes = list(files(root, "recipes"))
    readers = [*(path for path in files(root, "aottrain") if path.parent != config.parent), *recipes]
    fields = {name for path in (*sections, *recipes) for name in dataclass_fields(path)}
    read = {
        node.attr
        for path in readers
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    found = [
        f"{path.relative_to(root)}: {name} is read by nothing"
        for path in sections
        for name in sorted(set(dataclass_fields(path)) - read)
    ]
    for path in files(root, "conf", suffixes=(".yaml",)):
        for key in yaml_keys(yaml.safe_load(path.read_text(encoding="utf-8"))):
            if key not in fields:
                found.append(f"{path.relative_to(root)}: no section of the configuration has {key}")
            elif key not in read:
                found.append(f"{path.relative_to(root)}: {key} is read by nothing")
    return found


def imported_contracts(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


CHECKS = (
    private_torch_uses,
    clock_reads,
    choices_by_the_environment,
    forbidden_torch_uses,
    unnamed_encodings,
    long_files,
    full_folders,
    long_functions,
    unfinished_work,
    machine_paths,
    dead_keys,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_has_no_violation(check):
    assert not check(ROOT)


def test_import_contracts_hold():
    result = imported_contracts(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_most_functions_are_short(record_property):
    lengths = [lines for lines, _ in function_lengths(ROOT)]
    share = sum(lines > LONG_FUNCTION_LINES for lines in lengths) / len(lengths)
    record_property("share_of_long_functions", share)
    print(f"{share:.1%} of {len(lengths)} functions are over {LONG_FUNCTION_LINES} lines")
    assert share < 0.1


def test_importing_the_package_is_light():
    script = "import sys, aottrain; print(*(m for m in ('hydra', 'omegaconf', 'wandb', 'triton') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


VIOLATIONS = [
    (private_torch_uses, "aottrain/trainer/loop.py", "import torch._dynamo\n"),
    (private_torch_uses, "aottrain/compiler/options.py", "from torch import _C\n"),
    (private_torch_uses, "aottrain/runtime/executor.py", "import torch\nx = torch._foreach_add([], 1)\n"),
    (forbidden_torch_uses, "aottrain/compiler/joint/joint.py", "from torch._functorch import partitioners\n"),
    (forbidden_torch_uses, "aottrain/compiler/joint/joint.py", "def f():\n    import torch._inductor.compile_fx\n"),
    (forbidden_torch_uses, "aottrain/compat.py", "x = importlib.import_module('functorch.compile')\n"),
    (clock_reads, "aottrain/compiler/passes/choose_layouts.py", "import time\nx = time.perf_counter()\n"),
    (clock_reads, "aottrain/measure/rates.py", "from time import monotonic_ns\n"),
    (clock_reads, "aottrain/compiler/frontends/api.py", "from torch.utils.benchmark import Timer\n"),
    (choices_by_the_environment, "aottrain/measure/rates.py", 'x = os.environ.get("AOTTRAIN_RATES")\n'),
    (unnamed_encodings, "aottrain/ir/text.py", "with open('x') as file:\n    pass\n"),
    (unnamed_encodings, "aottrain/ir/text.py", "path.open('w')\n"),
    (unnamed_encodings, "recipes/mlp.py", "path.write_text('x')\n"),
    (long_files, "aottrain/ir/ops.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (long_functions, "recipes/mlp.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (unfinished_work, "conf/config.yaml", "seed: 1  # TO" + "DO: choose\n"),
    (unfinished_work, "aottrain/cli/command.py", "def f():\n    raise NotImplemented" + "Error\n"),
    (unfinished_work, "tests/test_x.py", "import pytest\ndef test_x():\n    pytest.sk" + "ip()\n"),
    (unfinished_work, "tests/test_x.py", "import pytest\n@pytest.mark.x" + "fail\ndef test_x(): pass\n"),
    (machine_paths, "README.md", "run /ho" + "me/me/clone/scripts/train.sh\n"),
    (dead_keys, "conf/config.yaml", "steps: 3\nstpes: 4\n"),
    (dead_keys, "aottrain/config/run.py", "@dataclass\nclass RunConfig:\n    unread: int = 1\n"),
]


@pytest.mark.parametrize(("check", "path", "text"), VIOLATIONS)
def test_a_planted_violation_is_caught(tmp_path, check, path, text):
    config = "@dataclass\nclass RunConfig:\n    steps: int = 1\n"
    for name, content in (
        ("aottrain/config/run.py", config),
        ("aottrain/main.py", "def f(c):\n    return c.steps\n"),
        ("conf/config.yaml", "steps: 2\n"),
    ):
        write(tmp_path / name, content)
    assert not check(tmp_path)
    write(tmp_path / path, text)
    assert check(tmp_path)


PLANTED_IMPORTS = [
    ("aottrain/runtime/function.py", "import aottrain.compiler", "aottrain.compiler"),
    ("aottrain/trainer/loop.py", "from aottrain import compiler", "aottrain.compiler"),
    ("aottrain/compiler/options.py", "from aottrain.trainer import loop", "aottrain.trainer.loop"),
    ("aottrain/compiler/passes/sums.py", "from aottrain.compiler import pipeline", "aottrain.compiler.pipeline"),
    (
        "aottrain/compiler/graphs/text.py",
        "from aottrain.compiler.partition import split",
        "aottrain.compiler.partition",
    ),
    ("aottrain/measure/clock.py", "from aottrain import ops", "aottrain.ops"),
    ("aottrain/compiler/frontends/api.py", "from aottrain.config.run import RunConfig", "aottrain.config.run"),
    ("aottrain/ir/ops.py", "def f():\n    import aottrain.ops.random.mode", "aottrain.ops.random.mode"),
    ("aottrain/tasks/train.py", "import aottrain.cli", "aottrain.cli"),
    ("aottrain/report/html.py", "from omegaconf import OmegaConf", "omegaconf"),
    ("aottrain/runtime/executor.py", "import triton", "triton"),
    ("aottrain/compat.py", "import aottrain.errors", "aottrain.errors"),
    ("recipes/mlp.py", "import aottrain.compiler", "aottrain.compiler"),
]


def skeleton(root: Path) -> None:
    """The package's module names, empty, under the real contracts."""
    write(root / "pyproject.toml", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for path in ROOT.glob("aottrain/**/__init__.py"):
        write(root / path.relative_to(ROOT), "")
    modules = ("__main__", "compat", "compat_checkpoint", "compat_dispatch", "compat_dynamo", "counted")
    modules += "compat_dynamo_inputs", "errors", "peers", "step", "versions"
    alone = "compiler/options", "compiler/pipeline", "compiler/reporting", "compiler/stages", "compiler/traffic"
    for module in (*modules, *alone):
        write(root / "aottrain" / f"{module}.py", "")
    for module in ("config/run", "ops/random/mode", "trainer/loop"):
        write(root / "aottrain" / f"{module}.py", "")
    write(root / "aottrain/runtime/cuda/triton_launch.py", "import triton")
    write(root / "aottrain/cli/__init__.py", "")
    write(root / "aottrain/cli/compose.py", "import hydra")
    write(root / "aottrain/ir/verify.py", "import aottrain.compat")
    write(root / "recipes/__init__.py", "")


def test_a_folder_with_a_module_too_many_is_caught(tmp_path):
    for number in range(MAX_MODULES):
        write(tmp_path / f"aottrain/trainer/module{number}.py", "")
    write(tmp_path / "aottrain/trainer/__init__.py", "")
    assert not full_folders(tmp_path)
    write(tmp_path / "aottrain/trainer/one_more.py", "")
    assert full_folders(tmp_path) == [f"aottrain/trainer: {MAX_MODULES + 1} modules"]


def test_the_wheel_has_every_package():
    """setuptools takes them by name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = set(re.findall(r'"([\w.]+)"', text.split("packages = [")[1].split("]")[0]))
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("aottrain/**/__init__.py")}
    assert named == found | {"aottrain.conf", "aottrain.recipes"}


def test_the_import_contracts_accept_what_is_meant(tmp_path):
    skeleton(tmp_path)
    result = imported_contracts(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_planted_imports_are_caught(tmp_path):
    """All at once, since each run takes seconds: each has to be named as an import that breaks a contract."""
    skeleton(tmp_path)
    for path, text, _ in PLANTED_IMPORTS:
        write(tmp_path / path, text)
    result = imported_contracts(tmp_path)
    assert result.returncode == 1
    broken = result.stdout.partition("Broken contracts")[2]
    for path, _, imported in PLANTED_IMPORTS:
        importer = path.removesuffix(".py").replace("/", ".")
        assert re.search(rf"^-? +{re.escape(f'{importer} -> {imported}')} ", broken, re.M), (path, result.stdout)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
