"""RunConfig: everything a run is told, as frozen dataclasses. Values come from conf/ and the command line.

Every field's type, range and meaning is written here and nowhere else: the sentence after a field is what it does,
the text of its class what the section is for. `python scripts/configuration.py` writes them into conf/README.md and
into the comments of conf/; `python -m aottrain --help` reads them.
`recipe.model` is the recipe module's own frozen dataclass `Options` (recipes/transformer.py): a part owns its options.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aottrain.config.choices import (
    ADAPTERS,
    DATA,
    ENGINES,
    KERNEL_FILES,
    LOGGER_MODES,
    LOGGERS,
    LR_SCHEDULE_FILES,
    ON_BREACH,
    ON_NONFINITE,
    ON_OOM,
    ON_SPIKE,
    OPTIMIZER_FILES,
    OPTIMIZER_KERNELS,
    ORDERS,
    PARTITIONS,
    PRECISIONS,
    PROFILES,
    SAVES,
    TASKS,
    TOKEN_TYPES,
    TOKENIZERS,
    TORCH_BACKENDS,
)
from aottrain.config.extensions.metrics import FORM, LOSS
from aottrain.config.extensions.targets import KINDS
from aottrain.config.parallel import ParallelConfig
from aottrain.config.schema import setting
from aottrain.config.tasks import (
    CompareConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    ParetoConfig,
    PlanConfig,
    SweepConfig,
)
from aottrain.ir.settings.budget import ALLOWED
from aottrain.ir.settings.choices import COSTS, LOSS_HEADS, ON_UNSUPPORTED
from aottrain.ir.settings.decisions import DEFAULT, MEASURED

DEVICES = "one of auto, cpu, cuda, cuda:N; for task=plan also a device's name or a .yaml file"
OPTIONS = "keys of its own, each set by itself"


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What is trained."""

    name: str = "transformer"
    """A module of the folder recipes, or what a target is called."""
    target: str | None = setting(None, form="package.module")
    """A module with Options, build and loss, as recipes/transformer.py has them; needed."""
    model: Any = None
    """The model's own options."""

    @property
    def title(self) -> str:
        """What it is called where it is shown."""
        return self.target if self.name == KINDS["recipe"].option and self.target else self.name


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which few new weights are trained in place of the model's own."""

    name: str = setting("none", one_of=ADAPTERS)
    """What is trained beside the model, which stays as it is; none is the model itself."""
    rank: int = setting(8, low=1)
    """Rows of the smaller matrices, so the rank of the change that a layer can learn."""
    alpha: float = setting(16.0, above=0)
    """The change is multiplied by alpha / rank."""
    dropout: float = setting(0.0, low=0, below=1)
    """Probability that an input of the change is zeroed in training."""
    modules: tuple[str, ...] = setting((), form="patterns of names such as attention.*")
    """Linear layers and convolutions to adapt, by their last names or what they are in; [] is all but tied ones."""
    base: str | None = setting(None, form="a path")
    """Output directory of a run whose newest weights are adapted; null is the model as the recipe builds it."""


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """What the backward pass finds saved and what it recomputes."""

    strategy: str = setting("budget", one_of=PARTITIONS)
    """How forward values are chosen to be saved."""
    budget: Any = setting(1.0, form=f"{ALLOWED}, or null")
    """Peak memory of a step; 1 is the peak of min_cut's plan, 0 the lowest of any; null where the strategy has none."""
    cost: str = setting("roofline", one_of=COSTS)
    """What recompute is priced by: roofline is FLOPs and bytes at measured rates, measured times each distinct call."""
    modules: tuple[str, ...] = setting((), form="module paths such as blocks.*")
    """The blocks, by their last names; [] finds the repeated modules."""
    target: str | None = setting(None, form="package.module:function")
    """A callable aottrain.ForwardValue -> save | recompute | free; needed."""
    path: str | None = setting(None, form="a path")
    """A plan.json that task=plan wrote for a named device, of the same program; needed."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """What the compiled graphs run as."""

    name: str = setting("auto", one_of=KERNEL_FILES)
    """What both graphs run as."""
    target: str | None = setting(None, form="package.module:function")
    """A callable (GraphModule, example_inputs) -> callable that runs both graphs; needed."""
    loss_head: str = setting("auto", one_of=LOSS_HEADS)
    """Linear layer and cross-entropy in chunks of rows or whole; auto is chunked where kernels are generated."""
    cuda_graphs: bool = False
    """On CUDA, record forward and backward once and replay them, which holds more memory."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Who runs a step: our compiler, eager PyTorch (also with checkpointed blocks), torch.compile."""

    name: str = setting("aot", one_of=ENGINES)
    """Who runs forward and backward."""
    on_unsupported: str = setting("eager", one_of=ON_UNSUPPORTED)
    """What cannot be compiled exactly: eager runs it eagerly, counted in the report; error stops the run."""
    backend: str = setting("inductor", one_of=TORCH_BACKENDS)
    """The backend of torch.compile; aot_eager is its partitioner with eager's kernels."""
    activation_memory_budget: float | None = setting(None, low=0, high=1)
    """Torch's own ratio of saved bytes; it draws dropout anew when it recomputes; null is its default."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights are updated."""

    name: str = setting("adamw", one_of=OPTIMIZER_FILES)
    """Torch's AdamW or SGD, Lion as aottrain/ops/optimizers/lion.py has it, or a class of one's own."""
    target: str | None = setting(None, form="package.module:Class")
    """A class of torch.optim.Optimizer; its step runs as it is, uncompiled; needed."""
    options: Any = setting(None, form=OPTIONS)
    """Keyword arguments of the class beside lr and weight_decay."""
    kernel: str = setting("auto", one_of=OPTIMIZER_KERNELS)
    """Update and clipping as one program of generated kernels, or by torch; auto is generated where the graphs are."""
    lr: float = setting(2e-3, above=0)
    """Peak learning rate, before lr_schedule."""
    beta1: float = setting(0.9, low=0, below=1)
    """Decay of the mean of gradients; for lion, how much of the mean goes into a step."""
    beta2: float = setting(0.95, low=0, below=1)
    """Decay of the mean of squared gradients; for lion, of the mean of gradients."""
    eps: float = setting(1e-8, above=0)
    """Added to the denominator."""
    momentum: float = setting(0.9, low=0, below=1)
    """Decay of the running sum of gradients; 0 is none."""
    weight_decay: float = setting(0.1, low=0)
    """Decay of matrices, decoupled from the gradient but for sgd, where it is added to it; a class may take none."""
    decay_norms_and_biases: bool = False
    """Whether weight_decay holds for parameters of fewer than two dimensions, too: norms' scales and biases."""
    lr_factors: tuple[str, ...] = setting((), form="pattern:factor, as token_embedding:0.1")
    """Parts of the rate for parameters by their names' last parts or what they are in; of several the last counts."""
    layer_decay: float | None = setting(None, above=0, high=1)
    """The rate of each repeated block as a fraction of the next one's; null is 1."""
    clip_norm: float | None = setting(1.0, above=0)
    """Gradients are scaled down to at most this global norm; null is no clipping."""

    @property
    def title(self) -> str:
        """What it is called where it is shown."""
        return self.target or self.name


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """How the learning rate changes over the run."""

    name: str = setting("cosine", one_of=LR_SCHEDULE_FILES)
    """The curve after the warm-up."""
    target: str | None = setting(None, form="package.module:function")
    """A function (step, total_steps) -> factor of optimizer.lr, its steps counted from 1; needed."""
    options: Any = setting(None, form=OPTIONS)
    """Keyword arguments of the function beside step and total_steps."""
    warmup_steps: int = setting(100, low=0)
    """Steps from 0 up to optimizer.lr."""
    min_lr_ratio: float = setting(0.1, low=0, high=1)
    """What is left of optimizer.lr at the end, as a fraction."""
    decay_fraction: float = setting(0.2, above=0, high=1)
    """The last part of the steps after the warm-up, as a fraction, in which the rate falls."""
    total_steps: int | None = setting(None, low=1)
    """Step at which the end is reached, above warmup_steps; null is trainer.steps."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What it is trained on."""

    name: str = setting("text", one_of=DATA)
    """How the data is read."""
    target: str | None = setting(None, form="package.module:function")
    """A function that gives a data set (torch's: a length, and an example for an index) or a pair of them; needed."""
    options: Any = setting(None, form=OPTIONS)
    """Keyword arguments of the function that gives it."""
    path: str | None = setting(None, form="a path")
    """A file or a folder; null is what comes with Python for text, for images with scikit-learn (8 x 8 digits)."""
    batch_size: int = setting(16, low=1)
    """Examples (sequences, images) in a micro-batch; a step sees trainer.accumulate micro-batches."""
    held_out: float = setting(0.1, above=0, below=1)
    """The fraction never trained on but evaluated: the last part of text, tokens or a data set, else drawn."""
    order: str = setting("random", one_of=ORDERS)
    """random draws each example anew from all; epochs gives each once before any again, shuffled for each epoch."""
    tokenizer: str | None = setting(None, form=f"{', '.join(TOKENIZERS)}, the path of a tokenizer.json")
    """What tokens stand for: null is the model's own or bytes, for data=tokens nothing; bpe learns from the text."""
    key: str = "text"
    """Where lines of JSON and tables have their text."""
    packing: bool = False
    """Whole documents share rows, in which none sees another; false is windows of the text, from anywhere in it."""
    dtype: str = setting("auto", one_of=("auto", *TOKEN_TYPES))
    """Type of the numbers in a file of tokens; auto knows the header of llm.c and takes other files for uint16."""
    x: tuple[str, ...] = setting((), form="columns or arrays")
    """What goes in; [] is x, or x_train and x_test, of an .npz file, and all columns but y of a .csv file."""
    y: str | None = None
    """What is to be found: a column or array; null is y, or y_train and y_test."""
    pad: int = setting(0, low=0)
    """Pixels around a trained image, of which a part of its own size is cut out at random; 0 is none."""
    flip: bool = False
    """Whether every second trained image, at random, is turned left to right."""
    mean: tuple[float, ...] | None = setting(None, form="numbers")
    """Of each channel, subtracted from pixels between 0 and 1; null is measured on images that are trained on."""
    std: tuple[float, ...] | None = setting(None, above=0)
    """Of each channel, what pixels are divided by after that; null is measured, too."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Where figures go besides metrics.csv and summary.json."""

    name: str = setting("wandb", one_of=LOGGERS)
    """Where figures go."""
    mode: str = setting("offline", one_of=LOGGER_MODES)
    """offline writes files for `wandb sync`, online sends at once and needs `wandb login`, disabled does neither."""
    uri: str | None = None
    """Where MLflow keeps runs, a folder or an address; null is MLFLOW_TRACKING_URI, or mlruns in the current folder."""
    project: str = "aottrain"
    """Project in wandb, experiment in MLflow."""
    group: str | None = None
    """Runs with the same group are overlaid; null is the recipe's name, or the sweep's for a sweep's jobs."""
    run_name: str | None = None
    """How wandb or MLflow calls this run; null makes a name from engine, kernel, partition and seed."""
    tags: tuple[str, ...] = ()
    """Labels to filter runs by."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop: steps, precision, how often to evaluate and save."""

    steps: int = setting(500, low=1)
    """Optimizer steps of the run."""
    accumulate: int = setting(1, low=1)
    """Micro-batches whose gradients are averaged into one step."""
    precision: str = setting("fp32", one_of=PRECISIONS)
    """bf16: autocast to bfloat16; bf16_weights: matrices, too; fp16: losses scaled, on CUDA; fp8: float8 products."""
    freeze: tuple[str, ...] = setting((), form="patterns of names such as token_embedding or blocks.0")
    """Parameters that are not trained, by their names' last parts or the modules they are in."""
    ema: float | None = setting(None, above=0, below=1)
    """How much of the mean of weights stays at each step; held-out data, samples and tasks see it; null is no mean."""
    log_every: int = setting(10, low=1)
    """Steps between two printed lines of figures; metrics.csv has a row for every step."""
    eval_every: int = setting(100, low=0)
    """Steps between two evaluations on held-out data; 0 is at the end only."""
    eval_batches: int = setting(16, low=1)
    """Batches of one evaluation."""
    patience: int | None = setting(None, low=1)
    """Evaluations in turn none of which is better (judge_by) after which the run ends; null is trainer.steps alone."""
    save_every: int = setting(0, low=0)
    """Steps between two checkpoints; 0 is at the end only."""
    save: str = setting("now", one_of=SAVES)
    """now: the next step waits; background: a thread writes a copy in the host's memory, but for the last one."""
    keep_last: int = setting(2, low=1)
    """How many of the newest checkpoints stay: one to go on from, the others where that one is damaged."""
    keep_every: int = setting(0, low=0)
    """Checkpoints of these steps stay for ever, a multiple of trainer.save_every; 0 is none."""
    keep_best: bool = False
    """The one with the best held-out figure (judge_by) stays, too, linked as checkpoints/best; each is evaluated."""
    judge_by: str = setting(LOSS, form=FORM)
    """What patience and keep_best judge by: the held-out loss, lowest is best, or a metric, as accuracy:max."""
    on_nonfinite: str = setting("raise", one_of=ON_NONFINITE)
    """Loss or gradient norm not finite: raise ends the run, skip leaves the step out, rollback goes back to a copy."""
    on_spike: str = setting("ignore", one_of=ON_SPIKE)
    """The same of a loss above the median of the last 50 by more than spike_deviations; ignore does not look."""
    spike_deviations: float = setting(10.0, above=0)
    """How far above is a spike, in standard deviations, as the median deviation of the last 50 losses gives them."""
    max_skips: int = setting(10, low=1)
    """The most steps of a run that skip leaves out; on CUDA they are counted at steps that are logged or saved."""
    max_rollbacks: int = setting(3, low=1)
    """How often a run may go back; the batches from the copy to the bad step are then left out."""
    rollback_every: int = setting(50, low=1)
    """Steps between two copies in the host's memory of weights, optimizer and random numbers, where rollback is on."""
    on_oom: str = setting("replan", one_of=ON_OOM)
    """Memory runs out: replan takes the plan of next lower peak, then smaller micro-batches, and redoes the step."""
    sample_bytes: int = setting(300, low=0)
    """Bytes of text that the model writes at the end; 0 is none."""
    sample_at_evals: bool = False
    """Whether it writes such a text at each evaluation on the way, too, into samples.jsonl."""
    num_threads: int | None = setting(None, low=1, high=4096)
    """CPU threads of PyTorch; null is PyTorch's own choice."""
    deterministic: bool = False
    """The same bits on every machine, or a line that says why not; decisions=default, num_threads=1 unless given."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """The check of the first steps against eager, and of some in flight."""

    steps: int = setting(1, low=0)
    """How many steps are checked; 0 is none."""
    loss_tolerance: float = setting(1e-5, above=0)
    """Largest relative difference of the loss, beyond what rounding explains."""
    grad_tolerance: float = setting(1e-4, above=0)
    """Largest relative difference of a gradient's norm and of its elements, beyond what rounding explains."""
    bisect: bool = False
    """Where a check fails, find the compiler's stage and node that differ first."""
    every: int = setting(0, low=0)
    """Steps between two checks in flight, after the first ones; 0 is none."""
    share: float = setting(0.01, above=0, high=1)
    """The most of a run's time that checks in flight may take; one that would take more waits for its turn."""
    on_breach: str = setting("raise", one_of=ON_BREACH)
    """A check in flight fails: raise ends the run; fallback runs PyTorch's operators in the plan, then eager."""


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How speed and memory are measured."""

    warmup_steps: int = setting(5, low=0)
    """First steps that are left out of the figures."""
    memory: bool = True
    """Whether peak memory is measured."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What belongs to no section."""

    task: str = setting("train", one_of=TASKS)
    """What to do; compare, plan, pareto try settings, tour shows the compiler, measure this machine, others a run."""
    seed: int = setting(1234, low=0, below=2**63)
    """Of weights, data order and dropout; the same seed gives the same run where decisions are the same."""
    device: str = setting("auto", form=DEVICES)
    """Where it runs; auto is CUDA where there is one, else the CPU; or for which it is planned, as h100-sxm."""
    resume: str | None = setting(None, form="a path, auto")
    """Output directory of a run to go on from, with its settings but for what is given; auto is this run's own."""
    resume_override: tuple[str, ...] = setting((), form="keys as optimizer.lr, or sections")
    """Settings that may be others than in the checkpoint that resume goes on from, by their keys; each is shown."""
    decisions: str = setting(MEASURED, form=f"{MEASURED}, {DEFAULT}, or a path")
    """Who chooses what pays: measured is the clock, default a model the same everywhere, a path that run's record."""
    profile: str | None = setting(None, one_of=PROFILES)
    """step: three steps after the warm-up in trace.json; memory: their allocations, in memory.json or memory.pickle."""
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    pareto: ParetoConfig = field(default_factory=ParetoConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    output_dir: str = "."
